//! The succession of CAs. A host with the certificate of one server can answer an agent's requests,
//! but signs nothing: an answer adds only roots that a CA has signed which the agent trusts, and takes
//! away only roots that are older than the one that issued the agent's certificate.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::SystemTime;

use rustls_pki_types::{CertificateDer, UnixTime};
use tunnel_proto::identity::{sha256, spki_sha256, validity};
use tunnel_proto::tls::{self, AgentTrust, RevocationCheck};
use tunnel_proto::wire::enroll::hex;

use super::{Credentials, TrustRoots};

/// Checks that issued credentials may replace those of an agent that trusts `trusted`. Returns them
/// with the roots that stay from `older`.
///
/// Each new root must be trusted, or a certificate among the new roots must show that a trusted CA
/// signed its key. The certificate must chain to the new roots and must not have expired. A
/// certificate that is not yet valid by this host's clock is verified at the beginning of its
/// validity, since the issuing server verifies it by its own clock.
///
/// # Errors
/// Returns a message for the operator.
pub(crate) fn succeed(
    mut issued: Credentials,
    trusted: &[CertificateDer<'_>],
    older: Option<&TrustRoots>,
    now: SystemTime,
) -> Result<Credentials, String> {
    let (chain, roots) = (&issued.own.cert, issued.roots.certificates());
    let leaf = chain.first().ok_or("answer has no certificate")?;
    let (not_before, not_after) = validity(leaf).map_err(|error| error.to_string())?;
    if not_after <= now {
        return Err("certificate has already expired by the clock of this host".to_owned());
    }
    check_roots(trusted, roots)?;
    let at = now.max(not_before).duration_since(SystemTime::UNIX_EPOCH);
    let at = UnixTime::since_unix_epoch(at.unwrap_or_default());
    let everyone: RevocationCheck = Arc::new(|_peer| Ok(()));
    AgentTrust::new(issued.roots.store.clone(), everyone)
        .and_then(|trust| trust.verify(chain, at))
        .map_err(|error| format!("certificate does not chain to its roots: {error}"))?;
    if let Some(older) = older {
        let all = [roots, &remaining(older.certificates(), leaf, roots)].concat();
        issued.roots = TrustRoots::new(all).map_err(|error| error.to_string())?;
    }
    Ok(issued)
}

/// Returns the roots of `older` that stay next to `roots`: the keys that `roots` lack and that began
/// later than the issuer of `leaf`, so that an old certificate, which anybody can send again, does not
/// take away a newer CA. Of the certificates of one key the first counts and stays, since another CA
/// may have signed the key later.
fn remaining(
    older: &[CertificateDer<'static>],
    leaf: &CertificateDer<'_>,
    roots: &[CertificateDer<'_>],
) -> Vec<CertificateDer<'static>> {
    let known = || older.iter().chain(roots);
    let issuers = known().filter(|root| tls::is_signed_by(leaf, root));
    let issued_by = issuers.filter_map(begin_of).min();
    let mut first = BTreeMap::new();
    for (key, begin) in known().filter_map(key_and_begin) {
        let first = first.entry(key).or_insert(begin);
        *first = begin.min(*first);
    }
    let mut has_first: BTreeSet<_> = roots.iter().filter_map(key_and_begin).collect();
    let keys: BTreeSet<_> = has_first.iter().map(|(key, _)| *key).collect();
    let stays = |root: &&CertificateDer<'_>| {
        key_and_begin(root).is_some_and(|(key, begin)| {
            let is_trusted = keys.contains(&key) || Some(begin) > issued_by;
            is_trusted && first.get(&key) == Some(&begin) && has_first.insert((key, begin))
        })
    };
    let space = ROOTS_MAX.saturating_sub(roots.len());
    older.iter().filter(stays).take(space).cloned().collect()
}

fn key_and_begin(certificate: &CertificateDer<'_>) -> Option<([u8; 32], SystemTime)> {
    Some((spki_sha256(certificate).ok()?, begin_of(certificate)?))
}

fn begin_of(certificate: &CertificateDer<'_>) -> Option<SystemTime> {
    validity(certificate).ok().map(|(begin, _)| begin)
}

fn check_roots(trusted: &[CertificateDer<'_>], roots: &[CertificateDer<'_>]) -> Result<(), String> {
    if roots.len() > ROOTS_MAX {
        return Err(format!(
            "answer has {} roots, at most {ROOTS_MAX} are accepted",
            roots.len()
        ));
    }
    let is_signed = |root: &&CertificateDer<'_>| {
        let mut trusted = trusted.iter();
        trusted.any(|issuer| tls::is_ca_signed_by(root, issuer))
    };
    let succeeding: Vec<_> = trusted
        .iter()
        .chain(roots.iter().filter(is_signed))
        .filter_map(|known| spki_sha256(known).ok())
        .collect();
    for root in roots {
        let key = spki_sha256(root).map_err(|error| format!("root: {error}"))?;
        if !succeeding.contains(&key) {
            return Err(format!(
                "root {} (SHA-256 of its certificate) is not signed by a CA that this agent trusts; a server sends \
                 the signatures while it replaces its CA by 'tunnel-server ca rotate'; after any other change give \
                 the agent the new CA with --ca-file, or a new token",
                hex(&sha256(root))
            ));
        }
    }
    Ok(())
}

/// Maximum number of roots in an answer. A server that replaces its CA sends four.
const ROOTS_MAX: usize = 16;
