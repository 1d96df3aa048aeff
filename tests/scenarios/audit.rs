//! The audit log: one event for each stream of every listener at each end, without secrets, and what
//! becomes of it when its output is full, rotates or stands still.

use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::time::timeout;
use tunnel_server::config::RawTcpService;
use tunnel_tests::audit_events::{AuditEvent, AuditEvents, CANARY};
use tunnel_tests::checks::{ensure_contains, ensure_refused, ensure_reset, ensure_status};
use tunnel_tests::client::{ByteStream, Endpoint, RawRequest, UpgradeClient, request};
use tunnel_tests::env::{TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::gear::Gear;
use tunnel_tests::metrics::meta_page;
use tunnel_tests::process::{Listener, ScratchDir, Server, ServerSetup, next_loopback};
use tunnel_tests::targets::{EchoTarget, Exporter, FakeKubelet};
use tunnel_tests::tools::or_skip;

use super::credentials::disk::SmallDisk;

/// Time limit for the start of processes.
const START: Duration = Duration::from_secs(15);

/// Requests with a secret in every part that may have one.
fn with_secrets(host: &str, path: &str) -> RawRequest {
    RawRequest::new(
        "POST",
        &format!("{path}?token={CANARY}&tailLines=3&command={CANARY}"),
        host,
    )
    .header("Connection", "close")
    .header("User-Agent", "audit-test/1")
    .header("Authorization", &format!("Bearer {CANARY}"))
    .header("Proxy-Authorization", &format!("Basic {CANARY}"))
    .header("Cookie", &format!("session={CANARY}"))
    .body(CANARY)
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_of_every_listener_have_one_event_at_each_end() -> Result<()> {
    let (echo, exporter) = (
        EchoTarget::start().await?,
        Exporter::start("worker-1").await?,
    );
    let (kubelet, tls) = (
        FakeKubelet::plain("worker-1").await?,
        FakeKubelet::start("worker-1").await?,
    );
    let scratch = ScratchDir::new()?;
    let passwords = scratch.file("passwords", format!("ops:{CANARY}\n"))?;
    let env = TestEnv::start_with(|settings| {
        settings.connect_listen = Some("127.0.0.1:0".to_owned());
        settings.connect_auth = Some(passwords.to_string_lossy().into_owned());
        settings.services = service(&echo);
    })
    .await?;
    let _agent = env.agent("worker-1").await?;
    let host = |port: u16| format!("worker-1:{port}");

    let ok = request(
        env.http(),
        &with_secrets(&host(exporter.addr().port()), "/upload"),
    )
    .await?;
    ensure_status(&ok, 200)?;
    let refused = request(env.http(), &with_secrets(&host(22), "/")).await?;
    ensure_refused(&refused, 403, "refused_by_policy")?;
    let unknown = request(env.http(), &with_secrets("nobody:9100", "/")).await?;
    ensure_refused(&unknown, 400, "unknown_node")?;
    let cut = RawRequest::get(&host(exporter.addr().port()), "/reset-mid-body");
    let _cut = request(env.http(), &cut).await;
    let get = RawRequest::get(&host(tls.addr().port()), "/healthz");
    ensure_status(&request(env.https("worker-1")?, &get).await?, 200)?;
    let exec = format!("/exec/default/pod/c?script=reset&tty=1&command={CANARY}");
    let exec = UpgradeClient::spdy(&host(kubelet.addr().port()), &exec);
    let mut exec = exec.connect(env.http()).await?.switched()?;
    exec.send(b"x").await?;
    ensure_reset(&exec.read_to_end().await.ended)?;
    let mut service = ByteStream::connect(Endpoint::plain(env.bound().services[0].1)).await?;
    service.send(CANARY.as_bytes()).await?;
    ensure!(service.receive(CANARY.len()).await? == CANARY.as_bytes());
    service.reset().await?;
    let connect = Endpoint::plain(env.bound().connect.context("no CONNECT listener")?);
    let target = host(echo.addr().port());
    for password in [CANARY, "wrong"] {
        let credentials = base64_of(&format!("ops:{password}"));
        let mut tunnel = ByteStream::connect(connect.clone()).await?;
        let head = RawRequest::new("CONNECT", &target, &target)
            .header("Proxy-Authorization", &format!("Basic {credentials}"));
        tunnel.send(&head.bytes()).await?;
        // A half-close before the answer is one of a caller that is gone.
        tunnel.receive("HTTP/1.1 200".len()).await?;
        let _closed = tunnel.finish().await;
        tunnel.read_to_end().await;
    }

    let events = AuditEvents::of_process()?;
    // Listener, verb, URI, status, end, events at the agent.
    let expected = [
        ("http", "create", "/upload?tailLines=3", Some(200), "ok", 1),
        (
            "http",
            "create",
            "/?tailLines=3",
            Some(403),
            "refused_by_policy",
            0,
        ),
        (
            "http",
            "create",
            "/?tailLines=3",
            Some(400),
            "unknown_node",
            0,
        ),
        ("http", "get", "/reset-mid-body", Some(200), "cut", 1),
        ("https", "get", "/healthz", Some(200), "ok", 1),
        (
            "http",
            "create",
            "/exec/default/pod/c?tty=1",
            Some(101),
            "cut",
            1,
        ),
        ("service", "connect", "", None, "caller_gone", 1),
        ("connect", "connect", &*target, Some(200), "ok", 1),
        (
            "connect",
            "connect",
            &*target,
            Some(407),
            "proxy_auth_required",
            0,
        ),
    ];
    for (listener, verb, uri, status, end, at_agent) in expected {
        let what = format!("the events of {listener} {verb} {uri} {end}");
        let event = eventually(&what, WAIT_TIMEOUT, async || {
            let all = complete(&events);
            let is_meant = |event: &&AuditEvent| {
                event.annotation("listener") == listener
                    && (&*event.verb, &*event.request_uri) == (verb, uri)
                    && (event.response_status.code, event.annotation("end")) == (status, end)
            };
            let meant: Vec<_> = all.iter().filter(is_meant).collect();
            ensure!(meant.len() == 1, "{all:#?}");
            let of_agent = all.iter().filter(|event| {
                event.audit_id == meant[0].audit_id && event.annotation("reporter") == "agent"
            });
            ensure!(of_agent.count() == at_agent, "{all:#?}");
            Ok(meant[0].clone())
        })
        .await;
        let user = event.user.username.as_deref().unwrap_or_default();
        let expected = match (listener, end) {
            ("connect", "ok") => "user:ops",
            (_, _) => "system:anonymous",
        };
        ensure!(user == expected, "{event:?}");
        ensure!(
            event.source_ips.iter().all(|ip| ip.is_loopback()),
            "{event:?}"
        );
        ensure!(event.source_ips.len() == 1, "{event:?}");
        if at_agent > 0 {
            ensure!(event.annotation("rule") == "everything", "{event:?}");
            let operations: BTreeSet<_> = (complete(&events).into_iter())
                .filter(|other| other.audit_id == event.audit_id)
                .map(|other| other.annotation("operation").to_owned())
                .collect();
            let is_one = operations.len() == 1 && !operations.contains("");
            ensure!(is_one, "{operations:?}: {event:?}");
        }
        if let Some(object) = &event.object_ref {
            ensure!(object["name"] == "worker-1", "{event:?}");
            ensure!(object["resource"] == "nodes" && object["subresource"] == "proxy");
        } else {
            ensure!(
                ["unknown_node", "proxy_auth_required"].contains(&end),
                "{event:?}"
            );
        }
    }
    let claimed = complete(&events).into_iter().find(|event| {
        event.annotation("user-claimed-by") == "server"
            && event.user.username.as_deref() == Some("user:ops")
    });
    ensure!(
        claimed.is_some(),
        "the agent names the caller as the server says"
    );
    // Nothing ends without an event.
    eventually("an event for each end", WAIT_TIMEOUT, async || {
        let ended = env.metric("tunnel_server_streams_total").await?;
        let events = complete(&events).into_iter();
        let of_server = events.filter(|event| event.annotation("reporter") == "server");
        ensure!(of_server.count() as u64 == ended, "{ended} streams");
        anyhow::Ok(())
    })
    .await;
    Ok(())
}

/// The log has the level debug, which names each request.
#[tokio::test(flavor = "multi_thread")]
async fn secrets_of_requests_are_in_no_log_and_on_no_page_of_either_process() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let exporter = Exporter::start("worker-1").await?;
    let port = exporter.addr().port();
    let passwords = scratch.file("passwords", format!("ops:{CANARY}\n"))?;
    let address = next_loopback();
    let proxy = SocketAddr::new(address.into(), PROXY_PORT);
    let verbose = ["--log-level", "debug", "--access-log", "all"];
    let setup = ServerSetup::on_address(&scratch.path().join("server"), address).audited();
    let setup = setup.args(&verbose).args(&[
        "--http-proxy-ports",
        &port.to_string(),
        "--proxy-port-listen",
        "off",
        "--connect-listen",
        &proxy.to_string(),
        "--connect-auth",
        &passwords.to_string_lossy(),
    ]);
    let server = setup.start().await?;
    let folder = scratch.path().join("agent");
    let agent = server.agent_setup("worker-1", &folder).await?;
    let agent = agent.audited().args(&verbose).start()?;
    server.wait_until_connected(&["worker-1"]).await;
    let host = format!("worker-1:{port}");
    let read = format!("/metrics?token={CANARY}&command={CANARY}");
    let requests = [
        with_secrets(&host, "/upload"),
        with_secrets("nobody:9100", "/"),
        RawRequest::get(&host, &read).header("Authorization", &format!("Bearer {CANARY}")),
        RawRequest::get(&host, "/reset-mid-body").header("Cookie", CANARY),
    ];
    for asked in &requests {
        let _answered_or_cut = request(server.address(Listener::Http), asked).await;
    }
    let url = format!("http://{host}{read}");
    let with_credentials = format!("http://ops:{CANARY}@{host}/metrics");
    for (password, statuses) in [(CANARY, [200, 400]), ("wrong-4711-4711", [407, 407])] {
        let basic = format!("Basic {}", base64_of(&format!("ops:{password}")));
        for (target, status) in [&url, &with_credentials].into_iter().zip(statuses) {
            let asked = RawRequest::get(&host, target).header("Proxy-Authorization", &basic);
            ensure_status(&request(proxy, &asked).await?, status)?;
        }
    }
    let encoded = base64_of(&format!("ops:{CANARY}"));
    let seen = |text: &str| text.contains(CANARY) || text.contains(&encoded);
    eventually("the events of the last requests", START, async || {
        let (of_server, of_agent) = (complete(server.audit()), complete(agent.audit()));
        ensure!(
            of_server.len() >= 8 && of_agent.len() >= 3,
            "{of_server:#?}"
        );
        Ok(())
    })
    .await;
    for log in [server.log(), agent.log()] {
        ensure!(log.contains("access"), "{log}");
        let line = log.lines().into_iter().find(|line| seen(line));
        ensure!(line.is_none(), "{line:?}");
    }
    for page in ["/metrics", "/nodes", "/readyz?verbose"] {
        let text = meta_page(server.address(Listener::Meta), page).await?;
        ensure!(!seen(&text), "{page}: {text}");
    }
    Ok(())
}

/// Each end writes the event when its stream is a minute old, so the test takes the full gear.
#[tokio::test(flavor = "multi_thread")]
async fn stream_that_is_open_for_a_minute_has_an_event_at_each_end_meanwhile() -> Result<()> {
    if Gear::current() == Gear::Quick {
        return Ok(());
    }
    let echo = EchoTarget::start().await?;
    let env = TestEnv::start_with(|settings| settings.services = service(&echo)).await?;
    let _agent = env.agent("worker-1").await?;
    let events = AuditEvents::of_process()?;
    let mut stream = ByteStream::connect(Endpoint::plain(env.bound().services[0].1)).await?;
    stream.send(b"x").await?;
    ensure!(stream.receive(1).await? == b"x");
    let ids = |stage: &str| {
        let all = events.all().into_iter();
        let of_stage = all.filter(|event| event.stage == stage && event.verb == "connect");
        of_stage.map(|event| event.audit_id).collect::<Vec<_>>()
    };
    eventually(
        "the events of the open stream",
        Duration::from_secs(75),
        async || {
            let started = ids("ResponseStarted");
            ensure!(
                started.len() == 2 && started[0] == started[1],
                "{started:?}"
            );
            Ok(())
        },
    )
    .await;
    ensure!(ids("ResponseComplete").is_empty(), "the stream is open");
    drop(stream);
    eventually("the events of its end", WAIT_TIMEOUT, async || {
        ensure!(ids("ResponseComplete") == ids("ResponseStarted"));
        Ok(())
    })
    .await;
    Ok(())
}

fn service(target: &EchoTarget) -> Vec<RawTcpService> {
    vec![RawTcpService {
        name: "raw".into(),
        listen: "127.0.0.1:0".into(),
        node: "worker-1".into(),
        target: target.addr().port().to_string(),
        protocol: None,
    }]
}

fn complete(events: &AuditEvents) -> Vec<AuditEvent> {
    let events = events.all().into_iter();
    events.filter(AuditEvent::is_complete).collect()
}

fn base64_of(text: &str) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(text)
}

