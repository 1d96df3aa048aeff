//! Obtains the first certificate: sends a token and a certificate request over TCP to a verified
//! server. An expired certificate is renewed by the same exchange, with a proof by its key instead
//! of the token.

use std::fs::File;
use std::io;
use std::slice;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::BytesMut;
use rcgen::{CertificateParams, KeyPair};
use rustls_pki_types::{CertificateDer, ServerName};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tracing::{info, warn};
use tunnel_process::errors::causes;
use tunnel_proto::identity::spki_sha256;
use tunnel_proto::tcp::Connect;
use tunnel_proto::tls::{self, Trust};
use tunnel_proto::transport::read_frame;
use tunnel_proto::wire::ALPN_ENROLL;
use tunnel_proto::wire::code::EnrollCode;
use tunnel_proto::wire::enroll::{
    EnrollReply, EnrollRequest, JoinToken, RENEW_EXPORT_BYTES, RENEW_LABEL, RenewalProof,
};
use tunnel_proto::wire::frame::ENROLL_MESSAGE_MAX;
use tunnel_proto::wire::name::NodeName;
use zeroize::{Zeroize as _, Zeroizing};

use crate::config::{NO_CA, NO_PIN, ServerAddress, TokenSource};
use crate::connector::endpoint::{EndpointCursor, ResolveError};
use crate::connector::status::SessionStatuses;
use crate::credentials::{
    CaFile, CredentialError, CredentialStore, Credentials, Stored, Token, TrustRoots, check_issued,
    read_token, succeed,
};
use crate::proxy::ProxyChoice;

mod error;
mod retry;

use error::EnrollEndpoint;
pub(crate) use error::EnrollError;
pub(crate) use retry::{enroll, enroll_again, reenroll_backoff, renew_or_enroll};

#[derive(Debug)]
pub(crate) struct Enrollment {
    pub(crate) servers: Vec<ServerAddress>,
    pub(crate) proxy: ProxyChoice,
    pub(crate) node: NodeName,
    pub(crate) proof: ProofSource,
    /// Roots of --ca-file; without them the token's hash pins the CA.
    pub(crate) ca: CaFile,
    pub(crate) store: CredentialStore,
    /// Where operators see why there is no certificate.
    pub(crate) statuses: Arc<SessionStatuses>,
    /// Time limit for each step.
    pub(crate) within: Duration,
}

/// Where each attempt gets its proof from.
#[derive(Debug, Clone)]
pub(crate) enum ProofSource {
    /// The token that the source has at the time, and the expiry of the certificate to replace, if
    /// there is one.
    Token(TokenSource, Option<SystemTime>),
    ExpiredCertificate(Box<Credentials>),
}

impl ProofSource {
    /// Returns the expiry of the certificate to replace, if there is one.
    fn replaced(&self) -> Option<SystemTime> {
        match self {
            Self::Token(_, replaced) => *replaced,
            Self::ExpiredCertificate(ended) => Some(ended.not_after),
        }
    }

    /// Reads the proof of an attempt. Blocks the thread.
    fn read(&self, has_ca: bool) -> Result<EnrollProof<'_>, EnrollError> {
        match self {
            Self::Token(source, _) => read_token(source, has_ca)
                .map(EnrollProof::Token)
                .map_err(EnrollError::Token),
            Self::ExpiredCertificate(ended) => Ok(EnrollProof::ExpiredCertificate(ended)),
        }
    }
}

/// The proof that accompanies a certificate request.
#[derive(Debug)]
pub(crate) enum EnrollProof<'a> {
    Token(Token),
    ExpiredCertificate(&'a Credentials),
}

/// What one attempt uses: files may have changed since the attempt before.
#[derive(Debug)]
struct EnrollAttempt<'a> {
    enrollment: &'a Enrollment,
    ca: Option<TrustRoots>,
    proof: EnrollProof<'a>,
}

impl<'a> EnrollAttempt<'a> {
    fn new(enrollment: &'a Enrollment) -> Result<Self, EnrollError> {
        let ca = enrollment.ca.roots();
        Ok(Self {
            proof: enrollment.proof.read(ca.is_some())?,
            ca,
            enrollment,
        })
    }

    fn ca(&self) -> Option<&[CertificateDer<'static>]> {
        self.ca.as_ref().map(TrustRoots::certificates)
    }

    fn log_start(&self) {
        let node = &self.enrollment.node;
        match &self.proof {
            EnrollProof::Token(Token::Join(token)) => {
                info!(%node, token = token.id(), "enrolling")
            }
            EnrollProof::Token(Token::ServiceAccount(_)) => {
                info!(%node, "enrolling with the ServiceAccount token")
            }
            EnrollProof::ExpiredCertificate(ended) => {
                let ended = humantime::format_rfc3339_seconds(ended.not_after);
                info!(%node, %ended, "certificate has expired; renewing with its key");
            }
        }
    }
}

