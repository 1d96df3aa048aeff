//! P4b: after a cold start the DNS answers names from disk, before it receives the nodes.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use tunnel_dns::{Addresses, Node, NodeLocation, RecordSet, Records};
use tunnel_process::shutdown::Shutdown;
use tunnel_store::data_dir::DataDir;
use tunnel_tests::dns::{Behavior, DnsClient, FakeResolver};
use tunnel_tests::env::WAIT_TIMEOUT;
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::process::{Listener, ScratchDir, ServerSetup, own_loopback, stored_text};

use super::{BareDns, TUNNEL, report_figure};

/// Starts a DNS server as a cluster's server does, with records that have not been updated yet.
async fn unfed(
    data: &DataDir,
    resolver: SocketAddr,
    shutdown: &Shutdown,
) -> Result<(DnsClient, Records)> {
    let bare = BareDns::on_loopback().await?;
    let client = DnsClient::new(bare.address()?);
    let (dns, records) = bare.start(data, resolver, shutdown)?;
    dns.follow_resolvers(drop, shutdown).await;
    Ok((client, records))
}

#[tokio::test]
async fn p4b_the_last_records_are_answered_while_no_feed_arrives() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let data = DataDir::open(&scratch.path().join("data"))?;
    // The upstream resolver does not answer, like the API server.
    let black_hole = FakeResolver::start(Behavior::Silent).await?;
    let tunnel = Addresses::first_of([TUNNEL.parse()?]);
    let edge = |name: &str| -> Result<Node> {
        Ok(Node {
            name: name.parse()?,
            hostname: None,
            location: NodeLocation::Edge,
        })
    };

    let before = Shutdown::new();
    let (client, records) = unfed(&data, black_hole.address(), &before).await?;
    ensure!(client.addresses("worker-1").await?.is_empty());
    let both = [edge("worker-1")?, edge("worker-2")?];
    records.replace(RecordSet::new(&both, tunnel));
    eventually("the records on disk", WAIT_TIMEOUT, async || {
        let stored = stored_text(data.path())?;
        ensure!(stored.contains("worker-2"));
        anyhow::Ok(())
    })
    .await;
    // Stops without a drain, like a power failure.
    before.stop().cancel();
    before.finish().await;

    let after = Shutdown::new();
    let began = Instant::now();
    let (client, records) = unfed(&data, black_hole.address(), &after).await?;
    let loops_looked_for = began.elapsed();
    let asked = Instant::now();
    ensure!(client.addresses("worker-1").await? == [TUNNEL.parse::<IpAddr>()?]);
    let answered = asked.elapsed();
    report_figure(&format!(
        "P4b: answered {answered:?} after asking; loops were looked for during {loops_looked_for:?}"
    ));
    ensure!(answered < scaled(Duration::from_secs(1)), "{answered:?}");

    // The records of the first update replace those from disk.
    records.replace(RecordSet::new(&[edge("worker-2")?], tunnel));
    ensure!(client.addresses("worker-1").await?.is_empty());
    ensure!(!client.addresses("worker-2").await?.is_empty());
    after.stop().cancel();
    after.finish().await;
    Ok(())
}

#[tokio::test]
async fn p4b_a_killed_server_answers_again_within_a_second_of_its_start() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let black_hole = FakeResolver::start(Behavior::Silent).await?;
    let upstream = black_hole.address().to_string();
    let flags = ["--dns-answer", TUNNEL, "--dns-upstream", &upstream];
    // A separate loopback address, so that no connection takes the port as its source port while
    // the server is down.
    let host = own_loopback();
    let setup = ServerSetup::on_loopback(&scratch.path().join("data")).args(&flags);
    let first = setup.clone().args(&["--dns-listen", &format!("{host}:0")]);
    let mut server = first.start().await?;
    server.token("worker-1", None).await?;
    let opened = |line: &str| Listener::Dns.opened(line);
    let address = server.process().wait_for_line("DNS", WAIT_TIMEOUT, opened);
    let address = address.await?;
    let client = DnsClient::new(address).from_source(Ipv4Addr::LOCALHOST.into());
    eventually("worker-1", WAIT_TIMEOUT, async || {
        ensure!(!client.addresses("worker-1").await?.is_empty());
        anyhow::Ok(())
    })
    .await;
    server.into_process().kill().await?;

    let asked_before = black_hole.asked().len();
    let began = Instant::now();
    let listen = address.to_string();
    let restarted = setup.args(&["--dns-listen", &listen]);
    let starting = restarted.start();
    tokio::pin!(starting);
    // The client asks from the first moment, because the DNS starts before the other parts.
    let answered = loop {
        tokio::select! {
            biased;
            started = &mut starting => {
                let _server = started?;
                anyhow::bail!("everything else was up before DNS answered");
            }
            found = client.addresses("worker-1") => {
                if matches!(found, Ok(found) if !found.is_empty()) {
                    break began.elapsed();
                }
            }
        }
    };
    report_figure(&format!("P4b: answered {answered:?} after the start"));
    ensure!(answered < scaled(Duration::from_secs(1)), "{answered:?}");
    // The DNS does not wait for the nodes, either. A name missing from the records on disk would
    // have been forwarded.
    let asked = black_hole.asked().split_off(asked_before);
    ensure!(!asked.iter().any(|name| name == "worker-1"), "{asked:?}");
    let _server = starting.await?;
    Ok(())
}
