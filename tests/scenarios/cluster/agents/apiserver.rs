//! Requests of kube-apiserver 1.36 to kubelets through port 10263, as measured. They carry the Host
//! and the fields of its users. Their TLS has the node's name or not, which depends on
//! `--kubelet-certificate-authority` of kube-apiserver.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use futures_util::future::try_join_all;
use rustls::RootCertStore;
use serde_json::{Value, json};
use tunnel_server::cluster::objects::Scope;
use tunnel_tests::ca::{Issued, Leaf, TestCa};
use tunnel_tests::client::{
    ByteStream, ClientTls, Endpoint, HttpReply, RawRequest, UpgradeClient, request,
};
use tunnel_tests::cluster::{Cluster, cloud, edge, server_roles_of};
use tunnel_tests::env::WAIT_TIMEOUT;
use tunnel_tests::eventually::eventually;
use tunnel_tests::process::ScratchDir;
use tunnel_tests::targets::{Exporter, TargetTls};

use super::Site;
use super::streams::Edge;
use crate::http::kubelet::{self as asked, Caller};

const APISERVER: &str = "kube-apiserver-kubelet-client";
/// Address of the API server for kubectl. The admin.conf of kubeadm has the Node's address.
const OF_ADMIN_CONF: &str = "10.77.100.3:6443";
/// Hosts that users write into kube-apiserver's requests. `PORT` stands for the port of the second
/// edge node's kubelet.
const HOSTS: [&str; 8] = [
    OF_ADMIN_CONF,
    "master-1:6443",
    "10.0.0.2:6443",
    "10.0.0.2:PORT",
    "worker-2:PORT",
    "192.168.33.221:PORT",
    "localhost:16443",
    "kubernetes.default.svc",
];

/// Two edge nodes of a cluster, and callers with delegation of the client certificate.
struct ApiServerSite {
    site: Site,
    edges: [Edge; 2],
    apiserver: Issued,
    prometheus: Issued,
    _files: ScratchDir,
}

/// Whether kube-apiserver verifies kubelets. The SNI depends on this.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verification {
    On,
    Off,
}

/// A stream that a user's kubectl starts.
#[derive(Debug, Clone, Copy)]
enum Stream {
    Exec,
    Attach,
    PortForward,
}

impl Stream {
    fn path(self, pod: &str) -> String {
        match self {
            Self::Exec => format!("/exec/{pod}/app?command=sh"),
            Self::Attach => format!("/attach/{pod}/app"),
            Self::PortForward => format!("/portForward/{pod}"),
        }
    }
}

impl ApiServerSite {
    async fn start(transport: &str) -> Result<Self> {
        let (files, ca) = (ScratchDir::new()?, TestCa::new("kubernetes")?);
        let text = |path: &Path| Some(path.to_string_lossy().into_owned());
        let client_ca = files.file("callers.pem", ca.pem())?;
        let own = ca.issue(&Leaf::caller("culvert-tunnel-server"))?;
        let (certificate, key) = own.write(files.path(), "own")?;
        let site = Site::start_with(|settings| {
            settings.client_ca = text(&client_ca);
            settings.target_cert_file = text(&certificate);
            settings.target_key_file = text(&key);
            settings.delegation_allowed_callers = vec![APISERVER.into(), "prometheus".into()];
            settings.http_proxy_ports = None;
        })
        .await?;
        let edges = [
            Edge::of_kubelet(&site, "worker-1", transport).await?,
            Edge::of_account(&site, "worker-2", transport).await?,
        ];
        let objects = site.cluster.objects();
        objects.add(&cloud("master-1", "10.77.100.3")).await?;
        // Both nodes have one address in common, as at the edge, and each has one of its own.
        for (edge, own) in edges.iter().zip(["10.0.0.1", "10.0.0.2"]) {
            let address = |ip: &str| json!({ "type": "InternalIP", "address": ip });
            let addresses = json!([address("192.168.33.221"), address(own)]);
            objects.set_addresses(edge.node, addresses).await?;
        }
        let site = Self {
            apiserver: ca.issue(&Leaf::caller(APISERVER))?,
            prometheus: ca.issue(&Leaf::caller("prometheus"))?,
            site,
            edges,
            _files: files,
        };
        site.put_pod("default", "web-0", "worker-1")?;
        site.put_pod("default", "web-1", "worker-2")?;
        for edge in &site.edges {
            eventually("the kubelets' ports are known", WAIT_TIMEOUT, async || {
                site.serves_pages(edge, OF_ADMIN_CONF).await
            })
            .await;
        }
        // Once the server knows the node of the address, it answers 403 for a port that is in no
        // list.
        let by_address = RawRequest::get("10.0.0.2:22", "/");
        eventually("the addresses are known", WAIT_TIMEOUT, async || {
            let reply = request(site.listener(None, None)?, &by_address).await?;
            ensure!(reply.status == 403, "{} {}", reply.status, reply.text());
            anyhow::Ok(())
        })
        .await;
        Ok(site)
    }

