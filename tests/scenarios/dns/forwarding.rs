//! Forwarding to other resolvers: the queries that they receive, the time limit, and the names that
//! must not leave the server.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_server::store::data_dir::DataDir;
use tunnel_tests::dns::{Behavior, FakeResolver, RecordType, ResponseCode, addresses, query};
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
    ensure!(
        bare < scaled(Duration::from_millis(50)),
        "ndots 0: {bare:?}"
    );

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
        if !client
            .addresses(&format!("worker-1{suffix}"))
            .await?
            .is_empty()
        {
            break;
        }
    }
    let searched = began.elapsed();
    ensure!(tries == 2, "found at try {tries}");
    ensure!(
        searched < scaled(Duration::from_secs(2)),
        "ndots 5: {searched:?}"
    );
    // A stub resolver that tries the host's suffix first asks for this name. The server forwards
    // it.
    let began = Instant::now();
    let answer = client.ask("worker-1.corp.example", RecordType::A).await?;
    let given_up = began.elapsed();
    ensure!(answer.metadata.response_code == ResponseCode::ServFail);
    ensure!(
        given_up >= Duration::from_millis(390),
        "gave up after {given_up:?}"
    );
    ensure!(
        given_up < scaled(Duration::from_millis(800)),
        "{given_up:?}"
    );
    report_figure(&format!(
        "P13: ndots 0 {bare:?}, ndots 5 {searched:?}, SERVFAIL after {given_up:?}"
    ));

    for name in ["worker-9", "localhost", "com", "wpad", "WORKER-9"] {
        let answer = client.ask(name, RecordType::A).await?;
        ensure!(
            answer.metadata.response_code == ResponseCode::NXDomain,
            "{name}: {answer}"
        );
    }
    let answer = client
        .ask("kubernetes.default.svc.cluster.local", RecordType::A)
        .await?;
    ensure!(answer.metadata.response_code == ResponseCode::NXDomain);
    let left = black_hole.asked();
    ensure!(
        left.iter().all(|name| name.contains('.')),
        "single labels left: {left:?}"
    );
    ensure!(
        !left.iter().any(|name| name.ends_with("cluster.local")),
        "{left:?}"
    );
    ensure!(
        left.iter().any(|name| name == "worker-1.corp.example"),
        "{left:?}"
    );
    Ok(())
}

