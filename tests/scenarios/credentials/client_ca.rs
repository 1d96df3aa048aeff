//! S12: certificates of `ca client` identify callers, and an agent's certificate does not.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use rustls::RootCertStore;
use tunnel_proto::tls::files::{chain, private_key};
use tunnel_tests::client::{ClientTls, Endpoint, RawRequest, request};
use tunnel_tests::process::{Listener, Program, ScratchDir, ServerSetup};

#[tokio::test(flavor = "multi_thread")]
async fn s12_caller_of_the_client_ca_is_served_and_an_agent_is_not() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let path = |name: &str| scratch.path().join(name);
    let (data, caller) = (path("server"), path("alice"));
    let made = Program::ours("tunnel-server")?
        .args(["ca", "--offline", "client", "alice", "--dir"])
        .arg(&caller)
        .arg("--data-dir")
        .arg(&data);
    made.run().await?.ok()?;
    let client_ca = data.join("client-ca.crt");
    let server = ServerSetup::on_loopback(&data)
        .args(&["--https-client-auth", "require"])
        .args(&["--client-ca", &client_ca.to_string_lossy()]);
    let server = server.start().await?;
    let agent = path("agent");
    let _agent = server.agent_setup("worker-1", &agent).await?.start()?;
    server.wait_until_connected(&["worker-1"]).await;

    let mut roots = RootCertStore::empty();
    for root in chain(&std::fs::read(caller.join("server-ca.crt"))?)? {
        roots.add(root)?;
    }
    let ask = async |certificate: &Path, key: &Path| -> Result<u16> {
        let key = private_key(&std::fs::read(key)?)?;
        let chain = chain(&std::fs::read(certificate)?)?;
        let tls = ClientTls::verifying("worker-1", roots.clone(), Some((chain, key)))?;
        let endpoint = Endpoint::tls(server.address(Listener::Https), tls);
        let reply = request(endpoint, &RawRequest::get("worker-1:10250", "/")).await?;
        Ok(reply.status)
    };
    // Nothing listens at the node's port, so any answer shows that the caller was accepted.
    let answered = ask(&caller.join("alice.crt"), &caller.join("alice.key")).await;
    answered.context("the caller is accepted")?;
    let refused = ask(&agent.join("agent.crt"), &agent.join("agent.key")).await;
    ensure!(refused.is_err(), "the agent got {refused:?}");
    Ok(())
}
