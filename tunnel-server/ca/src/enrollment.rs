//! Enrollment: one framed request over TLS without a client certificate. The agent obtains a
//! certificate with a join token, in a cluster with a ServiceAccount token, or with a proof by the
//! key of an expired certificate.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tracing::{debug, info, warn};
use tunnel_process::conn_limiter::source;
use tunnel_process::telemetry::LogRateLimit;
use tunnel_proto::wire::code::EnrollCode;
use tunnel_proto::wire::enroll::{
    EnrollReply, EnrollRequest, RENEW_EXPORT_BYTES, is_service_account_token,
};
use tunnel_proto::wire::frame::{self, ENROLL_MESSAGE_MAX, FrameError};
use tunnel_proto::wire::name::{NodeName, ReplicaId};
use tunnel_proto::wire::order::Order;
use tunnel_store::known_nodes::{EnrollmentKind, KnownNodes};
use zeroize::Zeroize as _;

use crate::AgentCsr;
use crate::attestation::{AttestedToken, Attestor, KeyBinding, ServiceAccountToken};
use crate::renewal::{EnrollRefusal, Renewals, refusal, revoked};
use crate::revocation::is_issued_before;
use crate::tokens::{TokenStore, unavailable};

mod forwarded;
mod peers;

pub use peers::EnrollmentPeers;

/// A callback that returns whether a name is taken, or `None` while that is not known.
pub type IsTaken = Arc<dyn Fn(&NodeName) -> Option<bool> + Send + Sync>;

/// Any client that can connect to the port can cause these log messages.
static REFUSED: LogRateLimit = LogRateLimit::new("enrollments refused");

/// The services that enrollments use. Clones share them.
#[derive(Clone)]
pub struct Enrollment {
    /// Issuer of the certificates. `None` if the operator provides the agents' certificates.
    pub renewals: Option<Arc<Renewals>>,
    /// Join tokens that admit agents.
    pub tokens: Arc<TokenStore>,
    /// Known nodes, to which enrolled nodes are added.
    pub nodes: Arc<KnownNodes>,
    /// Whether a name is taken, by a Node object or otherwise, or `None` while the Nodes are not known.
    /// No token for a pattern enrolls a name that is taken.
    pub is_taken: IsTaken,
    /// Client for the review of ServiceAccount tokens. `None` outside a cluster.
    pub attestor: Option<Attestor>,
    /// Other servers, which may have created a join token. `None` in a cluster.
    pub peers: Option<Arc<dyn EnrollmentPeers>>,
}

tunnel_process::partial_debug!(Enrollment);