/// Rotates through the servers and through the addresses of each. Every attempt advances, since a
/// successful one is the last.
#[derive(Debug, Default)]
struct EndpointRotation {
    attempts: usize,
    endpoints: Vec<EndpointCursor>,
}

impl EndpointRotation {
    /// Returns the next endpoint. Names that a proxy resolves are not resolved here.
    async fn next(&mut self, enrollment: &Enrollment) -> Result<EnrollEndpoint, ResolveError> {
        let servers = &enrollment.servers;
        let index = self.attempts % servers.len().max(1);
        let server = servers.get(index).ok_or(ResolveError::NoServer)?;
        self.attempts += 1;
        let proxy = enrollment.proxy.proxy_for(server).cloned();
        self.endpoints
            .resize_with(servers.len(), EndpointCursor::default);
        let endpoints = &mut self.endpoints[index];
        let remote = endpoints
            // The operator configured the server.
            .next(
                slice::from_ref(server),
                enrollment.within,
                |_| proxy.is_some(),
                |_, _| true,
            )
            .await?;
        endpoints.failed();
        Ok(EnrollEndpoint { remote, proxy })
    }
}

async fn attempt(
    enrollment: &Enrollment,
    rotation: &mut EndpointRotation,
) -> Result<Credentials, EnrollError> {
    let Enrollment { node, store, .. } = enrollment;
    let _one_at_a_time = lock(enrollment)?;
    if let Some(credentials) = from_other_process(enrollment)? {
        return Ok(*credentials);
    }
    let current = EnrollAttempt::new(enrollment)?;
    if rotation.attempts == 0 {
        current.log_start();
    }
    let key = match &current.proof {
        EnrollProof::Token(_) => Arc::new(store.key()?),
        EnrollProof::ExpiredCertificate(ended) => ended
            .signer
            .clone()
            .ok_or_else(|| EnrollError::Prepare("key of the certificate is missing".to_owned()))?,
    };
    let endpoint = rotation.next(enrollment).await?;
    let (chain, roots) = match request(&current, &key, &endpoint).await? {
        EnrollReply::Issued { chain, roots } => (chain, roots),
        EnrollReply::Refused(code, detail) => return Err(refused(&current, code, detail)),
    };
    if let Err(problem) = check(&current, &key, &chain, &roots) {
        return Err(EnrollError::Answer { endpoint, problem });
    }
    let credentials = match Credentials::issued(key, &chain, &roots) {
        Ok(credentials) => credentials,
        Err(problem) => return Err(EnrollError::Unusable { endpoint, problem }),
    };
    if credentials.not_after <= SystemTime::now() {
        let clock = humantime::format_rfc3339_seconds(SystemTime::now());
        let issued = humantime::format_rfc3339_seconds(credentials.issued);
        let problem = format!(
            "by the clock of this host ({clock}) it has ended already, though the server issued it just now ({issued} by \
             the server's clock): one of the clocks is wrong"
        );
        return Err(EnrollError::Unusable { endpoint, problem });
    }
    let credentials = match succeed_trusted(&current, credentials) {
        Ok(credentials) => credentials,
        Err(problem) => return Err(EnrollError::Unusable { endpoint, problem }),
    };
    if enrollment.proof.replaced().is_some() {
        // The caller persists the certificate and can continue without it.
        return Ok(credentials);
    }
    store.save(&credentials)?;
    let not_after = humantime::format_rfc3339_seconds(credentials.not_after);
    info!(%node, dir = %store.dir().display(), %not_after, "enrolled");
    Ok(credentials)
}

fn refused(current: &EnrollAttempt<'_>, code: EnrollCode, detail: String) -> EnrollError {
    let has_account = matches!(current.proof, EnrollProof::Token(Token::ServiceAccount(_)));
    // The kubelet writes the next token by itself.
    if has_account && matches!(code, EnrollCode::TokenExpired | EnrollCode::TokenUsed) {
        return EnrollError::Stale(detail);
    }
    EnrollError::Refused {
        node: current.enrollment.node.clone(),
        code,
        detail,
        has_account,
    }
}

