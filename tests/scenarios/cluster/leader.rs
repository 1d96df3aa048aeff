//! One writer among several servers, and the functions that the loss of the Lease does not affect.

use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tunnel_tests::apiserver::{Fault, Status};
use tunnel_tests::client::{Exchange, RawRequest, request};
use tunnel_tests::cluster::{Cluster, Objects, edge};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::process::{Listener, Server, Signal};

use super::{ClusterEnv, FIRST, GUIDE_RECORDS, Site, WITH_WORKER_2, wait_for_text};

on_both!(
    dns_8_another_server_writes_when_the_leader_is_killed,
    dns_8_a_deposed_leader_keeps_serving_and_writes_nothing,
);

const LEASE: &str =
    "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/tunnel-dns-controller";

/// Metric of a server that does not lead.
const FOLLOWER: &str = "tunnel_server_kubernetes_leader 0";

/// Longest time from the end of a leader to the first write of another.
const TAKEOVER: Duration = Duration::from_secs(20);

/// A long answer through the HTTP listener, to which the exporter adds lines.
struct Long<'a> {
    exchange: Exchange,
    site: &'a Site,
    sent_lines: u32,
}

impl<'a> Long<'a> {
    async fn start(site: &'a Site, server: &Server) -> Result<Self> {
        let get = RawRequest::get(&site.host(), "/follow");
        let exchange = Exchange::start(server.address(Listener::Http), &get).await?;
        ensure!(exchange.status() == 200, "{}", exchange.status());
        Ok(Self {
            exchange,
            site,
            sent_lines: 0,
        })
    }

    /// Emits a line at the exporter and checks that the caller receives it.
    async fn goes_on(&mut self) -> Result<()> {
        self.sent_lines += 1;
        let line = format!("line {}", self.sent_lines);
        ensure!(
            self.site.exporter.emit(&line) == 1,
            "the exporter has lost its caller"
        );
        let received = tokio::time::timeout(scaled(FIRST), self.exchange.line())
            .await?
            .context("the answer has ended")?;
        ensure!(received.trim() == line, "{received:?} instead of {line:?}");
        Ok(())
    }
}

async fn dns_8_another_server_writes_when_the_leader_is_killed(
    cluster_env: ClusterEnv,
) -> Result<()> {
    let mut leader = cluster_env.guided_server().await?;
    let other = cluster_env.server("b").await?;
    let site = Site::serving(&cluster_env, &other).await?;
    let mut long = Long::start(&site, &other).await?;
    long.goes_on().await?;

    leader.process().signal(Signal::Kill)?;
    let killed = Instant::now();
    cluster_env.objects().add(&edge("worker-2")).await?;
    cluster_env.wait_for_records(TAKEOVER, WITH_WORKER_2).await;
    ensure!(
        killed.elapsed() <= scaled(TAKEOVER),
        "only after {:?}",
        killed.elapsed()
    );
    long.goes_on().await?;
    site.serves(&other).await
}

async fn dns_8_a_deposed_leader_keeps_serving_and_writes_nothing(
    cluster_env: ClusterEnv,
) -> Result<()> {
    let server = cluster_env.guided_server().await?;
    let site = Site::serving(&cluster_env, &server).await?;
    let mut long = Long::start(&site, &server).await?;
    long.goes_on().await?;

    // Another holder takes the Lease and renews it for a while.
    steal(&cluster_env).await?;
    wait_for_text(&server, "/metrics", FIRST, FOLLOWER).await;
    let before = cluster_env.objects().records_map().await?;
    cluster_env.objects().add(&edge("worker-2")).await?;
    // The wait is longer than the server collects changes. Each poll renews the Lease of the other
    // holder.
    let end = Instant::now() + Duration::from_secs(4);
    eventually(
        "some seconds as another one's follower",
        Duration::from_secs(20),
        async || {
            steal(&cluster_env).await?;
            let map = cluster_env.objects().records_map().await?;
            assert_eq!(
                map["metadata"]["resourceVersion"], before["metadata"]["resourceVersion"],
                "a deposed server wrote {map}"
            );
            ensure!(Instant::now() >= end, "not yet over");
            Ok(())
        },
    )
    .await;
    // The server still knows the state that it does not write. The new node has a name here at
    // once.
    let get = RawRequest::get("worker-2:10250", "/healthz");
    let reply = request(server.address(Listener::Http), &get).await?;
    ensure!(
        reply.header("x-tunnel-error") == Some("no_agent"),
        "{}",
        reply.text()
    );
    long.goes_on().await?;
    site.serves(&server).await?;
    // The other holder is silent.
    cluster_env.wait_for_records(TAKEOVER, WITH_WORKER_2).await;
    long.goes_on().await
}

