use rcgen::{CertificateParams, KeyPair};
use rustls::sign::CertifiedKey;
use tunnel_proto::tls::{self, sign_proof};
use tunnel_store::data_dir::DataDir;
use tunnel_store::testing::Scratch;

use super::*;
use crate::revocation::OrderAction;

impl Renewals {
    /// Creates a renewal service with all of its state in a data directory.
    pub(crate) fn of(dir: &DataDir) -> Arc<Self> {
        let ca = Arc::new(LocalCa::load_or_create(dir).unwrap());
        let revocations = Arc::new(Revocations::open(dir, true).unwrap());
        let roots = tls::roots(ca.roots()).unwrap();
        Arc::new(Self {
            trust: AgentTrust::new(roots, revocations.revocation_check()).unwrap(),
            ca,
            revocations,
        })
    }
}

const DAY: Duration = Duration::from_secs(86400);

/// The holder of a certificate for `worker-1`.
struct Holder {
    pair: KeyPair,
    own: Arc<CertifiedKey>,
}

/// Returns a renewal service, and the holder of a certificate that it issued at this time.
fn service(scratch: &Scratch, issued: SystemTime) -> (Arc<Renewals>, Holder) {
    let renewals = Renewals::of(&scratch.0);
    let holder = Holder::new(&renewals, issued);
    (renewals, holder)
}

fn node() -> NodeName {
    "worker-1".parse().unwrap()
}

/// Returns the identity of the certificate that a renewal issued.
fn identity(renewed: RenewedCertificate) -> PeerIdentity {
    let EnrollReply::Issued { chain, .. } = renewed.reply else {
        panic!("refused")
    };
    PeerIdentity::from_certificate(&CertificateDer::from(chain[0].clone())).unwrap()
}

impl Holder {
    fn new(renewals: &Renewals, issued: SystemTime) -> Self {
        let pair = KeyPair::generate().unwrap();
        let request = AgentCsr::parse(&csr(&pair)).unwrap();
        let issued = renewals.ca.issue(&request, &node(), 0, issued);
        let key = pair.serialize_der().try_into().unwrap();
        let own = tls::certified_key(issued.unwrap().chain, key).unwrap();
        Self { pair, own }
    }

    fn proof(&self, exported: &[u8]) -> RenewalProof {
        let (signature, scheme) = sign_proof(&*self.own.key, exported).unwrap();
        RenewalProof {
            chain: self.own.cert.iter().map(|der| der.to_vec()).collect(),
            signature,
            scheme,
        }
    }

    fn request(&self) -> AgentCsr {
        AgentCsr::parse(&csr(&self.pair)).unwrap()
    }

    fn ask(
        &self,
        renewals: &Renewals,
        claimed: &NodeName,
        now: SystemTime,
    ) -> Result<RenewedCertificate, EnrollCode> {
        let (proof, csr) = (self.proof(&[7; 32]), csr(&self.pair));
        let answer = renewals.renew_expired(claimed, &proof, &csr, &[7; 32], now);
        answer.map_err(|(code, _)| code)
    }
}

fn csr(key: &KeyPair) -> Vec<u8> {
    let request = CertificateParams::default().serialize_request(key);
    request.unwrap().der().to_vec()
}

#[test]
fn ended_certificate_is_renewed_by_its_key_for_90_days() {
    let scratch = Scratch::new();
    let issued = SystemTime::now() - 40 * DAY;
    let (renewals, holder) = service(&scratch, issued);
    for (days, outcome) in [
        (0, None),
        (29, None),
        (31, None),
        (119, None),
        (121, Some(EnrollCode::CertificateEnded)),
    ] {
        let answer = holder.ask(&renewals, &node(), issued + days * DAY);
        assert_eq!(answer.as_ref().err().copied(), outcome, "after {days} days");
        if let Ok(renewed) = answer {
            let left = renewed.not_after.duration_since(issued + days * DAY);
            assert!(left.unwrap() > 29 * DAY);
        }
    }
    let before = holder.ask(&renewals, &node(), issued - DAY);
    assert_eq!(before.unwrap_err(), EnrollCode::ClockWrong);
}

#[test]
fn only_the_keys_own_name_and_connection_count() {
    let (scratch, foreign) = (Scratch::new(), Scratch::new());
    let now = SystemTime::now();
    let (renewals, holder) = service(&scratch, now - 40 * DAY);
    let refused = holder.ask(&renewals, &"worker-2".parse().unwrap(), now);
    assert_eq!(refused.unwrap_err(), EnrollCode::WrongNode);
    let renew_expired = |proof: &RenewalProof, csr: &[u8], exported| {
        let answer = renewals.renew_expired(&node(), proof, csr, exported, now);
        answer.map(drop).map_err(|(code, _)| code)
    };
    let bad_proof = Err(EnrollCode::BadProof);
    let proof = holder.proof(&[7; 32]);
    let own = csr(&holder.pair);
    assert_eq!(renew_expired(&proof, &own, &[7; 32]), Ok(()));
    // The proof was captured on another connection.
    assert_eq!(renew_expired(&proof, &own, &[8; 32]), bad_proof);
    // The request is for another key.
    let other = csr(&KeyPair::generate().unwrap());
    assert_eq!(renew_expired(&proof, &other, &[7; 32]), bad_proof);
    // The certificate is of another CA, or the chain is empty.
    let (_, other_holder) = service(&foreign, now);
    let proof = other_holder.proof(&[7; 32]);
    let refused = renew_expired(&proof, &csr(&other_holder.pair), &[7; 32]);
    assert_eq!(refused, bad_proof);
    let none = RenewalProof {
        chain: Vec::new(),
        ..proof
    };
    assert_eq!(renew_expired(&none, &own, &[7; 32]), bad_proof);
}