    fn put_pod(&self, namespace: &str, name: &str, node: &str) -> Result<()> {
        let pod = json!({
            "metadata": { "name": name }, "spec": { "nodeName": node, "containers": [] },
        });
        self.site.api()?.put("pods", Some(namespace), pod)
    }

    /// Returns the listener for a caller. Without a server name, the TLS handshake has no SNI.
    fn listener(&self, caller: Option<&Issued>, server_name: Option<&str>) -> Result<Endpoint> {
        let env = &self.site.env;
        let address = env.bound().https.context("no TLS listener")?;
        let certificate = caller.map(Issued::presented).transpose()?;
        let tls = match server_name {
            Some(name) => {
                ClientTls::verifying(name, RootCertStore::clone(&*env.roots()?), certificate)?
            }
            // A client never sends an address in SNI (RFC 6066, section 3).
            None => ClientTls::insecure("127.0.0.1", certificate)?,
        };
        Ok(Endpoint::tls(address, tls))
    }

    /// Returns the endpoint that kube-apiserver dials for an upgrade to the kubelet of an edge node
    /// (`DialURL` of `staging/src/k8s.io/apimachinery/pkg/util/proxy/dial.go`).
    fn dialed(&self, verification: Verification, edge: &Edge) -> Result<Endpoint> {
        let server_name = (verification == Verification::On).then_some(edge.node);
        self.listener(Some(&self.apiserver), server_name)
    }

    /// Sends a request as kube-apiserver does through Go's transport, which always sends the server
    /// name.
    async fn get(&self, edge: &Edge, head: &RawRequest) -> Result<HttpReply> {
        request(self.listener(Some(&self.apiserver), Some(edge.node))?, head).await
    }

    /// Checks that logs with the node's Host, and pages of the node proxy with the user's Host,
    /// arrive from the kubelet of `edge`.
    async fn serves_pages(&self, edge: &Edge, host: &str) -> Result<()> {
        let own = format!("{}:{}", edge.node, edge.kubelet.addr().port());
        let log = RawRequest::get(&own, "/containerLogs/default/web-0/app");
        let log = self.get(edge, &log).await?;
        let expected = format!("{}: log of web-0/app\n", edge.node);
        ensure!(log.text() == expected, "{} {}", log.status, log.text());
        let pods = self.get(edge, &RawRequest::get(host, "/pods")).await?;
        let named = format!("\"node\":\"{}\"", edge.node);
        ensure!(pods.text().contains(&named), "{}", pods.text());
        // The kubelet receives the Host that kube-apiserver sent.
        let seen = self.get(edge, &RawRequest::get(host, "/headers")).await?;
        let sent = format!("host: {host}\r\n").to_lowercase();
        let seen = seen.text().to_lowercase();
        ensure!(seen.contains(&sent), "{seen} instead of {host}");
        Ok(())
    }

    /// Checks that an upgraded stream reaches the kubelet of `edge` and no other.
    async fn streams_to(
        &self,
        edge: &Edge,
        listener: Endpoint,
        client: UpgradeClient,
    ) -> Result<()> {
        let accepted = |at: &Edge| at.kubelet.traffic().accepted();
        let before: Vec<_> = self.edges.iter().map(accepted).collect();
        let _stream = echoing(listener, client).await?;
        for (at, before) in self.edges.iter().zip(before) {
            let came = accepted(at) - before;
            let is_reached = at.node == edge.node;
            ensure!(came == u64::from(is_reached), "{came} at {}", at.node);
        }
        Ok(())
    }

