//! Servers of one host that share the path of a CONNECT socket: callers always find one of them.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tunnel_tests::client::EgressDialer;
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::process::{Process, ScratchDir, Server, Signal};
use tunnel_tests::targets::EchoTarget;

use super::{CONNECT, NODE, Servers};
use crate::connect::egress::talk;

#[tokio::test(flavor = "multi_thread")]
async fn servers_that_come_and_stop_fail_no_dial_of_one_socket_and_a_killed_one_is_replaced()
-> Result<()> {
    let site = Site::start().await?;
    let mut servers = site.servers;
    ensure!(
        has_path(&servers.servers[1], &site.socket),
        "the first server has the path"
    );
    let calling = Calling::start(&site.socket, &site.target);
    // The second server stops: the first one takes the path before that.
    servers.servers[1].process().signal(Signal::Term)?;
    eventually("the first server has the path again", CONNECT, async || {
        let lines = times_taken(&servers.servers[0], &site.socket);
        ensure!(lines == 2, "{lines}; {}", servers.servers[0].log());
        Ok(())
    })
    .await;
    servers.servers[1].process().end(CONNECT).await?;
    ensure!(site.socket.exists(), "the path is gone");
    // It starts again, and takes the path.
    let setup = servers.servers[1].setup_for_restart();
    let mut second = setup.start().await?;
    takes(&second, &site.socket).await;
    let calls = calling.end().await?;
    ensure!(calls > 0, "no calls");
    // A killed one leaves a path that leads nowhere.
    second.process().signal(Signal::Kill)?;
    let dialer = EgressDialer::uds(&site.socket);
    eventually("the first server serves again", CONNECT, async || {
        talk(dialer.dial(&site.target).await?).await
    })
    .await;
    Ok(())
}

/// Two servers, an agent and a target behind it.
struct Site {
    servers: Servers,
    socket: PathBuf,
    target: String,
    _agent: Process,
    _echo: EchoTarget,
    _scratch: ScratchDir,
}

impl Site {
    async fn start() -> Result<Self> {
        let (scratch, echo) = (ScratchDir::new()?, EchoTarget::start().await?);
        let socket = scratch.path().join("connect.sock");
        let arguments = [
            "--connect-uds",
            &socket.to_string_lossy(),
            "--drain-delay",
            "6s",
        ];
        let servers = Servers::start(2, &arguments).await?;
        takes(&servers.servers[1], &socket).await;
        let agent = servers.agent_at_both().await?;
        Ok(Self {
            target: format!("{NODE}:{}", echo.addr().port()),
            servers,
            socket,
            _agent: agent,
            _echo: echo,
            _scratch: scratch,
        })
    }
}

/// Waits until a server has taken the path.
async fn takes(server: &Server, socket: &Path) {
    eventually("the path is taken", CONNECT, async || {
        ensure!(has_path(server, socket), "{}", server.log());
        Ok(())
    })
    .await;
}

fn has_path(server: &Server, socket: &Path) -> bool {
    times_taken(server, socket) > 0
}

fn times_taken(server: &Server, socket: &Path) -> usize {
    let path = format!("\"path\":\"{}\"", socket.display());
    let lines = server.log().lines();
    let taken = lines
        .iter()
        .filter(|line| line.contains("\"listening\"") && line.contains(&path));
    taken.count()
}

/// Dials the target over the socket, one dial after the other.
struct Calling {
    stop: CancellationToken,
    calls: JoinSet<Result<usize>>,
}

impl Calling {
    fn start(socket: &Path, target: &str) -> Self {
        let (stop, dialer, target) = (
            CancellationToken::new(),
            EgressDialer::uds(socket),
            target.to_owned(),
        );
        let stopped = stop.clone();
        let mut calls = JoinSet::new();
        calls.spawn(async move {
            let mut done = 0;
            while !stopped.is_cancelled() {
                let call = async { talk(dialer.dial(&target).await?).await };
                timeout(scaled(CONNECT), call).await??;
                done += 1;
            }
            Ok(done)
        });
        Self { stop, calls }
    }

    /// Ends the dials. Returns their number, or the first failure.
    async fn end(mut self) -> Result<usize> {
        self.stop.cancel();
        let ended = self.calls.join_next().await;
        ended.ok_or_else(|| anyhow::anyhow!("ended already"))??
    }
}
