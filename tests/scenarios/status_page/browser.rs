//! The console in Chromium, by `tests/browser/visit.py`: texts of peers and callers stay text, with
//! scripts enabled and disabled; the pages fit screens of 360 to 2560 pixels, in light and dark, and
//! axe finds no barrier. The screenshots and the version of Chromium are written into
//! `target/status-page`, and the screenshots of the run before into its folder `before`.

use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use tokio::time::Instant;
use tunnel_ca::revocation::OrderAction;
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::control::Hello;
use tunnel_tests::ca::{Leaf, TestCa};
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::env::{Agent, NodeEnv, TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::eventually;
use tunnel_tests::process::{Peering, Program, ScratchDir};
use tunnel_tests::scripted::AgentCredential;
use tunnel_tests::targets::Exporter;
use tunnel_tests::tools::{Tool, or_skip, require, target_dir};

use super::{SAMPLED, document, get, on_loopback};
use crate::abuse::report_figure;
use crate::scripted::{Admission, ScriptedAgent, agent_key, hello};

/// A text that would run two scripts and load an image.
const HOSTILE: &str =
    "<script>alert(1)</script>\"'&lt;<img src=http://evil.example/x onerror=alert(2)>";
/// Characters that change the direction of the text after them.
const BIDI: [char; 2] = ['\u{202e}', '\u{2066}'];
/// A path of a request. HTTP allows quotes in it, and no `<`.
const PATH: &str = "/x\"onmouseover='alert(3)'//evil.example/&lt;script&gt;";
/// Pages in the time of one program.
const VISITED_AT_ONCE: usize = 3;
/// Size of a page without its plots.
const PAGE_BYTES: usize = 40 * 1024;
/// A server is gone 5 s after its connection, and rows are up to 10 s old.
const FAILED: Duration = Duration::from_secs(40);
/// Nodes with names of 202 characters.
const LONG_NAMES: usize = 20_000;

/// A page, and texts that must be on it.
struct Page {
    name: &'static str,
    path: String,
    texts: Vec<String>,
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_texts_are_text_in_a_browser_and_pages_fit_every_screen() -> Result<()> {
    if or_skip(require(&[Tool::Chromium, Tool::Axe, Tool::Python])).is_none() {
        return Ok(());
    }
    let env = NodeEnv::start_with(on_loopback).await?;
    let _live = spread_hostile_texts(&env).await?;
    let address = env.env.bound().status.context("no status page")?;
    let origin = format!("http://{address}");
    let pages = pages();
    let visited = pages
        .iter()
        .map(|page| format!("{}={origin}{}", page.name, page.path));
    for page in &pages {
        let begin = Instant::now();
        let reply = get(&env, &page.path, "text/html").await?;
        let (millis, bytes) = (begin.elapsed().as_millis(), without_plots(&reply.text()));
        report_figure(&format!(
            "{}: {millis} ms, {bytes} bytes without plots",
            page.name
        ));
        ensure!(bytes < PAGE_BYTES, "{}: {bytes}", page.name);
    }
    let folder = screenshots()?;
    let report = visit(&folder, visited).await?;
    report_figure(&format!(
        "{}: screenshots in {}",
        report["version"],
        folder.display()
    ));
    let elements = template_elements()?;
    for page in &pages {
        for has_scripts in [true, false] {
            let facts = facts(&report, page.name, has_scripts)?;
            let script = has_scripts.then(|| format!("{origin}/script.js"));
            check_document(facts, page, &elements, &origin, script).context(page.name)?;
        }
        let facts = facts(&report, page.name, true)?;
        ensure!(
            facts["reloads"] == true,
            "{}: {}",
            page.name,
            facts["reloads"]
        );
        check_screens(facts).context(page.name)?;
    }
    // Chromium asks for URLs of its own, which resolve to nothing.
    let asked = texts(&report["asked"]);
    let has_page = asked.iter().any(|url| url.starts_with(&origin));
    let mut elsewhere = asked.iter().filter(|url| !url.starts_with(&origin));
    let is_alone = elsewhere.all(|url| !url.contains("evil.example"));
    ensure!(has_page && is_alone, "{asked:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn installation_without_nodes_says_how_to_add_one() -> Result<()> {
    if or_skip(require(&[Tool::Chromium, Tool::Axe, Tool::Python])).is_none() {
        return Ok(());
    }
    let env = TestEnv::start_with(on_loopback).await?;
    let address = env.bound().status.context("no status page")?;
    let report = visit(&screenshots()?, [format!("empty=http://{address}/")]).await?;
    let shown = facts(&report, "empty", true)?;
    let text = shown["text"].as_str().context("no text")?;
    ensure!(
        text.contains("tunnel-server token create --node NAME"),
        "{text}"
    );
    check_screens(shown)
}

#[tokio::test(flavor = "multi_thread")]
async fn small_installation_shows_which_node_fails_and_what_to_run() -> Result<()> {
    if or_skip(require(&[Tool::Chromium, Tool::Axe, Tool::Python])).is_none() {
        return Ok(());
    }
    let node_env = NodeEnv::start_with(on_loopback).await?;
    let env = &node_env.env;
    let mut live = Vec::new();
    for number in 2..=12 {
        live.push(ScriptedAgent::connect(env, &format!("worker-{number}")).await?);
    }
    let left = ScriptedAgent::connect(env, "worker-13").await?;
    left.leave_with_reason("the host stops").await;
    env.nodes().record(&"worker-14".parse()?, &[]);
    let revoked = agent_key(env, "worker-15")?;
    let order = OrderAction::Revoke;
    env.revocations()
        .order(order, &["worker-15".parse()?], SystemTime::now());
    // The answer to a revoked agent may be a closed connection.
    let _refused = ScriptedAgent::handshake(env, revoked, "worker-15", [7; 16]).await;
    node_env.get("/metrics").await?;
    let away = node_env.host.replace("worker-1:", "worker-13:");
    request(env.http(), &RawRequest::get(&away, "/metrics")).await?;
    eventually("the figures", SAMPLED, async || {
        let overview = document(&node_env, "/").await?;
        let counts = &overview["counts"];
        let states = json!({ "live": 12, "away": 1, "pending": 1, "revoked": 1 });
        ensure!(
            counts["states"] == states && counts["errors"] == 1,
            "{counts}"
        );
        ensure!(
            overview["conditions"]["failures"][0]["code"] == "credential_revoked",
            "{overview}"
        );
        Ok(())
    })
    .await;

    let address = env.bound().status.context("no status page")?;
    let pages = [
        ("small", "/", "12 of 14 reachable"),
        ("small-not-live", "/nodes?state=not-live", "2 nodes"),
        (
            "small-failures",
            "/conditions",
            "tunnel-server nodes unrevoke NAME",
        ),
        ("small-node", "/node/worker-13", "no_agent"),
    ];
    let visited = pages.map(|(name, path, _)| format!("{name}=http://{address}{path}"));
    let report = visit(&screenshots()?, visited).await?;
    for (name, _, text) in pages {
        let shown = facts(&report, name, true)?;
        let words = words(shown);
        ensure!(words.contains(text), "{name}: {words}");
        check_screens(shown).context(name)?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn failing_installation_says_at_a_glance_what_fails_since_when_and_what_to_run() -> Result<()>
{
    if or_skip(require(&[Tool::Chromium, Tool::Axe, Tool::Python])).is_none() {
        return Ok(());
    }
    let failing = FailingInstallation::start().await?;
    let address = failing.address()?;
    eventually("the failures", FAILED, async || {
        let overview = console(address, "/").await?;
        let counts = &overview["counts"]["states"];
        ensure!(counts["away"] == 1 && counts["unknown"] == 2, "{counts}");
        let shown = &overview["conditions"];
        let servers = texts_of(&shown["failing"], |row| {
            format!("{} {} at {}", row["node"], row["code"], row["server"]).replace('"', "")
        });
        for row in [
            "worker-1 target_refused at s0",
            "worker-2 refused_by_policy at s0",
            "worker-9 refused_by_policy at s1",
        ] {
            ensure!(servers.contains(row), "no {row} in {servers:?}");
        }
        let codes = texts_of(&shown["failures"], |row| row["code"].to_string());
        let has_codes = ["\"wrong_node\"", "\"short_session\""];
        ensure!(
            has_codes.iter().all(|code| codes.contains(*code)),
            "{codes:?}"
        );
        let conditions = texts_of(&shown["conditions"], |row| {
            format!("{} {}", row["component"], row["since"].is_string())
        });
        for component in ["server", "client_ca", "https_certificate"] {
            let row = format!("\"{component}\" true");
            ensure!(conditions.contains(&row), "no {row} in {shown:#}");
        }
        Ok(())
    })
    .await;

    let pages = [
        ("failing", "/", "s2 does not answer"),
        ("failing-all", "/conditions", "the policy forbids it"),
        ("failing-node", "/node/worker-1", "target_refused"),
        ("failing-unknown", "/node/worker-20", "s2 is gone"),
        ("failing-not-live", "/nodes?state=not-live", "s2, gone"),
    ];
    let visited = pages.map(|(name, path, _)| format!("{name}=http://{address}{path}"));
    let report = visit(&screenshots()?, visited).await?;
    for (name, _, text) in pages {
        let shown = facts(&report, name, true)?;
        let words = words(shown);
        ensure!(words.contains(text), "{name}: {words}");
        check_screens(shown).context(name)?;
    }
    let overview = facts(&report, "failing", true)?;
    let words = words(overview);
    for answer in [
        "13 of 16 reachable, 1 pending not counted",
        "on the host of s2: systemctl status tunnel-server",
        "for 3 h",
        "on the node, correct --node-name of the agent",
        "5 times at s0, last ",
        "worker-13 no agent is connected",
        "3 h ago",
        "worker-14 (claimed)",
        "worker-1 nothing listens there, port ",
        "the policy forbids it, port 22; also worker-",
        "on this server: tunnel-server policy show",
        "on the node: tunnel-agent doctor",
    ] {
        ensure!(words.contains(answer), "no {answer} in {words}");
    }
    check_glance(overview)
}

/// Tests that the tests above can fail.
#[tokio::test(flavor = "multi_thread")]
async fn browser_reports_what_a_page_without_escapes_does() -> Result<()> {
    if or_skip(require(&[Tool::Chromium, Tool::Axe, Tool::Python])).is_none() {
        return Ok(());
    }
    let scratch = ScratchDir::new()?;
    let policy = "<meta http-equiv=content-security-policy content=\"style-src 'none'\">";
    let html = format!("{policy}<style>p {{}}</style>{HOSTILE}<hr width=2000>");
    let report = visit(scratch.path(), [format!("control=data:text/html,{html}")]).await?;

    let shown = facts(&report, "control", true)?;
    let dialogs = texts(&shown["dialogs"]);
    ensure!(
        dialogs == ["1", "2"] && !texts(&shown["scripts"]).is_empty(),
        "{shown}"
    );
    ensure!(texts(&shown["elements"]).contains(&"img"), "{shown}");
    ensure!(texts(&shown["attributes"]).contains(&"onerror"), "{shown}");
    let requests = texts(&shown["requests"]);
    ensure!(requests.contains(&"http://evil.example/x"), "{shown}");
    let mut violations = texts(&shown["violations"]).into_iter();
    let has_violation = violations.any(|text| text.contains("Content Security Policy"));
    ensure!(has_violation, "{shown}");
    let content = shown["screens"][0]["content"].as_f64();
    let is_wide = content > Some(1280.0);
    ensure!(is_wide && check_screens(shown).is_err(), "{shown}");
    ensure!(
        texts(&report["asked"]).contains(&"http://evil.example/x"),
        "{}",
        report["asked"]
    );
    let shown = facts(&report, "control", false)?;
    let has_run = shown["dialogs"] != Value::Array(Vec::new());
    ensure!(!has_run, "{shown}");
    Ok(())
}

/// Three servers, of which one is gone, with nodes, requests and files that fail.
struct FailingInstallation {
    servers: Vec<TestEnv>,
    _agent: Agent,
    _live: Vec<ScriptedAgent>,
    _exporter: Exporter,
    _scratch: ScratchDir,
}

impl FailingInstallation {
    async fn start() -> Result<Self> {
        let (ca, scratch) = (TestCa::new("callers")?, ScratchDir::new()?);
        let callers = scratch.file("callers.crt", ca.pem())?;
        let (certificate, key) = ca
            .issue(&Leaf::target("tunnel.example"))?
            .write(scratch.path(), "https")?;
        let text = |path: &Path| Some(path.to_string_lossy().into_owned());
        let mut servers = Peering::in_process(3)
            .start_in_process(|number, settings| {
                on_loopback(settings);
                settings.zone = Some(format!("zone-{number}"));
                settings.client_ca = text(&callers);
                settings.https_cert_file = text(&certificate);
                settings.https_key_file = text(&key);
            })
            .await?;
        let env = &servers[0];
        let exporter = Exporter::start("worker-1").await?;
        let config = env.agent_config_with("worker-1", |settings| {
            settings.replicas = Some("1".into());
        })?;
        let agent = Agent::start(config).await?;
        env.connected("worker-1").await;
        let mut live = Vec::new();
        for (server, numbers) in [(0, 2..9), (1, 9..13), (2, 20..22)] {
            for number in numbers {
                let node = format!("worker-{number}");
                live.push(ScriptedAgent::connect(&servers[server], &node).await?);
            }
        }

        let long_away = "worker-13".parse()?;
        env.nodes().record(&long_away, &[]);
        let seen = SystemTime::now() - Duration::from_secs(3 * 3600 + 60);
        env.nodes().record_last_seen(&long_away, seen);
        let token = env.token("worker-99", &[])?.reveal();
        for _ in 0..3 {
            let enrolled = AgentCredential::enroll(env.bound().agents, &token, "worker-14").await;
            ensure!(enrolled.is_err(), "the token is of another node");
        }
        for _ in 0..4 {
            let flapping = ScriptedAgent::connect(env, "worker-15").await?;
            flapping
                .close_with(CloseCode::Dead, "the proxy closed the connection")
                .await;
            eventually("the end of the session", WAIT_TIMEOUT, async || {
                ensure!(!env.registry().has(&"worker-15".parse()?), "connected");
                anyhow::Ok(())
            })
            .await;
        }
        live.push(ScriptedAgent::connect(env, "worker-15").await?);

        let closed = std::net::TcpListener::bind("127.0.0.1:0")?
            .local_addr()?
            .port();
        let ok = format!("worker-1:{}", exporter.addr().port());
        let refused = format!("worker-1:{closed}");
        for (server, host, status, count) in [
            (0, ok.as_str(), 200, 20),
            (0, refused.as_str(), 502, 5),
            (0, "worker-2:22", 403, 4),
            (1, "worker-9:22", 403, 2),
        ] {
            for _ in 0..count {
                let wanted = RawRequest::get(host, "/metrics");
                let answer = request(servers[server].http(), &wanted).await?;
                ensure!(answer.status == status, "{host}: {answer:?}");
            }
        }
        let mut gone = servers.pop().context("no server")?;
        gone.stop_server().await?;
        fs::remove_file(&callers)?;
        fs::remove_file(&certificate)?;
        servers[0].reload();
        Ok(Self {
            servers,
            _agent: agent,
            _live: live,
            _exporter: exporter,
            _scratch: scratch,
        })
    }

    fn address(&self) -> Result<SocketAddr> {
        self.servers[0].bound().status.context("no status page")
    }
}

/// Returns a document of the console at an address.
async fn console(address: SocketAddr, path: &str) -> Result<Value> {
    let wanted = RawRequest::get("127.0.0.1", path).header("Accept", "application/json");
    let reply = request(address, &wanted).await?;
    Ok(serde_json::from_str(&reply.text())?)
}

/// Returns a text for each entry of a list.
fn texts_of(list: &Value, text: impl Fn(&Value) -> String) -> BTreeSet<String> {
    list.as_array().into_iter().flatten().map(text).collect()
}

/// Returns the words of a page with single spaces.
fn words(facts: &Value) -> String {
    let text = facts["text"].as_str().into_iter();
    let words: Vec<_> = text.flat_map(str::split_whitespace).collect();
    words.join(" ")
}

/// Checks that the answers of the overview are on the first screen: all at 1280 pixels, and what needs
/// somebody begins there at 360.
fn check_glance(facts: &Value) -> Result<()> {
    let sections = [
        "Nodes",
        "What needs you",
        "Why requests fail, last hour",
        "Servers",
    ];
    for screen in facts["screens"].as_array().context("no screens")? {
        let edge = |section: &str, edge: usize| screen["sections"][section][edge].as_f64();
        for section in sections {
            let is_seen = match screen["width"].as_u64() {
                Some(360) => section == "Servers" || edge(section, 0) < Some(1400.0),
                Some(1280) => edge(section, 1) < Some(900.0),
                _ => true,
            };
            let is_there = edge(section, 0).is_some();
            ensure!(is_there && is_seen, "{section}: {screen}");
        }
    }
    Ok(())
}

/// Makes the server show hostile texts of each origin: names of nodes, the software of a session,
/// the reason of a close, and the path of a request. Returns the agent with the session.
async fn spread_hostile_texts(env: &NodeEnv) -> Result<ScriptedAgent> {
    env.get(PATH).await?;
    let labels = ["x".repeat(63), "y".repeat(63), "z".repeat(63)].join(".");
    for number in 0..LONG_NAMES {
        let name = format!("zone-{number:05}.{labels}");
        env.env.nodes().record(&name.parse()?, &[]);
    }
    let live = hostile_agent(&env.env, "hostile-live").await?;
    let left = hostile_agent(&env.env, "hostile-left").await?;
    left.leave_with_reason(HOSTILE).await;
    eventually("the hostile texts", WAIT_TIMEOUT, async || {
        for node in ["worker-1", "hostile-live", "hostile-left"] {
            let page = get(env, &format!("/node/{node}"), "text/html").await?;
            ensure!(page.text().contains("evil.example"), "{page:?}");
        }
        Ok(())
    })
    .await;
    Ok(live)
}

async fn hostile_agent(env: &TestEnv, node: &str) -> Result<ScriptedAgent> {
    let hello = Hello {
        software: HOSTILE.to_owned(),
        ..hello(node, [7; 16])?
    };
    match ScriptedAgent::handshake_with(env, agent_key(env, node)?, hello).await? {
        Admission::Admitted(agent) => Ok(agent),
        Admission::Refused(code, detail) => bail!("not admitted: {code} {detail}"),
    }
}

fn pages() -> Vec<Page> {
    let search = format!("{HOSTILE}{}{}txt", BIDI[0], BIDI[1]);
    let mut echo = form_urlencoded::Serializer::for_suffix("/nodes?".to_owned(), 7);
    echo.append_pair("search", &search);
    let page = |name, path: &str, texts: &[&str]| Page {
        name,
        path: path.to_owned(),
        texts: texts.iter().map(ToString::to_string).collect(),
    };
    let echoed = format!("{HOSTILE}\\u{{202e}}\\u{{2066}}txt");
    let long = "x".repeat(63);
    let long = long.as_str();
    vec![
        page("overview", "/", &["20,003", "What needs you"]),
        page("nodes", "/nodes", &["20,003 nodes, page 1 of 501", long]),
        page("search", &echo.finish(), &[echoed.as_str()]),
        page("hostile-nodes", "/nodes?search=hostile", &["2 nodes"]),
        page("session", "/node/hostile-live", &[HOSTILE]),
        page("closed", "/node/hostile-left", &[HOSTILE]),
        page("requests", "/node/worker-1", &[PATH]),
        page("servers", "/servers", &[]),
        page("conditions", "/conditions", &[]),
    ]
}

/// Returns the number of bytes of a page without its plots.
fn without_plots(html: &str) -> usize {
    let plots = html.split("<svg").skip(1);
    let plots = plots.map(|plot| plot.split("</svg>").next().map_or(0, str::len));
    html.len() - plots.sum::<usize>()
}

/// Returns the folder of the screenshots.
fn screenshots() -> Result<PathBuf> {
    let target = target_dir().context("the build's target folder")?;
    Ok(target.join("status-page"))
}

/// Visits pages, each given as `NAME=URL`, a few with each start of Chromium.
async fn visit(folder: &Path, pages: impl IntoIterator<Item = String>) -> Result<Value> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("browser/visit.py");
    let chromium = Tool::Chromium.find().context("no Chromium")?;
    let (mut visited, mut asked, mut version) = (Vec::new(), Vec::new(), Value::Null);
    for pages in pages
        .into_iter()
        .collect::<Vec<_>>()
        .chunks(VISITED_AT_ONCE)
    {
        let visit = Program::tool(Tool::Python)?
            .arg(&script)
            .arg(&chromium)
            .arg(Tool::Axe.find().context("no axe")?)
            .arg(folder)
            .args(pages);
        let report = visit.run().await?.ok()?;
        let mut report: Value = serde_json::from_str(&report).with_context(|| report.clone())?;
        let mut list = |name: &str| report[name].as_array_mut().map(std::mem::take);
        visited.extend(list("pages").unwrap_or_default());
        asked.extend(list("asked").unwrap_or_default());
        version = report["version"].take();
    }
    Ok(json!({ "version": version, "asked": asked, "pages": visited }))
}

/// Returns what the browser found on a page.
fn facts<'a>(report: &'a Value, name: &str, has_scripts: bool) -> Result<&'a Value> {
    let mut pages = report["pages"].as_array().context("no pages")?.iter();
    let page = pages.find(|page| page["name"] == name && page["hasScripts"] == has_scripts);
    page.with_context(|| format!("{name} was not visited"))
}

fn check_document(
    facts: &Value,
    page: &Page,
    elements: &BTreeSet<String>,
    origin: &str,
    script: Option<String>,
) -> Result<()> {
    let text = facts["text"].as_str().context("no text")?;
    for expected in &page.texts {
        ensure!(text.contains(expected), "no {expected} in {text}");
    }
    ensure!(!text.contains(BIDI), "{text:?}");
    let mut found = texts(&facts["elements"]).into_iter();
    let is_known = found.all(|element| elements.contains(element));
    let mut attributes = texts(&facts["attributes"]).into_iter();
    let is_inert = attributes.all(|name| !name.starts_with("on") && name != "style");
    ensure!(is_known && is_inert, "{facts}");
    for nothing in ["dialogs", "violations"] {
        ensure!(texts(&facts[nothing]).is_empty(), "{nothing}: {facts}");
    }
    let scripts = texts(&facts["scripts"]);
    let is_alone = scripts.iter().copied().eq(script.as_deref());
    ensure!(is_alone, "{scripts:?}");
    let requests = texts(&facts["requests"]);
    let is_own = requests.iter().all(|url| url.starts_with(origin));
    ensure!(is_own && (2..=3).contains(&requests.len()), "{requests:?}");
    Ok(())
}

/// Checks that the page has no horizontal scrolling, a light and a dark background, and no barrier.
fn check_screens(facts: &Value) -> Result<()> {
    let screens = facts["screens"].as_array().context("no screens")?;
    ensure!(screens.len() == 6, "{screens:?}");
    for screen in screens {
        let (width, content) = (screen["width"].as_f64(), screen["content"].as_f64());
        ensure!(content.is_some() && content <= width, "{screen}");
        let background = screen["background"].as_array().context("no background")?;
        let is_dark = screen["scheme"] == "dark";
        let mut colors = background.iter().filter_map(Value::as_u64);
        let has_scheme = colors.all(|color| (color < 64) == is_dark);
        ensure!(background.len() == 3 && has_scheme, "{screen}");
        ensure!(texts(&screen["barriers"]).is_empty(), "{screen}");
    }
    Ok(())
}

/// Returns the names of the elements in the templates.
fn template_elements() -> Result<BTreeSet<String>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tunnel-server/templates");
    let mut names = BTreeSet::new();
    for file in fs::read_dir(folder)? {
        let template = fs::read_to_string(file?.path())?;
        let tags = template.split('<').skip(1);
        names.extend(tags.map(|tag| -> String {
            tag.chars()
                .take_while(char::is_ascii_alphanumeric)
                .collect()
        }));
    }
    Ok(names)
}

fn texts(list: &Value) -> Vec<&str> {
    let items = list.as_array().into_iter().flatten();
    items.filter_map(Value::as_str).collect()
}
