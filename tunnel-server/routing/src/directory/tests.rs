use std::collections::{BTreeMap, BTreeSet};

use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

use super::*;

mod model;

fn replica(number: usize) -> ReplicaId {
    format!("server-{number}").parse().unwrap()
}

fn node(number: usize) -> NodeName {
    format!("worker-{number}").parse().unwrap()
}

fn instance(number: u8) -> InstanceId {
    InstanceId::new([number; 16])
}

fn held_node(number: usize) -> HeldNode {
    HeldNode {
        node: node(number),
        instance: instance(1),
        since: UNIX_EPOCH + Duration::from_secs(1),
    }
}

fn directory(max: usize, lists: &[(usize, &[usize])]) -> Directory {
    let mut directory = Directory::new(max);
    for (number, nodes) in lists {
        let id = replica(*number);
        directory.begin(&id);
        let nodes = nodes.iter().map(|number| held_node(*number)).collect();
        assert_eq!(directory.apply(&id, nodes, &[]), 0);
        directory.complete(&id);
    }
    directory
}

#[test]
fn holders_are_live_before_leaving_and_then_by_weight() {
    let mut directory = directory(10, &[(0, &[1]), (1, &[1]), (2, &[1])]);
    let by_weight = directory.holders(&node(1));
    let mut expected: Vec<_> = (0..3).map(replica).collect();
    expected.sort_by_key(|id| !weight(&node(1), id));
    assert_eq!(by_weight, expected);
    directory.set_leaving(&by_weight[0]);
    let [first, second, third] = [1, 2, 0].map(|index| by_weight[index].clone());
    let all = |_: &ReplicaId| Some(LinkState::Live);
    assert_eq!(
        directory.holders(&node(1)),
        [first.clone(), second.clone(), third]
    );
    assert_eq!(
        directory.candidates(&node(1), all),
        [first.clone(), second.clone()]
    );
    let others = |id: &ReplicaId| (*id != first).then_some(LinkState::Live);
    let without_first = directory.candidates(&node(1), others);
    assert_eq!(without_first, [second.clone(), by_weight[0].clone()]);
    let linked = |id: &ReplicaId| (*id == second).then_some(LinkState::Live);
    assert_eq!(
        directory.candidates(&node(1), linked),
        std::slice::from_ref(&second)
    );
    // A new list is that of a new process.
    directory.begin(&by_weight[0]);
    directory.apply(&by_weight[0], vec![held_node(1)], &[]);
    assert_eq!(directory.holders(&node(1)), by_weight);
}

#[test]
fn holders_with_a_suspect_connection_are_asked_last() {
    let mut directory = directory(10, &[(0, &[1]), (1, &[1]), (2, &[1])]);
    let by_weight = directory.holders(&node(1));
    let link = |id: &ReplicaId| {
        let is_suspect = *id == by_weight[0];
        Some(if is_suspect {
            LinkState::Suspect
        } else {
            LinkState::Live
        })
    };
    assert_eq!(directory.candidates(&node(1), link), by_weight[1..]);
    let others = |id: &ReplicaId| link(id).filter(|_| *id != by_weight[1]);
    let rest = directory.candidates(&node(1), others);
    assert_eq!(rest, [by_weight[2].clone(), by_weight[0].clone()]);
    // A server that leaves still answers.
    directory.set_leaving(&by_weight[1]);
    directory.set_leaving(&by_weight[2]);
    assert_eq!(directory.candidates(&node(1), link), by_weight[1..]);
}

#[test]
fn nodes_of_a_server_that_is_gone_stay_until_somebody_knows_their_state() {
    let mut directory = directory(10, &[(0, &[1, 2, 3, 4]), (1, &[2])]);
    let since = UNIX_EPOCH + Duration::from_secs(5);
    let gone = |directory: &Directory| -> Vec<NodeName> {
        directory.gone_after(Bound::Unbounded).cloned().collect()
    };
    directory.set_leaving(&replica(0));
    directory.apply(&replica(0), Vec::new(), &[node(4)]);
    // Each announcement ends so, whether or not it is a list.
    directory.complete(&replica(0));
    assert_eq!(gone(&directory), [], "the server is still there");
    directory.lose_replica(&replica(0), since);
    assert_eq!(gone(&directory), [node(1), node(3), node(4)]);
    assert_eq!(directory.gone_holder(&node(1)), Some((&replica(0), since)));
    assert_eq!(
        directory.gone_holder(&node(2)),
        None,
        "another one holds it"
    );
    assert!(!directory.holds(&node(1)));
    directory.lose_replica(&replica(0), since + Duration::from_secs(9));
    assert_eq!(directory.gone_holder(&node(1)), Some((&replica(0), since)));

    // The agent of node 3 comes to another server and leaves that.
    directory.apply(&replica(1), vec![held_node(3)], &[]);
    directory.apply(&replica(1), Vec::new(), &[node(3)]);
    let after = node(1);
    let later: Vec<_> = directory.gone_after(Bound::Excluded(&after)).collect();
    assert_eq!(later, [&node(4)]);
    directory.begin(&replica(0));
    directory.apply(&replica(0), vec![held_node(1)], &[]);
    directory.complete(&replica(0));
    assert_eq!(gone(&directory), [], "its list says which nodes it has");
    directory.lose_replica(&replica(0), since);
    assert_eq!(gone(&directory), [node(1)]);
    directory.remove_replica(&replica(0));
    assert_eq!(gone(&directory), [], "the server is no longer expected");
    let unresolved = |directory: &Directory| -> Vec<NodeName> {
        let nodes = directory.unresolved_after(Bound::Unbounded, 10);
        nodes.into_iter().cloned().collect()
    };
    // Node 4 was not in the list of the server that was back.
    assert_eq!(unresolved(&directory), [node(1), node(4)]);
    let [first, second] = [Bound::Unbounded, Bound::Excluded(&after)];
    assert_eq!(directory.unresolved_after(first, 1), [&node(1)]);
    assert_eq!(directory.unresolved_after(second, 1), [&node(4)]);
    directory.apply(&replica(1), vec![held_node(4)], &[]);
    assert_eq!(unresolved(&directory), [node(1)]);
    directory.resolve(&node(1));
    assert_eq!(unresolved(&directory), []);
}

