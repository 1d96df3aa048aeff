//! T15: text from callers, agents and targets cannot end, color or begin a line of the log. T23:
//! such text cannot fill the log either.
//!
//! Logs go to the standard error of a process. Each test therefore starts its own binary again, as
//! the process that is attacked.

use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tunnel_process::telemetry::{self, AccessLogSettings, LogFormat};
use tunnel_proto::tls;
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::control::{ControlMessage, Hello};
use tunnel_tests::client::{ByteStream, RawRequest, request};
use tunnel_tests::env::TestEnv;
use tunnel_tests::eventually::scaled;
use tunnel_tests::targets::{HostileAction, HostileTarget};

use super::super::scripted::{Admission, ScriptedAgent, agent_key, dial, hello};
use super::report_figure;

/// Marker at the beginning of a line that an attacker tries to forge.
const FORGED: &str = "FORGED";

/// Environment variable that marks the attacked process. The value is the log format.
const VICTIM: &str = "CULVERT_LOG_VICTIM";

/// Returns the hostile texts: line ends, colors, bells, cursor movements, text that runs from right
/// to left, and a name that is too long.
fn evil() -> Vec<String> {
    let lines = "\n \r\n \r \x0b \x0c \u{85} \u{2028} \u{2029} \\n \0";
    let shown = "\x1b[31m \x1b[2K\x1b[1A \x07 \x08\x08 \u{9b}31m \u{202e} \u{2066} \x7f";
    let pieces = lines.split(' ').chain(shown.split(' '));
    let mut evil: Vec<String> = pieces
        .map(|piece| format!("a{piece}{FORGED} level=ERROR"))
        .collect();
    evil.push("x".repeat(100_000));
    evil
}

