//! Subcommands, help, configuration mistakes and exit codes.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use tunnel_tests::checks::ensure_contains;
use tunnel_tests::manifests::repository;
use tunnel_tests::process::{AgentSetup, Finished, Listener, Program, ScratchDir, ServerSetup};

use super::{CONNECT, NODE, Stack};

const SERVER: &str = "tunnel-server";
const AGENT: &str = "tunnel-agent";

/// Addresses of a server's listeners that no other process has.
const FREE: &str = "--agent-listen 127.0.0.1:0 --http-listen 127.0.0.1:0 --https-listen 127.0.0.1:0 --meta-listen 127.0.0.1:0";

/// The exit code for usage and configuration errors.
const USAGE: i32 = 64;

#[tokio::test]
async fn help_of_each_subcommand_names_its_flags() -> Result<()> {
    for (binary, verb, mentioned) in HELP {
        let words = verb.split_whitespace().chain(["--help"]);
        let help = Program::ours(binary)?.args(words).run().await?.ok()?;
        let words: Vec<_> = mentioned.split_whitespace().collect();
        ensure_contains(&help, &words).context(format!("{binary} {verb}"))?;
    }
    Ok(())
}

#[tokio::test]
async fn usage_mistakes_end_with_64() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let data = scratch.path().join("data").to_string_lossy().into_owned();
    for (binary, words, named) in [
        (SERVER, "run --no-such-flag", "--no-such-flag"),
        (SERVER, "frobnicate", "frobnicate"),
        (SERVER, "run --agent-listen nonsense", "nonsense"),
        (
            SERVER,
            "run --http-listen 0.0.0.0:0",
            "--allow-unauthenticated",
        ),
        (SERVER, "token create", "--node"),
        (SERVER, "token create --node not_a_name!", "not_a_name!"),
        (
            SERVER,
            "token create --node 10.0.0.*",
            "never enrolls a node that is named by its address",
        ),
        (
            SERVER,
            "token create --node cam-1 --label a=b --label a=c",
            "a has two values, \"b\" and \"c\"",
        ),
        (
            AGENT,
            "run --server a:1 --label a=b --label a=c",
            "a has two values, \"b\" and \"c\"",
        ),
        (AGENT, "run --no-such-flag", "--no-such-flag"),
        (AGENT, "run", "--server"),
        (AGENT, "run --server a:1 --transport pigeon", "pigeon"),
        (AGENT, "doctor", "--server"),
        (AGENT, "doctor --explain D99", "no check has this id"),
    ] {
        let mut program = Program::ours(binary)?.args(words.split_whitespace());
        if words != "frobnicate" {
            program = program.args(["--data-dir", &data]);
        }
        let finished = program.run().await?.ensure_failed(USAGE, &[named]);
        finished.context(words)?;
    }
    Ok(())
}

#[tokio::test]
async fn token_without_the_hash_of_the_ca_needs_a_ca_file() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let [server, agent] = ["server", "agent"].map(|name| scratch.path().join(name));
    let created = offline(&server, &["token", "create", "--offline", "--node", NODE]).await?;
    let created = created.ok()?;
    let (unpinned, _hash) = created.trim().rsplit_once('.').context("not a token")?;
    let run = ["run", "--server", "127.0.0.1:1", "--token", unpinned];
    let run = Program::ours(AGENT)?.args(run).arg("--data-dir").arg(agent);
    let finished = run.run().await?;
    finished.ensure_failed(USAGE, &["--ca-file"])?;
    ensure!(!finished.err.contains(unpinned), "{finished}");
    Ok(())
}

