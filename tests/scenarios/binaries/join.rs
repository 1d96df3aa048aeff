//! The verb `join` of the agent: the files that it writes below a directory, and what it refuses.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::task::spawn_blocking;
use tunnel_tests::checks::ensure_contains;
use tunnel_tests::process::{Finished, Program, ScratchDir};

use super::NODE;

const SERVER: &str = "cloud.example.com:10262";
const END: Duration = Duration::from_secs(5);
const FILES: [(&str, u32); 3] = [
    ("etc/culvert/tunnel-agent.yaml", 0o644),
    ("etc/culvert/tunnel-agent.token", 0o600),
    ("etc/systemd/system/tunnel-agent.service", 0o644),
];

#[tokio::test]
async fn host_joins_with_the_printed_token_and_the_next_run_changes_nothing() -> Result<()> {
    let host = Host::new()?;
    let token = host.create_token().await?;
    let dry = host.join(&token, &["--dry-run"]).await?.ok()?;
    ensure_contains(&dry, &["would write /etc/culvert/tunnel-agent.yaml"])?;
    ensure!(!host.root.exists(), "a dry run writes: {dry}");

    let joined = host.join(&token, &[]).await?;
    ensure!(joined.code() == Some(0), "{joined}");
    ensure!(!joined.to_string().contains(token.trim()), "prints it");
    let written = host.contents()?;
    for ((path, mode), content) in FILES.iter().zip(&written) {
        let file = host.root.join(path);
        let actual = std::fs::metadata(&file)?.permissions().mode() & 0o777;
        ensure!(actual == *mode, "{path} has mode {actual:o}");
        ensure!(!content.is_empty(), "{path} is empty");
    }
    ensure_contains(&written[0], &[SERVER, NODE])?;
    ensure!(written[1] == token.trim(), "another token");
    ensure_contains(&written[2], &["ExecStart=/usr/local/bin/tunnel-agent run"])?;
    let check =
        Program::ours("tunnel-agent")?.args(["check-config", "--settings-only", "--config"]);
    let config = host.root.join(FILES[0].0);
    check.arg(config).run().await?.ok()?;

    let again = host.join(&token, &[]).await?.ok()?;
    ensure_contains(&again, &["nothing to change"])?;
    ensure!(host.contents()? == written, "the second run writes");
    Ok(())
}

#[tokio::test]
async fn other_values_need_consent_and_a_bad_token_writes_nothing() -> Result<()> {
    let host = Host::new()?;
    let token = host.create_token().await?;
    let (unpinned, _hash) = token.trim().rsplit_once('.').context("not a token")?;
    for (text, reason) in [
        ("", "is empty"),
        ("hello", "not a join token"),
        (unpinned, "CA"),
    ] {
        let refused = host.join(text, &[]).await?;
        refused.ensure_failed(64, &[reason])?;
        ensure!(!host.root.exists(), "writes: {refused}");
    }

    host.join(&token, &[]).await?.ok()?;
    let written = host.contents()?;
    let another = host.create_token().await?;
    let refused = host.join(&another, &[]).await?;
    refused.ensure_failed(1, &["nothing is changed", "tunnel-agent.token", "--yes"])?;
    ensure!(host.contents()? == written, "a refused run writes");
    host.join(&another, &["--yes"]).await?.ok()?;
    ensure!(host.contents()?[1] == another.trim(), "the old token");
    Ok(())
}

#[tokio::test]
async fn token_typed_in_a_terminal_is_not_shown_and_the_terminal_is_restored() -> Result<()> {
    let host = Host::new()?;
    let token = host.create_token().await?;
    let (half, _rest) = token.split_once('.').context("not a token")?;
    for (typed, code) in [(format!("{half}\u{3}"), 1), (token.clone(), 0)] {
        let join = host.program(&["--token-file", "-"])?;
        let (mut process, mut terminal) = join.start_in_terminal()?;
        let read = spawn_blocking(move || terminal.read_until("join token: ").map(|()| terminal));
        let mut terminal = read.await??;
        ensure!(terminal.modes()? == (false, false), "shown");
        terminal.write(typed.as_bytes())?;
        let status = process.end(END).await?;
        ensure!(terminal.modes()? == (true, true), "not restored");
        let shown = spawn_blocking(|| terminal.read_rest()).await??;
        ensure!(!shown.contains(half), "{shown}");
        ensure!(status.code() == Some(code), "{status}: {shown}");
        ensure!(host.root.exists() == (code == 0), "{shown}");
    }
    ensure!(host.contents()?[1] == token.trim(), "another token");
    Ok(())
}

/// A host below a directory, and the data directory of a server that does not run.
struct Host {
    scratch: ScratchDir,
    root: PathBuf,
}

impl Host {
    fn new() -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let root = scratch.path().join("root");
        Ok(Self { scratch, root })
    }

    /// Returns the line that `token create` prints.
    async fn create_token(&self) -> Result<String> {
        let create = ["token", "create", "--offline", "--node", NODE, "--data-dir"];
        let create = Program::ours("tunnel-server")?.args(create);
        create
            .arg(self.scratch.path().join("server"))
            .run()
            .await?
            .ok()
    }

    /// Runs the verb with a token on standard input.
    async fn join(&self, token: &str, words: &[&str]) -> Result<Finished> {
        self.program(words)?.run_with(token.as_bytes()).await
    }

    fn program(&self, words: &[&str]) -> Result<Program> {
        let join = [
            "join",
            "--server",
            SERVER,
            "--node-name",
            NODE,
            "--no-start",
        ];
        let join = Program::ours("tunnel-agent")?.args(join).args(words);
        Ok(join.arg("--root").arg(&self.root))
    }

    fn contents(&self) -> Result<Vec<String>> {
        let read = |(path, _mode): &(&str, u32)| {
            let file = self.root.join(path);
            std::fs::read_to_string(&file).with_context(|| file.display().to_string())
        };
        FILES.iter().map(read).collect()
    }
}
