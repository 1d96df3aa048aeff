//! The servers that hold one node, in few bytes, because there are hundreds of thousands of nodes.

use std::ops::{Deref, DerefMut};

use tunnel_proto::wire::name::InstanceId;

/// An entry: a server holds the node with this agent process. Without padding, so that the table has
/// room for one in each slot, see [`Holders`].
#[derive(Debug, Clone, Copy)]
#[repr(C, packed)]
pub(super) struct Holder {
    pub(super) instance: InstanceId,
    /// Admission of the oldest session, in milliseconds since the Unix epoch.
    pub(super) since: u64,
    /// The list that has the entry, see `Replica::list`.
    pub(super) list: u32,
    /// Index of the server in `Directory::replicas`.
    pub(super) replica: u16,
}

/// The holders of one node. A single holder, as most nodes of a small installation have, needs no
/// allocation.
#[derive(Debug)]
pub(super) enum Holders {
    One(Holder),
    Many(Box<[Holder]>),
}

impl Deref for Holders {
    type Target = [Holder];

    fn deref(&self) -> &[Holder] {
        match self {
            Self::One(holder) => std::slice::from_ref(holder),
            Self::Many(holders) => holders,
        }
    }
}

impl DerefMut for Holders {
    fn deref_mut(&mut self) -> &mut [Holder] {
        match self {
            Self::One(holder) => std::slice::from_mut(holder),
            Self::Many(holders) => holders,
        }
    }
}

impl FromIterator<Holder> for Holders {
    fn from_iter<I: IntoIterator<Item = Holder>>(holders: I) -> Self {
        let holders: Box<[Holder]> = holders.into_iter().collect();
        if let [holder] = *holders {
            Self::One(holder)
        } else {
            Self::Many(holders)
        }
    }
}

#[cfg(test)]
mod tests {
    use tunnel_proto::wire::name::NodeName;

    use super::*;

    /// A table has a power of two of slots, at most 7/8 of them in use, and a byte for each. The
    /// text of a name is an allocation with two counters of 8 bytes, to which an allocator adds up
    /// to 16.
    #[test]
    fn entry_of_a_node_with_one_holder_is_below_120_bytes() {
        assert_eq!((size_of::<Holder>(), size_of::<Holders>()), (30, 32));
        let slot = size_of::<(NodeName, Holders)>() + 1;
        let slots = (100_000_usize * 8 / 7).next_power_of_two();
        let text = 2 * size_of::<usize>() + "worker-123456".len() + 16;
        let entry = slots * slot / 100_000 + text;
        assert!(entry < 120, "{entry} bytes");
    }

    #[test]
    fn holders_are_collected_in_their_order() {
        let holder = |replica| Holder {
            instance: InstanceId::new([1; 16]),
            since: 1,
            list: 0,
            replica,
        };
        for count in 0..4 {
            let holders: Holders = (0..count).map(holder).collect();
            let replicas: Vec<_> = holders.iter().map(|holder| holder.replica).collect();
            assert_eq!(replicas, (0..count).collect::<Vec<_>>());
            assert_eq!(matches!(holders, Holders::One(_)), count == 1);
        }
    }
}