#[tokio::test]
async fn all_mistakes_of_a_file_are_reported_at_once() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let server = "agentListen: nowhere\nhttpProxyPorts: \"70000\"\ndrainTimeout: soon\nlimits: {openTimeout: fast}\n";
    let agent =
        "server: [\"cloud:10262\"]\nnodeIp: here\ndrainTimeout: soon\nlimits: {keepAlive: fast}\n";
    let listeners = ["--agent-listen", "--http-proxy-ports"];
    let servers = [&listeners[..], &["--drain-timeout", "limits.openTimeout"]].concat();
    let agents = ["--node-ip", "--drain-timeout", "limits.keepAlive"];
    for (binary, content, mistakes) in [(SERVER, server, &servers[..]), (AGENT, agent, &agents[..])]
    {
        let file = scratch.file("wrong.yaml", content)?;
        for verb in ["check-config", "run"] {
            let finished = with_file(binary, verb, &file).await?;
            finished.ensure_failed(USAGE, mistakes).context(verb)?;
        }
        let misspelt = "drainTimout: 1s\nlogLevel: [info]\n";
        let misspelt = scratch.file("misspelt.yaml", misspelt)?;
        let finished = with_file(binary, "check-config", &misspelt).await?;
        let mistakes = [
            "line 1: unknown key drainTimout; did you mean drainTimeout?",
            "line 2: logLevel: a list where a single value is expected",
        ];
        finished.ensure_failed(USAGE, &mistakes)?;
    }
    Ok(())
}

/// The page has a row for each command, which says where its settings come from, whether it prints
/// JSON, and its exit codes.
#[tokio::test]
async fn table_of_commands_has_each_with_its_settings_and_codes() -> Result<()> {
    let page = std::fs::read_to_string(repository().join("docs/reference/configuration.md"))?;
    let mut commands = Vec::new();
    for mut command in [tunnel_server::cli::command(), tunnel_agent::cli::command()] {
        // Passes the flags of a command on to those below it.
        command.build();
        commands.extend(leaves(&command, ""));
    }
    let is_row = |line: &&str| {
        ["| `tunnel-server ", "| `tunnel-agent "]
            .iter()
            .any(|begin| line.starts_with(begin))
    };
    let rows = page.lines().filter(is_row);
    ensure!(rows.count() == commands.len(), "rows of other commands");
    let scratch = ScratchDir::new()?;
    let nobody = scratch.path().join("nobody");
    for (name, command) in commands {
        let begin = format!("| `{name}` |");
        let row = page.lines().find(|line| line.starts_with(&begin));
        let row = row.with_context(|| format!("no row of {name}"))?;
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let [_, _, settings, json, codes, _] = cells[..] else {
            anyhow::bail!("{row}");
        };
        let has = |id: &str| command.get_arguments().find(|flag| flag.get_id() == id);
        ensure!(has("config").is_some() == (settings != "-"), "{row}");
        let formats = has("output").map(clap::Arg::get_possible_values);
        let has_json =
            formats.is_some_and(|formats| formats.iter().any(|it| it.get_name() == "json"));
        ensure!(has_json == (json == "`-o json`"), "{row}");
        let words = name.split_whitespace();
        let program = |more: &[&str]| -> Result<Program> {
            let binary = if name.starts_with(SERVER) {
                SERVER
            } else {
                AGENT
            };
            Ok(Program::ours(binary)?
                .args(words.clone().skip(1))
                .args(more.iter().copied()))
        };
        let wrong = program(&["--no-such-flag"])?.run().await?;
        wrong
            .ensure_failed(USAGE, &["--no-such-flag"])
            .context(name.clone())?;
        ensure!(codes.ends_with("64"), "{row}");
        // Without a server that runs, what asks one does not end well.
        if ASKS.contains(&&*name) {
            let asked = program(&["--data-dir", &nobody.to_string_lossy()])?;
            let finished = asked.run().await?;
            ensure!(finished.code() == Some(1), "{name}: {finished}");
        }
        program(&["--help"])?.run().await?.ok()?;
    }
    Ok(())
}