#[test]
fn weights_spread_nodes_over_their_holders() {
    let ids = [replica(0), replica(1), replica(2)];
    let mut first = BTreeMap::new();
    for number in 0..3000 {
        let best = ids.iter().max_by_key(|id| weight(&node(number), id));
        *first.entry(best.unwrap()).or_insert(0) += 1;
    }
    assert!(first.values().all(|count| *count > 800), "{first:?}");
}

#[test]
fn entries_above_the_limit_are_ignored() {
    let mut directory = directory(3, &[(0, &[1, 2]), (1, &[1, 2, 3])]);
    assert_eq!(
        directory.apply(
            &replica(0),
            vec![held_node(3), held_node(4), held_node(5)],
            &[]
        ),
        2
    );
    assert_eq!(directory.nodes_of(&replica(0)), 3);
    let again = HeldNode {
        instance: instance(2),
        ..held_node(1)
    };
    assert_eq!(
        directory.apply(&replica(0), vec![again], &[]),
        0,
        "no new entry"
    );
    assert_eq!(
        directory.apply(&replica(0), vec![held_node(4)], &[node(3)]),
        0
    );
    assert_eq!((directory.nodes(), directory.nodes_of(&replica(0))), (4, 3));
}

#[test]
fn nodes_are_removed_forgotten_and_lost_with_their_server() {
    let mut directory = directory(10, &[(0, &[1, 2, 3]), (1, &[2])]);
    directory.apply(&replica(0), vec![], &[node(1), node(9)]);
    assert!(!directory.holds(&node(1)));
    let before = directory.announcement(&node(3), &replica(0)).unwrap();
    directory.forget(&node(3), &replica(1), before);
    assert!(directory.holds(&node(3)), "another server holds it");
    let newer = HeldNode {
        since: UNIX_EPOCH + Duration::from_secs(2),
        ..held_node(3)
    };
    directory.apply(&replica(0), vec![newer], &[]);
    directory.forget(&node(3), &replica(0), before);
    assert!(directory.holds(&node(3)), "announced again");
    let again = directory.announcement(&node(3), &replica(0)).unwrap();
    directory.forget(&node(3), &replica(0), again);
    assert!(!directory.holds(&node(3)));
    assert_eq!(directory.nodes_of(&replica(0)), 1);
    directory.remove_replica(&replica(0));
    assert_eq!(directory.holders(&node(2)), [replica(1)]);
    directory.begin(&replica(1));
    directory.complete(&replica(1));
    assert_eq!((directory.nodes(), directory.iter().count()), (0, 0));
}

#[test]
fn earlier_list_holds_until_the_new_one_is_complete() {
    let mut directory = directory(10, &[(0, &[1, 2, 3]), (1, &[1])]);
    // A list whose connection is lost before its end.
    directory.begin(&replica(0));
    directory.apply(&replica(0), vec![held_node(4)], &[]);
    directory.begin(&replica(0));
    directory.apply(&replica(0), vec![held_node(3)], &[]);
    assert!((1..=4).all(|number| directory.holds(&node(number))));
    assert_eq!(directory.nodes_of(&replica(0)), 4);
    directory.apply(&replica(0), vec![held_node(5)], &[]);
    directory.complete(&replica(0));
    assert_eq!(directory.holders(&node(1)), [replica(1)]);
    let held = [2, 3, 4, 5].map(|number| directory.holds(&node(number)));
    assert_eq!(held, [false, true, false, true]);
    assert_eq!(directory.nodes_of(&replica(0)), 2);
    // A change is no list.
    directory.apply(&replica(0), vec![held_node(6)], &[]);
    directory.complete(&replica(0));
    assert_eq!(directory.nodes_of(&replica(0)), 3);
}

