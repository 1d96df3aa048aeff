use std::fs;

use rcgen::KeyPair;
use tokio::time::timeout;

use super::*;
use crate::testing::{Ca, Scratch, credentials};

const LONG: Duration = Duration::from_secs(30 * 86400);

struct Fixture {
    scratch: Scratch,
    ca: Ca,
    signer: Arc<KeyPair>,
    keeper: Arc<Keeper>,
    text: prometheus_client::registry::Registry,
}

impl Fixture {
    /// With a certificate of this age and 30 days of life.
    fn aged(age: Duration) -> Self {
        let (scratch, ca) = (Scratch::new(), Ca::new());
        let store = Store::open(scratch.path()).unwrap();
        let signer = Arc::new(store.key().unwrap());
        let (metrics, text) = Metrics::register();
        let now = SystemTime::now();
        let mut first = credentials(&ca);
        first.signer = Some(signer.clone());
        first.issued = now - age;
        first.not_after = now - age + LONG;
        let node = "worker-1".parse().unwrap();
        Self {
            keeper: Keeper::new(node, first, Some(store), None, metrics),
            scratch,
            ca,
            signer,
            text,
        }
    }

    fn issued(&self, key: &KeyPair, uri: &str) -> EnrollReply {
        EnrollReply::Issued {
            chain: vec![self.ca.issue(key, uri).to_vec()],
            roots: vec![self.ca.der().to_vec()],
        }
    }

    fn metric(&self, line: &str) -> bool {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.text).unwrap();
        text.lines().any(|shown| shown == line)
    }
}

#[test]
fn renewal_is_at_half_life_give_or_take_a_tenth() {
    let ca = Ca::new();
    let mut held = credentials(&ca);
    let now = SystemTime::now();
    held.issued = now;
    held.not_after = now + LONG;
    assert_eq!(first_renewal(&held, now, 0.5), None, "not ours to renew");
    held.signer = Some(Arc::new(KeyPair::generate().unwrap()));
    for (random, share) in [(0.0, 0.4), (0.5, 0.5), (1.0, 0.6)] {
        let wait = first_renewal(&held, now, random).unwrap();
        assert_eq!(wait, LONG.mul_f64(share));
        let later = first_renewal(&held, now + LONG / 4, random).unwrap();
        assert_eq!(later, LONG.mul_f64(share) - LONG / 4);
    }
    // A host whose clock is far ahead: the next wait is that of a certificate that has just come.
    assert!(first_renewal(&held, held.issued, 0.0).unwrap() > LONG / 3);
    let overdue = first_renewal(&held, now + LONG, 0.5);
    assert_eq!(overdue, Some(Duration::ZERO));
    assert_eq!(retry_after(LONG, 0.5), RETRY_MOST);
    assert_eq!(retry_after(Duration::from_secs(60), 0.5), RETRY_LEAST);
}

#[tokio::test(start_paused = true)]
async fn due_request_goes_to_one_session_and_again_when_no_answer_comes() {
    let fixture = Fixture::aged(LONG);
    let (first, second) = (fixture.keeper.clone(), fixture.keeper.clone());
    assert!(!first.due().await.is_empty());
    let soon = Duration::from_secs(60);
    assert!(timeout(soon, second.due()).await.is_err(), "asked twice");
    assert!(timeout(RETRY_MOST * 2, second.due()).await.is_ok());
}

