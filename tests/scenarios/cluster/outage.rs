//! F21 and the rest of F22: what of the API server may fail while tunnels and known nodes go on.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use tunnel_tests::apiserver::{Cut, Fault, Presence, Seen, Status};
use tunnel_tests::cluster::{Cluster, Kind, edge};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::process::Server;

use super::{FIRST, GUIDE_RECORDS, Lab, Site, told};

/// A cluster with the guide's objects, a server that has written them, and traffic through it.
struct Running {
    lab: Lab,
    server: Server,
    site: Site,
}

impl Running {
    async fn start() -> Result<Self> {
        let lab = Lab::start(Kind::StandIn).await?.context("a stand-in")?;
        lab.guide().await?;
        let server = lab.server("a").await?;
        let site = Site::start(&lab, &server, "worker-1", &[]).await?;
        lab.objects()
            .set_ports(&[("http-proxy-ports", &site.port().to_string())])
            .await?;
        lab.wait_for_records("the guide's records", FIRST, GUIDE_RECORDS)
            .await;
        eventually("the port", FIRST, async || site.serves(&server).await).await;
        Ok(Self { lab, server, site })
    }

    /// Serves for this long; each single request has to be answered.
    async fn serves_for(&self, time: Duration) -> Result<()> {
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.site.serves(&self.server).await?;
        }
        Ok(())
    }

    /// A Node that comes while the API server cannot be asked.
    fn add_behind(&self, name: &str) -> Result<()> {
        self.lab
            .cluster
            .stand_in()?
            .put("nodes", None, edge(name).object().clone())
    }

    async fn consistent(&self, lines: &[&str]) {
        let text = lines.join("\n");
        self.lab
            .wait_for_records(
                "consistent records after the return",
                Duration::from_secs(10),
                &text,
            )
            .await;
    }

    fn lists_since(&self, since: Instant, plural: &str) -> Result<Vec<Seen>> {
        let user = Cluster::server_user();
        let all = self.lab.cluster.stand_in()?.requests();
        let fits = |seen: &Seen| {
            seen.at >= since
                && seen.user == user
                && seen.resource == plural
                && seen.verb == "list"
                && !seen.path.contains("continue=")
        };
        Ok(all.into_iter().filter(fits).collect())
    }
}

const THREE: [&str; 3] = [
    "10.106.217.16\tworker-1",
    "10.106.217.16\tworker-2",
    "192.168.33.220\tmaster-1",
];

