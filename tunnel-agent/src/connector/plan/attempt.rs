//! An attempt to open a session: one or two dials, of which the first that is ready wins.

use tunnel_proto::wire::code::CloseCode;

use crate::connector::endpoint::Endpoints;
use crate::connector::happy_eyeballs::{DialAction, HappyEyeballs};
use crate::connector::session_task::ConnectError;
use crate::connector::transport_policy::SessionTransport;
use crate::session::DialId;

/// Sessions that are being dialed. The first that is ready wins.
pub(super) struct Attempt {
    pub(super) purpose: DialPurpose,
    pub(super) happy_eyeballs: HappyEyeballs,
    /// Endpoint of this round, and start of the next round.
    pub(super) endpoints: Endpoints,
    pub(super) next_endpoints: Option<Endpoints>,
    pub(super) dials: Vec<DialId>,
    pub(super) failures: Vec<(SessionTransport, ConnectError)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DialPurpose {
    /// There is no live session, or its server is stopping.
    Connect,
    /// The session uses h2, and QUIC would be better.
    Upgrade,
    /// The session uses older credentials.
    Refresh,
    /// The session is with another server than the assigned one, or in the zone of another session.
    Move,
}

impl Attempt {
    /// Records the failure of one transport, whose session task tried the endpoint at `endpoints`.
    pub(super) fn failed(
        &mut self,
        transport: SessionTransport,
        mut endpoints: Endpoints,
        error: ConnectError,
    ) -> DialAction {
        if self.next_endpoints.is_none() || transport == self.happy_eyeballs.first() {
            // After a failed name lookup the position is already that of the next server.
            if !matches!(error, ConnectError::Resolve(_)) {
                endpoints.failed();
            }
            self.next_endpoints = Some(endpoints);
        }
        let action = self.happy_eyeballs.failed(transport, error.failure());
        self.failures.retain(|(failed, _)| *failed != transport);
        self.failures.push((transport, error));
        action
    }

    /// Returns whether a dial reached a server that another connector holds.
    pub(super) fn has_duplicate(&self) -> bool {
        self.failures
            .iter()
            .any(|(_, error)| matches!(error, ConnectError::Duplicate { .. }))
    }

    pub(super) fn code(&self) -> Option<CloseCode> {
        let decisive = self
            .failures
            .iter()
            .max_by_key(|(_, error)| error.failure());
        decisive.and_then(|(_, error)| error.code())
    }
}
