//! R04: what a rogue listener at the agent learns of callers and of the server.

use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use tunnel_agent::config::TransportChoice;
use tunnel_tests::ca::{Leaf, TestCa};
use tunnel_tests::client::{Door, RawRequest, request};
use tunnel_tests::eventually::eventually;
use tunnel_tests::targets::{Caught, RogueTarget};
use tunnel_tests::world::{PATIENCE, World};

use super::borrowed::{Authorities, door};

const TOKEN: &str = "bearer-of-a-caller-5f20";

/// The ways of a caller to a target's port: the TLS door, and the proxy port of that number.
fn doors(world: &World, port: u16, certificate: &tunnel_tests::ca::Issued) -> Result<[Door; 2]> {
    let tls_door = world.bound().https.context("no TLS door")?;
    let mut proxies = world.bound().proxy.iter();
    let proxy = proxies.find(|address| address.port() == port);
    Ok([
        door(world, tls_door, Some(certificate))?,
        door(world, *proxy.context("no proxy port")?, Some(certificate))?,
    ])
}

/// Rogues are asked by the API server, with a token, through both doors; says what each caught.
async fn asked(
    transport: TransportChoice,
    verifies: bool,
    judge: impl Fn(&str, u16, Option<&str>, &Caught, &[u8]) -> Result<()>,
) -> Result<()> {
    let authorities = Authorities::new()?;
    let own = authorities.write(&authorities)?;
    let named = Leaf::target("worker-1");
    let ended = Leaf {
        from: SystemTime::now() - Duration::from_secs(7200),
        until: SystemTime::now() - Duration::from_secs(3600),
        ..named.clone()
    };
    let for_clients = Leaf {
        server: false,
        ..named.clone()
    };
    let ca = &authorities.kubelets;
    let certificates = [
        ("honest", ca.issue(&named)?),
        ("of another CA", TestCa::new("rogue")?.issue(&named)?),
        ("of another node", ca.issue(&Leaf::target("worker-2"))?),
        ("ended", ca.issue(&ended)?),
        ("of a client", ca.issue(&for_clients)?),
    ];
    let mut rogues = Vec::new();
    for (what, issued) in &certificates {
        for old in [false, true] {
            rogues.push((*what, RogueTarget::start(&issued.own, old).await?));
        }
    }
    let ports: Vec<_> = rogues
        .iter()
        .map(|(_, rogue)| rogue.addr().port().to_string())
        .collect();
    let world = authorities
        .world_with(verifies, |settings| {
            settings.https_proxy_ports = Some(ports.join(","));
            // The targets' numbers on another loopback address, as a Service would have them.
            settings.proxy_port_listen = Some("127.0.0.5".into());
        })
        .await?;
    let _agent = world
        .agent_with("worker-1", |config| config.transport = transport)
        .await?;
    let apiserver = Leaf::caller("kube-apiserver-kubelet-client");
    let apiserver = authorities.callers.issue(&apiserver)?;
    for (what, rogue) in &rogues {
        let port = rogue.addr().port();
        let head = RawRequest::get(&format!("worker-1:{port}"), "/pods")
            .header("Authorization", &format!("Bearer {TOKEN}"));
        for (round, door) in (1..).zip(doors(&world, port, &apiserver)?) {
            let reply = request(door, &head).await?;
            let settled = async || {
                let caught = rogue.caught();
                let ends = rogue.traffic().accepted() == round && rogue.traffic().open() == 0;
                ends.then_some(caught)
            };
            let caught = eventually("the rogue is done", PATIENCE, settled).await;
            let code = reply.header("x-tunnel-error");
            judge(what, reply.status, code, &caught, &own.own.cert[0])
                .with_context(|| format!("{what} over {transport:?}"))?;
        }
    }
    Ok(())
}

async fn verified(transport: TransportChoice) -> Result<()> {
    let judge = |what: &str, status, code: Option<&str>, caught: &Caught, own: &[u8]| {
        if what == "honest" {
            ensure!(status == 200, "{status}");
            ensure!(caught.holds(TOKEN.as_bytes()) && !caught.certificates.is_empty());
            return Ok(());
        }
        ensure!(
            (status, code) == (502, Some("target_tls")),
            "{status} {code:?}"
        );
        ensure!(caught.failed > 0 && !caught.wire.is_empty(), "{caught:?}");
        ensure!(caught.certificates.is_empty(), "a certificate was shown");
        ensure!(caught.requests.is_empty(), "a request was sent");
        ensure!(!caught.holds(TOKEN.as_bytes()) && !caught.holds(own));
        Ok(())
    };
    asked(transport, true, judge).await
}

#[tokio::test(flavor = "multi_thread")]
async fn r04_rogue_listener_sees_no_certificate_and_no_token_over_quic() -> Result<()> {
    verified(TransportChoice::Quic).await
}

#[tokio::test(flavor = "multi_thread")]
async fn r04_rogue_listener_sees_no_certificate_and_no_token_over_h2() -> Result<()> {
    verified(TransportChoice::H2).await
}

/// What the test above would see if nothing were verified.
#[tokio::test(flavor = "multi_thread")]
async fn r04_rogue_listener_learns_both_where_targets_are_accepted_as_they_are() -> Result<()> {
    let judge = |_what: &str, status, _code: Option<&str>, caught: &Caught, own: &[u8]| {
        ensure!(status == 200, "{status}");
        ensure!(caught.holds(TOKEN.as_bytes()), "no token");
        ensure!(caught.certificates.iter().all(|shown| **shown == *own));
        ensure!(!caught.certificates.is_empty(), "no certificate");
        Ok(())
    };
    asked(TransportChoice::Quic, false, judge).await
}
