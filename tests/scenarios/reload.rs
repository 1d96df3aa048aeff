//! A configuration file that changes while server and agent run: what applies, what needs a restart,
//! and files that change nothing.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tunnel_agent::app::RELOAD_PATH;
use tunnel_process::config_report::ConfigStatus;
use tunnel_process::files;
use tunnel_process::meta::{MetaAddress, act};
use tunnel_server::admin::AdminClient;
use tunnel_server::admin::verbs::VerbError;
use tunnel_store::data_dir::DataDir;
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::env::{Agent, TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::eventually;
use tunnel_tests::load::Load;
use tunnel_tests::manifests::repository;
use tunnel_tests::process::ScratchDir;
use tunnel_tests::targets::{EchoTarget, Exporter};

/// A server with a file, and an agent with an exporter whose port the file has.
struct FileEnv {
    _agent: Agent,
    exporter: Exporter,
    env: TestEnv,
}

impl FileEnv {
    async fn start() -> Result<Self> {
        let exporter = Exporter::start("worker-1").await?;
        let yaml = format!("httpProxyPorts: {}\n", exporter.addr().port());
        let env = TestEnv::start_with_file(&yaml, |_| {}).await?;
        Ok(Self {
            _agent: env.agent("worker-1").await?,
            exporter,
            env,
        })
    }

    /// Writes the file with the exporter's port and more, and has the server read it.
    fn write(&self, more: &str) -> Result<()> {
        let port = self.exporter.addr().port();
        self.replace(&format!("httpProxyPorts: {port}\n{more}"))?;
        self.env.reload();
        Ok(())
    }

    /// Replaces the file as a whole. A reading that is still due after a reload would apply the empty
    /// file that a write begins with.
    fn replace(&self, text: &str) -> Result<()> {
        Ok(files::replace(&self.env.config_file(), text.as_bytes())?)
    }

    async fn status(&self, port: u16) -> Result<u16> {
        let wanted = RawRequest::get(&format!("worker-1:{port}"), "/metrics");
        Ok(request(self.env.http(), &wanted).await?.status)
    }

    async fn admin(&self) -> Result<AdminClient> {
        let dir = DataDir::open_existing(&self.env.path().join("server"))?;
        AdminClient::connect(&dir).await?.context("no server")
    }

    /// Waits until a condition about the configuration has all of `words`, or there is none.
    async fn condition(&self, words: &[&str]) {
        eventually("the condition", WAIT_TIMEOUT, async || {
            let lines = self.env.conditions().await?;
            let line = lines
                .iter()
                .find(|line| line.starts_with("[!] configuration:"));
            match line {
                Some(line) => ensure!(
                    !words.is_empty() && words.iter().all(|word| line.contains(word)),
                    "{line}"
                ),
                None => ensure!(words.is_empty(), "no condition with {words:?}"),
            }
            anyhow::Ok(())
        })
        .await;
    }
}

/// Returns an address that is free at this moment.
async fn free_address() -> Result<SocketAddr> {
    Ok(TcpListener::bind("127.0.0.1:0").await?.local_addr()?)
}

async fn echoes(socket: &mut TcpStream) -> Result<()> {
    socket.write_all(b"hello").await?;
    let mut answer = [0; 5];
    socket.read_exact(&mut answer).await?;
    ensure!(&answer == b"hello");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn ports_services_and_limits_follow_the_file_and_no_request_or_stream_notices() -> Result<()>
{
    let node = FileEnv::start().await?;
    let host = format!("worker-1:{}", node.exporter.addr().port());
    let load = Load::start(node.env.http(), &[host], 2).await?;
    let other = Exporter::start("other").await?;
    let port = other.addr().port();
    let own = node.exporter.addr().port();
    let echo = EchoTarget::start().await?;
    ensure!(node.status(port).await? == 403);

    // A port and a service.
    let listen = free_address().await?;
    let service = |target: SocketAddr| {
        format!(
            "services: [{{ name: echo, listen: '{listen}', node: worker-1, target: {} }}]\n",
            target.port()
        )
    };
    node.replace(&format!(
        "httpProxyPorts: [{own}, {port}]\n{}",
        service(echo.addr())
    ))?;
    node.env.reload();
    eventually("the port is reachable", WAIT_TIMEOUT, async || {
        let status = node.status(port).await?;
        ensure!(status == 200, "{status}");
        anyhow::Ok(())
    })
    .await;
    let mut stream = eventually("the service listens", WAIT_TIMEOUT, async || {
        let mut socket = TcpStream::connect(listen).await?;
        echoes(&mut socket).await?;
        anyhow::Ok(socket)
    })
    .await;

    // Another target for the service; its open connection stays with the old one.
    node.write(&service(other.addr()))?;
    eventually(
        "the service has the other target",
        WAIT_TIMEOUT,
        async || {
            let mut socket = TcpStream::connect(listen).await?;
            socket
                .write_all(b"GET /metrics HTTP/1.0\r\nHost: a\r\n\r\n")
                .await?;
            // The target of before sends the request back, and does not end.
            let mut answer = [0; 7];
            socket.read_exact(&mut answer).await?;
            ensure!(&answer == b"HTTP/1.", "{answer:?}");
            anyhow::Ok(())
        },
    )
    .await;
    ensure!(
        node.status(port).await? == 403,
        "the port is out of the list"
    );
    echoes(&mut stream).await?;

    // A limit, and no service.
    node.write("limits: { openTimeout: 3s }\nlogLevel: warn\n")?;
    eventually("the listener closes", WAIT_TIMEOUT, async || {
        let connected = TcpStream::connect(listen).await;
        ensure!(connected.is_err(), "still open");
        anyhow::Ok(())
    })
    .await;
    echoes(&mut stream).await?;
    let status = node.admin().await?.reload().await?;
    ensure!(
        status.mistakes.is_empty() && status.needs_restart.is_empty(),
        "{status:?}"
    );
    let settings = node.admin().await?.settings().await?;
    ensure!(settings.log_level.as_deref() == Some("warn"));

    let outcome = load.end().await?;
    ensure!(outcome.failures.is_empty(), "{:?}", outcome.failures);
    ensure!(
        outcome.open_streams == 1 && outcome.answered > 10,
        "{outcome:?}"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_follow_the_file() -> Result<()> {
    let node = FileEnv::start().await?;
    let port = node.exporter.addr().port();
    let rules = |effect: &str| {
        format!("rules: [{{ name: all, effect: {effect}, callers: [anonymous] }}]\n")
    };
    ensure!(node.status(port).await? == 200);
    for (effect, expected) in [("deny", 403), ("allow", 200)] {
        node.write(&rules(effect))?;
        let status = node.admin().await?.reload().await?;
        ensure!(status.mistakes.is_empty(), "{status:?}");
        let found = node.status(port).await?;
        ensure!(found == expected, "{effect}: {found}");
    }
    node.write("rules: [{ name: all, effect: perhaps }]\n")?;
    node.condition(&["cannot be used", "rules"]).await;
    ensure!(node.status(port).await? == 200);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_needs_a_restart_and_what_a_flag_overrides_is_named_and_the_others_apply() -> Result<()>
{
    let node = FileEnv::start().await?;
    let other = Exporter::start("other").await?;
    let (own, port) = (node.exporter.addr().port(), other.addr().port());
    let text = format!(
        "httpProxyPorts: [{own}, {port}]\nzone: a\nlimits: {{ streamWindow: 1MiB }}\nhttpListen: '127.0.0.1:1'\n"
    );
    node.replace(&text)?;
    let status = node.admin().await?.reload().await?;
    ensure!(status.applied == ["httpProxyPorts", "limits"], "{status:?}");
    ensure!(
        status.needs_restart == ["zone", "limits.streamWindow"],
        "{status:?}"
    );
    ensure!(status.overridden == ["httpListen"], "{status:?}");
    node.condition(&["zone, limits.streamWindow", "restart"])
        .await;
    ensure!(node.status(port).await? == 200);
    // The condition ends when the file is as the server runs.
    node.write("")?;
    node.condition(&[]).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn file_is_followed_without_a_signal_through_the_links_of_a_mounted_config_map() -> Result<()>
{
    let exporter = Exporter::start("worker-1").await?;
    let port = exporter.addr().port();
    let folder = ScratchDir::new()?;
    let version = |name: &str, text: &str| -> Result<()> {
        let dir = folder.path().join(name);
        fs::create_dir(&dir)?;
        fs::write(dir.join("server.yaml"), text)?;
        let new = folder.path().join("..new");
        std::os::unix::fs::symlink(&dir, &new)?;
        // As the kubelet replaces the content of a volume.
        fs::rename(&new, folder.path().join("..data"))?;
        Ok(())
    };
    version("..1", "limits: { reloadEvery: 50ms }\n")?;
    let path = folder.path().join("server.yaml");
    std::os::unix::fs::symlink("..data/server.yaml", &path)?;
    let env = TestEnv::start_at_file(&path).await?;
    let _agent = env.agent("worker-1").await?;
    let wanted = RawRequest::get(&format!("worker-1:{port}"), "/metrics");
    ensure!(request(env.http(), &wanted).await?.status == 403);
    version(
        "..2",
        &format!("limits: {{ reloadEvery: 50ms }}\nhttpProxyPorts: {port}\n"),
    )?;
    eventually("the port is reachable", WAIT_TIMEOUT, async || {
        let status = request(env.http(), &wanted).await?.status;
        ensure!(status == 200, "{status}");
        anyhow::Ok(())
    })
    .await;
    Ok(())
}

/// Each of these files changes nothing. The words are in the condition.
pub(crate) const BAD_FILES: &[(&str, &str)] = &[
    ("httpProxyPorts: [", "--config"),
    ("httpProxyPorts: 70000", "line 1"),
    ("httpProxyPorts: abc", "line 1"),
    ("httpProxyPorts: {a: 1}", "line 1"),
    ("httpProxyPort: 9100", "did you mean httpProxyPorts"),
    ("\n\nlogLevel: loud", "line 3"),
    ("- a\n- b", "line 1"),
    ("just a text", "line 1"),
    ("a: b: c", "--config"),
    ("\t- a", "--config"),
    ("\u{0}", "--config"),
    ("services: [{ name: a }]", "line 1"),
    (
        "services: [{ name: a, listen: x, node: n, target: 1 }]",
        "services: a",
    ),
    (
        "services: [{ name: a, listen: '127.0.0.1:1', node: n, target: 0 }]",
        "services: a",
    ),
    (
        "services: [{ name: a, listen: '0.0.0.0:1', node: n, target: 1 }]",
        "anyone on the network",
    ),
    (
        "services: [{ name: a, listen: '127.0.0.1:1', node: 'n n', target: 1 }]",
        "services: a",
    ),
    (
        "services: [{ name: a, listen: '127.0.0.1:1', node: n, target: 1 }, { name: b, listen: '127.0.0.1:1', node: n, target: 1 }]",
        "of the service a",
    ),
    ("services: { name: a }", "list"),
    ("cloud: [{ name: a, nodes: '*' }]", "needs target"),
    ("cloud: [{ name: a, target: 'x:1' }]", "needs nodes"),
    (
        "cloud: [{ name: a, nodes: '*', target: '169.254.169.254:80' }]",
        "never dialed",
    ),
    (
        "cloud: [{ name: a, label: a=b, target: 'x:1' }]",
        "needs a cluster",
    ),
    ("rules: [{ name: a, effect: maybe }]", "rules: a: effect"),
    (
        "rules: [{ name: a, callers: [nobody] }]",
        "rules: a: callers",
    ),
    ("limits: { openTimeout: 0s }", "limits.openTimeout"),
    ("limits: { openTimeout: soon }", "limits.openTimeout"),
    ("limits: { openTimout: 1s }", "did you mean openTimeout"),
    ("limits: { suspectAfterBusy: 1h }", "suspectAfterBusy"),
    ("limits: 5", "line 1"),
    ("accessLogSample: 0", "--access-log-sample"),
    (
        "delegationAllowedCallers: [a]",
        "--delegation-allowed-callers",
    ),
    ("targetTls: strict\nhttpProxyPorts: 9100", "--target-tls"),
    ("httpListen: 0.0.0.0:80", "--http-listen"),
    ("zone: 'a b'", "--zone"),
];

#[tokio::test(flavor = "multi_thread")]
async fn bad_file_changes_nothing_and_is_a_condition() -> Result<()> {
    let node = FileEnv::start().await?;
    let port = node.exporter.addr().port();
    let before = node.admin().await?.settings().await?;
    for (text, words) in BAD_FILES {
        node.replace(text)?;
        let status = node.admin().await?.reload().await?;
        if text.starts_with("httpListen") {
            // A flag overrides it, so that it is not even a mistake.
            ensure!(status.overridden == ["httpListen"], "{text}: {status:?}");
            node.write("")?;
            node.admin().await?.reload().await?;
            continue;
        }
        ensure!(!status.mistakes.is_empty(), "{text:?} is not refused");
        let refused = status.check().err().context("it has mistakes")?;
        ensure!(VerbError::from(refused).exit_code() == 64, "{text:?}");
        node.condition(&["cannot be used", words]).await;
        let answer = node.status(port).await?;
        ensure!(answer == 200, "{text}: {answer}");
        let settings = node.admin().await?.settings().await?;
        ensure!(settings == before, "{text}: {settings:?}");
    }
    for mode in [0o666, 0o000] {
        set_mode(&node.env.config_file(), mode)?;
        let status = node.admin().await?.reload().await?;
        ensure!(!status.mistakes.is_empty() || mode == 0, "mode {mode:o}");
    }
    fs::remove_file(node.env.config_file())?;
    let status = node.admin().await?.reload().await?;
    // An absent file may come back, as at the start.
    ensure!(
        status.mistakes.is_empty() && status.facts.len() == 1,
        "{status:?}"
    );
    let refused = status.check().err().context("the file is absent")?;
    ensure!(VerbError::from(refused).exit_code() == 1);
    node.condition(&["cannot be used", "cannot read"]).await;
    ensure!(node.status(port).await? == 200);
    node.write("")?;
    node.condition(&[]).await;
    ensure!(node.admin().await?.settings().await? == before);
    Ok(())
}

/// Each of these files of an agent changes nothing. The words are in the condition.
const BAD_AGENT_FILES: &[(&str, &str)] = &[
    ("denyPorts: [", "--config"),
    ("denyPorts: 70000", "line 1"),
    ("denyPorts: abc", "line 1"),
    ("denyPorts: {a: 1}", "line 1"),
    ("denyPort: 9100", "did you mean denyPorts"),
    ("localhostPorts: -1", "--localhost-ports"),
    ("allowTargets: nowhere", "--allow-targets"),
    ("allowTargets: '10.0.0.0/33:80'", "--allow-targets"),
    ("\n\nlogLevel: loud", "line 3"),
    ("denyPorts: 9100\nlogLevel: loud", "line 2"),
    ("- a\n- b", "line 1"),
    ("just a text", "line 1"),
    ("a: b: c", "--config"),
    ("\t- a", "--config"),
    ("\u{0}", "--config"),
    ("cloudListen: [apiserver]", "--cloud-listen"),
    ("cloudListen: ['apiserver=10.0.0.1:443']", "--cloud-listen"),
    ("transport: pigeon", "--transport"),
    ("drainTimeout: soon", "--drain-timeout"),
    ("workerThreads: 0", "--worker-threads"),
    ("replicas: 0", "--replicas"),
    ("quicCongestion: reno", "--quic-congestion"),
    ("remoteDiag: maybe", "--remote-diag"),
    ("accessLog: some", "--access-log"),
    ("accessLogSample: 0", "--access-log-sample"),
    ("proxy: 'ftp://a'", "--proxy"),
    ("certFile: /no/file", "--ca-file"),
    ("limits: 5", "line 1"),
    ("limits: { keepAlive: fast }", "limits.keepAlive"),
    ("limits: { keepAliv: 5s }", "did you mean keepAlive"),
];

/// Has the agent read its file, as `tunnel-agent reload` does.
async fn reload_agent(socket: &Path) -> ConfigStatus {
    eventually("the agent's answer", WAIT_TIMEOUT, async || {
        let (_, status) = act(socket, RELOAD_PATH).await?;
        anyhow::Ok(serde_json::from_str(&status)?)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_file_of_an_agent_changes_nothing_and_reload_says_why() -> Result<()> {
    let env = TestEnv::start().await?;
    let exporter = Exporter::start("worker-1").await?;
    let port = exporter.addr().port();
    let path = env.path().join("agent.yaml");
    fs::write(&path, "")?;
    let config = env.agent_config_at_file("worker-1", &path)?;
    let socket = config.data_dir.join("admin.sock");
    let meta = MetaAddress::Unix(socket.clone());
    let _agent = Agent::start(config).await?;
    env.connected("worker-1").await;
    let wanted = RawRequest::get(&format!("worker-1:{port}"), "/metrics");
    let status = async || Ok::<_, anyhow::Error>(request(env.http(), &wanted).await?.status);
    for (text, words) in BAD_AGENT_FILES {
        files::replace(&path, text.as_bytes())?;
        let read = reload_agent(&socket).await;
        ensure!(!read.mistakes.is_empty(), "{text:?} is not refused");
        let (_, page) = meta.get("/readyz?verbose").await?;
        let mut lines = page.lines();
        let line = lines.find(|line| line.starts_with("[!] configuration:"));
        ensure!(
            line.is_some_and(|line| line.contains(words)),
            "{text:?}: {page}"
        );
        ensure!(status().await? == 200, "{text:?}");
    }
    let denied = format!("denyPorts: {port}\ntransport: h2\n");
    files::replace(&path, denied.as_bytes())?;
    let read = reload_agent(&socket).await;
    ensure!(
        read.mistakes.is_empty()
            && read.applied == ["denyPorts"]
            && read.needs_restart == ["transport"],
        "{read:?}"
    );
    ensure!(status().await? == 403);
    Ok(())
}

fn set_mode(path: &Path, mode: u32) -> Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(mode))?)
}

#[tokio::test(flavor = "multi_thread")]
async fn dial_policy_of_the_agent_follows_its_file() -> Result<()> {
    let env = TestEnv::start().await?;
    let exporter = Exporter::start("worker-1").await?;
    let port = exporter.addr().port();
    let path = env.path().join("agent.yaml");
    fs::write(&path, "limits: { reloadEvery: 50ms }\n")?;
    let config = env.agent_config_at_file("worker-1", &path)?;
    let _agent = Agent::start(config).await?;
    env.connected("worker-1").await;
    let wanted = RawRequest::get(&format!("worker-1:{port}"), "/metrics");
    let reaches = async |expected: u16| {
        eventually("the answer", WAIT_TIMEOUT, async || {
            let status = request(env.http(), &wanted).await?.status;
            ensure!(status == expected, "{status}");
            anyhow::Ok(())
        })
        .await;
    };
    reaches(200).await;
    let denied = format!("limits: {{ reloadEvery: 50ms }}\ndenyPorts: {port}\n");
    fs::write(&path, &denied)?;
    reaches(403).await;
    fs::write(&path, "limits: { reloadEvery: 50ms }\n")?;
    reaches(200).await;
    Ok(())
}

#[test]
fn page_names_every_key_that_applies_while_a_process_runs() -> Result<()> {
    let page = fs::read_to_string(repository().join("docs/reference/configuration.md"))?;
    for (program, keys) in [
        ("tunnel-server", tunnel_server::config::LIVE_KEYS),
        ("tunnel-agent", tunnel_agent::config::LIVE_KEYS),
    ] {
        let begin = format!("| `{program}` | ");
        let mut rows = page.lines().filter_map(|line| line.strip_prefix(&begin));
        let row = rows.next().context(program)?.trim_end_matches(" |");
        let named: Vec<&str> = row.split(", ").map(|key| key.trim_matches('`')).collect();
        ensure!(named == keys, "{program}: {named:?}");
    }
    Ok(())
}
