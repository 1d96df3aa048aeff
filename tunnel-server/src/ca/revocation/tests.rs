use tunnel_proto::identity::Role;

use super::*;
use crate::store::data_dir::testing::Scratch;
use crate::testing::node;

fn peer(node: &str, issued: SystemTime) -> PeerIdentity {
    PeerIdentity {
        domain: TrustDomain::Tunnel,
        role: Role::Agent(node.parse().unwrap()),
        not_before: issued - BACKDATED,
        not_after: issued + Duration::from_secs(86400),
    }
}

/// Returns the revocations after a read of their file, which the thread of the file else makes every
/// 5 s.
fn reread(revocations: &Revocations) -> &Revocations {
    revocations.doc.refresh();
    revocations
}

#[test]
fn revocation_holds_for_what_was_issued_until_then_also_after_a_restart() {
    let scratch = Scratch::new();
    let revocations = Revocations::open(&scratch.0, true).unwrap();
    let (node, now) = (node(), whole_seconds(SystemTime::now()));
    let old = peer("worker-1", now - Duration::from_secs(60));
    assert!(!revocations.is_revoked(&old));
    revocations.revoke(&node, now).unwrap();
    for revocations in [revocations, Revocations::open(&scratch.0, true).unwrap()] {
        assert!(revocations.is_revoked(&old));
        assert!(revocations.is_revoked(&peer("worker-1", now)));
        assert!(!revocations.is_revoked(&peer("worker-2", now)));
        let issued = issue_time(revocations.of_node(&node), now);
        assert!(!revocations.is_revoked(&peer("worker-1", issued)));
    }
}

#[test]
fn clock_that_went_back_makes_no_revocation_weaker() {
    let scratch = Scratch::new();
    let revocations = Revocations::open(&scratch.0, true).unwrap();
    let (node, now) = (node(), whole_seconds(SystemTime::now()));
    let behind = now - Duration::from_secs(3600);
    // The session is live when the clock goes back.
    let live = peer("worker-1", now);
    assert!(!revocations.is_revoked(&live));
    revocations.revoke(&node, behind).unwrap();
    assert!(revocations.is_revoked(&live));
    revocations.revoke(&node, behind).unwrap();
    for revocations in [revocations, Revocations::open(&scratch.0, true).unwrap()] {
        assert!(revocations.is_revoked(&live));
        revocations.revoke(&node, behind).unwrap();
        assert!(revocations.of_node(&node) > Some(now));
    }
}

#[test]
fn revocation_of_another_server_covers_what_was_issued_here_before_it_arrived() {
    let scratch = Scratch::new();
    let open = || Revocations::open(&scratch.0, true).unwrap();
    let (here, there) = (open(), open());
    let (node, now) = (node(), whole_seconds(SystemTime::now()));
    // This server's clock is ahead, and the server has not received the revocation.
    let ahead = now + Duration::from_secs(2);
    there.revoke(&node, now).unwrap();
    here.state.lock().record_issued(&node, ahead);
    let stolen = peer("worker-1", ahead);
    assert!(reread(&here).is_revoked(&stolen));
    assert!(!there.is_revoked(&peer("worker-1", ahead + Duration::from_secs(1))));
    here.flush().unwrap();
    assert!(reread(&there).is_revoked(&stolen) && open().is_revoked(&stolen));
    // A certificate issued from then on is valid, and no revocation is raised again.
    let next = issue_time(here.of_node(&node), now);
    for revocations in [&here, &there] {
        assert!(!revocations.is_revoked(&peer("worker-1", next)));
    }
    here.flush().unwrap();
    assert!(!open().is_revoked(&peer("worker-1", next)));
}