const PROXY_PORT: u16 = 8131;
const PASSWORD: &str = "ops:open-sesame-4711";

/// Sends requests with a password for a port that is not allowed at once, and waits for all refusals. The
/// event of each has about 1 KiB.
async fn refused(server: &Server, requests: usize) -> Result<()> {
    let path = "x".repeat(400);
    let credentials = base64_of(PASSWORD);
    let request = format!(
        "GET http://worker-1:22/{path} HTTP/1.1\r\nHost: worker-1:22\r\nProxy-Authorization: Basic {credentials}\r\n\r\n"
    );
    let proxy = SocketAddr::new(server.address(Listener::Http).ip(), PROXY_PORT);
    answered(proxy, &request, requests, "HTTP/1.1 403").await
}

/// The same without a password, for a node that does not exist.
async fn refused_anonymous(server: &Server, requests: usize) -> Result<()> {
    let request = format!(
        "GET /{} HTTP/1.1\r\nHost: nobody:9100\r\n\r\n",
        "x".repeat(400)
    );
    answered(
        server.address(Listener::Http),
        &request,
        requests,
        "HTTP/1.1 400",
    )
    .await
}

/// Sends a request many times over one connection, and waits for answers that begin with `status`.
async fn answered(to: SocketAddr, request: &str, requests: usize, status: &str) -> Result<()> {
    let mut caller = ByteStream::connect(to).await?;
    let (reader, mut writer) = tokio::io::split(&mut caller);
    let mut answers = BufReader::new(reader).lines();
    let read = async {
        let mut refused = 0;
        while refused < requests {
            let line = answers.next_line().await?.context("the connection ended")?;
            refused += usize::from(line.starts_with(status));
        }
        anyhow::Ok(())
    };
    let requests = request.repeat(requests);
    let written = async { writer.write_all(requests.as_bytes()).await.context("send") };
    tokio::try_join!(read, written)?;
    Ok(())
}

