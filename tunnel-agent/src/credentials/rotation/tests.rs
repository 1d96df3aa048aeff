use std::fs;

use rcgen::KeyPair;
use tokio::time::timeout;

use super::*;
use crate::testing::{Ca, TempDir, credentials, stored};

const LONG: Duration = Duration::from_secs(30 * 86400);
const WORKER_1: &str = "culvert://agent/worker-1";

struct Fixture {
    scratch: TempDir,
    ca: Ca,
    signer: Arc<KeyPair>,
    rotating_credentials: Arc<RotatingCredentials>,
    text: prometheus_client::registry::Registry,
}

impl Fixture {
    /// Creates a fixture with a certificate of this age and 30 days of lifetime.
    fn aged(age: Duration) -> Self {
        let (scratch, ca) = (TempDir::new(), Ca::new());
        let store = CredentialStore::open(scratch.path()).unwrap();
        let signer = Arc::new(store.key().unwrap());
        let (metrics, text) = Metrics::register();
        let now = SystemTime::now();
        let mut first = credentials(&ca);
        first.signer = Some(signer.clone());
        first.issued = now - age;
        first.not_after = now - age + LONG;
        let node = "worker-1".parse().unwrap();
        Self {
            rotating_credentials: RotatingCredentials::new(node, first, Some(store), None, metrics),
            scratch,
            ca,
            signer,
            text,
        }
    }

    /// Has the agent receive an answer to its request.
    async fn handle(&self, reply: EnrollReply) {
        self.rotating_credentials.handle_reply(reply).await;
    }

    /// Has the agent receive a valid certificate.
    async fn renew(&self) {
        self.handle(self.ca.reply(&*self.signer, WORKER_1)).await;
    }

    /// Reports a session with the current credentials.
    async fn confirm(&self) {
        let generation = self.rotating_credentials.generation();
        self.rotating_credentials.confirm(generation).await;
    }

    /// Returns a server's answer that is issued by another CA; `roots` are the roots in it.
    fn issued_by(&self, ca: &Ca, roots: &[&Ca]) -> EnrollReply {
        EnrollReply::Issued {
            chain: vec![ca.issue(&*self.signer, WORKER_1).to_vec()],
            roots: roots.iter().map(|root| root.der().to_vec()).collect(),
        }
    }

    /// Returns the leaf that handshakes use.
    fn in_use(&self) -> CertificateDer<'static> {
        self.rotating_credentials.identity().own().cert[0].clone()
    }

    /// Returns the leaf that the next start finds.
    fn stored(&self) -> CertificateDer<'static> {
        stored(self.scratch.path()).own.cert[0].clone()
    }

    fn has_previous(&self) -> bool {
        let dir = self.scratch.path();
        ["agent.crt.previous", "ca.crt.previous"]
            .iter()
            .any(|name| dir.join(name).exists())
    }

    fn metric(&self, line: &str) -> bool {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.text).unwrap();
        text.lines().any(|shown| shown == line)
    }
}