#[test]
fn announced_revocations_merge_by_the_latest_time_and_end() {
    let (here, there) = (Scratch::new(), Scratch::new());
    let here = Revocations::open(&here.0, true).unwrap();
    let there = Revocations::open(&there.0, true).unwrap();
    let (node, now) = (node(), whole_seconds(SystemTime::now()));
    // This server has seen a certificate of a later enrollment, which stays valid.
    let later = peer("worker-1", now + Duration::from_secs(3));
    assert!(!here.is_revoked(&later));
    there.revoke(&node, now).unwrap();
    let (changes, announced) = there.changed_since(0).unwrap();
    assert!(there.changed_since(changes).is_none());
    assert!(here.merge(announced.clone()));
    assert_eq!(here.of_node(&node), Some(now));
    assert!(here.is_revoked(&peer("worker-1", now)) && !here.is_revoked(&later));
    // The echo changes nothing at either server.
    let (_, echo) = here.changed_since(0).unwrap();
    assert_eq!(echo, announced);
    assert!(!there.merge(echo) && !here.merge(announced));
    let older = vec![RevokedNode {
        node: node.clone(),
        at: now - Duration::from_secs(9),
    }];
    assert!(!here.merge(older));
    assert_eq!(here.of_node(&node), Some(now));
}

#[test]
fn lifted_revocation_stays_lifted_after_a_restart_and_at_other_processes() {
    let scratch = Scratch::new();
    let running = Revocations::open(&scratch.0, true).unwrap();
    let (node, now) = (node(), whole_seconds(SystemTime::now()));
    let old = peer("worker-1", now - Duration::from_secs(60));
    assert!(!running.is_revoked(&old));
    assert!(!running.lift(&node, now).unwrap(), "not revoked");
    running.revoke(&node, now).unwrap();
    let other = Revocations::open(&scratch.0, true).unwrap();
    assert!(other.is_revoked(&old));
    assert!(other.lift(&node, now).unwrap());
    assert!(!other.lift(&node, now).unwrap(), "lifted once");
    assert!(!reread(&running).is_revoked(&old) && running.in_force().is_empty());
    let restarted = Revocations::open(&scratch.0, true).unwrap();
    assert!(!restarted.is_revoked(&old) && restarted.of_node(&node).is_none());
    // Another server that has the revocation does not bring it back.
    let announced = RevokedNode {
        node: node.clone(),
        at: now,
    };
    assert!(!restarted.merge(vec![announced]));
    assert!(!restarted.is_revoked(&old));
    // The node can be revoked again within the same second.
    running.revoke(&node, now).unwrap();
    for revocations in [running, other, restarted] {
        assert!(reread(&revocations).is_revoked(&old));
        assert_eq!(revocations.in_force().len(), 1);
    }
}

#[test]
fn lifted_revocation_covers_no_certificate_that_was_issued_later() {
    let (one, other) = (Scratch::new(), Scratch::new());
    let now = whole_seconds(SystemTime::now());
    let revocations = Revocations::open(&one.0, true).unwrap();
    revocations.revoke(&node(), now).unwrap();
    assert!(revocations.lift(&node(), now).unwrap());
    let late = peer("worker-1", now + Duration::from_secs(60));
    let reader = Revocations::open(&other.0, true).unwrap();
    assert!(!reader.is_revoked(&late));
    std::fs::copy(one.0.revoked(), other.0.revoked()).unwrap();
    assert!(!reread(&reader).is_revoked(&late));
}

#[test]
fn revocation_after_a_lift_covers_what_this_process_saw_and_what_a_slow_clock_says() {
    let (one, other) = (Scratch::new(), Scratch::new());
    let now = whole_seconds(SystemTime::now());
    let revocations = Revocations::open(&one.0, true).unwrap();
    revocations.revoke(&node(), now).unwrap();
    assert!(revocations.lift(&node(), now).unwrap());
    let reader = Revocations::open(&other.0, true).unwrap();
    std::fs::copy(one.0.revoked(), other.0.revoked()).unwrap();
    let renewed = peer("worker-1", now + Duration::from_secs(20));
    assert!(!reread(&reader).is_revoked(&renewed));
    // Revoked again by a process that has not seen the certificate.
    revocations
        .revoke(&node(), now + Duration::from_secs(10))
        .unwrap();
    std::fs::copy(one.0.revoked(), other.0.revoked()).unwrap();
    assert!(reread(&reader).is_revoked(&renewed));

    // Announced by a server whose clock is behind that of the lift.
    let later = now + Duration::from_secs(3600);
    assert!(reader.lift(&node(), later).unwrap());
    assert!(!reader.is_revoked(&renewed));
    let at = now + Duration::from_secs(60);
    let announced = RevokedNode { node: node(), at };
    assert!(reader.merge(vec![announced]));
    assert!(reader.is_revoked(&renewed));
}