#[tokio::test]
async fn p30_recursion_is_available_exactly_when_forwarding_is_on() -> Result<()> {
    let next = FakeResolver::start(Behavior::Answers(2)).await?;
    let forwarding = env(&[next.address().to_string()]).await?;
    for name in ["example.com", "worker-9"] {
        let answer = client(&forwarding)?.ask(name, RecordType::A).await?;
        ensure!(answer.metadata.recursion_available, "{answer}");
    }
    let answer = client(&forwarding)?
        .ask("Example.COM", RecordType::A)
        .await?;
    ensure!(addresses(&answer).len() == 2);
    ensure!(
        answer.queries[0].name.to_ascii() == "Example.COM.",
        "the client's spelling"
    );

    let alone = env(&no_upstream()).await?;
    for (name, code) in [
        ("example.com", ResponseCode::Refused),
        ("worker-9", ResponseCode::NXDomain),
    ] {
        let answer = client(&alone)?.ask(name, RecordType::A).await?;
        ensure!(!answer.metadata.recursion_available, "{answer}");
        ensure!(answer.metadata.response_code == code, "{answer}");
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
    let answer = client.ask("missing.example.com", RecordType::A).await?;
    ensure!(answer.metadata.response_code == ResponseCode::NXDomain);
    ensure!(good.asked().len() == before);
    good.behave(Behavior::Says(ResponseCode::Refused));
    slow.behave(Behavior::Says(ResponseCode::ServFail));
    let answer = client.ask("example.com", RecordType::A).await?;
    ensure!(
        answer.metadata.response_code == ResponseCode::ServFail
            || answer.metadata.response_code == ResponseCode::Refused
    );
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
    let service = "kubernetes.default.svc.cluster.local";
    let answer = client.ask(service, RecordType::A).await?;
    ensure!(addresses(&answer).len() == 2, "{answer}");
    ensure!(cluster.asked().iter().any(|name| name == service));
    ensure!(addresses(&client.ask("example.com", RecordType::A).await?).len() == 1);
    ensure!(
        !host
            .asked()
            .iter()
            .any(|name| name.ends_with("cluster.local")),
        "{:?}",
        host.asked()
    );
    ensure!(
        cluster
            .asked()
            .iter()
            .all(|name| name.ends_with("cluster.local")),
        "{:?}",
        cluster.asked()
    );
    Ok(())
}

#[tokio::test]
async fn answers_that_do_not_fit_are_cut_over_udp_and_whole_over_tcp() -> Result<()> {
    let next = FakeResolver::start(Behavior::Answers(200)).await?;
    let env = env(&[next.address().to_string()]).await?;
    let client = client(&env)?;
    let answer = client.ask("example.com", RecordType::A).await?;
    ensure!(
        answer.metadata.truncation && answer.answers.is_empty(),
        "{answer}"
    );
    let whole = client
        .over_tcp(&[query("example.com", RecordType::A)?])
        .await?;
    ensure!(addresses(&whole[0]).len() == 200);
    ensure!(!whole[0].metadata.truncation);
    next.behave(Behavior::Answers(40));
    let answer = client.ask("example.com", RecordType::A).await?;
    ensure!(
        answer.metadata.truncation,
        "40 addresses fit 1232 bytes, but not 512"
    );
    Ok(())
}

#[tokio::test]
async fn a_resolver_that_sends_queries_back_stops_the_start() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let data = DataDir::open(&scratch.path().join("data"))?;
    let between = FakeResolver::start(Behavior::Silent).await?;
    let sockets = BareDns::on_loopback().await?;
    between.behave(Behavior::Asks(sockets.address()?));
    let shutdown = Shutdown::new();
    let (dns, _records) = sockets.start(&data, between.address(), &shutdown)?;
    let began = Instant::now();
    let error = dns
        .start_loop_detection(&shutdown)
        .await
        .err()
        .context("no loop was found")?;
    let error = error.to_string();
    ensure!(error.contains("forwards queries back"), "{error}");
    ensure!(error.contains(&between.address().to_string()), "{error}");
    ensure!(error.contains("--dns-upstream"), "{error}");
    ensure!(began.elapsed() < scaled(Duration::from_secs(3)));
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
    let error = direct
        .err()
        .map(|error| format!("{error:#}"))
        .unwrap_or_default();
    ensure!(error.contains("is this server itself"), "{error}");
    Ok(())
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
    let answer = client.ask("one-more.example.com", RecordType::A).await?;
    ensure!(answer.metadata.response_code == ResponseCode::ServFail);
    ensure!(
        began.elapsed() < scaled(Duration::from_secs(1)),
        "{:?}",
        began.elapsed()
    );
    ensure!(
        !black_hole
            .asked()
            .iter()
            .any(|name| name.starts_with("one-more"))
    );
    ensure!(!client.addresses("worker-1").await?.is_empty());

    let other = client.from_source("127.0.0.2".parse()?);
    under_way.spawn(async move { other.ask("other.example.com", RecordType::A).await });
    eventually("the query of another source", WAIT_TIMEOUT, async || {
        let asked = black_hole.asked();
        asked
            .iter()
            .any(|name| name.starts_with("other"))
            .then_some(())
    })
    .await;
    let metrics = tunnel_tests::client::request(
        tunnel_tests::client::Endpoint::plain(env.bound().meta),
        &tunnel_tests::client::RawRequest::get("meta", "/metrics"),
    )
    .await?;
    let text = metrics.text();
    for line in [
        "tunnel_server_dns_queries_total{transport=\"udp\",outcome=\"busy\"} 1",
        "tunnel_server_dns_records 1",
    ] {
        ensure!(text.contains(line), "{line} is missing:\n{text}");
    }
    Ok(())
}
