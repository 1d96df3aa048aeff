//! The CONNECT listeners: the subcommand `connect`, reloaded passwords, ends of tunnels, and
//! drains.

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use base64::prelude::{BASE64_STANDARD, Engine as _};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Instant, timeout};
use tunnel_tests::ca::{Leaf, TestCa, replace};
use tunnel_tests::checks::{ensure_contains, ensure_refused, ensure_status};
use tunnel_tests::client::{BodyEnd, ByteStream, RawRequest, Tunnel, request};
use tunnel_tests::env::WAIT_TIMEOUT;
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::process::{ScratchDir, ServerSetup};
use tunnel_tests::targets::{
    EchoTarget, Exporter, HalfCloseTarget, ResetTarget, deterministic_bytes,
};

use super::egress::{fails, talk};
use super::{ConnectFixture, NODE};
use crate::credentials::metric_reaches;

/// Lines of the password file, before and after the change.
const OLD: &str = "aladdin:open-sesame-4711\n";
const NEW: &str = "aladdin:shut-sesame-4711\n";

/// Returns the value of Proxy-Authorization for a line of the password file.
fn basic(line: &str) -> String {
    format!("Basic {}", BASE64_STANDARD.encode(line.trim_end()))
}

/// The network of `--connect-direct` contains the addresses of the server's own listeners.
#[tokio::test(flavor = "multi_thread")]
async fn networks_of_connect_direct_lead_to_no_listener_of_the_server() -> Result<()> {
    let fixture = ConnectFixture::over_tcp(|_| {}).await?;
    let (dialer, echo) = (fixture.dialer(), EchoTarget::start().await?);
    talk(dialer.dial(&echo.addr().to_string()).await?).await?;
    let bound = fixture.env.bound();
    let http = bound.http.context("no HTTP listener")?;
    for own in [fixture.env.meta(), bound.agents, http, fixture.tcp()?] {
        fails(&dialer, &own.to_string(), &["code 403"]).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn connect_command_passes_bytes_and_reports_refusals() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let (echo, late) = (
        EchoTarget::start().await?,
        HalfCloseTarget::start(70_000).await?,
    );
    let reset = ResetTarget::start_waiting(10).await?;
    let ports = [echo.addr(), late.addr(), reset.addr()].map(|addr| addr.port().to_string());
    let callers = TestCa::new("callers")?;
    let person = callers.issue(&Leaf::caller("person"))?;
    let (own, key) = person.write(scratch.path(), "person")?;
    let caller_ca = scratch.file("callers.crt", callers.pem())?;
    let caller_ca = caller_ca.to_string_lossy();
    let data = scratch.path().join("server");
    let setup = ServerSetup::on_loopback(&data)
        .args(&["--connect-ports", &ports.join(",")])
        .args(&["--proxy-port-listen", "off", "--client-ca", &caller_ca])
        .args(&["--connect-listen", "127.0.0.1:0"]);
    let mut server = setup.start().await?;
    let endpoint = server
        .process()
        .wait_for_line("connect", WAIT_TIMEOUT, |line| {
            let line: serde_json::Value = serde_json::from_str(line).ok()?;
            let is_it = line["listener"] == "connect";
            line["address"]
                .as_str()
                .filter(|_| is_it)
                .map(str::to_owned)
        });
    let endpoint = endpoint.await?;
    let folder = scratch.path().join("agent");
    let _agent = server.agent_setup(NODE, &folder).await?.start()?;
    server.wait_until_connected(&[NODE]).await;

    let server_ca = data.join("ca.crt").to_string_lossy().into_owned();
    let (own, key) = (own.to_string_lossy(), key.to_string_lossy());
    let own = ["--cert-file", &own, "--key-file", &key];
    let over_tcp = ["--server", &endpoint, "--ca-file", &server_ca];
    let over_tcp = [own, over_tcp].concat();
    for route_args in [&[][..], &over_tcp[..]] {
        let run = |port: &str| server.verb(&[&["connect", NODE, port], route_args].concat());
        let mut message = deterministic_bytes(7, 300);
        message
            .iter_mut()
            .for_each(|byte| *byte = *byte % 26 + b'a');
        let echoed = run(&ports[0])?.run_with(&message).await?.ok()?;
        ensure!(echoed.as_bytes() == message, "{route_args:?}: {echoed:?}");
        // The target sends its bytes after the caller's half-close, so their arrival proves that
        // the tunnel transports a half-close.
        let spoken = run(&ports[1])?.run_with(b"bye").await?;
        ensure!(spoken.ok()?.len() > 1000, "{route_args:?}");
        let cut = run(&ports[2])?.run_with(b"go").await?;
        // A Unix socket has no reset, so `connect` cannot distinguish a reset from a normal end.
        if !route_args.is_empty() {
            cut.ensure_failed(1, &[])?;
        }
        for (node, hint) in [(NODE, "not allowed"), ("worker-9", "worker-9")] {
            let refused = server.verb(&[&["connect", node, "22"], route_args].concat())?;
            let refused = refused.run().await?.ensure_failed(1, &[hint]);
            refused.with_context(|| format!("{route_args:?}"))?;
        }
    }
    let usage = server.verb(&["connect", NODE, "0"])?.run().await?;
    usage.ensure_failed(64, &[])
}

#[tokio::test(flavor = "multi_thread")]
async fn p11_passwords_are_reloaded_and_a_wrong_one_is_reported() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let file = scratch.file("passwords", OLD)?;
    let fixture = ConnectFixture::with_passwords(&file).await?;
    let _agent = fixture.env.agent(NODE).await?;
    let exporter = Exporter::start(NODE).await?;
    let endpoint = fixture.tcp()?;
    let url = format!("http://{NODE}:{}/metrics", exporter.addr().port());
    let ask = async |password: Option<&str>| {
        let ask = RawRequest::get("whatever", &url);
        let ask = match password {
            Some(password) => ask.header("Proxy-Authorization", password),
            None => ask,
        };
        request(endpoint, &ask).await
    };
    let (old, new) = (basic(OLD), basic(NEW));
    ensure!(ask(Some(&old)).await?.status == 200);
    for wrong in [None, Some(&*new), Some("Basic !"), Some("Bearer x")] {
        let reply = ask(wrong).await?;
        ensure_refused(&reply, 407, "proxy_auth_required")?;
    }
    // An unusable file changes nothing.
    for bad in ["", "aladdin\n", "aladdin:short\n"] {
        replace(&file, bad.as_bytes())?;
        fixture.env.reload();
        ensure!(ask(Some(&old)).await?.status == 200);
    }
    replace(&file, NEW.as_bytes())?;
    fixture.env.reload();
    // The test waits for the metric instead of trying the new password, because failed attempts
    // delay further ones.
    let changed =
        "tunnel_server_credential_reloads_total{files=\"connect_auth\",result=\"changed\"}";
    metric_reaches(&fixture.env, changed, 1.0, WAIT_TIMEOUT).await;
    ensure!(ask(Some(&new)).await?.status == 200);
    ensure!(ask(Some(&old)).await?.status == 407);
    Ok(())
}

