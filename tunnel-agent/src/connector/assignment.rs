//! Which servers an agent holds sessions with. Pure functions.
//!
//! Each agent ranks the servers by a weight of its name and theirs (rendezvous hashing). A server
//! that comes or goes changes nothing between an agent and the other servers, and the agents of a
//! server that goes are spread over all others.
//!
//! The servers of an agent are in different zones where there are several, so that the loss of a zone
//! leaves the agent a session. A server whose zone is unknown may be in any: one that is certainly in
//! another zone is preferred to it, and it is preferred to one that is certainly in the same.

use tunnel_proto::wire::REPLICAS_MAX;
use tunnel_proto::wire::control::Member;
use tunnel_proto::wire::name::{NodeName, ReplicaId, ZoneName};

use super::distance::ZoneDistances;

/// Returns the servers that the agent of `node` should hold sessions with, at most `count`, the
/// preferred one first. Servers that are leaving count only if all of them are.
///
/// The sessions are in as many zones as there are, of which the nearest are preferred. Among servers
/// in zones that are about as far, and without zones, the weights alone decide: each server has the
/// least overlap with those before it, then the least distance, then the greatest weight.
pub fn wanted_replicas(
    node: &NodeName,
    members: &[Member],
    distances: &ZoneDistances,
    count: usize,
) -> Vec<ReplicaId> {
    let is_any_staying = members.iter().any(|member| !member.is_leaving);
    let mut ranked: Vec<_> = members
        .iter()
        .filter(|member| !member.is_leaving || !is_any_staying)
        .map(|member| (weight(node, &member.id), member))
        .collect();
    ranked.sort_unstable_by(|one, other| (other.0, &other.1.id).cmp(&(one.0, &one.1.id)));
    ranked.dedup_by(|one, other| one.1.id == other.1.id);
    let zones: Vec<_> = ranked
        .iter()
        .map(|(_, member)| member.zone.as_ref())
        .collect();
    let distances = distances.ranks(&zones).into_iter();
    let mut candidates: Vec<_> = ranked
        .iter()
        .zip(distances)
        .map(|((_, member), distance)| (0, distance, *member))
        .collect();
    let mut wanted = Vec::new();
    while wanted.len() < count {
        // Of several that are equal, the first.
        let least = candidates.iter().enumerate();
        let least = least.min_by_key(|(_, (overlap, distance, _))| (*overlap, *distance));
        let Some((index, _)) = least else {
            break;
        };
        let (_, _, next) = candidates.remove(index);
        for (overlap, _, candidate) in &mut candidates {
            *overlap += zone_overlap(&candidate.zone, &next.zone);
        }
        wanted.push(next.id.clone());
    }
    wanted
}

/// Returns the servers that the session at `index` of `sessions` may be replaced by, so that its zone is
/// that of no other session. There are none if it is the first one in its zone, or if that is unknown.
pub fn replicas_of_other_zones(
    members: &[Member],
    sessions: &[Option<ReplicaId>],
    index: usize,
) -> Vec<ReplicaId> {
    let zone_of = |replica: &ReplicaId| {
        let member = members.iter().find(|member| member.id == *replica);
        member.and_then(|member| member.zone.as_ref())
    };
    let zones = sessions
        .iter()
        .map(|session| session.as_ref().and_then(zone_of));
    let zones: Vec<_> = zones.collect();
    let own = zones.get(index).copied().flatten();
    let is_repeated = own.is_some() && zones.iter().take(index).any(|zone| *zone == own);
    let is_elsewhere = |member: &&Member| {
        let zone = member.zone.as_ref();
        is_repeated && !member.is_leaving && zone.is_some() && !zones.contains(&zone)
    };
    let others = members.iter().filter(is_elsewhere);
    others.map(|member| member.id.clone()).collect()
}

/// Returns how far one zone may be another: 0 if they differ, 2 if they are the same, and 1 if one of
/// them is unknown, which is neither.
fn zone_overlap(one: &Option<ZoneName>, other: &Option<ZoneName>) -> usize {
    match (one, other) {
        (Some(one), Some(other)) if one == other => 2,
        (Some(_), Some(_)) => 0,
        (None, _) | (_, None) => 1,
    }
}

