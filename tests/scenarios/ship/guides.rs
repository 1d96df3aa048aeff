//! The guides: every block of commands runs here or says why not, links lead somewhere, and the actions of the cluster's
//! tutorial are few.

use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;
use tunnel_server::config::EDGE_LABEL;
use tunnel_tests::ca::{Leaf, TestCa};
use tunnel_tests::checks::ensure_contains;
use tunnel_tests::cluster::{Cluster, Kind, Node, Objects};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::fakes::edge_sites;
use tunnel_tests::guides::{Block, blocks, links, page, pages, script};
use tunnel_tests::manifests::{documents, repository};
use tunnel_tests::netns::{EDGE_ADDRESS, Namespace, Topology};
use tunnel_tests::process::{AgentSetup, Listener, Piped, Program, ScratchDir, ServerSetup};
use tunnel_tests::ssh;
use tunnel_tests::tools::{Skip, Tool, bin_dir, or_skip, require};

use crate::cluster::kustomizers;
use crate::dns::report_figure;

/// Expands each test to one against the fake API server and one against a real API server.
macro_rules! on_both {
    ($($test:ident),+ $(,)?) => {
        mod fake_api {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $test() -> anyhow::Result<()> {
                super::$test(tunnel_tests::cluster::Kind::FakeApiServer).await
            })+
        }
        mod real {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $test() -> anyhow::Result<()> {
                super::$test(tunnel_tests::cluster::Kind::Real).await
            })+
        }
    };
}

on_both!(
    cluster_tutorial_runs_against_an_api_server,
    guides_of_certificates_run_against_an_api_server,
    guide_of_several_servers_applies_its_overlays,
    commands_on_the_page_of_old_setups_run,
    egress_selector_guide_runs_against_an_api_server,
    migration_guide_runs_against_an_api_server_with_the_old_objects,
    guide_of_names_applies_what_it_renders,
);

/// Where blocks with a runner run: a file that names the page. Blocks without one run in this folder.
const RUNNERS: [(&str, &str); 10] = [
    ("host", "tests/scenarios/ship/host_guides.rs"),
    ("second-host", "tests/scenarios/ship/host_guides.rs"),
    ("server", "tests/scenarios/ship/guides.rs"),
    ("node", "tests/scenarios/ship/guides.rs"),
    ("approve", "tests/scenarios/ship/guides.rs"),
    ("nat", "tests/scenarios/ship/render.rs"),
    ("real", "tests/scenarios/ship/helm_release.rs"),
    (
        "daemonset",
        "tests/scenarios/cluster/authority/daemonset.rs",
    ),
    ("rotation", "tests/scenarios/credentials/ca_rotation.rs"),
    ("systemd", "tests/packages.sh"),
];
/// Blocks that no test runs, at most. Each says why not.
const MOST_UNRUN: usize = 10;
const STANDALONE: &str = "docs/tutorials/standalone.md";
const TWO_MACHINES: &str = "docs/tutorials/two-machines.md";

const LISTED: Duration = Duration::from_secs(20);
/// The page that follows old set-ups, and the number of steps of each.
const OLD_SETUPS: &str = "docs/explanation/old-setups.md";
const OLD_STEPS: [u32; 5] = [47, 13, 23, 13, 12];

/// What the same takes with yurt-tunnel's DNS mode, for `kubectl logs` alone.
const OLD_ACTIONS: usize = 16;
const ACTIONS: usize = 4;
/// Programs whose commands guides have.
const PROGRAMS: [&str; 3] = ["tunnel-server", "tunnel-agent", "kubectl"];

/// Where the count of actions is stated.
const STATED: [(&str, &str); 3] = [
    ("README.md", "One manifest and three more actions"),
    ("docs/tutorials/cluster.md", "In four actions"),
    (
        "docs/explanation/yurt-tunnel.md",
        "needs sixteen actions where Culvert needs [four]",
    ),
];

#[test]
fn every_block_of_commands_is_run_by_a_test_or_says_why_not() -> Result<()> {
    let here = std::fs::read_dir(repository().join("tests/scenarios/ship"))?;
    let mut scripts = String::new();
    for file in here {
        let file = file?.path();
        if file.is_file() {
            scripts += &std::fs::read_to_string(file)?;
        }
    }
    let mut unrun = Vec::new();
    for path in pages()? {
        for block in blocks(&page(&path)?) {
            let (line, mark) = (block.line, &block.mark);
            let found = match (block.runner(), block.reason()) {
                _ if !block.is_commands() => continue,
                (Some(""), _) => scripts.contains(&format!("\"{path}\"")),
                (Some(runner), _) => {
                    let file = RUNNERS.iter().find(|(name, _)| *name == runner);
                    let (_, file) = file.with_context(|| format!("{path}:{line}: {mark:?}"))?;
                    std::fs::read_to_string(repository().join(file))?.contains(&path)
                }
                (None, Some(reason)) => {
                    unrun.push(format!("{path}:{line}: {reason}"));
                    continue;
                }
                (None, None) => false,
            };
            ensure!(found, "{path}:{line}: no test runs this: {mark:?}");
        }
    }
    report_figure(&format!("blocks that no test runs: {}", unrun.len()));
    ensure!(unrun.len() <= MOST_UNRUN, "{unrun:#?}");
    Ok(())
}

