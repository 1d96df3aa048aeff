//! kube-apiserver's egress selector, with a dialer that follows kube-apiserver's source. TLS runs
//! between the dialer and the kubelet.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::Instant;
use tunnel_tests::ca::{Issued, Leaf, TestCa};
use tunnel_tests::checks::ensure_contains;
use tunnel_tests::client::{ClientTls, EgressDialer, Tunnel, ask_through, over_tls};
use tunnel_tests::cluster::{Cluster, Real, egress_flag};
use tunnel_tests::env::{Agent, WAIT_TIMEOUT};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::process::ScratchDir;
use tunnel_tests::targets::{EchoTarget, Exporter, FakeKubelet, TargetTls, sha256_hex};
use tunnel_tests::tools::or_skip;

use super::{ConnectFixture, LISTENER, NODE, caller_tls, get, kubelet};

/// A CONNECT listener on a Unix socket, and a kubelet behind an agent.
struct KubeletSite {
    _agent: Agent,
    fixture: ConnectFixture,
    /// Issues the kubelet's certificate and that of the caller.
    ca: TestCa,
    caller: Issued,
    /// TLS of the caller to the kubelet.
    tls: ClientTls,
    kubelet: FakeKubelet,
    target: String,
}

impl KubeletSite {
    async fn start() -> Result<Self> {
        let fixture = ConnectFixture::start().await?;
        let ca = TestCa::new("cluster")?;
        let caller = ca.issue(&Leaf::caller("apiserver"))?;
        let kubelet = kubelet(&ca).await?;
        Ok(Self {
            _agent: fixture.env.agent(NODE).await?,
            fixture,
            tls: caller_tls(&ca, NODE, Some(&caller))?,
            ca,
            caller,
            target: format!("{NODE}:{}", kubelet.addr().port()),
            kubelet,
        })
    }
}

/// Checks that a dial fails with an error that contains each of the parts.
pub(super) async fn fails(dialer: &EgressDialer, target: &str, parts: &[&str]) -> Result<()> {
    let error = dialer.dial(target).await.err();
    let error = error.with_context(|| format!("{target} was dialed"))?;
    ensure_contains(&error.to_string(), parts).context(target.to_owned())
}

/// Opens one upgraded stream, like exec, attach and port-forward, and checks that the kubelet
/// echoes.
async fn exec(dialer: &EgressDialer, target: &str, tls: &ClientTls, path: &str) -> Result<()> {
    let mut stream = over_tls(dialer.dial(target).await?, tls).await?;
    let request = format!(
        "POST {path} HTTP/1.1\r\nHost: {target}\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\
         X-Stream-Protocol-Version: v4.channel.k8s.io\r\nContent-Length: 0\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    let head = String::from_utf8_lossy(&head);
    ensure!(head.starts_with("HTTP/1.1 101 "), "{head}");
    stream.write_all(b"whoami").await?;
    let mut echoed = [0; 6];
    stream.read_exact(&mut echoed).await?;
    ensure!(&echoed == b"whoami", "{echoed:?}");
    stream.shutdown().await?;
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).await?;
    ensure!(rest.is_empty(), "{rest:?}");
    Ok(())
}

async fn logs(dialer: &EgressDialer, target: &str, tls: &ClientTls) -> Result<String> {
    let stream = over_tls(dialer.dial(target).await?, tls).await?;
    Ok(ask_through(stream, &get(target, "/containerLogs/default/web/app")).await?)
}

/// P3: kubeadm's order of addresses (InternalIP first) works while the addresses are unique. If two
/// nodes have the same address, the caller receives 400 with both names, and the order with
/// Hostname first works.
#[tokio::test(flavor = "multi_thread")]
async fn p03_addresses_do_while_they_are_unique_and_names_do_when_they_are_not() -> Result<()> {
    let site = KubeletSite::start().await?;
    let (fixture, tls) = (&site.fixture, &site.tls);
    let port = site.kubelet.addr().port();
    let address: IpAddr = Ipv4Addr::new(192, 168, 33, 221).into();
    fixture.env.nodes().record(&NODE.parse()?, &[address]);
    let by_address = format!("{address}:{port}");
    let path = "/exec/default/web/app?command=sh";
    eventually("the exec by address", WAIT_TIMEOUT, async || {
        exec(&fixture.dialer(), &by_address, tls, path).await
    })
    .await;
    fixture.env.nodes().record(&"worker-2".parse()?, &[address]);
    let refusal = eventually("the address of two nodes", WAIT_TIMEOUT, async || {
        let refused = fixture.dialer().dial(&by_address).await.err();
        refused.context("still unique")
    })
    .await;
    ensure_contains(&refusal.to_string(), &["code 400", "worker-1, worker-2"])?;
    exec(&fixture.dialer(), &site.target, tls, path).await
}