/// Distributes `wanted` over connectors, which hold the servers `current`. A connector that holds
/// a wanted server keeps it. Of the others, those without a server come first. A connector gets
/// none if another one holds each wanted server: any will do for it.
pub fn assign_replicas(
    wanted: &[ReplicaId],
    current: &[Option<ReplicaId>],
) -> Vec<Option<ReplicaId>> {
    let mut free = wanted
        .iter()
        .filter(|replica| !current.iter().flatten().any(|own| own == *replica))
        .cloned();
    let mut assigned: Vec<Option<ReplicaId>> = current
        .iter()
        .map(|own| own.clone().filter(|own| wanted.contains(own)))
        .collect();
    for has_replica in [false, true] {
        for (replica, own) in assigned.iter_mut().zip(current) {
            if replica.is_none() && own.is_some() == has_replica {
                *replica = free.next();
            }
        }
    }
    assigned
}

/// Returns the addresses of `replica` that lead to no other member. Members behind one load
/// balancer have none.
pub fn own_addresses<'a>(members: &'a [Member], replica: &ReplicaId) -> Vec<&'a str> {
    let is_shared = |address: &str| {
        members
            .iter()
            .filter(|member| member.id != *replica)
            .any(|member| member.addresses.iter().any(|other| other == address))
    };
    // The configured addresses reach a single server as well.
    if members.len() < 2 {
        return Vec::new();
    }
    members
        .iter()
        .filter(|member| member.id == *replica)
        .flat_map(|member| &member.addresses)
        .map(String::as_str)
        .filter(|address| !is_shared(address))
        .take(ADDRESSES_MAX)
        .collect()
}

/// Returns addresses of `replicas` in this order: the first of each, then the second of each, and
/// so on.
pub fn other_addresses<'a>(members: &'a [Member], replicas: &[ReplicaId]) -> Vec<&'a str> {
    let others: Vec<&Member> = replicas
        .iter()
        .filter_map(|replica| members.iter().find(|member| member.id == *replica))
        .collect();
    (0..ADDRESSES_MAX)
        .flat_map(|index| {
            let others = others.iter();
            others.filter_map(move |member| member.addresses.get(index))
        })
        .map(String::as_str)
        .take(OTHER_ADDRESSES_MAX)
        .collect()
}

/// Returns the rank of a server for a node: FNV-1a of both names, with the finalizer of
/// splitmix64. FNV-1a alone hardly changes the upper bits for names that differ in their last
/// character.
fn weight(node: &NodeName, replica: &ReplicaId) -> u64 {
    let names = node.as_str().bytes().chain([0]);
    let hash = names
        .chain(replica.as_str().bytes())
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
    let hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ (hash >> 31)
}