    /// Waits until each kubelet has `count` open connections.
    async fn open_are(&self, count: u64) {
        eventually("connections of the kubelets", WAIT_TIMEOUT, async || {
            for edge in &self.edges {
                let open = edge.kubelet.traffic().open();
                ensure!(open == count, "{} has {open}", edge.node);
            }
            anyhow::Ok(())
        })
        .await;
    }

    fn requests(&self) -> u64 {
        let of_edges = self.edges.iter().map(|edge| edge.kubelet.traffic());
        of_edges.map(|traffic| traffic.requests()).sum()
    }

    fn lookups(&self) -> Result<usize> {
        let requests = self.site.api()?.requests();
        let user = Cluster::server_user();
        let own = requests.iter().filter(|seen| seen.user == user);
        let gets = own.filter(|seen| seen.resource == "pods" && seen.namespace == "default");
        Ok(gets.count())
    }

    fn hosts(&self) -> impl Iterator<Item = String> {
        let port = self.edges[1].kubelet.addr().port().to_string();
        HOSTS.iter().map(move |host| host.replace("PORT", &port))
    }
}

/// Opens an upgraded stream to an echo.
async fn echoing(listener: Endpoint, client: UpgradeClient) -> Result<ByteStream> {
    let mut stream = client.connect(listener).await?.switched()?;
    stream.send(b"hello").await?;
    ensure!(stream.receive(5).await? == b"hello", "no echo");
    Ok(stream)
}

async fn every_shape(transport: &str) -> Result<()> {
    let site = ApiServerSite::start(transport).await?;
    for host in site.hosts() {
        for (edge, pod) in site.edges.iter().zip(["default/web-0", "default/web-1"]) {
            let what = || format!("{pod} by {host} over {transport}");
            site.serves_pages(edge, &host).await.with_context(what)?;
            for verification in [Verification::On, Verification::Off] {
                for stream in [Stream::Exec, Stream::Attach, Stream::PortForward] {
                    let path = stream.path(pod);
                    for client in [
                        UpgradeClient::websocket(&host, &path),
                        UpgradeClient::spdy(&host, &path),
                    ] {
                        let listener = site.dialed(verification, edge)?;
                        let reached = site.streams_to(edge, listener, client).await;
                        reached
                            .with_context(|| format!("{stream:?} {verification:?}"))
                            .with_context(what)?;
                    }
                }
            }
        }
    }
    Ok(())
}

tests_of! {
    fn p10_every_shape_of_kube_apiserver_reaches_its_kubelet_over_quic() = every_shape("quic");
    fn p10_every_shape_of_kube_apiserver_reaches_its_kubelet_over_h2() = every_shape("h2");
}

/// Tests an API server that dials addresses, and therefore sends no server name for logs either.
/// The Pod in the path selects the node. The port is the kubelet's port in the Node's status. The
/// Host has no influence.
#[tokio::test(flavor = "multi_thread")]
async fn pod_in_the_path_leads_to_its_nodes_kubelet_and_the_port_of_its_status() -> Result<()> {
    let site = ApiServerSite::start("auto").await?;
    let unknown = "192.0.2.9:10250";
    let get = async |host: &str, path: &str| {
        let listener = site.dialed(Verification::Off, &site.edges[0])?;
        request(listener, &RawRequest::get(host, path)).await
    };
    for host in site
        .hosts()
        .chain([unknown.into(), "unknown-1:10250".into()])
    {
        for (edge, pod) in site.edges.iter().zip(["web-0", "web-1"]) {
            let reply = get(&host, &format!("/containerLogs/default/{pod}/app")).await?;
            let expected = format!("{}: log of {pod}/app\n", edge.node);
            let got = (reply.status, reply.text());
            ensure!(got == (200, expected), "{pod} by {host}: {got:?}");
        }
    }
    // For other paths the Host decides, and the server does not know this one. A Pod that does not
    // exist selects no node.
    for path in [
        "/metrics",
        "/metrics/cadvisor",
        "/containerLogs/default/nobody/app",
    ] {
        let reply = get(unknown, path).await?;
        ensure!(reply.status == 400, "{path}: {}", reply.text());
    }
    Ok(())
}

