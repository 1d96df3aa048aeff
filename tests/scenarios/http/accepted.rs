//! What clouds call their nodes and what clients send, of which the server takes as much as the
//! programs on both sides of it: node names (Kubernetes), heads and hosts (T08; RFC 9110 and 9112, Go's
//! clients and servers).

use std::net::IpAddr;

use anyhow::{Result, ensure};
use tunnel_tests::client::{Endpoint, RawRequest, request};
use tunnel_tests::env::TestEnv;
use tunnel_tests::targets::RecordingTarget;

use super::table::run_cases;

/// Refused node names, with the reason.
const NO_NAMES: &[(&str, &str)] = &[
    ("edge_gw_01", "; edge-gw-01 would do"),
    ("Edge GW 01", "; edge-gw-01 would do"),
    ("b\u{fc}ro-1", "; b-ro-1 would do"),
    ("-a", "; a would do"),
    ("a..b", "; a.b would do"),
    ("fe80::1", "; fe80--1 would do"),
    ("*", "not a DNS subdomain"),
    ("", "empty"),
];

/// Returns node names, each with the spelling in Host.
fn names() -> Vec<(String, String)> {
    let same = |name: &str| (name.to_owned(), name.to_owned());
    let long = |bytes| same(&"x".repeat(bytes));
    vec![
        same("1"),
        same("9-a"),
        same("a.b.c.d"),
        same("172.31.42.71"),
        same("cn-region.192.168.33.221"),
        same("ip-10-0-0-1.region.compute.internal"),
        same("0x7f.1"),
        ("worker-up".to_owned(), "WORKER-Up".to_owned()),
        ("worker-dot".to_owned(), "worker-dot.".to_owned()),
        long(63),
        // The longest host name of Linux.
        long(64),
        same(&format!("{}.site.example", "y".repeat(100))),
        long(253),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_may_have_every_name_that_kubernetes_allows() -> Result<()> {
    let env = TestEnv::start().await?;
    let target = RecordingTarget::start("own").await?;
    let port = target.addr().port();
    for (number, (name, host)) in names().iter().enumerate() {
        let config = env.agent_config_with(name, |settings| {
            // A file system has shorter names.
            settings.data_dir = Some(env.path().join(format!("node-{number}")));
        })?;
        let agent = tunnel_tests::env::Agent::start(config).await?;
        env.connected(name).await;
        let by_host = RawRequest::get(&format!("{host}:{port}"), "/");
        let selected =
            RawRequest::get(&format!("192.0.2.1:{port}"), "/").header("X-Tunnel-Proxy-Host", host);
        for asked in [by_host, selected] {
            let reply = request(env.http(), &asked).await?;
            ensure!(reply.status == 200, "{name}: {}", reply.text());
        }
        agent.stop().await?;
    }
    let too_long = "x".repeat(254);
    for (name, reason) in NO_NAMES.iter().chain([&(&*too_long, "too long")]) {
        let error = env.token(name, &[]).err().map(|error| error.to_string());
        let error = error.unwrap_or_default();
        ensure!(
            error.ends_with(reason) || error.contains(reason),
            "{name}: {error:?}"
        );
    }
    Ok(())
}

/// A request, and what the server makes of it.
struct Row {
    name: &'static str,
    asked: RawRequest,
    /// Sent to the CONNECT listener.
    to_proxy: bool,
    status: u16,
    /// A part of the text of a refusal.
    text: &'static str,
}

impl Row {
    fn new(name: &'static str, asked: RawRequest, status: u16, text: &'static str) -> Self {
        Self {
            name,
            asked,
            to_proxy: false,
            status,
            text,
        }
    }

    fn passes(name: &'static str, asked: RawRequest) -> Self {
        Self::new(name, asked, 200, "")
    }

    fn through_proxy(self) -> Self {
        Self {
            to_proxy: true,
            ..self
        }
    }
}

/// Rows about Host and the request target. The node worker-1 has the addresses of [`ADDRESSES`].
fn hosts(port: u16) -> Vec<Row> {
    let host = format!("worker-1:{port}");
    let at = |host: &str| RawRequest::get(host, "/");
    let with_port = |host: &str| at(&format!("{host}:{port}"));
    let url =
        |url: &str, host: &str| RawRequest::new("GET", url, host).header("Connection", "close");
    let dest = |host: &str| at(host).header("X-Tunnel-Proxy-Dest", &format!("worker-1:{port}"));
    let mut rows = vec![
        Row::passes("name and port", with_port("worker-1")),
        Row::passes("trailing dot", with_port("worker-1.")),
        Row::passes("IPv4 address", with_port("192.0.2.7")),
        Row::passes("IPv6 literal", with_port("[2001:db8::7]")),
        Row::passes("long IPv6 literal", with_port("[2001:DB8:0:0:0:0:0:7]")),
        Row::passes("mapped IPv4 address", with_port("[::ffff:192.0.2.7]")),
        Row::passes("empty port, port selected", dest("worker-1:")),
        Row::passes("no port, port selected", dest("worker-1")),
        Row::passes("absolute form", url(&format!("http://{host}/a?b"), &host)),
        Row::passes(
            "absolute form, other Host",
            url(&format!("http://{host}/"), "nobody"),
        ),
        Row::passes(
            "absolute form, empty Host",
            url(&format!("http://{host}/"), ""),
        ),
        Row::passes(
            "absolute form in capitals",
            url(&format!("HTTP://WORKER-1:{port}/"), &host),
        ),
        Row::new("empty port is 80", at("worker-1:"), 403, "80"),
        Row::new(
            "empty port of an IPv6 literal",
            at("[2001:db8::7]:"),
            403,
            "80",
        ),
        Row::new(
            "absolute form with an empty port",
            url("http://worker-1:/", "x"),
            403,
            "80",
        ),
        Row::new(
            "https in the absolute form",
            url(&format!("https://{host}/"), &host),
            400,
            "request target",
        ),
        Row::new("IPv6 zone", with_port("[fe80::1%25eth0]"), 400, "Host"),
        Row::new("IPv6 without brackets", at("2001:db8::7"), 400, "Host"),
        Row::new("port 0", at("worker-1:0"), 400, "Host"),
        Row::new("port 65536", at("worker-1:65536"), 400, "Host"),
        Row::new("user in Host", at(&format!("user@{host}")), 400, "Host"),
        Row::new("underscore in Host", at("worker_1:9100"), 400, "Host"),
        Row::new(
            "two Hosts",
            at(&host).header("Host", &host),
            400,
            "more than once",
        ),
    ];
    let refused = |target: &str| RawRequest::new("CONNECT", target, target);
    let connect = |target: &str| refused(target).followed_by(at("x").bytes());
    rows.extend(
        [
            Row::passes("CONNECT", connect(&host)),
            Row::passes(
                "CONNECT with a length of 0",
                connect(&host).header("Content-Length", "0"),
            ),
            Row::passes("CONNECT in capitals", connect(&format!("WORKER-1.:{port}"))),
            Row::passes(
                "CONNECT to an IPv6 literal",
                connect(&format!("[2001:db8::7]:{port}")),
            ),
            Row::passes("URL to a proxy", url(&format!("http://{host}/"), &host)),
            Row::new(
                "CONNECT with a body",
                refused(&host).header("Content-Length", "1"),
                400,
                "",
            ),
            Row::new("CONNECT with an empty port", refused("worker-1:"), 400, ""),
        ]
        .map(Row::through_proxy),
    );
    rows
}

/// Rows about the form and the size of a head.
fn heads(port: u16) -> Vec<Row> {
    let host = format!("worker-1:{port}");
    let get = RawRequest::get(&host, "/");
    let raw = |text: &str| RawRequest::raw(text.replace("@host", &host));
    let fields = |count| {
        // Two fields, Host and Connection, are already present.
        (2..count).fold(get.clone(), |head, number| {
            head.header(&format!("X-{number}"), "y")
        })
    };
    let sized = |bytes: usize| {
        let empty = get.clone().header("Cookie", "").bytes().len();
        get.clone().header("Cookie", &"y".repeat(bytes - empty))
    };
    let target = |bytes: usize| RawRequest::get(&host, &format!("/{}", "x".repeat(bytes - 1)));
    let offer = |protocol: &str| {
        RawRequest::new("GET", "/", &host)
            .header("Connection", "Upgrade, HTTP2-Settings")
            .header("Upgrade", protocol)
            .header("HTTP2-Settings", "AAMAAABkAAQAoAAAAAIAAAAA")
    };
    let many = "the request head has more than 1024 fields";
    let large = "larger than 1048576 bytes (limits.requestHeadBytes)";
    let long = "longer than 65000 bytes; a long script for kubectl exec";
    vec![
        Row::passes("HTTP/1.0", raw("GET / HTTP/1.0\r\nHost: @host\r\n\r\n")),
        Row::passes(
            "empty lines before",
            raw("\r\n\r\nGET / HTTP/1.1\r\nHost: @host\r\nConnection: close\r\n\r\n"),
        ),
        Row::passes(
            "space around values",
            raw("GET / HTTP/1.1\r\nHost:\t @host \t\r\nConnection:close\r\n\r\n"),
        ),
        Row::passes("empty value", get.clone().header("X", "")),
        Row::passes(
            "bytes above ASCII in a value",
            raw("GET / HTTP/1.1\r\nHost: @host\r\nX: \u{fc}\r\nConnection: close\r\n\r\n"),
        ),
        Row::passes("offer of h2c", offer("h2c")),
        Row::passes("offer of h2c in capitals", offer("H2C")),
        Row::passes("100 fields", fields(100)),
        Row::passes("101 fields", fields(101)),
        Row::passes("1,000 fields", fields(1000)),
        Row::passes("1,024 fields", fields(1024)),
        Row::new("1,025 fields", fields(1025), 431, many),
        Row::new("10,000 fields", fields(10_000), 431, many),
        Row::passes("64 KiB less a byte", sized((64 << 10) - 1)),
        Row::passes("64 KiB", sized(64 << 10)),
        Row::passes("64 KiB and a byte", sized((64 << 10) + 1)),
        Row::passes("1 MiB less a byte", sized((1 << 20) - 1)),
        Row::passes("1 MiB", sized(1 << 20)),
        Row::new("1 MiB and a byte", sized((1 << 20) + 1), 431, large),
        Row::passes("target of 8,193 bytes", target(8193)),
        Row::passes("target of 65,000 bytes", target(65_000)),
        Row::new("target of 65,001 bytes", target(65_001), 414, long),
        Row::new("target of 65,535 bytes", target(65_535), 414, long),
        Row::new("target of 500,000 bytes", target(500_000), 414, long),
        Row::new("no HTTP", RawRequest::raw("GARBAGE\r\n\r\n"), 400, ""),
    ]
}

const ADDRESSES: [&str; 2] = ["192.0.2.7", "2001:db8::7"];

#[tokio::test(flavor = "multi_thread")]
async fn t08_heads_and_hosts_are_taken_as_the_programs_on_both_sides_take_them() -> Result<()> {
    let connect = |settings: &mut tunnel_server::config::RawConfig| {
        settings.connect_listen = Some("127.0.0.1:0".to_owned());
    };
    let env = TestEnv::start_with(connect).await?;
    let addresses = ADDRESSES.map(|address| address.parse::<IpAddr>());
    let addresses: Vec<_> = addresses.into_iter().collect::<Result<_, _>>()?;
    let _agent = env.agent("worker-1").await?;
    env.token("worker-1", &addresses)?;
    let target = RecordingTarget::start("own").await?;
    let port = target.addr().port();
    let rows: Vec<_> = hosts(port).into_iter().chain(heads(port)).collect();
    let proxy = env.bound().connect.map(Endpoint::plain);
    run_cases(
        &rows,
        |row| row.name,
        async |row| {
            let endpoint = match &proxy {
                Some(proxy) if row.to_proxy => proxy.clone(),
                Some(_) | None => env.http(),
            };
            let reply = request(endpoint, &row.asked).await?;
            let text = reply.text();
            let begin = text.get(..200).unwrap_or(&text);
            ensure!(reply.status == row.status, "{} {begin}", reply.status);
            ensure!(text.contains(row.text), "{begin}");
            let code = reply.header("x-tunnel-error");
            ensure!(row.text.is_empty() || code.is_some(), "no code");
            ensure!(reply.status != 200 || code.is_none(), "{code:?}");
            Ok(())
        },
    )
    .await;
    for request in target.requests() {
        ensure!(request.target.starts_with('/'), "{}", request.target);
        for dropped in ["upgrade", "http2-settings"] {
            ensure!(request.field(dropped).is_none(), "{dropped} is passed on");
        }
    }
    Ok(())
}