/// Gives the Lease to another holder, with the current time as the time of renewal.
async fn steal(cluster_env: &ClusterEnv) -> Result<()> {
    let admin = cluster_env.admin();
    let lease = admin.get(LEASE).await?.context("no Lease")?;
    // The API has times with six decimal places.
    let now = humantime::format_rfc3339_micros(SystemTime::now()).to_string();
    let spec = json!({
        "holderIdentity": "somebody-else", "leaseDurationSeconds": 15, "renewTime": now,
        "leaseTransitions": lease["spec"]["leaseTransitions"].as_i64().unwrap_or(0) + 1,
    });
    let patch = json!({ "spec": spec });
    admin.merge(LEASE, &patch).await.map(drop)
}

/// F38: tests a leader whose renewals the API server refuses. The leader stops writing, and no
/// tunnel drops.
#[tokio::test(flavor = "multi_thread")]
async fn f38_the_writer_stops_when_it_cannot_renew_and_no_tunnel_drops() -> Result<()> {
    let cluster_env = ClusterEnv::fake().await?;
    let server = cluster_env.guided_server().await?;
    let site = Site::serving(&cluster_env, &server).await?;
    let mut long = Long::start(&site, &server).await?;

    let refusal = Status::new(500, "InternalError", "etcdserver: request timed out");
    let refused = Instant::now();
    let writes = ["update", "patch", "create"];
    let fault = Fault::answer(refusal).of("leases").verbs(&writes);
    cluster_env.fake_api()?.fault(fault);
    let patience = Duration::from_secs(12);
    wait_for_text(&server, "/metrics", patience, FOLLOWER).await;
    let stopped = refused.elapsed();
    ensure!(
        stopped <= scaled(patience),
        "stopped only after {stopped:?}"
    );
    let before = other_writes(&cluster_env)?;
    cluster_env.objects().add(&edge("worker-2")).await?;
    // The server has the new node in its own routes.
    let records = "\ntunnel_server_kubernetes_records 3\n";
    wait_for_text(&server, "/metrics", FIRST, records).await;
    long.goes_on().await?;
    // The wait is longer than the server collects changes.
    let end = Instant::now() + Duration::from_secs(3);
    while Instant::now() < end {
        site.serves(&server).await?;
    }
    ensure!(
        other_writes(&cluster_env)? == before,
        "wrote without the Lease"
    );
    cluster_env.fake_api()?.clear_faults();
    cluster_env.wait_for_records(TAKEOVER, WITH_WORKER_2).await;
    long.goes_on().await
}

/// Returns the number of the server's writes to objects other than Leases.
fn other_writes(cluster_env: &ClusterEnv) -> Result<usize> {
    let requests = cluster_env.fake_api()?.requests();
    let user = Cluster::server_user();
    Ok(requests
        .iter()
        .filter(|seen| seen.user == user && seen.is_write() && seen.resource != "leases")
        .count())
}

/// F23: tests two servers and another writer that edits the same object. No edit is lost.
#[tokio::test(flavor = "multi_thread")]
async fn f23_two_writers_lose_no_record_and_converge() -> Result<()> {
    let cluster_env = ClusterEnv::fake().await?;
    let objects = cluster_env.objects();
    cluster_env.guide().await?;
    let _servers = (
        cluster_env.server("a").await?,
        cluster_env.server("b").await?,
    );
    cluster_env.wait_for_records(FIRST, GUIDE_RECORDS).await;
    let path = Objects::records_path();
    let mut expected = vec![
        "192.168.33.220\tmaster-1".to_owned(),
        "10.106.217.16\tworker-1".to_owned(),
    ];
    for round in 0..20 {
        let conflict = Fault::conflict().of("configmaps").times(round % 3);
        let conflict = conflict.by(&Cluster::server_user());
        cluster_env.fake_api()?.fault(conflict);
        objects.add(&edge(&format!("new-{round}"))).await?;
        expected.push(format!("10.106.217.16\tnew-{round}"));
        // The edit reads, changes and writes back. If the server was faster, the API server refuses
        // the write, and `eventually` repeats the edit.
        eventually("the foreign edit", FIRST, async || {
            let mut map = objects.records_map().await?;
            map["data"]["count"] = round.to_string().into();
            if round % 5 == 4 {
                map["data"]["tunnel-nodes"] = "10.0.0.1\tforeign".into();
            }
            cluster_env.admin().replace(&path, &map).await
        })
        .await;
        if round % 5 == 4 {
            // Each conflict delays the server's write. The conflicts of five rounds are as many as
            // the limit for one change allows.
            expected.sort();
            let patience = Duration::from_secs(5);
            let records = expected.join("\n");
            cluster_env.wait_for_records(patience, &records).await;
        }
    }
    let fake_api = cluster_env.fake_api()?;
    let history = fake_api.history("configmaps", Some("kube-system"), "yurt-tunnel-nodes");
    let maps = history.iter().filter_map(|(_, map)| map.as_ref());
    let counts: Vec<i64> = maps.map(count).collect();
    ensure!(
        counts.is_sorted() && counts.last() == Some(&19),
        "a foreign edit was lost: {counts:?}"
    );
    Ok(())
}

fn count(map: &Value) -> i64 {
    map["data"]["count"]
        .as_str()
        .and_then(|text| text.parse().ok())
        .unwrap_or(-1)
}