#[test]
fn revocation_that_cannot_be_persisted_is_in_force_and_written_later() {
    let scratch = Scratch::new();
    let revocations = Revocations::open(&scratch.0, true).unwrap();
    let lock = scratch.0.path().join("files.lock");
    std::fs::create_dir(&lock).unwrap();
    assert!(revocations.revoke(&node(), SystemTime::now()).is_err());
    assert!(revocations.of_node(&node()).is_some());
    assert!(revocations.flush().is_err() && revocations.has_unwritten());
    std::fs::remove_dir(&lock).unwrap();
    revocations.flush().unwrap();
    assert!(!revocations.has_unwritten());
    let restarted = Revocations::open(&scratch.0, true).unwrap();
    assert!(restarted.of_node(&node()).is_some());
}

#[test]
fn revocation_that_arrives_during_a_write_is_in_force_at_once_and_written_next() {
    let scratch = Scratch::new();
    let revocations = Revocations::open(&scratch.0, true).unwrap();
    let announced = RevokedNode {
        node: "worker-2".parse().unwrap(),
        at: whole_seconds(SystemTime::now()),
    };
    // The thread of the file waits for this lock.
    let held = scratch.0.lock_files().unwrap();
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| revocations.revoke(&node(), SystemTime::now()));
        while revocations.of_node(&node()).is_none() {
            std::thread::yield_now();
        }
        assert!(revocations.merge(vec![announced.clone()]));
        assert!(revocations.of_node(&announced.node).is_some());
        drop(held);
        writing.join().unwrap().unwrap();
    });
    revocations.flush().unwrap();
    let restarted = Revocations::open(&scratch.0, true).unwrap();
    for node in [node(), announced.node] {
        assert!(restarted.of_node(&node).is_some(), "{node}");
    }
}

#[test]
fn lift_that_cannot_be_persisted_leaves_the_revocation_in_force() {
    let scratch = Scratch::new();
    let revocations = Revocations::open(&scratch.0, true).unwrap();
    let now = SystemTime::now();
    revocations.revoke(&node(), now).unwrap();
    std::fs::write(scratch.0.revoked(), "no JSON").unwrap();
    assert!(revocations.lift(&node(), now).is_err());
    assert!(revocations.of_node(&node()).is_some());
}

#[test]
fn revocation_with_a_later_certificate_is_marked() {
    let scratch = Scratch::new();
    let revocations = Revocations::open(&scratch.0, true).unwrap();
    let now = whole_seconds(SystemTime::now());
    revocations.revoke(&node(), now).unwrap();
    let is_marked = || revocations.in_force()[0].has_later_certificate;
    assert!(!is_marked());
    let later = peer("worker-1", now + Duration::from_secs(60));
    assert!(!revocations.is_revoked(&later) && is_marked());
}

#[test]
fn announced_revocations_persist_and_are_bounded() {
    let scratch = Scratch::new();
    let revocations = Revocations::open(&scratch.0, true).unwrap();
    let at = whole_seconds(SystemTime::now());
    let announced = (0..=NODES_MAX).map(|number| RevokedNode {
        node: format!("n{number}").parse().unwrap(),
        at,
    });
    assert!(revocations.merge(announced.collect()));
    revocations.flush().unwrap();
    let restarted = Revocations::open(&scratch.0, true).unwrap();
    let (_, nodes) = restarted.changed_since(0).unwrap();
    assert_eq!(nodes.len(), NODES_MAX);
    // Operators may revoke more.
    restarted.revoke(&node(), at).unwrap();
    assert!(restarted.of_node(&node()).is_some());
}

#[test]
fn revocation_by_another_process_is_seen_and_a_lost_file_takes_none_back() {
    let scratch = Scratch::new();
    let running = Revocations::open(&scratch.0, true).unwrap();
    let node = node();
    let verb = Revocations::open(&scratch.0, true).unwrap();
    verb.revoke(&node, SystemTime::now()).unwrap();
    assert!(reread(&running).of_node(&node).is_some());
    std::fs::remove_file(scratch.0.revoked()).unwrap();
    assert!(reread(&running).of_node(&node).is_some());
    let other = "worker-2".parse().unwrap();
    running.revoke(&other, SystemTime::now()).unwrap();
    let restarted = Revocations::open(&scratch.0, true).unwrap();
    assert!(restarted.of_node(&node).is_some());
}
