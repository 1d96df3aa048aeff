//! Forwarding to other resolvers: the queries that they receive, the time limit, and the names that
//! must not leave the server.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tunnel_process::shutdown::Shutdown;
use tunnel_store::data_dir::DataDir;
use tunnel_tests::checks::ensure_contains;
use tunnel_tests::dns::{
    Behavior, DnsClient, FakeResolver, Message, RecordType, ResponseCode, addresses, query,
};
use tunnel_tests::env::{TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::process::ScratchDir;

use super::{BareDns, client, client_that_knows, env, no_upstream, report_figure, with_dns};

#[tokio::test]
async fn p13_with_a_black_hole_upstream_nodes_are_found_and_single_labels_stay() -> Result<()> {
    let black_hole = FakeResolver::start(Behavior::Silent).await?;
    let env = env(&[black_hole.address().to_string()]).await?;
    let client = client_that_knows(&env, "worker-1").await?;

    let began = Instant::now();
    ensure!(!client.addresses("worker-1").await?.is_empty());
    let bare = began.elapsed();
    ensure!(bare < scaled(Duration::from_millis(50)), "{bare:?}");

    // The queries of a stub resolver with ndots 5, the guide's three suffixes, and one suffix of
    // the host's network.
    let began = Instant::now();
    let suffixes = [
        ".kube-system.svc.cluster.local",
        ".svc.cluster.local",
        ".cluster.local",
        ".corp.example",
        "",
    ];
    let mut tries = 0;
    for suffix in suffixes {
        tries += 1;
        let name = format!("worker-1{suffix}");
        if !client.addresses(&name).await?.is_empty() {
            break;
        }
    }
    let searched = began.elapsed();
    ensure!(tries == 2, "found at try {tries}");
    ensure!(searched < scaled(Duration::from_secs(2)), "{searched:?}");
    // A stub resolver that tries the host's suffix first asks for this name. The server forwards
    // it.
    let began = Instant::now();
    has_code(&client, "worker-1.corp.example", ResponseCode::ServFail).await?;
    let given_up = began.elapsed();
    ensure!(given_up >= Duration::from_millis(390), "{given_up:?}");
    ensure!(given_up < scaled(Duration::from_millis(800)));
    report_figure(&format!(
        "P13: ndots 0 {bare:?}, ndots 5 {searched:?}, SERVFAIL after {given_up:?}"
    ));

    for name in ["worker-9", "localhost", "com", "wpad", "WORKER-9", SERVICE] {
        has_code(&client, name, ResponseCode::NXDomain).await?;
    }
    ensure_left(&black_hole.asked(), "worker-1.corp.example")
}

/// Checks the names that left for another resolver: `expected`, no single label, and no name of the
/// cluster.
pub(super) fn ensure_left(left: &[String], expected: &str) -> Result<()> {
    for name in left {
        ensure!(name.contains('.'), "a single label left: {left:?}");
        ensure!(!name.ends_with("cluster.local"), "{left:?}");
    }
    ensure!(left.iter().any(|name| name == expected), "{left:?}");
    Ok(())
}

/// Asks for an address and checks the code of the answer.
async fn has_code(client: &DnsClient, name: &str, code: ResponseCode) -> Result<Message> {
    let answer = client.ask(name, RecordType::A).await?;
    ensure!(answer.metadata.response_code == code, "{name}: {answer}");
    Ok(answer)
}

/// A name of the cluster.
const SERVICE: &str = "kubernetes.default.svc.cluster.local";

#[tokio::test]
async fn p30_recursion_is_available_exactly_when_forwarding_is_on() -> Result<()> {
    let next = FakeResolver::start(Behavior::Answers(2)).await?;
    let forwarding = env(&[next.address().to_string()]).await?;
    for name in ["example.com", "worker-9"] {
        let answer = client(&forwarding)?.ask(name, RecordType::A).await?;
        ensure!(answer.metadata.recursion_available, "{answer}");
    }
    let caller = client(&forwarding)?;
    let answer = caller.ask("Example.COM", RecordType::A).await?;
    ensure!(addresses(&answer).len() == 2);
    ensure!(answer.queries[0].name.to_ascii() == "Example.COM.");

    let alone = env(&no_upstream()).await?;
    for (name, code) in [
        ("example.com", ResponseCode::Refused),
        ("worker-9", ResponseCode::NXDomain),
    ] {
        let answer = has_code(&client(&alone)?, name, code).await?;
        ensure!(!answer.metadata.recursion_available, "{answer}");
    }
    Ok(())
}

#[tokio::test]
async fn the_next_resolver_is_asked_in_addition_to_a_slow_one_and_instead_of_a_failing_one()
-> Result<()> {
    let slow = FakeResolver::start(Behavior::Silent).await?;
    let good = FakeResolver::start(Behavior::Answers(1)).await?;
    let env = env(&[slow.address().to_string(), good.address().to_string()]).await?;
    let client = client(&env)?;
    for behavior in [
        Behavior::Silent,
        Behavior::Says(ResponseCode::ServFail),
        Behavior::Says(ResponseCode::Refused),
    ] {
        slow.behave(behavior);
        let answer = client.ask("example.com", RecordType::A).await?;
        ensure!(addresses(&answer).len() == 1, "{behavior:?}: {answer}");
    }
    // A definite answer is not asked for again at the next resolver.
    slow.behave(Behavior::Says(ResponseCode::NXDomain));
    let before = good.asked().len();
    has_code(&client, "missing.example.com", ResponseCode::NXDomain).await?;
    ensure!(good.asked().len() == before);
    good.behave(Behavior::Says(ResponseCode::Refused));
    slow.behave(Behavior::Says(ResponseCode::ServFail));
    let answer = client.ask("example.com", RecordType::A).await?;
    let failed = [ResponseCode::ServFail, ResponseCode::Refused];
    ensure!(failed.contains(&answer.metadata.response_code), "{answer}");
    Ok(())
}

#[tokio::test]
async fn the_cluster_resolver_alone_receives_the_clusters_names() -> Result<()> {
    let host = FakeResolver::start(Behavior::Answers(1)).await?;
    let cluster = FakeResolver::start(Behavior::Answers(2)).await?;
    let upstreams = [
        host.address().to_string(),
        format!("cluster.local={}", cluster.address()),
    ];
    let env = env(&upstreams).await?;
    let client = client(&env)?;
    let answer = client.ask(SERVICE, RecordType::A).await?;
    ensure!(addresses(&answer).len() == 2, "{answer}");
    ensure!(addresses(&client.ask("example.com", RecordType::A).await?).len() == 1);
    ensure_left(&host.asked(), "example.com")?;
    let asked = cluster.asked();
    ensure!(asked.iter().any(|name| name == SERVICE), "{asked:?}");
    let is_clusters = |name: &String| name.ends_with("cluster.local");
    ensure!(asked.iter().all(is_clusters), "{asked:?}");
    Ok(())
}

#[tokio::test]
async fn answers_that_do_not_fit_are_cut_over_udp_and_whole_over_tcp() -> Result<()> {
    let next = FakeResolver::start(Behavior::Answers(200)).await?;
    let env = env(&[next.address().to_string()]).await?;
    let client = client(&env)?;
    let answer = client.ask("example.com", RecordType::A).await?;
    ensure!(answer.metadata.truncation, "{answer}");
    ensure!(answer.answers.is_empty(), "{answer}");
    let asked = [query("example.com", RecordType::A)?];
    let whole = client.over_tcp(&asked).await?;
    ensure!(addresses(&whole[0]).len() == 200);
    ensure!(!whole[0].metadata.truncation);
    next.behave(Behavior::Answers(40));
    let answer = client.ask("example.com", RecordType::A).await?;
    // 40 addresses fit 1232 bytes, but not 512.
    ensure!(answer.metadata.truncation, "{answer}");
    Ok(())
}

#[tokio::test]
async fn a_resolver_that_sends_queries_back_is_a_condition_and_is_not_asked() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let data = DataDir::open(&scratch.path().join("data"))?;
    let between = FakeResolver::start(Behavior::Silent).await?;
    let sockets = BareDns::on_loopback().await?;
    let client = DnsClient::new(sockets.address()?);
    between.behave(Behavior::Asks(sockets.address()?));
    let shutdown = Shutdown::new();
    let (dns, _records) = sockets.start(&data, between.address(), &shutdown)?;
    let began = Instant::now();
    let (report, reported) = std::sync::mpsc::channel();
    let send = move |lines: Vec<String>| drop(report.send(lines.join("\n")));
    dns.follow_resolvers(send, &shutdown).await;
    let resolver = between.address().to_string();
    let hints = ["forwards queries back", &resolver, "--dns-upstream"];
    ensure_contains(&reported.try_recv()?, &hints)?;
    ensure!(began.elapsed() < scaled(Duration::from_secs(3)));
    let asked = between.asked().len();
    has_code(&client, "example.com", ResponseCode::ServFail).await?;
    ensure!(between.asked().len() == asked, "{:?}", between.asked());
    shutdown.finish().await;
    Ok(())
}

