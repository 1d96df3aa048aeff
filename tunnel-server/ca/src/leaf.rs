//! What the certificates that the local CA signs differ in, and the keys of this server's own ones.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rcgen::string::Ia5String;
use rcgen::{
    Certificate, CertificateParams, ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose,
    PublicKeyData, SanType,
};
use rustls::sign::SigningKey;
use rustls_pki_types::PrivateKeyDer;
use tunnel_proto::identity::BACKDATED;
use tunnel_proto::tls;
use tunnel_store::data_dir::whole_seconds;

use super::error::{CaError, IssueError};
use super::material::{CaMaterial, common_name, serial};

/// The fields that differ between certificates signed by the CA.
pub(super) struct LeafParams {
    pub(super) common_name: String,
    pub(super) names: Vec<SanType>,
    pub(super) usages: Vec<ExtendedKeyUsagePurpose>,
}

impl LeafParams {
    /// Signs a certificate for `key` that is valid for `life`. Returns it with its expiry.
    pub(super) fn sign(
        self,
        material: &CaMaterial,
        key: &impl PublicKeyData,
        life: Duration,
        now: SystemTime,
    ) -> Result<(Certificate, SystemTime), IssueError> {
        let now = whole_seconds(now);
        let not_after = now + life;
        let mut params = CertificateParams::default();
        params.not_before = now.checked_sub(BACKDATED).unwrap_or(now).into();
        params.not_after = not_after.into();
        params.serial_number = Some(serial().map_err(IssueError::Serial)?);
        params.distinguished_name = common_name(&self.common_name);
        params.subject_alt_names = self.names;
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = self.usages;
        params.use_authority_key_identifier_extension = true;
        let certificate = params
            .signed_by(key, &material.issuer)
            .map_err(IssueError::Sign)?;
        Ok((certificate, not_after))
    }
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

/// Returns the alternative name with the URI of a role.
pub(super) fn uri(uri: String) -> Result<SanType, IssueError> {
    Ia5String::try_from(uri)
        .map(SanType::URI)
        .map_err(IssueError::Sign)
}
