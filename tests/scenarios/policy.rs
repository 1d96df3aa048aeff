//! Rules: who may do what over each listener, without a file and with the examples of the guide.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use base64::prelude::{BASE64_STANDARD, Engine as _};
use rustls::RootCertStore;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tunnel_process::yaml;
use tunnel_server::admin::AdminClient;
use tunnel_server::config::RawConfig;
use tunnel_store::data_dir::DataDir;
use tunnel_tests::ca::{Leaf, TestCa};
use tunnel_tests::checks::{ensure_contains, ensure_refused, ensure_reset, ensure_status};
use tunnel_tests::client::{
    ByteStream, ClientTls, EgressDialer, Endpoint, Exchange, RawRequest, Tunnel, UpgradeClient,
    request,
};
use tunnel_tests::env::{Agent, TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::guides::{blocks, page};
use tunnel_tests::load::Load;
use tunnel_tests::process::{ScratchDir, next_loopback};
use tunnel_tests::targets::{EchoTarget, Exporter, FakeKubelet, TargetTls};

const GUIDE: &str = "docs/how-to/policy.md";
const KUBELET_PORT: u16 = 10250;
const OPS: &str = "ops:open-sesame-4711";
const PROMETHEUS: &str = "prometheus:right-0123456789";
/// Common name of a caller with delegation.
const APISERVER: &str = "kube-apiserver-kubelet-client";
const LOGS: &str = "/containerLogs/ns/pod/c";
const EXEC: &str = "/exec/ns/pod/c?command=ls";

/// A server with settings of a file, and a node with a kubelet on 10250 and an exporter.
struct Site {
    env: TestEnv,
    node: &'static str,
    address: Ipv4Addr,
    exporter: Exporter,
    callers: TestCa,
    _kubelet: FakeKubelet,
    _agent: Agent,
    _scratch: ScratchDir,
}

impl Site {
    /// Starts the site with a CONNECT listener for the users ops and prometheus, and for certificates.
    async fn start(node: &'static str, file: &str) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let passwords = scratch.file("passwords", format!("{OPS}\n{PROMETHEUS}\n"))?;
        let callers = TestCa::new("callers")?;
        let client_ca = scratch.file("callers.crt", callers.pem())?;
        let file = yaml::parse::<RawConfig>(file)?.unwrap_or_default();
        let env = TestEnv::start_with(|settings| {
            settings.rules = None;
            settings.client_ca = Some(client_ca.to_string_lossy().into_owned());
            settings.connect_listen = Some("127.0.0.1:0".to_owned());
            settings.connect_auth = Some(passwords.to_string_lossy().into_owned());
            *settings = file.or(std::mem::take(settings));
        })
        .await?;
        let address = next_loopback();
        let tls = TargetTls::self_signed(&[node])?;
        let kubelet = FakeKubelet::start_on((address, KUBELET_PORT).into(), node, Some(tls));
        let config = env.agent_config_with(node, |config| {
            config.node_ip = Some(address.to_string());
        });
        let agent = Agent::start(config?).await?;
        env.connected(node).await;
        Ok(Self {
            _kubelet: kubelet.await?,
            exporter: Exporter::start_on((address, 0).into(), node, None).await?,
            node,
            address,
            callers,
            env,
            _agent: agent,
            _scratch: scratch,
        })
    }

    fn kubelet_host(&self) -> String {
        format!("{}:{KUBELET_PORT}", self.node)
    }

    /// Returns the HTTPS listener, for a caller with a certificate of this name.
    fn https(&self, name: Option<&str>) -> Result<Endpoint> {
        let certificate = name.map(|name| self.callers.issue(&Leaf::caller(name)));
        let certificate = certificate.transpose()?;
        let presented = certificate.map(|issued| issued.presented()).transpose()?;
        let roots = RootCertStore::clone(&*self.env.roots()?);
        let tls = ClientTls::verifying(self.node, roots, presented)?;
        let address = self.env.bound().https.context("no HTTPS listener")?;
        Ok(Endpoint::tls(address, tls))
    }

    /// Returns the status and the text of a GET at the kubelet over the HTTPS listener.
    async fn get(&self, name: Option<&str>, path: &str) -> Result<(u16, String)> {
        let asked = RawRequest::get(&self.kubelet_host(), path);
        let reply = request(self.https(name)?, &asked).await?;
        Ok((reply.status, reply.text()))
    }

    /// Returns the status of each kind of exec: WebSocket and SPDY, by GET and POST.
    async fn execs(&self, name: Option<&str>) -> Result<Vec<u16>> {
        let host = self.kubelet_host();
        let spdy = RawRequest::new("GET", EXEC, &host)
            .header("Connection", "Upgrade")
            .header("Upgrade", "SPDY/3.1");
        let plain = ["GET", "POST"].map(|method| RawRequest::new(method, EXEC, &host));
        let mut statuses = Vec::new();
        for client in [
            UpgradeClient::websocket(&host, EXEC),
            UpgradeClient::spdy(&host, EXEC),
            UpgradeClient::asking_for_spdy(spdy),
        ] {
            let upgraded = client.connect(self.https(name)?).await?;
            statuses.push(upgraded.refused().map_or(101, |reply| reply.status));
        }
        for asked in plain {
            statuses.push(request(self.https(name)?, &asked).await?.status);
        }
        Ok(statuses)
    }

    /// Returns the status and the text of a CONNECT with a password.
    async fn connect(&self, user: &str, port: u16) -> Result<(u16, String)> {
        self.connect_to(user, &format!("{}:{port}", self.node))
            .await
    }

    async fn connect_to(&self, user: &str, target: &str) -> Result<(u16, String)> {
        let asked =
            RawRequest::new("CONNECT", target, target).header("Proxy-Authorization", &basic(user));
        let endpoint = self.env.bound().connect.context("no CONNECT listener")?;
        let exchange = Exchange::start(endpoint, &asked).await?;
        if exchange.status() == 200 {
            return Ok((200, String::new()));
        }
        let reply = exchange.into_reply().await;
        Ok((reply.status, reply.text()))
    }

    /// Returns the status of a GET by URL on the CONNECT listener.
    async fn get_by_url(&self, user: &str, path: &str) -> Result<u16> {
        let port = self.exporter.addr().port();
        let url = format!("http://{}:{port}{path}", self.node);
        let asked = RawRequest::get("x", &url).header("Proxy-Authorization", &basic(user));
        let endpoint = self.env.bound().connect.context("no CONNECT listener")?;
        Ok(request(endpoint, &asked).await?.status)
    }
}

fn basic(user: &str) -> String {
    format!("Basic {}", BASE64_STANDARD.encode(user))
}

/// Fails unless the text names the operation that no rule allows.
fn ensure_no_rule((status, text): &(u16, String), operation: &str) -> Result<()> {
    ensure!(*status == 403, "{status}: {text}");
    ensure_contains(text, &[&format!("no rule allows {operation} at ")])
}

#[tokio::test(flavor = "multi_thread")]
async fn without_rules_metrics_are_open_and_pods_logs_and_shells_are_not() -> Result<()> {
    let site = Site::start("worker-1", "{}").await?;
    for name in [None, Some("person")] {
        for path in ["/metrics/cadvisor", "/stats/summary", "/healthz"] {
            let (status, text) = site.get(name, path).await?;
            ensure!(status == 200, "{path}: {status}: {text}");
        }
        for (path, operation) in [("/pods", "pods"), (LOGS, "containerlogs"), ("/", "unknown")] {
            ensure_no_rule(&site.get(name, path).await?, operation)?;
        }
        ensure!(site.execs(name).await? == [403; 5]);
        // A kubelet would redirect the first one, and some read the second one as exec.
        for path in [
            "//exec/ns/pod/c",
            "/%65xec/ns/pod/c",
            "/metrics/..%2fexec/ns/pod/c",
        ] {
            let (status, text) = site.get(name, path).await?;
            ensure!(status == 400, "{path}: {status}: {text}");
            ensure_contains(&text, &["several ways"])?;
        }
    }
    ensure!(site.execs(Some(APISERVER)).await?[..3] == [101; 3]);
    let logs = RawRequest::get(&site.kubelet_host(), LOGS).header("Authorization", "Bearer abc");
    ensure_status(&request(site.https(None)?, &logs).await?, 200)
}

#[tokio::test(flavor = "multi_thread")]
async fn without_rules_other_ports_are_read_and_a_port_may_say_more() -> Result<()> {
    let site = Site::start("worker-1", "{}").await?;
    let host = format!("worker-1:{}", site.exporter.addr().port());
    let http = site.env.http();
    ensure_status(
        &request(http.clone(), &RawRequest::get(&host, "/metrics")).await?,
        200,
    )?;
    for asked in [
        RawRequest::new("POST", "/metrics", &host).body("x"),
        RawRequest::get(&host, "/metrics")
            .header("Connection", "Upgrade")
            .header("Upgrade", "websocket"),
    ] {
        let reply = request(http.clone(), &asked).await?;
        ensure_refused(&reply, 403, "refused_by_policy")?;
    }
    ensure!(site.get_by_url(PROMETHEUS, "/metrics").await? == 200);
    ensure_no_rule(
        &site
            .connect(PROMETHEUS, site.exporter.addr().port())
            .await?,
        "connect",
    )?;

    let echo = EchoTarget::start().await?;
    let port = echo.addr().port();
    let file =
        format!("ports: [{{ number: {port}, scheme: http, operations: [read, write, upgrade] }}]");
    let open = Site::start("worker-1", &file).await?;
    let post = RawRequest::new("POST", "/x", &format!("worker-1:{port}")).body("x");
    let reply = request(open.env.http(), &post).await?;
    // Nothing listens at this address of the node: the request has passed the rules.
    ensure_refused(&reply, 502, "target_refused")
}

/// Four ways to an sshd on a node and to one without an agent. The first two are those of the password for
/// metrics and of an anonymous caller, and the others lead to destinations that no rule was asked about.
const HOLES: [&str; 4] = [
    "CONNECT to the node with the password of Prometheus",
    "GET of an anonymous caller on the HTTP listener",
    "CONNECT without an agent with the password of Prometheus",
    "TCP service to the node",
];

/// Returns through which of the [`HOLES`] bytes reach an sshd, with the port of both in `{port}` of the file,
/// and whether ops reach the one of the node.
async fn holes(file: &str) -> Result<([bool; 4], bool)> {
    let direct = EchoTarget::start_on((next_loopback(), 0).into()).await?;
    let port = direct.addr().port();
    let file = format!(
        "connectDirect: [127.0.0.0/8]\nservices: [{{ name: raw, listen: \"127.0.0.1:0\", node: worker-1, target: \"{port}\" }}]\n{}",
        file.replace("{port}", &port.to_string())
    );
    let site = Site::start("worker-1", &file).await?;
    let sshd = EchoTarget::start_on((site.address, port).into()).await?;
    let accepted = || sshd.traffic().accepted() + direct.traffic().accepted();
    let mut open = [false; 4];
    for (hole, is_open) in open.iter_mut().enumerate() {
        let before = accepted();
        let status = match hole {
            0 => site.connect(PROMETHEUS, port).await?.0,
            1 => {
                let get = RawRequest::get(&format!("worker-1:{port}"), "/");
                request(site.env.http(), &get).await?.status
            }
            2 => {
                site.connect_to(PROMETHEUS, &direct.addr().to_string())
                    .await?
                    .0
            }
            _ => {
                let service = Endpoint::plain(site.env.bound().services[0].1);
                let echoed = async {
                    let mut caller = ByteStream::connect(service).await?;
                    caller.send(b"SSH-2.0-x").await?;
                    caller.receive(9).await
                };
                // A refusal resets the connection.
                if echoed.await.is_ok() { 200 } else { 403 }
            }
        };
        *is_open = status != 403;
        if *is_open {
            eventually(HOLES[hole], WAIT_TIMEOUT, async || {
                ensure!(accepted() > before);
                anyhow::Ok(())
            })
            .await;
        }
        ensure!(*is_open || accepted() == before, "{}", HOLES[hole]);
    }
    Ok((open, site.connect(OPS, port).await?.0 == 200))
}

/// As it was before there were rules, and with those of the guide.
#[tokio::test(flavor = "multi_thread")]
async fn password_for_metrics_reaches_no_sshd_and_rules_are_asked_about_every_destination()
-> Result<()> {
    let before = "compat: yurt-tunnel\nhttpProxyPorts: \"{port}\"\n";
    ensure!(holes(before).await? == ([true; 4], true), "the holes");
    let rules = example("prometheus")?;
    ensure_contains(&rules, &["connectPorts: 22", "ports: [22]"])?;
    let now = rules.replace("22", "{port}");
    ensure!(holes(&now).await? == ([false; 4], true), "closed");
    Ok(())
}

/// Returns the block of the guide that begins with this name.
fn example(name: &str) -> Result<String> {
    let head = format!("# example: {name}\n");
    let found = blocks(&page(GUIDE)?).into_iter();
    let mut found = found.filter(|block| block.text.starts_with(&head));
    found.next().map(|block| block.text).context(head)
}

#[tokio::test(flavor = "multi_thread")]
async fn examples_of_the_guide_allow_what_they_say_and_nothing_else() -> Result<()> {
    let prometheus = Site::start("worker-1", &example("prometheus")?).await?;
    ensure!(prometheus.get_by_url(PROMETHEUS, "/metrics").await? == 200);
    ensure!(prometheus.get_by_url(OPS, "/metrics").await? == 403);
    ensure_no_rule(&prometheus.connect(PROMETHEUS, 22).await?, "connect")?;
    let (status, text) = prometheus.connect(OPS, 22).await?;
    ensure!(status != 403, "{text}");

    let logs = Site::start("worker-1", &example("logs")?).await?;
    ensure!(logs.get(Some("support"), LOGS).await?.0 == 200);
    ensure!(logs.get(Some("support"), "/metrics").await?.0 == 200);
    ensure_no_rule(&logs.get(Some("support"), "/pods").await?, "pods")?;
    ensure_no_rule(&logs.get(None, LOGS).await?, "containerlogs")?;
    ensure!(logs.execs(Some("support")).await? == [403; 5]);

    let no_shell = example("no-shell")?;
    let pay = Site::start("pay-1", &no_shell).await?;
    ensure!(pay.get(Some(APISERVER), LOGS).await?.0 == 200);
    ensure!(pay.execs(Some(APISERVER)).await? == [403; 5]);
    let (_, text) = pay.get(Some(APISERVER), EXEC).await?;
    ensure_contains(&text, &["rule no-shell denies exec at pay-1 port 10250"])?;
    let other = Site::start("worker-1", &no_shell).await?;
    ensure!(other.execs(Some(APISERVER)).await?[..3] == [101; 3]);

    let ssh = example("ssh")?;
    let elsewhere = Site::start("worker-1", &ssh).await?;
    ensure_no_rule(&elsewhere.connect(OPS, 22).await?, "connect")?;
    let office = Site::start("worker-1", &ssh.replace("10.1.0.0/16", "127.0.0.0/8")).await?;
    let (status, text) = office.connect(OPS, 22).await?;
    ensure!(status != 403, "{text}");

    let application = example("application")?;
    let post = |node: &str| RawRequest::new("POST", "/", &format!("{node}:8080")).body("x");
    let shop = Site::start("shop-1", &application).await?;
    let _shop = Exporter::start_on((shop.address, 8080).into(), "shop-1", None).await?;
    let reply = request(shop.env.http(), &post("shop-1")).await?;
    ensure!(
        reply.status != 403 && reply.header("x-tunnel-error").is_none(),
        "{}",
        reply.text()
    );
    ensure_no_rule(&shop.get(None, "/pods").await?, "pods")?;
    let other = Site::start("worker-1", &application).await?;
    let reply = request(other.env.http(), &post("worker-1")).await?;
    ensure_refused(&reply, 403, "refused_by_policy")?;

    let apiserver = Site::start("worker-1", &example("apiserver")?).await?;
    ensure!(apiserver.execs(Some(APISERVER)).await?[..3] == [101; 3]);
    ensure_no_rule(&apiserver.get(Some("person"), "/metrics").await?, "metrics")?;
    ensure_no_rule(&apiserver.get(None, "/metrics").await?, "metrics")
}

#[tokio::test(flavor = "multi_thread")]
async fn dry_run_changes_no_answer_and_its_differences_are_counted_and_listed() -> Result<()> {
    let site = Site::start("worker-1", &example("dry-run")?).await?;
    let differences = async |decision: &str| {
        let series = format!("tunnel_server_dry_run_differences_total{{decision=\"{decision}\"}}");
        site.env.metric(&series).await
    };
    // Both tables allow it, and both refuse it.
    ensure!(site.get_by_url(PROMETHEUS, "/metrics").await? == 200);
    ensure_no_rule(&site.get(None, "/pods").await?, "pods")?;
    ensure!((differences("deny").await?, differences("allow").await?) == (0, 0));
    ensure!(site.get_by_url(OPS, "/metrics").await? == 200);
    let port = site.exporter.addr().port();
    ensure_no_rule(&site.connect(PROMETHEUS, port).await?, "connect")?;
    ensure!(site.execs(Some(APISERVER)).await?[..3] == [101; 3]);
    ensure!((differences("deny").await?, differences("allow").await?) == (6, 0));
    let server = admin(&site.env).await?;
    let found = server.dry_run().await?.context("no dry run")?;
    let listed: Vec<_> = (found.differences.iter())
        .map(|found| (found.count, found.what.as_str(), found.example.as_str()))
        .collect();
    let exec = "exec over https: allow by rule default-delegation, dry run deny, no rule allows it";
    let read = "read over connect: allow by rule default-read, dry run deny, no rule allows it";
    let example = format!("user:ops at worker-1 port {port}");
    let by = format!("certificate:{APISERVER} at worker-1 port {KUBELET_PORT}");
    ensure!(
        listed == [(1, read, &*example), (5, exec, &*by)],
        "{listed:?}"
    );
    ensure!(found.decisions == 9 && found.others == 0, "{found:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn labels_of_the_join_token_select_nodes_and_an_agent_cannot_change_them() -> Result<()> {
    let site = Site::start("worker-1", &example("labels")?).await?;
    ensure!(site.get(None, "/metrics").await?.0 == 200);
    let labels = |tier: &str| [("tier".into(), tier.into())].into();
    let node = "worker-1".parse()?;
    let reaches = async |status: u16| {
        eventually("the label", WAIT_TIMEOUT, async || {
            let (answered, text) = site.get(None, "/metrics").await?;
            ensure!(answered == status, "{answered}: {text}");
            anyhow::Ok(text)
        })
        .await
    };
    site.env.nodes().record_token(&node, &[], &labels("pay"));
    let text = reaches(403).await;
    ensure_contains(
        &text,
        &["rule no-pay denies metrics at worker-1 port 10250"],
    )?;
    site.env.nodes().record_token(&node, &[], &labels("shop"));
    reaches(200).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn agents_reach_targets_of_the_cloud_by_rules_that_name_them() -> Result<()> {
    let target = Exporter::start("apiserver").await?;
    let file = format!(
        "cloudApiserver: '{}'\n{}",
        target.addr(),
        example("labels")?
    );
    let env = TestEnv::start_with_file(&file, |_| {}).await?;
    let (gateway, camera) = (next_loopback(), next_loopback());
    let listening = async |node: &str, address: Ipv4Addr| {
        let config = env.agent_config_with(node, |config| {
            config.cloud_listen = vec![format!("apiserver={address}:21443")];
        });
        let agent = Agent::start(config?).await?;
        env.connected(node).await;
        anyhow::Ok(agent)
    };
    let _gateway = listening("gw-1", gateway).await?;
    let _camera = listening("cam-1", camera).await?;
    let asked = RawRequest::get("apiserver", "/metrics");
    let at = |address: Ipv4Addr| Endpoint::from(SocketAddr::from((address, 21443)));
    eventually("the gateway's stream", WAIT_TIMEOUT, async || {
        ensure_status(&request(at(gateway), &asked).await?, 200)
    })
    .await;
    let series = "tunnel_server_cloud_streams_total{result=\"refused_by_policy\"}";
    // An agent without a usable session resets the connection by itself.
    eventually("the server's refusal", WAIT_TIMEOUT, async || {
        let refused = request(at(camera), &asked).await;
        assert!(refused.is_err(), "the rules allow gw-* alone");
        ensure!(env.metric(series).await? > 0);
        Ok(())
    })
    .await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn stream_of_an_agent_ends_with_the_rule_that_allowed_it_if_asked() -> Result<()> {
    let target = Exporter::start("apiserver").await?;
    let file = |gateways: &str| {
        format!(
            "cloudApiserver: '{}'\ncallers: {{ gateways: {{ agent: '{gateways}' }} }}\n\
             rules: [{{ name: gateways, callers: [gateways], destinations: [target] }}]\n",
            target.addr()
        )
    };
    let env = TestEnv::start_with_file(&file("gw-*"), |_| {}).await?;
    let address = next_loopback();
    let agent = async |node: &str, port: u16| {
        let config = env.agent_config_with(node, |config| {
            config.cloud_listen = vec![format!("apiserver={address}:{port}")];
        });
        let agent = Agent::start(config?).await?;
        env.connected(node).await;
        anyhow::Ok(agent)
    };
    let _agents = [agent("gw-1", 21443).await?, agent("gw-2", 21444).await?];
    let at = |port: u16| Endpoint::from(SocketAddr::from((address, port)));
    let follow = async |port: u16| {
        eventually("a stream of the agent", WAIT_TIMEOUT, async || {
            let follow = RawRequest::get("apiserver", "/follow");
            Exchange::start(at(port), &follow).await
        })
        .await
    };
    let (mut first, mut second) = (follow(21443).await, follow(21444).await);
    let server = admin(&env).await?;
    ensure!(server.end_running().await? == 0);
    std::fs::write(env.config_file(), file("gw-2"))?;
    ensure!(server.reload().await?.check().is_ok());
    let flows = async |follow: &mut Exchange| {
        target.emit("line");
        ensure!(follow.line().await.as_deref() == Some("line"));
        anyhow::Ok(())
    };
    flows(&mut first).await?;
    ensure!(server.end_running().await? == 1);
    let ended = async { while first.data().await.is_some() {} };
    tokio::time::timeout(scaled(Duration::from_secs(10)), ended).await?;
    ensure_reset(first.ended().context("in progress")?)?;
    let refused = "tunnel_server_cloud_streams_total{result=\"refused_by_policy\"}";
    eventually("the record", WAIT_TIMEOUT, async || {
        ensure!(env.metric(refused).await? == 1);
        anyhow::Ok(())
    })
    .await;
    // The second one has the line of before, too.
    ensure!(second.line().await.as_deref() == Some("line"));
    flows(&mut second).await
}

/// Returns a client of the server's admin socket.
async fn admin(env: &TestEnv) -> Result<AdminClient> {
    let dir = DataDir::open_existing(&env.path().join("server"))?;
    let server = AdminClient::connect(&dir).await?;
    server.context("no admin socket")
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_follow_the_file_under_load_and_a_mistake_changes_nothing() -> Result<()> {
    let exporter = Exporter::start("worker-1").await?;
    let port = exporter.addr().port();
    let ports = format!("httpProxyPorts: {port}\n");
    let env = TestEnv::start_with_file(&ports, |_| {}).await?;
    let _agent = env.agent("worker-1").await?;
    let host = format!("worker-1:{port}");
    let load = Load::start(env.http(), std::slice::from_ref(&host), 2).await?;
    let post = RawRequest::new("POST", "/metrics", &host).body("x");
    let reaches = async |what: &str, is_allowed: bool| {
        eventually(what, WAIT_TIMEOUT, async || {
            let reply = request(env.http(), &post).await?;
            ensure!(
                (reply.status != 403) == is_allowed,
                "{}: {}",
                reply.status,
                reply.text()
            );
            anyhow::Ok(())
        })
        .await;
    };
    let write = |rules: &str| -> Result<()> {
        std::fs::write(env.config_file(), format!("{ports}{rules}"))?;
        env.reload();
        Ok(())
    };
    reaches("the defaults", false).await;
    let open = "rules: [{ name: all }]\n";
    for _ in 0..5 {
        write(open)?;
        reaches("rules that allow", true).await;
        write("rules: [{ name: no-writes, effect: deny, operations: [write] }, { name: all }]\n")?;
        reaches("a rule that denies", false).await;
    }
    write(open)?;
    reaches("rules that allow", true).await;
    write("rules: [{ name: all, effect: perhaps }]\n")?;
    eventually("the condition", WAIT_TIMEOUT, async || {
        let lines = env.conditions().await?;
        ensure!(
            lines.iter().any(|line| line.contains("rules: all: effect")),
            "{lines:?}"
        );
        anyhow::Ok(())
    })
    .await;
    reaches("the rules of before", true).await;
    let outcome = load.end().await?;
    ensure!(outcome.failures.is_empty(), "{:?}", outcome.failures);
    write("rules: []\n")?;
    reaches("no rule", false).await;
    let reply = request(env.http(), &RawRequest::get(&host, "/metrics")).await?;
    ensure_refused(&reply, 403, "refused_by_policy")
}

/// Each of two files forbids the port and the service: one has them with rules that deny, and the other one
/// has neither.
#[tokio::test(flavor = "multi_thread")]
async fn file_that_takes_away_a_port_and_a_service_with_their_denies_opens_neither() -> Result<()> {
    let (exporter, target) = (
        Exporter::start("worker-1").await?,
        EchoTarget::start().await?,
    );
    let service = SocketAddr::new(next_loopback().into(), 7022);
    let (port, raw) = (exporter.addr().port(), target.addr().port());
    let denied = format!(
        "httpProxyPorts: \"{port}\"\n\
         services: [{{ name: raw, listen: \"{service}\", node: worker-1, target: \"{raw}\" }}]\n\
         rules:\n- {{ name: no-port, effect: deny, ports: [{port}] }}\n\
         - {{ name: no-service, effect: deny, destinations: [service] }}\n- {{ name: all }}\n"
    );
    let absent = "rules: [{ name: all }]\n";
    let env = TestEnv::start_with_file(&denied, |_| {}).await?;
    let _agent = env.agent("worker-1").await?;
    let get = RawRequest::get(&format!("worker-1:{port}"), "/metrics");
    let asking = async || loop {
        let reply = request(env.http(), &get).await?;
        ensure!(reply.status == 403, "{}: {}", reply.status, reply.text());
    };
    let dialing = async || loop {
        // The listener is closed half of the time.
        if let Ok(mut caller) = ByteStream::connect(Endpoint::plain(service)).await {
            let _reset = caller.send(b"x").await;
            ensure!(caller.receive(1).await.is_err(), "bytes reached the target");
        } else {
            tokio::task::yield_now().await;
        }
    };
    let replacing = async {
        for file in [absent, &denied].into_iter().cycle().take(20) {
            std::fs::write(env.config_file(), file)?;
            env.reload();
            let reason = if file == absent {
                "is not allowed"
            } else {
                "rule no-port denies"
            };
            eventually("the next file", WAIT_TIMEOUT, async || {
                ensure_contains(&request(env.http(), &get).await?.text(), &[reason])
            })
            .await;
        }
        anyhow::Ok(())
    };
    let ended: Result<()> = tokio::select! {
        asked = asking() => asked,
        dialed = dialing() => dialed,
        dialed = dialing() => dialed,
        replaced = replacing => replaced,
    };
    ended?;
    let reached = exporter.traffic().accepted() + target.traffic().accepted();
    ensure!(reached == 0, "{reached} requests reached a target");
    Ok(())
}

/// Requests and tunnels to worker-1, which the new rules allow, and to worker-2, which they refuse.
struct Running {
    follows: [Exchange; 2],
    tunnels: [Tunnel; 2],
}

impl Running {
    async fn start(env: &TestEnv, hosts: &[String; 2], echoes: &[String; 2]) -> Result<Self> {
        let dialer = EgressDialer::tcp(env.bound().connect.context("no CONNECT listener")?);
        let follow = async |host: &str| {
            let follow = RawRequest::get(host, "/follow");
            Exchange::start(env.http(), &follow).await
        };
        Ok(Self {
            follows: [follow(&hosts[0]).await?, follow(&hosts[1]).await?],
            tunnels: [
                dialer.dial(&echoes[0]).await?,
                dialer.dial(&echoes[1]).await?,
            ],
        })
    }

    /// Checks that bytes pass to worker-1 and back, or to both nodes.
    async fn flow(&mut self, exporters: &[Exporter; 2], nodes: usize) -> Result<()> {
        for exporter in &exporters[..nodes] {
            exporter.emit("line");
        }
        for follow in &mut self.follows[..nodes] {
            ensure!(follow.line().await.as_deref() == Some("line"));
        }
        for tunnel in &mut self.tunnels[..nodes] {
            tunnel.write_all(b"ping").await?;
            let mut answer = [0; 4];
            tunnel.read_exact(&mut answer).await?;
            ensure!(&answer == b"ping");
        }
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn reload_ends_what_the_rules_refuse_if_asked_and_cuts_nothing_else() -> Result<()> {
    let exporters = [
        Exporter::start("worker-1").await?,
        Exporter::start("worker-2").await?,
    ];
    let echo = EchoTarget::start().await?;
    let ports = exporters.each_ref().map(|exporter| exporter.addr().port());
    let settings = format!(
        "httpProxyPorts: [{}, {}]\nconnectPorts: {}\nconnectListen: '127.0.0.1:0'\n",
        ports[0],
        ports[1],
        echo.addr().port()
    );
    let service = SocketAddr::from((next_loopback(), 7023));
    let open = format!(
        "{settings}services: [{{ name: raw, listen: '{service}', node: worker-1, target: {} }}]\n\
         rules: [{{ name: all }}]\n",
        echo.addr().port()
    );
    let env = TestEnv::start_with_file(&open, |_| {}).await?;
    let _agents = [env.agent("worker-1").await?, env.agent("worker-2").await?];
    let hosts = [0, 1].map(|index: usize| format!("worker-{}:{}", index + 1, ports[index]));
    let echoes = [1, 2].map(|number| format!("worker-{number}:{}", echo.addr().port()));
    let mut running = Running::start(&env, &hosts, &echoes).await?;
    let server = admin(&env).await?;
    let mut raw = TcpStream::connect(service).await?;
    raw.write_all(b"ping").await?;
    ensure!(raw.read(&mut [0; 4]).await? > 0);
    ensure!(server.end_running().await? == 0);

    let closed = format!(
        "{settings}rules: [{{ name: no-2, effect: deny, nodes: [worker-2] }}, {{ name: all }}]\n"
    );
    std::fs::write(env.config_file(), closed)?;
    ensure!(server.reload().await?.check().is_ok());
    let reply = request(env.http(), &RawRequest::get(&hosts[1], "/metrics")).await?;
    ensure_refused(&reply, 403, "refused_by_policy")?;
    running.flow(&exporters, 2).await?;

    let refused = "tunnel_server_streams_total{result=\"refused_by_policy\"}";
    let before = env.metric(refused).await?;
    // The service is in the file no more.
    ensure!(server.end_running().await? == 3);
    ensure!(raw.read_to_end(&mut Vec::new()).await.is_err(), "not cut");
    let ended = async {
        while running.follows[1].data().await.is_some() {}
        let mut rest = Vec::new();
        running.tunnels[1].read_to_end(&mut rest).await
    };
    let ended = tokio::time::timeout(scaled(Duration::from_secs(10)), ended).await?;
    ensure!(ended.is_err(), "a tunnel that is cut does not end cleanly");
    let ended = running.follows[1].ended().context("in progress")?;
    ensure_reset(ended)?;
    eventually("the records", WAIT_TIMEOUT, async || {
        let count = env.metric(refused).await?;
        ensure!(count == before + 3, "{count}");
        anyhow::Ok(())
    })
    .await;
    running.flow(&exporters, 1).await
}

/// A kubelet reads each of these as a token, or may.
#[tokio::test(flavor = "multi_thread")]
async fn token_that_is_spelled_otherwise_evades_no_deny() -> Result<()> {
    let file = "callers: { scrape: { serviceAccount: m/scrape } }\n\
                rules:\n- { name: no-scrape, effect: deny, callers: [scrape] }\n- { name: all }\n";
    let site = Site::start("worker-1", file).await?;
    let get = || RawRequest::get(&site.kubelet_host(), "/metrics/cadvisor");
    let protocol = "base64url.bearer.authorization.k8s.io.VA, v5.channel.k8s.io";
    let spelled = [
        get().header("Authorization", "Bearer T"),
        get().header("Authorization", "bearer T x"),
        get().header("Authorization", "Bearer  T"),
        get()
            .header("Authorization", "Basic YTpi")
            .header("Authorization", "Bearer T"),
        get().header("Sec-WebSocket-Protocol", protocol),
    ];
    for name in [None, Some("person")] {
        for asked in &spelled {
            let reply = request(site.https(name)?, asked).await?;
            ensure!(reply.status == 403, "{}: {}", reply.status, reply.text());
            ensure_contains(&reply.text(), &["rule no-scrape denies metrics"])?;
        }
        let other = get().header("Authorization", "Basic YTpi");
        ensure_status(&request(site.https(name)?, &other).await?, 200)?;
    }
    let url = format!("http://worker-1:{}/metrics", site.exporter.addr().port());
    let asked = RawRequest::get("x", &url).header("Proxy-Authorization", &basic(OPS));
    let endpoint = || site.env.bound().connect.context("no CONNECT listener");
    ensure_status(&request(endpoint()?, &asked).await?, 200)?;
    let asked = asked.header("Authorization", "Bearer T");
    let reply = request(endpoint()?, &asked).await?;
    ensure_refused(&reply, 403, "refused_by_policy")
}
