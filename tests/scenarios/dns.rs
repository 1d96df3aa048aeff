//! The embedded DNS: its answers, their latency, the resolvers that it queries, and its reaction to
//! hostile clients.

mod answers;
mod cold_start;
mod forwarding;
mod hostile;
mod load;
mod resolvers;

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tunnel_dns::{
    Addresses, Dns, DnsInputs, DnsLimits, DnsMetrics, DnsSettings, DnsSocket, DnsSockets, Records,
    Resolvers,
};
use tunnel_process::shutdown::Shutdown;
use tunnel_server::cluster::dns_snapshot::{persist, restore};
use tunnel_server::config::RawConfig;
use tunnel_store::data_dir::DataDir;
use tunnel_tests::dns::DnsClient;
use tunnel_tests::env::{TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::eventually;

pub(crate) use crate::abuse::report_figure;

/// Address that the DNS returns for edge nodes in these scenarios.
const TUNNEL: &str = "10.106.217.16";

/// Starts a test environment with DNS that forwards other names to `upstreams`.
async fn env(upstreams: &[String]) -> Result<TestEnv> {
    TestEnv::start_with(|settings| with_dns(settings, upstreams)).await
}

fn with_dns(settings: &mut RawConfig, upstreams: &[String]) {
    settings.dns_listen = Some("127.0.0.1:0".into());
    settings.dns_answer = vec![TUNNEL.into()];
    settings.dns_zone = Some("nodes.tunnel.internal".into());
    settings.dns_upstream = upstreams.to_vec();
}

fn no_upstream() -> Vec<String> {
    vec!["off".into()]
}

fn client(env: &TestEnv) -> Result<DnsClient> {
    Ok(DnsClient::new(listener(env)?))
}

/// Makes a node known and returns a client that has received its address.
async fn client_that_knows(env: &TestEnv, node: &str) -> Result<DnsClient> {
    env.nodes().record(&node.parse()?, &[]);
    let client = client(env)?;
    eventually(node, WAIT_TIMEOUT, async || {
        ensure!(!client.addresses(node).await?.is_empty(), "no address yet");
        anyhow::Ok(())
    })
    .await;
    Ok(client)
}

fn listener(env: &TestEnv) -> Result<SocketAddr> {
    env.bound().dns.context("no DNS")
}

/// The DNS server alone, without the parts of the server that update the records.
struct BareDns(DnsSockets);

impl BareDns {
    async fn on_loopback() -> Result<Self> {
        for _ in 0..PORT_TRIES {
            let tcp = TcpListener::bind("127.0.0.1:0").await?;
            if let Ok(udp) = DnsSocket::bind(tcp.local_addr()?) {
                return Ok(Self(DnsSockets { udp, tcp }));
            }
        }
        anyhow::bail!("no port is free for UDP and TCP")
    }

    fn address(&self) -> Result<SocketAddr> {
        Ok(self.0.tcp.local_addr()?)
    }

    fn start(
        self,
        data: &DataDir,
        resolver: SocketAddr,
        shutdown: &Shutdown,
    ) -> Result<(Dns, Records)> {
        let records = Records::default();
        restore(data, &records);
        persist(data, &records, shutdown);
        let settings = DnsSettings {
            listen: self.address()?,
            zone: None,
            clusters: Vec::new(),
            default_resolvers: Resolvers::These(vec![resolver]),
            answer: Addresses::default(),
            fixed: Vec::new(),
        };
        let parts = DnsInputs {
            sockets: self.0,
            settings: &settings,
            records: records.clone(),
            limits: DnsLimits {
                forward_budget: Duration::from_millis(400),
                forwards: 16,
                connections: 16,
                per_source: 10_000,
            },
            metrics: DnsMetrics::new(&mut Registry::default(), records.clone()),
        };
        Ok((Dns::start(parts, shutdown), records))
    }
}

const PORT_TRIES: u32 = 16;
