//! What enrollments ask of the connections to other servers.

use std::fmt;
use std::io;
use std::time::Duration;

use async_trait::async_trait;
use tunnel_proto::transport::Stream;
use tunnel_proto::wire::name::ReplicaId;

/// The other servers, to which enrollments are forwarded.
#[async_trait]
pub trait EnrollmentPeers: fmt::Debug + Send + Sync {
    /// Returns the servers that this server dials, connected or not, ordered by name.
    fn dialed(&self) -> Vec<ReplicaId>;

    /// Opens a stream for one enrollment to another server. Does not wait for the reply, which must
    /// arrive within `reply_limit`. Cancel-safe: if the future is dropped early, the stream is reset.
    ///
    /// # Errors
    /// Returns an error if the server is not connected, or if the stream cannot be opened.
    async fn open_enrollment(
        &self,
        replica: &ReplicaId,
        reply_limit: Duration,
    ) -> io::Result<Stream>;
}
