//! F21 and the rest of F22: failures of the API server, during which tunnels and known nodes keep
//! working.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tunnel_tests::apiserver::{Cut, FakeApiServer, Fault, Presence, RecordedRequest, Status};
use tunnel_tests::cluster::{Cluster, Kind, Objects, edge};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::process::{Server, ServerSetup, Signal, stored_text};

use super::{
    ClusterEnv, FIRST, GUIDE_RECORDS, READYZ, Site, WITH_WORKER_2, fetch_text, wait_for_text,
    wait_until_gone,
};

/// Hosts of some distributions and companies have a proxy in the environment of each process.
#[tokio::test(flavor = "multi_thread")]
async fn proxy_of_the_environment_leads_to_no_api_server_that_no_proxy_names() -> Result<()> {
    let cluster_env = ClusterEnv::fake().await?;
    cluster_env.guide().await?;
    for variable in ["HTTPS_PROXY", "https_proxy", "HTTP_PROXY"] {
        let setup = cluster_env
            .setup(variable)?
            .env(variable, "http://192.0.2.1:3128");
        let setup = setup.env("NO_PROXY", "localhost,127.0.0.0/8");
        let server = setup.start().await.context(variable)?;
        let records = "\ntunnel_server_kubernetes_records 2\n";
        wait_for_text(&server, "/metrics", FIRST, records).await;
    }
    Ok(())
}

/// A cluster with the guide's objects, a server that has written their records, and traffic through
/// the server.
struct Running {
    cluster_env: ClusterEnv,
    server: Server,
    site: Site,
}

impl Running {
    async fn start() -> Result<Self> {
        let cluster_env = ClusterEnv::fake().await?;
        let server = cluster_env.guided_server().await?;
        let site = Site::serving(&cluster_env, &server).await?;
        Ok(Self {
            cluster_env,
            server,
            site,
        })
    }

    fn fake_api(&self) -> Result<&FakeApiServer> {
        self.cluster_env.fake_api()
    }

