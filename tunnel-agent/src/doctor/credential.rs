//! The credential with which `run` would dial, read as `run` reads it. Nothing is enrolled or
//! created.

use std::io;
use std::path::PathBuf;
use std::time::SystemTime;

use tunnel_process::errors::causes;
use tunnel_proto::tls::Trust;
use tunnel_proto::tls::files::FileError;

use crate::config::Config;
use crate::credentials::{CredentialError, CredentialStore, Credentials, Stored, read_token};
use crate::enroll::{self, EnrollProof};

/// What authenticates this node to servers, and servers to this node.
pub(super) enum Identity {
    /// A certificate, for sessions.
    Certificate(Box<Credentials>),
    /// No valid certificate. `run` enrolls with servers that this trust accepts.
    Enroll(Trust),
}

/// Facts about a credential that can be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CredentialFacts {
    pub(super) state: CredentialState,
    pub(super) ca_source: CaSource,
    /// File, directory or flag of the credential.
    pub(super) location: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CredentialState {
    Certificate {
        issued: SystemTime,
        not_after: SystemTime,
    },
    /// A certificate that ended at this time. The agent renews it with its key.
    Ended(SystemTime),
    /// A token, with which the agent enrolls.
    Token,
}

impl CredentialFacts {
    /// Returns whether sessions can be dialed. Otherwise `run` enrolls first.
    pub(super) fn is_certificate(&self) -> bool {
        match self.state {
            CredentialState::Certificate { .. } => true,
            CredentialState::Ended(_) | CredentialState::Token => false,
        }
    }
}

/// The origin of the CA that servers must chain to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum CaSource {
    /// The file of --ca-file.
    File(PathBuf),
    /// The pin in the join token.
    Pin,
    /// The CA that is stored next to the certificate.
    DataDir,
}

/// The reason why there is no credential.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum CredentialFault {
    /// The certificate is for another node.
    OtherNode(String),
    /// There is none, or it cannot be used.
    Unusable(String),
    /// This user may not read it, or it cannot be read in time.
    Unreadable(String),
}

impl From<CredentialError> for CredentialFault {
    fn from(error: CredentialError) -> Self {
        let text = causes(&error);
        match &error {
            CredentialError::StoredNodeMismatch { .. }
            | CredentialError::FileNodeMismatch { .. } => Self::OtherNode(text),
            CredentialError::Storage { source, .. }
            | CredentialError::TokenFile { source, .. }
            | CredentialError::Files(FileError::Read(source))
                if source.kind() == io::ErrorKind::PermissionDenied =>
            {
                Self::Unreadable(format!("{text}; run the command as the agent's user"))
            }
            CredentialError::Storage { .. }
            | CredentialError::TokenFile { .. }
            | CredentialError::Files(_)
            | CredentialError::Damaged { .. }
            | CredentialError::Expired { .. }
            | CredentialError::NoToken { .. }
            | CredentialError::Busy
            | CredentialError::BadToken { .. } => Self::Unusable(text),
        }
    }
}

/// Reads the credential. Blocks the thread.
pub(super) fn load(
    config: &Config,
    now: SystemTime,
) -> Result<(Identity, CredentialFacts), CredentialFault> {
    let node = &config.node_name;
    if let Some(files) = &config.credential_files {
        let credentials = files.load(node)?.value;
        let location = files.pair.certificate.display().to_string();
        return Ok(certificate(config, credentials, location));
    }
    let store = CredentialStore::at(&config.data_dir);
    let location = config.data_dir.join("agent.crt").display().to_string();
    match store.load(node, config.ca.as_deref(), now)? {
        Stored::Valid(credentials) => Ok(certificate(config, *credentials, location)),
        Stored::Expired(ended, Some(credentials)) => {
            let facts = CredentialFacts {
                state: CredentialState::Ended(ended),
                ca_source: ca_source(config, CaSource::DataDir),
                location,
            };
            let proof = EnrollProof::ExpiredCertificate(&credentials);
            enrollment(config, &proof, facts)
        }
        Stored::Expired(ended, None) if config.token.is_none() => {
            Err(CredentialFault::from(CredentialError::Expired {
                dir: config.data_dir.clone(),
                ended: humantime::format_rfc3339_seconds(ended).to_string(),
                node: node.clone(),
            }))
        }
        Stored::Expired(_, None) | Stored::Missing => token(config),
    }
}