/// Runs complete sessions without a server name in TLS and with a user's Host.
async fn whole_streams(transport: &str) -> Result<()> {
    let site = ApiServerSite::start(transport).await?;
    let edge = &site.edges[0];
    let caller = Caller {
        host: OF_ADMIN_CONF.into(),
        listener: Some(site.dialed(Verification::Off, edge)?),
        ..edge.caller(&site.site)
    };
    asked::commands_over_spdy(&caller).await?;
    asked::terminal_over_spdy(&caller).await?;
    asked::port_forward_over_spdy(&caller).await?;
    asked::terminal_over_websocket(&caller, 0).await?;
    // API servers before 1.36, and those that translate for older kubelets, send POST with the
    // node's Host.
    let translated = Caller {
        listener: caller.listener.clone(),
        ..edge.caller(&site.site)
    };
    asked::commands_over_spdy(&translated).await?;
    let logs = Caller {
        listener: Some(site.listener(Some(&site.apiserver), Some(edge.node))?),
        ..edge.caller(&site.site)
    };
    asked::followed_logs(&logs).await
}

tests_of! {
    fn whole_streams_without_a_name_in_tls_over_quic() = whole_streams("quic");
    fn whole_streams_without_a_name_in_tls_over_h2() = whole_streams("h2");
}

/// Tests users of kube-apiserver who have rights to a Pod of the first edge node, or to the proxy
/// of that node. Fields in their requests do not lead to the second edge node.
#[tokio::test(flavor = "multi_thread")]
async fn p10_fields_of_users_lead_to_no_other_node() -> Result<()> {
    let site = ApiServerSite::start("auto").await?;
    let [first, second] = &site.edges;
    let other = format!("{}:{}", second.node, second.kubelet.addr().port());
    let chosen = |client: UpgradeClient| {
        client
            .header("X-Tunnel-Proxy-Host", second.node)
            .header("X-Tunnel-Proxy-Dest", &other)
    };
    for verification in [Verification::On, Verification::Off] {
        for path in ["/exec/default/web-0/app", "/portForward/default/web-0"] {
            for client in [
                UpgradeClient::spdy(&other, path),
                UpgradeClient::websocket(&other, path),
            ] {
                let listener = site.dialed(verification, first)?;
                site.streams_to(first, listener, chosen(client)).await?;
            }
        }
    }
    let proxied = RawRequest::get(&other, "/headers")
        .header("X-Tunnel-Proxy-Host", second.node)
        .header("X-Tunnel-Proxy-Dest", "a malformed one");
    let before = second.kubelet.traffic().requests();
    let seen = site.get(first, &proxied).await?.text().to_lowercase();
    ensure!(
        seen.contains(&other) && !seen.contains("x-tunnel-proxy"),
        "{seen}"
    );
    ensure!(second.kubelet.traffic().requests() == before);
    // If kube-apiserver does not verify kubelets, an upgrade through the node proxy has no server
    // name in TLS. Nothing in the request then identifies the node.
    let before = site.requests();
    for upgrade in ["Upgrade", "x-upgrade-y"] {
        for path in ["/pods", "/run/default/web-1/app", "/logs/", "/"] {
            let head = RawRequest::get(&other, path)
                .header("Connection", upgrade)
                .header("X-Forwarded-For", "10.0.0.9");
            let listener = site.dialed(Verification::Off, first)?;
            let reply = request(listener, &head).await?;
            let text = reply.text();
            let advised = text.contains("--kubelet-certificate-authority");
            ensure!(reply.status == 400 && advised, "{path}: {text}");
        }
    }
    ensure!(site.requests() == before, "a kubelet was asked");
    Ok(())
}