/// Starts a server with this audit log, which knows the node worker-1.
async fn start(scratch: &ScratchDir, audit: &Path, arguments: &[&str]) -> Result<Server> {
    let passwords = scratch.file("passwords", format!("{PASSWORD}\n"))?;
    let address = next_loopback();
    let setup = ServerSetup::on_address(&scratch.path().join("server"), address);
    let setup = setup.args(&["--audit-log", &audit.to_string_lossy()]);
    let proxy = SocketAddr::new(address.into(), PROXY_PORT).to_string();
    let setup = setup.args(&["--connect-listen", &proxy]);
    let setup = setup.args(&["--connect-auth", &passwords.to_string_lossy()]);
    let server = setup.args(arguments).start().await?;
    server.token("worker-1", None).await?;
    Ok(server)
}

/// Returns the events in a file, each of which must be whole.
fn read_events(file: &Path) -> Result<Vec<AuditEvent>> {
    let text = fs::read_to_string(file).with_context(|| file.display().to_string())?;
    let events = text.lines().map(|line| {
        let event: AuditEvent = serde_json::from_str(line).with_context(|| line.to_owned())?;
        ensure!(event.is_complete(), "{event:?}");
        Ok(event)
    });
    events.collect()
}

fn events_in(file: &Path) -> Result<usize> {
    Ok(read_events(file)?.len())
}