async fn attack() -> Result<()> {
    let env = TestEnv::start().await?;
    let _agent = env.agent("worker-1").await?;
    for (index, text) in evil().into_iter().enumerate() {
        // Text from callers: method, path, Host, selectors, trace ids, and bytes that are not a
        // request.
        for bytes in [
            format!("GET /{text} HTTP/1.1\r\nHost: worker-1:1024\r\n\r\n"),
            format!("GET / HTTP/1.1\r\nHost: {text}\r\n\r\n"),
            format!("GET / HTTP/1.1\r\nHost: worker-1:1024\r\nTraceparent: {text}\r\n\r\n"),
            format!("GET / HTTP/1.1\r\nHost: 192.0.2.1\r\nX-Tunnel-Proxy-Host: {text}\r\n\r\n"),
            format!("{text} / HTTP/1.1\r\nHost: worker-1:1024\r\n\r\n"),
            text.clone(),
        ] {
            let mut caller = ByteStream::connect(env.http()).await?;
            // The server may refuse the request before all of the bytes are sent.
            if caller.send(bytes.as_bytes()).await.is_ok() {
                let _cut = caller.finish().await;
                caller.read_to_end().await;
            }
        }
        // Text from a target: the status line, and a field of the answer.
        let answer = format!("HTTP/1.1 200 {text}\r\nX: {text}\r\nContent-Length: {text}\r\n\r\n");
        let target = HostileTarget::start(vec![
            HostileAction::ReadHead,
            HostileAction::Send(answer.into_bytes()),
            HostileAction::Hold,
        ])
        .await?;
        let host = format!("worker-1:{}", target.addr().port());
        let get = RawRequest::get(&host, "/");
        let asked = request(env.http(), &get);
        let patience = scaled(std::time::Duration::from_secs(2));
        let _whatever = tokio::time::timeout(patience, asked).await;
        // Text from an agent: its Hello, and the reason with which it closes the session.
        let node = format!("evil-{index}");
        let hello = Hello {
            capabilities: vec![text.clone()],
            software: text.clone(),
            node_ip: text.clone(),
            ..hello(&node, [7; 16])?
        };
        // The server closes the session if the Hello is too large.
        let key = agent_key(&env, &node)?;
        let answer = ScriptedAgent::handshake_with(&env, key, hello).await;
        if let Ok(Admission::Admitted(agent)) = answer {
            agent.leave_with_reason(&text).await;
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn t15_no_text_of_others_ends_or_colors_a_line_of_the_log() -> Result<()> {
    if let Ok(format) = std::env::var(VICTIM) {
        let format = format.parse().map_err(anyhow::Error::msg)?;
        let _logs = telemetry::start("debug".parse()?, format, &AccessLogSettings::default())?;
        return attack().await;
    }
    for format in [LogFormat::Text, LogFormat::Json] {
        let name = match format {
            LogFormat::Text => "text",
            LogFormat::Json => "json",
        };
        let test = "t15_no_text_of_others_ends_or_colors_a_line_of_the_log";
        let log = run_as_victim(test, name).await?;
        let is_logged = log.contains(FORGED);
        ensure!(is_logged, "no hostile text was logged: {}", tail(&log));
        check(&log, format)?;
    }
    Ok(())
}

/// Runs a test in the attacked process, which must succeed, and returns its log.
async fn run_as_victim(test: &str, format: &str) -> Result<String> {
    let mut victim = Command::new(std::env::current_exe()?);
    victim
        .args(["--exact", &format!("abuse::logs::{test}"), "--nocapture"])
        .env(VICTIM, format);
    let output = tokio::task::spawn_blocking(move || victim.output()).await??;
    let log = String::from_utf8(output.stderr).context("the log is no text")?;
    ensure!(output.status.success(), "{}", tail(&log));
    Ok(log)
}

/// Number of events in each flood. There are a twentieth as many handshakes.
const FLOOD: usize = 2000;

/// Floods the server with an agent's repeated control messages, with requests that cannot be
/// parsed, and with handshakes that use a certificate of an unknown CA.
async fn flood() -> Result<()> {
    let env = TestEnv::start().await?;
    let mut agent = ScriptedAgent::connect(&env, "worker-1").await?;
    for _ in 0..FLOOD {
        if agent.send(&ControlMessage::Withdraw).await.is_err() {
            break;
        }
    }
    let reason = agent.closed().await;
    ensure!(reason.code == CloseCode::Protocol, "{reason}");
    for _ in 0..FLOOD {
        let caller = ByteStream::connect(env.http()).await?;
        let _refused = caller.talk(b"\x01\x02\x03 / HTTP/1.1\r\n\r\n").await;
    }
    let foreign = rcgen::generate_simple_self_signed(vec!["worker-1".to_owned()])?;
    let key = foreign.signing_key.serialize_der().try_into();
    let key = key.map_err(anyhow::Error::msg)?;
    let key = tls::certified_key(vec![foreign.cert.der().clone()], key)?;
    for _ in 0..FLOOD / 20 {
        // In TLS 1.3 the client's handshake can succeed before the server refuses the certificate.
        if let Ok((session, _dialer)) = dial(&env, key.clone()).await {
            session.closed().await;
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn t23_floods_of_peers_and_callers_do_not_fill_the_log() -> Result<()> {
    if std::env::var_os(VICTIM).is_some() {
        let _logs = telemetry::start(
            "info".parse()?,
            LogFormat::Json,
            &AccessLogSettings::default(),
        )?;
        return flood().await;
    }
    let test = "t23_floods_of_peers_and_callers_do_not_fill_the_log";
    let log = run_as_victim(test, "json").await?;
    report_figure(&format!("T23: {} bytes of log", log.len()));
    ensure!(log.len() < 32 * 1024, "{} bytes: {}", log.len(), tail(&log));
    let count = |text: &str| log.lines().filter(|line| line.contains(text)).count();
    for (text, lines) in [
        ("agent withdrew", 1),
        ("unparsable request", 10),
        ("agent handshake failed", 10),
        ("agent handshakes failed: and ", 1),
    ] {
        assert_eq!(count(text), lines, "{text}: {}", tail(&log));
    }
    let rest = log
        .lines()
        .find(|line| line.contains("cannot be read: and "));
    let rest: serde_json::Value = serde_json::from_str(rest.context("no line about the rest")?)?;
    let suppressed = rest["suppressed"].as_u64().context("no number")?;
    // The last requests may end after this line is written.
    let suppressed = usize::try_from(suppressed)?;
    ensure!((FLOOD - 50..=FLOOD - 10).contains(&suppressed), "{rest}");
    Ok(())
}

/// Number of refused requests in a flood of one caller.
const REFUSED: usize = 20_000;
/// Number of requests of each kind before the flood, which have a line each.
const FIRST_OF_KIND: usize = 10;

/// Floods the server with refused requests of one caller: an unknown node, and a port that is not
/// allowed. Requests that reach a target follow.
async fn refused_flood() -> Result<()> {
    let env = TestEnv::start().await?;
    let _agent = env.agent("worker-1").await?;
    let hosts = ["nobody:9100", "worker-1:81"];
    // The flood of one kind can use up the budget of all.
    let first = hosts.map(|host| (host, FIRST_OF_KIND));
    let flood = hosts.map(|host| (host, REFUSED / 2 - FIRST_OF_KIND));
    for (host, count) in first.into_iter().chain(flood) {
        let requests = format!("GET /refused HTTP/1.1\r\nHost: {host}\r\n\r\n").repeat(count);
        let mut caller = ByteStream::connect(env.http()).await?;
        let (mut reader, mut writer) = tokio::io::split(&mut caller);
        let mut answers = BufReader::new(&mut reader).lines();
        let read = async {
            let mut refused = 0;
            while refused < count {
                let line = answers.next_line().await?.context("the connection ended")?;
                refused += usize::from(line.starts_with("HTTP/1.1 40"));
            }
            anyhow::Ok(())
        };
        let written = async { writer.write_all(requests.as_bytes()).await.context("send") };
        tokio::try_join!(read, written)?;
    }
    for _ in 0..REACHED {
        // An allowed port where nothing listens.
        let get = RawRequest::get("worker-1:10255", "/reached");
        let reply = request(env.http(), &get).await?;
        ensure!(reply.status == 502, "{reply:?}");
    }
    Ok(())
}

/// Number of requests that reach the node's agent.
const REACHED: usize = 100;

#[tokio::test(flavor = "multi_thread")]
async fn t23_refused_requests_of_a_caller_have_a_budget_of_lines() -> Result<()> {
    if std::env::var_os(VICTIM).is_some() {
        let settings = AccessLogSettings::default();
        let _logs = telemetry::start("info".parse()?, LogFormat::Json, &settings)?;
        return refused_flood().await;
    }
    let test = "t23_refused_requests_of_a_caller_have_a_budget_of_lines";
    let began = std::time::Instant::now();
    let log = run_as_victim(test, "json").await?;
    let seconds = usize::try_from(began.elapsed().as_secs())? + 2;
    report_figure(&format!(
        "T23: {REFUSED} refused, {} bytes of log",
        log.len()
    ));
    let lines: Vec<serde_json::Value> = log
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect();
    let of_path = |path: &str| {
        let request = format!("GET {path}");
        let access = lines.iter().filter(move |line| line["request"] == *request);
        access.collect::<Vec<_>>()
    };
    let refused = of_path("/refused");
    ensure!(refused.len() <= 50 * seconds, "{} lines", refused.len());
    let with_advice = |code: &str| {
        let of_code = refused.iter().filter(|line| line["code"] == code);
        let errors = of_code.filter_map(|line| line["error"].as_str());
        errors.filter(|error| error.contains("; ")).count()
    };
    assert_eq!(with_advice("refused_by_policy"), 1, "advice once");
    let suppressed = lines.iter().filter(|line| {
        let kind = line["kind"].as_str();
        kind.is_some_and(|kind| kind.contains("reached no node"))
    });
    let suppressed: u64 = suppressed
        .filter(|line| line["source"] == "127.0.0.1")
        .filter_map(|line| line["suppressed"].as_u64())
        .sum();
    let all = refused.len() + usize::try_from(suppressed)?;
    assert_eq!(all, REFUSED, "each request has a line or is counted");
    let at_server = of_path("/reached");
    assert_eq!(at_server.len(), REACHED, "each stream has its line");
    Ok(())
}

fn check(log: &str, format: LogFormat) -> Result<()> {
    let mut lines = 0;
    for line in log.split('\n').filter(|line| !line.is_empty()) {
        // The harness prints this line.
        if line.starts_with("test patience") {
            continue;
        }
        lines += 1;
        if let Some(odd) = line.chars().find(|letter| is_odd(*letter)) {
            bail!("{odd:?} in {line:?}");
        }
        ensure!(line.len() < 32 * 1024, "a line is too long: {line:.200}");
        let is_line = match format {
            LogFormat::Json => line.starts_with('{') && line.ends_with('}'),
            LogFormat::Text => !line.trim_start().starts_with(FORGED),
        };
        ensure!(is_line, "{line:?}");
    }
    ensure!(lines > 100, "only {lines} lines");
    Ok(())
}

fn is_odd(letter: char) -> bool {
    letter.is_control()
        || matches!(letter, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn tail(log: &str) -> &str {
    let from = log.len().saturating_sub(2000);
    log.get(from..).unwrap_or(log)
}
