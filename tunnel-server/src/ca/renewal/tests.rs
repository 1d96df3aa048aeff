use rcgen::{CertificateParams, KeyPair};
use rustls::sign::CertifiedKey;
use tunnel_proto::tls::{self, sign_proof};

use super::*;
use crate::store::data_dir::DataDir;
use crate::store::data_dir::testing::Scratch;

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

struct Holder {
    pair: KeyPair,
    own: Arc<CertifiedKey>,
}

impl Holder {
    fn new(renewals: &Renewals, node: &str, issued: SystemTime) -> Self {
        let pair = KeyPair::generate().unwrap();
        let request = AgentCsr::parse(&csr(&pair)).unwrap();
        let issued = renewals.ca.issue(&request, &node.parse().unwrap(), issued);
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

    fn ask(
        &self,
        renewals: &Renewals,
        claimed: &str,
        now: SystemTime,
    ) -> Result<RenewedCertificate, EnrollCode> {
        let proof = self.proof(&[7; 32]);
        let csr = csr(&self.pair);
        let answer = renewals.renew_expired(&claimed.parse().unwrap(), &proof, &csr, &[7; 32], now);
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
    let renewals = Renewals::of(&scratch.0);
    let now = SystemTime::now();
    let issued = now - 40 * DAY;
    let holder = Holder::new(&renewals, "worker-1", issued);
    for (days, outcome) in [
        (0, None),
        (29, None),
        (31, None),
        (119, None),
        (121, Some(EnrollCode::CertificateEnded)),
    ] {
        let answer = holder.ask(&renewals, "worker-1", issued + days * DAY);
        assert_eq!(answer.as_ref().err().copied(), outcome, "after {days} days");
        if let Ok(renewed) = answer {
            let left = renewed.not_after.duration_since(issued + days * DAY);
            assert!(left.unwrap() > 29 * DAY);
        }
    }
    let before = holder.ask(&renewals, "worker-1", issued - DAY);
    assert_eq!(before.unwrap_err(), EnrollCode::ClockWrong);
}

#[test]
fn only_the_keys_own_name_and_connection_count() {
    let (scratch, foreign) = (Scratch::new(), Scratch::new());
    let renewals = Renewals::of(&scratch.0);
    let now = SystemTime::now();
    let holder = Holder::new(&renewals, "worker-1", now - 40 * DAY);
    assert_eq!(
        holder.ask(&renewals, "worker-2", now).unwrap_err(),
        EnrollCode::WrongNode
    );
    let name = "worker-1".parse().unwrap();
    let renew_expired = |proof: &RenewalProof, csr: &[u8], exported| {
        let answer = renewals.renew_expired(&name, proof, csr, exported, now);
        answer.map(drop).map_err(|(code, _)| code)
    };
    let proof = holder.proof(&[7; 32]);
    let own = csr(&holder.pair);
    assert_eq!(renew_expired(&proof, &own, &[7; 32]), Ok(()));
    // The proof was captured on another connection.
    assert_eq!(
        renew_expired(&proof, &own, &[8; 32]),
        Err(EnrollCode::BadProof)
    );
    // The request is for another key.
    let other = csr(&KeyPair::generate().unwrap());
    assert_eq!(
        renew_expired(&proof, &other, &[7; 32]),
        Err(EnrollCode::BadProof)
    );
    // The certificate is of another CA, or the chain is empty.
    let other_holder = Holder::new(&Renewals::of(&foreign.0), "worker-1", now);
    let proof = other_holder.proof(&[7; 32]);
    let refused = renew_expired(&proof, &csr(&other_holder.pair), &[7; 32]);
    assert_eq!(refused, Err(EnrollCode::BadProof));
    let none = RenewalProof {
        chain: Vec::new(),
        ..proof
    };
    assert_eq!(
        renew_expired(&none, &own, &[7; 32]),
        Err(EnrollCode::BadProof)
    );
}

#[test]
fn revoked_node_is_refused_until_it_has_a_later_certificate() {
    let scratch = Scratch::new();
    let renewals = Renewals::of(&scratch.0);
    let now = SystemTime::now();
    let holder = Holder::new(&renewals, "worker-1", now - DAY);
    let node = "worker-1".parse().unwrap();
    renewals.revocations.revoke(&node, now).unwrap();
    assert_eq!(
        holder.ask(&renewals, "worker-1", now).unwrap_err(),
        EnrollCode::Revoked
    );
    let peer = PeerIdentity::from_certificate(&holder.own.cert[0]).unwrap();
    let refused = renewals
        .renew_on_session(&peer, &csr(&holder.pair), now)
        .unwrap_err();
    assert_eq!(refused.0, EnrollCode::Revoked);
    assert!(refused.1.contains("new token"), "{}", refused.1);
    // A new token yields a certificate in the same second.
    let request = AgentCsr::parse(&csr(&holder.pair)).unwrap();
    let revoked = renewals.revocations.of_node(&node);
    let renewed = renewals.issue(&request, &node, revoked, now).unwrap();
    let EnrollReply::Issued { chain, .. } = renewed.reply else {
        panic!("refused")
    };
    let peer = PeerIdentity::from_certificate(&CertificateDer::from(chain[0].clone())).unwrap();
    assert!(!renewals.revocations.is_revoked(&peer));
}

#[test]
fn revocation_between_the_judgement_and_the_signature_refuses_the_certificate() {
    let scratch = Scratch::new();
    let renewals = Renewals::of(&scratch.0);
    let now = SystemTime::now();
    let holder = Holder::new(&renewals, "worker-1", now - DAY);
    let node = "worker-1".parse().unwrap();
    let request = AgentCsr::parse(&csr(&holder.pair)).unwrap();
    // Revoke once, and again in the same second.
    for _ in 0..2 {
        let judged_by = renewals.revocations.of_node(&node);
        renewals.revocations.revoke(&node, now).unwrap();
        let refused = renewals.issue(&request, &node, judged_by, now);
        assert_eq!(refused.unwrap_err().0, EnrollCode::Revoked);
        let judged_by = renewals.revocations.of_node(&node);
        renewals.issue(&request, &node, judged_by, now).unwrap();
    }
}

#[test]
fn revocation_right_after_the_signature_holds_for_what_was_signed() {
    let scratch = Scratch::new();
    let renewals = Renewals::of(&scratch.0);
    let now = SystemTime::now();
    let holder = Holder::new(&renewals, "worker-1", now - DAY);
    let node = "worker-1".parse().unwrap();
    renewals.revocations.revoke(&node, now).unwrap();
    let revoked = renewals.revocations.of_node(&node);
    let request = AgentCsr::parse(&csr(&holder.pair)).unwrap();
    let renewed = renewals.issue(&request, &node, revoked, now).unwrap();
    let EnrollReply::Issued { chain, .. } = renewed.reply else {
        panic!("refused")
    };
    renewals.revocations.revoke(&node, now).unwrap();
    let peer = PeerIdentity::from_certificate(&CertificateDer::from(chain[0].clone())).unwrap();
    assert!(renewals.revocations.is_revoked(&peer));
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
    let refused = renewals
        .renew_on_session(&peer, &csr(&holder.pair), now)
        .unwrap_err();
    assert_eq!(refused.0, EnrollCode::NotOffered);
    let refused = holder.ask(&renewals, "worker-1", now).unwrap_err();
    assert_eq!(refused, EnrollCode::BadProof);
}