impl Enrollment {
    /// Serves one request and closes the stream. `exported` is the exporter value of the TLS connection,
    /// which only its two ends know. The caller limits the time. Not cancel-safe: the token may
    /// have been used.
    pub async fn serve<S>(
        &self,
        mut stream: S,
        peer: SocketAddr,
        exported: ExporterValue,
    ) -> EnrollmentEnd
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let mut node = None;
        let outcome = match read_request(&mut stream).await {
            Ok(request) => {
                node = Some(request.node_name.clone());
                self.answer(request, peer, exported).await
            }
            Err(ReadError::Frame(error)) => {
                if REFUSED.admit() {
                    warn!(%peer, code = %EnrollCode::BadRequest, %error, "enrollment refused");
                }
                Err((EnrollCode::BadRequest, error.to_string()))
            }
            Err(ReadError::Io(error)) => {
                debug!(%peer, %error, "enrollment connection closed before the request");
                return EnrollmentEnd::cut(node, "closed before the request");
            }
        };
        let (reply, end) = match outcome {
            Ok(reply) => (reply, EnrollmentEnd::Issued),
            Err((code, detail)) => {
                let end = EnrollmentEnd::Refused {
                    node: node.clone(),
                    code,
                    detail: detail.clone(),
                };
                (EnrollReply::Refused(code, detail), end)
            }
        };
        if let Err(error) = send_reply(&mut stream, &reply).await {
            debug!(%peer, %error, "enrollment connection closed before the reply was sent");
            return match end {
                EnrollmentEnd::Issued | EnrollmentEnd::Cut { .. } => {
                    EnrollmentEnd::cut(node, "closed before the reply was sent")
                }
                EnrollmentEnd::Refused { .. } => end,
            };
        }
        end
    }

    async fn answer(
        &self,
        request: EnrollRequest,
        peer: SocketAddr,
        exported: ExporterValue,
    ) -> Result<EnrollReply, EnrollRefusal> {
        let agent = request.node_name.clone();
        let issued = match self.attested(&request).await {
            Ok(None) if request.proof.is_some() => self.issued(request, None, exported).await,
            Ok(None) => self.redeemed(request, peer, exported).await,
            Ok(attestation) => self.issued(request, attestation, exported).await,
            Err(refusal) => Err(refusal),
        };
        match issued {
            Ok((EnrolledBy::Token(token), reply)) => {
                info!(node = %agent, %peer, token, "agent enrolled");
                Ok(reply)
            }
            Ok((EnrolledBy::Account(account), reply)) => {
                info!(node = %agent, %peer, account, "agent enrolled with a ServiceAccount token");
                Ok(reply)
            }
            Ok((EnrolledBy::Server(server), reply)) => {
                info!(node = %agent, %peer, %server, "agent enrolled by another server");
                Ok(reply)
            }
            Ok((EnrolledBy::Proof, reply)) => {
                info!(node = %agent, %peer, "expired certificate renewed");
                Ok(reply)
            }
            Err((code, detail)) => {
                if REFUSED.admit() {
                    warn!(node = %agent, %peer, %code, detail, "enrollment refused");
                }
                Err((code, detail))
            }
        }
    }

    /// Redeems a join token of this server, or of another one.
    async fn redeemed(
        &self,
        request: EnrollRequest,
        peer: SocketAddr,
        exported: ExporterValue,
    ) -> Result<(EnrolledBy, EnrollReply), EnrollRefusal> {
        let source = source(peer.ip());
        // A marked token is looked up whatever others present, who may have the same address.
        let waited = if self.tokens.is_marked(&request.token) {
            Duration::ZERO
        } else {
            self.tokens.admit(source).await?
        };
        let outcome = match Box::pin(self.forward(&request)).await {
            Some(outcome) => outcome,
            None => self.issued(request, None, exported).await,
        };
        if let Err((code, _)) = &outcome {
            self.tokens.record(source, waited, *code);
        }
        outcome
    }

    /// Returns what the cluster attests about a ServiceAccount token, or `None` for other requests.
    async fn attested(
        &self,
        request: &EnrollRequest,
    ) -> Result<Option<Attestation>, EnrollRefusal> {
        if request.proof.is_some() || !is_service_account_token(&request.token) {
            return Ok(None);
        }
        let Some(renewals) = &self.renewals else {
            return Err(not_offered());
        };
        let Some(attestor) = &self.attestor else {
            let detail = "this server is not connected to a cluster and accepts join tokens only, not ServiceAccount tokens";
            return Err((EnrollCode::NotOffered, detail.to_owned()));
        };
        // Read the order before the token is reviewed, so that one in the meantime refuses the
        // certificate.
        let order = renewals.revocations.of_node(&request.node_name);
        let token = ServiceAccountToken::new(&request.token);
        let attested = attestor
            .node_of(token, SystemTime::now())
            .await
            .map_err(|error| (error.code(), error.to_string()))?;
        if attested.node != request.node_name {
            let detail = format!(
                "the ServiceAccount token is that of a Pod on {}, not {}",
                attested.node, request.node_name
            );
            return Err((EnrollCode::WrongNode, detail));
        }
        if order.is_revoked || is_issued_before(order, attested.issued) {
            return Err(revoked(order));
        }
        Ok(Some(Attestation { attested, order }))
    }

    /// Binds a ServiceAccount token to the first key that uses it, like a join token.
    fn bind(
        &self,
        attested: &AttestedToken,
        request: &AgentCsr,
        now: SystemTime,
    ) -> Result<(), EnrollRefusal> {
        let Some(attestor) = &self.attestor else {
            return Err(not_offered());
        };
        match attestor.bind(attested, request.key_sha256(), now) {
            KeyBinding::Granted => Ok(()),
            KeyBinding::BoundToOtherKey => {
                Err((EnrollCode::TokenUsed, TOKEN_BOUND_TO_OTHER_KEY.to_owned()))
            }
            KeyBinding::Full => {
                let detail = "too many tokens are in use; try again later";
                Err((EnrollCode::Unavailable, detail.to_owned()))
            }
        }
    }

    async fn issued(
        &self,
        request: EnrollRequest,
        attestation: Option<Attestation>,
        exported: ExporterValue,
    ) -> Result<(EnrolledBy, EnrollReply), EnrollRefusal> {
        let has_token = request.proof.is_none() && attestation.is_none();
        let _permit = if has_token {
            self.tokens.lookup_permit().await
        } else {
            None
        };
        let this = self.clone();
        // Signing and file access would block the runtime's threads.
        let work = tokio::task::spawn_blocking(move || {
            this.issue(&request, attestation, &exported, SystemTime::now())
        });
        work.await.unwrap_or_else(|panic| {
            warn!(error = %panic, "enrollment task failed");
            Err((EnrollCode::Unavailable, "internal server error".to_owned()))
        })
    }

    /// Issues the certificate and returns the credential that authorized it. Blocks the thread.
    fn issue(
        &self,
        request: &EnrollRequest,
        attestation: Option<Attestation>,
        exported: &ExporterValue,
        now: SystemTime,
    ) -> Result<(EnrolledBy, EnrollReply), EnrollRefusal> {
        let Some(renewals) = &self.renewals else {
            return Err(not_offered());
        };
        if let Some(proof) = &request.proof {
            let renewed =
                renewals.renew_expired(&request.node_name, proof, &request.csr, exported, now)?;
            self.nodes.record(&request.node_name, &[]);
            return Ok((EnrolledBy::Proof, renewed.reply));
        }
        // Parse the request first, so that a damaged request does not bind the token to an unusable
        // key.
        let certificate_request = AgentCsr::parse(&request.csr).map_err(refusal)?;
        if let Some(Attestation { attested, order }) = attestation {
            let node = &attested.node;
            self.bind(&attested, &certificate_request, now)?;
            let issued = renewals.issue(&certificate_request, node, order, now)?;
            self.nodes
                .record_enrollment(node, EnrollmentKind::ServiceAccount);
            return Ok((EnrolledBy::Account(attested.account), issued.reply));
        }
        // Read the order before the token is redeemed, so that one in the meantime refuses the
        // certificate.
        let order = renewals.revocations.of_node(&request.node_name);
        if order.is_revoked {
            return Err(revoked(order));
        }
        let grant = self.tokens.redeem(
            &request.token,
            &request.node_name,
            certificate_request.key_sha256(),
            &|node| match self.nodes.knows(node) || request.is_known {
                true => Some(true),
                false => (self.is_taken)(node),
            },
            now,
        )?;
        if grant.order.is_before(order) {
            return Err((EnrollCode::Revoked, VOID.to_owned()));
        }
        if !grant.labels.is_empty() {
            // Rules may name them, so they are saved before the node can connect.
            self.nodes.add(&grant.node, &grant.labels);
            self.nodes.save().map_err(|error| unavailable(&error))?;
        }
        // This server may not know yet what the creator of the token knew.
        let order = order.with_generation(grant.order.generation);
        let issued = renewals.issue(&certificate_request, &grant.node, order, now)?;
        self.nodes
            .record_enrollment(&grant.node, EnrollmentKind::JoinToken);
        Ok((EnrolledBy::Token(grant.id), issued.reply))
    }
}

