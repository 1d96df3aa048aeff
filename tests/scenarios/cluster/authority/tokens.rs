//! Join tokens are objects of their own: thousands of them stop nobody, a use costs what one weighs,
//! and no clock but that of the API server removes one.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use k8s_openapi::ByteString;
use serde_json::{Value, json};
use tunnel_ca::revocation::OrderAction;
use tunnel_server::cluster::objects::{join_token_name, tokens_namespace};
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::cluster::{Cluster, SERVICE_ACCOUNT};
use tunnel_tests::env::WAIT_TIMEOUT;
use tunnel_tests::eventually::eventually;

use super::super::READYZ;
use super::shared::{agent, pair};
use super::{cluster, server};

/// Returns the Secret of a token for `worker-1` that was created so many days ago and was valid for
/// an hour.
pub(in super::super) fn token(id: &str, days: u64) -> Result<Value> {
    let created = SystemTime::now() - Duration::from_secs(days * 86400);
    let created = humantime::format_rfc3339_seconds(created).to_string();
    let content = json!({
        "scope": { "node": "worker-1" }, "secretSha256": "00".repeat(32), "counter": 0, "generation": 0,
        // Only the API server's time counts.
        "created": "1970-01-01T00:00:00Z", "ttlSeconds": 3600, "revoked": false,
    });
    let content = ByteString(content.to_string().into_bytes());
    Ok(json!({
        "metadata": {
            "name": join_token_name(id), "creationTimestamp": created,
            "labels": { "app.kubernetes.io/component": "join-token" },
        },
        "data": { "token.json": content }, "type": "Opaque",
    }))
}

fn namespace() -> String {
    tokens_namespace(SERVICE_ACCOUNT.0)
}

/// Returns the numbers of requests for tokens so far, by verb.
fn requests(cluster: &Cluster) -> Result<BTreeMap<String, usize>> {
    let mut requests = BTreeMap::new();
    for request in cluster.fake_api()?.requests() {
        if request.namespace == namespace() && request.resource == "secrets" {
            *requests.entry(request.verb).or_default() += 1;
        }
    }
    Ok(requests)
}

#[tokio::test(flavor = "multi_thread")]
async fn thousands_of_unused_tokens_stop_neither_joins_nor_revocations_and_a_join_costs_one_object()
-> Result<()> {
    let cluster = cluster().await?;
    let api = cluster.fake_api()?;
    for number in 0..4575 {
        let token = token(&format!("{number:012}"), 0)?;
        api.put("secrets", Some(&namespace()), token)?;
    }
    let (one, other) = pair(&cluster).await?;
    let before = requests(&cluster)?;
    let _agent = agent("worker-1", &other, &one).await?;
    let after = requests(&cluster)?;
    for verb in ["get", "update"] {
        let of = |requests: &BTreeMap<String, usize>| requests.get(verb).copied().unwrap_or(0);
        ensure!(
            of(&after) - of(&before) == 1,
            "{verb}: {before:?}, {after:?}"
        );
    }
    // Nobody watches tokens, so that nobody hears of a use.
    ensure!(!after.contains_key("watch"), "{after:?}");
    let used = one.tokens().list(SystemTime::now())?;
    // One was created for the settings of the agent, and is not used.
    ensure!(used.len() == 4577, "{}", used.len());
    let used = used.iter().find(|token| token.used_by.is_some());
    let name = join_token_name(&used.context("no token was used")?.id);
    let stored = api.get("secrets", Some(&namespace()), &name);
    let bytes = stored.context("no Secret")?.to_string().len();
    ensure!(bytes < 1536, "{bytes} bytes");

    let node = "worker-1".parse()?;
    let revocations = one.revocations();
    revocations.order(
        OrderAction::Revoke,
        std::slice::from_ref(&node),
        SystemTime::now(),
    );
    eventually("the revocation in the cluster", WAIT_TIMEOUT, async || {
        let unwritten = revocations.unwritten();
        ensure!(unwritten.is_empty(), "{unwritten:?}");
        ensure!(
            other.revocations().of_node(&node).is_revoked,
            "not at the other"
        );
        anyhow::Ok(())
    })
    .await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn leader_removes_tokens_a_day_after_their_end_by_the_clock_of_the_api_server() -> Result<()>
{
    let cluster = cluster().await?;
    let api = cluster.fake_api()?;
    for (id, days) in [
        ("old000000000", 2),
        ("expired00000", 1),
        ("valid0000000", 0),
    ] {
        api.put("secrets", Some(&namespace()), token(id, days)?)?;
    }
    let server = server(&cluster, |_| {}).await?;
    eventually("the end of the old token", WAIT_TIMEOUT, async || {
        let listed = server.tokens().list(SystemTime::now())?;
        let ids: Vec<_> = listed.iter().map(|token| token.id.as_str()).collect();
        ensure!(ids == ["expired00000", "valid0000000"], "{ids:?}");
        anyhow::Ok(())
    })
    .await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_role_for_tokens_is_a_condition_until_a_token_is_read_again() -> Result<()> {
    let cluster = cluster().await?;
    let server = server(&cluster, |_| {}).await?;
    let command = format!("kubectl create namespace {}", namespace());
    for allowed in [false, true] {
        cluster.allow_server(allowed).await?;
        let listed = server.tokens().list(SystemTime::now());
        ensure!(listed.is_ok() == allowed, "{listed:?}");
        let page = request(server.meta(), &RawRequest::get("meta", READYZ)).await?;
        let page = page.text();
        ensure!(page.contains(&command) != allowed, "{page}");
    }
    Ok(())
}