#[test]
fn links_of_all_pages_lead_to_files() -> Result<()> {
    for path in pages()? {
        let folder = repository().join(&path);
        let folder = folder.parent().context("a folder")?;
        for link in links(&page(&path)?) {
            ensure!(folder.join(&link).exists(), "{path}: {link}");
        }
    }
    Ok(())
}

#[test]
fn every_step_of_an_old_setup_has_an_answer_in_its_order() -> Result<()> {
    let text = page(OLD_SETUPS)?;
    let commands = script(&blocks(&text));
    let mut sections = text.split("\n## ").skip(1);
    for (number, steps) in (1..).zip(OLD_STEPS) {
        let section = sections.next().context("a section")?;
        ensure!(section.starts_with(&format!("{number}. ")), "{section}");
        let mut next = 1;
        for line in section.lines() {
            let row = line.strip_prefix("| ");
            let Some(row) = row.and_then(|row| row.strip_suffix(" |")) else {
                continue;
            };
            let cells: Vec<_> = row.split(" | ").collect();
            let numbers = cells[0].split(", ").map(str::parse::<u32>);
            let Ok(numbers) = numbers.collect::<Result<Vec<_>, _>>() else {
                continue;
            };
            let [_, step, answer] = cells[..] else {
                anyhow::bail!("{number}: {line}");
            };
            ensure!(step.len() > 3 && answer.len() > 3, "{number}: {line}");
            for found in numbers {
                ensure!(found == next, "{number}: {found} in place of {next}");
                next += 1;
            }
            // What an answer says to run, the test of the blocks runs.
            for code in answer.split('`').skip(1).step_by(2) {
                let program = code.split_once(' ').map(|(program, _)| program);
                let is_command = program.is_some_and(|program| PROGRAMS.contains(&program));
                ensure!(!is_command || commands.contains(code), "{number}: {code}");
            }
        }
        ensure!(next == steps + 1, "{number}: {} of {steps} steps", next - 1);
    }
    Ok(())
}

