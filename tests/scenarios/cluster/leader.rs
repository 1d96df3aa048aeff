//! One writer among several servers, and the functions that the loss of the Lease does not affect.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tunnel_tests::apiserver::{Fault, Status};
use tunnel_tests::client::{Exchange, RawRequest};
use tunnel_tests::cluster::{Kind, edge};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::process::{Listener, Server, Signal};

use super::{ClusterEnv, FIRST, GUIDE_RECORDS, Site, fetch_text};

on_both!(
    dns_8_another_server_writes_when_the_leader_is_killed,
    dns_8_a_deposed_leader_keeps_serving_and_writes_nothing,
    second_server_says_that_one_is_the_limit_until_the_other_is_gone,
);

const LEASE: &str =
    "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/tunnel-dns-controller";

/// Longest time from the end of a leader to the first write of another.
const TAKEOVER: Duration = Duration::from_secs(20);

const WITH_WORKER_2: &str =
    "10.106.217.16\tworker-1\n10.106.217.16\tworker-2\n192.168.33.220\tmaster-1";

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
    cluster_env.guide().await?;
    let mut leader = cluster_env.server("a").await?;
    cluster_env
        .wait_for_records("the guide's records", FIRST, GUIDE_RECORDS)
        .await;
    let other = cluster_env.server("b").await?;
    let site = Site::start(&cluster_env, &other, "worker-1", &[]).await?;
    cluster_env
        .objects()
        .set_ports(&[("http-proxy-ports", &site.port().to_string())])
        .await?;
    eventually("the port", FIRST, async || site.serves(&other).await).await;
    let mut long = Long::start(&site, &other).await?;
    long.goes_on().await?;

    leader.process().signal(Signal::Kill)?;
    let killed = Instant::now();
    cluster_env.objects().add(&edge("worker-2")).await?;
    cluster_env
        .wait_for_records("the other one's write", TAKEOVER, WITH_WORKER_2)
        .await;
    ensure!(
        killed.elapsed() <= scaled(TAKEOVER),
        "only after {:?}",
        killed.elapsed()
    );
    long.goes_on().await?;
    site.serves(&other).await
}

async fn second_server_says_that_one_is_the_limit_until_the_other_is_gone(
    cluster_env: ClusterEnv,
) -> Result<()> {
    cluster_env.guide().await?;
    let mut first = cluster_env.server("a").await?;
    cluster_env
        .wait_for_records("the guide's records", FIRST, GUIDE_RECORDS)
        .await;
    let second = cluster_env.server("b").await?;
    let is_reported = async |server: &Server| -> Result<bool> {
        let text = fetch_text(server, "/readyz?verbose").await?;
        Ok(text.contains("[!] replicas: ") && text.contains("Run one server"))
    };
    eventually("the condition of the second server", FIRST, async || {
        ensure!(is_reported(&second).await?, "the condition is missing");
        Ok(())
    })
    .await;
    ensure!(
        !is_reported(&first).await?,
        "the first server has the condition"
    );

    first.process().signal(Signal::Kill)?;
    eventually("the condition to be withdrawn", TAKEOVER, async || {
        ensure!(!is_reported(&second).await?, "the condition is still there");
        Ok(())
    })
    .await;
    Ok(())
}

async fn dns_8_a_deposed_leader_keeps_serving_and_writes_nothing(
    cluster_env: ClusterEnv,
) -> Result<()> {
    cluster_env.guide().await?;
    let server = cluster_env.server("a").await?;
    let site = Site::start(&cluster_env, &server, "worker-1", &[]).await?;
    cluster_env
        .objects()
        .set_ports(&[("http-proxy-ports", &site.port().to_string())])
        .await?;
    cluster_env
        .wait_for_records("the guide's records", FIRST, GUIDE_RECORDS)
        .await;
    eventually("the port", FIRST, async || site.serves(&server).await).await;
    let mut long = Long::start(&site, &server).await?;
    long.goes_on().await?;

    // Another holder takes the Lease and renews it for a while.
    steal(&cluster_env).await?;
    eventually("the server to notice the new holder", FIRST, async || {
        let text = fetch_text(&server, "/metrics").await?;
        ensure!(
            text.contains("tunnel_server_kubernetes_leader 0"),
            "still leads"
        );
        Ok(())
    })
    .await;
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
    let reply = tunnel_tests::client::request(
        server.address(Listener::Http),
        &RawRequest::get("worker-2:10250", "/"),
    )
    .await?;
    ensure!(
        reply.header("x-tunnel-error") == Some("no_agent"),
        "{}",
        reply.text()
    );
    long.goes_on().await?;
    site.serves(&server).await?;
    cluster_env
        .wait_for_records(
            "its write when the other one is silent",
            TAKEOVER,
            WITH_WORKER_2,
        )
        .await;
    long.goes_on().await
}

/// Gives the Lease to another holder, with the current time as the time of renewal.
async fn steal(cluster_env: &ClusterEnv) -> Result<()> {
    let lease = cluster_env
        .cluster
        .admin()
        .get(LEASE)
        .await?
        .context("no Lease")?;
    let now = now();
    let spec = json!({
        "holderIdentity": "somebody-else", "leaseDurationSeconds": 15, "renewTime": now,
        "leaseTransitions": lease["spec"]["leaseTransitions"].as_i64().unwrap_or(0) + 1,
    });
    cluster_env
        .cluster
        .admin()
        .merge(LEASE, &json!({ "spec": spec }))
        .await
        .map(drop)
}

