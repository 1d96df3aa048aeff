use super::*;
use crate::store::data_dir::testing::Scratch;

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
    nodes.record_connection_at(&name("worker-2"), [at(500), at(5_000)], at(1_000));
    nodes.save().unwrap();

    let again = KnownNodes::open(&scratch.0).unwrap();
    assert_eq!(again.snapshot(), nodes.snapshot());
    let known = &again.snapshot()[&name("worker-2")];
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
    nodes.record_enrollment(&name("worker-1"), EnrollmentKind::Kubelet);
    assert_eq!(*changed.borrow(), 1);
    nodes.save().unwrap();
    let again = KnownNodes::open(&scratch.0).unwrap();
    let enrollment = again.snapshot()[&name("worker-1")].enrollment;
    assert_eq!(enrollment, Some(EnrollmentKind::Kubelet));
}

#[test]
fn last_sign_of_life_is_persisted_and_makes_no_node_known() {
    let scratch = Scratch::new();
    let nodes = KnownNodes::open(&scratch.0).unwrap();
    nodes.record_connection_at(&name("worker-1"), [at(500), at(90_000)], at(1_000));
    let last_seen = || nodes.snapshot()[&name("worker-1")].last_seen;
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
    nodes.record_connection_at(&name("worker-1"), [at(500), at(90_000)], at(1_000));
    assert_eq!(*changed.borrow(), 1);
    nodes.save().unwrap();
    let stamp = nodes.file.stamp();
    nodes.record_connection_at(&name("worker-1"), [at(500), at(90_000)], at(1_010));
    nodes.save().unwrap();
    assert_eq!(nodes.file.stamp(), stamp);
    nodes.record_connection_at(&name("worker-1"), [at(500), at(99_000)], at(1_020));
    nodes.save().unwrap();
    assert_ne!(nodes.file.stamp(), stamp);
    assert_eq!(*changed.borrow(), 1);
}

#[test]
fn node_added_by_a_verb_is_taken_in_and_a_forgotten_one_is_not() {
    let scratch = Scratch::new();
    let server = KnownNodes::open(&scratch.0).unwrap();
    server.record(&name("worker-1"), &[]);
    server.save().unwrap();
    let verb = KnownNodes::open(&scratch.0).unwrap();
    verb.record(&name("worker-2"), &[]);
    verb.save().unwrap();
    server.forget(&name("worker-1"));
    server.save().unwrap();
    assert!(server.knows(&name("worker-2")));
    assert!(!server.knows(&name("worker-1")));
    assert_eq!(KnownNodes::open(&scratch.0).unwrap().snapshot().len(), 1);
}

#[test]
fn damaged_file_is_named() {
    let scratch = Scratch::new();
    let bad_name = "{\"nodes\":{\"a b\":{\"firstSeen\":\"2025-01-01T00:00:00Z\"}}}";
    for text in ["{", bad_name] {
        tunnel_proto::process::files::replace(&scratch.0.nodes(), text.as_bytes()).unwrap();
        let error = KnownNodes::open(&scratch.0).unwrap_err().to_string();
        assert!(error.contains("nodes.json is damaged"), "{error}");
    }
}

#[tokio::test]
async fn changes_reach_the_disk_by_themselves_and_at_the_drain() {
    let scratch = Scratch::new();
    let nodes = Arc::new(KnownNodes::open(&scratch.0).unwrap());
    let shutdown = Shutdown::new();
    nodes.start(&shutdown);
    nodes.record(&name("worker-1"), &[]);
    while nodes.file.stamp().is_none() {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    nodes.record(&name("worker-2"), &[]);
    shutdown.drain().cancel();
    while KnownNodes::open(&scratch.0).unwrap().snapshot().len() < 2 {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    shutdown.finish().await;
}

#[tokio::test(start_paused = true)]
async fn what_could_not_be_written_is_written_again_without_another_change() {
    let scratch = Scratch::new();
    let nodes = Arc::new(KnownNodes::open(&scratch.0).unwrap());
    let (shutdown, path) = (Shutdown::new(), scratch.0.nodes());
    std::fs::create_dir(&path).unwrap();
    nodes.start(&shutdown);
    nodes.record(&name("worker-1"), &[]);
    tokio::time::sleep(SAVE_DEBOUNCE + SAVE_RETRY_DELAY / 2).await;
    assert!(nodes.state.lock().is_dirty);
    std::fs::remove_dir(&path).unwrap();
    let written = async {
        while nodes.state.lock().is_dirty {
            tokio::time::sleep(SAVE_DEBOUNCE).await;
        }
    };
    let written = tokio::time::timeout(SAVE_RETRY_DELAY * 2, written);
    written.await.unwrap();
    let again = KnownNodes::open(&scratch.0).unwrap();
    assert!(again.knows(&name("worker-1")));
    shutdown.finish().await;
}

#[test]
fn forgotten_node_stays_forgotten_when_the_file_cannot_be_written_at_first() {
    let scratch = Scratch::new();
    let [there, away] = ["there", "away"].map(|name| scratch.0.path().join(name));
    std::fs::create_dir(&there).unwrap();
    let open = || KnownNodes {
        file: SharedFile::new(&scratch.0, there.join("nodes.json")),
        ..KnownNodes::open(&scratch.0).unwrap()
    };
    let server = open();
    server.record(&name("worker-1"), &[]);
    server.save().unwrap();
    std::fs::rename(&there, &away).unwrap();
    assert!(server.forget(&name("worker-1")));
    server.save().unwrap_err();
    std::fs::rename(&away, &there).unwrap();
    let verb = open();
    verb.record(&name("worker-2"), &[]);
    verb.save().unwrap();
    server.save().unwrap();
    assert!(server.knows(&name("worker-2")));
    assert!(!server.knows(&name("worker-1")));
}
