//! Enrollments over one hop: with a join token that another server created. The server that the
//! agent dialed asks the other servers one after the other. A server that is asked answers from its
//! own tokens alone, so no enrollment passes more than two servers.

use std::io;
use std::time::{Duration, SystemTime};

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::time::timeout;
use tracing::{debug, info, warn};
use tunnel_proto::transport::{Stream, read_frame};
use tunnel_proto::wire::code::EnrollCode;
use tunnel_proto::wire::enroll::{EnrollReply, EnrollRequest, JoinToken, RENEW_EXPORT_BYTES};
use tunnel_proto::wire::frame::{ENROLL_MESSAGE_MAX, FrameError};
use tunnel_proto::wire::name::ReplicaId;
use tunnel_store::known_nodes::EnrollmentKind;
use zeroize::{Zeroize as _, Zeroizing};

use super::peers::EnrollmentPeers;
use super::{EnrolledBy, Enrollment, REFUSED, ReadError, read_request, send_reply};
use crate::renewal::EnrollRefusal;
use crate::tokens::unavailable;

/// What the other servers replied to an enrollment.
enum HopReply {
    /// The first reply other than `bad_token`.
    Replied(ReplicaId, EnrollReply),
    /// No other server has created the token.
    Unknown,
    /// This server did not answer, and no other one has created the token.
    Unanswered(ReplicaId),
}

impl Enrollment {
    /// Serves one request that another server forwarded, and closes the stream. Accepts join tokens
    /// of this server only. The server that the agent dialed counts unknown tokens; wrong secrets of
    /// known ones count here. The caller limits the time. Not cancel-safe: the token may have been
    /// used.
    pub async fn serve_forwarded<S>(&self, mut stream: S, replica: &ReplicaId)
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let outcome = match read_request(&mut stream).await {
            Ok(request) => self.answer_forwarded(request, replica).await,
            Err(ReadError::Frame(error)) => Err((EnrollCode::BadRequest, error.to_string())),
            Err(ReadError::Io(error)) => {
                return debug!(peer = %replica, %error, "forwarded enrollment ended before the request");
            }
        };
        let reply = outcome.unwrap_or_else(|(code, detail)| EnrollReply::Refused(code, detail));
        if let Err(error) = send_reply(&mut stream, &reply).await {
            debug!(peer = %replica, %error, "forwarded enrollment ended before the reply was sent");
        }
    }

    async fn answer_forwarded(
        &self,
        request: EnrollRequest,
        replica: &ReplicaId,
    ) -> Result<EnrollReply, EnrollRefusal> {
        let token = join_token(&request).filter(|_| self.renewals.is_some());
        let known = match &token {
            Some(token) => self.knows(token).await?,
            None => false,
        };
        let Some(token) = token.filter(|_| known) else {
            let detail = "this server has not created the token";
            return Err((EnrollCode::BadToken, detail.to_owned()));
        };
        let agent = request.node_name.clone();
        // Only proofs need the exporter value, and a proof is no token.
        match self.issued(request, None, [0; RENEW_EXPORT_BYTES]).await {
            Ok((_, reply)) => {
                info!(node = %agent, peer = %replica, token = token.id(), "agent enrolled through another server");
                Ok(reply)
            }
            Err((code, detail)) => {
                if REFUSED.admit() {
                    warn!(node = %agent, peer = %replica, %code, detail, "enrollment through another server refused");
                }
                Err((code, detail))
            }
        }
    }

    /// Returns whether this server created a token.
    async fn knows(&self, token: &JoinToken) -> Result<bool, EnrollRefusal> {
        let _permit = self.tokens.lookup_permit().await;
        let (tokens, id) = (self.tokens.clone(), token.id().to_owned());
        let known = tokio::task::spawn_blocking(move || tokens.knows(&id)).await;
        let known = known.unwrap_or_else(|panic| Err(io::Error::other(panic)));
        known.map_err(|error| unavailable(&error))
    }

    /// Enrolls an agent at the server that created its join token. Returns `None` if this server has
    /// to answer: it knows the token, or all others have answered that they do not.
    pub(super) async fn forward(
        &self,
        request: &EnrollRequest,
    ) -> Option<Result<(EnrolledBy, EnrollReply), EnrollRefusal>> {
        let (peers, renewals) = (self.peers.as_ref()?, self.renewals.as_ref()?);
        let token = join_token(request)?;
        // The agent would not trust this server, and no server with this CA created the token.
        let is_of_other_ca =
            (token.ca_hash()).is_some_and(|hash| *hash != renewals.ca.spki_sha256());
        if is_of_other_ca {
            return None;
        }
        match self.knows(&token).await {
            Ok(true) => return None,
            Ok(false) => {}
            Err(refusal) => return Some(Err(refusal)),
        }
        let asked = EnrollRequest {
            is_known: self.nodes.knows(&request.node_name),
            ..request.clone()
        };
        let (replica, reply) = match ask_all(&**peers, &asked).await {
            HopReply::Replied(replica, reply) => (replica, reply),
            HopReply::Unknown => return None,
            HopReply::Unanswered(replica) => {
                let detail = format!(
                    "this server has not created the token, and server {replica}, which may have, does not answer; try \
                     again later"
                );
                return Some(Err((EnrollCode::Unavailable, detail)));
            }
        };
        let chain = match reply {
            EnrollReply::Issued { chain, .. } => chain,
            EnrollReply::Refused(code, detail) => return Some(Err((code, detail))),
        };
        if let Err(problem) = renewals.verify_issued(&chain, request, SystemTime::now()) {
            let detail =
                format!("the certificate that server {replica} issued is not accepted: {problem}");
            return Some(Err((EnrollCode::Unavailable, detail)));
        }
        self.nodes
            .record_enrollment(&request.node_name, EnrollmentKind::JoinToken);
        // The roots of the reply are this server's own, because the agent trusts them from now on.
        let roots = renewals.ca.roots();
        let reply = EnrollReply::Issued {
            chain,
            roots: roots.iter().map(|root| root.to_vec()).collect(),
        };
        Some(Ok((EnrolledBy::Server(replica), reply)))
    }
}