#[test]
fn earlier_list_makes_room_for_the_new_one_at_the_limit() {
    let mut directory = directory(3, &[(0, &[1, 2, 3])]);
    directory.begin(&replica(0));
    let nodes = [3, 4, 5].map(held_node).to_vec();
    assert_eq!(directory.apply(&replica(0), nodes, &[]), 0);
    assert_eq!((directory.nodes(), directory.nodes_of(&replica(0))), (3, 3));
    assert_eq!(directory.apply(&replica(0), vec![held_node(6)], &[]), 1);
}

#[test]
fn others_are_holders_with_another_agent_process() {
    let mut directory = directory(10, &[(0, &[1]), (1, &[1])]);
    let since = UNIX_EPOCH + Duration::from_millis(1500);
    let newer = HeldNode {
        node: node(1),
        instance: instance(2),
        since,
    };
    directory.apply(&replica(1), vec![newer], &[]);
    let others = directory.others(&node(1), instance(1));
    let [(id, other)] = &others[..] else {
        panic!("{others:?}");
    };
    assert_eq!((id, other.instance), (&replica(1), instance(2)));
    assert_eq!(other.since, since);
    assert_eq!(directory.others(&node(1), instance(3)).len(), 2);
    assert!(directory.others(&node(2), instance(1)).is_empty());
}

/// A server of the model: the nodes of its registry, and what the others announced.
struct Server {
    registry: BTreeSet<usize>,
    directory: Directory,
}

impl Server {
    /// Serves a forwarded stream from the registry alone, as `peers/serve.rs` does.
    fn serve_forwarded(&self, number: usize) -> bool {
        self.registry.contains(&number)
    }
}

/// Announces random nodes that the server may not have, in lists, deltas and removals in any order.
fn lie(directory: &mut Directory, id: &ReplicaId, random: &mut SmallRng) {
    for _ in 0..random.random_range(0..4) {
        let mut some = |most: usize| -> Vec<usize> {
            let count = random.random_range(0..most);
            (0..count).map(|_| random.random_range(0..NODES)).collect()
        };
        let (added, removed) = (some(8), some(4));
        let removed: Vec<_> = removed.into_iter().map(node).collect();
        match random.random_range(0..8) {
            0 => directory.begin(id),
            1 => directory.set_leaving(id),
            2 => directory.remove_replica(id),
            _ => {}
        }
        directory.apply(id, added.into_iter().map(held_node).collect(), &removed);
        if random.random_range(0..4) > 0 {
            directory.complete(id);
        }
    }
}

const NODES: usize = 12;

#[test]
fn ten_thousand_lying_lists_cause_one_hop_at_most_and_only_to_named_holders() {
    let mut random = SmallRng::seed_from_u64(7);
    for _ in 0..10_000 {
        let count = random.random_range(2..6);
        let mut servers: Vec<Server> = (0..count)
            .map(|_| Server {
                registry: (0..3).map(|_| random.random_range(0..NODES)).collect(),
                directory: Directory::new(random.random_range(1..8)),
            })
            .collect();
        for (own, server) in servers.iter_mut().enumerate() {
            for other in (0..count).filter(|other| *other != own) {
                lie(&mut server.directory, &replica(other), &mut random);
            }
        }
        for own in 0..count {
            let (number, except) = (random.random_range(0..NODES), random.random_range(0..count));
            let except = replica(except);
            open(&servers, own, number, &except);
        }
    }
}

/// Opens a stream at a server, and checks every server that is asked.
fn open(servers: &[Server], own: usize, number: usize, except: &ReplicaId) {
    let directory = &servers[own].directory;
    let named: BTreeSet<_> = directory
        .iter()
        .filter(|(name, _)| **name == node(number))
        .map(|(_, id)| id.clone())
        .collect();
    let link = |id: &ReplicaId| {
        let is_linked = (0..servers.len()).any(|other| replica(other) == *id);
        (is_linked && id != except).then_some(LinkState::Live)
    };
    let candidates = directory.candidates(&node(number), link);
    assert!(candidates.len() <= HOLDERS_TRIED_MAX);
    assert!(!candidates.contains(&replica(own)) && !candidates.contains(except));
    let distinct: BTreeSet<_> = candidates.iter().collect();
    assert_eq!(distinct.len(), candidates.len());
    for candidate in &candidates {
        assert!(named.contains(candidate), "{candidate} was never named");
        let asked = (0..servers.len()).find(|other| replica(*other) == *candidate);
        // The answer ends there, whatever the directory of that server says.
        let _is_served = servers[asked.unwrap()].serve_forwarded(number);
    }
    let of_replicas: usize = (0..servers.len())
        .map(|other| directory.nodes_of(&replica(other)))
        .sum();
    assert_eq!(of_replicas, directory.iter().count());
}
