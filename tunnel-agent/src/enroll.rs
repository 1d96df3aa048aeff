//! The first certificate: a token and a certificate request over TCP, to a server that proved to be the right one.
//! In the same way a certificate that has ended is renewed, with a proof by its key in place of the token.

use std::fs::File;
use std::io;
use std::slice;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::BytesMut;
use rcgen::{CertificateParams, KeyPair, PublicKeyData};
use rustls_pki_types::{CertificateDer, ServerName};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tracing::{info, warn};
use tunnel_proto::identity::{PeerIdentity, sha256, spki_sha256};
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

use crate::config::ServerAddress;
use crate::config::{NO_CA, NO_PIN};
use crate::connector::causes;
use crate::connector::endpoint::{Endpoints, ResolveError};
use crate::credentials::{AccountFile, Credentials, Issued, Store, Stored, Token};
use crate::proxy::ProxyChoice;

mod error;
mod rounds;

pub(crate) use error::EnrollError;
use error::Place;
pub(crate) use rounds::{enroll, renew_or_enroll};

/// What enrolment needs.
#[derive(Debug)]
pub(crate) struct Enrolment {
    pub(crate) servers: Vec<ServerAddress>,
    /// Which way to them.
    pub(crate) proxy: ProxyChoice,
    pub(crate) node: NodeName,
    /// What it is asked for with.
    pub(crate) claim: Claim,
    /// The CA certificates of --ca-file; without them the token's hash pins the CA.
    pub(crate) ca: Option<Vec<CertificateDer<'static>>>,
    pub(crate) store: Store,
    /// Bound on each step.
    pub(crate) within: Duration,
}

/// What a certificate is asked for with.
#[derive(Debug, Clone)]
pub(crate) enum Claim {
    /// A join token.
    Token(JoinToken),
    /// A ServiceAccount token of this moment, in place of a certificate that ends so, if there is one.
    Account(AccountFile, Option<SystemTime>),
    /// A certificate that has ended, and its key.
    Ended(Box<Credentials>),
}

impl Claim {
    /// By a token; a ServiceAccount token may be used in place of a certificate that ends at `replaced`.
    pub(crate) fn by(token: Token, replaced: Option<SystemTime>) -> Self {
        match token {
            Token::Join(token) => Self::Token(token),
            Token::Account(file) => Self::Account(file, replaced),
        }
    }
}

/// A certificate as it came, and as it is used.
#[derive(Debug)]
pub(crate) struct Enrolled {
    pub(crate) credentials: Credentials,
    /// Chain and roots, where they are not kept yet.
    pub(crate) issued: Option<Issued>,
}

impl Enrolled {
    fn kept(credentials: Credentials) -> Self {
        Self {
            credentials,
            issued: None,
        }
    }
}

/// Servers take turns, and so do the addresses of each: every attempt moves on, since one that succeeds is the last.
#[derive(Debug, Default)]
struct Turns {
    taken: usize,
    endpoints: Vec<Endpoints>,
}

impl Turns {
    /// The place to try; a name that is for a proxy to resolve is not resolved here.
    async fn next(&mut self, enrolment: &Enrolment) -> Result<Place, ResolveError> {
        let servers = &enrolment.servers;
        let index = self.taken % servers.len().max(1);
        let server = servers.get(index).ok_or(ResolveError::NoServer)?;
        self.taken += 1;
        let proxy = enrolment.proxy.proxy_for(server).cloned();
        self.endpoints
            .resize_with(servers.len(), Endpoints::default);
        let endpoints = &mut self.endpoints[index];
        let remote = endpoints
            .next(slice::from_ref(server), enrolment.within, |_| {
                proxy.is_some()
            })
            .await?;
        endpoints.failed();
        Ok(Place { remote, proxy })
    }
}