fn certificate(
    config: &Config,
    credentials: Credentials,
    location: String,
) -> (Identity, CredentialFacts) {
    let facts = CredentialFacts {
        state: CredentialState::Certificate {
            issued: credentials.issued,
            not_after: credentials.not_after,
        },
        ca_source: ca_source(config, CaSource::DataDir),
        location,
    };
    (Identity::Certificate(Box::new(credentials)), facts)
}

fn token(config: &Config) -> Result<(Identity, CredentialFacts), CredentialFault> {
    let Some(source) = &config.token else {
        return Err(CredentialFault::from(CredentialError::NoToken {
            dir: config.data_dir.clone(),
            node: config.node_name.clone(),
        }));
    };
    let token = read_token(source, config.ca.is_some())?;
    let facts = CredentialFacts {
        state: CredentialState::Token,
        ca_source: ca_source(config, CaSource::Pin),
        location: "token".to_owned(),
    };
    enrollment(config, &EnrollProof::Token(token), facts)
}

/// Returns the trust of an enrollment or renewal with this proof.
fn enrollment(
    config: &Config,
    proof: &EnrollProof<'_>,
    facts: CredentialFacts,
) -> Result<(Identity, CredentialFacts), CredentialFault> {
    match enroll::trust(config.ca.as_deref(), proof) {
        Ok(trust) => Ok((Identity::Enroll(trust), facts)),
        Err(error) => Err(CredentialFault::Unusable(causes(&error))),
    }
}

/// Returns the origin of the CA: --ca-file goes before `other`.
fn ca_source(config: &Config, other: CaSource) -> CaSource {
    config.ca_file.clone().map_or(other, CaSource::File)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tunnel_proto::wire::enroll::{JoinToken, TOKEN_SECRET_BYTES};

    use super::*;
    use crate::config::{RawConfig, TokenSource};
    use crate::testing::{Ca, ScratchDir};

    fn config(dir: &ScratchDir, node: &str) -> Config {
        Config::check(RawConfig {
            server: vec!["127.0.0.1:10262".to_owned()],
            node_name: Some(node.to_owned()),
            data_dir: Some(dir.path().join("agent")),
            ..RawConfig::default()
        })
        .unwrap()
    }

    fn state_of(config: &Config) -> Result<CredentialState, CredentialFault> {
        load(config, SystemTime::now()).map(|(_identity, facts)| facts.state)
    }

    #[test]
    fn nothing_is_created_and_a_missing_credential_is_a_fault() {
        let dir = ScratchDir::new().unwrap();
        let mut config = config(&dir, "worker-1");
        let fault = state_of(&config).unwrap_err();
        assert!(matches!(fault, CredentialFault::Unusable(_)), "{fault:?}");
        let token = JoinToken::new("abcdefghijkl", &[7; TOKEN_SECRET_BYTES], Some([1; 32]));
        config.token = Some(TokenSource::Inline(token.unwrap()));
        assert_eq!(state_of(&config), Ok(CredentialState::Token));
        assert!(!dir.path().join("agent").exists());
    }

    #[test]
    fn stored_certificate_goes_before_the_token_and_must_have_the_name() {
        let (dir, ca) = (ScratchDir::new().unwrap(), Ca::new());
        let store = CredentialStore::open(&dir.path().join("agent")).unwrap();
        let key = store.key().unwrap();
        let leaf = ca.issue(&key, "culvert://agent/worker-1");
        let (chain, roots) = ([leaf.to_vec()], [ca.der().to_vec()]);
        let issued = Credentials::issued(Arc::new(key), &chain, &roots).unwrap();
        store.save(&issued).unwrap();
        let (identity, facts) = load(&config(&dir, "worker-1"), SystemTime::now()).unwrap();
        assert!(matches!(identity, Identity::Certificate(_)));
        assert!(facts.is_certificate());
        assert_eq!(facts.ca_source, CaSource::DataDir);
        let fault = state_of(&config(&dir, "worker-2")).unwrap_err();
        assert!(matches!(fault, CredentialFault::OtherNode(_)), "{fault:?}");
    }
}
