//! Key and certificate for kubelets in the data directory. The key is created once and never
//! changes.

use std::io;
use std::sync::Arc;
use std::time::SystemTime;

use rcgen::KeyPair;
use rustls::sign::CertifiedKey;
use rustls_pki_types::PrivateKeyDer;
use tracing::warn;
use tunnel_process::files;
use tunnel_proto::identity::validity;
use tunnel_proto::tls;
use zeroize::Zeroizing;

use tunnel_store::data_dir::{DataDir, replace_or_warn};

/// Range for the fraction of a certificate's lifetime after which it is renewed, as in the kubelet.
const RENEW_FRACTION: (f64, f64) = (0.7, 0.9);

pub(super) struct KubeletClientCredential {
    pub(super) key: KeyPair,
    /// The last certificate, even if it has expired.
    pub(super) certificate: Option<Arc<CertifiedKey>>,
    /// Fraction of the lifetime after which the certificate is renewed.
    renew_fraction: f64,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum UnusableError {
    #[error("not PEM")]
    Pem(#[source] rustls_pki_types::pem::Error),
    #[error("does not match the key of this server")]
    Key(#[source] rustls::Error),
    #[error("expired")]
    Expired,
}

impl KubeletClientCredential {
    /// Reads the key and the certificate, or creates a key. A certificate for another key is
    /// ignored. Blocks the thread.
    pub(super) fn open(data: &DataDir) -> io::Result<Self> {
        let path = data.kubelet_client_key();
        let key = match files::read_secret(&path)? {
            Some(pem) => {
                let text = std::str::from_utf8(&pem).map_err(io::Error::other)?;
                KeyPair::from_pem(text).map_err(|error| {
                    let text = format!("{} holds no private key: {error}", path.display());
                    io::Error::new(io::ErrorKind::InvalidData, text)
                })?
            }
            None => {
                let key = KeyPair::generate().map_err(io::Error::other)?;
                replace_or_warn(&path, Zeroizing::new(key.serialize_pem()).as_bytes())?;
                key
            }
        };
        let (least, most) = RENEW_FRACTION;
        let mut persisted = Self {
            key,
            certificate: None,
            renew_fraction: least + rand::random::<f64>() * (most - least),
        };
        let path = data.kubelet_client_certificate();
        if let Some(chain) = files::read(&path)?
            && let Err(error) = persisted.install(&chain)
        {
            warn!(path = %path.display(), %error, "ignoring a certificate that cannot be used");
        }
        Ok(persisted)
    }

    /// Installs a PEM chain, leaf first, if it matches the key and has not expired.
    pub(super) fn install(&mut self, chain: &[u8]) -> Result<Arc<CertifiedKey>, UnusableError> {
        let chain = tls::files::chain(chain).map_err(UnusableError::Pem)?;
        let key = PrivateKeyDer::Pkcs8(self.key.serialize_der().into());
        let own = tls::certified_key(chain, key).map_err(UnusableError::Key)?;
        if not_after(&own).is_none_or(|not_after| not_after <= SystemTime::now()) {
            return Err(UnusableError::Expired);
        }
        self.certificate = Some(own.clone());
        Ok(own)
    }

    /// Returns the renewal time, which is in the past if there is no certificate.
    pub(super) fn renew_at(&self) -> SystemTime {
        let leaf = self.certificate.as_ref().and_then(|own| own.cert.first());
        let times = leaf.and_then(|leaf| validity(leaf).ok());
        times.map_or(SystemTime::UNIX_EPOCH, |(from, until)| {
            let life = until.duration_since(from).unwrap_or_default();
            from + life.mul_f64(self.renew_fraction)
        })
    }
}

pub(super) fn not_after(own: &CertifiedKey) -> Option<SystemTime> {
    let leaf = own.cert.first()?;
    validity(leaf).ok().map(|(_, until)| until)
}
