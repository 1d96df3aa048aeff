use std::fs;

use rcgen::KeyPair;
use rustls_pki_types::CertificateDer;
use tokio::time::timeout;

use super::*;
use tunnel_proto::tls::Trust;
use tunnel_proto::transport::BufferPool;

use crate::testing::{Ca, ScratchDir, credentials, stored};

const LONG: Duration = Duration::from_secs(30 * 86400);
const WORKER_1: &str = "culvert://agent/worker-1";

struct Fixture {
    scratch: ScratchDir,
    ca: Ca,
    signer: Arc<KeyPair>,
    rotating_credentials: Arc<RotatingCredentials>,
    text: prometheus_client::registry::Registry,
    ca_sender: watch::Sender<Option<TrustRoots>>,
}

impl Fixture {
    /// Creates a fixture with a certificate of this age and 30 days of lifetime.
    fn aged(age: Duration) -> Self {
        let (scratch, ca) = (ScratchDir::new().unwrap(), Ca::new());
        let store = CredentialStore::open(scratch.path()).unwrap();
        let signer = Arc::new(store.key().unwrap());
        let (metrics, text) = Metrics::register(BufferPool::new(1));
        let now = SystemTime::now();
        let mut first = credentials(&ca);
        first.signer = Some(signer.clone());
        first.issued = now - age;
        first.not_after = now - age + LONG;
        let node = "worker-1".parse().unwrap();
        let (ca_sender, ca_file) = CaFile::channel(None);
        Self {
            rotating_credentials: RotatingCredentials::new(
                node,
                first,
                Some(store),
                ca_file,
                metrics,
            ),
            ca_sender,
            scratch,
            ca,
            signer,
            text,
        }
    }

