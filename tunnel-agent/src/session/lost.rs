//! The sessions that this process has lost: their servers may take them for live until they were
//! silent for long. The next session with the same server names them.

use std::collections::VecDeque;

use parking_lot::Mutex;
use tunnel_proto::wire::name::{ReplicaId, SessionId};

/// Sessions that were lost and not named yet, oldest first.
#[derive(Debug, Default)]
pub(crate) struct LostSessions(Mutex<VecDeque<(ReplicaId, SessionId)>>);

impl LostSessions {
    /// Adds sessions with a server. Without the server's name nothing is added, since another server
    /// may have the same numbers.
    pub(crate) fn add(
        &self,
        replica: Option<&ReplicaId>,
        sessions: impl IntoIterator<Item = SessionId>,
    ) {
        let Some(replica) = replica else {
            return;
        };
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
    pub(crate) fn take(&self, replica: Option<&ReplicaId>) -> Vec<SessionId> {
        let mut taken = Vec::new();
        self.0.lock().retain(|(other, session)| {
            let is_same = replica == Some(other);
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
        let replica = |name: &str| Some(name.parse::<ReplicaId>().unwrap());
        let [one, other] = ["server-1", "server-2"].map(replica);
        let lost = LostSessions::default();
        lost.add(one.as_ref(), [1, 2].map(SessionId));
        lost.add(other.as_ref(), [SessionId(1)]);
        lost.add(None, [SessionId(9)]);
        assert_eq!(lost.take(None), []);
        assert_eq!(lost.take(one.as_ref()), [1, 2].map(SessionId));
        assert_eq!(lost.take(one.as_ref()), []);
        assert_eq!(lost.take(other.as_ref()), [SessionId(1)]);
        lost.add(one.as_ref(), (0..100).map(SessionId));
        let newest: Vec<_> = (84..100).map(SessionId).collect();
        assert_eq!(lost.take(one.as_ref()), newest);
    }
}