/// How the connection of an enrollment ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EnrollmentEnd {
    /// The agent has a certificate.
    Issued,
    /// The request was refused.
    Refused {
        /// The name in the request, which nothing proves.
        node: Option<NodeName>,
        code: EnrollCode,
        detail: String,
    },
    /// The connection was closed before the end of the exchange.
    Cut {
        /// The name in the request, which nothing proves.
        node: Option<NodeName>,
        detail: &'static str,
    },
}

impl EnrollmentEnd {
    fn cut(node: Option<NodeName>, detail: &'static str) -> Self {
        Self::Cut { node, detail }
    }

    /// Returns the result for logs and metrics: `issued`, the code of the refusal, or `cut`.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Issued => "issued",
            Self::Refused { code, .. } => code.label(),
            Self::Cut { .. } => "cut",
        }
    }
}

/// Refusal for a token that an order made void.
const VOID: &str =
    "the node was revoked or reissued after the token was created; create a new token";
/// Refusal for a key other than the first.
const TOKEN_BOUND_TO_OTHER_KEY: &str =
    "this ServiceAccount token is bound to another key; wait for the kubelet's next token";

/// An attested token, and the order about its node as read before the review.
struct Attestation {
    attested: AttestedToken,
    order: Order,
}

/// The credential that authorized a certificate.
enum EnrolledBy {
    /// Join token with this id.
    Token(String),
    /// ServiceAccount token of this account.
    Account(String),
    /// Join token of this other server.
    Server(ReplicaId),
    /// Proof by the key of an expired certificate.
    Proof,
}

