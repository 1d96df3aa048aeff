//! The answers of the DNS, and how soon it knows a new node.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use tunnel_tests::dns::{RecordType, ResponseCode, addresses, query};
use tunnel_tests::env::WAIT_TIMEOUT;
use tunnel_tests::eventually::scaled;
use tunnel_tests::stats::{millis, percentile};

use super::{TUNNEL, client, client_that_knows, env, no_upstream, report_figure, with_dns};
use tunnel_tests::dns::{Behavior, FakeResolver};
use tunnel_tests::env::TestEnv;

enum Expected {
    Address(&'static str),
    /// NOERROR without an answer.
    Empty,
    /// The answer of the next plugin.
    FallsThrough,
}

/// Queries, and the results of the hosts plugin with the guide's block `hosts { 10.106.217.16
/// worker-1; 192.168.33.220 master-1; fd00::6 six; fallthrough }` before a forward.
const DIFFERENTIAL: [(&str, RecordType, Expected); 10] = [
    ("worker-1", RecordType::A, Expected::Address(TUNNEL)),
    ("WORKER-1", RecordType::A, Expected::Address(TUNNEL)),
    ("master-1", RecordType::A, Expected::Address(MASTER)),
    ("worker-1", RecordType::AAAA, Expected::Empty),
    ("six", RecordType::AAAA, Expected::Address("fd00::6")),
    ("six", RecordType::A, Expected::Empty),
    ("worker-1", RecordType::TXT, Expected::Empty),
    ("worker-1", RecordType::MX, Expected::Empty),
    ("example.com", RecordType::A, Expected::FallsThrough),
    (REVERSE, RecordType::PTR, Expected::FallsThrough),
];

const MASTER: &str = "192.168.33.220";
const REVERSE: &str = "16.217.106.10.in-addr.arpa";

#[tokio::test]
async fn dns_11_ten_queries_are_answered_as_the_hosts_plugin_does() -> Result<()> {
    let next = FakeResolver::start(Behavior::Answers(1)).await?;
    let env = TestEnv::start_with(|settings| {
        with_dns(settings, &[next.address().to_string()]);
        let records = "[{ name: master-1, addresses: [192.168.33.220] }, { name: six, addresses: ['fd00::6'] }]";
        settings.dns_records = serde_saphyr::from_str(records).unwrap_or_default();
    })
    .await?;
    let client = client_that_knows(&env, "worker-1").await?;
    for (name, kind, expected) in DIFFERENTIAL {
        let answer = client.ask(name, kind).await?;
        let code = answer.metadata.response_code;
        ensure!(code == ResponseCode::NoError, "{name} {kind}: {code}");
        let found: Vec<String> = addresses(&answer).iter().map(ToString::to_string).collect();
        match expected {
            Expected::Address(address) => {
                ensure!(found == [address], "{name} {kind}: {answer}");
                ensure!(answer.metadata.authoritative, "{name} {kind}: {answer}");
            }
            Expected::Empty => ensure!(answer.answers.is_empty(), "{name} {kind}: {answer}"),
            Expected::FallsThrough => {
                let is_passed_on = next.asked().iter().any(|asked| asked == name);
                ensure!(is_passed_on, "{name}: not passed on");
                ensure!(found == ["10.1.0.0"], "{name} {kind}: {answer}");
            }
        }
    }
    // The DNS forwards no single label. A reverse query is forwarded, because the generated stanza
    // of the hosts plugin has `no_reverse`. Otherwise the plugin would list the edge nodes.
    let asked = next.asked();
    ensure!(asked.iter().all(|name| name.contains('.')), "{asked:?}");
    Ok(())
}

#[tokio::test]
async fn p12_a_new_node_is_answered_and_a_forgotten_one_is_not_within_a_second() -> Result<()> {
    let env = env(&no_upstream()).await?;
    let client = client(&env)?;
    let mut delays = Vec::new();
    for number in 0..200 {
        let name = format!("late-{number}");
        ensure!(client.addresses(&name).await?.is_empty(), "{name}");
        let began = Instant::now();
        env.nodes().record(&name.parse()?, &[]);
        while client.addresses(&name).await?.is_empty() {
            ensure!(began.elapsed() < scaled(WAIT_TIMEOUT), "{name}");
        }
        delays.push(began.elapsed());
    }
    delays.sort_unstable();
    let p99 = percentile(&delays, 0.99);
    let [p50, most] = [percentile(&delays, 0.5), p99].map(millis);
    report_figure(&format!("P12: p50 {p50} ms, p99 {most} ms of 200"));
    ensure!(p99 < scaled(Duration::from_secs(1)), "p99 {p99:?}");
    Ok(())
}

#[tokio::test]
async fn tcp_answers_several_queries_of_one_connection() -> Result<()> {
    let env = env(&no_upstream()).await?;
    let client = client_that_knows(&env, "worker-1").await?;
    let queries = [
        query("worker-1", RecordType::A)?,
        query("worker-9", RecordType::A)?,
        query("worker-1.nodes.tunnel.internal", RecordType::A)?,
    ];
    let answers = client.over_tcp(&queries).await?;
    ensure!(answers.len() == 3, "{answers:?}");
    let (known, unknown) = (ResponseCode::NoError, ResponseCode::NXDomain);
    for ((query, answer), code) in queries.iter().zip(&answers).zip([known, unknown, known]) {
        ensure!(query.metadata.id == answer.metadata.id);
        ensure!(answer.metadata.response_code == code, "{answer}");
    }
    ensure!(addresses(&answers[2]).len() == 1);
    Ok(())
}
