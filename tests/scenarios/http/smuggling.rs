//! Requests that two parsers may read differently (S35, T07). The server refuses each one, or the
//! target receives exactly one request, which a strict parser reads as the server routed it.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tunnel_agent::config::TransportChoice;
use tunnel_tests::env::{TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::targets::{RecordedInput, RecordingTarget};

use super::table::{TwoNodes, run_cases};
use case::{Case, Expect, Ports, Want};

mod case;
mod chunks;
mod framing;
mod heads;
mod pipelines;

#[tokio::test(flavor = "multi_thread")]
async fn s35_t07_each_request_is_refused_or_reaches_its_target_alone() -> Result<()> {
    let nodes = TwoNodes::start_with(TransportChoice::Auto, |settings| {
        settings.limits = TestEnv::limits("requestHeadTimeout: 1s");
    })
    .await?;
    let address = nodes.env.bound().http.context("no HTTP listener")?;
    let (framing, chunks) = (framing::cases(), chunks::cases());
    let cases = [framing, chunks, heads::cases(), pipelines::cases()].concat();
    assert!(cases.len() >= 150, "{} cases", cases.len());
    run_cases(
        &cases,
        |case| &case.name,
        async |case| run_case(address, case).await,
    )
    .await;
    // The cases have not affected later callers.
    let sane = Case::new(
        "sane",
        "GET /sane HTTP/1.1\r\nHost: worker-1:@port\r\nConnection: close\r\n\r\n",
        Expect::Routed(vec![Want::own("GET", "/sane", "")]),
    );
    run_case(address, &sane).await
}

/// Sends a case on a connection of its own, and compares the answers and the targets' records with
/// what the case expects. The cases are for a target of one node and must not reach the other one.
async fn run_case(address: SocketAddr, case: &Case) -> Result<()> {
    let own = RecordingTarget::start("own").await?;
    let other = RecordingTarget::start("other").await?;
    let ports = Ports {
        own: own.addr().port(),
        other: other.addr().port(),
    };
    let statuses = send(address, &case.bytes(ports), &case.expect).await?;
    let (to_own, to_other) = (own.recorded(), other.recorded());
    ensure!(
        matches!(case.expect, Expect::Routed(_)) || to_other.is_empty(),
        "the other target got {to_other:?}"
    );
    let is_answered = match &case.expect {
        Expect::Refused(status) => {
            ensure!(to_own.is_empty(), "own target got {to_own:?}");
            statuses == [*status]
        }
        Expect::RoutedThenRefused(want) => {
            check("own", &to_own, [want.filled(ports)].iter())?;
            statuses == [200, 400]
        }
        Expect::Cut | Expect::Gone => {
            let requests = own.requests();
            ensure!(requests.is_empty(), "own target got {requests:?}");
            statuses.iter().all(|status| *status >= 400)
        }
        Expect::Routed(wants) => {
            let wants: Vec<_> = wants.iter().map(|want| want.filled(ports)).collect();
            check("own", &to_own, wants.iter().filter(|want| want.own))?;
            check("other", &to_other, wants.iter().filter(|want| !want.own))?;
            statuses == vec![200; wants.len()]
        }
    };
    ensure!(is_answered, "answered {statuses:?}");
    let closed = async || {
        let open = own.traffic().open() + other.traffic().open();
        (open == 0).then_some(()).ok_or(open)
    };
    eventually("no connection to a target is left", WAIT_TIMEOUT, closed).await;
    Ok(())
}

/// Sends `bytes` and returns the statuses of all answers up to the end of the connection. The
/// server must end the connection, unless the client leaves.
async fn send(address: SocketAddr, bytes: &[u8], expect: &Expect) -> Result<Vec<u16>> {
    let mut stream = TcpStream::connect(address).await?;
    let (mut reader, mut writer) = stream.split();
    let mut answers = Vec::new();
    let leaves = matches!(expect, Expect::Gone);
    let write = async {
        // The server may refuse the request and close the connection before it has read all bytes.
        let written = writer.write_all(bytes).await;
        if leaves && written.is_ok() {
            let _gone = writer.shutdown().await;
        }
    };
    let read = async {
        let ended = reader.read_to_end(&mut answers).await;
        match ended {
            Err(error) if error.kind() != io::ErrorKind::ConnectionReset => Err(error),
            Ok(_) | Err(_) => Ok(()),
        }
    };
    let both = async { tokio::join!(write, read).1 };
    timeout(scaled(WAIT_TIMEOUT + Duration::from_secs(5)), both)
        .await
        .context("the server does not end the connection")??;
    statuses(&answers)
}

fn check<'a>(
    name: &str,
    recorded: &[RecordedInput],
    wants: impl Iterator<Item = &'a Want>,
) -> Result<()> {
    let got = recorded.iter().map(|recorded| match recorded {
        RecordedInput::Request(_, request) => Ok(Want {
            own: name == "own",
            method: request.method.clone(),
            target: request.target.clone(),
            body: request.text(),
        }),
        RecordedInput::Fault(_) | RecordedInput::Unfinished(_) => {
            anyhow::bail!("{name} target got {recorded:?}")
        }
    });
    let got: Vec<_> = got.collect::<Result<_>>()?;
    let wants: Vec<_> = wants.cloned().collect();
    ensure!(got == wants, "{name} target got {got:?}, not {wants:?}");
    Ok(())
}

/// Returns the statuses of consecutive answers, each of which has a length.
fn statuses(mut bytes: &[u8]) -> Result<Vec<u16>> {
    let mut statuses = Vec::new();
    while !bytes.is_empty() {
        let all = String::from_utf8_lossy(bytes);
        let head = all.split_once("\r\n\r\n");
        let (head, _) = head.context("answer without an end of head")?;
        let status = head.split(' ').nth(1).context("no status")?.parse()?;
        let field = |name: &str| {
            head.lines()
                .find_map(|line| line.to_lowercase().strip_prefix(name).map(str::to_owned))
        };
        let length: usize = match field("content-length: ") {
            Some(length) => length.trim().parse()?,
            None => 0,
        };
        let taken = head.len() + 4 + if status >= 200 { length } else { 0 };
        bytes = bytes.get(taken.min(bytes.len())..).unwrap_or_default();
        if status >= 200 {
            statuses.push(status);
        }
    }
    Ok(statuses)
}