fn not_offered() -> EnrollRefusal {
    let detail = "this server accepts certificates of --agent-ca only; start the agent with --cert-file and --key-file";
    (EnrollCode::NotOffered, detail.to_owned())
}

/// An exporter value that only the two ends of a TLS connection can compute.
pub type ExporterValue = [u8; RENEW_EXPORT_BYTES];

enum ReadError {
    Frame(FrameError),
    Io(std::io::Error),
}

async fn read_request(stream: &mut (impl AsyncRead + Unpin)) -> Result<EnrollRequest, ReadError> {
    let mut buffer = BytesMut::new();
    loop {
        let missing = frame::bytes_needed(&buffer, ENROLL_MESSAGE_MAX).map_err(ReadError::Frame)?;
        if missing == 0 {
            break;
        }
        let read = (&mut *stream)
            .take(missing as u64)
            .read_buf(&mut buffer)
            .await
            .map_err(ReadError::Io)?;
        if read == 0 {
            return Err(ReadError::Io(std::io::ErrorKind::UnexpectedEof.into()));
        }
    }
    let frame = frame::take(&mut buffer, ENROLL_MESSAGE_MAX).map_err(ReadError::Frame)?;
    let frame = frame.unwrap_or_default();
    // The rest of the buffer shares its memory with the frame.
    drop(buffer);
    let request = EnrollRequest::decode(&frame).map_err(ReadError::Frame);
    if let Ok(mut frame) = frame.try_into_mut() {
        frame.as_mut().zeroize();
    }
    request
}

async fn send_reply<S>(stream: &mut S, reply: &EnrollReply) -> std::io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut bytes = BytesMut::new();
    reply.encode(&mut bytes).map_err(std::io::Error::other)?;
    stream.write_all(&bytes).await?;
    stream.shutdown().await?;
    // A close with unread bytes would reset the connection and could discard the reply.
    let draining = async {
        let mut scratch = [0; 1024];
        while matches!(stream.read(&mut scratch).await, Ok(1..)) {}
    };
    let _patience_is_over = tokio::time::timeout(LINGER, draining).await;
    Ok(())
}

