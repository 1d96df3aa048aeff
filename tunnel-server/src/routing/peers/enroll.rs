//! Streams that carry an enrollment to another server.

use std::io;
use std::time::Duration;

use async_trait::async_trait;
use tunnel_proto::transport::Stream;
use tunnel_proto::wire::header::{StreamHeader, StreamKind};
use tunnel_proto::wire::name::ReplicaId;

use super::Peers;
use tunnel_ca::enrollment::EnrollmentPeers;

#[async_trait]
impl EnrollmentPeers for Peers {
    fn dialed(&self) -> Vec<ReplicaId> {
        self.state.lock().peers.keys().cloned().collect()
    }

    async fn open_enrollment(
        &self,
        replica: &ReplicaId,
        reply_limit: Duration,
    ) -> io::Result<Stream> {
        let link = {
            let state = self.state.lock();
            let peer = state.peers.get(replica);
            peer.and_then(|peer| peer.link.clone())
        };
        let Some(link) = link else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        let Some(permit) = link.permit() else {
            return Err(io::Error::other("too many streams (limits.peerStreams)"));
        };
        let header = StreamHeader::new(StreamKind::Enroll);
        let opened = link.session.open(&header, reply_limit).await;
        let mut stream = opened.map_err(io::Error::other)?;
        stream.attach(permit);
        Ok(stream)
    }
}