/// Returns the status, code and text of the answer to an exec that the server refuses.
async fn refused(site: &ApiServerSite, host: &str, pod: &str) -> Result<(u16, String, String)> {
    let before = site.requests();
    let listener = site.dialed(Verification::Off, &site.edges[0])?;
    let client = UpgradeClient::websocket(host, &Stream::Exec.path(pod));
    let reply = client.connect(listener).await?.refused()?;
    ensure!(site.requests() == before, "a kubelet was asked");
    let code = reply.header("x-tunnel-error").unwrap_or_default();
    Ok((reply.status, code.to_owned(), reply.text()))
}

#[tokio::test(flavor = "multi_thread")]
async fn unreachable_pods_are_answered_with_the_name_of_their_node() -> Result<()> {
    let site = ApiServerSite::start("auto").await?;
    site.site.cluster.objects().add(&edge("worker-3")).await?;
    site.put_pod("default", "no-agent", "worker-3")?;
    site.put_pod("default", "in-the-cloud", "master-1")?;
    site.put_pod("default", "no-node", "worker-9")?;
    site.put_pod("default", "unbound", "")?;
    // The Host names a node with an agent. The server does not fall back to that node.
    let host = format!("worker-1:{}", site.edges[0].kubelet.addr().port());
    for (pod, status, code, text) in [
        ("no-agent", 502, "no_agent", "worker-3"),
        ("in-the-cloud", 502, "no_agent", "master-1"),
        ("no-node", 400, "unknown_node", "worker-9"),
        ("unbound", 400, "unknown_node", "bound to no node"),
        ("missing", 400, "unknown_node", "default/missing"),
    ] {
        eventually(pod, WAIT_TIMEOUT, async || {
            let answer = refused(&site, &host, &format!("default/{pod}")).await?;
            ensure!((answer.0, &*answer.1) == (status, code), "{answer:?}");
            ensure!(answer.2.contains(text), "{answer:?}");
            anyhow::Ok(())
        })
        .await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn static_pods_and_pods_that_moved_are_found_where_they_are() -> Result<()> {
    let site = ApiServerSite::start("auto").await?;
    let [first, second] = &site.edges;
    let mirror = json!({
        "metadata": {
            "name": "static-web-worker-1",
            "annotations": { "kubernetes.io/config.mirror": "0a1b", "kubernetes.io/config.source": "file" },
            "ownerReferences": [{ "apiVersion": "v1", "kind": "Node", "name": "worker-1", "uid": "1", "controller": true }],
        },
        "spec": { "nodeName": "worker-1", "containers": [] },
    });
    site.site.api()?.put("pods", Some("kube-system"), mirror)?;
    let exec = async |edge: &Edge, pod: &str| {
        let client = UpgradeClient::websocket(OF_ADMIN_CONF, &Stream::Exec.path(pod));
        let listener = site.dialed(Verification::Off, edge)?;
        site.streams_to(edge, listener, client).await
    };
    exec(first, "kube-system/static-web-worker-1").await?;
    exec(first, "default/web-0").await?;
    site.put_pod("default", "web-0", second.node)?;
    exec(second, "default/web-0").await?;
    site.put_pod("default", "web-0", first.node)?;
    exec(first, "default/web-0").await
}

/// Tests that a listed caller other than kube-apiserver reaches the port in its Host.
#[tokio::test(flavor = "multi_thread")]
async fn second_listed_caller_reaches_the_port_of_its_host() -> Result<()> {
    let site = ApiServerSite::start("auto").await?;
    let tls = TargetTls::self_signed(&["worker-1"])?;
    let exporter = Exporter::start_on("127.0.0.1:0".parse()?, "worker-1", Some(tls)).await?;
    let port = exporter.addr().port().to_string();
    let objects = site.site.cluster.objects();
    objects.set_ports(&[("https-proxy-ports", &port)]).await?;
    for server_name in [Some("worker-1"), None] {
        let head = RawRequest::get(&format!("worker-1:{port}"), "/metrics");
        eventually("the port is allowed", WAIT_TIMEOUT, async || {
            let reply = request(site.listener(Some(&site.prometheus), server_name)?, &head).await?;
            ensure!(reply.status == 200, "{} {}", reply.status, reply.text());
            anyhow::Ok(())
        })
        .await;
        let asked = exporter.traffic().requests();
        ensure!(asked > 0, "the exporter received no request");
        let elsewhere = RawRequest::get("worker-1:22", "/metrics");
        let listener = site.listener(Some(&site.prometheus), server_name)?;
        let reply = request(listener, &elsewhere).await?;
        ensure!(reply.status == 403, "{} {}", reply.status, reply.text());
    }
    Ok(())
}

/// Tests that the server routes callers without delegation by Host, and looks up no Pods for them.
#[tokio::test(flavor = "multi_thread")]
async fn other_callers_are_routed_by_host_and_never_ask_for_pods() -> Result<()> {
    let site = ApiServerSite::start("auto").await?;
    let before = site.lookups()?;
    let port = site.edges[1].kubelet.addr().port().to_string();
    let other = format!("worker-2:{port}");
    let objects = site.site.cluster.objects();
    objects.set_ports(&[("https-proxy-ports", &port)]).await?;
    for server_name in [Some("worker-1"), None] {
        let head = RawRequest::get(&other, "/pods");
        eventually("the port is allowed", WAIT_TIMEOUT, async || {
            let reply = request(site.listener(None, server_name)?, &head).await?;
            ensure!(reply.text().contains("\"worker-2\""), "{}", reply.text());
            anyhow::Ok(())
        })
        .await;
        for host in ["192.0.2.9:10250", "unknown-1:10250", "192.168.33.221:10250"] {
            let client = UpgradeClient::websocket(host, "/exec/default/web-0/app");
            let reply = client.connect(site.listener(None, server_name)?).await?;
            ensure!(reply.refused()?.status == 400, "{host}");
        }
    }
    ensure!(site.lookups()? == before, "the server looked up a Pod");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_right_to_get_pods_is_reported_to_users_and_operators() -> Result<()> {
    let site = ApiServerSite::start("auto").await?;
    let cluster = &site.site.cluster;
    let set_rights = async |rules: &Value| {
        let path = "/apis/rbac.authorization.k8s.io/v1/clusterroles/tunnel-server";
        let patch = json!({ "rules": rules });
        cluster.admin().merge(path, &patch).await.map(drop)
    };
    let [without, ..] =
        server_roles_of(|right| right.resource != "pods" || right.scope != Scope::Cluster);
    set_rights(&without["rules"]).await?;
    let (status, _, text) = refused(&site, OF_ADMIN_CONF, "default/web-0").await?;
    ensure!(status == 400 && text.contains("pods get"), "{text}");
    let is_shown = async |expected: bool| {
        eventually("the condition", WAIT_TIMEOUT, async || {
            let page = site.site.page("/readyz?verbose").await?;
            ensure!(page.contains("[!] pod lookup") == expected, "{page}");
            anyhow::Ok(())
        })
        .await;
    };
    is_shown(true).await;
    let exec = async |verification| {
        let client = UpgradeClient::websocket(OF_ADMIN_CONF, "/exec/default/web-0/app");
        let listener = site.dialed(verification, &site.edges[0])?;
        site.streams_to(&site.edges[0], listener, client).await
    };
    // With the server name in TLS, the server needs no lookup.
    exec(Verification::On).await?;
    let [all, ..] = server_roles_of(|_| true);
    set_rights(&all["rules"]).await?;
    exec(Verification::Off).await?;
    is_shown(false).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_execs_at_once_all_reach_their_nodes() -> Result<()> {
    let site = ApiServerSite::start("auto").await?;
    let caller = &site;
    let execs = (0..200_usize).map(|number| async move {
        let pod = ["default/web-0", "default/web-1"][number % 2];
        let client = UpgradeClient::websocket(OF_ADMIN_CONF, &Stream::Exec.path(pod));
        let listener = caller.dialed(Verification::Off, &caller.edges[0])?;
        echoing(listener, client).await
    });
    let open = try_join_all(execs).await?;
    site.open_are(100).await;
    drop(open);
    site.open_are(0).await;
    Ok(())
}
