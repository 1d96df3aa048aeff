use tokio::sync::mpsc;
use tunnel_proto::identity::Role;
use tunnel_store::document::{DocumentOwner, ObservedContent};
use tunnel_store::testing::{Scratch, node};

use super::OrderAction::{Reissue, Revoke, Unrevoke};
use super::*;

mod ends;

fn peer(generation: u64) -> PeerIdentity {
    PeerIdentity {
        domain: TrustDomain::Tunnel,
        role: Role::Agent(node()),
        generation,
        not_before: SystemTime::UNIX_EPOCH,
        not_after: SystemTime::UNIX_EPOCH,
    }
}

fn open(scratch: &Scratch) -> Revocations {
    Revocations::open(&scratch.0, true).unwrap()
}

/// Orders something about `worker-1` at a time in seconds.
fn order(revocations: &Revocations, action: OrderAction, at: u64) -> usize {
    revocations.order(action, &[node()], time(at)).len()
}

/// Merges orders of another server. The node is known.
fn merge(revocations: &Revocations, server: &str, orders: &[NodeOrder]) {
    let is_node = |name: &NodeName| *name == node();
    revocations.merge(&server.parse().unwrap(), orders.to_vec(), &is_node);
}

#[test]
fn revoked_node_is_refused_with_every_certificate_until_the_end_of_the_revocation() {
    let scratch = Scratch::new();
    let revocations = open(&scratch);
    assert_eq!(order(&revocations, Unrevoke, 1), 0, "not revoked");
    // The clock is wrong at first.
    assert_eq!(order(&revocations, Revoke, u64::MAX), 1);
    revocations.flush().unwrap();
    for revocations in [&revocations, &open(&scratch)] {
        assert!(revocations.is_revoked(&peer(0)) && revocations.is_revoked(&peer(9)));
        assert_eq!(revocations.in_force().len(), 1);
    }
    assert_eq!(order(&revocations, Unrevoke, 0), 1);
    assert_eq!(order(&revocations, Unrevoke, 0), 0, "ended once");
    revocations.flush().unwrap();
    for revocations in [&revocations, &open(&scratch)] {
        assert!(!revocations.is_revoked(&peer(0)) && revocations.in_force().is_empty());
    }
}

#[test]
fn reissue_refuses_earlier_generations_and_credentials_of_others_by_their_time() {
    let scratch = Scratch::new();
    let revocations = open(&scratch);
    order(&revocations, Reissue, 100);
    assert_eq!(revocations.of_node(&node()).generation, 1);
    assert!(revocations.is_revoked(&peer(0)) && !revocations.is_revoked(&peer(1)));
    // The end of a revocation does not bring the certificates back.
    order(&revocations, Revoke, 100);
    order(&revocations, Unrevoke, 100);
    assert!(revocations.is_revoked(&peer(0)) && !revocations.is_revoked(&peer(1)));
    let kubelet = |issued| PeerIdentity {
        domain: TrustDomain::Cluster,
        not_before: time(issued),
        ..peer(0)
    };
    assert!(revocations.is_revoked(&kubelet(100)) && !revocations.is_revoked(&kubelet(101)));
    revocations.flush().unwrap();
    let own_ca = Revocations::open(&scratch.0, false).unwrap();
    assert!(
        own_ca.is_revoked(&peer(1)),
        "generations of another CA mean nothing"
    );
}

#[test]
fn order_that_cannot_be_saved_is_in_force_and_pending() {
    let scratch = Scratch::new();
    let revocations = open(&scratch);
    let path = scratch.0.state();
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    order(&revocations, Revoke, 1);
    assert!(revocations.flush().is_err());
    assert!(revocations.is_revoked(&peer(0)));
    assert_eq!(revocations.unwritten().len(), 1);
    assert!(revocations.conditions()[0].contains("not saved"));
    std::fs::remove_dir(&path).unwrap();
    revocations.flush().unwrap();
    assert!(revocations.unwritten().is_empty() && revocations.conditions().is_empty());
    drop(revocations);
    assert!(open(&scratch).is_revoked(&peer(0)));
}

