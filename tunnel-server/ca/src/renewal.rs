//! Renewal of agents' certificates: on the control stream of a live session or, for an expired
//! certificate, over an enrollment connection with a proof by its key.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::{CertificateError, Error};
use rustls_pki_types::{CertificateDer, UnixTime};
use tracing::warn;
use tunnel_process::telemetry::LogRateLimit;
use tunnel_proto::identity::{PeerIdentity, TrustDomain, spki_sha256, validity};
use tunnel_proto::tls::{AgentTrust, verify_proof};
use tunnel_proto::wire::code::EnrollCode;
use tunnel_proto::wire::enroll::{EnrollReply, EnrollRequest, RENEW_EXPORT_BYTES, RenewalProof};
use tunnel_proto::wire::name::NodeName;
use tunnel_proto::wire::order::Order;
use tunnel_store::data_dir::rfc3339;

use crate::revocation::{self, Revocations};
use crate::{AgentCsr, IssueError, LocalCa};

/// Time after expiry for which a certificate may be renewed by its key alone.
pub const RENEWAL_GRACE: Duration = Duration::from_secs(90 * 24 * 60 * 60);

/// The issuer of certificates with its checks. Calls block the thread for a signature.
#[derive(Debug)]
pub struct Renewals {
    pub ca: Arc<LocalCa>,
    /// Verifier of presented certificates.
    pub trust: Arc<AgentTrust>,
    /// Nodes whose certificates are revoked.
    pub revocations: Arc<Revocations>,
}

/// A refusal: a code and a message for the operator.
pub type EnrollRefusal = (EnrollCode, String);

/// An issued certificate and the reply that contains it.
#[derive(Debug, Clone)]
pub struct RenewedCertificate {
    pub reply: EnrollReply,
    /// Certificate and the chain to its root.
    pub chain: Vec<CertificateDer<'static>>,
    pub not_after: SystemTime,
}

impl Renewals {
    /// Renews the certificate of the agent of a live session.
    ///
    /// # Errors
    /// Returns the reason of the refusal.
    pub fn renew_on_session(
        &self,
        peer: &PeerIdentity,
        csr: &[u8],
        now: SystemTime,
    ) -> Result<RenewedCertificate, EnrollRefusal> {
        let Some(node) = peer.node() else {
            return Err((EnrollCode::WrongNode, "not an agent".to_owned()));
        };
        if peer.domain != TrustDomain::Tunnel {
            let detail =
                "certificate was issued by the cluster and cannot be renewed here".to_owned();
            return Err((EnrollCode::NotOffered, detail));
        }
        // Read the order once: the old certificate is checked against it, and the new one has its
        // generation.
        let order = self.revocations.of_node(node);
        if self.revocations.refuses(order, peer) {
            return Err(revoked(order));
        }
        let request = AgentCsr::parse(csr).map_err(refusal)?;
        self.issue(&request, node, self.proved(order, peer), now)
    }

    /// Renews an expired certificate for a sender that proves possession of its key. The
    /// certificate must have expired at most [`RENEWAL_GRACE`] ago. The chain is verified at the
    /// time of expiry; the name and the revocation are verified now.
    ///
    /// # Errors
    /// Returns the reason of the refusal.
    pub fn renew_expired(
        &self,
        claimed: &NodeName,
        proof: &RenewalProof,
        csr: &[u8],
        exported: &[u8; RENEW_EXPORT_BYTES],
        now: SystemTime,
    ) -> Result<RenewedCertificate, EnrollRefusal> {
        let chain: Vec<CertificateDer<'_>> = proof
            .chain
            .iter()
            .map(|der| CertificateDer::from(der.as_slice()))
            .collect();
        let leaf = chain.first().ok_or_else(|| bad_proof("no certificate"))?;
        // Verify the proof first, so that a sender without the key learns nothing about the
        // certificate.
        verify_proof(leaf, exported, &proof.signature, proof.scheme)
            .map_err(|error| bad_proof(error.to_string()))?;
        let (not_before, not_after) =
            validity(leaf).map_err(|error| bad_proof(error.to_string()))?;
        if now < not_before {
            return Err(clock_wrong(not_before, now));
        }
        let order = self.revocations.of_node(claimed);
        let peer = self.verify_at(now.min(not_after), &chain, claimed)?;
        if now > not_after + RENEWAL_GRACE {
            let detail = format!(
                "the certificate ended at {}, more than {} days ago by this server's clock ({})",
                rfc3339(not_after),
                RENEWAL_GRACE.as_secs() / 86400,
                rfc3339(now)
            );
            return Err((EnrollCode::CertificateEnded, detail));
        }
        let Some(node) = peer.node().filter(|node| *node == claimed) else {
            let detail = format!("the certificate is not that of {claimed}");
            return Err((EnrollCode::WrongNode, detail));
        };
        let request = AgentCsr::parse(csr).map_err(refusal)?;
        if spki_sha256(leaf).ok() != Some(request.key_sha256()) {
            return Err(bad_proof("the request is not for the certificate's key"));
        }
        self.issue(&request, node, self.proved(order, &peer), now)
    }

