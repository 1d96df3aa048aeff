//! An attempt to open a session, from the first packet to success or failure.

use tokio::task::Id;
use tunnel_proto::wire::code::CloseCode;

use super::endpoint::EndpointCursor;
use super::happy_eyeballs::{DialAction, HappyEyeballs};
use super::session_task::ConnectError;
use super::transport_policy::SessionTransport;

/// Sessions that are being dialed. The first that is ready wins.
pub(super) struct Attempt {
    pub(super) purpose: DialPurpose,
    pub(super) happy_eyeballs: HappyEyeballs,
    /// Next endpoint of this round, and start of the next round.
    pub(super) cursor: EndpointCursor,
    pub(super) next_cursor: Option<EndpointCursor>,
    /// Session tasks of this attempt.
    pub(super) task_ids: Vec<Id>,
    /// Last failure of each transport.
    pub(super) failures: Vec<(SessionTransport, ConnectError)>,
}

/// The purpose of a dial.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DialPurpose {
    /// There is no live session, or its server is stopping.
    Connect,
    /// The session uses h2, and QUIC would be better.
    Upgrade,
    /// The session uses older credentials.
    Refresh,
}

impl Attempt {
    /// Creates an attempt without session tasks.
    pub(super) fn new(
        purpose: DialPurpose,
        happy_eyeballs: HappyEyeballs,
        cursor: EndpointCursor,
    ) -> Self {
        Self {
            purpose,
            happy_eyeballs,
            cursor,
            next_cursor: None,
            task_ids: Vec::new(),
            failures: Vec::new(),
        }
    }

    /// Records the failure of one transport, whose session task tried the endpoint at `cursor`.
    pub(super) fn failed(
        &mut self,
        transport: SessionTransport,
        mut cursor: EndpointCursor,
        error: ConnectError,
    ) -> DialAction {
        if self.next_cursor.is_none() || transport == self.happy_eyeballs.first() {
            // After a failed name lookup the cursor already points to the next server.
            if !matches!(error, ConnectError::Resolve(_)) {
                cursor.failed();
            }
            self.next_cursor = Some(cursor);
        }
        let action = self.happy_eyeballs.failed(transport, error.failure());
        self.failures.retain(|(failed, _)| *failed != transport);
        self.failures.push((transport, error));
        action
    }

    /// Returns the close code of the decisive failure.
    pub(super) fn code(&self) -> Option<CloseCode> {
        let decisive = self
            .failures
            .iter()
            .max_by_key(|(_, error)| error.failure());
        decisive.and_then(|(_, error)| error.code())
    }
}