#[test]
fn damaged_order_stops_the_start_with_the_command_that_repairs_it() {
    let scratch = Scratch::new();
    let store = scratch.0.store(OnDamage::Stop).unwrap();
    store.change(Table::Orders, vec![RowChange::upsert("worker-1", &"?")]);
    let error = Revocations::open(&scratch.0, true).unwrap_err().to_string();
    assert!(error.contains("worker-1 of orders is damaged"), "{error}");
    assert!(error.contains("tunnel-server data repair"), "{error}");
    // In a cluster a Secret has it.
    let (document, _observed) = shared(r#"{"nodes":{"worker-1":{"counter":1,"revoked":true}}}"#);
    let revocations = Revocations::open_shared(&scratch.0, document, true).unwrap();
    assert!(revocations.is_revoked(&peer(0)));
}

/// The row of a node in the form of a later version.
const LATER: &str = "\u{2}{\"order\":{\"generation\":9},\"more\":1}";

#[test]
fn row_of_a_later_version_refuses_its_node_until_an_operator_decides_again() {
    let scratch = Scratch::new();
    let later = |key: &str| RowChange::raw(key, LATER.as_bytes());
    let stored = |scratch: &Scratch, table| {
        let store = scratch.0.store(OnDamage::Stop).unwrap();
        let rows = store.rows(table).unwrap();
        let rows = rows.into_iter();
        rows.map(|(key, content)| format!("{key} {}", String::from_utf8_lossy(content.as_slice())))
            .collect::<Vec<_>>()
    };
    let store = scratch.0.store(OnDamage::Stop).unwrap();
    store.change(Table::Orders, vec![later("worker-1"), later("worker-2")]);
    let revocations = open(&scratch);
    assert!(revocations.is_revoked(&peer(0)) && revocations.is_revoked(&peer(9)));
    assert_eq!(revocations.in_force().len(), 2);
    let after = Bound::Excluded(&revocations.in_force()[0].node).cloned();
    assert_eq!(revocations.in_force_after(after.as_ref(), 5).len(), 1);
    // Nothing is announced that is not known.
    assert!(revocations.all().is_empty());
    let conditions = revocations.conditions();
    assert!(
        conditions[0].contains("worker-1, worker-2"),
        "{conditions:?}"
    );
    // What another server knows may be older. The row stays.
    merge(&revocations, "a", &[history()]);
    revocations.record_generation(&peer(7));
    revocations.flush().unwrap();
    assert!(revocations.is_revoked(&peer(9)));
    assert_eq!(
        stored(&scratch, Table::Orders),
        [format!("worker-1 {LATER}"), format!("worker-2 {LATER}")]
    );
    // A copy of the row stays then, too.
    assert_eq!(order(&revocations, Unrevoke, 5), 1);
    assert!(!revocations.is_revoked(&peer(9)));
    revocations.flush().unwrap();
    drop((revocations, store));
    let again = open(&scratch);
    assert!(!again.is_revoked(&peer(9)) && again.of_node(&node()).generation == 9);
    assert!(again.is_revoked(&peer(8)), "ended by the later version");
    assert_eq!(again.in_force().len(), 1, "worker-2");
    let aside = stored(&scratch, Table::Damaged);
    assert!(aside[0].starts_with("orders/worker-1 "), "{aside:?}");
}

#[test]
fn orders_of_another_server_about_unknown_names_are_bounded() {
    let scratch = Scratch::new();
    let revocations = open(&scratch);
    let revoked = |name: &str| NodeOrder {
        node: name.parse().unwrap(),
        order: Order::default().with_revoked(true, u64::MAX),
    };
    let announced = (10_000..20_000).map(|number| revoked(&format!("n{number}")));
    let announced: Vec<_> = announced.collect();
    merge(&revocations, "b", &announced);
    let room = FOREIGN_BYTES_MAX / (ENTRY_BYTES + 6);
    // The same again changes nothing.
    merge(&revocations, "c", &announced[..5]);
    assert_eq!(revocations.all(), announced[..room]);
    // Orders about nodes always have room.
    merge(&revocations, "b", &[revoked("worker-1")]);
    assert!(revocations.of_node(&node()).is_revoked);
    let far = NodeOrder {
        order: Order {
            counter: u64::MAX,
            ..Order::default()
        },
        ..announced[0].clone()
    };
    merge(&revocations, "d", &[far]);
    let conditions = revocations.conditions();
    assert_eq!(conditions.len(), 2, "{conditions:?}");
    let refused = announced.len() - room;
    for (condition, words) in conditions.iter().zip([
        format!("server b announced {refused} orders"),
        "server d announced 1 orders".to_owned(),
    ]) {
        assert!(condition.contains(&words), "{condition}");
        let used = room * (ENTRY_BYTES + 6);
        assert!(
            condition.contains(&format!("{used} of 262144")),
            "{condition}"
        );
    }
    // The condition of a server ends when that announces something else, or is gone.
    let digests = Arc::new(Mutex::new(BTreeMap::from([("b", [1; 32])])));
    let announced_last = digests.clone();
    revocations.announced_with(move |replica| announced_last.lock().get(replica.as_str()).copied());
    let reported = |server: &'static str, digest: u8| {
        digests.lock().insert(server, [digest; 32]);
        revocations.conditions().len()
    };
    assert_eq!(reported("b", 1), 1, "that of d, which is not connected");
    merge(&revocations, "b", &announced);
    assert_eq!(reported("b", 1), 2);
    assert_eq!(reported("b", 2), 1);
    // Operators may order more, and end what a server whose clock was wrong has ordered.
    assert_eq!(
        revocations
            .order(Revoke, &["n99999".parse().unwrap()], time(1))
            .len(),
        1
    );
    let names: Vec<_> = announced[..3]
        .iter()
        .map(|order| order.node.clone())
        .collect();
    assert_eq!(revocations.order(Unrevoke, &names, time(1)), names);
    revocations.flush().unwrap();
    assert_eq!(open(&scratch).in_force().len(), room + 2 - names.len());
}