    /// Creates a fixture whose credentials are renewed and have worked.
    async fn renewed() -> Self {
        let fixture = Self::aged(LONG / 2);
        fixture.renew().await;
        fixture.confirm().await;
        fixture
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

/// Servers judge the validity period before a revocation.
#[tokio::test]
async fn certificate_that_ends_while_its_node_is_revoked_is_renewed_as_an_expired_one() {
    let fixture = Fixture::renewed().await;
    let rotating_credentials = &fixture.rotating_credentials;
    let refuse = |refusal| {
        rotating_credentials.refuse(rotating_credentials.generation(), refusal);
        *rotating_credentials.refusal.borrow()
    };
    assert_eq!(refuse(Refusal::Revoked), Some(Refusal::Revoked));
    let by_a_wrong_clock = refuse(Refusal::Expired);
    assert_eq!(by_a_wrong_clock, Some(Refusal::Revoked));
    let ended = SystemTime::now() - Duration::from_secs(1);
    rotating_credentials
        .state
        .lock()
        .current
        .credentials
        .not_after = ended;
    assert_eq!(refuse(Refusal::Expired), Some(Refusal::Expired));
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
        fixture.issued_by(&other_ca, &[ours, &other_ca]),
        fixture.issued_by(ours, &[ours, &other_ca]),
        issued(vec![ended], vec![ours.der().to_vec()]),
        issued(vec![before.to_vec()], vec![ours.der().to_vec(); 17]),
        EnrollReply::Refused(unavailable, "x".into()),
    ] {
        fixture.handle(bad).await;
        assert_eq!(fixture.in_use(), before);
    }
    assert!(!fixture.scratch.path().join("agent.crt").exists());
    assert!(fixture.metric("tunnel_agent_renewals_total{result=\"unusable\"} 12"));
    assert!(fixture.metric("tunnel_agent_renewals_total{result=\"unavailable\"} 1"));
}

/// As during the replacement of the CA: the old CA signs the new one, and either may issue the leaf.
#[tokio::test]
async fn root_that_a_trusted_ca_signed_is_taken_and_stored() {
    let fixture = Fixture::aged(LONG / 2);
    let (old, new) = (&fixture.ca, Ca::new());
    let roots = [
        old.der(),
        new.der(),
        &old.cross_sign(&new),
        &new.cross_sign(old),
    ];
    let roots = roots.map(|root| root.to_vec()).to_vec();
    for issuer in [old, &new] {
        let before = fixture.in_use();
        let chain = vec![issuer.issue(&*fixture.signer, WORKER_1).to_vec()];
        let roots = roots.clone();
        fixture.handle(EnrollReply::Issued { chain, roots }).await;
        assert_ne!(fixture.in_use(), before);
        fixture.confirm().await;
    }
    let alone = new.reply(&*fixture.signer, WORKER_1);
    fixture.handle(alone).await;
    assert_eq!(fixture.stored(), fixture.in_use());
    assert!(fixture.metric("tunnel_agent_renewals_total{result=\"issued\"} 3"));
}

/// The certificate of a server is signed by the CA, but is none.
#[tokio::test]
async fn key_of_a_servers_certificate_authenticates_no_root() {
    let fixture = Fixture::aged(LONG / 2);
    let (before, own) = (fixture.in_use(), Ca::new());
    let server = fixture.ca.issue(own.key(), "culvert://server");
    let chain = vec![own.issue(&*fixture.signer, WORKER_1).to_vec()];
    let roots = [fixture.ca.der(), own.der(), &server].map(|root| root.to_vec());
    let roots = roots.to_vec();
    fixture.handle(EnrollReply::Issued { chain, roots }).await;
    assert_eq!(fixture.in_use(), before);
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
    fixture.rotating_credentials.adopt(ahead, false).await;
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
    let first_is_writing = fixture.rotating_credentials.on_disk.lock().await;
    for _ in 0..2 {
        let waiting = timeout(Duration::from_secs(1), fixture.renew()).await;
        assert!(waiting.is_err() && !file.exists());
    }
    drop(first_is_writing);
    fixture.rotating_credentials.save().await;
    assert_eq!(fixture.stored(), fixture.in_use());
}

/// A server may accept certificates that the others refuse.
#[tokio::test]
async fn previous_pair_stays_until_it_expires_whatever_was_issued_and_worked_since() {
    let fixture = Fixture::renewed().await;
    let first = fixture.in_use();
    for _ in 0..2 {
        fixture.renew().await;
        fixture.confirm().await;
        assert!(fixture.has_previous());
    }
    let newest = fixture.in_use();
    let generation = fixture.rotating_credentials.generation();
    fixture.rotating_credentials.refused(generation);
    fixture.rotating_credentials.refused(generation);
    // The handshake began with the previous credentials.
    fixture.rotating_credentials.refused(generation - 1);
    assert_eq!(fixture.in_use(), newest);
    fixture.rotating_credentials.refused(generation);
    assert_eq!(fixture.in_use(), first);
    assert!(fixture.metric("tunnel_agent_renewals_total{result=\"returned\"} 1"));
    assert_eq!(fixture.stored(), newest, "written before anything worked");

    fixture.rotating_credentials.confirm(generation).await;
    assert_eq!(fixture.stored(), newest, "another one's session");
    fixture.confirm().await;
    assert_eq!(fixture.stored(), first);
    refuse(&fixture.rotating_credentials);
    assert_eq!(fixture.in_use(), newest, "which has worked, too");
}

#[tokio::test]
async fn pair_that_never_worked_is_dropped_and_one_that_has_expired_is_not_used() {
    let fixture = Fixture::renewed().await;
    let first = fixture.in_use();
    fixture.renew().await;
    refuse(&fixture.rotating_credentials);
    fixture.confirm().await;
    assert_eq!((fixture.stored(), fixture.has_previous()), (first, false));

    let fixture = Fixture::aged(LONG);
    fixture.confirm().await;
    fixture.renew().await;
    assert!(fixture.has_previous(), "on trial");
    fixture.confirm().await;
    assert!(fixture.has_previous(), "the clock may be wrong");
    let newest = fixture.in_use();
    refuse(&fixture.rotating_credentials);
    assert_eq!(fixture.in_use(), newest, "the other one has expired");
}

/// During a rotation, who has a server's certificate of the old CA answers with the agent's own
/// certificate and the old root alone, and is confirmed by a session.
#[tokio::test]
async fn answer_that_lacks_a_newer_root_does_not_take_it_away() {
    let fixture = Fixture::renewed().await;
    let (old, new) = (&fixture.ca, Ca::since(2020));
    let own = fixture.in_use();
    let answer = |leaf: &[u8], roots: &[&[u8]]| EnrollReply::Issued {
        chain: vec![leaf.to_vec()],
        roots: roots.iter().map(|root| root.to_vec()).collect(),
    };
    let (by_old, by_new) = (old.cross_sign(&new), new.cross_sign(old));
    let all: [&[u8]; 3] = [old.der(), new.der(), &by_old];
    let crossed: [&[u8]; 1] = [&by_new];
    let trusted = || match &*fixture.rotating_credentials.identity().trust() {
        Trust::Roots(roots) => roots.len(),
        other => panic!("{other:?}"),
    };
    let new_leaf = new.issue(&*fixture.signer, WORKER_1);
    for (leaf, roots, expected) in [
        (&own, &all[..], 3),
        (&own, &all[..1], 2),
        (&own, &crossed[..], 3),
        (&own, &crossed[..], 3),
        (&own, &all[..1], 2),
        // The new CA itself ends the rotation.
        (&new_leaf, &all[1..2], 1),
    ] {
        fixture.handle(answer(leaf, roots)).await;
        fixture.confirm().await;
        assert_eq!(trusted(), expected);
    }
    assert_eq!(
        stored(fixture.scratch.path()).roots.certificates(),
        [new.der().clone()]
    );
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
        RotatingCredentials::new(node, stored(dir), store, CaFile::channel(None).1, metrics);
    assert_eq!(fixture.in_use(), newest);
    refuse(&fixture.rotating_credentials);
    assert_ne!(fixture.in_use(), newest);
    fixture.confirm().await;
    assert_eq!(fixture.stored(), fixture.in_use());
}

/// A rotation of the CA brings a renewal and a new --ca-file at the same time.
#[test]
fn ca_file_that_is_reloaded_during_a_renewal_is_not_lost() {
    let fixture = Fixture::aged(LONG / 2);
    let next = Ca::new();
    let [old, both] = [
        vec![fixture.ca.der().clone()],
        vec![fixture.ca.der().clone(), next.der().clone()],
    ]
    .map(|roots| TrustRoots::new(roots).unwrap());
    let runtime = tokio::runtime::Builder::new_multi_thread().build().unwrap();
    let rotating_credentials = &fixture.rotating_credentials;
    let mut lost = 0;
    for _ in 0..400 {
        fixture.ca_sender.send_replace(Some(old.clone()));
        rotating_credentials.reload_ca();
        let reply = fixture.ca.reply(&*fixture.signer, WORKER_1);
        let start = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                start.wait();
                runtime.block_on(rotating_credentials.handle_reply(reply));
            });
            start.wait();
            fixture.ca_sender.send_replace(Some(both.clone()));
            rotating_credentials.reload_ca();
        });
        let trust = rotating_credentials.identity().trust();
        let Trust::Roots(roots) = &*trust else {
            panic!("{trust:?}")
        };
        lost += usize::from(roots.len() != both.certificates().len());
    }
    assert_eq!(lost, 0, "lost reloads of 400");
}

/// Who has a server's leaf, but not the CA, signs nothing that agents trust.
#[tokio::test]
async fn row19_root_without_a_signature_of_a_trusted_ca_is_refused() {
    let fixture = Fixture::aged(LONG / 2);
    let (before, own) = (fixture.in_use(), Ca::new());
    let reply = fixture.issued_by(&own, &[&fixture.ca, &own]);
    fixture.handle(reply).await;
    assert_eq!(fixture.in_use(), before);
}