/// Makes three handshakes fail over certificates.
fn refuse(rotating_credentials: &RotatingCredentials) {
    for _ in 0..REFUSED_MOST {
        rotating_credentials.refused(rotating_credentials.generation());
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
    // On a host whose clock is far ahead, the next wait is that of a certificate that has just
    // arrived.
    assert!(first_renewal(&held, held.issued, 0.0).unwrap() > LONG / 3);
    let overdue = first_renewal(&held, now + LONG, 0.5);
    assert_eq!(overdue, Some(Duration::ZERO));
    assert_eq!(retry_after(LONG, 0.5), RETRY_MAX);
    assert_eq!(retry_after(Duration::from_secs(60), 0.5), RETRY_MIN);
}

#[tokio::test(start_paused = true)]
async fn due_request_goes_to_one_session_and_again_when_no_answer_comes() {
    let rotating_credentials = Fixture::aged(LONG).rotating_credentials;
    assert!(!rotating_credentials.due().await.is_empty());
    let soon = timeout(Duration::from_secs(60), rotating_credentials.due()).await;
    assert!(soon.is_err(), "asked twice");
    let later = timeout(RETRY_MAX * 2, rotating_credentials.due()).await;
    assert!(later.is_ok());
}

/// A compromised server's answers move no agent to other servers and lock none out.
#[tokio::test]
async fn answer_that_its_roots_do_not_bear_out_changes_nothing() {
    let fixture = Fixture::aged(LONG / 2);
    let (ours, signer, before) = (&fixture.ca, &*fixture.signer, fixture.in_use());
    let (other_ca, other_key) = (Ca::new(), KeyPair::generate().unwrap());
    let issued = |chain, roots| EnrollReply::Issued { chain, roots };
    let ended = ours.issue_ended(signer, WORKER_1).to_vec();
    let unavailable = tunnel_proto::wire::code::EnrollCode::Unavailable;
    for bad in [
        ours.reply(&other_key, WORKER_1),
        ours.reply(signer, "culvert://agent/worker-2"),
        ours.reply(signer, "culvert://server"),
        issued(vec![], vec![]),
        issued(vec![vec![1, 2, 3]], vec![vec![4]]),
        fixture.issued_by(&other_ca, &[&other_ca]),
        fixture.issued_by(ours, &[&other_ca]),
        fixture.issued_by(&other_ca, &[ours]),
        issued(vec![ended], vec![ours.der().to_vec()]),
        EnrollReply::Refused(unavailable, "x".into()),
    ] {
        fixture.handle(bad).await;
        assert_eq!(fixture.in_use(), before);
    }
    assert!(!fixture.scratch.path().join("agent.crt").exists());
    assert!(fixture.metric("tunnel_agent_renewals_total{result=\"unusable\"} 9"));
    assert!(fixture.metric("tunnel_agent_renewals_total{result=\"unavailable\"} 1"));
    // Like during the replacement of the CA.
    let both = fixture.issued_by(&other_ca, &[ours, &other_ca]);
    fixture.handle(both).await;
    assert_ne!(fixture.in_use(), before);
}

#[tokio::test]
async fn valid_answer_is_installed_and_stored() {
    let fixture = Fixture::aged(LONG / 2);
    let before = fixture.in_use();
    fixture.renew().await;
    assert_ne!(fixture.in_use(), before);
    assert_eq!(fixture.stored(), fixture.in_use());
    assert!(fixture.metric("tunnel_agent_renewals_total{result=\"issued\"} 1"));
    assert!(fixture.metric("tunnel_agent_certificate_unsaved 0"));
}

/// F17: the agent logs a clock that is days ahead, and does not ask again and again.
#[tokio::test(start_paused = true)]
async fn f17_renewal_on_a_host_whose_clock_is_ahead_waits_for_half_its_life() {
    let fixture = Fixture::aged(LONG / 2);
    let mut ahead = fixture.rotating_credentials.current();
    ahead.issued = SystemTime::now() - LONG + Duration::from_secs(86400);
    ahead.not_after = ahead.issued + LONG;
    fixture.rotating_credentials.adopt(ahead, None, false).await;
    let soon = timeout(LONG.mul_f64(0.39), fixture.rotating_credentials.due()).await;
    assert!(soon.is_err());
    let later = timeout(LONG, fixture.rotating_credentials.due()).await;
    assert!(later.is_ok());
}

/// F24 without a small disk: the directory disappears and returns.
#[tokio::test]
async fn f24_lost_directory_is_survived_in_memory_and_reported() {
    let fixture = Fixture::aged(LONG / 2);
    let before = fixture.in_use();
    fs::remove_dir_all(fixture.scratch.path()).unwrap();
    fixture.renew().await;
    assert_ne!(fixture.in_use(), before, "goes on with the new one");
    assert!(fixture.metric("tunnel_agent_certificate_unsaved 1"));
    fs::create_dir(fixture.scratch.path()).unwrap();
    fixture.rotating_credentials.save().await;
    assert!(fixture.metric("tunnel_agent_certificate_unsaved 0"));
    for name in ["agent.key", "agent.crt", "ca.crt"] {
        assert!(fixture.scratch.path().join(name).exists(), "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn save_waits_for_the_one_before_it_and_keeps_the_newest() {
    let fixture = Fixture::aged(LONG / 2);
    let file = fixture.scratch.path().join("agent.crt");
    let first_is_writing = fixture.rotating_credentials.saving.lock().await;
    for _ in 0..2 {
        let waiting = timeout(Duration::from_secs(1), fixture.renew()).await;
        assert!(waiting.is_err() && !file.exists());
    }
    drop(first_is_writing);
    fixture.rotating_credentials.save().await;
    assert_eq!(fixture.stored(), fixture.in_use());
}

#[tokio::test]
async fn three_refused_handshakes_bring_the_previous_certificate_back() {
    let fixture = Fixture::aged(LONG / 2);
    fixture.renew().await;
    fixture.confirm().await;
    assert!(!fixture.has_previous());
    let first = fixture.in_use();

    let hostile = Ca::new();
    let reply = fixture.issued_by(&hostile, &[&fixture.ca, &hostile]);
    fixture.handle(reply).await;
    let second = fixture.in_use();
    assert_ne!(first, second);
    assert!(fixture.has_previous());
    let generation = fixture.rotating_credentials.generation();
    fixture.rotating_credentials.refused(generation);
    fixture.rotating_credentials.refused(generation);
    // The handshake began with the previous credentials.
    fixture.rotating_credentials.refused(generation - 1);
    assert_eq!(fixture.in_use(), second);
    fixture.rotating_credentials.refused(generation);
    assert_eq!(fixture.in_use(), first);
    assert!(fixture.metric("tunnel_agent_renewals_total{result=\"returned\"} 1"));
    assert_eq!(fixture.stored(), second, "written before anything worked");

    fixture.rotating_credentials.confirm(generation).await;
    assert_eq!(fixture.stored(), second, "another one's session");
    fixture.confirm().await;
    assert_eq!(fixture.stored(), first);
    assert!(!fixture.has_previous());
    refuse(&fixture.rotating_credentials);
    assert_eq!(fixture.in_use(), first, "there is no other");
}

/// If neither pair is accepted, for example behind a middlebox that answers for the server, the
/// pairs alternate.
#[tokio::test]
async fn refused_certificates_alternate_until_one_works() {
    let fixture = Fixture::aged(LONG / 2);
    let before = fixture.in_use();
    fixture.renew().await;
    let after = fixture.in_use();
    for _ in 0..2 {
        refuse(&fixture.rotating_credentials);
        assert_eq!(fixture.in_use(), before);
        refuse(&fixture.rotating_credentials);
        assert_eq!(fixture.in_use(), after);
    }
    fixture.confirm().await;
    assert_eq!(fixture.stored(), after);
}

#[tokio::test]
async fn previous_certificate_outlives_a_restart() {
    let mut fixture = Fixture::aged(LONG / 2);
    for _ in 0..2 {
        fixture.confirm().await;
        fixture.renew().await;
    }
    let newest = fixture.in_use();
    let dir = fixture.scratch.path();
    let (node, metrics) = ("worker-1".parse().unwrap(), Metrics::default());
    let store = Some(CredentialStore::open(dir).unwrap());
    fixture.rotating_credentials =
        RotatingCredentials::new(node, stored(dir), store, None, metrics);
    assert_eq!(fixture.in_use(), newest);
    refuse(&fixture.rotating_credentials);
    assert_ne!(fixture.in_use(), newest);
    fixture.confirm().await;
    assert_eq!(fixture.stored(), fixture.in_use());
}
