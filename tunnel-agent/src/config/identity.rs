//! Checks of the settings that identify this node and its servers: name and address, certificate
//! files, CA.

use std::net::IpAddr;
use std::path::PathBuf;

use rustls_pki_types::{CertificateDer, ServerName};
use tunnel_process::host::host_name;
use tunnel_process::settings::{ConfigErrors, parse_quoted};
use tunnel_proto::tls::files::{KeyPairFiles, load_roots};
use tunnel_proto::wire::name::NodeName;

use super::token::NO_PIN;
use super::{RawConfig, TokenSource};
use crate::policy;

pub(super) fn node_name(setting: Option<&str>, errors: &mut ConfigErrors) -> Option<NodeName> {
    let parsed = match setting {
        Some(text) => parse_quoted(text),
        None => host_name()
            .map_err(|error| format!("is not given and the host name cannot be read: {error}"))
            .and_then(|name| {
                name.parse::<NodeName>().map_err(|error| {
                    format!("is not given and the host name {name:?} does not do: {error}")
                })
            }),
    };
    errors.ok_or_record("--node-name", parsed)
}

/// The setting of the node's address.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum NodeIpSetting {
    /// `--node-ip`: the operator's word, whether this host has the address or not.
    Fixed(IpAddr),
    /// `NODE_IP`, the host's address when its Pod started: in use while this host has it.
    Initial(IpAddr),
    /// The address of the route to the server.
    #[default]
    Unset,
}

pub(super) fn node_ip(settings: &RawConfig, errors: &mut ConfigErrors) -> NodeIpSetting {
    let mut parsed = |name, text: &Option<String>| {
        let parsed = parse_node_ip(text.as_deref()?);
        errors.ok_or_record(name, parsed)
    };
    let fixed = parsed("--node-ip", &settings.node_ip).map(NodeIpSetting::Fixed);
    let initial = parsed("NODE_IP", &settings.initial_node_ip).map(NodeIpSetting::Initial);
    fixed.or(initial).unwrap_or_default()
}

fn parse_node_ip(text: &str) -> Result<IpAddr, String> {
    match text.trim().parse::<IpAddr>() {
        Ok(ip) if policy::is_never_dialed(ip) => Err(format!(
            "{ip} is never dialed: unspecified, link-local, multicast or metadata"
        )),
        Ok(ip) => Ok(ip.to_canonical()),
        Err(_syntax) => Err(format!("{text:?} is not an IP address")),
    }
}

/// Paths of the operator's files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CredentialFiles {
    /// Files of the certificate chain and the key.
    pub pair: KeyPairFiles,
    /// File of the roots that servers must chain to.
    pub ca: PathBuf,
    /// Name that a server's certificate must be valid for; without one, the server role is
    /// required.
    pub server_name: Option<ServerName<'static>>,
}

/// Returns the files of --cert-file, and checks that --server-name is given only with them.
pub(super) fn credential_files(
    settings: &RawConfig,
    errors: &mut ConfigErrors,
) -> Option<CredentialFiles> {
    let files = certificate_files(settings, errors);
    let Some(name) = &settings.server_name else {
        return files;
    };
    match (ServerName::try_from(name.clone()), files) {
        (Err(_syntax), files) => {
            errors.add(
                "--server-name",
                format!("{name:?} is neither a DNS name nor an address"),
            );
            files
        }
        (Ok(_), None) => {
            errors.add(
                "--server-name",
                "is for certificates that you bring (--cert-file); with our CA the role of the server is verified",
            );
            None
        }
        (Ok(name), Some(files)) => Some(CredentialFiles {
            server_name: Some(name),
            ..files
        }),
    }
}

/// Requires the three files together. One file may contain both the chain and the key.
fn certificate_files(settings: &RawConfig, errors: &mut ConfigErrors) -> Option<CredentialFiles> {
    let Some(certificate) = &settings.cert_file else {
        if settings.key_file.is_some() {
            errors.add("--key-file", "needs --cert-file too");
        }
        return None;
    };
    let Some(ca) = &settings.ca_file else {
        errors.add(
            "--cert-file",
            "needs --ca-file too: the CA that the server's certificate chains to",
        );
        return None;
    };
    Some(CredentialFiles {
        pair: KeyPairFiles {
            certificate: certificate.clone(),
            key: settings.key_file.as_ref().unwrap_or(certificate).clone(),
        },
        ca: ca.clone(),
        server_name: None,
    })
}

/// Returns the certificates of --ca-file. Without them, a join token must pin the CA.
pub(super) fn ca(
    settings: &RawConfig,
    token: Option<&TokenSource>,
    errors: &mut ConfigErrors,
) -> Option<Vec<CertificateDer<'static>>> {
    let path = settings.ca_file.as_deref();
    let ca = path.and_then(|path| match load_roots(path) {
        Ok(ca) => Some(ca),
        Err(error) if error.is_in_content() => {
            errors.add("--ca-file", error);
            None
        }
        Err(error) => {
            errors.add_fact("--ca-file", error);
            None
        }
    });
    let has_ca = path.is_some();
    if let Some(TokenSource::Inline(token)) = token
        && token.ca_hash().is_none()
        && !has_ca
    {
        errors.add("--token", NO_PIN);
    }
    ca
}
