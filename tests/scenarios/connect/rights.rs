//! P9: kubelets authorize the callers of a CONNECT listener by the credentials that the callers
//! present. The server has a client certificate for delegation at its HTTPS listener and does not
//! use it here.

use anyhow::{Context, Result, ensure};
use rustls::RootCertStore;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tunnel_tests::ca::{Leaf, Subject, TestCa};
use tunnel_tests::checks::ensure_refused;
use tunnel_tests::client::{ClientTls, EgressDialer, Endpoint, RawRequest, over_tls, request};
use tunnel_tests::process::ScratchDir;
use tunnel_tests::targets::{Access, Exporter, FakeKubelet};

use super::{ConnectFixture, NODE, caller_tls, text};

/// The names of the API server and of the tunnel's server in the certificates that kubelets accept.
const APISERVER: &str = "kube-apiserver-kubelet-client";
const OWN: &str = "culvert-tunnel-server";
const SCRAPER: &str = "token-of-prometheus-37c1";

#[tokio::test(flavor = "multi_thread")]
async fn p09_kubelets_give_each_caller_of_the_connect_listeners_its_own_rights() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let (clients, kubelets) = (TestCa::new("clients")?, TestCa::new("kubelets")?);
    let callers = scratch.file("callers.crt", clients.pem())?;
    let client_cert = clients.issue(&Leaf::caller(OWN))?;
    let (own, key) = client_cert.write(scratch.path(), "own")?;
    let fixture = ConnectFixture::over_tcp(|settings| {
        settings.client_ca = text(&callers);
        settings.target_cert_file = text(&own);
        settings.target_key_file = text(&key);
        settings.https_proxy_ports = Some("1024-65535".into());
        settings.http_proxy_ports = None;
    });
    let fixture = fixture.await?;
    let _agent = fixture.env.agent(NODE).await?;
    let access = Access::new(clients.root(), &[APISERVER, OWN])?
        .with_scraper(SCRAPER, "system:serviceaccount:monitoring:prometheus-k8s");
    let serving = kubelets.issue(&Leaf::target(NODE))?.serving()?;
    let kubelet = FakeKubelet::guarded(NODE, serving, access).await?;
    let target = format!("{NODE}:{}", kubelet.addr().port());

    let apiserver = clients.issue(&Leaf::caller(APISERVER))?;
    let other = clients.issue(&Leaf::caller("prometheus"))?;
    let foreign = TestCa::new("another")?.issue(&Leaf::caller(APISERVER))?;
    // The CONNECT listener over TCP authenticates its caller as the API server. That gives the
    // requests inside the tunnel no rights.
    let roots = RootCertStore::clone(&*fixture.env.roots()?);
    let listener_tls = ClientTls::verifying(NODE, roots, Some(apiserver.presented()?))?;
    let tcp = fixture.tls_dialer(listener_tls)?;
    for (endpoint, dialer) in [("uds", fixture.dialer()), ("tcp", tcp)] {
        for (who, certificate, token, expected) in [
            ("a pod without credentials", None, None, [401, 401, 401]),
            ("a wrong token", None, Some("guess"), [401, 401, 401]),
            ("Prometheus", None, Some(SCRAPER), [403, 200, 403]),
            ("the API server", Some(&apiserver), None, [200, 200, 101]),
            ("another caller", Some(&other), None, [403, 403, 403]),
            ("a foreign CA", Some(&foreign), None, [401, 401, 401]),
        ] {
            let tls = caller_tls(&kubelets, NODE, certificate)?;
            let got = tried(&dialer, &target, (&tls, token)).await;
            let got = got.with_context(|| format!("{who} over {endpoint}"))?;
            ensure!(got == expected, "{who} over {endpoint}: {got:?}");
        }
    }
    Ok(())
}

