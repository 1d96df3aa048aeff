//! R04: the secrets of callers and of the server that an impostor on a target's port can obtain.

use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use tunnel_agent::config::TransportChoice;
use tunnel_tests::ca::{Leaf, TestCa};
use tunnel_tests::client::{Endpoint, RawRequest, request};
use tunnel_tests::env::{TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::eventually;
use tunnel_tests::targets::{Captured, ImpostorTarget};

use super::delegation::{Authorities, endpoint};

const TOKEN: &str = "bearer-of-a-caller-5f20";

/// Returns the endpoints through which a caller reaches a target's port: the HTTPS listener, and
/// the proxy port of that number.
fn endpoints(
    env: &TestEnv,
    port: u16,
    certificate: &tunnel_tests::ca::Issued,
) -> Result<[Endpoint; 2]> {
    let tls_listener = env.bound().https.context("no HTTPS listener")?;
    let mut proxies = env.bound().proxy.iter();
    let proxy = proxies.find(|address| address.port() == port);
    Ok([
        endpoint(env, tls_listener, Some(certificate))?,
        endpoint(env, *proxy.context("no proxy port")?, Some(certificate))?,
    ])
}

/// Starts impostors with various certificates. The API server sends each of them a request with a
/// token, through both listeners. Calls `check` with the data that each impostor captured.
async fn asked(
    transport: TransportChoice,
    verifies: bool,
    check: impl Fn(&str, u16, Option<&str>, &Captured, &[u8]) -> Result<()>,
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
    let mut impostors = Vec::new();
    for (what, issued) in &certificates {
        for old in [false, true] {
            impostors.push((*what, ImpostorTarget::start(&issued.own, old).await?));
        }
    }
    let ports: Vec<_> = impostors
        .iter()
        .map(|(_, impostor)| impostor.addr().port().to_string())
        .collect();
    let env = authorities
        .env_with(verifies, |settings| {
            settings.https_proxy_ports = Some(ports.join(","));
            // The proxy ports have the targets' port numbers on another loopback address, like a
            // Service.
            settings.proxy_port_listen = Some("127.0.0.5".into());
        })
        .await?;
    let _agent = env
        .agent_with("worker-1", |config| config.transport = transport)
        .await?;
    let apiserver = Leaf::caller("kube-apiserver-kubelet-client");
    let apiserver = authorities.callers.issue(&apiserver)?;
    for (what, impostor) in &impostors {
        let port = impostor.addr().port();
        let head = RawRequest::get(&format!("worker-1:{port}"), "/pods")
            .header("Authorization", &format!("Bearer {TOKEN}"));
        for (round, endpoint) in (1..).zip(endpoints(&env, port, &apiserver)?) {
            let reply = request(endpoint, &head).await?;
            let settled = async || {
                let captured = impostor.captured();
                let ends = impostor.traffic().accepted() == round && impostor.traffic().open() == 0;
                ends.then_some(captured)
            };
            let captured = eventually("the impostor is done", WAIT_TIMEOUT, settled).await;
            let code = reply.header("x-tunnel-error");
            check(what, reply.status, code, &captured, &own.own.cert[0])
                .with_context(|| format!("{what} over {transport:?}"))?;
        }
    }
    Ok(())
}

async fn verified(transport: TransportChoice) -> Result<()> {
    let check = |what: &str, status, code: Option<&str>, captured: &Captured, own: &[u8]| {
        if what == "honest" {
            ensure!(status == 200, "{status}");
            ensure!(captured.holds(TOKEN.as_bytes()) && !captured.certificates.is_empty());
            return Ok(());
        }
        ensure!(
            (status, code) == (502, Some("target_tls")),
            "{status} {code:?}"
        );
        ensure!(
            captured.failed > 0 && !captured.wire.is_empty(),
            "{captured:?}"
        );
        ensure!(captured.certificates.is_empty(), "a certificate was shown");
        ensure!(captured.requests.is_empty(), "a request was sent");
        ensure!(!captured.holds(TOKEN.as_bytes()) && !captured.holds(own));
        Ok(())
    };
    asked(transport, true, check).await
}

tests_of! {
    fn r04_impostor_sees_no_certificate_and_no_token_over_quic() = verified(TransportChoice::Quic);
    fn r04_impostor_sees_no_certificate_and_no_token_over_h2() = verified(TransportChoice::H2);
}

/// Runs the attack without verification of targets, to show that the impostor would then obtain
/// both secrets.
#[tokio::test(flavor = "multi_thread")]
async fn r04_impostor_learns_both_where_targets_are_not_verified() -> Result<()> {
    let check = |_what: &str, status, _code: Option<&str>, captured: &Captured, own: &[u8]| {
        ensure!(status == 200, "{status}");
        ensure!(captured.holds(TOKEN.as_bytes()), "no token");
        ensure!(captured.certificates.iter().all(|shown| **shown == *own));
        ensure!(!captured.certificates.is_empty(), "no certificate");
        Ok(())
    };
    asked(TransportChoice::Quic, false, check).await
}