#[test]
fn refused_certificate_is_not_renewed_and_the_next_one_has_the_next_generation() {
    let scratch = Scratch::new();
    let now = SystemTime::now();
    let (renewals, holder) = service(&scratch, now - DAY);
    let revocations = &renewals.revocations;
    let peer = PeerIdentity::from_certificate(&holder.own.cert[0]).unwrap();
    for (action, words) in [
        (OrderAction::Reissue, "new token"),
        (OrderAction::Revoke, "unrevoke"),
    ] {
        revocations.order(action, &[node()], now);
        let refused = holder.ask(&renewals, &node(), now);
        assert_eq!(refused.unwrap_err(), EnrollCode::Revoked);
        let refused = renewals.renew_on_session(&peer, &csr(&holder.pair), now);
        let (code, detail) = refused.unwrap_err();
        assert_eq!(code, EnrollCode::Revoked);
        assert!(detail.contains(words), "{detail}");
    }
    let issue = || {
        renewals.issue(
            &holder.request(),
            &node(),
            revocations.of_node(&node()),
            now,
        )
    };
    assert_eq!(issue().unwrap_err().0, EnrollCode::Revoked);
    revocations.order(OrderAction::Unrevoke, &[node()], now);
    let next = identity(issue().unwrap());
    assert!(next.generation > 0);
    assert_eq!(next.generation, revocations.of_node(&node()).generation);
    assert!(!revocations.is_revoked(&next));
    revocations.order(OrderAction::Reissue, &[node()], now);
    assert!(revocations.is_revoked(&next));
}

#[test]
fn order_between_the_judgement_and_the_signature_refuses_the_certificate() {
    let scratch = Scratch::new();
    let now = SystemTime::now();
    let (renewals, holder) = service(&scratch, now - DAY);
    for action in [OrderAction::Reissue, OrderAction::Revoke] {
        let judged_by = renewals.revocations.of_node(&node());
        renewals.revocations.order(action, &[node()], now);
        let refused = renewals.issue(&holder.request(), &node(), judged_by, now);
        assert_eq!(refused.unwrap_err().0, EnrollCode::Revoked, "{action:?}");
    }
}

/// The server lost the order, as with a new disk.
#[test]
fn renewal_keeps_the_generation_of_the_certificate_and_a_reissue_exceeds_it() {
    let scratch = Scratch::new();
    let now = SystemTime::now();
    let (renewals, holder) = service(&scratch, now - DAY);
    let peer = PeerIdentity {
        generation: 3,
        ..PeerIdentity::from_certificate(&holder.own.cert[0]).unwrap()
    };
    let renewed = renewals.renew_on_session(&peer, &csr(&holder.pair), now);
    assert_eq!(identity(renewed.unwrap()).generation, 3);
    let revocations = &renewals.revocations;
    revocations.order(OrderAction::Reissue, &[node()], now);
    assert!(revocations.is_revoked(&peer));
    assert!(revocations.of_node(&node()).generation > 3);
}

/// The cluster's CA attests kubelets, but a kubelet's certificate never yields a certificate of the
/// local CA.
#[test]
fn kubelets_certificate_is_not_ours_to_renew_and_no_proof() {
    let scratch = Scratch::new();
    let renewals = Renewals::of(&scratch.0);
    let now = SystemTime::now();
    let mut params = CertificateParams::default();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let issuer = KeyPair::generate().unwrap();
    let cluster = rcgen::CertifiedIssuer::self_signed(params, issuer).unwrap();
    let roots = tls::roots([cluster.der().clone()]).unwrap();
    renewals.trust.replace_cluster(roots).unwrap();
    let mut params = CertificateParams::default();
    let subject = &mut params.distinguished_name;
    subject.push(rcgen::DnType::OrganizationName, "system:nodes");
    subject.push(rcgen::DnType::CommonName, "system:node:worker-1");
    params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
    let pair = KeyPair::generate().unwrap();
    let leaf = params.signed_by(&pair, &cluster).unwrap();
    let key = pair.serialize_der().try_into().unwrap();
    let own = tls::certified_key(vec![leaf.der().clone()], key).unwrap();
    let holder = Holder { pair, own };

    let peer = PeerIdentity::from_agent_certificate(leaf.der()).unwrap();
    assert_eq!(peer.domain, TrustDomain::Cluster);
    let refused = renewals.renew_on_session(&peer, &csr(&holder.pair), now);
    assert_eq!(refused.unwrap_err().0, EnrollCode::NotOffered);
    let refused = holder.ask(&renewals, &node(), now).unwrap_err();
    assert_eq!(refused, EnrollCode::BadProof);
}