    /// Returns the order with at least the generation of a certificate of this CA, which proves it.
    fn proved(&self, order: Order, peer: &PeerIdentity) -> Order {
        self.revocations.record_generation(peer);
        order.with_generation(peer.generation)
    }

    /// Issues a certificate for a node that is already authorized. `order` is the order about the node
    /// ([`Revocations::of_node`]) as read before the authorization, with the generation that the
    /// authorization proves, if that is higher.
    ///
    /// # Errors
    /// Returns an error if the CA cannot sign, or if the node is revoked, or was reissued in the
    /// meantime.
    pub fn issue(
        &self,
        request: &AgentCsr,
        node: &NodeName,
        order: Order,
        now: SystemTime,
    ) -> Result<RenewedCertificate, EnrollRefusal> {
        let generation = order.generation;
        let issued = self
            .ca
            .issue(request, node, generation, now)
            .map_err(refusal)?;
        let current = self.revocations.of_node(node);
        if current.is_revoked || current.generation > generation {
            return Err(revoked(current));
        }
        let bytes = |certificates: &[CertificateDer<'_>]| {
            certificates.iter().map(|der| der.to_vec()).collect()
        };
        Ok(RenewedCertificate {
            reply: EnrollReply::Issued {
                chain: bytes(&issued.chain),
                roots: bytes(&issued.roots),
            },
            chain: issued.chain,
            not_after: issued.not_after,
        })
    }

    /// Verifies the certificate that another server of this CA issued for a request: its chain, node
    /// and key.
    ///
    /// # Errors
    /// Returns a description of what is wrong.
    pub fn verify_issued(
        &self,
        chain: &[Vec<u8>],
        request: &EnrollRequest,
        now: SystemTime,
    ) -> Result<(), String> {
        let chain: Vec<CertificateDer<'_>> = chain
            .iter()
            .map(|der| CertificateDer::from(der.as_slice()))
            .collect();
        let leaf = chain.first().ok_or("no certificate")?;
        let node = &request.node_name;
        let verified = self.verify_at(now, &chain, node);
        let issued = verified.map_err(|(_code, detail)| detail)?;
        if issued.node() != Some(node) {
            return Err(format!("the certificate is not for {node}"));
        }
        let csr = AgentCsr::parse(&request.csr).map_err(|error| error.to_string())?;
        if spki_sha256(leaf).ok() != Some(csr.key_sha256()) {
            return Err("the certificate is for another key".to_owned());
        }
        Ok(())
    }

    /// Verifies the chain that the agent of `claimed` presents, as of a time at which it was valid.
    fn verify_at(
        &self,
        time: SystemTime,
        chain: &[CertificateDer<'_>],
        claimed: &NodeName,
    ) -> Result<PeerIdentity, EnrollRefusal> {
        let since = time
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        match self.trust.verify(chain, UnixTime::since_unix_epoch(since)) {
            Ok(peer) if peer.domain == TrustDomain::Tunnel => Ok(peer),
            Ok(_cluster) => Err(bad_proof("the certificate is not of the CA of this server")),
            Err(Error::InvalidCertificate(CertificateError::Revoked)) => {
                Err(revoked(self.revocations.of_node(claimed)))
            }
            Err(error) => Err(bad_proof(format!(
                "the certificate is not accepted: {error}"
            ))),
        }
    }
}

/// Returns the refusal for a node by the order about it.
pub(crate) fn revoked(order: Order) -> EnrollRefusal {
    (EnrollCode::Revoked, revocation::revoked_message(order))
}

fn bad_proof(detail: impl Into<String>) -> EnrollRefusal {
    (EnrollCode::BadProof, detail.into())
}

/// Returns a refusal that names both clocks and the minimum difference between them.
fn clock_wrong(not_before: SystemTime, now: SystemTime) -> EnrollRefusal {
    let behind = not_before.duration_since(now).unwrap_or_default();
    let behind = humantime::format_duration(Duration::from_secs(behind.as_secs()));
    static WRONG: LogRateLimit =
        LogRateLimit::new("certificates of this CA that begin in the future");
    if WRONG.admit() {
        warn!(
            clock = rfc3339(now),
            not_before = rfc3339(not_before),
            "a certificate of this CA begins in the future: the clock of this server is or was wrong"
        );
    }
    let detail = format!(
        "the certificate begins at {}, but this server's clock says {}: the server's clock is {behind} or more behind, or \
         was ahead when it was issued",
        rfc3339(not_before),
        rfc3339(now)
    );
    (EnrollCode::ClockWrong, detail)
}

pub(crate) fn refusal(error: IssueError) -> EnrollRefusal {
    let code = match &error {
        IssueError::Request(_) | IssueError::Key => EnrollCode::BadRequest,
        IssueError::Sign(_) | IssueError::Serial(_) => EnrollCode::Unavailable,
    };
    (code, error.to_string())
}

#[cfg(test)]
mod tests;
