//! S20, S23: peers that send QUIC frames that no library sends, by `tests/raw_quic/peer.py`. The
//! tests check the cost of each attack and how it ends. The server is a separate process, so that
//! its memory can be measured.

use std::path::{Path, PathBuf};
use std::pin::pin;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tunnel_proto::wire::code::CloseCode;
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::eventually::scaled;
use tunnel_tests::process::{Listener, Program, ScratchDir};
use tunnel_tests::tools::{Tool, or_skip, require};

use super::memory::resident;
use super::{CONNECT, NODE, Stack, enroll};
use crate::abuse::report_figure;

/// The hostile agent's node.
const HOSTILE: &str = "worker-2";
/// Duration of a flood, in seconds.
const SECONDS: u64 = 2;
/// Seconds of a flood that lasts longer than the server's interval between two checks of a session.
const UNTIL_LOOKED_AT: u64 = 15;
/// Memory that an attack may cost: 4 MiB that wait for the connection, 4 MiB of unknown addresses
/// and 9 MiB that wait for the endpoint (`quic/backlog.rs`), and half as much again for the
/// allocator's overhead.
const GROWTH: u64 = 32 << 20;
/// [`GROWTH`], and in addition the pieces that quinn admits on each of 100 streams: 140 KiB.
const GAPS_GROWTH: u64 = 48 << 20;
/// Time limit for each request through another agent during an attack.
const OTHERS: Duration = Duration::from_secs(1);
const STREAMS: usize = 100;