/// A.9: wrong passwords delay the pair of address and user name. Other callers of that address do
/// not wait.
#[tokio::test(flavor = "multi_thread")]
async fn guesses_wait_and_other_callers_of_the_address_do_not() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let file = scratch.file("passwords", format!("{OLD}prometheus:0123456789abcdef\n"))?;
    let fixture = ConnectFixture::with_passwords(&file).await?;
    let _agent = fixture.env.agent(NODE).await?;
    let exporter = Exporter::start(NODE).await?;
    let endpoint = fixture.tcp()?;
    let url = format!("http://{NODE}:{}/metrics", exporter.addr().port());
    let ask = async |line: &str| {
        let ask = RawRequest::get("whatever", &url);
        request(endpoint, &ask.header("Proxy-Authorization", &basic(line))).await
    };
    let mut waited = false;
    for guess in 0..100 {
        let reply = ask(&format!("aladdin:guess-{guess}")).await?;
        ensure_refused(&reply, 407, "proxy_auth_required")?;
        waited |= reply.text().contains("too many failed");
        // A correct password of another user name neither waits nor shortens the delay of the
        // guesses.
        ensure_status(&ask("prometheus:0123456789abcdef").await?, 200)?;
    }
    let count = async |result: &str| {
        let series = format!("tunnel_server_connect_passwords_total{{result=\"{result}\"}}");
        fixture.env.metric(&series).await
    };
    let (right, wrong) = (count("right").await?, count("wrong").await?);
    let waiting = count("waiting").await?;
    // The server checks five guesses at once and then one a second at most. The test takes seconds.
    ensure!((5..12).contains(&wrong), "{wrong} guesses were judged");
    ensure!((right, wrong + waiting) == (100, 100));
    ensure!(waited, "no answer names the wait");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn passwords_that_others_may_write_are_refused_at_start() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let file = scratch.file("passwords", OLD)?;
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o666))?;
    let started = ConnectFixture::with_passwords(&file).await;
    let error = started.err().context("started")?;
    ensure_contains(&format!("{error:#}"), &["--connect-auth", "chmod"])
}