/// Returns the join token of a request, or `None` for other requests.
fn join_token(request: &EnrollRequest) -> Option<JoinToken> {
    if request.proof.is_some() {
        return None;
    }
    request.token.parse().ok()
}

/// Asks the other servers in the order of their names.
async fn ask_all(peers: &dyn EnrollmentPeers, request: &EnrollRequest) -> HopReply {
    let Ok(framed) = framed(request) else {
        return HopReply::Unknown;
    };
    let mut unanswered = None;
    for replica in peers.dialed() {
        let asking = Box::pin(ask(peers, &replica, &framed));
        let failure = match timeout(ASK_TIMEOUT, asking).await {
            Ok(Ok((reply, mut stream))) => {
                // The other server waits for the end of the stream.
                let _reply_is_complete = timeout(CLOSE_TIMEOUT, stream.shutdown()).await;
                if !matches!(reply, EnrollReply::Refused(EnrollCode::BadToken, _)) {
                    return HopReply::Replied(replica, reply);
                }
                continue;
            }
            Ok(Err(error)) => error,
            Err(_elapsed) => io::ErrorKind::TimedOut.into(),
        };
        debug!(peer = %replica, error = %failure, "another server did not answer an enrollment");
        unanswered.get_or_insert(replica);
    }
    unanswered.map_or(HopReply::Unknown, HopReply::Unanswered)
}

/// Sends the request to one server. Returns the reply and the stream, which is still open.
async fn ask(
    peers: &dyn EnrollmentPeers,
    replica: &ReplicaId,
    framed: &[u8],
) -> io::Result<(EnrollReply, Stream)> {
    let mut stream = peers.open_enrollment(replica, ASK_TIMEOUT).await?;
    stream.write_all(framed).await?;
    stream.flush().await?;
    let reply = read_frame(&mut stream, ENROLL_MESSAGE_MAX).await?;
    let reply = EnrollReply::decode(&reply).map_err(io::Error::other)?;
    Ok((reply, stream))
}

/// Returns the framed request, which contains the token's secret.
fn framed(request: &EnrollRequest) -> Result<Zeroizing<Vec<u8>>, FrameError> {
    let mut bytes = BytesMut::new();
    request.encode(&mut bytes)?;
    let framed = Zeroizing::new(bytes.to_vec());
    bytes.as_mut().zeroize();
    Ok(framed)
}

