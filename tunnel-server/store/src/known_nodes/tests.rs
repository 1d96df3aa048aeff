use super::*;
use crate::data_dir::testing::Scratch;

fn name(text: &str) -> NodeName {
    text.parse().unwrap()
}

fn at(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
}

#[test]
fn nodes_survive_a_restart_until_they_are_forgotten() {
    let scratch = Scratch::new();
    let nodes = KnownNodes::open(&scratch.0).unwrap();
    nodes.record(&name("worker-1"), &["192.168.33.221".parse().unwrap()]);
    nodes.record_connection_at(&name("worker-2"), [at(500), at(5_000)], false, at(1_000));
    nodes.save().unwrap();

    let again = KnownNodes::open(&scratch.0).unwrap();
    for node in [name("worker-1"), name("worker-2")] {
        assert_eq!(again.get(&node), nodes.get(&node));
    }
    let known = again.get(&name("worker-2")).unwrap();
    assert_eq!(known.certificate_not_after, Some(at(5_000)));
    assert!(again.forget(&name("worker-1")));
    assert!(!again.forget(&name("worker-1")));
    again.save().unwrap();
    let left = KnownNodes::open(&scratch.0).unwrap();
    assert!(!left.knows(&name("worker-1")));
}

#[test]
fn addresses_are_canonical_and_stay_without_others() {
    let scratch = Scratch::new();
    let nodes = KnownNodes::open(&scratch.0).unwrap();
    let addresses = |node: &str| nodes.get(&name(node)).unwrap().addresses;
    nodes.record(&name("a"), &["::ffff:192.168.33.221".parse().unwrap()]);
    assert_eq!(
        addresses("a"),
        ["192.168.33.221".parse::<IpAddr>().unwrap()]
    );
    nodes.record(&name("a"), &["10.0.0.9".parse().unwrap()]);
    nodes.record(&name("a"), &[]);
    assert_eq!(addresses("a"), ["10.0.0.9".parse::<IpAddr>().unwrap()]);
}

#[test]
fn last_enrollment_is_persisted_and_changes_routes_of_new_nodes_only() {
    let scratch = Scratch::new();
    let nodes = KnownNodes::open(&scratch.0).unwrap();
    let changed = nodes.changed();
    nodes.record_enrollment(&name("worker-1"), EnrollmentKind::JoinToken);
    nodes.record_enrollment(&name("worker-1"), EnrollmentKind::ServiceAccount);
    assert_eq!(*changed.borrow(), 1);
    nodes.save().unwrap();
    let again = KnownNodes::open(&scratch.0).unwrap();
    let enrollment = again.get(&name("worker-1")).unwrap().enrollment;
    assert_eq!(enrollment, Some(EnrollmentKind::ServiceAccount));
}

#[test]
fn agent_has_its_kubelets_certificate_until_it_connects_with_another_one() {
    let scratch = Scratch::new();
    let nodes = KnownNodes::open(&scratch.0).unwrap();
    let connect = |is_kubelet| {
        let certificate = [at(500), at(90_000)];
        nodes.record_connection_at(&name("worker-1"), certificate, is_kubelet, at(1_000));
        nodes.get(&name("worker-1")).unwrap().enrollment
    };
    nodes.record_enrollment(&name("worker-1"), EnrollmentKind::JoinToken);
    assert_eq!(connect(false), Some(EnrollmentKind::JoinToken));
    assert_eq!(connect(true), Some(EnrollmentKind::Kubelet));
    // It enrolled at another server.
    assert_eq!(connect(false), None);
}

#[test]
fn last_sign_of_life_is_persisted_and_makes_no_node_known() {
    let scratch = Scratch::new();
    let nodes = KnownNodes::open(&scratch.0).unwrap();
    nodes.record_connection_at(&name("worker-1"), [at(500), at(90_000)], false, at(1_000));
    let last_seen = || nodes.get(&name("worker-1")).unwrap().last_seen;
    nodes.record_last_seen(&name("worker-1"), at(1_100));
    assert_eq!(last_seen(), Some(at(1_000)), "within the resolution");
    nodes.record_last_seen(&name("worker-1"), at(50_000));
    assert_eq!(last_seen(), Some(at(50_000)));
    nodes.record_last_seen(&name("worker-1"), at(2_000));
    assert_eq!(last_seen(), Some(at(50_000)), "time goes forward");
    nodes.record_last_seen(&name("worker-2"), at(50_000));
    assert!(!nodes.knows(&name("worker-2")));
}