#[tokio::test(flavor = "multi_thread")]
async fn f21_an_api_server_that_is_away_leaves_traffic_alone() -> Result<()> {
    for presence in [Presence::Refusing, Presence::Silent] {
        let running = Running::start().await?;
        running.lab.cluster.stand_in()?.be(presence).await?;
        running.add_behind("worker-2")?;
        running.serves_for(Duration::from_secs(6)).await?;
        running.lab.cluster.stand_in()?.be(Presence::Here).await?;
        let back = Instant::now();
        running.consistent(&THREE).await;
        running.site.serves(&running.server).await?;
        let lists = running.lists_since(back, "nodes")?;
        ensure!(
            lists.len() <= 1,
            "{presence:?}: listed {} times: {lists:?}",
            lists.len()
        );
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn f21_too_many_requests_are_heeded_and_slow_answers_waited_for() -> Result<()> {
    let running = Running::start().await?;
    let user = Cluster::server_user();
    let began = Instant::now();
    running
        .lab
        .cluster
        .stand_in()?
        .fault(Fault::answer(Status::too_many_requests(3)).by(&user));
    running.lab.cluster.stand_in()?.cut_watches(Cut::Broken);
    running.add_behind("worker-2")?;
    running.serves_for(Duration::from_secs(7)).await?;
    let requests = running.lab.cluster.stand_in()?.requests();
    let refused: Vec<_> = requests
        .iter()
        .filter(|seen| seen.at >= began && seen.user == user && seen.status == 429)
        .collect();
    // Seven watches, two Leases, two writers and the CA, each once in three seconds at most, and what was under way.
    ensure!(
        !refused.is_empty() && refused.len() <= 12 * 4,
        "{} refused requests in 7 s: {refused:?}",
        refused.len()
    );
    running.lab.cluster.stand_in()?.mend();
    running.consistent(&THREE).await;

    running
        .lab
        .cluster
        .stand_in()?
        .fault(Fault::delay(Duration::from_secs(3)).by(&user));
    running.lab.objects().remove("worker-2").await?;
    running.serves_for(Duration::from_secs(4)).await?;
    running.lab.cluster.stand_in()?.mend();
    running
        .lab
        .wait_for_records(
            "records after slow answers",
            Duration::from_secs(10),
            GUIDE_RECORDS,
        )
        .await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn f21_cut_watches_resume_and_expired_ones_list_once() -> Result<()> {
    let running = Running::start().await?;
    let began = Instant::now();
    for (round, cut) in [Cut::Ended, Cut::Broken, Cut::Ended, Cut::Broken]
        .into_iter()
        .enumerate()
    {
        running.lab.cluster.stand_in()?.cut_watches(cut);
        running
            .lab
            .objects()
            .add(&edge(&format!("cut-{round}")))
            .await?;
        eventually(
            "the node after a cut",
            Duration::from_secs(10),
            async || {
                let records = running.lab.objects().records().await?;
                ensure!(records.contains(&format!("\tcut-{round}")), "{records}");
                Ok(())
            },
        )
        .await;
        running.site.serves(&running.server).await?;
    }
    let lists = running.lists_since(began, "nodes")?;
    ensure!(lists.is_empty(), "watches were resumed by lists: {lists:?}");

    // Away while history is forgotten: the watch cannot go on where it was.
    running
        .lab
        .cluster
        .stand_in()?
        .be(Presence::Refusing)
        .await?;
    running.add_behind("late")?;
    running.lab.cluster.stand_in()?.compact();
    let back = Instant::now();
    running.lab.cluster.stand_in()?.be(Presence::Here).await?;
    eventually("the node after 410", Duration::from_secs(10), async || {
        let records = running.lab.objects().records().await?;
        ensure!(records.contains("\tlate"), "{records}");
        Ok(())
    })
    .await;
    for plural in ["nodes", "configmaps", "services"] {
        let lists = running.lists_since(back, plural)?;
        // One for each that is followed: records, port lists, our CA's certificates, the CA of kubelets.
        let most = if plural == "configmaps" { 4 } else { 1 };
        ensure!(
            lists.len() <= most,
            "{plural}: {} lists after 410: {lists:?}",
            lists.len()
        );
    }
    running.site.serves(&running.server).await
}

/// A watch from before the restart begins with 410, which is no condition: everything is listed at once.
#[tokio::test(flavor = "multi_thread")]
async fn f21_restarts_of_a_real_kube_apiserver_are_followed_within_seconds() -> Result<()> {
    let Some(mut lab) = Lab::start(Kind::Real).await? else {
        return Ok(());
    };
    lab.guide().await?;
    let server = lab.server("a").await?;
    lab.wait_for_records("the guide's records", FIRST, GUIDE_RECORDS)
        .await;
    for number in 0..3 {
        let next = tokio::time::Instant::now() + BETWEEN_RESTARTS;
        lab.cluster.restart().await?;
        let name = format!("late-{number}");
        eventually("a node after the restart", FIRST, async || {
            lab.objects().add(&edge(&name)).await
        })
        .await;
        let back = Instant::now();
        eventually("its record", Duration::from_secs(5), async || {
            let records = lab.objects().records().await?;
            ensure!(records.contains(&name), "{records}");
            Ok(())
        })
        .await;
        crate::abuse::tell(&format!(
            "restart {number}: record after {:?}",
            back.elapsed()
        ));
        eventually("no condition is left", Duration::from_secs(5), async || {
            let ready = told(&server, "/readyz?verbose").await?;
            ensure!(!ready.contains("[!] watching"), "{ready}");
            Ok(())
        })
        .await;
        tokio::time::sleep_until(next).await;
    }
    let log = server.log().to_string();
    let expired: Vec<_> = log.lines().filter(|line| line.contains("410")).collect();
    ensure!(expired.is_empty(), "conditions: {expired:?}");
    Ok(())
}

/// Shorter than what a second list of everything waits for where the API server was not away.
const BETWEEN_RESTARTS: Duration = Duration::from_secs(12);

#[tokio::test(flavor = "multi_thread")]
async fn f21_a_server_starts_without_the_api_server_and_serves_what_it_knew() -> Result<()> {
    let mut running = Running::start().await?;
    // Kept some seconds after it was heard.
    let kept = running.lab.scratch.path().join("a/cluster.json");
    eventually("what is kept", FIRST, async || {
        let text = std::fs::read_to_string(&kept)?;
        ensure!(
            text.contains("worker-1") && text.contains(&running.site.port().to_string()),
            "{text}"
        );
        anyhow::Ok(())
    })
    .await;
    running
        .lab
        .cluster
        .stand_in()?
        .be(Presence::Refusing)
        .await?;
    let setup = running.server.setup_for_restart();
    running
        .server
        .process()
        .signal(tunnel_tests::process::Signal::Kill)?;
    running.server.process().end(FIRST).await?;
    running.server = setup.start().await?;
    eventually(
        "traffic without the API server",
        Duration::from_secs(15),
        async || running.site.serves(&running.server).await,
    )
    .await;
    running.add_behind("worker-2")?;
    running.lab.cluster.stand_in()?.be(Presence::Here).await?;
    // The Lease of the killed server has to run out first.
    running
        .lab
        .wait_for_records(
            "records of the restarted server",
            Duration::from_secs(30),
            &THREE.join("\n"),
        )
        .await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn f22_without_its_rights_the_server_alarms_and_serves_and_recovers() -> Result<()> {
    let running = Running::start().await?;
    running.lab.cluster.allow_server(false).await?;
    running.lab.cluster.stand_in()?.cut_watches(Cut::Ended);
    running.lab.objects().add(&edge("worker-2")).await?;
    eventually("the alarm", scaled(Duration::from_secs(15)), async || {
        let text = told(&running.server, "/metrics").await?;
        let forbidden = text
            .lines()
            .filter(|line| line.contains("forbidden"))
            .any(|line| !line.ends_with(" 0"));
        ensure!(forbidden, "no metric tells it");
        Ok(())
    })
    .await;
    running.serves_for(Duration::from_secs(3)).await?;
    running.lab.cluster.allow_server(true).await?;
    running
        .lab
        .wait_for_records(
            "records with the rights back",
            Duration::from_secs(30),
            &THREE.join("\n"),
        )
        .await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn f22_a_map_that_is_changed_all_the_time_neither_stops_nor_floods_the_writer() -> Result<()>
{
    let running = Running::start().await?;
    let path = tunnel_tests::cluster::Objects::records_path();
    let began = Instant::now();
    let mut edits = 0;
    while began.elapsed() < Duration::from_secs(4) {
        edits += 1;
        let edit = json!({ "data": { "tunnel-nodes": format!("10.0.0.1\tforeign-{edits}") } });
        running.lab.cluster.admin().merge(&path, &edit).await?;
    }
    running
        .lab
        .wait_for_records(
            "the repaired records",
            Duration::from_secs(10),
            GUIDE_RECORDS,
        )
        .await;
    let user = Cluster::server_user();
    let requests = running.lab.cluster.stand_in()?.requests();
    let writes = requests.iter().filter(|seen| {
        seen.at >= began && seen.user == user && seen.is_write() && seen.resource == "configmaps"
    });
    let count = writes.count();
    ensure!(count <= 20, "{count} writes against {edits} edits in 4 s");
    running.site.serves(&running.server).await
}