/// Each row that says that a command prints JSON is true, and every document has the version of its schema.
#[tokio::test(flavor = "multi_thread")]
async fn each_json_document_has_the_version_of_its_schema() -> Result<()> {
    let mut stack = Stack::start(&[], &[]).await?;
    let opened = |line: &str| Listener::Meta.opened(line);
    let meta = stack.agent.wait_for_line("meta port", CONNECT, opened);
    let meta = meta.await?.to_string();
    let stopped = stack._scratch.path().join("stopped");
    let create = ["token", "create", "--offline", "--node", NODE];
    offline(&stopped, &create).await?.ok()?;
    let [stopped, agent] = [stopped, stack._scratch.path().join("agent")]
        .map(|folder| folder.to_string_lossy().into_owned());
    let agents = stack.server.address(Listener::Agents).to_string();
    let create = ["token", "create", "--node", "worker-4"];
    let token = stack.server.verb(&create)?.run().await?.ok()?;
    let token = token.split('.').next().context("no id")?;
    let replaced = [
        ("SERVER", stack.server.data_dir()),
        ("STOPPED", &stopped),
        ("AGENT", &agent),
        ("META", &meta),
        ("DIAL", &agents),
        ("TOKEN", token),
    ];
    let page = std::fs::read_to_string(repository().join("docs/reference/configuration.md"))?;
    let mut documents = DOCUMENTS.iter();
    for row in page.lines().filter(|line| line.starts_with("| `tunnel-")) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let [_, name, _, json, _, _] = cells[..] else {
            continue;
        };
        if json == "-" {
            continue;
        }
        let name = name.trim_matches('`');
        let (of, arguments, is_good) = documents.next().with_context(|| row.to_owned())?;
        ensure!(name == *of, "{row}");
        let mut words = format!("{name} {arguments}");
        for (placeholder, value) in replaced {
            words = words.replace(placeholder, value);
        }
        let mut words = words.split_whitespace();
        let binary = words.next().context("no program")?;
        let finished = Program::ours(binary)?.args(words).run().await?;
        let document: serde_json::Value =
            serde_json::from_str(&finished.out).with_context(|| finished.to_string())?;
        ensure!(document["schemaVersion"] == 1, "{name}: {document:#}");
        ensure!(!is_good || finished.code() == Some(0), "{name}: {finished}");
    }
    ensure!(documents.next().is_none(), "a command without a row");
    Ok(())
}

/// Commands that print JSON, in the order of the page, with their arguments, and whether they end with 0.
const DOCUMENTS: &[(&str, &str, bool)] = &[
    ("tunnel-server reload", "-o json --data-dir SERVER", true),
    (
        "tunnel-server token create",
        "-o json --node worker-2 --data-dir SERVER",
        true,
    ),
    (
        "tunnel-server token list",
        "-o json --data-dir SERVER",
        true,
    ),
    (
        "tunnel-server token revoke",
        "TOKEN -o json --data-dir SERVER",
        true,
    ),
    ("tunnel-server nodes", "-o json --data-dir SERVER", true),
    (
        "tunnel-server nodes revoke",
        "worker-3 -o json --data-dir SERVER",
        true,
    ),
    (
        "tunnel-server nodes unrevoke",
        "worker-3 -o json --data-dir SERVER",
        true,
    ),
    (
        "tunnel-server nodes reissue",
        "worker-3 -o json --data-dir SERVER",
        true,
    ),
    (
        "tunnel-server nodes approve",
        "worker-3 -o json --data-dir SERVER",
        false,
    ),
    (
        "tunnel-server nodes revocations",
        "-o json --data-dir SERVER",
        true,
    ),
    (
        "tunnel-server nodes forget",
        "worker-2 -o json --data-dir SERVER",
        true,
    ),
    (
        "tunnel-server ca rotate",
        "--status -o json --data-dir SERVER",
        true,
    ),
    ("tunnel-server data dump", "--data-dir STOPPED", true),
    (
        "tunnel-server ping",
        "worker-1 -o json --data-dir SERVER",
        true,
    ),
    ("tunnel-server diag", "-f - --data-dir SERVER", true),
    (
        "tunnel-server doctor",
        "-o json --kubernetes off --data-dir SERVER",
        false,
    ),
    (
        "tunnel-server policy test",
        "-o json --listener http --port 9100 --path /metrics",
        false,
    ),
    ("tunnel-agent reload", "-o json --data-dir AGENT", true),
    ("tunnel-agent status", "-o json --meta-listen META", true),
    (
        "tunnel-agent diag",
        "-f - --data-dir AGENT --meta-listen META",
        true,
    ),
    (
        "tunnel-agent doctor",
        "-o json --server DIAL --node-name worker-1 --data-dir AGENT --meta-listen META",
        false,
    ),
];