/// An attack, and the code with which the server closes the session (RFC 9000, section 20.1). An
/// attack without a code must do no harm, or the server closes the session as a flood
/// (`quic/flood_detector.rs`).
type Attack = (&'static str, Option<u64>);

const IDS_AND_PATHS: [Attack; 7] = [
    ("new_ids_that_retire_all", Some(CONNECTION_ID_LIMIT_ERROR)),
    ("new_ids_above_the_limit", Some(CONNECTION_ID_LIMIT_ERROR)),
    ("retires_ids_never_issued", Some(PROTOCOL_VIOLATION)),
    ("retires_ids_as_they_are_issued", None),
    ("retires_one_id_again", None),
    ("path_challenges", None),
    ("path_challenges_from_many_paths", None),
];

const PIECES: [Attack; 7] = [
    ("gaps_without_end", Some(INTERNAL_ERROR)),
    ("crypto_gaps_without_end", Some(INTERNAL_ERROR)),
    ("crypto_beyond_its_buffer", Some(CRYPTO_BUFFER_EXCEEDED)),
    ("beyond_the_window", Some(FLOW_CONTROL_ERROR)),
    ("same_pieces_again", None),
    ("same_crypto_again", None),
    ("empty_pieces", None),
];

const OTHER_FRAMES: [Attack; 12] = [
    ("streams_of_its_own", Some(STREAM_LIMIT_ERROR)),
    ("unidirectional_streams", Some(STREAM_LIMIT_ERROR)),
    ("resets_of_unopened_streams", Some(STREAM_STATE_ERROR)),
    ("stops_of_unopened_streams", Some(STREAM_STATE_ERROR)),
    ("acks_of_what_was_never_sent", Some(PROTOCOL_VIOLATION)),
    ("ack_ranges_below_zero", Some(FRAME_ENCODING_ERROR)),
    ("reserved_frames", Some(FRAME_ENCODING_ERROR)),
    ("frames_of_servers", Some(PROTOCOL_VIOLATION)),
    ("datagrams_too_large", Some(PROTOCOL_VIOLATION)),
    ("datagrams", None),
    ("pings", None),
    ("limits_and_blocked", None),
];

/// Attacks by peers without a certificate.
const UNAUTHENTICATED: [Attack; 4] = [
    ("no_certificate", Some(CERTIFICATE_REQUIRED)),
    ("hello_flood", None),
    ("versions_unknown", None),
    ("initial_gaps", None),
];

const INTERNAL_ERROR: u64 = 0x1;
const FLOW_CONTROL_ERROR: u64 = 0x3;
const STREAM_LIMIT_ERROR: u64 = 0x4;
const STREAM_STATE_ERROR: u64 = 0x5;
const FRAME_ENCODING_ERROR: u64 = 0x7;
const CONNECTION_ID_LIMIT_ERROR: u64 = 0x9;
const PROTOCOL_VIOLATION: u64 = 0xa;
const CRYPTO_BUFFER_EXCEEDED: u64 = 0xd;
/// The TLS alert certificate_required.
const CERTIFICATE_REQUIRED: u64 = 0x174;

tests_of! {
    fn s23_floods_of_connection_ids_and_path_challenges_cost_others_nothing() = all(&IDS_AND_PATHS);
    fn s20_pieces_with_gaps_end_the_session_or_cost_a_bounded_amount() = all(&PIECES);
    fn raw_frames_of_no_use_end_the_session_or_cost_others_nothing() = all(&OTHER_FRAMES);
    fn raw_packets_of_unauthenticated_peers_cost_a_bounded_amount_and_are_not_amplified() =
        all(&UNAUTHENTICATED);
}

#[tokio::test(flavor = "multi_thread")]
async fn s20_gaps_on_a_hundred_streams_cost_a_bounded_amount() -> Result<()> {
    let Some(mut fixture) = RawQuicFixture::start().await? else {
        return Ok(());
    };
    let port = fixture.stack.exporter.addr().port();
    let http = fixture.stack.http();
    let callers = async move {
        // Each caller opens a stream. Callers that come before the peer is admitted receive 503 and
        // try again.
        let mut callers = JoinSet::new();
        for _ in 0..STREAMS {
            callers.spawn(async move {
                let get = RawRequest::get(&format!("{HOSTILE}:{port}"), "/metrics");
                loop {
                    drop(request(http, &get).await);
                    sleep(Duration::from_millis(300)).await;
                }
            });
        }
        callers.join_next().await
    };
    tokio::select! {
        done = fixture.attack(("gaps_on_many_streams", None)) => done,
        ended = callers => bail!("a caller ended: {ended:?}"),
    }
}

/// Sends a flood that lasts longer than the check interval. The server closes the session and logs
/// the reason.
#[tokio::test(flavor = "multi_thread")]
async fn raw_floods_of_small_frames_end_the_session() -> Result<()> {
    let Some(mut fixture) = RawQuicFixture::start().await? else {
        return Ok(());
    };
    fixture.seconds = UNTIL_LOOKED_AT;
    fixture.attack(("pings", None)).await?;
    let reason = "flood of frames without stream data";
    let log = fixture.stack.server.log();
    let line = log.find(|line| line.contains(reason).then_some(()));
    let logged = timeout(scaled(CONNECT), line).await;
    logged.with_context(|| format!("no line of {reason}: {log}"))
}

async fn all(attacks: &[Attack]) -> Result<()> {
    let Some(mut fixture) = RawQuicFixture::start().await? else {
        return Ok(());
    };
    for attack in attacks {
        fixture.attack(*attack).await.context(attack.0)?;
    }
    Ok(())
}

/// A server, an agent whose callers must be served throughout, and the stolen certificate of a
/// second agent.
struct RawQuicFixture {
    stack: Stack,
    server: u32,
    hostile: PathBuf,
    seconds: u64,
    _scratch: ScratchDir,
}

impl RawQuicFixture {
    async fn start() -> Result<Option<Self>> {
        if or_skip(require(&[Tool::Aioquic])).is_none() {
            return Ok(None);
        }
        let mut stack = Stack::start(&[], &[]).await?;
        let scratch = ScratchDir::new()?;
        let hostile = scratch.path().join("hostile");
        enroll(&stack.server, HOSTILE, &hostile, &[NODE]).await?;
        let server = stack.server.process().id().context("server's id")?;
        Ok(Some(Self {
            stack,
            server,
            hostile,
            seconds: SECONDS,
            _scratch: scratch,
        }))
    }

    fn peer(&self, attack: &str) -> Result<Program> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("raw_quic/peer.py");
        let server = self.stack.server.address(Listener::Agents).to_string();
        let peer = Program::tool(Tool::Aioquic)?.arg(script).arg(attack);
        let peer = peer.args(["--server", &server, "--seconds", &self.seconds.to_string()]);
        let peer = peer.args(["--streams", &STREAMS.to_string()]);
        if UNAUTHENTICATED.iter().any(|(name, _)| *name == attack) {
            return Ok(peer);
        }
        let file = |name: &str| self.hostile.join(name);
        let peer = peer.arg("--certificate").arg(file("agent.crt"));
        let peer = peer.arg("--key").arg(file("agent.key"));
        Ok(peer.args(["--node", HOSTILE]))
    }

    /// Runs one attack to its end while a caller of another agent sends requests. Checks the close
    /// code, the server's memory, and that the peer receives at most three times the bytes that it
    /// sends.
    async fn attack(&mut self, (attack, code): Attack) -> Result<()> {
        let before = resident(self.server)?;
        let (mut most, mut slowest) = (before, Duration::ZERO);
        let finished = {
            let mut peer = pin!(self.peer(attack)?.run());
            loop {
                tokio::select! {
                    finished = &mut peer => break finished?.ok()?,
                    asked = self.others_are_served() => slowest = slowest.max(asked?),
                }
                most = most.max(resident(self.server)?);
            }
        };
        let outcome: Value = serde_json::from_str(finished.trim()).context(finished.clone())?;
        report_figure(&format!(
            "{attack}: {outcome}; {} MiB, then {} MiB at most; others after {slowest:?} at most",
            before >> 20,
            most >> 20
        ));
        let ended = outcome["closed"].as_u64();
        let flood = code.is_none() && ended == Some(CloseCode::Protocol.number().into());
        ensure!(ended == code || flood, "{outcome}, not {code:?}");
        let allowed = match attack {
            "gaps_on_many_streams" => GAPS_GROWTH,
            _ => GROWTH,
        };
        ensure!(most - before <= allowed, "{before} bytes, then {most}");
        if code.is_none() {
            let amount = |name: &str| outcome[name].as_u64().context(finished.clone());
            ensure!(amount("packets")? > 50, "hardly a flood: {outcome}");
            let (sent, answered) = (amount("sent")?, amount("answered")?);
            ensure!(answered <= 3 * sent, "amplified: {outcome}");
        }
        self.stack.server.wait_until_connected(&[NODE]).await;
        Ok(())
    }

    /// Sends a request through another agent and returns its duration.
    async fn others_are_served(&self) -> Result<Duration> {
        let (host, began) = (self.stack.host(), Instant::now());
        let asked = self.stack.server.get_ok(&host, "/metrics");
        let reply = timeout(scaled(OTHERS), asked).await;
        reply.context("others are not served in time")??;
        let waited = began.elapsed();
        // Requests without a pause would take processor time from the attack.
        sleep(Duration::from_millis(20)).await;
        Ok(waited)
    }
}
