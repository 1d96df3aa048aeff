//! Plain quinn on an equally bad path, for comparison with the tunnel's goodput.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use quinn::congestion::{BbrConfig, CubicConfig};
use quinn::{ClientConfig, Endpoint, EndpointConfig, ServerConfig, TokioRuntime, TransportConfig};
use rustls::RootCertStore;
use rustls_pki_types::PrivatePkcs8KeyDer;
use socket2::{Domain, Protocol, Socket, Type};
use tunnel_proto::transport::CongestionControl;

use super::flow::{Flow, FlowEnd, Load};
use crate::link::{Impairment, Link, TrafficClass};

/// Transfers the amount in both directions at once over one stream, as the tunnel does: the end
/// that accepts connections opens the stream. Uses its own link with an equal seed.
pub async fn transfer(
    path: Impairment,
    seed: u64,
    amount: u64,
    limit: Duration,
) -> Result<[FlowEnd; 2]> {
    let certificate = rcgen::generate_simple_self_signed([NAME.to_owned()])?;
    let key = PrivatePkcs8KeyDer::from(certificate.signing_key.serialize_der());
    let chain = vec![certificate.cert.der().clone()];
    let mut roots = RootCertStore::empty();
    roots.add(certificate.cert.der().clone())?;
    let transport = Arc::new(transport());
    let mut server = ServerConfig::with_single_cert(chain, key.into())?;
    server.transport_config(transport.clone());
    let mut client = ClientConfig::with_root_certificates(Arc::new(roots))?;
    client.transport_config(transport);

    let cloud = endpoint(Some(server))?;
    let edge = endpoint(None)?;
    let link = Link::start(cloud.local_addr()?, seed)?;
    link.set(TrafficClass::ALL, path);
    let connecting = edge.connect_with(client, link.addr(), NAME)?;
    let accepting = async {
        let incoming = cloud.accept().await.context("the endpoint is closed")?;
        anyhow::Ok(incoming.await?)
    };
    let (at_edge, at_cloud) = tokio::join!(connecting, accepting);
    let (at_edge, at_cloud) = (at_edge?, at_cloud?);
    // A stream exists for its peer only after its first byte.
    let (mut to_edge, from_edge) = at_cloud.open_bi().await?;
    to_edge.write_all(&[0]).await?;
    let (to_cloud, mut from_cloud) = at_edge.accept_bi().await?;
    from_cloud.read_exact(&mut [0]).await?;
    let load = Load::Exactly(amount);
    let (to_edge, to_cloud) = (
        Flow::start(to_edge, from_cloud, seed, load),
        Flow::start(to_cloud, from_edge, !seed, load),
    );
    let (to_edge, to_cloud) = tokio::join!(
        to_edge.finish("plain quinn to the edge", limit),
        to_cloud.finish("plain quinn to the cloud", limit)
    );
    Ok([to_edge, to_cloud])
}

/// Returns the tunnel's transport parameters: `streamWindow`, eight times that for the connection,
/// and the default congestion control.
fn transport() -> TransportConfig {
    let mut config = TransportConfig::default();
    config
        .stream_receive_window(STREAM_WINDOW.into())
        .receive_window((STREAM_WINDOW * 8).into())
        .keep_alive_interval(Some(Duration::from_secs(5)));
    match CongestionControl::default() {
        CongestionControl::Cubic => {
            config.congestion_controller_factory(Arc::new(CubicConfig::default()))
        }
        CongestionControl::Bbr => {
            config.congestion_controller_factory(Arc::new(BbrConfig::default()))
        }
    };
    config
}

fn endpoint(server: Option<ServerConfig>) -> Result<Endpoint> {
    let address = SocketAddr::from(([127, 0, 0, 1], 0));
    let socket = Socket::new(
        Domain::for_address(address),
        Type::DGRAM,
        Some(Protocol::UDP),
    )?;
    socket.set_recv_buffer_size(UDP_BUFFER)?;
    socket.set_send_buffer_size(UDP_BUFFER)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(Endpoint::new(
        EndpointConfig::default(),
        server,
        socket.into(),
        Arc::new(TokioRuntime),
    )?)
}

const NAME: &str = "plain";
/// The default of `streamWindow`.
const STREAM_WINDOW: u32 = 2 << 20;
/// Buffer size of the tunnel's sockets.
const UDP_BUFFER: usize = 4 << 20;
