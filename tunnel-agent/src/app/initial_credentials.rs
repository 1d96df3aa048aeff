//! The first credentials of an agent: stored ones, the operator's files, or those of an enrollment.

use std::sync::Arc;
use std::time::SystemTime;

use tracing::{info, warn};
use tunnel_process::meta::Readiness;

use crate::config::Config;
use crate::connector::status::SessionStatuses;
use crate::credentials::{
    CaFile, CredentialError, CredentialStore, Credentials, RotatingCredentials, Stored, read_token,
};
use crate::enroll::{Enrollment, ProofSource, enroll, renew_or_enroll};
use crate::metrics::Metrics;

#[derive(Debug)]
pub(super) enum InitialCredentials {
    Stored(Box<Credentials>, CredentialStore),
    /// The operator's certificate and key as read, with the digest of their files.
    CredentialFiles(Box<Credentials>, [u8; 32]),
    Enroll(Box<Enrollment>),
    /// Renewal of a stored certificate that has expired: first with its key, then, if the server
    /// refuses that, with a token.
    Renew(Box<Enrollment>, Option<Box<Enrollment>>),
}

impl InitialCredentials {
    /// Loads stored credentials, the operator's files or the token. Does not connect to the server.
    pub(super) fn load(
        config: &Config,
        ca: &CaFile,
        statuses: &Arc<SessionStatuses>,
    ) -> anyhow::Result<Self> {
        let node = &config.node_name;
        if let Some(credential_files) = &config.credential_files {
            if config.token.is_some() {
                info!(%node, "token ignored: --cert-file is given");
            }
            let loaded = credential_files.load(node)?;
            return Ok(Self::CredentialFiles(Box::new(loaded.value), loaded.digest));
        }
        let store = CredentialStore::open(&config.data_dir)?;
        let loaded = store.load(node, config.ca.as_deref(), SystemTime::now());
        let stored = match loaded {
            Err(error @ CredentialError::Damaged { .. }) if config.token.is_some() => {
                warn!(%node, %error, "stored certificate cannot be used; enrolling again");
                Stored::Missing
            }
            loaded => loaded?,
        };
        let ended = match stored {
            Stored::Valid(credentials) => {
                if config.token.is_some() {
                    info!(%node, dir = %store.dir().display(), "token ignored: a valid certificate is stored; to use the token, remove agent.key and agent.crt");
                }
                return Ok(Self::Stored(credentials, store));
            }
            Stored::Expired(_, Some(ended)) => {
                return Ok(Self::renewal(config, ca, ended, &store, statuses));
            }
            Stored::Expired(ended, None) => Some(humantime::format_rfc3339_seconds(ended)),
            Stored::Missing => None,
        };
        let dir = config.data_dir.clone();
        let source = match (&config.token, ended) {
            (Some(source), ended) => {
                if let Some(ended) = ended {
                    warn!(%node, %ended, "stored certificate has ended; enrolling again");
                }
                // Each attempt reads the token again. One that is unusable here is a usage error.
                read_token(source, config.ca.is_some())?;
                source
            }
            (None, Some(ended)) => {
                return Err(CredentialError::Expired {
                    dir,
                    ended: ended.to_string(),
                    node: node.clone(),
                }
                .into());
            }
            (None, None) => {
                let node = node.clone();
                return Err(CredentialError::NoToken { dir, node }.into());
            }
        };
        let proof = ProofSource::Token(source.clone(), None);
        let enrollment = enrollment(config, ca, proof, &store, statuses);
        Ok(Self::Enroll(Box::new(enrollment)))
    }

    fn renewal(
        config: &Config,
        ca: &CaFile,
        ended: Box<Credentials>,
        store: &CredentialStore,
        statuses: &Arc<SessionStatuses>,
    ) -> Self {
        let proof = ProofSource::ExpiredCertificate(ended);
        let renewal = enrollment(config, ca, proof, store, statuses);
        // The token may have been deleted together with its file.
        let token = config.token.clone();
        let usable = token.filter(|source| read_token(source, config.ca.is_some()).is_ok());
        let by_token = usable.map(|source| {
            let proof = ProofSource::Token(source, None);
            enrollment(config, ca, proof, store, statuses)
        });
        Self::Renew(Box::new(renewal), by_token.map(Box::new))
    }

    /// Returns the first credentials, after enrollment if necessary.
    pub(super) async fn rotating_credentials(
        &self,
        config: &Config,
        ca: &CaFile,
        metrics: &Metrics,
        readiness: &Readiness,
    ) -> anyhow::Result<Arc<RotatingCredentials>> {
        let rotate = |credentials: &Credentials, store: Option<&CredentialStore>| {
            let (node, store) = (config.node_name.clone(), store.cloned());
            RotatingCredentials::new(
                node,
                credentials.clone(),
                store,
                ca.clone(),
                metrics.clone(),
            )
        };
        match self {
            Self::Stored(credentials, store) => Ok(rotate(credentials, Some(store))),
            Self::CredentialFiles(credentials, _) => Ok(rotate(credentials, None)),
            Self::Enroll(enrollment) => {
                let _not_ready = readiness.block("enrollment");
                let enrolled = enroll(enrollment).await?;
                Ok(rotate(&enrolled, Some(&enrollment.store)))
            }
            Self::Renew(renewal, by_token) => {
                let _not_ready = readiness.block("enrollment");
                let enrolled = match by_token {
                    Some(by_token) => renew_or_enroll(renewal, by_token).await?,
                    None => enroll(renewal).await?,
                };
                // The expired credentials stay in use until the new ones have worked.
                let ended: &Credentials = match &renewal.proof {
                    ProofSource::ExpiredCertificate(ended) => ended,
                    ProofSource::Token(..) => &enrolled,
                };
                let rotating_credentials = rotate(ended, Some(&renewal.store));
                rotating_credentials.adopt(enrolled, false).await;
                Ok(rotating_credentials)
            }
        }
    }
}

/// Returns an enrollment or renewal that proves the agent's identity with `proof`.
pub(super) fn enrollment(
    config: &Config,
    ca: &CaFile,
    proof: ProofSource,
    store: &CredentialStore,
    statuses: &Arc<SessionStatuses>,
) -> Enrollment {
    Enrollment {
        servers: config.servers.clone(),
        proxy: config.proxy.clone(),
        node: config.node_name.clone(),
        proof,
        ca: ca.clone(),
        store: store.clone(),
        statuses: statuses.clone(),
        within: config.limits.handshake_timeout,
    }
}