/// Commands that ask a running process, and need no more arguments.
const ASKS: &[&str] = &[
    "tunnel-server reload",
    "tunnel-agent reload",
    "tunnel-server token list",
    "tunnel-server nodes",
    "tunnel-server nodes revocations",
    "tunnel-server ca",
    "tunnel-server ca rotate",
];

/// Returns each command that can be run, with its whole name.
fn leaves(command: &clap::Command, above: &str) -> Vec<(String, clap::Command)> {
    let name = format!("{above} {}", command.get_name()).trim().to_owned();
    let inner = command
        .get_subcommands()
        .filter(|inner| inner.get_name() != "help");
    let mut found: Vec<_> = inner.flat_map(|inner| leaves(inner, &name)).collect();
    if found.is_empty() || !command.is_subcommand_required_set() && !above.is_empty() {
        found.push((name, command.clone()));
    }
    found
}

/// What may become right by itself ends a process with 1, so that its supervisor starts it again.
#[tokio::test]
async fn what_a_later_start_may_find_ends_with_1() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let data = scratch.path().join("data").to_string_lossy().into_owned();
    let taken = std::net::TcpListener::bind("127.0.0.1:0")?;
    let taken = taken.local_addr()?.to_string();
    let free = FREE.replace("--https-listen 127.0.0.1:0", "");
    let https = format!("--kubernetes off {free} --https-listen {taken}");
    for (binary, words, named) in [
        (SERVER, "--config /no/file.yaml", "/no/file.yaml"),
        (SERVER, "--kubeconfig /no/file", "/no/file"),
        (SERVER, &*https, "--https-listen"),
        (AGENT, "--config /no/file.yaml", "/no/file.yaml"),
        (AGENT, "--server a:1 --meta-listen off", "no certificate"),
        (
            AGENT,
            "--server a:1 --meta-listen off --token-file /no/file",
            "/no/file",
        ),
        (
            AGENT,
            "--server a:1 --meta-listen off --ca-file /no/file",
            "--ca-file",
        ),
    ] {
        for verb in ["check-config", "run"] {
            let program = Program::ours(binary)?
                .arg(verb)
                .args(words.split_whitespace());
            let finished = program.args(["--data-dir", &data]).run().await?;
            let failed = finished.ensure_failed(1, &[named]);
            failed.with_context(|| format!("{binary} {verb} {words}"))?;
        }
    }
    Ok(())
}

/// What `run` refuses, `check-config` finds before a restart, with the same text and code.
#[tokio::test]
async fn check_config_reads_the_files_of_the_settings_as_run_does() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let data = scratch.path().join("data").to_string_lossy().into_owned();
    let file = |name: &str, content: &str| -> Result<String> {
        Ok(scratch.file(name, content)?.to_string_lossy().into_owned())
    };
    let text = file("text.pem", "no certificate\n")?;
    let passwords = file("passwords", "prometheus:0123456789abcdefgh \n")?;
    let absent = scratch.path().join("absent");
    let absent = absent.to_string_lossy().into_owned();
    let with_files = |certificate: &str, passwords: &str| {
        let files = ["--https-cert-file", certificate, "--https-key-file"];
        let listener = ["--connect-listen", "127.0.0.1:0", "--connect-auth"];
        let words = [&files[..], &[certificate], &listener, &[passwords]].concat();
        words.into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    let of_settings = ["--https-cert-file", "--connect-auth"];
    for (words, code, named) in [
        (with_files(&text, &passwords), USAGE, "2 error(s)"),
        (
            with_files(&absent, &passwords),
            USAGE,
            "at this moment, 1 error(s)",
        ),
        (
            with_files(&absent, &absent),
            1,
            "at this moment, 2 error(s)",
        ),
    ] {
        for verb in ["check-config", "run"] {
            let program = Program::ours(SERVER)?.args([verb, "--kubernetes", "off"]);
            let program = program.args(["--data-dir", &data]).args(&words);
            let program = program.args(FREE.split_whitespace());
            let finished = program.run().await?;
            let named = [&of_settings[..], &[named]].concat();
            finished.ensure_failed(code, &named).context(verb)?;
        }
        let program = Program::ours(SERVER)?.args(["check-config", "--settings-only"]);
        program.args(&words).run().await?.ok()?;
    }
    Ok(())
}