#[test]
fn connection_alone_ends_no_revocation_where_servers_share_a_document() {
    let scratch = Scratch::new();
    let (document, observed) = shared(r#"{"nodes":{"worker-1":{"counter":1,"revoked":true}}}"#);
    let revocations = Revocations::open_shared(&scratch.0, document, true).unwrap();
    let ended = Order::default()
        .with_revoked(true, 0)
        .with_revoked(false, 2);
    let announced = ended.reissued(3);
    merge(&revocations, "b", &[NodeOrder::new(&node(), announced)]);
    let order = revocations.of_node(&node());
    assert!(order.is_revoked && order.generation == 1, "{order:?}");
    observed.send_modify(|observed| {
        observed.sequence += 1;
        observed.content =
            Some(br#"{"nodes":{"worker-1":{"counter":2,"at":2}}}"#.as_slice().into());
    });
    assert_eq!(revocations.of_node(&node()), announced);
    // Standalone servers have their connections only.
    let other = Scratch::new();
    let alone = open(&other);
    for order in [Order::default().with_revoked(true, 0), ended] {
        merge(&alone, "b", &[NodeOrder::new(&node(), order)]);
        assert_eq!(alone.of_node(&node()), order);
    }
}

/// Returns what a server knows of `worker-1` that revoked and unrevoked it, and reissued it twice.
fn history() -> NodeOrder {
    let revoked = Order::default()
        .with_revoked(true, 1)
        .with_revoked(false, 2);
    NodeOrder::new(&node(), revoked.reissued(3).reissued(4))
}

#[test]
fn orders_without_the_history_survive_it_also_after_a_restart() {
    for is_restarted in [false, true] {
        let scratch = Scratch::new();
        let mut revocations = open(&scratch);
        order(&revocations, Revoke, 9);
        order(&revocations, Reissue, 9);
        revocations.flush().unwrap();
        if is_restarted {
            revocations = open(&scratch);
        }
        merge(&revocations, "a", &[history()]);
        let merged = revocations.of_node(&node());
        // Their numbers follow those of the others, and the day.
        assert!(merged.is_revoked && merged.counter > 20_000, "{merged:?}");
        assert!(merged.generation > 20_000, "{merged:?}");
        // Two servers do not exceed each other.
        let theirs = NodeOrder::new(
            &node(),
            Order {
                reissued_at: u64::MAX,
                ..merged
            },
        );
        merge(&revocations, "a", std::slice::from_ref(&theirs));
        assert_eq!(revocations.of_node(&node()), theirs.order);
    }
}

#[test]
fn confirmed_order_may_be_ended_elsewhere() {
    let scratch = Scratch::new();
    let revocations = open(&scratch);
    order(&revocations, Revoke, 9);
    revocations.flush().unwrap();
    assert!(revocations.confirm_by_peers());
    revocations.confirm_with(|orders| orders.len() == 1);
    assert!(!revocations.confirm_by_peers());
    revocations.flush().unwrap();
    let ended = revocations.of_node(&node()).with_revoked(false, 1);
    for revocations in [&revocations, &open(&scratch)] {
        merge(revocations, "a", &[NodeOrder::new(&node(), ended)]);
        assert!(!revocations.of_node(&node()).is_revoked);
    }
    // What is ordered on top of all that another server knows is confirmed.
    order(&revocations, Revoke, 9);
    assert!(!revocations.confirm_by_peers());
}

#[test]
fn start_with_a_shared_document_that_undoes_an_order_repeats_it() {
    let scratch = Scratch::new();
    let verb = open(&scratch);
    order(&verb, Revoke, 1);
    verb.flush().unwrap();
    let (document, observed) = shared(r#"{"nodes":{"worker-1":{"counter":2}}}"#);
    let revocations = Revocations::open_shared(&scratch.0, document, true).unwrap();
    assert!(revocations.of_node(&node()).counter > 2);
    assert!(revocations.is_revoked(&peer(0)) && revocations.confirm_by_peers());
    observed.send_modify(|observed| {
        let state = revocations.state.lock();
        let written = OrdersDocument::of(&state);
        observed.sequence += 1;
        observed.content = Some(serde_json::to_vec(&written).unwrap().into());
    });
    assert!(revocations.is_revoked(&peer(0)) && !revocations.confirm_by_peers());
}

/// Returns a document that servers share, with this content, and its owner.
fn shared(content: &str) -> (SharedDocument, watch::Sender<ObservedContent>) {
    let observed = watch::Sender::new(ObservedContent {
        content: Some(content.as_bytes().into()),
        ..ObservedContent::default()
    });
    let (swaps, _nobody_writes) = mpsc::channel(1);
    let key = "revoked.json";
    let owner = DocumentOwner { swaps, key };
    let document = SharedDocument::new("Secret x".to_owned(), observed.subscribe(), owner);
    (document.with_repair("kubectl patch".to_owned()), observed)
}

#[test]
fn damaged_shared_document_stops_only_a_server_without_orders_of_its_own() {
    let scratch = Scratch::new();
    let open_shared = |content| {
        let (document, observed) = shared(content);
        let opened = Revocations::open_shared(&scratch.0, document, true);
        opened.map(|revocations| (revocations, observed))
    };
    let refused = open_shared("[]").unwrap_err();
    assert!(refused.to_string().contains("kubectl patch"), "{refused}");
    let verb = open(&scratch);
    order(&verb, Revoke, 1);
    verb.flush().unwrap();
    let (revocations, observed) = open_shared("[]").unwrap();
    assert!(revocations.is_revoked(&peer(0)));
    let conditions = revocations.conditions();
    assert!(conditions[0].contains("kubectl patch"), "{conditions:?}");
    let observe = |content: &[u8]| {
        observed.send_modify(|observed| {
            observed.sequence += 1;
            observed.content = Some(content.into());
        });
    };
    observe(br#"{"nodes":{}}"#);
    assert!(revocations.is_revoked(&peer(0)) && revocations.conditions().is_empty());
    assert!(!revocations.unwritten().is_empty(), "the document lacks it");
    // A damaged name spares the others.
    observe(br#"{"nodes":{"a b":{"counter":1},"worker-2":{"counter":1,"revoked":true}}}"#);
    assert_eq!(revocations.in_force().len(), 2);
    let conditions = revocations.conditions();
    assert!(conditions[0].contains("is damaged"), "{conditions:?}");
}

#[test]
fn order_whose_number_has_no_next_one_is_damaged_and_can_be_undone() {
    let scratch = Scratch::new();
    let orders = |counter: u64| {
        format!(r#"{{"nodes":{{"worker-1":{{"counter":{counter},"revoked":true}}}}}}"#)
    };
    let (document, observed) = shared(r#"{"nodes":{}}"#);
    let revocations = Revocations::open_shared(&scratch.0, document, true).unwrap();
    for damaged in [u64::MAX, u64::MAX - 1] {
        observed.send_modify(|observed| {
            observed.sequence += 1;
            observed.content = Some(orders(damaged).as_bytes().into());
        });
        assert!(revocations.is_revoked(&peer(0)), "it says that it is");
        let conditions = revocations.conditions();
        assert!(conditions[0].contains("next order"), "{conditions:?}");
        order(&revocations, Unrevoke, 1);
        assert!(!revocations.is_revoked(&peer(0)));
    }
    // A row that has one is damaged, too.
    let store = scratch.0.store(OnDamage::Stop).unwrap();
    let row = serde_json::json!({"order": {"counter": u64::MAX, "revoked": true}});
    store.change(Table::Orders, vec![RowChange::upsert("worker-1", &row)]);
    store.flush(Table::Orders).unwrap();
    drop((revocations, store));
    let error = Revocations::open(&scratch.0, true).unwrap_err().to_string();
    assert!(error.contains("worker-1 of orders is damaged"), "{error}");
}
