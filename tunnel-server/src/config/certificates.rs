//! Settings of certificates: those of the HTTPS listener, for agents and for other servers, and the
//! CA of callers.

use std::net::IpAddr;
use std::path::PathBuf;

use tunnel_process::settings::ConfigErrors;
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
                (Err(_), Ok(name)) if name.is_host_name() => names.push(name.to_string()),
                (Err(_), Ok(_) | Err(_)) => {
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

/// Certificate files that the operator provides for one port instead of those of the local CA.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CredentialFiles {
    /// CA to which the certificates of agents, or of the other servers, chain.
    pub ca: PathBuf,
    /// Certificate chain and key of this server.
    pub pair: KeyPairFiles,
}

impl CredentialFiles {
    /// Returns the files for agents' sessions.
    pub(super) fn for_agents(raw: &RawConfig, errors: &mut ConfigErrors) -> Option<Self> {
        let files = [&raw.agent_ca, &raw.agent_cert_file, &raw.agent_key_file];
        Self::check("--agent", "agents", files.map(Option::as_deref), errors)
    }

    /// Returns the files for connections to other servers, in both directions.
    pub(super) fn for_peers(raw: &RawConfig, errors: &mut ConfigErrors) -> Option<Self> {
        let files = [&raw.peer_ca, &raw.peer_cert_file, &raw.peer_key_file];
        Self::check("--peer", "servers", files.map(Option::as_deref), errors)
    }

    /// Checks that the files are complete or absent. Their flags begin with `flag`, and `peers` use
    /// the port.
    fn check(
        flag: &str,
        peers: &str,
        files: [Option<&str>; 3],
        errors: &mut ConfigErrors,
    ) -> Option<Self> {
        let (incomplete, error) = match files {
            [Some(ca), Some(certificate), key] => {
                return Some(Self {
                    ca: ca.into(),
                    pair: KeyPairFiles {
                        certificate: certificate.into(),
                        key: key.unwrap_or(certificate).into(),
                    },
                });
            }
            [None, None, None] => return None,
            [Some(_), None, _] => (
                "ca",
                format!(
                    "needs {flag}-cert-file too: {peers} of another CA do not know the local one"
                ),
            ),
            [None, Some(_), _] => (
                "cert-file",
                format!("needs {flag}-ca too: {peers} of the local CA do not know another one"),
            ),
            [None, None, Some(_)] => ("key-file", format!("needs {flag}-cert-file too")),
        };
        errors.add(&format!("{flag}-{incomplete}"), error);
        None
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
        let is_required = errors.one_of(
            "--https-client-auth",
            raw.https_client_auth.as_deref().unwrap_or("request"),
            &[
                ("none", None),
                ("request", Some(false)),
                ("require", Some(true)),
            ],
        )??;
        if is_required && raw.client_ca.is_none() {
            errors.add("--https-client-auth", "require needs --client-ca");
        }
        let ca = raw.client_ca.as_ref()?.into();
        Some(Self { ca, is_required })
    }
}