#[tokio::test]
async fn check_config_of_the_agent_accepts_a_good_file() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let content = "server: [\"cloud:10262\"]\nnodeName: worker-1\nlimits: {keepAlive: 3s}\n";
    let file = scratch.file("good.yaml", content)?;
    let check = Program::ours(AGENT)?.args(["check-config", "--settings-only", "--config"]);
    check.arg(file).run().await?.ok()?;
    Ok(())
}

/// The server runs without that port, and tries again.
#[tokio::test]
async fn check_config_warns_of_a_proxy_port_that_another_program_has() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let busy = std::net::TcpListener::bind("127.0.0.1:0")?;
    let port = busy.local_addr()?.port().to_string();
    let check = Program::ours(SERVER)?.args(["check-config", "--kubernetes", "off"]);
    let check = check.args(FREE.split_whitespace());
    let check = check.args(["--http-proxy-ports", &port]);
    let check = check.args(["--proxy-port-listen", "127.0.0.1"]);
    let checked = check.arg("--data-dir").arg(scratch.path()).run().await?;
    ensure!(checked.code() == Some(0), "{checked}");
    let warning = format!("warning: cannot listen on 127.0.0.1:{port}");
    let advice = "set --proxy-port-listen off";
    ensure_contains(&checked.err, &[&warning, "in use", advice])
}

#[tokio::test]
async fn variable_of_the_environment_loses_against_the_flag() -> Result<()> {
    let check = |variable: &str, value: &str| -> Result<Program> {
        let program = Program::ours(SERVER)?.args(["check-config", "--settings-only"]);
        Ok(program.env(&format!("TUNNEL_SERVER_{variable}"), value))
    };
    let wrong = check("DRAIN_TIMEOUT", "soon")?;
    let failed = wrong.clone().run().await?;
    failed.ensure_failed(USAGE, &["--drain-timeout"])?;
    wrong.args(["--drain-timeout", "1s"]).run().await?.ok()?;
    let foreign = check("PORT", "tcp://10.0.0.1:80")?;
    foreign.run().await?.ok()?;
    let old_flag = Program::ours(SERVER)?.args(["check-config", "--borrow-allowed-callers", "a"]);
    let hint = "--delegation-allowed-callers: has no effect";
    ensure_contains(&old_flag.run().await?.err, &[hint])
}

#[tokio::test]
async fn version_and_completion_are_printed() -> Result<()> {
    for binary in [SERVER, AGENT] {
        let version = Program::ours(binary)?.arg("version").run().await?.ok()?;
        ensure!(version.contains(env!("CARGO_PKG_VERSION")), "{version}");
        for (shell, check) in [("bash", Some("bash")), ("zsh", None), ("fish", None)] {
            let script = Program::ours(binary)?.args(["completion", shell]);
            let script = script.run().await?.ok()?;
            ensure_contains(&script, &[binary, "check-config"]).context(shell)?;
            if let Some(shell) = check {
                let scratch = ScratchDir::new()?;
                let file = scratch.file("completion", &script)?;
                let shell = Program::at(Path::new(shell)).arg("-n").arg(file);
                shell.run().await?.ok()?;
            }
        }
    }
    Ok(())
}

