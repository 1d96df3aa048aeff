//! F37: a log that is not read or cannot be written blocks neither binary. Requests go on, dropped
//! lines are counted, and SIGTERM ends the process.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use serde_json::Value;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::process::{Listener, Process, Program, Signal};

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
                let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY;
                let person = openpt(flags)?;
                unlockpt(&person)?;
                let terminal = ioctl_tiocgptpeer(&person, flags)?;
                let mut person = File::from(person);
                person.write_all(&[XOFF])?;
                Ok((terminal.into(), Some(person)))
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
    name: &'static str,
    meta: SocketAddr,
    unread: Option<File>,
    lines: Arc<Mutex<Vec<Value>>>,
}

impl Logged {
    fn start(binary: &str, words: &[String], meta: SocketAddr, output: Output) -> Result<Self> {
        let (stderr, unread) = output.open()?;
        let run = Program::ours(binary)?.args(["run", "--log-format", "json"]);
        Ok(Self {
            process: run.args(words).start_logging_to(stderr)?,
            name: if binary == "tunnel-server" {
                "server"
            } else {
                "agent"
            },
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
                lines
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(line);
            }
        });
    }

    async fn is_alive(&self) -> Result<()> {
        let livez = RawRequest::get("meta", "/livez");
        let reply = timeout(scaled(Duration::from_secs(1)), request(self.meta, &livez)).await;
        ensure!(reply.context("/livez gives no answer")??.status == 200);
        Ok(())
    }

    /// Returns the sum of all series whose names begin with `series`.
    async fn counted(&self, series: &str) -> Result<u64> {
        let shown = request(self.meta, &RawRequest::get("meta", "/metrics")).await?;
        let series = format!("tunnel_{}_{series}", self.name);
        let shown = shown.text();
        let values = shown.lines().filter(|line| line.starts_with(&series));
        let values = values.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok());
        Ok(values.sum())
    }

    /// Checks that each stream has an access line that was either read or counted as dropped, and
    /// that the log reports the number of dropped lines.
    async fn has_right_count(&self) -> Result<()> {
        let streams = self.counted("streams_total{").await?;
        let access = self
            .counted("log_lines_dropped_total{kind=\"access\"}")
            .await?;
        let other = self
            .counted("log_lines_dropped_total{kind=\"other\"}")
            .await?;
        ensure!(streams >= REQUESTS as u64, "{streams} streams");
        ensure!(access > 0, "no line was dropped");
        let (mut read, mut reported) = (0, 0);
        for line in self
            .lines
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .iter()
        {
            let message = line["message"].as_str().unwrap_or_default();
            read += u64::from(message == "access");
            if message.starts_with("log lines were lost") {
                reported += line["lines"].as_u64().context("no number of lines")?;
            }
        }
        ensure!(
            read + access == streams,
            "{}: {read} lines read and {access} dropped of {streams}",
            self.name
        );
        ensure!(
            self.lines
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .is_empty()
                || reported == access + other,
            "{}: the log reports {reported} lost lines of {access} and {other}",
            self.name
        );
        Ok(())
    }

    async fn ends(mut self) -> Result<()> {
        self.process.signal(Signal::Term)?;
        let ended = self.process.end(STOP).await?;
        ensure!(ended.success(), "{}: {ended}", self.name);
        Ok(())
    }
}

async fn ask_often(endpoint: SocketAddr, get: &RawRequest) -> Result<()> {
    let mut asking = JoinSet::new();
    for _ in 0..CALLERS {
        let get = get.clone();
        asking.spawn(async move {
            for _ in 0..REQUESTS / CALLERS {
                let reply = timeout(scaled(ANSWER), request(endpoint, &get)).await;
                let reply = reply.context("no answer")??;
                ensure!(reply.status == 200, "{}: {}", reply.status, reply.text());
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
    let agent_meta = stack
        .agent
        .wait_for_line("meta port", CONNECT, opened)
        .await?;
    let (endpoint, meta) = (
        stack.server.address(Listener::Http),
        stack.server.address(Listener::Meta),
    );
    let setup = stack.server.setup_for_restart();
    for process in [&mut stack.agent, stack.server.process()] {
        process.signal(Signal::Term)?;
        process.end(STOP).await?;
    }
    let agent_setup = stack.agent_setup.arguments().iter();
    let agent_setup: Vec<String> = agent_setup
        .map(|word| word.replace("127.0.0.1:0", &agent_meta.to_string()))
        .collect();
    let server = Logged::start("tunnel-server", setup.arguments(), meta, output)?;
    let agent = Logged::start("tunnel-agent", &agent_setup, agent_meta, output)?;
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

#[tokio::test(flavor = "multi_thread")]
async fn f37_requests_go_on_while_the_log_is_not_read() -> Result<()> {
    requests_go_on(Output::UnreadPipe, "server").await
}

#[tokio::test(flavor = "multi_thread")]
async fn f37_requests_go_on_while_the_terminal_of_the_log_is_stopped() -> Result<()> {
    requests_go_on(Output::StoppedTerminal, "agent").await
}

#[tokio::test(flavor = "multi_thread")]
async fn f37_requests_go_on_while_the_disk_of_the_log_is_full() -> Result<()> {
    requests_go_on(Output::FullDisk, "").await
}
