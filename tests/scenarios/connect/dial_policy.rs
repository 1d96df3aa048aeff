//! The default dial policy without `--connect-direct`: a server of a cluster dials the networks
//! that the cluster publishes, and nothing else.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use tunnel_tests::checks::ensure_contains;
use tunnel_tests::client::{EgressDialer, RawRequest, request};
use tunnel_tests::cluster::{Cluster, Kind, cloud, edge};
use tunnel_tests::env::{TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::eventually;
use tunnel_tests::targets::EchoTarget;
use tunnel_tests::tools::{Skip, or_skip};

use super::ConnectFixture;
use super::egress::{fails, talk};

/// Networks of RFC 2544, where no host exists. A dial to them fails with another code than a
/// refusal.
const SERVICES: &str = "198.18.1.0/24";
const CLOUD_PODS: &str = "198.18.2.0/24";
const EDGE_PODS: &str = "198.18.3.0/24";
/// An address in each of these networks.
const SERVICE: &str = "198.18.1.10:443";
const CLOUD_POD: &str = "198.18.2.10:443";
const EDGE_POD: &str = "198.18.3.10:443";
/// Networks of this host's loopback. No object of a cluster can allow them.
const LOOPBACK_SERVICES: &str = "127.1.0.0/16";
const LOOPBACK_PODS: &str = "127.2.0.0/16";
const LOOPBACK: [&str; 4] = ["127.1.0.10", "127.2.0.10", "127.4.0.10", "127.0.0.1"];
/// The address of an edge node.
const EDGE_NODE: &str = "192.168.33.221:10250";

#[tokio::test(flavor = "multi_thread")]
async fn default_ranges_are_cloud_nodes_their_pods_and_services() -> Result<()> {
    let Some(own) = or_skip(own_address()) else {
        return Ok(());
    };
    let cluster = Cluster::start(Kind::FakeApiServer)
        .await?
        .context("no API server")?;
    let services = json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR",
        "metadata": { "name": "of-the-test" }, "spec": { "cidrs": [SERVICES, LOOPBACK_SERVICES] },
    });
    let path = "/apis/networking.k8s.io/v1/servicecidrs";
    cluster.admin().create(path, &services).await?;
    let objects = cluster.objects();
    let master = cloud("master-1", &own.to_string()).with_pods(CLOUD_PODS);
    objects.add(&master).await?;
    objects.add(&edge("worker-1").with_pods(EDGE_PODS)).await?;
    let hostile = cloud("hostile", "198.51.100.9").with_pods(LOOPBACK_PODS);
    objects.add(&hostile).await?;
    let kubeconfig = cluster.server_kubeconfig()?;
    let fixture = ConnectFixture::start_with(|settings| {
        settings.connect_direct = Vec::new();
        settings.limits = TestEnv::limits("targetDialTimeout: 300ms");
        settings.kubernetes = Some("on".into());
        settings.kubeconfig = Some(kubeconfig.to_string_lossy().into_owned());
        settings.namespace = Some("kube-system".into());
    });
    let fixture = fixture.await?;
    let dialer = fixture.dialer();

    // This target and the loopback listeners below exist, so a failed dial is a refusal by the
    // server.
    let on_node = EchoTarget::start_on(SocketAddr::new(own, 0)).await?;
    let node = on_node.addr();
    let named = format!("master-1:{}", node.port());
    for target in [&node.to_string(), &named] {
        eventually(target, WAIT_TIMEOUT, async || {
            talk(dialer.dial(target).await?).await
        })
        .await;
    }
    for target in [SERVICE, CLOUD_POD] {
        eventually(target, WAIT_TIMEOUT, async || {
            is_dialed(&dialer, target).await
        })
        .await;
    }
    let mut listeners = Vec::new();
    for address in LOOPBACK {
        let listener = TcpListener::bind(at(address)?)?;
        listener.set_nonblocking(true)?;
        listeners.push(listener);
    }
    let mut refused = vec![EDGE_POD.to_owned()];
    for listener in &listeners {
        refused.push(listener.local_addr()?.to_string());
    }
    // The etcd port of a control plane node is never a webhook, so the server refuses to dial it.
    refused.extend([
        format!("{own}:2379"),
        "203.0.113.7:443".to_owned(),
        "169.254.169.254:80".to_owned(),
    ]);
    for target in &refused {
        fails(&dialer, target, &["code 403"]).await?;
    }
    // The server reaches an edge node only through its agent.
    let error_text = dialer.dial("worker-1:10250").await.err();
    let error_text = error_text.context("was dialed")?.to_string();
    ensure!(!error_text.contains("code 200"), "{error_text}");

    // If a node becomes an edge node, the server dials neither the node's address nor its Pods.
    objects.set_edge("master-1", true).await?;
    eventually("the node to be an edge node", WAIT_TIMEOUT, async || {
        fails(&dialer, CLOUD_POD, &["code 403"]).await
    })
    .await;
    fails(&dialer, &node.to_string(), &[]).await?;
    is_dialed(&dialer, SERVICE).await?;

    // The server dials an address that two Nodes claim for neither of them, and reports both claims
    // to the operator.
    let thief = cloud("thief", "192.168.33.221");
    objects.add(&thief).await?;
    for target in [EDGE_NODE, "thief:10250"] {
        eventually(target, WAIT_TIMEOUT, async || {
            fails(&dialer, target, &["code 400"]).await
        })
        .await;
    }
    let meta = fixture.env.meta();
    eventually("the conditions", WAIT_TIMEOUT, async || {
        let readyz = RawRequest::get("meta", "/readyz?verbose");
        let lines = [
            "[!] service networks: ServiceCIDR of-the-test: 127.1.0.0/16 is not used",
            "[!] node claims: node hostile: 127.2.0.0/16 of its podCIDRs is not used",
            "thief, worker-1: 192.168.33.221 is claimed by all of them",
        ];
        ensure_contains(&request(meta, &readyz).await?.text(), &lines)
    })
    .await;
    for listener in listeners {
        let taken = listener.accept().err().map(|error| error.kind());
        ensure!(taken == Some(ErrorKind::WouldBlock), "{listener:?}");
    }
    Ok(())
}

/// Returns an error if the server refuses to dial the target. A failed dial is no refusal.
async fn is_dialed(dialer: &EgressDialer, target: &str) -> Result<()> {
    if let Err(error) = dialer.dial(target).await {
        let error = error.to_string();
        let is_dialed = error.contains("code 502") || error.contains("code 504");
        ensure!(is_dialed, "{target}: {error}");
    }
    Ok(())
}

fn at(address: &str) -> Result<SocketAddr> {
    Ok(SocketAddr::new(address.parse()?, 0))
}

/// Returns an address of this machine outside loopback, because the server accepts no loopback
/// address for a node. The function sends no packet.
fn own_address() -> Result<IpAddr, Skip> {
    let error_text = UdpSocket::bind(("0.0.0.0", 0)).and_then(|socket| {
        socket.connect(("198.51.100.1", 9))?;
        socket.local_addr()
    });
    match error_text {
        Ok(address) if !address.ip().is_loopback() => Ok(address.ip()),
        Ok(_) => Err(Skip::because("this machine has loopback addresses alone")),
        Err(error) => Err(Skip::because(format!("no address of its own: {error}"))),
    }
}