async fn attempt(enrolment: &Enrolment, turns: &mut Turns) -> Result<Enrolled, EnrollError> {
    let Enrolment {
        node, store, ca, ..
    } = enrolment;
    let _one_at_a_time = lock(enrolment)?;
    if let Some(credentials) = from_another(enrolment)? {
        return Ok(Enrolled::kept(*credentials));
    }
    let key = match &enrolment.claim {
        Claim::Token(_) | Claim::Account(..) => Arc::new(store.key()?),
        Claim::Ended(ended) => ended
            .signer
            .clone()
            .ok_or_else(|| EnrollError::Prepare("the certificate's key is not here".to_owned()))?,
    };
    let place = turns.next(enrolment).await?;
    let (chain, roots) = match request(enrolment, &key, &place).await? {
        EnrollReply::Issued { chain, roots } => (chain, roots),
        EnrollReply::Refused(code, detail) => return Err(refused(enrolment, code, detail)),
    };
    if let Err(problem) = check(enrolment, &key, &chain, &roots) {
        return Err(EnrollError::Answer { place, problem });
    }
    let credentials = match Credentials::issued(key, &chain, &roots, ca.as_deref()) {
        Ok(credentials) => credentials,
        Err(problem) => return Err(EnrollError::Unusable { place, problem }),
    };
    if credentials.not_after <= SystemTime::now() {
        let clock = humantime::format_rfc3339_seconds(SystemTime::now());
        let issued = humantime::format_rfc3339_seconds(credentials.issued);
        let problem = format!(
            "by the clock of this host ({clock}) it has ended already, though the server issued it just now ({issued} by \
             the server's clock): one of the clocks is wrong"
        );
        return Err(EnrollError::Unusable { place, problem });
    }
    if let Claim::Ended(_) | Claim::Account(_, Some(_)) = &enrolment.claim {
        // Kept by whoever asked, who can go on without.
        return Ok(Enrolled {
            credentials,
            issued: Some((chain, roots)),
        });
    }
    store.keep(&chain, &roots)?;
    let not_after = humantime::format_rfc3339_seconds(credentials.not_after);
    info!(agent = %node, dir = %store.dir().display(), %not_after, "enrolled");
    Ok(Enrolled::kept(credentials))
}

fn refused(enrolment: &Enrolment, code: EnrollCode, detail: String) -> EnrollError {
    let has_account = matches!(enrolment.claim, Claim::Account(..));
    // The kubelet writes the next one by itself.
    if has_account && matches!(code, EnrollCode::TokenExpired | EnrollCode::TokenUsed) {
        return EnrollError::Stale(detail);
    }
    EnrollError::Refused {
        node: enrolment.node.clone(),
        code,
        detail,
        has_account,
    }
}

/// Keeps other processes from enrolling with the same directory. Whoever renews needs the directory for nothing else, so
/// one that cannot be written does not stop it.
fn lock(enrolment: &Enrolment) -> Result<Option<File>, EnrollError> {
    match (&enrolment.claim, enrolment.store.lock()) {
        (_, Ok(Some(held))) => Ok(Some(held)),
        (_, Ok(None)) => Err(EnrollError::Busy),
        (Claim::Token(_) | Claim::Account(_, None), Err(error)) => Err(error.into()),
        (Claim::Ended(_) | Claim::Account(_, Some(_)), Err(error)) => {
            warn!(agent = %enrolment.node, error = causes(&error), "renewing without the lock of the data directory");
            Ok(None)
        }
    }
}

/// What another process got while this one waited for its turn. In place of a certificate that has ended or is revoked only
/// one that ends later will do: by a clock that is behind, the ended one itself is still valid.
fn from_another(enrolment: &Enrolment) -> Result<Option<Box<Credentials>>, EnrollError> {
    let Enrolment {
        node, store, ca, ..
    } = enrolment;
    let stored = store.load(node, ca.as_deref(), SystemTime::now());
    let replaced = match &enrolment.claim {
        Claim::Token(_) => None,
        Claim::Account(_, replaced) => *replaced,
        Claim::Ended(ended) => Some(ended.not_after),
    };
    match (replaced, stored) {
        (None, Ok(Stored::Valid(stored))) => Ok(Some(stored)),
        (Some(replaced), Ok(Stored::Valid(stored))) => {
            Ok(Some(stored).filter(|stored| stored.not_after > replaced))
        }
        (_, Ok(Stored::Expired(..) | Stored::Nothing)) => Ok(None),
        (None, Err(error)) => Err(error.into()),
        (Some(_), Err(error)) => {
            warn!(agent = %node, error = causes(&error), "renewing without what the data directory holds");
            Ok(None)
        }
    }
}