const LOST: &str = "tunnel_server_log_lines_dropped_total{kind=\"audit\"}";

const LEFT_OUT: &str = "tunnel_server_log_lines_dropped_total{kind=\"audit_limited\"}";

async fn condition(server: &Server) -> Result<String> {
    meta_page(server.address(Listener::Meta), "/readyz?verbose").await
}

#[tokio::test(flavor = "multi_thread")]
async fn full_disk_stops_no_request_is_a_condition_and_leaves_whole_events() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let folder = scratch.path().join("disk");
    let Some(disk) = or_skip(SmallDisk::new(&folder, 512)) else {
        return Ok(());
    };
    let file = folder.join("audit.log");
    let server = start(&scratch, &file, &[]).await?;
    refused(&server, 20).await?;
    eventually("events", START, async || {
        ensure!(events_in(&file)? == 20);
        Ok(())
    })
    .await;
    let filler = disk.fill();
    refused(&server, 1_000).await?;
    eventually("the condition", START, async || {
        ensure!(server.metric(LOST).await? > 0, "nothing was lost");
        let lost = [
            "[!] audit: audit events are lost",
            "No space left on device",
        ];
        ensure_contains(&condition(&server).await?, &lost)
    })
    .await;
    // A part of an event is in the file until the next write fails.
    let before = eventually("whole events", START, async || events_in(&file)).await;
    ensure!(before < 1_020, "{before} events");
    fs::remove_file(filler)?;
    refused(&server, 10).await?;
    eventually("events after there is space", START, async || {
        let (now, lost) = (events_in(&file)?, server.metric(LOST).await?);
        ensure!(now >= before + 10, "{now} events after {before}");
        ensure!(now as u64 + lost == 1_030, "{now} events, {lost} lost");
        let log = server.log();
        ensure!(log.contains("audit events were lost"), "{log}");
        Ok(())
    })
    .await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn reader_that_stands_still_stops_no_request_and_4_mib_wait_for_it() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let fifo = scratch.path().join("audit.fifo");
    let made = std::process::Command::new("mkfifo").arg(&fifo).status()?;
    ensure!(made.success(), "mkfifo");
    // Open at both ends, since the server's end opens once there is a reader.
    let reader = fs::File::options().read(true).write(true).open(&fifo)?;
    let server = start(&scratch, &fifo, &[]).await?;
    refused(&server, 2_000).await?;
    ensure!(server.metric(LOST).await? == 0, "they wait");
    refused(&server, 4_000).await?;
    let lost = server.metric(LOST).await?;
    ensure!(
        (1_000..4_000).contains(&lost),
        "{lost} of 6,000 events were lost"
    );
    ensure_contains(
        &condition(&server).await?,
        &["[!] audit: audit events were lost"],
    )?;
    let reading = std::thread::spawn(move || {
        let lines = std::io::BufRead::lines(std::io::BufReader::new(reader));
        let lines = lines.take(6_000 - usize::try_from(lost).unwrap_or_default());
        lines.map_while(Result::ok).count()
    });
    let reported = server
        .log()
        .find(|line| line.contains("audit events were lost").then_some(()));
    timeout(scaled(START), reported).await.context("no line")?;
    let events = tokio::task::spawn_blocking(move || reading.join()).await?;
    let events = events.ok().context("the reader panicked")?;
    ensure!(events as u64 + lost == 6_000, "{events} events");
    Ok(())
}

