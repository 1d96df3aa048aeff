//! Pairs of connected sessions for each transport.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rustls::sign::SingleCertAndKey;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use super::{Pair, Windows, test_timeout};
use crate::forward::forward;
use crate::identity::Role;
use crate::tcp::{Direct, ServerAddr, configure_session};
use crate::tls::{self, test_ca::TestCa};
use crate::transport::{BufferPool, CongestionControl, Session, SessionSettings};
use crate::wire::{ALPN_SESSION, ALPN_SESSION_TCP};

fn agent() -> Role {
    Role::Agent("worker-1".parse().unwrap())
}

pub(super) async fn memory(_windows: Windows) -> Pair {
    let (opener, peer) = crate::transport::memory::pair();
    joined(opener, peer, ())
}

fn settings(windows: Windows, keep_alive: Option<Duration>) -> SessionSettings {
    SessionSettings {
        stream_window: windows.stream_window,
        streams: windows.streams,
        keep_alive,
        idle_timeout: Duration::from_secs(60),
        congestion: CongestionControl::default(),
        pool: BufferPool::new(windows.pool),
    }
}

fn remote(address: SocketAddr) -> ServerAddr {
    ServerAddr {
        name: address.to_string(),
        address: Some(address),
    }
}

pub(super) async fn quic(windows: Windows) -> Pair {
    use crate::transport::Dialer as _;
    use crate::transport::quic::{QuicAcceptor, QuicDialer, QuicKeys};

    let ca = TestCa::new();
    let keys = QuicKeys::from_bytes(&[7; QuicKeys::LEN]);
    let server =
        tls::session_server_of_roots(ca.resolver(&Role::Server), ca.roots(), ALPN_SESSION).unwrap();
    let any = ([127, 0, 0, 1], 0).into();
    let listener = QuicAcceptor::bind(any, server, &keys, settings(windows, None)).unwrap();
    let trust = tls::Trust::Roots(ca.roots());
    let client = tls::session_client(ca.key(&agent()), trust, ALPN_SESSION).unwrap();
    let dialer = QuicDialer::new(client, settings(windows, Some(Duration::from_secs(5)))).unwrap();
    let address = remote(listener.local_addr().unwrap());
    let (accepted, dialed) = tokio::join!(
        async {
            let (_, handshake) = listener.accept().await.unwrap();
            handshake.await.unwrap()
        },
        async { dialer.dial(&address).await.unwrap() }
    );
    joined(accepted, dialed, (listener, dialer))
}

pub(super) async fn h2(windows: Windows) -> Pair {
    use crate::transport::Dialer as _;
    use crate::transport::h2::{H2Dialer, ReadAhead, accept};

    let ca = TestCa::new();
    let server =
        tls::session_server_of_roots(ca.resolver(&Role::Server), ca.roots(), ALPN_SESSION_TCP)
            .unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let trust = tls::Trust::Roots(ca.roots());
    let client = tls::session_client(ca.key(&agent()), trust, ALPN_SESSION_TCP).unwrap();
    let keep_alive = Some(Duration::from_secs(5));
    let dialer = H2Dialer::new(client, settings(windows, keep_alive), Arc::new(Direct));
    let address = remote(listener.local_addr().unwrap());
    let (accepted, dialed) = tokio::join!(
        async {
            let (socket, _) = listener.accept().await.unwrap();
            configure_session(&socket).unwrap();
            let socket = ReadAhead::new(socket);
            let stream = TlsAcceptor::from(server).accept(socket).await.unwrap();
            accept(stream, &settings(windows, None)).await.unwrap()
        },
        async { dialer.dial(&address).await.unwrap() }
    );
    joined(accepted, dialed, dialer)
}

pub(super) async fn forwarded_to_quic(windows: Windows) -> Pair {
    Box::pin(forwarded(windows, quic(windows).await)).await
}

pub(super) async fn forwarded_to_h2(windows: Windows) -> Pair {
    Box::pin(forwarded(windows, h2(windows).await)).await
}

/// Returns a pair whose opener is another server, which has a connection to the server of `agent`.
async fn forwarded(windows: Windows, agent: Pair) -> Pair {
    let (opener, accepted) = Box::pin(peers(windows)).await;
    let (to_agent, peer) = (agent.opener.clone(), agent.peer.clone());
    let forwarder = async move {
        let mut streams = JoinSet::new();
        while let Ok(incoming) = accepted.accept().await {
            let to_agent = to_agent.clone();
            streams.spawn(async move {
                let deadline = Instant::now() + test_timeout();
                let (header, mut incoming) = incoming.header(deadline).await?;
                let opened = to_agent.open(&header, test_timeout()).await;
                let mut opened = opened.map_err(std::io::Error::other)?;
                forward(&mut incoming, &mut opened).await;
                std::io::Result::Ok(())
            });
        }
    };
    let forwarder = AbortOnDropHandle::new(TaskTracker::new().spawn(forwarder));
    Pair {
        opener,
        peer,
        _keep: Box::new((agent, forwarder)),
    }
}

/// Returns the sessions of a dialing and an accepting server.
async fn peers(windows: Windows) -> (Arc<dyn Session>, Arc<dyn Session>) {
    use crate::transport::h2::{ReadAhead, accept_peer, connect_peer};

    let ca = TestCa::new();
    let trust = tls::PeerTrust::new(ca.roots()).unwrap();
    let role = |name: &str| Role::Peer(name.parse().unwrap());
    let server = tls::peer_server(ca.resolver(&role("b")), trust.clone()).unwrap();
    let own = SingleCertAndKey::from(ca.key(&role("a")));
    let client = tls::peer_client(Arc::new(own), trust).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (dialed, accepted) = tokio::join!(
        async {
            let socket = TcpStream::connect(address).await.unwrap();
            configure_session(&socket).unwrap();
            let name = "b".try_into().unwrap();
            let stream = TlsConnector::from(client).connect(name, ReadAhead::new(socket));
            connect_peer(stream.await.unwrap(), &settings(windows, None))
                .await
                .unwrap()
        },
        async {
            let (socket, _) = listener.accept().await.unwrap();
            configure_session(&socket).unwrap();
            let stream = TlsAcceptor::from(server).accept(ReadAhead::new(socket));
            accept_peer(stream.await.unwrap(), &settings(windows, None))
                .await
                .unwrap()
        }
    );
    assert_eq!(dialed.peer().role, role("b"));
    assert_eq!(accepted.peer().role, role("a"));
    (dialed, accepted)
}

fn joined(accepted: Arc<dyn Session>, dialed: Arc<dyn Session>, keep: impl Send + 'static) -> Pair {
    assert_eq!(accepted.peer().role, agent());
    assert_eq!(dialed.peer().role, Role::Server);
    Pair {
        opener: accepted,
        peer: dialed,
        _keep: Box::new(keep),
    }
}