/// A.10: the CA of a cluster also signs kubelets' certificates. No listener accepts a kubelet's
/// certificate as a caller's, in any form of its subject.
#[tokio::test(flavor = "multi_thread")]
async fn kubelets_and_certificates_without_one_name_are_no_callers() -> Result<()> {
    const KUBELET: (Subject, &str) = (Subject::Name, "system:node:edge-1");
    const NODES: (Subject, &str) = (Subject::Organization, "system:nodes");
    const NAME: (Subject, &str) = (Subject::Name, "prometheus");
    const GROUP: (Subject, &str) = (Subject::Organization, "monitoring");
    let scratch = ScratchDir::new()?;
    let clients = TestCa::new("cluster")?;
    let callers = scratch.file("callers.crt", clients.pem())?;
    let fixture = ConnectFixture::over_tcp(|settings| settings.client_ca = text(&callers));
    let fixture = fixture.await?;
    let _agent = fixture.env.agent(NODE).await?;
    let exporter = Exporter::start(NODE).await?;
    let https = fixture.env.bound().https.context("https")?;
    let url = format!("http://{NODE}:{}/metrics", exporter.addr().port());
    // No process listens on the kubelet's port, so an accepted caller receives another error than a
    // refusal.
    let direct = RawRequest::get(&format!("{NODE}:10250"), "/metrics");
    let by_url = RawRequest::get("x", &url);
    let asked = [
        ("10263", https, direct),
        ("CONNECT", fixture.tcp()?, by_url),
    ];
    for (subject, is_caller) in [
        (&[NAME][..], true),
        (&[GROUP, NAME], true),
        (&[NODES, KUBELET], false),
        (&[KUBELET], false),
        (&[NODES, NAME], false),
        (&[NODES], false),
        (&[GROUP, NODES, NAME], false),
        (&[GROUP], false),
        (&[NAME, NAME], false),
        (&[NAME, KUBELET], false),
        (&[GROUP, (Subject::Name, "System:Node:edge-1")], false),
        (&[(Subject::Organization, "System:Nodes"), NAME], false),
    ] {
        let certificate = clients.issue(&Leaf::subject(subject))?;
        for (listener, address, asked) in &asked {
            let roots = RootCertStore::clone(&*fixture.env.roots()?);
            let tls = ClientTls::verifying(NODE, roots, Some(certificate.presented()?))?;
            let reply = request(Endpoint::tls(*address, tls), asked).await?;
            let answer = reply.text();
            let is_refused = answer.contains("the client certificate");
            ensure!(is_refused != is_caller, "{listener}: {subject:?}: {answer}");
            if !is_caller {
                ensure_refused(&reply, 403, "refused_by_policy")?;
            }
        }
    }
    Ok(())
}

/// Returns the statuses of a page, of metrics and of a command, each requested through a separate
/// tunnel.
async fn tried(
    dialer: &EgressDialer,
    target: &str,
    (tls, token): (&ClientTls, Option<&str>),
) -> Result<[u16; 3]> {
    let token = token.map_or_else(String::new, |token| {
        format!("Authorization: Bearer {token}\r\n")
    });
    let command = "POST /exec/default/web-0/app?command=ls HTTP/1.1\r\nConnection: Upgrade\r\n\
                   Upgrade: SPDY/3.1\r\nContent-Length: 0";
    let mut statuses = [0; 3];
    let asked = ["GET /pods HTTP/1.1", "GET /metrics HTTP/1.1", command];
    for (head, status) in asked.into_iter().zip(&mut statuses) {
        let mut stream = over_tls(dialer.dial(target).await?, tls).await?;
        let request = format!("{head}\r\nHost: {target}\r\n{token}\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        while !answer.ends_with(b"\r\n\r\n") {
            answer.push(stream.read_u8().await?);
        }
        let answer = String::from_utf8_lossy(&answer);
        *status = answer.split(' ').nth(1).context("no status")?.parse()?;
        if *status == 101 {
            stream.write_all(b"ls\n").await?;
            let mut echoed = [0; 3];
            stream.read_exact(&mut echoed).await?;
            ensure!(&echoed == b"ls\n", "{echoed:?}");
        }
    }
    Ok(statuses)
}