/// Three files of 1 MiB.
const ROTATION: [&str; 4] = [
    "--audit-log-max-size",
    "1MiB",
    "--audit-log-max-backups",
    "2",
];

#[tokio::test(flavor = "multi_thread")]
async fn full_file_begins_again_and_the_last_ones_are_retained() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let file = scratch.path().join("audit.log");
    let server = start(&scratch, &file, &ROTATION).await?;
    let backup = |number: u32| scratch.path().join(format!("audit.log.{number}"));
    for _ in 0..5 {
        refused(&server, 1_000).await?;
    }
    // The last event is written before the process ends.
    server.into_process().stop(START).await?;
    let mut events = 0;
    for file in [file, backup(1), backup(2)] {
        let length = fs::metadata(&file)?.len();
        ensure!(length <= 1 << 20, "{length} bytes");
        events += events_in(&file)?;
    }
    ensure!((1_500..4_000).contains(&events), "{events} events");
    ensure!(!backup(3).exists(), "a third full file");
    Ok(())
}

/// The events of the requests would fill the files twice.
#[tokio::test(flavor = "multi_thread")]
async fn refused_requests_of_unverified_callers_rotate_no_event_of_others_away_and_are_counted()
-> Result<()> {
    const ANONYMOUS: usize = 8_000;
    let scratch = ScratchDir::new()?;
    let file = scratch.path().join("audit.log");
    let server = start(&scratch, &file, &ROTATION).await?;
    refused(&server, 1).await?;
    refused_anonymous(&server, ANONYMOUS).await?;
    refused(&server, 1).await?;
    let left_out = server.metric(LEFT_OUT).await?;
    let conditions = condition(&server).await?;
    ensure!(!conditions.contains("audit"), "{conditions}");
    // The events that count the others are written before the process ends.
    let log = server.log().clone();
    server.into_process().stop(START).await?;
    ensure_contains(
        &log.to_string(),
        &["audit events of refused requests: and "],
    )?;
    let events = read_events(&file)?;
    let of_user = |user: &'static str| {
        let events = events.iter();
        events.filter(move |event| event.user.username.as_deref() == Some(user))
    };
    ensure!(of_user("user:ops").count() == 2, "{events:#?}");
    let (summaries, requests): (Vec<_>, Vec<_>) =
        of_user("system:anonymous").partition(|event| event.verb == "summary");
    // The requests may take more than one minute.
    let most = 20 * summaries.len();
    ensure!((20..=most).contains(&requests.len()), "{events:#?}");
    ensure!(
        requests.len() + usize::try_from(left_out)? == ANONYMOUS,
        "{left_out}"
    );
    let mut counted = 0;
    for event in summaries {
        ensure!(event.source_ips.iter().all(|ip| ip.is_loopback()) && event.source_ips.len() == 1);
        ensure!(event.annotation("end") == "events_left_out", "{event:?}");
        let message = event.response_status.message.as_deref().unwrap_or_default();
        let (number, _) = message.split_once(' ').context("no number")?;
        counted += number.parse::<u64>()?;
    }
    ensure!(counted == left_out, "{counted} of {left_out}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_a_target_has_received_are_recorded_whatever_it_answers() -> Result<()> {
    const REQUESTS: usize = 30;
    let exporter = Exporter::start("worker-1").await?;
    let env = TestEnv::start().await?;
    let _agent = env.agent("worker-1").await?;
    let events = AuditEvents::of_process()?;
    let closed = EchoTarget::start().await?.addr().port();
    for port in [exporter.addr().port(), closed] {
        let get = RawRequest::get(&format!("worker-1:{port}"), "/garbage");
        for _ in 0..REQUESTS {
            ensure_status(&request(env.http(), &get).await?, 502)?;
        }
    }
    let ended = |end: &str| {
        let events = complete(&events).into_iter();
        let of_server = events.filter(|event| event.annotation("reporter") == "server");
        of_server
            .filter(|event| event.annotation("end") == end)
            .count()
    };
    eventually("the events of the garbage", WAIT_TIMEOUT, async || {
        let (received, refused) = (ended("target_bad_response"), ended("target_refused"));
        ensure!(
            received == REQUESTS && (20..REQUESTS).contains(&refused),
            "{received} {refused}"
        );
        anyhow::Ok(())
    })
    .await;
    Ok(())
}