/// One request to one place. The token leaves only after the verifier accepted the server's chain and role.
async fn request(
    enrolment: &Enrolment,
    key: &KeyPair,
    place: &Place,
) -> Result<EnrollReply, EnrollError> {
    let prepare = |error: String| EnrollError::Prepare(error);
    let csr = CertificateParams::default()
        .serialize_request(key)
        .map_err(|error| prepare(error.to_string()))?;
    let trust = match &enrolment.ca {
        Some(given) => Trust::Roots(
            tls::roots(given.iter().cloned()).map_err(|error| prepare(error.to_string()))?,
        ),
        None => match &enrolment.claim {
            Claim::Ended(ended) => ended.trust(),
            Claim::Token(token) => match token.ca_hash() {
                Some(hash) => Trust::Pin(*hash),
                None => return Err(prepare(format!("the token {NO_PIN}"))),
            },
            Claim::Account(..) => return Err(prepare(format!("the token {NO_CA}"))),
        },
    };
    let config = tls::enroll_client(trust).map_err(|error| prepare(error.to_string()))?;
    let within = enrolment.within;
    let at = || place.clone();
    let tcp = limited(within, enrolment.proxy.connect(&place.remote))
        .await
        .map_err(|source| EnrollError::Connect {
            place: at(),
            source,
        })?;
    let tls = limited(within, handshake(config, tcp))
        .await
        .map_err(|source| EnrollError::Tls {
            place: at(),
            source,
        })?;
    let proof = match &enrolment.claim {
        Claim::Token(_) | Claim::Account(..) => None,
        Claim::Ended(ended) => Some(prove(ended, &tls).map_err(prepare)?),
    };
    let message = EnrollRequest {
        token: match &enrolment.claim {
            Claim::Token(token) => token.reveal().into(),
            Claim::Account(file, _) => file.read()?,
            Claim::Ended(_) => Zeroizing::default(),
        },
        csr: csr.der().to_vec(),
        node_name: enrolment.node.clone(),
        proof,
    };
    let mut framed = BytesMut::new();
    message
        .encode(&mut framed)
        .map_err(|error| prepare(error.to_string()))?;
    let replied = limited(within, exchange(tls, &framed)).await;
    framed.as_mut().zeroize();
    replied.map_err(|source| EnrollError::Exchange {
        place: at(),
        source,
    })
}

/// The certificate's key signs what only the two ends of this connection know.
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
        return Err(io::Error::other("server does not offer enrolment here"));
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
    // The answer is complete, so an unclean end costs nothing.
    let _best_effort = tls.shutdown().await;
    Ok(reply)
}

async fn limited<T>(within: Duration, step: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    timeout(within, step)
        .await
        .unwrap_or_else(|_elapsed| Err(io::ErrorKind::TimedOut.into()))
}

/// Whether what was issued is for our key and name, and from the pinned CA.
fn check(
    enrolment: &Enrolment,
    key: &KeyPair,
    chain: &[Vec<u8>],
    roots: &[Vec<u8>],
) -> Result<(), &'static str> {
    check_issued(&enrolment.node, key, chain)?;
    let Claim::Token(token) = &enrolment.claim else {
        return Ok(());
    };
    let pinned = roots.iter().any(|root| {
        spki_sha256(&CertificateDer::from(root.as_slice()))
            .is_ok_and(|hash| token.ca_hash() == Some(&hash))
    });
    if enrolment.ca.is_none() && !pinned {
        return Err("its roots do not hold the CA that the token pins");
    }
    Ok(())
}

/// Whether a chain is for our key and name.
pub(crate) fn check_issued(
    node: &NodeName,
    key: &KeyPair,
    chain: &[Vec<u8>],
) -> Result<(), &'static str> {
    let leaf = CertificateDer::from(chain.first().ok_or("it holds no certificate")?.as_slice());
    let identity =
        PeerIdentity::from_certificate(&leaf).map_err(|_why| "its certificate names nobody")?;
    if identity.node() != Some(node) {
        return Err("its certificate is for another node");
    }
    let ours = sha256(&key.subject_public_key_info());
    if spki_sha256(&leaf).map_err(|_why| "its certificate is malformed")? != ours {
        return Err("its certificate is for another key");
    }
    Ok(())
}

/// Sent as SNI; the chain and the role are what is verified, not this name.
const SERVER_NAME: &str = "tunnel-server.culvert";

#[cfg(test)]
mod tests;
