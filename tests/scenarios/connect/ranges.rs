//! Without `--connect-direct` a server of a cluster dials what the cluster tells of itself, and nothing else.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use tunnel_tests::cluster::{Cluster, Kind, cloud, edge};
use tunnel_tests::eventually::eventually;
use tunnel_tests::targets::EchoTarget;
use tunnel_tests::tools::{Skip, or_skip};
use tunnel_tests::world::PATIENCE;

use super::Lab;
use super::egress::talk;

const SERVICES: &str = "127.1.0.0/16";
const CLOUD_PODS: &str = "127.2.0.0/16";
const EDGE_PODS: &str = "127.3.0.0/16";
/// Within each of them, and outside.
const SERVICE: &str = "127.1.0.10";
const CLOUD_POD: &str = "127.2.0.10";
const EDGE_POD: &str = "127.3.0.10";
const ELSEWHERE: &str = "127.4.0.10";

#[tokio::test(flavor = "multi_thread")]
async fn default_ranges_are_cloud_nodes_their_pods_and_services() -> Result<()> {
    let Some(own) = or_skip(own_address()) else {
        return Ok(());
    };
    let cluster = Cluster::start(Kind::StandIn).await?.context("a stand-in")?;
    let services = json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR",
        "metadata": { "name": "of-the-test" }, "spec": { "cidrs": [SERVICES] },
    });
    let path = "/apis/networking.k8s.io/v1/servicecidrs";
    cluster.admin().create(path, &services).await?;
    let objects = cluster.objects();
    let master = cloud("master-1", &own.to_string()).with_pods(CLOUD_PODS);
    objects.add(&master).await?;
    objects.add(&edge("worker-1").with_pods(EDGE_PODS)).await?;
    let kubeconfig = cluster.server_kubeconfig()?;
    let lab = Lab::start_with(|settings| {
        settings.connect_direct = Vec::new();
        settings.kubernetes = Some("on".into());
        settings.kubeconfig = Some(kubeconfig.to_string_lossy().into_owned());
        settings.namespace = Some("kube-system".into());
    });
    let lab = lab.await?;
    let dialer = lab.dialer();

    // Something listens wherever something could be dialled, so that a refusal is the server's.
    let on_node = EchoTarget::start_on(SocketAddr::new(own, 0)).await?;
    let of_service = EchoTarget::start_on(at(SERVICE)?).await?;
    let in_pod = EchoTarget::start_on(at(CLOUD_POD)?).await?;
    let (node, service, pod) = (on_node.addr(), of_service.addr(), in_pod.addr());
    let named = format!("master-1:{}", node.port());
    let allowed = [
        service.to_string(),
        pod.to_string(),
        node.to_string(),
        named,
    ];
    for target in &allowed {
        eventually(target, PATIENCE, async || {
            talk(dialer.dial(target).await?).await
        })
        .await;
    }
    let untouched = [EDGE_POD, ELSEWHERE, "127.0.0.1"];
    let mut listeners = Vec::new();
    for address in untouched {
        let listener = TcpListener::bind(at(address)?)?;
        listener.set_nonblocking(true)?;
        listeners.push(listener);
    }
    let mut refused: Vec<String> = Vec::new();
    for listener in &listeners {
        refused.push(listener.local_addr()?.to_string());
    }
    // etcd of the control plane is nobody's webhook.
    refused.extend([
        format!("{own}:2379"),
        "203.0.113.7:443".to_owned(),
        "169.254.169.254:80".to_owned(),
    ]);
    for target in &refused {
        let told = dialer.dial(target).await.err().context("was dialled")?;
        ensure!(told.to_string().contains("code 403"), "{target}: {told}");
    }
    // An edge node is reached by its agent or not at all.
    let told = dialer.dial("worker-1:10250").await.err();
    let told = told.context("was dialled")?.to_string();
    ensure!(!told.contains("code 200"), "{told}");

    // A node that moves to the edge takes its address and its Pods with it.
    objects.set_edge("master-1", true).await?;
    eventually("the node to be an edge node", PATIENCE, async || {
        let told = dialer.dial(&pod.to_string()).await.err();
        let told = told.context("still dialled")?.to_string();
        ensure!(told.contains("code 403"), "{told}");
        anyhow::Ok(())
    })
    .await;
    let told = dialer.dial(&node.to_string()).await.err();
    told.context("an edge node was dialled")?;
    talk(dialer.dial(&service.to_string()).await?).await?;
    for listener in listeners {
        let taken = listener.accept().err().map(|error| error.kind());
        ensure!(
            taken == Some(ErrorKind::WouldBlock),
            "{listener:?} was dialled"
        );
    }
    Ok(())
}

fn at(address: &str) -> Result<SocketAddr> {
    Ok(SocketAddr::new(address.parse()?, 0))
}

/// An address of this machine that others could have: those of loopback are no node's. Nothing is sent.
fn own_address() -> Result<IpAddr, Skip> {
    let told = UdpSocket::bind(("0.0.0.0", 0)).and_then(|socket| {
        socket.connect(("198.51.100.1", 9))?;
        socket.local_addr()
    });
    match told {
        Ok(address) if !address.ip().is_loopback() => Ok(address.ip()),
        Ok(_) => Err(Skip::because("this machine has loopback addresses alone")),
        Err(error) => Err(Skip::because(format!("no address of its own: {error}"))),
    }
}