/// Takes the lock that prevents other processes from enrolling with the same directory. A renewal
/// needs the directory for nothing else, so an unwritable directory does not stop a renewal.
fn lock(enrollment: &Enrollment) -> Result<Option<File>, EnrollError> {
    match (enrollment.proof.replaced(), enrollment.store.lock()) {
        (_, Ok(Some(lock_file))) => Ok(Some(lock_file)),
        (_, Ok(None)) => Err(EnrollError::Busy),
        (None, Err(error)) => Err(error.into()),
        (Some(_), Err(error)) => {
            warn!(node = %enrollment.node, error = causes(&error), "cannot lock the data directory; renewing without the lock");
            Ok(None)
        }
    }
}

/// Returns credentials that another process obtained while this one waited for the lock. To replace
/// a certificate that has expired or is revoked, they must expire later: by a slow clock the
/// expired certificate itself is still valid.
fn from_other_process(enrollment: &Enrollment) -> Result<Option<Box<Credentials>>, EnrollError> {
    let Enrollment { node, store, .. } = enrollment;
    let ca = enrollment.ca.roots();
    let ca = ca.as_ref().map(TrustRoots::certificates);
    let stored = store.load(node, ca, SystemTime::now());
    let replaced = enrollment.proof.replaced();
    match (replaced, stored) {
        (None, Ok(Stored::Valid(stored))) => Ok(Some(stored)),
        (Some(replaced), Ok(Stored::Valid(stored))) => {
            Ok(Some(stored).filter(|stored| stored.not_after > replaced))
        }
        (_, Ok(Stored::Expired(..) | Stored::Missing))
        | (None, Err(CredentialError::Damaged { .. })) => Ok(None),
        (None, Err(error)) => Err(error.into()),
        (Some(_), Err(error)) => {
            warn!(%node, error = causes(&error), "cannot read the data directory; renewing without the stored certificate");
            Ok(None)
        }
    }
}

/// Sends one request to one endpoint. The token is sent only after the verifier accepted the
/// server's chain and role.
async fn request(
    current: &EnrollAttempt<'_>,
    key: &KeyPair,
    endpoint: &EnrollEndpoint,
) -> Result<EnrollReply, EnrollError> {
    let enrollment = current.enrollment;
    let prepare = |error: String| EnrollError::Prepare(error);
    let csr = CertificateParams::default()
        .serialize_request(key)
        .map_err(|error| prepare(error.to_string()))?;
    let trust = trust(current.ca(), &current.proof)?;
    let has_pin = matches!(trust, Trust::Pin(_));
    let config = tls::enroll_client(trust).map_err(|error| prepare(error.to_string()))?;
    let within = enrollment.within;
    let at = || endpoint.clone();
    let tcp = limited(within, enrollment.proxy.connect(&endpoint.remote))
        .await
        .map_err(|source| EnrollError::Connect {
            endpoint: at(),
            source,
        })?;
    let tls = limited(within, handshake(config, tcp))
        .await
        .map_err(|error| tls_failure(enrollment, at(), &error, has_pin))?;
    let proof = match &current.proof {
        EnrollProof::Token(_) => None,
        EnrollProof::ExpiredCertificate(ended) => Some(prove(ended, &tls).map_err(prepare)?),
    };
    let message = EnrollRequest {
        token: match &current.proof {
            EnrollProof::Token(Token::Join(token)) => token.reveal().into(),
            EnrollProof::Token(Token::ServiceAccount(token)) => token.0.clone().into(),
            EnrollProof::ExpiredCertificate(_) => Zeroizing::default(),
        },
        csr: csr.der().to_vec(),
        node_name: enrollment.node.clone(),
        proof,
        is_known: false,
    };
    let mut framed = BytesMut::new();
    message
        .encode(&mut framed)
        .map_err(|error| prepare(error.to_string()))?;
    let replied = limited(within, exchange(tls, &framed)).await;
    framed.as_mut().zeroize();
    replied.map_err(|source| EnrollError::Exchange {
        endpoint: at(),
        source,
    })
}

/// Returns the error of a handshake. `has_pin` says whether the hash of a token pins the CA.
fn tls_failure(
    enrollment: &Enrollment,
    endpoint: EnrollEndpoint,
    error: &io::Error,
    has_pin: bool,
) -> EnrollError {
    if has_pin && tls::is_unknown_issuer(error) {
        let node = enrollment.node.clone();
        return EnrollError::OtherCa { endpoint, node };
    }
    let problem = tls::describe(error);
    EnrollError::Tls { endpoint, problem }
}