/// P4a over a Unix socket: the dialer reaches kubelets through their agents, and the other targets
/// of the API server.
#[tokio::test(flavor = "multi_thread")]
async fn p04a_kubelets_webhooks_and_aggregated_apis_are_reached() -> Result<()> {
    let site = KubeletSite::start().await?;
    let dialer = site.fixture.dialer();
    let answer = logs(&dialer, &site.target, &site.tls).await?;
    ensure_contains(&answer, &["worker-1: log of web/app"])?;
    for path in [
        "/exec/default/web/app?command=sh",
        "/attach/default/web/app?x=1",
        "/portForward/default/web?port=80",
    ] {
        let done = exec(&dialer, &site.target, &site.tls, path).await;
        done.context(path)?;
    }
    // The server dials a webhook behind a Service and an aggregated API directly, by address and by
    // name.
    let name = "hook.default.svc";
    let serving = site.ca.issue(&Leaf::target(name))?.serving()?;
    let webhook = FakeKubelet::start_on(([127, 0, 0, 1], 0).into(), "webhook", Some(serving));
    let webhook = webhook.await?;
    let port = webhook.addr().port();
    let hook_tls = caller_tls(&site.ca, name, Some(&site.caller))?;
    for target in [format!("127.0.0.1:{port}"), format!("localhost:{port}")] {
        let stream = over_tls(dialer.dial(&target).await?, &hook_tls).await?;
        let answer = ask_through(stream, &get(name, "/healthz")).await?;
        ensure!(answer.ends_with("ok"), "{target}: {answer}");
    }
    // Other targets fail at once.
    let began = Instant::now();
    for (target, code) in [
        ("203.0.113.7:443", "code 403"),
        ("169.254.169.254:80", "code 403"),
        ("worker-1:22", "code 403"),
        ("127.0.0.1:1", "code 502"),
    ] {
        fails(&dialer, target, &[code]).await?;
    }
    ensure!(began.elapsed() < scaled(Duration::from_secs(1)));
    Ok(())
}

/// P4a with a real kube-apiserver that has the egress file and no other route to the node.
#[tokio::test(flavor = "multi_thread")]
async fn p04a_a_real_kube_apiserver_with_the_egress_file_alone_reads_logs() -> Result<()> {
    if or_skip(Real::binaries()).is_none() {
        return Ok(());
    }
    let site = KubeletSite::start().await?;
    let scratch = ScratchDir::new()?;
    let ca = scratch.file("kubelets.crt", site.ca.pem())?;
    let (certificate, key) = site.caller.write(scratch.path(), "apiserver")?;
    let flags = [
        ("kubelet-certificate-authority", ca),
        ("kubelet-client-certificate", certificate),
        ("kubelet-client-key", key),
    ];
    let mut flags = flags
        .map(|(flag, file)| format!("--{flag}={}", file.display()))
        .to_vec();
    flags.push(egress_flag(&scratch, &site.fixture.socket)?);
    let Some(cluster) = Cluster::real_with(&flags).await? else {
        return Ok(());
    };
    let node = json!({
        "apiVersion": "v1", "kind": "Node", "metadata": { "name": NODE },
        "status": {
            "addresses": [{ "type": "Hostname", "address": NODE }],
            "daemonEndpoints": { "kubeletEndpoint": { "Port": site.kubelet.addr().port() } },
        },
    });
    cluster.admin().create("/api/v1/nodes", &node).await?;
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "web" },
        "spec": { "nodeName": NODE, "containers": [{ "name": "app", "image": "none" }] },
    });
    let pods = "/api/v1/namespaces/default/pods";
    cluster.admin().create(pods, &pod).await?;
    let log = cluster.admin().text(&format!("{pods}/web/log")).await?;
    ensure_contains(&log, &["worker-1: log of web/app"])
}

/// P4a: while the server is stopped, a dial fails at once. After the restart the same dialer works
/// again.
#[tokio::test(flavor = "multi_thread")]
async fn p04a_a_restart_is_felt_by_running_connections_alone() -> Result<()> {
    let mut fixture = ConnectFixture::start().await?;
    let echo = EchoTarget::start().await?;
    let dialer = fixture.dialer();
    let target = echo.addr().to_string();
    talk(dialer.dial(&target).await?).await?;
    let agents = fixture.env.bound().agents;
    fixture.env.stop_server().await?;
    let began = Instant::now();
    fails(&dialer, &target, &[]).await?;
    ensure!(began.elapsed() < scaled(Duration::from_secs(1)));
    fixture.env.start_server_at(agents).await?;
    talk(dialer.dial(&target).await?).await
}

