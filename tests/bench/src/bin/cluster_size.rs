//! Measures what many Nodes cost a server: `cargo run --release -p tunnel-bench --bin cluster_size
//! [NODES...]` (after the server was built with --release).
//!
//! Prints a table: time from the server's start to the complete DNS records, writes of the records,
//! their size, and the server's resident memory next to that of a server that watches an empty
//! cluster.

use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tunnel_tests::cluster::{Cluster, Kind, edge};
use tunnel_tests::eventually::eventually;
use tunnel_tests::process::{ScratchDir, Server, ServerSetup};

/// Numbers of Nodes without arguments.
const SIZES: [usize; 2] = [5000, 20_000];

/// Time limit for the records of all nodes; far more than needed.
const WAIT_TIMEOUT: Duration = Duration::from_secs(120);

#[tokio::main]
async fn main() -> Result<()> {
    let wished: Vec<usize> = std::env::args()
        .skip(1)
        .map(|word| word.parse().context("a number of Nodes"))
        .collect::<Result<_>>()?;
    let sizes = if wished.is_empty() {
        SIZES.to_vec()
    } else {
        wished
    };
    let mut out = std::io::stdout();
    writeln!(
        out,
        "| nodes | records after | writes | bytes | memory MiB | over an empty one | peak over |"
    )?;
    writeln!(out, "| --- | --- | --- | --- | --- | --- | --- |")?;
    let empty = measure(0).await?;
    for nodes in sizes {
        let full = measure(nodes).await?;
        writeln!(
            out,
            "| {nodes} | {:.1} s | {} | {} | {:.1} | {:.1} | {:.1} |",
            full.after.as_secs_f64(),
            full.writes,
            full.bytes,
            full.memory,
            full.memory - empty.memory,
            full.peak - empty.peak,
        )?;
    }
    Ok(())
}

/// Statistics of one server after it has written the records of a cluster.
struct ClusterSizeStats {
    after: Duration,
    writes: usize,
    bytes: usize,
    /// Resident memory in MiB.
    memory: f64,
    /// Peak memory in MiB.
    peak: f64,
}

async fn measure(nodes: usize) -> Result<ClusterSizeStats> {
    let cluster = Cluster::start(Kind::FakeApiServer)
        .await?
        .context("a stand-in")?;
    let scratch = ScratchDir::new()?;
    cluster.objects().create_service(|_| {}).await?;
    for number in 0..nodes {
        let node = edge(&format!("worker-{number:05}"));
        cluster
            .fake_api()?
            .put("nodes", None, with_status(node.object()))?;
    }
    let started = Instant::now();
    let setup = ServerSetup::in_cluster(
        &scratch.path().join("server"),
        &cluster.server_kubeconfig()?,
    );
    let mut server = setup.args(&["--namespace", "kube-system"]).start().await?;
    let records = eventually("all records", WAIT_TIMEOUT, async || {
        let records = cluster.objects().records().await?;
        ensure!(
            records.lines().count() == nodes,
            "{} lines",
            records.lines().count()
        );
        Ok(records)
    })
    .await;
    let after = started.elapsed();
    // The server persists the cluster state a little later, which takes memory once more.
    eventually("the snapshot", WAIT_TIMEOUT, async || {
        scratch
            .path()
            .join("server/cluster.json")
            .is_file()
            .then_some(())
    })
    .await;
    let user = Cluster::server_user();
    let requests = cluster.fake_api()?.requests();
    let writes = requests
        .iter()
        .filter(|seen| seen.user == user && seen.is_write() && seen.resource == "configmaps")
        .count();
    let (memory, peak) = (memory(&mut server, "VmRSS")?, memory(&mut server, "VmHWM")?);
    Ok(ClusterSizeStats {
        after,
        writes,
        bytes: records.len(),
        memory,
        peak,
    })
}

/// Adds the fields that make a real Node large: images, conditions, node info.
fn with_status(node: &serde_json::Value) -> serde_json::Value {
    let mut node = node.clone();
    let image = |number: usize| serde_json::json!({ "names": [format!("registry.example.org/team/component-{number}@sha256:{number:064}"), format!("registry.example.org/team/component-{number}:v1.{number}")], "sizeBytes": 123_456_789 });
    node["status"]["images"] = (0..20).map(image).collect();
    let condition = |kind: &str| serde_json::json!({ "type": kind, "status": "False", "reason": "KubeletHasSufficientMemory", "message": "kubelet has sufficient memory available", "lastHeartbeatTime": "2026-01-01T00:00:00Z", "lastTransitionTime": "2026-01-01T00:00:00Z" });
    node["status"]["conditions"] = ["MemoryPressure", "DiskPressure", "PIDPressure", "Ready"]
        .into_iter()
        .map(condition)
        .collect();
    node
}

/// Returns the MiB of a line of `/proc/PID/status`.
fn memory(server: &mut Server, line: &str) -> Result<f64> {
    let id = server.process().id().context("the server has ended")?;
    let status = std::fs::read_to_string(format!("/proc/{id}/status"))?;
    let found = status
        .lines()
        .find_map(|text| text.strip_prefix(line)?.strip_prefix(':'));
    let kib: u32 = found
        .and_then(|text| text.trim().trim_end_matches("kB").trim().parse().ok())
        .context("no such line")?;
    Ok(f64::from(kib) / 1024.0)
}
