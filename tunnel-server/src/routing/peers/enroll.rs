//! Streams that carry an enrollment to another server.

use std::io;
use std::time::Duration;

use tunnel_proto::transport::Stream;
use tunnel_proto::wire::header::{StreamHeader, StreamKind};
use tunnel_proto::wire::name::ReplicaId;

use super::Peers;

impl Peers {
    /// Returns the servers that this server dials, connected or not, ordered by name.
    pub fn dialed(&self) -> Vec<ReplicaId> {
        self.state.lock().peers.keys().cloned().collect()
    }

    /// Opens a stream for one enrollment to another server. Does not wait for the reply, which must
    /// arrive within `reply_limit`.
    ///
    /// Cancel-safe: if the future is dropped early, the stream is reset.
    ///
    /// # Errors
    /// Returns an error if the server is not connected, or if the stream cannot be opened.
    pub async fn open_enrollment(
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
