//! TCP services: a listener whose connections are passed byte for byte to one target behind one node.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::TcpStream;
use tokio::time::Instant;
use tracing::debug;
use tunnel_proto::relay::{RelayEnd, relay};
use tunnel_proto::wire::header::{StreamHeader, StreamKind};

use super::Doors;
use super::peer::CallerName;
use crate::ingress::access_log::Record;
use crate::ingress::caller_stream::{DoorSocket, Fate, read_away};
use crate::ingress::error::{Failure, Outcome};
use crate::routing::decision::Destination;

/// One entry of `services:`.
#[derive(Debug, Clone)]
pub struct Service {
    /// Its name, for logs.
    pub name: String,
    /// Where its connections go.
    pub destination: Destination,
}

/// Passes one connection. Whatever fails before or after the first byte, the caller sees a TCP reset, never a clean
/// end; the reason is in the access record.
pub async fn serve(doors: Arc<Doors>, service: Arc<Service>, tcp: TcpStream, peer: SocketAddr) {
    let mut record = Record::begin("service", peer, &service.name, &doors.metrics);
    record.destination(&service.destination);
    let fate = Arc::new(Fate::default());
    fate.upgrade();
    let mut caller = DoorSocket::new(tcp, fate.clone());
    // Dropped before the socket, so that an end without `finish` is a reset.
    let unfinished = fate.begin();
    let place = service.destination.to_string();
    let header = StreamHeader::new(StreamKind::Target(service.destination.target.clone()));
    let began = Instant::now();
    let key = CallerName::Unnamed.key(peer.into());
    let opening = doors.registry.open(
        &service.destination.node,
        &header,
        &key,
        doors.limits.open,
        None,
    );
    let mut opened = match opening.await {
        Ok(opened) => opened,
        Err(error) => return record.fail(&Failure::from_open(&error, &place)),
    };
    record.opened(opened.session, opened.stream.bytes(), began.elapsed());
    match relay(&mut caller, &mut opened.stream).await.end {
        RelayEnd::Clean => {
            record.set(Outcome::Ok);
            unfinished.finish();
        }
        RelayEnd::ReaderLeft(side) => {
            debug!(?side, "service stream ended with unread bytes");
            record.set(Outcome::Cut);
            read_away(&mut caller).await;
            unfinished.finish();
        }
        RelayEnd::Cut(_, error) => {
            debug!(%error, "service stream was cut");
            record.fail(&Failure::from_stream(&error, &place, Outcome::Cut));
        }
    }
}