/// Opens tunnels on a plain CONNECT listener on loopback, which requires no credentials. A target's
/// reset arrives as a reset, and a normal end as a normal end.
#[tokio::test(flavor = "multi_thread")]
async fn ends_and_cuts_are_distinguished_through_a_tunnel() -> Result<()> {
    let fixture = ConnectFixture::over_tcp(|_| {}).await?;
    let _agent = fixture.env.agent(NODE).await?;
    let endpoint = fixture.tcp()?;
    let (late, cut) = (
        HalfCloseTarget::start(200_000).await?,
        ResetTarget::start_waiting(10).await?,
    );
    for by_node in [true, false] {
        for (target, is_cut) in [(late.addr(), false), (cut.addr(), true)] {
            let target = if by_node {
                format!("{NODE}:{}", target.port())
            } else {
                target.to_string()
            };
            let mut stream = ByteStream::connect(endpoint).await?;
            let head = format!("CONNECT {target} HTTP/1.1\r\nHost: x\r\n\r\n");
            stream.send(head.as_bytes()).await?;
            let answer = stream.receive(19).await?;
            let answer = String::from_utf8_lossy(&answer);
            ensure!(answer == "HTTP/1.1 200 OK\r\n\r\n", "{target}: {answer}");
            let reading = stream.talk(b"go").await?;
            let is_reset = matches!(reading.ended, BodyEnd::Reset(_));
            ensure!(is_reset == is_cut, "{target}: {:?}", reading.ended);
            ensure!(is_cut || reading.bytes == deterministic_bytes(0, 200_000));
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn sixty_four_callers_that_read_nothing_delay_no_other_tunnel() -> Result<()> {
    let fixture = ConnectFixture::start().await?;
    let _agent = fixture.env.agent(NODE).await?;
    // More bytes than all windows on the path together.
    let flood = HalfCloseTarget::start(1 << 30).await?;
    let echo = EchoTarget::start().await?;
    let [flood, echo] = [flood.addr(), echo.addr()].map(|addr| format!("{NODE}:{}", addr.port()));
    let dialer = fixture.dialer();
    let mut before = dialer.dial(&echo).await?;
    let quiet = round_trip(&mut before).await?;
    let mut stalled = Vec::new();
    for _ in 0..64 {
        let mut reader = dialer.dial(&flood).await?;
        // The target begins to send after the caller's half-close. The caller reads only the first
        // byte.
        reader.shutdown().await?;
        reader.read_exact(&mut [0; 1]).await?;
        stalled.push(reader);
    }
    let mut slowest = Duration::ZERO;
    for _ in 0..10 {
        slowest = slowest.max(round_trip(&mut before).await?);
        let fresh = timeout(scaled(WAIT_TIMEOUT), dialer.dial(&echo)).await;
        let mut fresh = fresh.context("no new tunnel")??;
        slowest = slowest.max(round_trip(&mut fresh).await?);
    }
    ensure!(
        slowest < scaled(Duration::from_secs(1)) + quiet,
        "{slowest:?}"
    );
    Ok(())
}

async fn round_trip(tunnel: &mut Tunnel) -> Result<Duration> {
    let began = Instant::now();
    tunnel.write_all(b"ping").await?;
    let mut received = [0; 4];
    timeout(scaled(WAIT_TIMEOUT), tunnel.read_exact(&mut received)).await??;
    ensure!(&received == b"ping");
    Ok(began.elapsed())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_waits_for_tunnels_and_takes_no_new_ones() -> Result<()> {
    let mut fixture = ConnectFixture::start().await?;
    let _agent = fixture.env.agent(NODE).await?;
    let echo = EchoTarget::start().await?;
    let target = format!("{NODE}:{}", echo.addr().port());
    let tunnel = fixture.dialer().dial(&target).await?;
    fixture.env.drain_server();
    let dialer = fixture.dialer();
    eventually("the socket to go", WAIT_TIMEOUT, async || {
        ensure!(!fixture.socket.exists() && dialer.dial(&target).await.is_err());
        Ok(())
    })
    .await;
    talk(tunnel).await?;
    timeout(scaled(Duration::from_secs(60)), fixture.env.stop_server()).await??;
    Ok(())
}