#[test]
fn reconnects_change_neither_routes_nor_the_file() {
    let scratch = Scratch::new();
    let nodes = KnownNodes::open(&scratch.0).unwrap();
    let changed = nodes.changed();
    let reconnect = |until, now| {
        nodes.record_connection_at(&name("worker-1"), [at(500), at(until)], false, at(now));
    };
    let unsaved = || nodes.store.unsaved(Table::Nodes).is_some();
    reconnect(90_000, 1_000);
    assert_eq!(*changed.borrow(), 1);
    nodes.save().unwrap();
    reconnect(90_000, 1_010);
    assert!(!unsaved());
    reconnect(99_000, 1_020);
    assert!(unsaved());
    assert_eq!(*changed.borrow(), 1);
}

#[test]
fn node_added_by_a_verb_is_there_after_it_and_a_change_is_on_disk_by_itself() {
    let scratch = Scratch::new();
    let verb = KnownNodes::open(&scratch.0).unwrap();
    verb.record(&name("worker-1"), &[]);
    drop(verb);
    let server = KnownNodes::open(&scratch.0).unwrap();
    assert!(server.knows(&name("worker-1")));
    server.record(&name("worker-2"), &[]);
    while server.store.unsaved(Table::Nodes).is_some() {
        std::thread::yield_now();
    }
    server.forget(&name("worker-1"));
    drop(server);
    let left = KnownNodes::open(&scratch.0).unwrap().snapshot();
    let left: Vec<_> = left.iter().map(|(name, _)| name).collect();
    assert_eq!(left, [&name("worker-2")]);
}

#[test]
fn labels_that_change_are_a_change_for_those_who_follow() {
    let scratch = Scratch::new();
    let nodes = KnownNodes::open(&scratch.0).unwrap();
    nodes.record(&name("a"), &[]);
    let mut changed = nodes.changed();
    changed.borrow_and_update();
    let labels = BTreeMap::from([("tier".into(), "pay".into())]);
    nodes.record_token(&name("a"), &[], &labels);
    assert!(changed.has_changed().unwrap());
    changed.borrow_and_update();
    nodes.record_token(&name("a"), &[], &labels);
    assert!(!changed.has_changed().unwrap());
}

#[test]
fn labels_of_a_forgotten_node_stay_and_no_use_of_a_token_replaces_them() {
    let scratch = Scratch::new();
    let labels = |tier: &str| Labels::from([("tier".into(), tier.into())]);
    let nodes = KnownNodes::open(&scratch.0).unwrap();
    let tier = |nodes: &KnownNodes| nodes.get(&name("a")).unwrap().labels;
    nodes.add(&name("a"), &labels("token"));
    assert_eq!(tier(&nodes), labels("token"));
    nodes.record_token(&name("a"), &[], &labels("pay"));
    nodes.add(&name("a"), &labels("token"));
    assert_eq!(tier(&nodes), labels("pay"));
    assert!(nodes.forget(&name("a")) && !nodes.knows(&name("a")));
    nodes.save().unwrap();

    let again = KnownNodes::open(&scratch.0).unwrap();
    assert!(!again.knows(&name("a")));
    // Its certificate is valid.
    again.record_connection_at(&name("a"), [at(500), at(5_000)], false, at(1_000));
    assert_eq!(tier(&again), labels("pay"));
    assert!(again.forget(&name("a")));
    again.add(&name("a"), &labels("token"));
    assert_eq!(tier(&again), labels("pay"));
    assert!(again.forget(&name("a")));
    again.record_token(&name("a"), &[], &labels("shop"));
    assert_eq!(tier(&again), labels("shop"));
}
