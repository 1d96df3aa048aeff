//! Certificate files that the operator provides: --cert-file, --key-file and --ca-file, reloaded
//! while the agent runs.

use tunnel_process::file_watch::Loaded;
use tunnel_proto::identity::{PeerIdentity, validity};
use tunnel_proto::tls::files::{FileError, digest_of, load_roots};
use tunnel_proto::wire::name::NodeName;

use super::{CredentialError, Credentials, TrustRoots};
use crate::config::CredentialFiles;

impl CredentialFiles {
    /// Reads all files for `node`. Blocks the thread.
    pub(crate) fn load(&self, node: &NodeName) -> Result<Loaded<Credentials>, CredentialError> {
        let own = self.pair.load()?;
        let roots = load_roots(&self.ca)?;
        let digest = digest_of(own.cert.iter().chain(&roots));
        let unusable = |error| FileError::Root(self.pair.certificate.clone(), error);
        let leaf = own
            .cert
            .first()
            .ok_or_else(|| unusable(rustls::Error::NoCertificatesPresented))?;
        // A certificate without a recognized name is left to the server to verify.
        if let Ok(identity) = PeerIdentity::from_agent_certificate(leaf)
            && let Some(named) = identity.node()
            && named != node
        {
            return Err(CredentialError::FileNodeMismatch {
                configured: node.clone(),
                named: named.clone(),
                path: self.pair.certificate.clone(),
            });
        }
        let (issued, not_after) =
            validity(leaf).map_err(|error| unusable(rustls::Error::General(error.to_string())))?;
        let roots =
            TrustRoots::new(roots).map_err(|error| FileError::Root(self.ca.clone(), error))?;
        Ok(Loaded {
            digest,
            value: Credentials {
                own,
                roots,
                server_name: self.server_name.clone(),
                signer: None,
                issued,
                not_after,
            },
        })
    }
}
