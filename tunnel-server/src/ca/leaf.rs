//! What the certificates that the local CA signs differ in, and the keys of this server's own ones.

use std::sync::Arc;

use rcgen::string::Ia5String;
use rcgen::{ExtendedKeyUsagePurpose, KeyPair, SanType};
use rustls::sign::SigningKey;
use rustls_pki_types::PrivateKeyDer;
use tunnel_proto::identity::Role;
use tunnel_proto::tls;

use super::error::{CaError, IssueError};

/// The fields that differ between certificates signed by the CA.
pub(super) struct LeafParams {
    pub(super) common_name: String,
    pub(super) names: Vec<SanType>,
    pub(super) usages: Vec<ExtendedKeyUsagePurpose>,
}

/// A key in the forms needed to sign certificates and to answer handshakes.
pub(super) struct LeafKey {
    pub(super) pair: KeyPair,
    pub(super) signing: Arc<dyn SigningKey>,
}

impl LeafKey {
    pub(super) fn generate() -> Result<Self, CaError> {
        let pair = KeyPair::generate().map_err(CaError::Generate)?;
        let private = PrivateKeyDer::Pkcs8(pair.serialize_der().into());
        let signing = tls::signing_key(private).map_err(CaError::Tls)?;
        Ok(Self { pair, signing })
    }
}

/// Returns the alternative name with the identity of a role.
pub(super) fn uri(role: &Role) -> Result<SanType, IssueError> {
    Ia5String::try_from(role.uri())
        .map(SanType::URI)
        .map_err(IssueError::Sign)
}
