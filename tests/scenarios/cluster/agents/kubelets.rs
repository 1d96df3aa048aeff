//! Client certificates of kubelets: which ones authenticate an agent, their rotation, their CA and
//! their revocation.

use std::time::Duration;

use anyhow::{Result, ensure};
use tunnel_ca::revocation::OrderAction;
use tunnel_proto::identity::{TrustDomain, validity};
use tunnel_proto::tls::{self, Trust};
use tunnel_tests::apiserver::Presence;
use tunnel_tests::ca::{Leaf, Subject, TestCa, replace};
use tunnel_tests::client::UpgradeClient;
use tunnel_tests::env::{TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::eventually;
use tunnel_tests::process::{ScratchDir, stored_text};
use tunnel_tests::targets::{FakeKubelet, deterministic_bytes};
use tunnel_tests::websocket::{Message, WebSocket};

use super::Site;
use crate::credentials::attacks::{over_quic, over_tcp};
use crate::http::kubelet::heads;

const NAME: (Subject, &str) = (Subject::Name, "system:node:worker-1");
const GROUP: (Subject, &str) = (Subject::Organization, "system:nodes");

/// Waits until a kubelet with a certificate of `ca` gets a session, which shows that the server has
/// loaded `ca`.
async fn ca_is_loaded(site: &Site, ca: &TestCa) {
    eventually("the CA of kubelets is in use", WAIT_TIMEOUT, async || {
        let good = ca.issue(&Leaf::kubelet("probe"))?.own;
        over_tcp(&site.env, Some(good), trust(&site.env)?).await
    })
    .await;
}

fn trust(env: &TestEnv) -> Result<Trust> {
    Ok(Trust::Roots(tls::roots([env.ca().root().clone()])?))
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_kubelets_own_certificate_of_the_clusters_ca_makes_its_agent() -> Result<()> {
    let site = Site::start().await?;
    ca_is_loaded(&site, &site.client_ca).await;
    let kubelet = || Leaf::kubelet("worker-1");
    let ours = |uri: &str| Leaf {
        uri: Some(uri.to_owned()),
        ..kubelet()
    };
    let foreign = TestCa::new("kubernetes")?;
    let past = std::time::SystemTime::now() - Duration::from_secs(3600);
    let usage = Leaf {
        server: true,
        ..kubelet()
    };
    let ended = Leaf {
        until: past,
        from: past - Duration::from_secs(60),
        ..kubelet()
    };
    let masters = (Subject::Organization, "system:masters");
    let (second_name, wrong_name) = (
        (Subject::Name, "system:node:worker-2"),
        (Subject::Name, "worker-1"),
    );
    let of_cluster = [
        ("our role in addition", ours("culvert://agent/worker-1")),
        ("another node's role", ours("culvert://agent/worker-2")),
        ("a server's role", ours("culvert://server")),
        ("a damaged role", ours("culvert://agent/")),
        ("our role alone", Leaf::agent("worker-1")),
        ("no group", Leaf::subject(&[NAME])),
        ("no name", Leaf::subject(&[GROUP])),
        ("another group", Leaf::subject(&[masters, NAME])),
        ("a second group", Leaf::subject(&[GROUP, masters, NAME])),
        ("a second name", Leaf::subject(&[GROUP, NAME, second_name])),
        ("no node's name", Leaf::subject(&[GROUP, wrong_name])),
        ("capital letters", Leaf::kubelet("Worker-1")),
        ("the usage of servers", usage),
        ("its time over", ended),
    ];
    let mut intruders = vec![("a foreign CA", foreign.issue(&kubelet())?.own)];
    for (what, leaf) in of_cluster {
        intruders.push((what, site.client_ca.issue(&leaf)?.own));
    }
    for (what, key) in intruders {
        let env = &site.env;
        let tcp = over_tcp(env, Some(key.clone()), trust(env)?).await;
        ensure!(tcp.is_err(), "{what} was let in over TCP");
        let quic = over_quic(env, key, trust(env)?).await;
        ensure!(quic.is_err(), "{what} was let in over QUIC");
    }
    let good = site.client_ca.issue(&kubelet())?.own;
    over_tcp(&site.env, Some(good.clone()), trust(&site.env)?).await?;
    over_quic(&site.env, good, trust(&site.env)?).await
}

/// Replaces the certificate during an exec in the same manner as a kubelet. Neither end of the exec
/// notices the rotations.
async fn rotations_under_an_exec(transport: &str) -> Result<()> {
    let site = Site::start().await?;
    let target = FakeKubelet::start("worker-1").await?;
    let pki = site.kubelet("worker-1")?;
    let transport = |settings: &mut tunnel_agent::config::RawConfig| {
        settings.transport = Some(transport.into());
    };
    let agent = site.agent_of_kubelet("worker-1", &pki, transport).await?;
    let node = "worker-1".parse()?;
    let newest = || {
        let sessions = site.env.registry().of_node(&node);
        sessions.first().map(|one| one.session.peer().clone())
    };
    ensure!(newest().is_some_and(|peer| peer.domain == TrustDomain::Cluster));
    let host = format!("worker-1:{}", target.addr().port());
    let query = "command=sh&error=1&input=1&output=1&tty=1";
    let head = heads::command_over_websocket(&host, "exec", query);
    let stream = UpgradeClient::asking_for_websocket(head)
        .connect(site.env.https("worker-1")?)
        .await?
        .switched()?;
    let mut exec = WebSocket::client(stream);
    let mut echo = async |seed| -> Result<()> {
        let bytes = deterministic_bytes(seed, 10_000);
        exec.send(&Message::Binary([&[0], &bytes[..]].concat()))
            .await?;
        let expected = Message::Binary([&[1], &bytes[..]].concat());
        ensure!(exec.next().await? == Some(expected), "no echo");
        Ok(())
    };
    echo(0).await?;
    for round in 2..=5_u64 {
        let mut leaf = Leaf::kubelet("worker-1");
        leaf.until += Duration::from_secs(round);
        let issued = site.client_ca.issue(&leaf)?;
        let (_, expected) = validity(&issued.own.cert[0])?;
        pki.rotate(&round.to_string(), &issued)?;
        eventually("the new certificate is in use", WAIT_TIMEOUT, async || {
            let used = newest().map(|peer| peer.not_after);
            ensure!(used == Some(expected), "{used:?}");
            anyhow::Ok(())
        })
        .await;
        echo(round).await?;
    }
    // The exec still uses its first connection.
    ensure!(target.traffic().open() == 1);
    drop(exec);
    agent.stop().await
}

tests_of! {
    fn kubelets_certificate_is_rotated_under_an_exec_over_quic() = rotations_under_an_exec("quic");
    fn kubelets_certificate_is_rotated_under_an_exec_over_h2() = rotations_under_an_exec("h2");
}

#[tokio::test(flavor = "multi_thread")]
async fn cas_are_reloaded_persisted_and_replaced_without_an_interruption() -> Result<()> {
    let mut site = Site::start().await?;
    ca_is_loaded(&site, &site.client_ca).await;
    let pki = site.kubelet("worker-1")?;
    let agent = site.agent_of_kubelet("worker-1", &pki, |_| {}).await?;
    // An invalid CA changes nothing, and the server reports it.
    site.api()?.set_client_ca("nothing")?;
    eventually("the condition is reported", WAIT_TIMEOUT, async || {
        let ready_text = site.page("/readyz?verbose").await?;
        ensure!(ready_text.contains("[!] kubelet client CA"), "{ready_text}");
        anyhow::Ok(())
    })
    .await;
    ca_is_loaded(&site, &site.client_ca).await;
    // With another CA, the server refuses kubelets of the old CA from the next handshake on.
    let next = TestCa::new("kubernetes")?;
    site.api()?.set_client_ca(next.pem())?;
    ca_is_loaded(&site, &next).await;
    let old = site.client_ca.issue(&Leaf::kubelet("worker-2"))?.own;
    let refused = over_tcp(&site.env, Some(old), trust(&site.env)?).await;
    ensure!(refused.is_err(), "the old CA is still trusted");
    // A server that starts without the API server loads the last CA from disk.
    eventually("the CA is on disk", WAIT_TIMEOUT, async || {
        let snapshot = site.env.path().join("server/kubelet-client-ca.crt");
        ensure!(std::fs::read_to_string(snapshot)? == next.pem());
        let shared = stored_text(&site.env.path().join("server"))?;
        ensure!(shared.contains("\"isWhole\":true"), "not all is persisted");
        anyhow::Ok(())
    })
    .await;
    agent.stop().await?;
    site.api()?.be(Presence::Refusing).await?;
    site.env.restart_server().await?;
    let good = next.issue(&Leaf::kubelet("worker-1"))?.own;
    over_tcp(&site.env, Some(good), trust(&site.env)?).await
}

#[tokio::test(flavor = "multi_thread")]
async fn kubelets_are_agents_without_a_cluster_by_a_file_and_never_when_it_is_off() -> Result<()> {
    let ca = TestCa::new("kubernetes")?;
    let other = TestCa::new("kubernetes")?;
    let folder = ScratchDir::new()?;
    let file = folder.path().join("client-ca.crt");
    replace(&file, ca.pem().as_bytes())?;
    let env = TestEnv::start_with(|settings| {
        settings.kubelet_client_ca = Some(file.to_string_lossy().into_owned());
        settings.limits = TestEnv::limits("reloadEvery: 50ms");
    })
    .await?;
    let dial = async |env: &TestEnv, ca: &TestCa| {
        let key = ca.issue(&Leaf::kubelet("worker-1"))?.own;
        over_tcp(env, Some(key), trust(env)?).await
    };
    dial(&env, &ca).await?;
    ensure!(dial(&env, &other).await.is_err());
    replace(&file, other.pem().as_bytes())?;
    eventually("the other CA is in use", WAIT_TIMEOUT, async || {
        dial(&env, &other).await
    })
    .await;
    ensure!(dial(&env, &ca).await.is_err());

    let site = Site::start_with(|settings| settings.kubelet_client_ca = Some("off".into())).await?;
    let refused = dial(&site.env, &site.client_ca).await;
    ensure!(refused.is_err(), "let in though it is off");
    let asked = site.api()?.requests();
    let ca = "extension-apiserver-authentication";
    ensure!(!asked.iter().any(|seen| seen.path.contains(ca)));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn reissued_kubelet_is_out_until_the_cluster_gives_it_a_later_certificate() -> Result<()> {
    let site = Site::start().await?;
    ca_is_loaded(&site, &site.client_ca).await;
    let pki = site.kubelet("worker-1")?;
    let agent = site.agent_of_kubelet("worker-1", &pki, |_| {}).await?;
    let node = "worker-1".parse()?;
    let now = std::time::SystemTime::now();
    let order = |action| {
        let nodes = std::slice::from_ref(&node);
        site.env.revocations().order(action, nodes, now)
    };
    order(OrderAction::Reissue);
    eventually("the session ends", WAIT_TIMEOUT, async || {
        ensure!(site.env.registry().of_node(&node).is_empty());
        anyhow::Ok(())
    })
    .await;
    let dial = async |leaf: &Leaf| {
        let key = site.client_ca.issue(leaf)?.own;
        over_tcp(&site.env, Some(key), trust(&site.env)?).await
    };
    // According to the start of its validity, this certificate was issued before the order.
    ensure!(dial(&Leaf::kubelet("worker-1")).await.is_err());
    dial(&Leaf::kubelet("worker-2")).await?;
    let later = Leaf {
        from: now + Duration::from_secs(1),
        ..Leaf::kubelet("worker-1")
    };
    let accepted = async || dial(&later).await;
    eventually("a later certificate is accepted", WAIT_TIMEOUT, accepted).await;
    // A revocation refuses every certificate.
    order(OrderAction::Revoke);
    ensure!(dial(&later).await.is_err());
    drop(agent);
    Ok(())
}
