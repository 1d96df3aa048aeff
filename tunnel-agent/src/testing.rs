//! Shared test support: a CA, credentials, and the shared state of sessions.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rcgen::string::Ia5String;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, PublicKeyData, SanType};
use rcgen::{ExtendedKeyUsagePurpose, KeyUsagePurpose};
use rustls_pki_types::CertificateDer;
use tokio_util::sync::CancellationToken;
use tunnel_process::meta::Readiness;
pub(crate) use tunnel_process::scratch::ScratchDir;
use tunnel_process::shutdown::Shutdown;
use tunnel_proto::tls;
use tunnel_proto::wire::enroll::EnrollReply;
use tunnel_proto::wire::label::Labels;
use tunnel_proto::wire::name::{InstanceId, NodeName};

use crate::config::{Limits, NodeIpSetting};
use crate::credentials::{
    CaFile, CredentialStore, Credentials, RotatingCredentials, Stored, TrustRoots,
};
use crate::egress::Egress;
use crate::handover::HostLock;
use crate::ingress::sessions::CloudSessions;
use crate::metrics::Metrics;
use crate::node_ip::NodeIpLookup;
use crate::policy::DialPolicy;
use crate::session::{LostSessions, SessionContext};

pub(crate) mod net;
pub(crate) mod server;

/// A CA as used by a server.
pub(crate) struct Ca {
    issuer: Issuer<'static, KeyPair>,
    certificate: rcgen::Certificate,
}

impl Ca {
    pub(crate) fn new() -> Self {
        Self::since(1975)
    }

    /// Creates a CA whose certificate begins in this year.
    pub(crate) fn since(year: i32) -> Self {
        let mut params = CertificateParams::default();
        params.not_before = rcgen::date_time_ymd(year, 1, 1);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        Self {
            issuer: Issuer::new(params, key),
            certificate,
        }
    }

    pub(crate) fn der(&self) -> &CertificateDer<'static> {
        self.certificate.der()
    }

    pub(crate) fn key(&self) -> &KeyPair {
        self.issuer.key()
    }

    /// Signs the key of another CA, as `ca rotate` does.
    pub(crate) fn cross_sign(&self, other: &Self) -> CertificateDer<'static> {
        let mut params = CertificateParams::default();
        params.not_before = rcgen::date_time_ymd(2021, 1, 1);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let signed = params.signed_by(other.issuer.key(), &self.issuer);
        signed.unwrap().der().clone()
    }

    /// Issues a certificate with one role URI, for both sides of TLS.
    pub(crate) fn issue(&self, key: &impl PublicKeyData, uri: &str) -> CertificateDer<'static> {
        self.issue_as(CertificateParams::default(), key, uri)
    }

    /// Like [`Ca::issue`], with a certificate that expired long ago.
    pub(crate) fn issue_ended(&self, key: &KeyPair, uri: &str) -> CertificateDer<'static> {
        let mut params = CertificateParams::default();
        params.not_after = rcgen::date_time_ymd(2001, 1, 1);
        self.issue_as(params, key, uri)
    }

    /// Returns a server's answer with a new certificate.
    pub(crate) fn reply(&self, key: &impl PublicKeyData, uri: &str) -> EnrollReply {
        EnrollReply::Issued {
            chain: vec![self.issue(key, uri).to_vec()],
            roots: vec![self.der().to_vec()],
        }
    }

    fn issue_as(
        &self,
        mut params: CertificateParams,
        key: &impl PublicKeyData,
        uri: &str,
    ) -> CertificateDer<'static> {
        params.subject_alt_names = vec![SanType::URI(Ia5String::try_from(uri).unwrap())];
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ClientAuth,
            ExtendedKeyUsagePurpose::ServerAuth,
        ];
        params.signed_by(key, &self.issuer).unwrap().der().clone()
    }
}

/// Returns credentials of worker-1 that are not renewed.
pub(crate) fn credentials(ca: &Ca) -> Credentials {
    let key = KeyPair::generate().unwrap();
    let leaf = ca.issue(&key, "culvert://agent/worker-1");
    let key = key.serialize_der().try_into().unwrap();
    Credentials {
        own: tls::certified_key(vec![leaf], key).unwrap(),
        roots: TrustRoots::new(vec![ca.der().clone()]).unwrap(),
        server_name: None,
        signer: None,
        issued: SystemTime::now(),
        not_after: SystemTime::now() + Duration::from_secs(3600),
    }
}

/// Returns the valid credentials of worker-1 in a data directory.
pub(crate) fn stored(dir: &Path) -> Credentials {
    let store = CredentialStore::open(dir).unwrap();
    let node = "worker-1".parse().unwrap();
    match store.load(&node, None, SystemTime::now()).unwrap() {
        Stored::Valid(stored) => *stored,
        other => panic!("{other:?}"),
    }
}

/// Returns the shared state of an agent's sessions on this host.
pub(crate) fn context(limits: Limits) -> SessionContext {
    let (shutdown, metrics) = (Shutdown::new(), Metrics::default());
    let node: NodeName = "worker-1".parse().unwrap();
    let dial_policy = DialPolicy::default();
    let draining = shutdown.drain().clone();
    let rotating_credentials = RotatingCredentials::new(
        node.clone(),
        credentials(&Ca::new()),
        None,
        CaFile::channel(None).1,
        metrics.clone(),
    );
    let egress = Egress::new(
        node.clone(),
        dial_policy.into(),
        Arc::default(),
        limits.into(),
        metrics.clone(),
        draining,
    );
    let node_ip = NodeIpSetting::Fixed([127, 0, 0, 1].into());
    let node_ip = NodeIpLookup::new(node.clone(), node_ip, Readiness::default());
    SessionContext {
        node,
        node_ip,
        labels: Labels::new(),
        instance: InstanceId::new([7; 16]),
        limits,
        facts: None,
        egress: Arc::new(egress),
        cloud_sessions: Arc::new(CloudSessions::default()),
        lost_sessions: LostSessions::default(),
        host_lock: HostLock::none(),
        metrics,
        shutdown,
        rotating_credentials,
        graceful_shutdown: CancellationToken::new(),
    }
}
