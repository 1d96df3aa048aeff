//! The sessions that this process has lost: their servers may take them for live until they were
//! silent for long. The next session with the same server names them.

use std::collections::VecDeque;

use parking_lot::Mutex;
use tunnel_proto::wire::name::{ReplicaId, SessionId};

/// Sessions that were lost and not named yet, oldest first.
#[derive(Debug, Default)]
pub(crate) struct LostSessions(Mutex<VecDeque<(ReplicaId, SessionId)>>);

impl LostSessions {
    /// Adds sessions with a server.
    pub(crate) fn add(&self, replica: &ReplicaId, sessions: impl IntoIterator<Item = SessionId>) {
        let mut lost = self.0.lock();
        lost.extend(
            sessions
                .into_iter()
                .map(|session| (replica.clone(), session)),
        );
        let excess = lost.len().saturating_sub(REMEMBERED_MAX);
        lost.drain(..excess);
    }

    /// Takes the sessions with a server.
    pub(crate) fn take(&self, replica: &ReplicaId) -> Vec<SessionId> {
        let mut taken = Vec::new();
        self.0.lock().retain(|(other, session)| {
            let is_same = replica == other;
            if is_same {
                taken.push(*session);
            }
            !is_same
        });
        taken
    }
}

/// Sessions that are remembered. A server closes others by itself.
const REMEMBERED_MAX: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_are_named_once_and_to_their_server_alone() {
        let [one, other] = ["server-1", "server-2"].map(|name| name.parse().unwrap());
        let lost = LostSessions::default();
        lost.add(&one, [1, 2].map(SessionId));
        lost.add(&other, [SessionId(1)]);
        assert_eq!(lost.take(&one), [1, 2].map(SessionId));
        assert_eq!(lost.take(&one), []);
        assert_eq!(lost.take(&other), [SessionId(1)]);
        lost.add(&one, (0..100).map(SessionId));
        let newest: Vec<_> = (84..100).map(SessionId).collect();
        assert_eq!(lost.take(&one), newest);
    }
}