#[tokio::test]
async fn a_server_named_as_its_own_resolver_is_refused_before_anything_is_bound() -> Result<()> {
    let direct = TestEnv::start_with(|settings| {
        with_dns(settings, &["127.0.0.1:5399".into()]);
        settings.dns_listen = Some("127.0.0.1:5399".into());
    })
    .await;
    let error = direct.err().context("started")?;
    ensure_contains(&format!("{error:#}"), &["is this server itself"])
}

#[tokio::test]
async fn too_many_forwarded_queries_of_one_source_fail_at_once_and_others_are_still_asked()
-> Result<()> {
    let black_hole = FakeResolver::start(Behavior::Silent).await?;
    let env = TestEnv::start_with(|settings| {
        with_dns(settings, &[black_hole.address().to_string()]);
        settings.limits = TestEnv::limits("{ dnsForwards: 8, dnsForwardBudget: 5s }");
    })
    .await?;
    env.nodes().record(&"worker-1".parse()?, &[]);
    let client = client(&env)?;
    let mut under_way = tokio::task::JoinSet::new();
    for number in 0..4 {
        under_way.spawn(async move {
            client
                .ask(&format!("n{number}.example.com"), RecordType::A)
                .await
        });
    }
    eventually("four forwarded queries", WAIT_TIMEOUT, async || {
        let mut asked = black_hole.asked();
        asked.retain(|name| name.ends_with("example.com"));
        asked.sort();
        asked.dedup();
        (asked.len() == 4).then_some(())
    })
    .await;
    let began = Instant::now();
    has_code(&client, "one-more.example.com", ResponseCode::ServFail).await?;
    ensure!(began.elapsed() < scaled(Duration::from_secs(1)));
    let was_asked = |start: &str| {
        let asked = black_hole.asked();
        asked.iter().any(|name| name.starts_with(start))
    };
    ensure!(!was_asked("one-more"));
    ensure!(!client.addresses("worker-1").await?.is_empty());

    let other = client.from_source("127.0.0.2".parse()?);
    under_way.spawn(async move { other.ask("other.example.com", RecordType::A).await });
    eventually("the query of another source", WAIT_TIMEOUT, async || {
        was_asked("other").then_some(())
    })
    .await;
    let busy = "tunnel_server_dns_queries_total{transport=\"udp\",outcome=\"busy\"}";
    ensure!(env.metric(busy).await? == 1);
    ensure!(env.metric("tunnel_server_dns_records").await? == 1);
    Ok(())
}