/// Returns the current time with six decimal places, the format of the API.
fn now() -> String {
    humantime::format_rfc3339_micros(std::time::SystemTime::now()).to_string()
}

/// F38: tests a leader whose renewals the API server refuses. The leader stops writing, and no
/// tunnel drops.
#[tokio::test(flavor = "multi_thread")]
async fn f38_the_writer_stops_when_it_cannot_renew_and_no_tunnel_drops() -> Result<()> {
    let cluster_env = ClusterEnv::start(Kind::FakeApiServer)
        .await?
        .context("a stand-in")?;
    cluster_env.guide().await?;
    let server = cluster_env.server("a").await?;
    let site = Site::start(&cluster_env, &server, "worker-1", &[]).await?;
    cluster_env
        .objects()
        .set_ports(&[("http-proxy-ports", &site.port().to_string())])
        .await?;
    cluster_env
        .wait_for_records("the guide's records", FIRST, GUIDE_RECORDS)
        .await;
    eventually("the port", FIRST, async || site.serves(&server).await).await;
    let mut long = Long::start(&site, &server).await?;

    let refusal = Status::new(500, "InternalError", "etcdserver: request timed out");
    let refused = Instant::now();
    cluster_env.cluster.fake_api()?.fault(
        Fault::answer(refusal)
            .of("leases")
            .verbs(&["update", "patch", "create"]),
    );
    eventually("the writer to stop", Duration::from_secs(12), async || {
        let text = fetch_text(&server, "/metrics").await?;
        ensure!(
            text.contains("tunnel_server_kubernetes_leader 0"),
            "still leads"
        );
        Ok(())
    })
    .await;
    let stopped = refused.elapsed();
    ensure!(
        stopped <= scaled(Duration::from_secs(12)),
        "stopped only after {stopped:?}"
    );
    let before = writes(&cluster_env)?;
    cluster_env.objects().add(&edge("worker-2")).await?;
    eventually("the node in the server's own routes", FIRST, async || {
        let text = fetch_text(&server, "/metrics").await?;
        ensure!(
            text.lines()
                .any(|line| line == "tunnel_server_kubernetes_records 3"),
            "not yet"
        );
        Ok(())
    })
    .await;
    long.goes_on().await?;
    // The wait is longer than the server collects changes.
    let end = Instant::now() + Duration::from_secs(3);
    while Instant::now() < end {
        site.serves(&server).await?;
    }
    ensure!(writes(&cluster_env)? == before, "wrote without the Lease");
    cluster_env.cluster.fake_api()?.clear_faults();
    cluster_env
        .wait_for_records("the write when the Lease is back", TAKEOVER, WITH_WORKER_2)
        .await;
    long.goes_on().await
}

/// Returns the number of the server's writes to objects other than Leases.
fn writes(cluster_env: &ClusterEnv) -> Result<usize> {
    let requests = cluster_env.cluster.fake_api()?.requests();
    let user = tunnel_tests::cluster::Cluster::server_user();
    Ok(requests
        .iter()
        .filter(|seen| seen.user == user && seen.is_write() && seen.resource != "leases")
        .count())
}

/// F23: tests two servers and another writer that edits the same object. No edit is lost.
#[tokio::test(flavor = "multi_thread")]
async fn f23_two_writers_lose_no_record_and_converge() -> Result<()> {
    let cluster_env = ClusterEnv::start(Kind::FakeApiServer)
        .await?
        .context("a stand-in")?;
    cluster_env.guide().await?;
    let _servers = (
        cluster_env.server("a").await?,
        cluster_env.server("b").await?,
    );
    cluster_env
        .wait_for_records("the guide's records", FIRST, GUIDE_RECORDS)
        .await;
    let path = tunnel_tests::cluster::Objects::records_path();
    let mut expected = vec![
        "192.168.33.220\tmaster-1".to_owned(),
        "10.106.217.16\tworker-1".to_owned(),
    ];
    for round in 0..20 {
        cluster_env.cluster.fake_api()?.fault(
            Fault::conflict()
                .of("configmaps")
                .by(&tunnel_tests::cluster::Cluster::server_user())
                .times(round % 3),
        );
        cluster_env
            .objects()
            .add(&edge(&format!("new-{round}")))
            .await?;
        expected.push(format!("10.106.217.16\tnew-{round}"));
        // The edit reads, changes and writes back. If the server was faster, the API server refuses
        // the write, and `eventually` repeats the edit.
        eventually("the foreign edit", FIRST, async || {
            let mut map = cluster_env.objects().records_map().await?;
            map["data"]["count"] = round.to_string().into();
            if round % 5 == 4 {
                map["data"]["tunnel-nodes"] = "10.0.0.1\tforeign".into();
            }
            cluster_env.cluster.admin().replace(&path, &map).await
        })
        .await;
        if round % 5 == 4 {
            // Each conflict delays the server's write. The conflicts of five rounds are as many as
            // the limit for one change allows.
            expected.sort();
            cluster_env
                .wait_for_records(
                    "all lines and nothing else",
                    Duration::from_secs(5),
                    &expected.join("\n"),
                )
                .await;
        }
    }
    let history = cluster_env.cluster.fake_api()?.history(
        "configmaps",
        Some("kube-system"),
        "yurt-tunnel-nodes",
    );
    let counts = history
        .iter()
        .filter_map(|(_, map)| map.as_ref())
        .map(count);
    let counts: Vec<i64> = counts.collect();
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