    /// Sends requests for this long. Each one must be answered.
    async fn serves_for(&self, time: Duration) -> Result<()> {
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.site.serves(&self.server).await?;
        }
        Ok(())
    }

    /// Adds a Node while the API server is unavailable.
    fn add_behind(&self, name: &str) -> Result<()> {
        let node = edge(name).object().clone();
        self.fake_api()?.put("nodes", None, node)
    }

    #[track_caller]
    fn wait_for_records(&self, patience: Duration, expected: &str) -> impl Future<Output = ()> {
        self.cluster_env.wait_for_records(patience, expected)
    }

    /// Waits until the records have the line of a Node.
    async fn wait_for_record(&self, name: &str) {
        let line = format!("\t{name}");
        eventually(name, Duration::from_secs(10), async || {
            let records = self.cluster_env.objects().records().await?;
            ensure!(records.contains(&line), "{records}");
            Ok(())
        })
        .await;
    }

    fn lists_since(&self, since: Instant, plural: &str) -> Result<Vec<RecordedRequest>> {
        let user = Cluster::server_user();
        let all = self.fake_api()?.requests();
        let fits = |recorded: &RecordedRequest| {
            recorded.at >= since
                && recorded.user == user
                && recorded.resource == plural
                && recorded.verb == "list"
                && !recorded.path.contains("continue=")
        };
        Ok(all.into_iter().filter(fits).collect())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn f21_an_api_server_that_is_away_leaves_traffic_alone() -> Result<()> {
    for presence in [Presence::Refusing, Presence::Silent] {
        let running = Running::start().await?;
        running.fake_api()?.be(presence).await?;
        running.add_behind("worker-2")?;
        running.serves_for(Duration::from_secs(6)).await?;
        running.fake_api()?.be(Presence::Here).await?;
        let back = Instant::now();
        running.wait_for_records(FIRST, WITH_WORKER_2).await;
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
async fn f21_too_many_requests_are_respected_and_slow_answers_waited_for() -> Result<()> {
    let running = Running::start().await?;
    let user = Cluster::server_user();
    let began = Instant::now();
    let refusal = Fault::answer(Status::too_many_requests(3)).by(&user);
    running.fake_api()?.fault(refusal);
    running.fake_api()?.cut_watches(Cut::Broken);
    running.add_behind("worker-2")?;
    running.serves_for(Duration::from_secs(7)).await?;
    let requests = running.fake_api()?.requests();
    let refused: Vec<_> = requests
        .iter()
        .filter(|recorded| recorded.at >= began && recorded.user == user && recorded.status == 429)
        .collect();
    // Seven watches, two Leases, two writers and the CA each send one request in three seconds at
    // most. Requests that were already under way come in addition.
    ensure!(
        !refused.is_empty() && refused.len() <= 12 * 4,
        "{} refused requests in 7 s: {refused:?}",
        refused.len()
    );
    running.fake_api()?.clear_faults();
    running.wait_for_records(FIRST, WITH_WORKER_2).await;

    let delay = Fault::delay(Duration::from_secs(3)).by(&user);
    running.fake_api()?.fault(delay);
    running.cluster_env.objects().remove("worker-2").await?;
    running.serves_for(Duration::from_secs(4)).await?;
    running.fake_api()?.clear_faults();
    running.wait_for_records(FIRST, GUIDE_RECORDS).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn f21_cut_watches_resume_and_expired_ones_list_once() -> Result<()> {
    let running = Running::start().await?;
    let began = Instant::now();
    let cuts = [Cut::Ended, Cut::Broken, Cut::Ended, Cut::Broken];
    for (round, cut) in (0..).zip(cuts) {
        running.fake_api()?.cut_watches(cut);
        let name = format!("cut-{round}");
        running.cluster_env.objects().add(&edge(&name)).await?;
        running.wait_for_record(&name).await;
        running.site.serves(&running.server).await?;
    }
    let lists = running.lists_since(began, "nodes")?;
    ensure!(lists.is_empty(), "watches were resumed by lists: {lists:?}");

    // The API server is unavailable and forgets its history, so the watch cannot resume.
    running.fake_api()?.be(Presence::Refusing).await?;
    running.add_behind("late")?;
    running.fake_api()?.compact();
    let back = Instant::now();
    running.fake_api()?.be(Presence::Here).await?;
    running.wait_for_record("late").await;
    for plural in ["nodes", "configmaps", "services"] {
        let lists = running.lists_since(back, plural)?;
        // The server lists each ConfigMap that it follows once: records, port lists, the
        // certificates of its own CA, the CA of kubelets.
        let most = if plural == "configmaps" { 4 } else { 1 };
        ensure!(
            lists.len() <= most,
            "{plural}: {} lists after 410: {lists:?}",
            lists.len()
        );
    }
    running.site.serves(&running.server).await
}

/// Restarts a real kube-apiserver three times. A watch from before the restart gets 410, which is
/// not a condition. The server lists everything at once.
#[tokio::test(flavor = "multi_thread")]
async fn f21_restarts_of_a_real_kube_apiserver_are_followed_within_seconds() -> Result<()> {
    let Some(mut cluster_env) = ClusterEnv::start(Kind::Real).await? else {
        return Ok(());
    };
    let server = cluster_env.guided_server().await?;
    for number in 0..3 {
        let next = tokio::time::Instant::now() + BETWEEN_RESTARTS;
        cluster_env.cluster.restart().await?;
        let name = format!("late-{number}");
        eventually("a node after the restart", FIRST, async || {
            cluster_env.objects().add(&edge(&name)).await
        })
        .await;
        let back = Instant::now();
        eventually("its record", Duration::from_secs(5), async || {
            let records = cluster_env.objects().records().await?;
            ensure!(records.contains(&name), "{records}");
            Ok(())
        })
        .await;
        let took = back.elapsed();
        crate::abuse::report_figure(&format!("restart {number}: record after {took:?}"));
        let patience = Duration::from_secs(5);
        wait_until_gone(&server, READYZ, patience, "[!] watching").await;
        tokio::time::sleep_until(next).await;
    }
    let log = server.log().to_string();
    // Not "410" alone, which times and ports have, too.
    let is_expired = |line: &&str| {
        [" 410", "too old resource version", "Expired"]
            .iter()
            .any(|text| line.contains(text))
    };
    let expired: Vec<_> = log.lines().filter(is_expired).collect();
    ensure!(expired.is_empty(), "conditions: {expired:?}");
    Ok(())
}

/// Time between two restarts. Without an outage of the API server in between, the server would wait
/// longer than this before a second full list.
const BETWEEN_RESTARTS: Duration = Duration::from_secs(12);

#[tokio::test(flavor = "multi_thread")]
async fn f21_a_server_starts_without_the_api_server_and_serves_what_it_knew() -> Result<()> {
    let mut running = Running::start().await?;
    // The server writes the snapshot some seconds after a change.
    let data_dir = running.cluster_env.scratch.path().join("a");
    eventually("the snapshot", FIRST, async || {
        let text = stored_text(&data_dir)?;
        let port = running.site.port().to_string();
        ensure!(text.contains("node/worker-1") && text.contains(&port));
        anyhow::Ok(())
    })
    .await;
    running.fake_api()?.be(Presence::Refusing).await?;
    let setup = running.server.setup_for_restart();
    running.server.process().signal(Signal::Kill)?;
    running.server.process().end(FIRST).await?;
    running.server = setup.start().await?;
    let served = async || running.site.serves(&running.server).await;
    let patience = scaled(Duration::from_secs(15));
    eventually("traffic without the API server", patience, served).await;
    running.add_behind("worker-2")?;
    running.fake_api()?.be(Presence::Here).await?;
    // The Lease of the killed server must expire first.
    let patience = scaled(Duration::from_secs(30));
    running.wait_for_records(patience, WITH_WORKER_2).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn f22_without_its_rights_the_server_alarms_and_serves_and_recovers() -> Result<()> {
    let running = Running::start().await?;
    running.cluster_env.cluster.allow_server(false).await?;
    running.fake_api()?.cut_watches(Cut::Ended);
    running.cluster_env.objects().add(&edge("worker-2")).await?;
    eventually("the alarm", scaled(Duration::from_secs(15)), async || {
        let text = fetch_text(&running.server, "/metrics").await?;
        let forbidden = text
            .lines()
            .filter(|line| line.contains("forbidden"))
            .any(|line| !line.ends_with(" 0"));
        ensure!(forbidden, "no metric reports it");
        Ok(())
    })
    .await;
    running.serves_for(Duration::from_secs(3)).await?;
    running.cluster_env.cluster.allow_server(true).await?;
    let patience = Duration::from_secs(30);
    running.wait_for_records(patience, WITH_WORKER_2).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn f22_a_map_that_is_changed_all_the_time_neither_stops_nor_floods_the_writer() -> Result<()>
{
    let running = Running::start().await?;
    let path = Objects::records_path();
    let began = Instant::now();
    let mut edits = 0;
    while began.elapsed() < Duration::from_secs(4) {
        edits += 1;
        let edit = json!({ "data": { "tunnel-nodes": format!("10.0.0.1\tforeign-{edits}") } });
        running.cluster_env.admin().merge(&path, &edit).await?;
    }
    running.wait_for_records(FIRST, GUIDE_RECORDS).await;
    let user = Cluster::server_user();
    let requests = running.fake_api()?.requests();
    let writes = requests.iter().filter(|recorded| {
        recorded.at >= began
            && recorded.user == user
            && recorded.is_write()
            && recorded.resource == "configmaps"
    });
    let count = writes.count();
    ensure!(count <= 20, "{count} writes against {edits} edits in 4 s");
    running.site.serves(&running.server).await
}

/// An operator replaces the token in the kubeconfig, at first by one that has ended.
#[tokio::test(flavor = "multi_thread")]
async fn replaced_kubeconfig_is_in_use_and_a_token_that_has_ended_is_named() -> Result<()> {
    let cluster_env = ClusterEnv::fake().await?;
    cluster_env.guide().await?;
    let good = std::fs::read_to_string(cluster_env.cluster.server_kubeconfig()?)?;
    let mut ended: Value = serde_json::from_str(&good)?;
    ended["users"][0]["user"]["token"] = "ended".into();
    let kubeconfig = cluster_env.scratch.file("own.kubeconfig", &good)?;
    let folder = cluster_env.scratch.path().join("a");
    let setup = ServerSetup::in_cluster(&folder, &kubeconfig);
    let mut server = setup.args(&["--namespace", "kube-system"]).start().await?;
    cluster_env.wait_for_records(FIRST, GUIDE_RECORDS).await;
    let site = Site::serving(&cluster_env, &server).await?;
    std::fs::write(&kubeconfig, ended.to_string())?;
    server.process().signal(Signal::Hangup)?;
    cluster_env.fake_api()?.cut_watches(Cut::Ended);
    let hint = "(401); the API server does not accept";
    wait_for_text(&server, READYZ, FIRST, hint).await;
    let readiness = fetch_text(&server, READYZ).await?;
    ensure!(!readiness.contains("grant"), "{readiness}");
    site.serves(&server).await?;
    cluster_env.objects().add(&edge("worker-2")).await?;
    std::fs::write(&kubeconfig, good)?;
    server.process().signal(Signal::Hangup)?;
    // The pause after a refusal has to end first.
    let patience = Duration::from_secs(30);
    cluster_env.wait_for_records(patience, WITH_WORKER_2).await;
    wait_until_gone(&server, READYZ, patience, "(401)").await;
    Ok(())
}

/// No API server should have such an object. It ends no task for good, and not silently.
#[tokio::test(flavor = "multi_thread")]
async fn service_whose_spec_is_a_list_is_named_and_followed_once_it_is_repaired() -> Result<()> {
    let running = Running::start().await?;
    let namespace = Some("kube-system");
    let service = running.cluster_env.objects().service().await?;
    let mut odd = service.clone();
    odd["spec"] = json!([]);
    running.fake_api()?.put("services", namespace, odd)?;
    running.add_behind("worker-2")?;
    let is_named = async || {
        let readiness = fetch_text(&running.server, READYZ).await?;
        ensure!(readiness.contains("[!]"), "{readiness}");
        anyhow::Ok(())
    };
    eventually("a condition", FIRST, is_named).await;
    running.serves_for(Duration::from_secs(3)).await?;
    running.fake_api()?.put("services", namespace, service)?;
    let patience = Duration::from_secs(30);
    running.wait_for_records(patience, WITH_WORKER_2).await;
    let leader = "\ntunnel_server_kubernetes_leader 1\n";
    wait_for_text(&running.server, "/metrics", FIRST, leader).await;
    wait_until_gone(&running.server, READYZ, patience, "[!]").await;
    Ok(())
}