/// Addresses of one server that are dialed. A server advertises one or two.
const ADDRESSES_MAX: usize = 8;
/// Addresses of other servers that are dialed: one of each in the largest installation.
pub const OTHER_ADDRESSES_MAX: usize = REPLICAS_MAX;

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::time::Duration;

    use super::*;

    fn replica(name: &str) -> ReplicaId {
        name.parse().unwrap()
    }

    fn replicas(names: &[&str]) -> Vec<ReplicaId> {
        names.iter().map(|name| replica(name)).collect()
    }

    /// Returns members as `NAME` or `NAME@ZONE`; one with `-` in front is leaving.
    fn members(texts: &[&str]) -> Vec<Member> {
        let member = |text: &&str| {
            let (name, zone) = text.split_once('@').unwrap_or((text, ""));
            Member {
                id: replica(name.trim_start_matches('-')),
                addresses: Vec::new(),
                is_leaving: name.starts_with('-'),
                zone: zone.parse().ok(),
            }
        };
        texts.iter().map(member).collect()
    }

    /// Returns the servers that `node` wants while no distance is known.
    fn wanted_replicas(node: &NodeName, members: &[Member], count: usize) -> Vec<ReplicaId> {
        super::wanted_replicas(node, members, &ZoneDistances::default(), count)
    }

    /// Returns the members that `node` wants, the preferred one first.
    fn wanted<'a>(node: &NodeName, members: &'a [Member], count: usize) -> Vec<&'a Member> {
        let wanted = wanted_replicas(node, members, count).into_iter();
        let member = |id| members.iter().find(|member| member.id == id);
        wanted.filter_map(member).collect()
    }

    fn node(index: usize) -> NodeName {
        format!("worker-{index}").parse().unwrap()
    }

    #[test]
    fn count_and_leaving_replicas_limit_the_choice() {
        let cases: [(&[&str], usize, &[&str]); 9] = [
            (&[], 2, &[]),
            (&["a"], 2, &["a"]),
            (&["a", "b"], 1, &["a", "b"]),
            (&["a", "b"], 2, &["a", "b"]),
            (&["a", "b", "c"], 2, &["a", "b", "c"]),
            (&["a", "-b", "c"], 2, &["a", "c"]),
            (&["a", "-b"], 2, &["a"]),
            (&["-a", "-b"], 2, &["a", "b"]),
            (&["a", "a"], 2, &["a"]),
        ];
        for (names, count, from) in cases {
            for index in 0..20 {
                let wanted = wanted_replicas(&node(index), &members(names), count);
                let from = replicas(from);
                assert_eq!(wanted.len(), count.min(from.len()), "{names:?}");
                assert!(wanted.iter().all(|one| from.contains(one)), "{names:?}");
            }
        }
    }

    #[test]
    fn order_of_the_members_does_not_matter() {
        let wanted = |names: &[&str]| wanted_replicas(&node(7), &members(names), 2);
        assert_eq!(wanted(&["a", "b", "c"]), wanted(&["c", "a", "b"]));
    }

    #[test]
    fn replica_that_comes_or_goes_changes_nothing_between_a_node_and_the_others() {
        let cases: [(&[&str], &[&str]); 3] = [
            (&["a", "b", "c", "d"], &["a", "b", "c", "-d", "e"]),
            (
                &["a@x", "b@y", "c@z", "d@x"],
                &["a@x", "b@y", "c@z", "-d@x", "e@y"],
            ),
            (
                &["a@x", "b@x", "c@y", "d@y"],
                &["a@x", "b@x", "c@y", "-d@y", "e@z"],
            ),
        ];
        for ((before, after), index) in cases
            .into_iter()
            .flat_map(|case| (0..1000).map(move |index| (case, index)))
        {
            let first = wanted_replicas(&node(index), &members(before), 2);
            let second = wanted_replicas(&node(index), &members(after), 2);
            let [d, e] = ["d", "e"].map(replica);
            for lost in first.iter().filter(|one| !second.contains(one)) {
                assert!(*lost == d || second.contains(&e), "{first:?} {second:?}");
            }
            for new in second.iter().filter(|one| !first.contains(one)) {
                assert!(*new == e || first.contains(&d), "{first:?} {second:?}");
            }
        }
    }

    #[test]
    fn nodes_are_spread_evenly_and_so_are_those_of_a_replica_that_goes() {
        let all = members(&["server-0", "server-1", "server-2", "server-3"]);
        let mut nodes: HashMap<ReplicaId, usize> = HashMap::new();
        let mut moved: HashMap<ReplicaId, usize> = HashMap::new();
        for index in 0..4000 {
            let wanted = wanted_replicas(&node(index), &all, 2);
            *nodes.entry(wanted[0].clone()).or_default() += 1;
            if wanted[0] == replica("server-3") {
                *moved.entry(wanted[1].clone()).or_default() += 1;
            }
        }
        assert_eq!((nodes.len(), moved.len()), (4, 3));
        let is_even = |counts: &HashMap<ReplicaId, usize>, range: std::ops::Range<usize>| {
            counts.values().all(|count| range.contains(count))
        };
        assert!(is_even(&nodes, 850..1150), "{nodes:?}");
        assert!(is_even(&moved, 250..420), "{moved:?}");
    }

    #[test]
    fn sessions_are_in_as_many_zones_as_there_are() {
        let all = [
            "a1@a", "a2@a", "a3@a", "b1@b", "b2@b", "b3@b", "c1@c", "c2@c", "c3@c",
        ];
        let all = members(&all);
        for (count, zones) in [(1, 1), (2, 2), (3, 3), (4, 3), (6, 3)] {
            let mut sessions: HashMap<ReplicaId, usize> = HashMap::new();
            for index in 0..3000 {
                let wanted = wanted(&node(index), &all, count);
                let mut in_zone: HashMap<&ZoneName, usize> = HashMap::new();
                for member in &wanted {
                    *in_zone.entry(member.zone.as_ref().unwrap()).or_default() += 1;
                    *sessions.entry(member.id.clone()).or_default() += 1;
                }
                assert_eq!((wanted.len(), in_zone.len()), (count, zones), "{wanted:?}");
                assert!(
                    in_zone
                        .values()
                        .all(|in_zone| *in_zone <= count.div_ceil(zones))
                );
            }
            // Zones of one size do not change how even the load is.
            let mean = 3000 * count / all.len();
            let is_even = |sessions: &usize| sessions.abs_diff(mean) * 6 < mean;
            assert!(
                sessions.len() == 9 && sessions.values().all(is_even),
                "{sessions:?}"
            );
        }
    }

    #[test]
    fn loss_of_a_zone_leaves_each_node_a_session_and_spreads_the_others() {
        let all: Vec<String> = (0..12).map(|n| format!("s{n}@{}", n % 3)).collect();
        let all = members(&all.iter().map(String::as_str).collect::<Vec<_>>());
        let (lost, left): (Vec<_>, Vec<_>) =
            (all.iter().cloned()).partition(|member| member.zone == "0".parse().ok());
        let mut moved: HashMap<ReplicaId, usize> = HashMap::new();
        for index in 0..3000 {
            let (before, after) = (
                wanted(&node(index), &all, 2),
                wanted(&node(index), &left, 2),
            );
            let stays = |member: &&&Member| !lost.contains(member);
            assert!(before.iter().any(|member| stays(&member)), "{before:?}");
            assert!(
                before
                    .iter()
                    .filter(stays)
                    .all(|member| after.contains(member))
            );
            for new in after.iter().filter(|member| !before.contains(member)) {
                *moved.entry(new.id.clone()).or_default() += 1;
            }
        }
        // Two of three nodes had a session in the zone.
        assert_eq!(moved.len(), left.len());
        assert!(
            moved.values().all(|moved| (200..300).contains(moved)),
            "{moved:?}"
        );
    }

    #[test]
    fn unknown_zone_is_neither_the_same_nor_another_one() {
        // The first session may be with any of them, so that none has more nodes than the others.
        let mut first: HashMap<ReplicaId, usize> = HashMap::new();
        let all = members(&["a1@a", "a2@a", "b1@b", "u1", "u2"]);
        for index in 0..3000 {
            let wanted = wanted(&node(index), &all, 3);
            let names: Vec<_> = wanted.iter().map(|member| member.id.as_str()).collect();
            *first.entry(wanted[0].id.clone()).or_default() += 1;
            match names[0] {
                "a1" | "a2" => assert_eq!(names[1], "b1"),
                "b1" => assert!(names[1].starts_with('a'), "{names:?}"),
                // Any zone may be that of the first one.
                _ => {}
            }
        }
        assert!(
            first.values().all(|first| (500..700).contains(first)),
            "{first:?}"
        );
        let mut second: HashMap<ReplicaId, usize> = HashMap::new();
        let all = members(&["a1@a", "a2@a", "u1", "u2"]);
        for index in 0..3000 {
            let wanted = wanted(&node(index), &all, 2);
            let is_known = |member: &&Member| member.zone.is_some();
            assert!(
                !wanted.iter().all(is_known),
                "the same zone is the last choice"
            );
            *second.entry(wanted[1].id.clone()).or_default() += 1;
        }
        assert_eq!(second.len(), 4, "{second:?}");
    }

    #[test]
    fn nearest_zones_are_preferred_and_the_load_stays_even_in_each() {
        let all = members(&["a1@a", "a2@a", "b1@b", "b2@b", "c1@c", "c2@c"]);
        let mut distances = ZoneDistances::default();
        for (zone, millis) in [("a", 5), ("b", 90), ("c", 8)] {
            distances.record(&zone.parse().unwrap(), Duration::from_millis(millis));
        }
        let mut sessions: HashMap<ReplicaId, usize> = HashMap::new();
        for index in 0..2000 {
            let wanted = super::wanted_replicas(&node(index), &all, &distances, 3);
            assert!(wanted[2].as_str().starts_with('b'), "{wanted:?}");
            for replica in wanted.into_iter().take(2) {
                *sessions.entry(replica).or_default() += 1;
            }
        }
        let is_even = |sessions: &usize| (900..1100).contains(sessions);
        assert!(
            sessions.len() == 4 && sessions.values().all(is_even),
            "{sessions:?}"
        );
        // Zones come before distances.
        let two = members(&["a1@a", "a2@a", "b1@b"]);
        let wanted = super::wanted_replicas(&node(1), &two, &distances, 2);
        assert_eq!(wanted[1], replica("b1"));
    }

    #[test]
    fn later_session_in_a_zone_may_move_to_zones_without_a_session() {
        let all = members(&["a1@a", "a2@a", "b1@b", "-b2@b", "c1@c", "u"]);
        for (sessions, index, expected) in [
            (&["a1", "a2"][..], 1, &["b1", "c1"][..]),
            (&["a1", "a2"], 0, &[]),
            (&["a1", "b1"], 1, &[]),
            (&["a1", "b1", "a2"], 2, &["c1"]),
            (&["u", "a1"], 1, &[]),
            (&["u", "-"], 1, &[]),
            (&["a1", "a2"], 2, &[]),
        ] {
            let ids = sessions.iter().map(|name| name.parse().ok());
            let ids: Vec<Option<ReplicaId>> = ids.collect();
            let found = replicas_of_other_zones(&all, &ids, index);
            assert_eq!(found, replicas(expected), "{sessions:?} {index}");
        }
    }

    #[test]
    fn connector_keeps_a_wanted_replica_and_the_idle_ones_come_first() {
        let (a, b, c) = (Some("a"), Some("b"), Some("c"));
        type Case<'a> = (&'a [&'a str], &'a [Option<&'a str>], &'a [Option<&'a str>]);
        let cases: [Case<'_>; 8] = [
            (&[], &[None], &[None]),
            (&["a"], &[None], &[a]),
            (&["a", "b"], &[b, a], &[b, a]),
            (&["a", "b"], &[b, None], &[b, a]),
            (&["a", "b"], &[c, None], &[b, a]),
            (&["a", "b"], &[c, b], &[a, b]),
            (&["a"], &[c, a], &[None, a]),
            (&["a", "b"], &[None, None, None], &[a, b, None]),
        ];
        for (wanted, current, assigned) in cases {
            let ids = |names: &[Option<&str>]| -> Vec<Option<ReplicaId>> {
                names.iter().map(|name| name.map(replica)).collect()
            };
            let found = assign_replicas(&replicas(wanted), &ids(current));
            assert_eq!(found, ids(assigned), "{wanted:?} {current:?}");
        }
    }

    #[test]
    fn addresses_of_a_load_balancer_belong_to_no_replica() {
        let member = |name: &str, addresses: &[&str]| Member {
            id: replica(name),
            addresses: addresses.iter().map(ToString::to_string).collect(),
            is_leaving: false,
            zone: None,
        };
        let shared = [member("a", &["lb:1"]), member("b", &["lb:1"])];
        assert_eq!(own_addresses(&shared, &replica("a")), [""; 0]);
        let mixed = [member("a", &["lb:1", "a:1"]), member("b", &["b:1", "lb:1"])];
        assert_eq!(own_addresses(&mixed, &replica("a")), ["a:1"]);
        assert_eq!(own_addresses(&mixed, &replica("b")), ["b:1"]);
        assert_eq!(own_addresses(&mixed[..1], &replica("a")), [""; 0]);
    }

    #[test]
    fn first_addresses_of_other_replicas_come_before_the_second_ones() {
        let member = |number: usize| Member {
            id: replica(&format!("server-{number}")),
            addresses: (1..=number)
                .map(|port| format!("{number}:{port}"))
                .collect(),
            is_leaving: false,
            zone: None,
        };
        let members: Vec<_> = (0..4).map(member).collect();
        let others = replicas(&["server-3", "server-0", "gone", "server-2"]);
        let found = other_addresses(&members, &others);
        assert_eq!(found, ["3:1", "2:1", "3:2", "2:2", "3:3"]);
        let many: Vec<_> = (1..100).map(member).collect();
        let others: Vec<_> = many.iter().map(|member| member.id.clone()).collect();
        assert_eq!(other_addresses(&many, &others).len(), REPLICAS_MAX);
    }
}
