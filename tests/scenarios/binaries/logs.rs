//! F37: a log that is not read or cannot be written blocks neither binary. Requests go on, dropped
//! lines are counted, and SIGTERM ends the process.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tunnel_tests::checks::ensure_status;
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::metrics::{meta_page, metric};
use tunnel_tests::process::{Listener, Process, Program, Signal, Terminal};

use super::{CONNECT, Stack};

const CALLERS: usize = 20;
const REQUESTS: usize = 10_000;
/// Time limit of one request, for a machine without other load.
const ANSWER: Duration = Duration::from_secs(10);
const STOP: Duration = Duration::from_secs(5);
/// Control characters that stop and restart the output of a terminal (termios(3), IXON).
const XOFF: u8 = 0x13;
const XON: u8 = 0x11;

/// The output of a process's log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Output {
    UnreadPipe,
    StoppedTerminal,
    FullDisk,
}

impl Output {
    /// Opens the output. Returns the end for the process, and the other end if there is one.
    fn open(self) -> Result<(Stdio, Option<File>)> {
        match self {
            Self::UnreadPipe => {
                let (reader, writer) = std::io::pipe()?;
                Ok((writer.into(), Some(OwnedFd::from(reader).into())))
            }
            Self::StoppedTerminal => {
                let (mut person, terminal) = Terminal::open()?;
                person.write(&[XOFF])?;
                Ok((terminal.into(), Some(person.into_file())))
            }
            Self::FullDisk => {
                let full = File::options().write(true).open("/dev/full")?;
                Ok((full.into(), None))
            }
        }
    }
}

/// A running binary and its log.
struct Logged {
    process: Process,
    /// `server` or `agent`.
    name: &'static str,
    meta: SocketAddr,
    unread: Option<File>,
    lines: Arc<Mutex<Vec<Value>>>,
}

impl Logged {
    fn start(
        name: &'static str,
        words: &[String],
        meta: SocketAddr,
        output: Output,
    ) -> Result<Self> {
        let (stderr, unread) = output.open()?;
        let run = Program::ours(&format!("tunnel-{name}"))?;
        let run = run.args(["run", "--log-format", "json"]).args(words);
        Ok(Self {
            process: run.start_logging_to(stderr)?,
            name,
            meta,
            unread,
            lines: Arc::default(),
        })
    }

    /// Starts to read the log, and reads until the process has ended.
    fn read_log(&mut self) {
        let Some(mut unread) = self.unread.take() else {
            return;
        };
        // The write fails for a pipe, which has one direction.
        let _no_terminal = unread.write_all(&[XON]);
        let lines = self.lines.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(unread).lines().map_while(Result::ok) {
                let line = serde_json::from_str(&line).unwrap_or(Value::String(line));
                lock(&lines).push(line);
            }
        });
    }

    async fn is_alive(&self) -> Result<()> {
        let page = meta_page(self.meta, "/livez");
        let page = timeout(scaled(Duration::from_secs(1)), page).await;
        page.context("/livez gives no answer")??;
        Ok(())
    }

    async fn counted(&self, series: &str) -> Result<u64> {
        metric(self.meta, &format!("tunnel_{}_{series}", self.name)).await
    }

    /// Checks that each stream has an access line that was either read or counted as dropped, and
    /// that the log reports the number of dropped lines.
    async fn has_right_count(&self) -> Result<()> {
        let streams = self.counted("streams_total").await?;
        let access = "log_lines_dropped_total{kind=\"access\"}";
        let other = "log_lines_dropped_total{kind=\"other\"}";
        let (access, other) = (self.counted(access).await?, self.counted(other).await?);
        ensure!(streams >= REQUESTS as u64, "{streams} streams");
        ensure!(access > 0, "no line was dropped");
        let (mut read, mut reported) = (0, 0);
        let lines = lock(&self.lines);
        for line in lines.iter() {
            let message = line["message"].as_str().unwrap_or_default();
            read += u64::from(message == "access");
            if message.starts_with("log lines were lost") {
                reported += line["lines"].as_u64().context("no number of lines")?;
            }
        }
        let dropped = format!("{}: {access} and {other} dropped", self.name);
        ensure!(
            read + access == streams,
            "{dropped}, {read} of {streams} read"
        );
        let is_reported = lines.is_empty() || reported == access + other;
        ensure!(is_reported, "{dropped}, the log reports {reported}");
        Ok(())
    }

    async fn ends(mut self) -> Result<()> {
        self.process.signal(Signal::Term)?;
        let ended = self.process.end(STOP).await?;
        ensure!(ended.success(), "{}: {ended}", self.name);
        Ok(())
    }
}

fn lock(lines: &Mutex<Vec<Value>>) -> MutexGuard<'_, Vec<Value>> {
    lines.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn ask_often(endpoint: SocketAddr, get: &RawRequest) -> Result<()> {
    let mut asking = JoinSet::new();
    for _ in 0..CALLERS {
        let get = get.clone();
        asking.spawn(async move {
            for _ in 0..REQUESTS / CALLERS {
                let reply = timeout(scaled(ANSWER), request(endpoint, &get)).await;
                ensure_status(&reply.context("no answer")??, 200)?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(asked) = asking.join_next().await {
        asked??;
    }
    Ok(())
}

/// Runs both binaries with `output` as their log and sends requests. At the end the test reads the
/// log of the binary `read_in_the_end`, or of both if the disk is full. The other log is never
/// read.
async fn requests_go_on(output: Output, read_in_the_end: &str) -> Result<()> {
    // A first run determines the ports.
    let mut stack = Stack::start(&[], &[]).await?;
    let opened = |line: &str| Listener::Meta.opened(line);
    let agent_meta = stack.agent.wait_for_line("meta port", CONNECT, opened);
    let agent_meta = agent_meta.await?;
    let (endpoint, meta) = (stack.http(), stack.server.address(Listener::Meta));
    let setup = stack.server.setup_for_restart();
    for process in [&mut stack.agent, stack.server.process()] {
        process.signal(Signal::Term)?;
        process.end(STOP).await?;
    }
    let agent_setup = stack.agent_setup.arguments().iter();
    let agent_setup: Vec<String> = agent_setup
        .map(|word| word.replace("127.0.0.1:0", &agent_meta.to_string()))
        .collect();
    let server = Logged::start("server", setup.arguments(), meta, output)?;
    let agent = Logged::start("agent", &agent_setup, agent_meta, output)?;
    let get = stack.get("/metrics");
    eventually("first traffic", CONNECT, async || {
        let reply = timeout(scaled(super::ATTEMPT), request(endpoint, &get)).await;
        ensure!(reply.context("no answer")??.status == 200);
        anyhow::Ok(())
    })
    .await;

    ask_often(endpoint, &get).await?;
    server.is_alive().await?;
    agent.is_alive().await?;
    for mut end in [agent, server] {
        if output == Output::FullDisk || end.name == read_in_the_end {
            end.read_log();
            let what = format!("the right count of the {}", end.name);
            eventually(&what, CONNECT, async || end.has_right_count().await).await;
        }
        end.ends().await?;
    }
    Ok(())
}

tests_of! {
    fn f37_requests_go_on_while_the_log_is_not_read() =
        requests_go_on(Output::UnreadPipe, "server");
    fn f37_requests_go_on_while_the_terminal_of_the_log_is_stopped() =
        requests_go_on(Output::StoppedTerminal, "agent");
    fn f37_requests_go_on_while_the_disk_of_the_log_is_full() =
        requests_go_on(Output::FullDisk, "");
}
