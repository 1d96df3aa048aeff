//! Connection ids that a restarted server recognizes as its own and does not assign again.

use quinn_proto::{ConnectionId, ConnectionIdGenerator, HashedConnectionIdGenerator, InvalidCid};

/// Random bytes in front of quinn's own connection id. That id has 24 random bits, and the rest is
/// a hash. With one key, one of a thousand agents would be likely to find its old id assigned to
/// another agent after the server's restart. The server would drop the agent's packets there
/// instead of answering with a stateless reset.
const PREFIX_BYTES: usize = 4;
/// Length of the ids: the prefix, and an id of quinn.
pub(super) const CONNECTION_ID_BYTES: usize = PREFIX_BYTES + 8;

/// A generator of 12-byte connection ids that contain quinn's keyed check (RFC 9000, section 5.1).
/// The server does not answer packets with other ids.
pub(super) struct PrefixedCidGenerator(HashedConnectionIdGenerator);

impl PrefixedCidGenerator {
    /// Creates a generator. Every server with this key recognizes its ids.
    pub(super) fn from_key(key: u64) -> Self {
        Self(HashedConnectionIdGenerator::from_key(key))
    }
}

impl ConnectionIdGenerator for PrefixedCidGenerator {
    fn generate_cid(&mut self) -> ConnectionId {
        let prefix: [u8; PREFIX_BYTES] = rand::random();
        ConnectionId::new(&[&prefix[..], &self.0.generate_cid()].concat())
    }

    fn validate(&self, id: &ConnectionId) -> Result<(), InvalidCid> {
        match id.split_at_checked(PREFIX_BYTES) {
            Some((_, checked)) if checked.len() == self.0.cid_len() => {
                self.0.validate(&ConnectionId::new(checked))
            }
            _ => Err(InvalidCid),
        }
    }

    fn cid_len(&self) -> usize {
        PREFIX_BYTES + self.0.cid_len()
    }

    fn cid_lifetime(&self) -> Option<std::time::Duration> {
        self.0.cid_lifetime()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    const KEY: u64 = 7;
    /// The ids of some thousand agents, each with several.
    const COUNT: usize = 50_000;

    #[test]
    fn restarted_server_knows_old_ids_and_gives_none_of_them_out_again() {
        let (mut before, mut after) = (
            PrefixedCidGenerator::from_key(KEY),
            PrefixedCidGenerator::from_key(KEY),
        );
        let old: HashSet<ConnectionId> = (0..COUNT).map(|_| before.generate_cid()).collect();
        assert_eq!(old.len(), COUNT);
        assert!(old.iter().all(|id| after.validate(id).is_ok()));
        assert!((0..COUNT).all(|_| !old.contains(&after.generate_cid())));
    }

    #[test]
    fn others_ids_are_not_taken_for_ours() {
        let (mut others, ours) = (
            PrefixedCidGenerator::from_key(KEY + 1),
            PrefixedCidGenerator::from_key(KEY),
        );
        assert!(ours.validate(&others.generate_cid()).is_err());
        for length in [0, 2, 6] {
            let short = ConnectionId::new(&[0; 6][..length]);
            assert!(ours.validate(&short).is_err(), "{length}");
        }
    }
}