/// Time for the reply of one server. A server that hangs leaves time for the next ones.
const ASK_TIMEOUT: Duration = Duration::from_secs(2);
/// Time for the end of a stream to arrive after its reply.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use rcgen::KeyPair;
    use tokio::io::AsyncReadExt as _;
    use tunnel_proto::wire::enroll::RenewalProof;
    use tunnel_proto::wire::frame;
    use tunnel_store::testing::{Scratch, assert_contains, node};

    use super::super::tests::{Fixture, csr};
    use super::*;
    use crate::renewal::Renewals;
    use crate::revocation::OrderAction;
    use crate::tokens::NewNodes;

    fn request(token: &str, key: &KeyPair) -> EnrollRequest {
        EnrollRequest {
            token: token.to_owned().into(),
            csr: csr(key),
            node_name: node(),
            proof: None,
            is_known: false,
        }
    }

    /// Plays the server that forwards a request.
    async fn forwarded(fixture: &Fixture, request: &EnrollRequest) -> EnrollReply {
        let (mut dialed, server) = tokio::io::duplex(64 * 1024);
        let replica = "b".parse().unwrap();
        let framed = framed(request).unwrap();
        let client = async {
            dialed.write_all(&framed).await.unwrap();
            dialed.shutdown().await.unwrap();
            let mut reply = Vec::new();
            dialed.read_to_end(&mut reply).await.unwrap();
            let mut reply = BytesMut::from(&reply[..]);
            frame::take(&mut reply, ENROLL_MESSAGE_MAX).unwrap()
        };
        let serving = fixture.enrollment.serve_forwarded(server, &replica);
        let ((), reply) = tokio::join!(serving, client);
        EnrollReply::decode(&reply.unwrap()).unwrap()
    }

    fn refused(reply: &EnrollReply) -> EnrollCode {
        match reply {
            EnrollReply::Refused(code, _) => *code,
            EnrollReply::Issued { .. } => panic!("issued"),
        }
    }

    #[tokio::test]
    async fn token_is_redeemed_for_another_server_again_by_the_same_key_only() {
        let fixture = Fixture::new();
        let key = KeyPair::generate().unwrap();
        let renewals = fixture.enrollment.renewals.as_ref().unwrap();
        for _ in 0..2 {
            let request = request(&fixture.token, &key);
            let reply = forwarded(&fixture, &request).await;
            let EnrollReply::Issued { chain, .. } = reply else {
                panic!("{reply:?}");
            };
            let verified = renewals.verify_issued(&chain, &request, SystemTime::now());
            verified.unwrap();
        }
        // A retry may also reach the server that created the token.
        let direct = fixture.enroll(&fixture.token, csr(&key)).await;
        assert_eq!(direct.0, "issued");
        let other = KeyPair::generate().unwrap();
        let reply = forwarded(&fixture, &request(&fixture.token, &other)).await;
        assert_eq!(refused(&reply), EnrollCode::TokenUsed);
    }

    #[tokio::test]
    async fn unknown_tokens_and_proofs_of_other_servers_count_for_no_agent_of_this_one() {
        let fixture = Fixture::new();
        let key = KeyPair::generate().unwrap();
        let (_, secret_and_hash) = fixture.token.split_once('.').unwrap();
        let unknown = format!("000000000000.{secret_and_hash}");
        let mut proof = request(&fixture.token, &key);
        proof.proof = Some(RenewalProof {
            chain: vec![vec![0x30]],
            signature: vec![1],
            scheme: 0x0403,
        });
        for _ in 0..100 {
            for request in [&request(&unknown, &key), &request("eyJ.a.b", &key), &proof] {
                let reply = forwarded(&fixture, request).await;
                assert_eq!(refused(&reply), EnrollCode::BadToken);
            }
        }
        let direct = fixture.enroll(&unknown, csr(&key)).await;
        assert_eq!(
            direct.0, "bad_token",
            "the limit of unknown ids is not reached"
        );
    }

    #[tokio::test]
    async fn node_that_the_forwarding_server_knows_is_not_new() {
        let (fixture, key) = (Fixture::new(), KeyPair::generate().unwrap());
        let tokens = &fixture.enrollment.tokens;
        let ca = &fixture.enrollment.renewals.as_ref().unwrap().ca;
        let nodes = NewNodes {
            pattern: "worker-*".parse().unwrap(),
            uses_max: 2,
            needs_approval: false,
            labels: [("site".into(), "north".into())].into(),
        };
        let (minute, now) = (Duration::from_secs(60), SystemTime::now());
        let token = tokens.create_for_pattern(nodes, minute, ca.spki_sha256(), now);
        let mut request = request(&token.unwrap().reveal(), &key);
        request.is_known = true;
        let reply = forwarded(&fixture, &request).await;
        assert_eq!(refused(&reply), EnrollCode::WrongNode);
        request.is_known = false;
        let reply = forwarded(&fixture, &request).await;
        assert!(matches!(reply, EnrollReply::Issued { .. }), "{reply:?}");
        let recorded = fixture.enrollment.nodes.get(&node()).unwrap();
        assert_eq!(recorded.labels, [("site".into(), "north".into())].into());
    }

    #[tokio::test]
    async fn certificate_of_a_lying_server_is_not_passed_to_the_agent() {
        let (fixture, key) = (Fixture::new(), KeyPair::generate().unwrap());
        let renewals = fixture.enrollment.renewals.as_ref().unwrap();
        let (scratch, now) = (Scratch::new(), SystemTime::now());
        let other_ca = Renewals::of(&scratch.0);
        let request = request(&fixture.token, &key);
        let issue = |renewals: &Renewals, node: &str, key: &KeyPair| {
            let issued = renewals.ca.issue_agent(&csr(key), &node.parse().unwrap());
            let chain = issued.unwrap().chain;
            chain.iter().map(|der| der.to_vec()).collect::<Vec<_>>()
        };
        let other_key = KeyPair::generate().unwrap();
        let good = issue(renewals, "worker-1", &key);
        renewals.verify_issued(&good, &request, now).unwrap();
        for (chain, problem) in [
            (Vec::new(), "no certificate"),
            (issue(renewals, "worker-2", &key), "not for worker-1"),
            (issue(renewals, "worker-1", &other_key), "another key"),
            (issue(&other_ca, "worker-1", &key), "not accepted"),
        ] {
            let error = renewals.verify_issued(&chain, &request, now).unwrap_err();
            assert_contains(&error, problem);
        }
        renewals
            .revocations
            .order(OrderAction::Reissue, &[node()], now);
        let revoked = renewals.verify_issued(&good, &request, now);
        assert_contains(&revoked.unwrap_err(), "revoked");
    }
}
