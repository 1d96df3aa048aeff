//! The start of a server: no listener answers for nodes before the server knows them. What follows
//! from an incomplete list is wrong: a node does not exist, an address has one owner, and a CONNECT
//! goes to what has an agent.

use std::io;

use anyhow::{Context, Result, ensure};
use tunnel_server::config::RawTcpService;
use tunnel_tests::apiserver::{Fault, Status};
use tunnel_tests::checks::{ensure_contains, ensure_refused, ensure_reset};
use tunnel_tests::client::{ByteStream, EgressDialer, Endpoint, RawRequest, request};
use tunnel_tests::cluster::edge;
use tunnel_tests::dns::{DnsClient, RecordType, ResponseCode};
use tunnel_tests::env::{TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::eventually;
use tunnel_tests::process::ScratchDir;
use tunnel_tests::targets::{EchoTarget, Exporter};

use super::GUIDE_IP;
use super::authority::{cluster, server};
use crate::connect::egress::talk;

#[tokio::test(flavor = "multi_thread")]
async fn every_listener_says_that_the_server_starts_until_the_nodes_are_known() -> Result<()> {
    let (cluster, scratch) = (cluster().await?, ScratchDir::new()?);
    cluster
        .objects()
        .create_service(|service| service["spec"]["clusterIP"] = GUIDE_IP.into())
        .await?;
    cluster.objects().add(&edge("worker-1")).await?;
    let listing = Fault::answer(Status::new(500, "InternalError", "no list"));
    cluster.fake_api()?.fault(listing.of("nodes"));
    let (echo, exporter) = (
        EchoTarget::start().await?,
        Exporter::start("worker-1").await?,
    );
    let socket = scratch.path().join("connect.sock");
    let env = server(&cluster, |settings| {
        settings.connect_uds = Some(socket.to_string_lossy().into_owned());
        settings.connect_listen = Some("127.0.0.1:0".into());
        settings.connect_direct = vec!["127.0.0.0/8".into()];
        settings.dns_listen = Some("127.0.0.1:0".into());
        settings.dns_upstream = vec!["off".into()];
        settings.services = vec![RawTcpService {
            name: "echo".into(),
            listen: "127.0.0.1:0".into(),
            node: "worker-1".into(),
            target: echo.addr().port().to_string(),
            protocol: None,
        }];
    })
    .await?;
    // Its token makes the node known, which is no list of all nodes.
    let _agent = env.agent("worker-1").await?;
    let site = Site {
        listeners: Listeners::of(&env, EgressDialer::uds(&socket))?,
        exporter: format!("worker-1:{}", exporter.addr().port()),
        echo: format!("worker-1:{}", echo.addr().port()),
        direct: echo.addr().to_string(),
    };
    site.is_starting().await?;
    cluster.fake_api()?.clear_faults();
    eventually("every listener serves", WAIT_TIMEOUT, async || {
        site.serves().await
    })
    .await;
    Ok(())
}

struct Listeners {
    http: [Endpoint; 2],
    connect: [EgressDialer; 2],
    service: Endpoint,
    dns: DnsClient,
}

impl Listeners {
    fn of(env: &TestEnv, socket: EgressDialer) -> Result<Self> {
        let bound = env.bound();
        let tcp = Endpoint::plain(bound.connect.context("no CONNECT listener")?);
        Ok(Self {
            http: [env.http(), env.https("worker-1")?],
            connect: [EgressDialer::tcp(tcp), socket],
            service: Endpoint::plain(bound.services[0].1),
            dns: DnsClient::new(bound.dns.context("no DNS")?),
        })
    }
}

/// The listeners, and targets behind and next to them.
struct Site {
    listeners: Listeners,
    exporter: String,
    echo: String,
    direct: String,
}

fn is_reset(error: &anyhow::Error) -> bool {
    let mut causes = error.chain().filter_map(|cause| cause.downcast_ref());
    causes.any(|cause: &io::Error| cause.kind() == io::ErrorKind::ConnectionReset)
}

impl Site {
    async fn is_starting(&self) -> Result<()> {
        let Listeners {
            http,
            connect,
            service,
            dns,
        } = &self.listeners;
        let kubelet = RawRequest::get("worker-1:10250", "/containerLogs/default/web/app");
        for endpoint in http {
            for host in [self.exporter.as_str(), "worker-2:9100", "10.1.2.3:9100"] {
                let reply = request(endpoint.clone(), &RawRequest::get(host, "/metrics")).await?;
                ensure_refused(&reply, 503, "starting")?;
            }
            let reply = request(endpoint.clone(), &kubelet).await?;
            ensure_refused(&reply, 502, "starting")?;
        }
        for dialer in connect {
            for target in [&self.echo, &self.direct, "worker-2:10250"] {
                let error = dialer.dial(target).await.err();
                let error = error.map(|error| error.to_string()).unwrap_or_default();
                ensure_contains(&error, &["code 503", "is starting"])?;
            }
        }
        // The reset may arrive before the socket is set up.
        match ByteStream::connect(service.clone()).await {
            Ok(mut raw) => ensure_reset(&raw.read_to_end().await.ended)?,
            Err(error) => ensure!(is_reset(&error), "{error:#}"),
        }
        let answer = dns.ask("worker-1", RecordType::A).await?;
        let code = answer.metadata.response_code;
        ensure!(code == ResponseCode::ServFail, "{code}");
        Ok(())
    }

    async fn serves(&self) -> Result<()> {
        let Listeners {
            http,
            connect,
            service,
            dns,
        } = &self.listeners;
        let page = RawRequest::get(&self.exporter, "/metrics");
        let reply = request(http[0].clone(), &page).await?;
        ensure!(reply.status == 200, "{}", reply.text());
        let unknown = RawRequest::get("worker-2:9100", "/");
        for endpoint in http {
            let reply = request(endpoint.clone(), &unknown).await?;
            ensure_refused(&reply, 400, "unknown_node")?;
        }
        for dialer in connect {
            for target in [&self.echo, &self.direct] {
                talk(dialer.dial(target).await?).await?;
            }
        }
        let mut raw = ByteStream::connect(service.clone()).await?;
        raw.send(b"hello").await?;
        ensure!(raw.receive(5).await? == b"hello");
        let addresses = dns.addresses("worker-1").await?;
        ensure!(!addresses.is_empty(), "no record");
        Ok(())
    }
}