/// Time for the agent to close the connection after the reply.
const LINGER: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair};
    use rustls_pki_types::CertificateDer;
    use tokio::io::DuplexStream;
    use tokio::time::Instant;
    use tunnel_proto::identity::PeerIdentity;
    use tunnel_proto::wire::enroll::{JoinToken, TOKEN_SECRET_BYTES};
    use tunnel_proto::wire::order::NodeOrder;
    use tunnel_store::testing::{Scratch, node};

    use super::*;

    pub(super) struct Fixture {
        pub(super) enrollment: Enrollment,
        pub(super) token: String,
        _scratch: Scratch,
    }

    impl Fixture {
        pub(super) fn new() -> Self {
            let scratch = Scratch::new();
            let renewals = Renewals::of(&scratch.0);
            let tokens = TokenStore::open(&scratch.0)
                .unwrap()
                .marked_by(renewals.ca.clone());
            let enrollment = Enrollment {
                renewals: Some(renewals),
                tokens: Arc::new(tokens),
                nodes: Arc::new(KnownNodes::open(&scratch.0).unwrap()),
                is_taken: Arc::new(|_| Some(false)),
                attestor: None,
                peers: None,
            };
            let (minute, now) = (Duration::from_secs(60), SystemTime::now());
            let ca = enrollment.renewals.as_ref().unwrap().ca.spki_sha256();
            let token = enrollment.tokens.create(
                &NodeOrder::new(&node(), Order::default()),
                minute,
                vec![],
                ca,
                now,
            );
            Self {
                token: token.unwrap().reveal(),
                enrollment,
                _scratch: scratch,
            }
        }

        /// Sends bytes and returns the result with the bytes of the reply.
        async fn send(&self, bytes: &[u8]) -> (&'static str, BytesMut) {
            let (mut agent, server): (DuplexStream, _) = tokio::io::duplex(64 * 1024);
            let peer = "192.0.2.1:5".parse().unwrap();
            let client = async {
                agent.write_all(bytes).await.unwrap();
                agent.shutdown().await.unwrap();
                let mut reply = Vec::new();
                agent.read_to_end(&mut reply).await.unwrap();
                BytesMut::from(&reply[..])
            };
            let (end, reply) = tokio::join!(self.enrollment.serve(server, peer, [0; 32]), client);
            (end.label(), reply)
        }

        pub(super) async fn enroll(
            &self,
            token: &str,
            csr: Vec<u8>,
        ) -> (&'static str, EnrollReply) {
            let request = EnrollRequest {
                token: token.to_owned().into(),
                csr,
                node_name: node(),
                proof: None,
                is_known: false,
            };
            let mut bytes = BytesMut::new();
            request.encode(&mut bytes).unwrap();
            let (result, mut reply) = self.send(&bytes).await;
            let frame = frame::take(&mut reply, ENROLL_MESSAGE_MAX).unwrap();
            let frame = frame.unwrap();
            (result, EnrollReply::decode(&frame).unwrap())
        }
    }

    pub(super) fn csr(key: &KeyPair) -> Vec<u8> {
        let mut params = CertificateParams::new(["evil.example".to_owned()]).unwrap();
        params
            .distinguished_name
            .push(rcgen::DnType::CommonName, "system:masters");
        params.serialize_request(key).unwrap().der().to_vec()
    }

    #[tokio::test]
    async fn token_buys_a_certificate_for_its_node_and_no_other_name() {
        let fixture = Fixture::new();
        let key = KeyPair::generate().unwrap();
        let (result, reply) = fixture.enroll(&fixture.token, csr(&key)).await;
        assert_eq!(result, "issued");
        let EnrollReply::Issued { chain, roots } = reply else {
            panic!("refused: {reply:?}");
        };
        let ca = &fixture.enrollment.renewals.as_ref().unwrap().ca;
        assert_eq!(roots, [ca.root().to_vec()]);
        let leaf = CertificateDer::from(chain[0].clone());
        let identity = PeerIdentity::from_certificate(&leaf).unwrap();
        assert_eq!(identity.node(), Some(&node()));
        let text = String::from_utf8_lossy(&leaf);
        assert!(!text.contains("evil") && !text.contains("masters"));
        assert!(fixture.enrollment.nodes.knows(&node()));
    }

    /// All have one address, as the agents of a site do.
    #[tokio::test(start_paused = true)]
    async fn address_with_unknown_tokens_is_not_looked_up_and_a_good_token_of_it_enrolls() {
        let fixture = Fixture::new();
        let key = KeyPair::generate().unwrap();
        let unknown = |number: u8| {
            let token = JoinToken::new("abcdef012345", &[number; TOKEN_SECRET_BYTES], None);
            token.unwrap().reveal()
        };
        let began = Instant::now();
        for number in 0..50 {
            let (result, _) = fixture.enroll(&unknown(number), csr(&key)).await;
            assert_eq!(result, "bad_token");
        }
        // 20 at once, then one a second.
        assert!(
            began.elapsed() >= Duration::from_secs(25),
            "{:?}",
            began.elapsed()
        );
        let began = Instant::now();
        let tokens = &fixture.enrollment.tokens;
        assert!(tokens.is_marked(&fixture.token) && !tokens.is_marked(&unknown(1)));
        let (result, _) = fixture.enroll(&fixture.token, csr(&key)).await;
        assert_eq!(result, "issued");
        assert!(began.elapsed() < Duration::from_secs(1));
    }

    #[tokio::test]
    async fn lost_answer_may_be_repeated_by_the_same_key_only() {
        let fixture = Fixture::new();
        let key = KeyPair::generate().unwrap();
        for _ in 0..2 {
            assert_eq!(fixture.enroll(&fixture.token, csr(&key)).await.0, "issued");
        }
        let other = KeyPair::generate().unwrap();
        let (result, _) = fixture.enroll(&fixture.token, csr(&other)).await;
        assert_eq!(result, "token_used");
    }

    #[tokio::test]
    async fn server_that_knows_less_than_the_token_issues_its_generation() {
        let fixture = Fixture::new();
        let reissued = Order::default().reissued(1).reissued(2);
        let ca = fixture
            .enrollment
            .renewals
            .as_ref()
            .unwrap()
            .ca
            .spki_sha256();
        let token = fixture.enrollment.tokens.create(
            &NodeOrder::new(&node(), reissued),
            Duration::from_secs(60),
            vec![],
            ca,
            SystemTime::now(),
        );
        let key = KeyPair::generate().unwrap();
        let (_, reply) = fixture.enroll(&token.unwrap().reveal(), csr(&key)).await;
        let EnrollReply::Issued { chain, .. } = reply else {
            panic!("refused: {reply:?}");
        };
        let leaf = CertificateDer::from(chain[0].clone());
        let identity = PeerIdentity::from_certificate(&leaf).unwrap();
        assert_eq!(identity.generation, 2);
    }

    #[tokio::test]
    async fn damaged_requests_are_refused_and_bind_no_key() {
        let fixture = Fixture::new();
        let (result, reply) = fixture.enroll(&fixture.token, b"no csr".to_vec()).await;
        assert_eq!(result, "bad_request");
        assert!(matches!(
            reply,
            EnrollReply::Refused(EnrollCode::BadRequest, _)
        ));
        let mut oversized = BytesMut::new();
        frame::encode_length_prefix(ENROLL_MESSAGE_MAX as u64 + 1, &mut oversized);
        assert_eq!(fixture.send(&oversized).await.0, "bad_request");
        assert_eq!(fixture.send(&[3, 0xff, 0xff, 0xff]).await.0, "bad_request");
        assert_eq!(fixture.send(&[10, 1]).await.0, "cut");
        let key = KeyPair::generate().unwrap();
        assert_eq!(fixture.enroll("nonsense", csr(&key)).await.0, "bad_token");
        assert_eq!(fixture.enroll(&fixture.token, csr(&key)).await.0, "issued");
    }
}
