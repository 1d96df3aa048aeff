//! ServiceAccount tokens: which ones enroll an agent, how the server refuses the others, and when
//! an agent needs a token again.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use tunnel_agent::config::{Config as AgentConfig, TokenSource};
use tunnel_ca::revocation::OrderAction;
use tunnel_proto::identity::TrustDomain;
use tunnel_proto::wire::code::CloseCode;
use tunnel_tests::apiserver::{Presence, Reviewing, TokenClaims};
use tunnel_tests::ca::replace;
use tunnel_tests::cluster::Cluster;
use tunnel_tests::env::{Agent, TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::{eventually, scaled};

use super::Site;
use crate::credentials::{metric, metric_reaches};

/// Returns the claims of a token in a projected volume: for the server, of the agents'
/// ServiceAccount, bound to a Pod.
pub(in crate::cluster) fn claims(pod: &str, uid: &str) -> TokenClaims {
    let now = SystemTime::now();
    TokenClaims {
        account: ("kube-system".into(), "tunnel-agent".into()),
        audiences: vec!["tunnel-server".into()],
        pod: Some((pod.into(), uid.into())),
        issued: now - Duration::from_secs(60),
        ends: Some(now + Duration::from_secs(3540)),
    }
}

impl Site {
    /// Creates a Pod on worker-1 and returns the claims of its token.
    fn claims(&self) -> Result<TokenClaims> {
        Ok(claims("agent-1", &self.pod("agent-1", "worker-1")?))
    }

    fn write_token(&self, node: &str, token: &str) -> Result<PathBuf> {
        let file = self.env.path().join(format!("{node}-token"));
        replace(&file, token.as_bytes())?;
        Ok(file)
    }

    /// Returns the configuration of an agent that has only a token in a file, and the CA.
    pub(super) fn agent_with_token(&self, node: &str, token: &str) -> Result<AgentConfig> {
        let file = self.write_token(node, token)?;
        let mut config = self.env.agent_config_with(node, |settings| {
            settings.ca_file = Some(self.tunnel_ca());
        })?;
        config.token = Some(TokenSource::File(file));
        Ok(config)
    }

    async fn enrolled(&self, word: &str) -> Result<f64> {
        metric(&self.env, &enrollments(word)).await
    }

    async fn has_code(&self, word: &str) {
        metric_reaches(&self.env, &enrollments(word), 1.0, WAIT_TIMEOUT).await;
    }
}

/// Returns the metric of enrollments that end like this.
fn enrollments(word: &str) -> String {
    format!("tunnel_server_enrollments_total{{result=\"{word}\"}}")
}

/// Starts an agent of worker-1 and returns the error that ends it.
async fn refusal(site: &Site, token: &str) -> Result<String> {
    let agent = Agent::start(site.agent_with_token("worker-1", token)?).await?;
    let ended = tokio::time::timeout(scaled(WAIT_TIMEOUT), agent.ended()).await;
    let error = ended.context("the agent goes on")?;
    Ok(format!("{:#}", error.err().context("no error")?))
}

#[tokio::test(flavor = "multi_thread")]
async fn token_of_the_nodes_own_pod_enrolls_at_servers_old_and_new() -> Result<()> {
    let site = Site::start().await?;
    for (node, reviewing) in [
        ("worker-1", Reviewing::WithNodes),
        ("worker-2", Reviewing::WithPods),
    ] {
        site.api()?.review_as(reviewing);
        let pod = format!("tunnel-agent-{node}");
        let uid = site.pod(&pod, node)?;
        let token = site.api()?.sign(&claims(&pod, &uid));
        let agent = Agent::start(site.agent_with_token(node, &token)?).await?;
        site.env.connected(node).await;
        let sessions = site.env.registry().of_node(&node.parse()?);
        let peer = sessions[0].session.peer();
        ensure!(peer.domain == TrustDomain::Tunnel, "{peer:?}");
        agent.stop().await?;
        // The agent has persisted its certificate, which is sufficient without the API server.
        let config = site.agent_with_token(node, "eyJ.gone.x")?;
        site.api()?.be(Presence::Refusing).await?;
        let agent = Agent::start(config).await?;
        site.env.connected(node).await;
        agent.stop().await?;
        site.api()?.be(Presence::Here).await?;
    }
    let mut pods = site.api()?.requests();
    pods.retain(|seen| seen.user == Cluster::server_user() && seen.resource == "pods");
    ensure!(
        pods.len() == 1,
        "only the older one needs the Pod: {pods:?}"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn p9_tokens_that_prove_no_node_or_another_one_are_refused() -> Result<()> {
    let site = Site::start().await?;
    let uid = site.pod("agent-1", "worker-1")?;
    let other_uid = site.pod("agent-2", "worker-2")?;
    let changed = |change: fn(&mut TokenClaims)| {
        let mut changed = claims("agent-1", &uid);
        change(&mut changed);
        changed
    };
    let good = changed(|_| {});
    let vault = changed(|claims| claims.audiences = vec!["vault".into()]);
    let of_api_server = "https://kubernetes.default.svc.cluster.local";
    let api_server = TokenClaims {
        audiences: vec![of_api_server.into()],
        ..good.clone()
    };
    let account = changed(|claims| claims.account.1 = "default".into());
    let namespace = changed(|claims| claims.account.0 = "default".into());
    let other_node = claims("agent-2", &other_uid);
    let recreated = claims("agent-1", "other-uid");
    let missing = claims("agent-9", &uid);
    let no_pod = changed(|claims| claims.pod = None);
    let of_secret = changed(|claims| {
        claims.audiences.clear();
        claims.ends = None;
    });
    let (current, cached) = (Reviewing::WithNodes, Reviewing::Cached);
    let (older, ancient) = (Reviewing::WithPods, Reviewing::WithoutAudiences);
    let unlisted = "which is not in --agent-service-account";
    let mut table: Vec<_> = [
        ("another audience", current, vault, "bad_token"),
        (
            "the API server's audience",
            current,
            api_server,
            "bad_token",
        ),
        ("another ServiceAccount", cached, account, unlisted),
        ("another namespace", cached, namespace, unlisted),
        (
            "another node's Pod",
            current,
            other_node.clone(),
            "wrong_node",
        ),
        ("another node's Pod", older, other_node, "wrong_node"),
        ("a new Pod", current, recreated.clone(), "bad_token"),
        (
            "a new Pod, answered by a cache",
            cached,
            recreated,
            "is gone",
        ),
        (
            "no such Pod, answered by a cache",
            cached,
            missing,
            "is gone",
        ),
        ("no Pod", current, no_pod, "bound to no Pod"),
        ("a Secret's token", current, of_secret, "bad_token"),
        ("no audiences known", ancient, good.clone(), "bad_token"),
    ]
    .into_iter()
    .map(|(what, reviewing, claims, words)| Ok((what, reviewing, site.api()?.sign(&claims), words)))
    .collect::<Result<_>>()?;
    let mut damaged = site.api()?.sign(&good);
    damaged.pop();
    table.push(("a damaged signature", current, damaged, "bad_token"));
    let nonsense = "eyJub25zZW5zZQ.e30.x".to_owned();
    table.push(("nonsense", current, nonsense, "bad_token"));
    for (what, reviewing, token, words) in &table {
        site.api()?.review_as(*reviewing);
        let text = refusal(&site, token).await?;
        ensure!(text.contains(words), "{what}, {reviewing:?}: {text}");
        let secret = token.rsplit('.').next().unwrap_or_default();
        ensure!(
            secret.len() < 8 || !text.contains(secret),
            "{what}: the token is shown"
        );
    }
    ensure!(site.env.registry().all().is_empty());
    ensure!(site.enrolled("issued").await? == 0.0);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn ended_token_is_waited_for_as_the_kubelet_replaces_it() -> Result<()> {
    let site = Site::start().await?;
    let fresh = site.claims()?;
    let ended = TokenClaims {
        ends: Some(SystemTime::now() - Duration::from_secs(1)),
        ..fresh.clone()
    };
    let config = site.agent_with_token("worker-1", &site.api()?.sign(&ended))?;
    let _agent = Agent::start(config).await?;
    site.has_code("token_expired").await;
    site.write_token("worker-1", &site.api()?.sign(&fresh))?;
    site.env.connected("worker-1").await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn p9_token_that_one_key_has_used_enrolls_no_other() -> Result<()> {
    let site = Site::start().await?;
    let first = site.claims()?;
    let token = site.api()?.sign(&first);
    let config = site.agent_with_token("worker-1", &token)?;
    let agent = Agent::start(config.clone()).await?;
    site.env.connected("worker-1").await;
    agent.stop().await?;
    // The agent loses its key and creates another one. An attacker who has read the token also has
    // another key.
    std::fs::remove_dir_all(site.env.path().join("agent-worker-1"))?;
    let _agent = Agent::start(config).await?;
    site.has_code("token_used").await;
    ensure!(site.enrolled("issued").await? == 1.0);
    let next = TokenClaims {
        issued: first.issued + Duration::from_secs(1),
        ..first
    };
    site.write_token("worker-1", &site.api()?.sign(&next))?;
    site.env.connected("worker-1").await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn api_server_that_is_away_is_a_reason_to_come_again() -> Result<()> {
    let site = Site::start().await?;
    let token = site.api()?.sign(&site.claims()?);
    let config = site.agent_with_token("worker-1", &token)?;
    site.api()?.be(Presence::Refusing).await?;
    let _agent = Agent::start(config).await?;
    site.has_code("unavailable").await;
    site.api()?.be(Presence::Here).await?;
    site.env.connected("worker-1").await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn reissued_node_comes_back_with_a_token_that_was_issued_later() -> Result<()> {
    let site = Site::start().await?;
    let first = site.claims()?;
    let token = site.api()?.sign(&first);
    let agent = Agent::start(site.agent_with_token("worker-1", &token)?).await?;
    site.env.connected("worker-1").await;
    let node = "worker-1".parse()?;
    let revoked = SystemTime::now();
    let nodes = std::slice::from_ref(&node);
    let revocations = site.env.revocations();
    revocations.order(OrderAction::Reissue, nodes, revoked);
    // The token of the Pod was issued before the order.
    site.has_code("revoked").await;
    ensure!(site.env.registry().of_node(&node).is_empty());
    agent.stop().await?;
    // The next agent has the stored certificate and a token from before the order.
    let before = site.enrolled("revoked").await?;
    let agent = Agent::start(site.agent_with_token("worker-1", &token)?).await?;
    let revocations = enrollments("revoked");
    metric_reaches(&site.env, &revocations, before + 1.0, WAIT_TIMEOUT).await;
    drop(agent);
    ensure!(site.env.registry().all().is_empty());
    let later = TokenClaims {
        issued: revoked + Duration::from_secs(2),
        ..first
    };
    let config = site.agent_with_token("worker-1", &site.api()?.sign(&later))?;
    let _agent = Agent::start(config).await?;
    site.env.connected("worker-1").await;
    Ok(())
}

/// Tests that an agent reloads the bundle of the servers' CA, which is a mounted ConfigMap and
/// changes with the CA.
#[tokio::test(flavor = "multi_thread")]
async fn ca_file_of_an_enrolled_agent_is_reloaded() -> Result<()> {
    let site = Site::start().await?;
    let token = site.api()?.sign(&site.claims()?);
    let token = site.write_token("worker-1", &token)?;
    let bundle = site.env.path().join("bundle.crt");
    let ours = std::fs::read(site.tunnel_ca())?;
    replace(&bundle, &ours)?;
    let mut config = site.env.agent_config_with("worker-1", |settings| {
        settings.ca_file = Some(bundle.clone());
        settings.transport = Some("h2".into());
        settings.limits = TestEnv::agent_limits("reloadEvery: 50ms");
    })?;
    config.token = Some(TokenSource::File(token));
    let _agent = Agent::start(config).await?;
    site.env.connected("worker-1").await;
    replace(&bundle, site.client_ca.pem().as_bytes())?;
    let node = "worker-1".parse()?;
    eventually("the server is not trusted", WAIT_TIMEOUT, async || {
        for session in site.env.registry().of_node(&node) {
            session.close(CloseCode::Normal, "dial again").await;
        }
        let text = site.page("/metrics").await?;
        let failed = "tunnel_server_handshakes_total{result=\"handshake_failed\"}";
        ensure!(text.contains(failed), "every handshake succeeds");
        anyhow::Ok(())
    })
    .await;
    replace(&bundle, &ours)?;
    site.env.connected("worker-1").await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn server_outside_a_cluster_says_that_it_takes_no_such_tokens() -> Result<()> {
    let site = Site::start_with(|settings| {
        settings.kubernetes = Some("off".into());
        settings.kubeconfig = None;
    })
    .await?;
    let token = site.api()?.sign(&site.claims()?);
    let text = refusal(&site, &token).await?;
    ensure!(
        text.contains("not_offered") && text.contains("join token"),
        "{text}"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn token_without_a_ca_is_a_usage_error() -> Result<()> {
    let site = Site::start().await?;
    let token = site.api()?.sign(&site.claims()?);
    let mut config = site.agent_with_token("worker-1", &token)?;
    config.ca = None;
    let error = Agent::start(config).await.err().context("it started")?;
    ensure!(tunnel_agent::app::exit_code(&error) == 64);
    let text = format!("{error:#}");
    ensure!(
        text.contains("--ca-file") && !text.contains("eyJ"),
        "{text}"
    );
    Ok(())
}