#[tokio::test]
async fn answer_is_taken_into_use_and_kept_and_bad_ones_change_nothing() {
    let fixture = Fixture::aged(LONG / 2);
    let before = fixture.keeper.identity().own();
    let uri = "culvert://agent/worker-1";
    let stranger = KeyPair::generate().unwrap();
    for bad in [
        fixture.issued(&stranger, uri),
        fixture.issued(&fixture.signer, "culvert://agent/worker-2"),
        fixture.issued(&fixture.signer, "culvert://server"),
        EnrollReply::Issued {
            chain: vec![],
            roots: vec![],
        },
        EnrollReply::Issued {
            chain: vec![vec![1, 2, 3]],
            roots: vec![vec![4]],
        },
        EnrollReply::Refused(
            tunnel_proto::wire::code::EnrollCode::Unavailable,
            "x".into(),
        ),
    ] {
        fixture.keeper.answered(bad).await;
        assert!(Arc::ptr_eq(&before, &fixture.keeper.identity().own()));
    }
    assert!(!fixture.scratch.path().join("agent.crt").exists());
    assert!(fixture.metric("tunnel_agent_renewals_total{result=\"unusable\"} 5"));
    assert!(fixture.metric("tunnel_agent_renewals_total{result=\"unavailable\"} 1"));

    fixture
        .keeper
        .answered(fixture.issued(&fixture.signer, uri))
        .await;
    assert!(!Arc::ptr_eq(&before, &fixture.keeper.identity().own()));
    assert!(fixture.metric("tunnel_agent_renewals_total{result=\"issued\"} 1"));
    assert!(fixture.metric("tunnel_agent_certificate_unsaved 0"));
    let store = Store::open(fixture.scratch.path()).unwrap();
    let node = "worker-1".parse().unwrap();
    let stored = store.load(&node, None, SystemTime::now()).unwrap();
    assert!(matches!(stored, super::super::Stored::Valid(_)));
}

/// F17: a clock that is days ahead is told, and does not make the agent ask again and again.
#[tokio::test(start_paused = true)]
async fn f17_renewal_on_a_host_whose_clock_is_ahead_waits_for_half_its_life() {
    let fixture = Fixture::aged(LONG / 2);
    let mut ahead = fixture.keeper.current();
    ahead.issued = SystemTime::now() - LONG + Duration::from_secs(86400);
    ahead.not_after = ahead.issued + LONG;
    fixture.keeper.adopt(ahead, None, false).await;
    let soon = LONG.mul_f64(0.39);
    assert!(timeout(soon, fixture.keeper.due()).await.is_err());
    assert!(timeout(LONG, fixture.keeper.due()).await.is_ok());
}

/// F24, the part without a small disk: the directory is gone, and then back.
#[tokio::test]
async fn f24_lost_directory_is_survived_in_memory_and_told() {
    let fixture = Fixture::aged(LONG / 2);
    let uri = "culvert://agent/worker-1";
    let before = fixture.keeper.identity().own();
    fs::remove_dir_all(fixture.scratch.path()).unwrap();
    fixture
        .keeper
        .answered(fixture.issued(&fixture.signer, uri))
        .await;
    let second = fixture.keeper.identity().own();
    assert!(!Arc::ptr_eq(&before, &second), "goes on with the new one");
    assert!(fixture.metric("tunnel_agent_certificate_unsaved 1"));
    fs::create_dir(fixture.scratch.path()).unwrap();
    fixture.keeper.save().await;
    assert!(fixture.metric("tunnel_agent_certificate_unsaved 0"));
    for name in ["agent.key", "agent.crt", "ca.crt"] {
        assert!(fixture.scratch.path().join(name).exists(), "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn save_waits_for_the_one_before_it_and_keeps_the_newest() {
    let fixture = Fixture::aged(LONG / 2);
    let file = fixture.scratch.path().join("agent.crt");
    let first_is_writing = fixture.keeper.saving.lock().await;
    for _ in 0..2 {
        let issued = fixture.issued(&fixture.signer, "culvert://agent/worker-1");
        let soon = Duration::from_secs(1);
        let waiting = timeout(soon, fixture.keeper.answered(issued)).await;
        assert!(waiting.is_err() && !file.exists());
    }
    drop(first_is_writing);
    fixture.keeper.save().await;
    let store = Store::open(fixture.scratch.path()).unwrap();
    let node = "worker-1".parse().unwrap();
    let stored = store.load(&node, None, SystemTime::now()).unwrap();
    let super::super::Stored::Valid(stored) = stored else {
        panic!("not valid")
    };
    assert_eq!(stored.own.cert, fixture.keeper.identity().own().cert);
}
