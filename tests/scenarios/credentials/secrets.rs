//! T21: no secret appears in logs at debug level, in metrics, or in the output of operators'
//! commands.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use rustls::RootCertStore;
use tunnel_proto::tls::files::chain;
use tunnel_tests::ca::{Leaf, TestCa};
use tunnel_tests::client::{ClientTls, Endpoint, RawRequest, request};
use tunnel_tests::process::{AgentSetup, Listener, ScratchDir, ServerSetup};
use tunnel_tests::targets::FakeKubelet;

const BEARER: &str = "bearer-of-a-caller-90c41d";
const COOKIE: &str = "session-of-a-caller-77a2";

/// Returns the base64 lines of a PEM key. None of them may appear in any output.
pub(super) fn lines_of_key(path: &Path) -> Result<Vec<String>> {
    let pem = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let lines = pem.lines().filter(|line| !line.starts_with("-----"));
    Ok(lines.map(str::to_owned).collect())
}

#[tokio::test(flavor = "multi_thread")]
async fn t21_no_secret_is_in_logs_metrics_or_answers_of_a_whole_run_at_debug() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let callers = TestCa::new("callers")?;
    let callers_file = scratch.file("callers.pem", callers.pem())?;
    let own = TestCa::new("clients")?.issue(&Leaf::caller("culvert"))?;
    let (own_file, own_key) = own.write(scratch.path(), "own")?;
    let kubelet = FakeKubelet::start("worker-1").await?;
    let port = kubelet.addr().port().to_string();
    let data = scratch.path().join("server");
    let setup = ServerSetup::on_loopback(&data)
        .args(&["--log-level", "debug", "--proxy-port-listen", "off"])
        .args(&["--client-ca", &callers_file.to_string_lossy()])
        .args(&["--target-cert-file", &own_file.to_string_lossy()])
        .args(&["--target-key-file", &own_key.to_string_lossy()])
        .args(&["--https-proxy-ports", &port]);
    let mut server = setup.start().await?;
    let token = server.token("worker-1", None).await?;
    let unused = server.token("worker-2", None).await?;
    let agents = server.address(Listener::Agents);
    let start = |folder: &str, node: &str, token: &str| {
        let folder = scratch.path().join(folder);
        let setup = AgentSetup::on_loopback(node, agents, &folder);
        let arguments = ["--log-level", "debug", "--token", token];
        setup.args(&arguments).start()
    };
    let agent = start("agent", "worker-1", &token)?;
    server.wait_until_connected(&["worker-1"]).await;
    // Refused tokens are logged, too. One belongs to another node, and one was never issued.
    let guess = token.replacen('.', ".0000", 1);
    let refused = start("other", "worker-3", &unused)?;
    let wrong = start("third", "worker-1", &guess)?;
    let caller = callers.issue(&Leaf::caller("kube-apiserver-kubelet-client"))?;
    let mut roots = RootCertStore::empty();
    for root in chain(&std::fs::read(data.join("ca.crt"))?)? {
        roots.add(root)?;
    }
    let tls = ClientTls::verifying("worker-1", roots, Some(caller.presented()?))?;
    let endpoint = Endpoint::tls(server.address(Listener::Https), tls);
    for host in ["worker-1", "nobody"] {
        let head = RawRequest::get(&format!("{host}:{port}"), "/client-certificate")
            .header("Authorization", &format!("Bearer {BEARER}"))
            .header("Cookie", &format!("id={COOKIE}"));
        let reply = request(endpoint.clone(), &head).await?;
        ensure!(
            // The TLS server name selects the node. The port in Host counts only if Host names that
            // node, so the server dials the kubelet's default port, which is closed here.
            reply.status == if host == "nobody" { 502 } else { 200 },
            "{}",
            reply.text()
        );
    }
    // The server logs the refused caller at debug level.
    let other_cert = TestCa::new("another")?.issue(&Leaf::caller("unknown"))?;
    let tls = ClientTls::insecure("worker-1", Some(other_cert.presented()?))?;
    let endpoint = Endpoint::tls(server.address(Listener::Https), tls);
    let head = RawRequest::get("worker-1", "/").header("Authorization", BEARER);
    ensure!(request(endpoint, &head).await.is_err());
    let mut outputs = Vec::new();
    for path in ["/metrics", "/nodes", "/readyz?verbose"] {
        let meta = server.address(Listener::Meta);
        let shown = request(meta, &RawRequest::get("meta", path)).await?;
        outputs.push((path.to_owned(), shown.text()));
    }
    let verbs = "nodes, nodes -o json, token list, nodes revoke worker-1, ca";
    for verb in verbs.split(", ") {
        let words: Vec<_> = verb.split(' ').collect();
        let done = server.verb(&words)?.run().await?;
        outputs.push((verb.to_owned(), format!("{done}")));
    }
    let id = token.split('.').next().context("no id")?;
    let listed = &outputs[5].1;
    ensure!(listed.contains(id), "{listed}");
    let log = server.process().log().lines().join("\n");
    outputs.push(("server's log".into(), log));
    for process in [&agent, &refused, &wrong] {
        outputs.push(("agent's log".into(), process.log().lines().join("\n")));
    }
    let log = &outputs[8].1;
    ensure!(
        log.contains("DEBUG") && log.contains("client-certificate"),
        "{log}"
    );

    let mut secrets = vec![BEARER.to_owned(), COOKIE.to_owned()];
    for token in [&token, &unused, &guess] {
        secrets.push(token.split('.').nth(1).context("no secret")?.to_owned());
    }
    let agent_key = scratch.path().join("agent").join("agent.key");
    for key in [data.join("ca.key"), own_key, agent_key] {
        secrets.extend(lines_of_key(&key)?);
    }
    let are_long = secrets.iter().all(|secret| secret.len() >= 16);
    ensure!(are_long, "{secrets:?}");
    for (where_, text) in &outputs {
        for secret in &secrets {
            ensure!(!text.contains(secret), "{secret} is in {where_}:\n{text}");
        }
    }
    Ok(())
}
