//! Settings of certificates: those of the HTTPS listener and of the agents' port, and the CA of
//! callers.

use std::net::IpAddr;
use std::path::PathBuf;

use tunnel_proto::process::settings::ConfigErrors;
use tunnel_proto::tls::files::KeyPairFiles;
use tunnel_proto::wire::name::NodeName;

use super::RawConfig;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HttpsCertificate {
    /// Certificate chain and key. Without them the local CA issues the certificate.
    pub files: Option<KeyPairFiles>,
    /// Additional names in the certificate that the local CA issues.
    pub names: Vec<String>,
    /// Additional addresses in the certificate that the local CA issues.
    pub addresses: Vec<IpAddr>,
}

impl HttpsCertificate {
    pub(super) fn check(raw: &RawConfig, errors: &mut ConfigErrors) -> Self {
        let (mut names, mut addresses) = (Vec::new(), Vec::new());
        for text in &raw.https_name {
            match (text.parse(), text.parse::<NodeName>()) {
                (Ok(address), _) => addresses.push(address),
                (Err(_), Ok(name)) => names.push(name.to_string()),
                (Err(_), Err(_)) => {
                    errors.add(
                        "--https-name",
                        format!("{text:?} is neither a DNS name nor an IP"),
                    );
                }
            }
        }
        Self {
            files: https_files(raw, errors),
            names,
            addresses,
        }
    }
}

fn https_files(raw: &RawConfig, errors: &mut ConfigErrors) -> Option<KeyPairFiles> {
    match (&raw.https_cert_file, &raw.https_key_file) {
        (Some(certificate), Some(key)) => Some(KeyPairFiles {
            certificate: certificate.into(),
            key: key.into(),
        }),
        (None, None) => None,
        (Some(_), None) => {
            errors.add("--https-cert-file", "needs --https-key-file too");
            None
        }
        (None, Some(_)) => {
            errors.add("--https-key-file", "needs --https-cert-file too");
            None
        }
    }
}

/// Certificates for agents' sessions that the operator provides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentFiles {
    /// CA to which agents' certificates chain.
    pub ca: PathBuf,
    /// Certificate chain and key of the server.
    pub pair: KeyPairFiles,
}

impl AgentFiles {
    /// Checks that the files are complete or absent.
    pub(super) fn check(raw: &RawConfig, errors: &mut ConfigErrors) -> Option<Self> {
        match (&raw.agent_ca, &raw.agent_cert_file, &raw.agent_key_file) {
            (Some(ca), Some(certificate), key) => Some(Self {
                ca: ca.into(),
                pair: KeyPairFiles {
                    certificate: certificate.into(),
                    key: key.as_ref().unwrap_or(certificate).into(),
                },
            }),
            (None, None, None) => None,
            (Some(_), None, _) => {
                errors.add(
                    "--agent-ca",
                    "needs --agent-cert-file too: agents of another CA do not know the local one",
                );
                None
            }
            (None, Some(_), _) => {
                errors.add(
                    "--agent-cert-file",
                    "needs --agent-ca too: agents of the local CA do not know another one",
                );
                None
            }
            (None, None, Some(_)) => {
                errors.add("--agent-key-file", "needs --agent-cert-file too");
                None
            }
        }
    }
}

/// The authentication of callers of the HTTPS listener by client certificates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientAuth {
    /// CA to which callers' certificates chain.
    pub ca: PathBuf,
    /// Whether every caller needs a certificate.
    pub is_required: bool,
}

impl ClientAuth {
    /// Returns the settings, or `None` if no certificate is requested.
    pub(super) fn check(raw: &RawConfig, errors: &mut ConfigErrors) -> Option<Self> {
        let is_required = match raw.https_client_auth.as_deref().unwrap_or("request") {
            "none" => return None,
            "request" => false,
            "require" => true,
            other => {
                errors.add(
                    "--https-client-auth",
                    format!("{other:?} is not none, request or require"),
                );
                return None;
            }
        };
        if is_required && raw.client_ca.is_none() {
            errors.add("--https-client-auth", "require needs --client-ca");
        }
        let ca = raw.client_ca.as_ref()?.into();
        Some(Self { ca, is_required })
    }
}
