//! Rules on an edge node that redirect the Service `kubernetes` to the agent: clients of the node
//! reach the API server, and callers in the cloud do not reach it through the node.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use tunnel_server::config::RawTcpService;
use tunnel_tests::checks::get_ok;
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::env::{Agent, TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::eventually;
use tunnel_tests::netns::{CLOUD_ADDRESS, Namespace, in_service_namespace};
use tunnel_tests::process::Program;
use tunnel_tests::targets::Exporter;
use tunnel_tests::tools::{Tool, or_skip};

use super::{HOST, NODE};

/// Address of the Service `kubernetes`.
const SERVICE: &str = "10.96.0.1:443";
/// Time limit of a test in its namespace.
const LIMIT: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread")]
async fn redirected_dial_of_the_agent_does_not_return_to_the_cloud() -> Result<()> {
    let test = "cloud::redirected::redirected_dial_of_the_agent_does_not_return_to_the_cloud";
    in_service_namespace(test, LIMIT, redirected_dial).await
}

async fn redirected_dial() -> Result<()> {
    let target = Exporter::start_on((CLOUD_ADDRESS, 0).into(), HOST, None).await?;
    let env = TestEnv::start_with(|settings| {
        settings.cloud_apiserver = vec![target.addr().to_string()];
        settings.services = vec![
            service("redirected", SERVICE),
            service("direct", &target.addr().to_string()),
        ];
    })
    .await?;
    redirect_to_the_agent().await?;
    let config = env.agent_config_with(NODE, |settings| {
        settings.cloud_listen = vec!["apiserver=169.254.2.1:10268".into()];
        settings.allow_targets = Some("10.0.0.0/8:1-65535".into());
    })?;
    let _agent = Agent::start(config).await?;
    env.connected(NODE).await;
    let service: SocketAddr = SERVICE.parse()?;
    eventually("a client of the node", WAIT_TIMEOUT, async || {
        get_ok(service, HOST, "/metrics").await
    })
    .await;
    // The agent accepts some connections before and some after it has finished the dial.
    for round in 0..32 {
        for (name, address) in &env.bound().services {
            let answer = request(*address, &RawRequest::get(HOST, "/metrics")).await;
            ensure!(
                answer.is_ok() == (name == "direct"),
                "round {round}, {name}: {answer:?}"
            );
        }
    }
    get_ok(service, HOST, "/metrics").await?;
    Ok(())
}

#[tokio::test]
async fn address_is_added_and_removed_once_and_a_missing_right_is_named() -> Result<()> {
    let Some(namespace) = or_skip(Namespace::new("address", Path::new("/etc/hosts"))) else {
        return Ok(());
    };
    for (verb, expected) in [("add", 1), ("remove", 0)] {
        for _run in 0..2 {
            let change = address(verb)?.inside(Some(&namespace));
            change.run().await?.ok()?;
            let listed = namespace.script("$IP -4 -o address show dev lo")?;
            let found = listed.matches("inet 169.254.2.1/32 scope host lo").count();
            ensure!(found == expected, "{verb}: {listed}");
        }
    }
    namespace.script("$IP address add 169.254.2.1/16 dev lo")?;
    let other = address("remove")?.inside(Some(&namespace)).run().await?;
    other.ensure_failed(1, &["lo has 169.254.2.1/16"])?;
    let other = address("add")?.args(["--interface", "no-such"]);
    let other = other.inside(Some(&namespace)).run().await?;
    other.ensure_failed(1, &["there is no interface no-such"])?;
    // A user namespace of its own has no right to the network.
    let unshare = ["unshare", "-U"];
    if or_skip(namespace.script("unshare -U true")).is_some() {
        let denied = address("add")?.through(unshare).inside(Some(&namespace));
        let denied = denied.run().await?;
        denied.ensure_failed(1, &["not permitted", "NET_ADMIN"])?;
    }
    Ok(())
}

/// Returns the verb that adds or removes the agent's link-local address.
fn address(change: &str) -> Result<Program> {
    let program = Program::ours("tunnel-agent")?;
    Ok(program.args(["address", change, "169.254.2.1"]))
}

fn service(name: &str, target: &str) -> RawTcpService {
    RawTcpService {
        name: name.into(),
        listen: "127.0.0.1:0".into(),
        node: NODE.into(),
        target: target.into(),
        protocol: None,
    }
}

/// Adds the agent's link-local address and the rendered rules to this namespace.
async fn redirect_to_the_agent() -> Result<()> {
    address("add")?.run().await?.ok()?;
    let render = Program::ours("tunnel-agent")?.args(["render", "edge-apiserver"]);
    let render = render.args(["--way", "nft", "--service-ip", "10.96.0.1"]);
    let rules = render.run().await?.ok()?;
    let nft = Program::tool(Tool::Nft)?.args(["-f", "-"]);
    nft.run_with(rules.as_bytes()).await?.ok()?;
    Ok(())
}