/// Returns what the chain of the server must lead to. `ca` has the certificates of --ca-file.
pub(crate) fn trust(
    ca: Option<&[CertificateDer<'static>]>,
    proof: &EnrollProof<'_>,
) -> Result<Trust, EnrollError> {
    if let Some(given) = ca {
        return tls::roots(given.iter().cloned())
            .map(Trust::Roots)
            .map_err(|error| EnrollError::Prepare(error.to_string()));
    }
    let problem = match proof {
        EnrollProof::ExpiredCertificate(ended) => return Ok(ended.trust(None)),
        EnrollProof::Token(Token::Join(token)) => match token.ca_hash() {
            Some(hash) => return Ok(Trust::Pin(*hash)),
            None => NO_PIN,
        },
        EnrollProof::Token(Token::ServiceAccount(_)) => NO_CA,
    };
    Err(EnrollError::Prepare(format!("the token {problem}")))
}

/// Signs, with the certificate's key, a value that only the two ends of this connection know.
fn prove(
    ended: &Credentials,
    tls: &tokio_rustls::client::TlsStream<TcpStream>,
) -> Result<RenewalProof, String> {
    let exported = tls
        .get_ref()
        .1
        .export_keying_material([0; RENEW_EXPORT_BYTES], RENEW_LABEL, None)
        .map_err(|error| error.to_string())?;
    let (signature, scheme) =
        tls::sign_proof(&*ended.own.key, &exported).map_err(|error| error.to_string())?;
    Ok(RenewalProof {
        chain: ended.own.cert.iter().map(|der| der.to_vec()).collect(),
        signature,
        scheme,
    })
}

async fn handshake(
    config: Arc<rustls::ClientConfig>,
    tcp: TcpStream,
) -> io::Result<tokio_rustls::client::TlsStream<TcpStream>> {
    let name = ServerName::try_from(SERVER_NAME).map_err(io::Error::other)?;
    let tls = TlsConnector::from(config).connect(name, tcp).await?;
    if tls.get_ref().1.alpn_protocol() != Some(ALPN_ENROLL) {
        return Err(io::Error::other(
            "server does not offer enrollment on this port",
        ));
    }
    Ok(tls)
}

async fn exchange(
    mut tls: tokio_rustls::client::TlsStream<TcpStream>,
    request: &[u8],
) -> io::Result<EnrollReply> {
    tls.write_all(request).await?;
    tls.flush().await?;
    let reply = read_frame(&mut tls, ENROLL_MESSAGE_MAX).await?;
    let reply = EnrollReply::decode(&reply).map_err(io::Error::other)?;
    // The answer is complete, so an unclean close does no harm.
    let _best_effort = tls.shutdown().await;
    Ok(reply)
}

async fn limited<T>(within: Duration, step: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    timeout(within, step)
        .await
        .unwrap_or_else(|_elapsed| Err(io::ErrorKind::TimedOut.into()))
}

/// Checks that the issued certificate is for the agent's key and name, and from the pinned CA.
fn check(
    current: &EnrollAttempt<'_>,
    key: &KeyPair,
    chain: &[Vec<u8>],
    roots: &[Vec<u8>],
) -> Result<(), &'static str> {
    check_issued(&current.enrollment.node, key, chain)?;
    let EnrollProof::Token(Token::Join(token)) = &current.proof else {
        return Ok(());
    };
    let mut roots = roots
        .iter()
        .map(|root| CertificateDer::from(root.as_slice()));
    if current.ca.is_none() && !roots.any(|root| is_pinned(token, &root)) {
        return Err("roots do not include the CA that the token pins");
    }
    Ok(())
}

/// Checks the roots of issued credentials by the CAs that the agent trusts without them.
fn succeed_trusted(
    current: &EnrollAttempt<'_>,
    credentials: Credentials,
) -> Result<Credentials, String> {
    let (ended, pinned) = match &current.proof {
        EnrollProof::ExpiredCertificate(ended) => {
            (Some(&ended.roots), ended.roots.certificates().to_vec())
        }
        EnrollProof::Token(Token::Join(token)) => {
            let roots = credentials.roots.certificates().iter();
            (
                None,
                roots
                    .filter(|root| is_pinned(token, root))
                    .cloned()
                    .collect(),
            )
        }
        // Needs --ca-file.
        EnrollProof::Token(Token::ServiceAccount(_)) => (None, Vec::new()),
    };
    let trusted = current.ca().unwrap_or(&pinned);
    succeed(credentials, trusted, ended, SystemTime::now())
}

/// Returns whether a token pins the key of this CA.
fn is_pinned(token: &JoinToken, root: &CertificateDer<'_>) -> bool {
    spki_sha256(root).is_ok_and(|hash| token.ca_hash() == Some(&hash))
}

/// Sent as SNI. The client verifies the chain and the role, not this name.
pub(crate) const SERVER_NAME: &str = "tunnel-server.culvert";

#[cfg(test)]
mod tests;