#[tokio::test]
async fn reader_that_closes_the_pipe_is_no_error() -> Result<()> {
    for binary in [SERVER, AGENT] {
        let script = Program::ours(binary)?.args(["completion", "bash"]);
        let piped = ["bash", "-c", "set -o pipefail; \"$0\" \"$@\" | head -c 1"];
        let finished = script.through(piped).run().await?;
        ensure!(finished.code() == Some(0), "{finished}");
        ensure!(finished.err.is_empty(), "{finished}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn healthcheck_asks_the_own_meta_port() -> Result<()> {
    let mut stack = Stack::start(&[], &[]).await?;
    let server_meta = stack.server.address(Listener::Meta).to_string();
    let opened = |line: &str| Listener::Meta.opened(line);
    let agent_meta = stack.agent.wait_for_line("meta port", CONNECT, opened);
    let agent_meta = agent_meta.await?.to_string();
    for (binary, meta) in [(SERVER, &server_meta), (AGENT, &agent_meta)] {
        healthcheck(binary, meta).await?.ok()?;
    }
    let Stack { agent, server, .. } = stack;
    agent.kill().await?;
    server.into_process().kill().await?;
    for (binary, meta) in [(SERVER, &server_meta), (AGENT, &agent_meta)] {
        healthcheck(binary, meta).await?.ensure_failed(1, &[])?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_and_ca_are_the_same_with_and_without_a_running_server() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let data = scratch.path().join("server");
    let create = ["token", "create", "--node", NODE, "--ip", "192.168.33.221"];
    let refused = offline(&data, &create).await?;
    refused.ensure_failed(1, &["no tunnel-server runs with", "--offline"])?;
    ensure!(!data.exists(), "a refused verb made the data directory");
    let without = offline(&data, &[&create[..], &["--offline"]].concat()).await?;
    ensure!(without.code() == Some(0), "{without}");
    let id = token_id(&without)?;
    let ca = offline(&data, &["ca"]).await?.ok()?;
    ensure!(ca.contains("BEGIN CERTIFICATE"), "{ca}");
    let file = std::fs::read_to_string(data.join("ca.crt"))?;
    ensure!(file.trim() == ca.trim(), "ca.crt differs");

    let server = ServerSetup::on_loopback(&data).start().await?;
    let running = server.verb(&["ca"])?.run().await?.ok()?;
    ensure!(running == ca, "a running server has another CA");
    let create = ["token", "create", "--node", "worker-2", "--ttl", "10m"];
    let with = server.verb(&create)?.run().await?;
    ensure_contains(&with.err, &["tunnel-agent join", "--server"])?;
    let other = token_id(&with)?;
    let listed = server.verb(&["token", "list"])?.run().await?.ok()?;
    ensure_contains(&listed, &[&id, &other])?;
    let has_secret = listed.contains(with.out.trim());
    ensure!(!has_secret, "the list shows the secret: {listed}");
    server.verb(&["token", "revoke", &id])?.run().await?.ok()?;
    let listed = server.verb(&["token", "list"])?.run().await?.ok()?;
    for (id, state) in [(&id, "revoked"), (&other, "active")] {
        let row = listed.lines().find(|row| row.contains(id));
        let is_right = row.is_some_and(|row| row.contains(state));
        ensure!(is_right, "{id} is not {state}: {listed}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn node_that_is_away_is_listed_with_the_time_and_the_reason() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let server = ServerSetup::on_loopback(&scratch.path().join("server"));
    let server = server.start().await?;
    let agent_dir = scratch.path().join("agent");
    let agent = server.agent_setup(NODE, &agent_dir).await?.start()?;
    server.wait_until_connected(&[NODE]).await;
    let series = format!("tunnel_server_node_connected{{node=\"{NODE}\"}}");
    ensure!(server.metric(&series).await? == 1);
    let away = server.verb(&["nodes", "--away", "-o", "name"])?;
    ensure!(away.run().await?.ok()?.is_empty());
    let mut watch = server.verb(&["nodes", "--watch"])?.start()?;
    let shown = |state: &'static str| {
        move |line: &str| {
            let mut cells = line.split_whitespace();
            (cells.next() == Some(NODE) && cells.next() == Some(state)).then_some(())
        }
    };
    watch.wait_for_line("node", CONNECT, shown("live")).await?;

    agent.stop(CONNECT).await?;
    watch
        .wait_for_line("change", CONNECT, shown("away"))
        .await?;
    let listed = server.nodes().await?;
    let node = listed.first().context("no node")?;
    ensure!(node["lastSeen"].is_string(), "{node}");
    ensure!(node["enrollment"] == "joinToken", "{node}");
    for field in ["at", "by", "code", "reason"] {
        ensure!(node["lastClose"][field].is_string(), "{field}: {node}");
    }
    ensure!(server.metric(&series).await? == 0);
    let wide = server.verb(&["nodes", NODE, "-o", "wide"])?.run().await?;
    ensure_contains(&wide.ok()?, &["REASON", "total: 1; connected: 0"])?;
    let unknown = server.verb(&["nodes", "worker-99"])?.run().await?;
    unknown.ensure_failed(1, &["no node has the name worker-99"])
}

#[tokio::test(flavor = "multi_thread")]
async fn labels_of_the_token_and_of_the_agent_select_a_node_and_the_token_takes_precedence()
-> Result<()> {
    let scratch = ScratchDir::new()?;
    let server = ServerSetup::on_loopback(&scratch.path().join("server"));
    let server = server.start().await?;
    let create = ["token", "create", "--node", NODE, "--label", "site=north"];
    let token = server.verb(&create)?.run().await?.ok()?;
    let agents = server.address(Listener::Agents);
    let agent = AgentSetup::on_loopback(NODE, agents, &scratch.path().join("agent"))
        .args(&["--token", token.trim(), "--label", "disk=ssd"])
        .args(&["--label", "site=south"]);
    let _agent = agent.start()?;
    server.wait_until_connected(&[NODE]).await;
    let named = format!("{NODE}\n");
    for (selector, expected) in [
        ("disk=ssd", &*named),
        ("site=north", &named),
        ("site=south", ""),
    ] {
        let selected = server.verb(&["nodes", "-l", selector, "-o", "name"])?;
        let selected = selected.run().await?.ok()?;
        ensure!(selected == expected, "{selector}: {selected:?}");
    }
    let unknown = server.verb(&["nodes", "-l", "color=red"])?.run().await?;
    unknown.ensure_failed(USAGE, &["color", "disk, site"])?;
    let wide = server.verb(&["nodes", "-o", "wide"])?.run().await?.ok()?;
    ensure_contains(&wide, &["LABELS", "disk=ssd,site=north"])
}

#[tokio::test(flavor = "multi_thread")]
async fn files_of_the_server_are_for_its_user_alone() -> Result<()> {
    use std::os::unix::fs::{FileTypeExt, PermissionsExt};

    let scratch = ScratchDir::new()?;
    let data = scratch.path().join("server");
    let _server = ServerSetup::on_loopback(&data).start().await?;
    let socket = std::fs::metadata(data.join("admin.sock"))?;
    ensure!(socket.file_type().is_socket() && socket.permissions().mode() & 0o777 == 0o600);
    for entry in std::fs::read_dir(&data)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let mode = entry.metadata()?.permissions().mode();
        let is_open = mode & 0o077 != 0 && name != "ca.crt";
        ensure!(!is_open, "{name} has mode {mode:o}");
    }
    Ok(())
}

async fn with_file(binary: &str, verb: &str, file: &Path) -> Result<Finished> {
    let program = Program::ours(binary)?.args([verb, "--config"]);
    program.arg(file).run().await
}

async fn healthcheck(binary: &str, meta: &str) -> Result<Finished> {
    let check = ["healthcheck", "--meta-listen", meta];
    Program::ours(binary)?.args(check).run().await
}

async fn offline(data: &Path, words: &[&str]) -> Result<Finished> {
    let program = Program::ours(SERVER)?.args(words).arg("--data-dir");
    program.arg(data).run().await
}

/// Returns the id of the token that `token create` printed. The token is the only line on standard
/// output and has the form `ID.SECRET.CAHASH`.
fn token_id(created: &Finished) -> Result<String> {
    let token = created.out.trim();
    let parts: Vec<&str> = token.split('.').collect();
    let is_whole = parts.iter().all(|part| !part.is_empty());
    ensure!(parts.len() == 3 && is_whole, "not a token: {created}");
    ensure!(created.out.lines().count() == 1, "more: {created}");
    Ok((*parts.first().context("no id")?).to_owned())
}

/// Binary, subcommand, and words that its help must contain.
const HELP: &[(&str, &str, &str)] = &[
    (SERVER, "reload", "--end-running --output --data-dir"),
    (
        SERVER,
        "policy test",
        "--listener --caller --destination --node --label --edge --port",
    ),
    (
        SERVER,
        "",
        "run check-config reload token nodes ca connect healthcheck diag doctor render completion version",
    ),
    (
        SERVER,
        "run",
        "--config --data-dir --agent-listen --https-listen --http-listen --meta-listen --status-listen \
         --allow-unauthenticated --advertise --http-proxy-ports --https-proxy-ports --localhost-proxy-ports \
         --proxy-port-listen --https-cert-file --https-key-file --https-client-auth --client-ca --kubernetes --drain-timeout --log-level --log-format",
    ),
    (SERVER, "check-config", "--config"),
    (SERVER, "token", "create list revoke"),
    (
        SERVER,
        "token create",
        "--node --uses --approve --ttl --ip --label --offline --output",
    ),
    (SERVER, "token list", "--data-dir"),
    (SERVER, "token revoke", "--data-dir"),
    (
        SERVER,
        "nodes",
        "--output table wide json name ssh-config ansible --away --watch revoke unrevoke reissue approve revocations forget",
    ),
    (SERVER, "nodes forget", "--data-dir"),
    (
        SERVER,
        "ca",
        "--data-dir --offline export import rotate client",
    ),
    (
        SERVER,
        "ca rotate",
        "--status --next --abort --force --output",
    ),
    (SERVER, "ca client", "NAME --days --dir"),
    (
        SERVER,
        "connect",
        "--server --cert-file --key-file --ca-file --uds --data-dir",
    ),
    (SERVER, "healthcheck", "--meta-listen"),
    (SERVER, "diag", "--file --config --data-dir"),
    (
        SERVER,
        "render",
        "egress-selector apiserver coredns prometheus agent",
    ),
    (SERVER, "render coredns", "--file --force --check"),
    (
        SERVER,
        "doctor",
        "--output --node --only --explain --wait --timeout --kubeconfig --data-dir",
    ),
    (SERVER, "completion", "bash"),
    (
        AGENT,
        "run",
        "--config --server --node-name --node-ip --label --token --token-file --ca-file --data-dir --transport --localhost-ports \
         --deny-ports --allow-targets --cloud-listen --meta-listen --drain-timeout --log-level --log-format",
    ),
    (
        AGENT,
        "",
        "run check-config join reload healthcheck status diag doctor address completion version",
    ),
    (
        AGENT,
        "join",
        "--server --node-name --token-file --root --no-start --dry-run --yes",
    ),
    (
        AGENT,
        "reload",
        "--output --config --data-dir --meta-socket",
    ),
    (AGENT, "diag", "--file --config --data-dir"),
    (AGENT, "address", "add remove"),
    (AGENT, "address add", "ADDR --interface"),
    (AGENT, "check-config", "--config"),
    (AGENT, "healthcheck", "--meta-listen"),
    (AGENT, "completion", "bash"),
    (AGENT, "version", "--help"),
];