/// Sends bytes and checks that the target echoes them and then closes.
pub(crate) async fn talk(mut tunnel: Tunnel) -> Result<()> {
    tunnel.write_all(b"hello").await?;
    let mut received = [0; 5];
    tunnel.read_exact(&mut received).await?;
    ensure!(&received == b"hello");
    tunnel.shutdown().await?;
    let mut rest = Vec::new();
    tunnel.read_to_end(&mut rest).await?;
    ensure!(rest.is_empty());
    Ok(())
}

/// P8 8a: the caller verifies the kubelet's certificate, so the caller refuses one of a foreign CA.
/// The tunnel does not notice the difference.
#[tokio::test(flavor = "multi_thread")]
async fn p08_a_swapped_kubelet_certificate_is_refused_by_the_caller() -> Result<()> {
    let site = KubeletSite::start().await?;
    let dialer = site.fixture.dialer();
    let answer = logs(&dialer, &site.target, &site.tls).await?;
    ensure_contains(&answer, &["log of web"])?;
    let swapped = kubelet(&TestCa::new("foreign")?).await?;
    let own = TargetTls::self_signed(&[NODE])?;
    let unsigned = FakeKubelet::start_on(([127, 0, 0, 1], 0).into(), NODE, Some(own)).await?;
    for port in [swapped.addr().port(), unsigned.addr().port()] {
        let tunnel = dialer.dial(&format!("{NODE}:{port}")).await?;
        let error = over_tls(tunnel, &site.tls).await.err();
        let error = error.context("was accepted")?.to_string();
        ensure_contains(&error, &["certificate"])?;
    }
    Ok(())
}

/// P9: the kubelet sees the caller's own certificate, or none. The tunnel adds no certificate.
#[tokio::test(flavor = "multi_thread")]
async fn p09_the_kubelet_sees_the_callers_own_certificate() -> Result<()> {
    let site = KubeletSite::start().await?;
    let leaf = site.caller.own.cert.first().context("a leaf")?;
    let own = sha256_hex(leaf);
    for (certificate, expected) in [(Some(&site.caller), own.as_str()), (None, "none")] {
        let tls = caller_tls(&site.ca, NODE, certificate)?;
        let tunnel = site.fixture.dialer().dial(&site.target).await?;
        let asked = get(&site.target, "/client-certificate");
        let answer = ask_through(over_tls(tunnel, &tls).await?, &asked).await?;
        ensure!(answer.trim_end().ends_with(expected), "{answer}");
    }
    Ok(())
}

/// P4a over TCP with mutual TLS: callers need no ALPN, a certificate of the CA is required, and no
/// session is resumed.
#[tokio::test(flavor = "multi_thread")]
async fn p04a_mutual_tls_listener_accepts_certificates_of_its_ca_alone() -> Result<()> {
    let (ca, foreign) = (TestCa::new("cluster")?, TestCa::new("foreign")?);
    let scratch = ScratchDir::new()?;
    let callers = scratch.file("ca.crt", ca.pem())?;
    let fixture = ConnectFixture::mutual(&ca, &scratch, &callers).await?;
    let exporter = Exporter::start("cloud").await?;
    let target = exporter.addr().to_string();
    let address = fixture.tcp()?;
    let caller = Leaf::caller("apiserver");
    let (good, bad) = (ca.issue(&caller)?, foreign.issue(&caller)?);
    let tls = caller_tls(&ca, LISTENER, Some(&good))?;
    let dialer = fixture.tls_dialer(tls.clone())?;
    for _ in 0..2 {
        let answer = ask_through(dialer.dial(&target).await?, &get(&target, "/metrics")).await?;
        ensure!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
    // A connection that stays idle does not hinder the others.
    let idle = tokio::net::TcpStream::connect(address).await?;
    for _ in 0..2 {
        let tcp = tokio::net::TcpStream::connect(address).await?;
        let mut stream = over_tls(Box::new(tcp), &tls).await?;
        stream.write_all(b"CONNECT x:1 HTTP/1.1\r\n\r\n").await?;
        let _answered = stream.read_u8().await?;
        let kind = stream.get_ref().1.handshake_kind();
        ensure!(kind == Some(rustls::HandshakeKind::Full), "{kind:?}");
    }
    drop(idle);
    for certificate in [None, Some(&bad)] {
        let tls = caller_tls(&ca, LISTENER, certificate)?;
        fails(&fixture.tls_dialer(tls)?, &target, &[]).await?;
    }
    // A caller without TLS.
    fails(&EgressDialer::tcp(address), &target, &[]).await
}