/// P6: what a person does, from a clean cluster to `kubectl logs`.
#[test]
fn p6_cluster_tutorial_has_four_actions_where_the_old_way_has_sixteen() -> Result<()> {
    let text = page("docs/tutorials/cluster.md")?;
    let actions = blocks(&text).into_iter().filter(|block| block.is_action());
    let actions: Vec<_> = actions.map(|block| block.text).collect();
    let headings = text.lines().filter(|line| line.starts_with("## Action "));
    let (_, table) = text.split_once("| | touched |\n").context("the old way")?;
    let rows = table
        .lines()
        .take_while(|line| line.starts_with('|'))
        .skip(1);
    let old = rows.count();
    let count = actions.len();
    report_figure(&format!("P6: {count} actions, {old} with yurt-tunnel"));
    for (number, action) in (1..).zip(&actions) {
        let first = action.lines().next().unwrap_or_default();
        report_figure(&format!("  {number}. {first}"));
    }
    ensure!(headings.count() == count, "a heading for each action");
    for (path, sentence) in STATED {
        let text = page(path)?.replace('\n', " ");
        ensure!(text.contains(sentence), "{path}: {sentence}");
    }
    ensure!(old == OLD_ACTIONS, "{old} rows of the old way");
    ensure!(actions.len() == ACTIONS, "{actions:#?}");
    // The server must not be scheduled on a node that becomes an edge a moment later.
    let first = &actions[0];
    ensure!(first.starts_with("kubectl label node"), "{first}");
    // One block is one thing: a command, or an edit of one file.
    for action in &actions {
        let commands = action.replace("\\\n", " ");
        let is_edit = action.starts_with("spec:");
        ensure!(is_edit || commands.lines().count() == 1, "{action}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn standalone_tutorial_runs_as_it_stands() -> Result<()> {
    let needs = require(&[Tool::Bash, Tool::Curl]);
    let scratch = ScratchDir::new()?;
    let hosts = scratch.file("hosts", "127.0.0.1 localhost\n")?;
    // Its ports are the default ones: they are free in a network of its own.
    let network = needs.and_then(|()| Namespace::new("tutorial", &hosts));
    let Some(network) = or_skip(network) else {
        return Ok(());
    };
    let text = script(&blocks(&page(STANDALONE)?));
    let program = bash(&text, scratch.path(), &[])?.inside(Some(&network));
    let finished = program.run().await?;
    let shown = finished.to_string();
    finished.ok()?;
    ensure!(shown.contains("tunnel_agent_sessions_connected"), "{shown}");
    let folder = scratch.path().join("tunnel");
    ensure!(!folder.exists(), "it leaves its folder");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn revoke_guide_locks_a_node_out() -> Result<()> {
    if or_skip(require(&[Tool::Bash])).is_none() {
        return Ok(());
    }
    let scratch = ScratchDir::new()?;
    let server = ServerSetup::on_loopback(&scratch.path().join("server"));
    let server = server.start().await?;
    let folder = scratch.path().join("agent");
    let _agent = server.agent_setup("worker-1", &folder).await?.start()?;
    server.wait_until_connected(&["worker-1"]).await;
    let token = server.token("worker-2", None).await?;
    let id = token.split('.').next().context("an id")?;
    let variables = [
        ("TUNNEL_SERVER_DATA_DIR", server.data_dir().into()),
        ("ID", id.into()),
    ];
    let guide = blocks(&page("docs/how-to/revoke.md")?);
    let mut count = 0;
    for block in guide.iter().filter(|block| block.runner() == Some("")) {
        bash(&block.text, scratch.path(), &variables)?
            .run()
            .await?
            .ok()?;
        count += 1;
        // The agent dials again half a minute after `unrevoke`: other tests wait for that.
        if block.text.contains("nodes revoke") {
            server.wait_until_connected(&[]).await;
        }
    }
    ensure!(count == 4, "{count} blocks");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn policy_guide_prints_what_the_rules_decide() -> Result<()> {
    if or_skip(require(&[Tool::Bash])).is_none() {
        return Ok(());
    }
    let scratch = ScratchDir::new()?;
    let text = script(&blocks(&page("docs/how-to/policy.md")?));
    let printed = bash(&text, scratch.path(), &[])?.run().await?.ok()?;
    ensure!(
        printed.contains("allowed: rule default-read allows metrics"),
        "{printed}"
    );
    Ok(())
}

/// A machine joins by the token of the guide, and one whose token needs an approval waits for it.
#[tokio::test(flavor = "multi_thread")]
async fn machines_join_by_one_token_as_the_guide_says() -> Result<()> {
    if or_skip(require(&[Tool::Bash])).is_none() {
        return Ok(());
    }
    let scratch = ScratchDir::new()?;
    let server = ServerSetup::on_loopback(&scratch.path().join("server"));
    let server = server.start().await?;
    let guide = blocks(&page("docs/how-to/join-many.md")?);
    let text = script(&guide);
    let data_dir = [("TUNNEL_SERVER_DATA_DIR", server.data_dir().into())];
    let printed = bash(&text, scratch.path(), &data_dir)?.run().await?.ok()?;
    ensure!(printed.contains("cam-* (0 of 500)"), "{printed}");
    let join = |node: &str, token: &str| {
        let token = scratch.path().join(token).display().to_string();
        let agents = server.address(Listener::Agents);
        let setup = AgentSetup::on_loopback(node, agents, &scratch.path().join(node));
        setup.args(&["--token-file", &token]).start()
    };
    let _joined = join("cam-17", "cam.token")?;
    server.wait_until_connected(&["cam-17"]).await;
    let mut approving = guide.iter();
    let approving = approving.find(|block| block.runner() == Some("approve"));
    let approving = approving.context("no approval")?.text.trim_end();
    let (create, approve) = approving.rsplit_once('\n').context("commands")?;
    let run = |text: &str| bash(text, scratch.path(), &data_dir);
    run(create)?.run().await?.ok()?;
    let _waits = join("cam-18", "approved.token")?;
    eventually("a node that waits", LISTED, async || {
        let listed = server.verb(&["token", "list"])?.run().await?.ok()?;
        ensure!(listed.contains("pending"), "{listed}");
        anyhow::Ok(())
    })
    .await;
    let approved = run(&format!("{approve} cam-19"))?.run().await?;
    ensure!(approved.code() == Some(0), "{approved}");
    ensure_contains(
        &approved.to_string(),
        &[
            "node cam-18 approved",
            "not waiting for an approval: cam-19",
        ],
    )?;
    server.wait_until_connected(&["cam-17", "cam-18"]).await;
    Ok(())
}

/// The blocks of each machine run in a network of its own, in the order of the page. The reader copies
/// the token, and so does the test.
#[tokio::test(flavor = "multi_thread")]
async fn two_machines_tutorial_runs_as_it_stands() -> Result<()> {
    let ssh = [Tool::Ssh, Tool::SshKeygen, Tool::Sshd];
    let tools = require(&[&[Tool::Bash, Tool::Curl, Tool::Prometheus], &ssh[..]].concat());
    let Some(sites) = or_skip(tools.and_then(|()| Topology::new())) else {
        return Ok(());
    };
    let _exporters = edge_sites(&sites).await?;
    let [edge, _] = sites.edges();
    let scratch = ScratchDir::new()?;
    let (folder, address) = (scratch.path(), EDGE_ADDRESS.into());
    ssh::make_keys(folder).await?;
    let sshd = ssh::configure(sites.cloud(), folder);
    let sshd = sshd.and_then(|()| ssh::start_sshd(edge.node(), address, edge.node_name(), folder));
    let Some(sshd) = or_skip(sshd) else {
        return Ok(());
    };
    let _sshd = sshd?;
    ssh::wait_for_sshd(edge.node(), address).await;
    let mut server = Machine::start(sites.cloud(), &scratch, "server")?;
    let mut node = Machine::start(edge.node(), &scratch, "node")?;
    let mut printed = String::new();
    for block in blocks(&page(TWO_MACHINES)?) {
        let machine = match block.runner() {
            Some("server") => &mut server,
            Some("node") => &mut node,
            _ => continue,
        };
        printed += &machine.run(&block.text).await?;
        let token = server.home.join("culvert/token");
        if token.exists() {
            std::fs::create_dir_all(node.home.join("culvert"))?;
            std::fs::rename(token, node.home.join("culvert/token"))?;
        }
    }
    let parts = [
        "# node worker-1",
        "\"worker-1:9100\"",
        "Linux ",
        "errors: 0",
    ];
    ensure_contains(&printed, &parts)?;
    for machine in [server, node] {
        ensure!(
            !machine.home.join("culvert").exists(),
            "it leaves its folder"
        );
    }
    Ok(())
}

async fn cluster_tutorial_runs_against_an_api_server(kind: Kind) -> Result<()> {
    if or_skip(require(&[Tool::Openssl])).is_none() {
        return Ok(());
    }
    let Some(fixture) = ShipFixture::start_on(kind).await? else {
        return Ok(());
    };
    let node = Node::new("worker-1").addressed("InternalIP", "192.168.33.221");
    fixture.cluster.objects().add(&node).await?;
    fixture
        .scratch
        .file("pki/kubelet-ca.crt", "of the kubelets\n")?;
    let prologue = filled("tunnel-ca");
    let output = tokio::select! {
        output = fixture.run_with("docs/tutorials/cluster.md", &prologue, &[]) => output?,
        never = fixture.cluster.sign_for_kubelets() => match never {},
    };
    let service = Objects::path("services", "tunnel-dns");
    let service = fixture.object(&service).await?;
    let address = service["spec"]["clusterIP"].as_str().context("clusterIP")?;
    ensure!(output.contains(address), "{output}");
    let node = fixture.object("/api/v1/nodes/worker-1").await?;
    let labels = &node["metadata"]["labels"];
    ensure!(labels[EDGE_LABEL] == "true", "{node}");
    let map = Objects::path("configmaps", "tunnel-agent");
    let map = fixture.object(&map).await?;
    ensure!(map["data"]["server"] == "cloud.example.com:31008", "{map}");
    let both = fixture.scratch.path().join("pki/kubelet-and-tunnel-ca.crt");
    ensure!(std::fs::read_to_string(both)? == "of the kubelets\nof tunnel-ca\n");
    fixture.cluster.check_kubelet_client().await
}

#[tokio::test(flavor = "multi_thread")]
async fn openyurt_and_prometheus_guides_run_against_an_api_server() -> Result<()> {
    let Some(fixture) = ShipFixture::start().await? else {
        return Ok(());
    };
    fixture.run("docs/how-to/openyurt.md").await?;
    let path = "/apis/apps/v1/namespaces/kube-system/deployments/tunnel-server";
    let server = fixture.object(path).await?;
    let selector = &server["spec"]["template"]["spec"]["nodeSelector"];
    ensure!(selector[EDGE_LABEL] == "false", "{selector}");
    if or_skip(require(&[Tool::Promtool])).is_none() {
        return Ok(());
    }
    fixture.run("docs/how-to/prometheus.md").await?;
    let namespace = "kubectl create namespace monitoring";
    (fixture.run_with("docs/how-to/monitoring.md", namespace, &[])).await?;
    let rules = "/apis/monitoring.coreos.com/v1/namespaces/monitoring/prometheusrules/culvert";
    let rules = fixture.object(rules).await?;
    ensure!(
        rules["spec"]["groups"][0]["rules"][0]["alert"].is_string(),
        "{rules}"
    );
    let ports = Objects::path("configmaps", "yurt-tunnel-server-cfg");
    let ports = fixture.object(&ports).await?;
    ensure!(ports["data"]["http-proxy-ports"] == "9100, 9256", "{ports}");
    Ok(())
}

/// A kube-apiserver of kubeadm has its pair, and servers have filled their ConfigMap.
async fn guides_of_certificates_run_against_an_api_server(kind: Kind) -> Result<()> {
    let Some(fixture) = ShipFixture::start_on(kind).await? else {
        return Ok(());
    };
    let prologue = filled("tunnel-ca") + &filled("kube-root-ca.crt");
    let guide = "docs/how-to/metrics-server.md";
    fixture.run_aside(guide, &prologue).await?;
    let both = Objects::path("configmaps", "metrics-server-kubelet-ca");
    let both = fixture.object(&both).await?;
    let expected = "of kube-root-ca.crt\nof tunnel-ca\n";
    ensure!(both["data"]["ca.crt"] == expected, "{both}");
    let pair = TestCa::new("cluster")?.issue(&Leaf::server())?;
    for (file, text) in [("crt", &pair.certificate), ("key", &pair.key)] {
        let file = format!("pki/apiserver-kubelet-client.{file}");
        fixture.scratch.file(&file, text)?;
    }
    let guide = "docs/how-to/kubelet-certificate.md";
    fixture.run_aside(guide, "").await?;
    let secret = Objects::path("secrets", "tunnel-kubelet-client");
    let secret = fixture.object(&secret).await?;
    ensure!(secret["type"] == "kubernetes.io/tls", "{secret}");
    Ok(())
}

async fn guide_of_several_servers_applies_its_overlays(kind: Kind) -> Result<()> {
    let Some(fixture) = ShipFixture::start_on(kind).await? else {
        return Ok(());
    };
    fixture.run("docs/how-to/servers.md").await?;
    let service = fixture
        .object(&Objects::path("services", "tunnel-dns"))
        .await?;
    let distribution = &service["spec"]["trafficDistribution"];
    ensure!(distribution == "PreferSameNode", "{service}");
    let path = "/apis/apps/v1/namespaces/kube-system/deployments/tunnel-server";
    let server = fixture.object(path).await?;
    ensure!(server["spec"]["replicas"] == 3, "{server}");
    Ok(())
}

async fn commands_on_the_page_of_old_setups_run(kind: Kind) -> Result<()> {
    let Some(fixture) = ShipFixture::start_on(kind).await? else {
        return Ok(());
    };
    let printed = fixture.run_aside(OLD_SETUPS, OLD_OBJECTS).await?;
    let blocks = blocks(&page(OLD_SETUPS)?);
    let run = blocks.iter().filter(|block| block.is_run());
    let commands = run.flat_map(|block| block.text.lines());
    let commands = commands.filter(|line| !line.starts_with(' ')).count();
    report_figure(&format!("old set-ups: {commands} commands run"));
    ensure!(blocks.iter().all(Block::is_run), "a block that is not run");
    for kind in ["DaemonSet", "ServiceMonitor", "EgressSelectorConfiguration"] {
        ensure!(printed.contains(&format!("kind: {kind}\n")), "{printed}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn guide_of_edge_clusters_writes_kubeconfigs() -> Result<()> {
    let Some(fixture) = ShipFixture::start().await? else {
        return Ok(());
    };
    fixture
        .run_aside("docs/how-to/edge-clusters.md", "")
        .await?;
    for file in ["worker-1.kubeconfig", "site.kubeconfig"] {
        let text = std::fs::read_to_string(fixture.scratch.path().join(file))?;
        let config = documents(&text)?.pop().context("a document")?;
        let cluster = &config["clusters"][0]["cluster"];
        ensure!(cluster["server"] == "https://worker-1:6443", "{text}");
        ensure!(cluster["proxy-url"] == "http://127.0.0.1:8131", "{text}");
        ensure!(
            cluster["tls-server-name"] == "kubernetes.default.svc",
            "{text}"
        );
    }
    Ok(())
}

/// The objects are applied, and come back as they were rendered.
async fn guide_of_names_applies_what_it_renders(kind: Kind) -> Result<()> {
    let Some(fixture) = ShipFixture::start_on(kind).await? else {
        return Ok(());
    };
    let guide = "docs/how-to/node-local-dns.md";
    fixture.run_aside(guide, KUBE_DNS).await?;
    let file = fixture.scratch.path().join("node-local-dns.yaml");
    let rendered = documents(&std::fs::read_to_string(file)?)?;
    ensure!(rendered.len() == 5, "{rendered:?}");
    for object in rendered {
        let name = object["metadata"]["name"].as_str().context("a name")?;
        let path = match object["kind"].as_str() {
            Some("DaemonSet") => {
                format!("/apis/apps/v1/namespaces/kube-system/daemonsets/{name}")
            }
            kind => Objects::path(
                &format!("{}s", kind.context("a kind")?.to_lowercase()),
                name,
            ),
        };
        ensure_applied(&fixture.object(&path).await?, &object, &path)?;
    }
    Ok(())
}

/// Checks that an object has all that was applied. kube-apiserver adds defaults, and does not store
/// `false`.
fn ensure_applied(object: &Value, applied: &Value, path: &str) -> Result<()> {
    match (object, applied) {
        (Value::Object(object), Value::Object(applied)) => {
            for (key, value) in applied.iter().filter(|(_, value)| **value != json!(false)) {
                let path = format!("{path}.{key}");
                ensure_applied(object.get(key).unwrap_or(&Value::Null), value, &path)?;
            }
        }
        (Value::Array(object), Value::Array(applied)) if object.len() == applied.len() => {
            for (object, applied) in object.iter().zip(applied) {
                ensure_applied(object, applied, path)?;
            }
        }
        (object, applied) => ensure!(object == applied, "{path}: {object} in place of {applied}"),
    }
    Ok(())
}

async fn egress_selector_guide_runs_against_an_api_server(kind: Kind) -> Result<()> {
    let Some(fixture) = ShipFixture::start_on(kind).await? else {
        return Ok(());
    };
    let printed = fixture.run("docs/how-to/egress-selector.md").await?;
    let service = Objects::path("services", "x-tunnel-server-internal-svc");
    let service = fixture.object(&service).await?;
    let address = service["spec"]["clusterIP"].as_str().context("clusterIP")?;
    ensure!(printed.contains(address), "{printed}");
    let role = "/apis/rbac.authorization.k8s.io/v1/clusterroles/tunnel-server";
    let rules = fixture.object(role).await?["rules"].clone();
    let has = |rule: &Value| rule["resources"][0] == "servicecidrs" && rule["verbs"][0] == "list";
    ensure!(rules.as_array().into_iter().flatten().any(has), "{rules}");
    Ok(())
}

async fn migration_guide_runs_against_an_api_server_with_the_old_objects(kind: Kind) -> Result<()> {
    let Some(fixture) = ShipFixture::start_on(kind).await? else {
        return Ok(());
    };
    let backup = fixture.scratch.path().join("backup.yaml");
    let variables = [("BACKUP", backup.as_os_str().to_owned())];
    let guide = "docs/how-to/migrate.md";
    fixture.run_with(guide, OLD, &variables).await?;
    let saved = std::fs::read_to_string(backup)?;
    ensure!(saved.contains("x-tunnel-server-svc") && saved.contains("yurt-tunnel-nodes"));
    let service = Objects::path("services", "x-tunnel-server-internal-svc");
    let service = fixture.object(&service).await?;
    ensure!(service["spec"]["clusterIP"] == "10.106.217.16", "{service}");
    let selector = json!({
        "app.kubernetes.io/name": "tunnel-server", "app.kubernetes.io/component": "server",
    });
    ensure!(service["spec"]["selector"] == selector, "{service}");
    let old = "/apis/apps/v1/namespaces/kube-system/daemonsets/yurt-tunnel-agent";
    let old = fixture.cluster.admin().get(old).await?;
    ensure!(old.is_none(), "still there");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn systemd_guide_checks_its_configurations() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let text = script(&blocks(&page("docs/how-to/systemd.md")?));
    let text = format!("cd {}\n{text}", repository().display());
    if or_skip(require(&[Tool::Bash])).is_none() {
        return Ok(());
    }
    bash(&text, scratch.path(), &[])?.run().await?.ok()?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn render_guide_prints_its_texts() -> Result<()> {
    if or_skip(require(&[Tool::Bash])).is_none() {
        return Ok(());
    }
    let scratch = ScratchDir::new()?;
    let text = script(&blocks(&page("docs/how-to/render.md")?));
    let printed = bash(&text, scratch.path(), &[])?.run().await?.ok()?;
    let written = std::fs::read_to_string(scratch.path().join("egress-selector.yaml"))?;
    ensure!(written.contains("udsName:"), "{written}");
    for part in ["nameservers:", "policy sequential", "http_sd_configs:"] {
        ensure!(printed.contains(part), "no {part}: {printed}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn edge_apiserver_guide_renders_its_files() -> Result<()> {
    if or_skip(require(&[Tool::Bash, Tool::Kubectl])).is_none() {
        return Ok(());
    }
    let scratch = ScratchDir::new()?;
    let text = script(&blocks(&page("docs/how-to/edge-apiserver.md")?));
    bash(&text, scratch.path(), &[])?.run().await?.ok()?;
    let rules = std::fs::read_to_string(scratch.path().join("edge-apiserver.nft"))?;
    let redirect = "ip daddr 10.96.0.1 tcp dport 443 dnat to 169.254.2.1:10268";
    ensure!(rules.matches(redirect).count() == 2, "{rules}");
    let unit = scratch.path().join("culvert-edge-apiserver.service");
    let unit = std::fs::read_to_string(unit)?;
    ensure!(
        unit.contains("nft delete table ip culvert_edge_apiserver"),
        "{unit}"
    );
    Ok(())
}

/// A shell with a home of its own that runs one block after the other.
struct Machine {
    home: std::path::PathBuf,
    shell: Piped,
}

impl Machine {
    fn start(network: &Namespace, scratch: &ScratchDir, name: &str) -> Result<Self> {
        let home = scratch.path().join(name);
        std::fs::create_dir_all(&home)?;
        let prometheus = Tool::Prometheus.find();
        let prometheus = prometheus.as_deref().and_then(Path::parent);
        let shell = Program::tool(Tool::Bash)?
            .args(["-e", "-m"])
            .env("HOME", &home)
            .env("PATH", path_with(prometheus)?)
            .inside(Some(network))
            .start_piped()?;
        Ok(Self { home, shell })
    }

    /// Runs a block to its end and returns its output.
    async fn run(&mut self, text: &str) -> Result<String> {
        let script = format!("{{\n{text}\n}} </dev/null 2>&1\necho {END}\n");
        self.shell.stdin.write_all(script.as_bytes()).await?;
        let mut printed = Vec::new();
        let read = async {
            while !printed.ends_with(format!("{END}\n").as_bytes()) {
                ensure!(
                    self.shell.stdout.read_buf(&mut printed).await? > 0,
                    "the shell has ended"
                );
            }
            Ok(())
        };
        let read = timeout(scaled(BLOCK_LIMIT), read).await;
        let printed = String::from_utf8_lossy(&printed).into_owned();
        read.context("no end")
            .and_then(|read| read)
            .with_context(|| format!("{text}\nprinted {printed}"))?;
        Ok(printed)
    }
}

/// What a machine prints after a block.
const END: &str = "end-of-the-block";
const BLOCK_LIMIT: Duration = Duration::from_secs(60);

/// An API server, and a person with kubectl in a clone.
struct ShipFixture {
    cluster: Cluster,
    kubectl: std::path::PathBuf,
    scratch: ScratchDir,
}

impl ShipFixture {
    async fn start() -> Result<Option<Self>> {
        Self::start_on(Kind::FakeApiServer).await
    }

    /// A real kube-apiserver allows what kubeadm's allows.
    async fn start_on(kind: Kind) -> Result<Option<Self>> {
        let files = kustomizers().and_then(|files| require(&[Tool::Bash]).map(|()| files));
        let Some(files) = or_skip(files) else {
            return Ok(None);
        };
        let kubectl = files.into_iter().next().context("one at least")?;
        let Some(cluster) = (match kind {
            Kind::FakeApiServer => Cluster::start(kind).await?,
            Kind::Real => Cluster::real_with(&["--allow-privileged=true".to_owned()]).await?,
        }) else {
            return Ok(None);
        };
        if kind == Kind::Real {
            cluster.delete_roles().await?;
        }
        let scratch = ScratchDir::new()?;
        std::fs::create_dir(scratch.path().join("pki"))?;
        Ok(Some(Self {
            cluster,
            kubectl,
            scratch,
        }))
    }

    async fn object(&self, path: &str) -> Result<Value> {
        let object = self.cluster.admin().get(path).await?;
        object.with_context(|| path.to_owned())
    }

    /// Runs a guide's blocks and returns their output.
    async fn run(&self, guide: &str) -> Result<String> {
        self.run_with(guide, "", &[]).await
    }

    /// Runs a guide's blocks after `prologue`.
    async fn run_with(
        &self,
        guide: &str,
        prologue: &str,
        variables: &[(&str, OsString)],
    ) -> Result<String> {
        let prologue = format!("cd {}\n{prologue}", repository().display());
        self.run_script(guide, &prologue, variables).await
    }

    /// Runs a guide's blocks after `prologue` in the folder of the test, for guides that write
    /// files.
    async fn run_aside(&self, guide: &str, prologue: &str) -> Result<String> {
        self.run_script(guide, prologue, &[]).await
    }

    async fn run_script(
        &self,
        guide: &str,
        prologue: &str,
        variables: &[(&str, OsString)],
    ) -> Result<String> {
        let text = script(&blocks(&page(guide)?));
        let folder = self.scratch.path();
        let pki = folder.join("pki").display().to_string();
        let text = text.replace("/etc/kubernetes/pki", &pki);
        let text = format!("{prologue}\n{text}");
        let kubectl = self.kubectl.parent().context("a folder")?;
        let prometheus = Tool::Promtool.find();
        let prometheus = prometheus.as_deref().and_then(Path::parent);
        let mut program = bash(&text, folder, variables)?;
        let path = path_with([Some(kubectl), prometheus].into_iter().flatten())?;
        program = program
            .env("PATH", path)
            .env("KUBECONFIG", self.cluster.admin_kubeconfig()?);
        program.run().await?.ok()
    }
}

/// A script of bash with our binaries in its path.
pub(super) fn bash(text: &str, folder: &Path, variables: &[(&str, OsString)]) -> Result<Program> {
    let text = format!("cd {}\n{text}", folder.display());
    let program = Program::tool(Tool::Bash)?.arg("-c").arg(text);
    let program = program.env("PATH", path_with([])?).env("HOME", folder);
    Ok(variables
        .iter()
        .fold(program, |program, (name, value)| program.env(name, value)))
}

fn path_with<'a>(folders: impl IntoIterator<Item = &'a Path>) -> Result<OsString> {
    let ours = bin_dir().ok_or_else(|| Skip::because("needs the binaries"))?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = folders.into_iter().map(Path::to_owned).chain([ours]);
    Ok(std::env::join_paths(
        folders.chain(std::env::split_paths(&path)),
    )?)
}

/// Fills a ConfigMap with a CA, as its writer does.
fn filled(name: &str) -> String {
    format!(
        "kubectl -n kube-system create configmap {name} 2>/dev/null || true\n\
         kubectl -n kube-system patch configmap {name} --type merge -p '{{\"data\":{{\"ca.crt\":\"of {name}\\n\"}}}}'\n"
    )
}

/// Objects that the pages of old set-ups change.
const OLD_OBJECTS: &str = r"
tunnel-server render coredns --hosts -f Corefile
kubectl -n kube-system create configmap kube-proxy --from-literal=config.conf=
kubectl -n kube-system create configmap yurt-tunnel-server-cfg --from-literal=http-proxy-ports=
kubectl -n kube-system create deployment coredns --image=example.com/coredns
kubectl create -f - <<END
apiVersion: v1
kind: Service
metadata: { name: kube-dns, namespace: kube-system, annotations: { openyurt.io/topologyKeys: kubernetes.io/hostname } }
spec: { selector: { k8s-app: kube-dns }, ports: [{ name: dns-tcp, port: 53, protocol: TCP }] }
---
apiVersion: apps/v1
kind: DaemonSet
metadata: { name: kube-proxy, namespace: kube-system }
spec:
  selector: { matchLabels: { k8s-app: kube-proxy } }
  template:
    metadata: { labels: { k8s-app: kube-proxy } }
    spec: { containers: [{ name: kube-proxy, image: example.com/kube-proxy }] }
END
";

/// The Service of the cluster's DNS.
const KUBE_DNS: &str = r"
kubectl create -f - <<END
apiVersion: v1
kind: Service
metadata: { name: kube-dns, namespace: kube-system }
spec: { selector: { k8s-app: kube-dns }, ports: [{ name: dns-tcp, port: 53, protocol: TCP }] }
END
";

/// What yurt-tunnel's manifests leave in a cluster, as far as the guide touches it.
const OLD: &str = r"
kubectl -n kube-system delete configmap yurt-tunnel-nodes
kubectl -n kube-system create configmap yurt-tunnel-nodes --from-literal=tunnel-nodes=
kubectl -n kube-system create configmap yurt-tunnel-server-cfg --from-literal=http-proxy-ports=9445
kubectl -n kube-system create deployment yurt-tunnel-server --image=example.com/yurt-tunnel-server:v1.0
kubectl create clusterrole yurt-tunnel-server --verb=list --resource=nodes
kubectl create clusterrolebinding yurt-tunnel-server --clusterrole=yurt-tunnel-server --serviceaccount=kube-system:yurt-tunnel-server
kubectl create -f - <<END
apiVersion: apps/v1
kind: DaemonSet
metadata: { name: yurt-tunnel-agent, namespace: kube-system }
spec:
  selector: { matchLabels: { k8s-app: yurt-tunnel-agent } }
  template:
    metadata: { labels: { k8s-app: yurt-tunnel-agent } }
    spec: { containers: [{ name: yurt-tunnel-agent, image: example.com/yurt-tunnel-agent:v1.0 }] }
---
apiVersion: v1
kind: Service
metadata: { name: x-tunnel-server-internal-svc, namespace: kube-system, labels: { name: yurt-tunnel-server } }
spec:
  clusterIP: 10.106.217.16
  selector: { k8s-app: yurt-tunnel-server }
  ports:
    - { name: http, port: 10255, targetPort: 10264 }
    - { name: https, port: 10250, targetPort: 10263 }
---
apiVersion: v1
kind: Service
metadata: { name: x-tunnel-server-svc, namespace: kube-system, labels: { name: yurt-tunnel-server } }
spec:
  type: NodePort
  selector: { k8s-app: yurt-tunnel-server }
  ports:
    - { name: tcp, port: 10262, targetPort: 10262, nodePort: 31008 }
END
";
