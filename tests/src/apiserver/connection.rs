//! The port of the API server, open or reserved, and its connections.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use anyhow::{Context, Result};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls_pki_types::CertificateDer;
use socket2::{Domain, SockAddr, Socket, Type};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use super::access::User;
use super::http::Service;
use super::pki::Pki;
use crate::targets::TargetTls;

type Users = Arc<HashMap<CertificateDer<'static>, User>>;

/// A loopback port that stays reserved while no server listens on it.
#[derive(Debug)]
pub(super) struct Listening {
    addr: SocketAddr,
    /// Bound socket that never listens. The socket reserves the port while connections to it are
    /// refused.
    _reserved: Socket,
    tls: TargetTls,
    users: Users,
    accepting: Option<JoinSet<()>>,
}

impl Listening {
    pub(super) fn start(service: Arc<Service>, pki: &Pki) -> Result<Self> {
        let reserved = socket(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
        let addr = reserved
            .local_addr()?
            .as_socket()
            .context("address of the API server")?;
        let mut listening = Self {
            addr,
            _reserved: reserved,
            tls: pki.serving().clone(),
            users: pki.users(),
            accepting: None,
        };
        listening.open(service)?;
        Ok(listening)
    }

    pub(super) fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Accepts connections. Does nothing if the port is open already.
    pub(super) fn open(&mut self, service: Arc<Service>) -> Result<()> {
        if self.accepting.is_some() {
            return Ok(());
        }
        let socket = socket(self.addr)?;
        socket.listen(BACKLOG)?;
        socket.set_nonblocking(true)?;
        let listener = TcpListener::from_std(socket.into())?;
        let mut accepting = JoinSet::new();
        accepting.spawn(accept(
            listener,
            self.tls.acceptor(),
            Arc::clone(&self.users),
            service,
        ));
        self.accepting = Some(accepting);
        Ok(())
    }

    /// Refuses new connections and drops open ones.
    pub(super) async fn close(&mut self) {
        if let Some(mut accepting) = self.accepting.take() {
            accepting.shutdown().await;
        }
    }
}

fn socket(addr: SocketAddr) -> Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)?;
    socket
        .bind(&SockAddr::from(addr))
        .with_context(|| format!("bind the API server to {addr}"))?;
    Ok(socket)
}

async fn accept(listener: TcpListener, tls: TlsAcceptor, users: Users, service: Arc<Service>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((tcp, _peer)) => {
                    connections.spawn(serve(tcp, tls.clone(), Arc::clone(&users), Arc::clone(&service)));
                }
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionAborted => {}
                Err(_) => return,
            },
            Some(_end) = connections.join_next() => {}
        }
    }
}

/// Serves one connection. How a connection ends matters only to its client.
async fn serve(tcp: TcpStream, tls: TlsAcceptor, users: Users, service: Arc<Service>) {
    if tcp.set_nodelay(true).is_err() {
        return;
    }
    let Ok(tls) = tls.accept(tcp).await else {
        return;
    };
    let certificate = tls
        .get_ref()
        .1
        .peer_certificates()
        .and_then(|chain| chain.first());
    let user = certificate
        .and_then(|certificate| users.get(certificate))
        .cloned();
    let answer = service_fn(move |request| Arc::clone(&service).answer(request, user.clone()));
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new());
    let _ended = server
        .serve_connection(TokioIo::new(tls), answer)
        .with_upgrades()
        .await;
}

const BACKLOG: i32 = 1024;
