//! Authentication and authorization of a fake kubelet: certificates of the cluster's client CA and
//! tokens only, as a kubelet with `authentication.anonymous.enabled: false` and webhook
//! authorization.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context, Result};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls_pki_types::{CertificateDer, UnixTime};
use tunnel_proto::identity::common_name;
use tunnel_proto::tls;

use crate::targets::answers::Request;
use crate::targets::byte_stream::ByteStream;

/// Permissions by certificate and by token.
#[derive(Debug)]
pub struct Access {
    clients: Arc<dyn ClientCertVerifier>,
    /// Common names with all permissions.
    masters: Vec<String>,
    /// Tokens that may read metrics, with their users.
    scrapers: BTreeMap<String, String>,
}

/// A refusal: status and text.
pub(super) type Denied = (u16, String);

impl Access {
    /// Grants all permissions to certificates of `client_ca` with these common names, and none to
    /// others.
    pub fn new(client_ca: &CertificateDer<'static>, masters: &[&str]) -> Result<Self> {
        let roots = tls::roots([client_ca.clone()])?;
        let clients = WebPkiClientVerifier::builder_with_provider(roots, tls::provider());
        Ok(Self {
            clients: clients.build().context("client CA of the kubelet")?,
            masters: masters.iter().map(|&name| name.to_owned()).collect(),
            scrapers: BTreeMap::new(),
        })
    }

    /// Allows this token to read `/metrics` and all paths below it.
    pub fn with_scraper(mut self, token: &str, user: &str) -> Self {
        self.scrapers.insert(token.to_owned(), user.to_owned());
        self
    }

    pub(super) fn authorize(&self, wire: &ByteStream, request: &Request) -> Result<(), Denied> {
        let unauthorized = || (401, "Unauthorized".to_owned());
        let forbidden = |user: &str| {
            let subresource = request.path().split('/').nth(1).unwrap_or_default();
            let text = format!(
                "Forbidden (user={user}, resource=nodes, subresource=proxy): {subresource}"
            );
            (403, text)
        };
        if let Some(certificate) = wire.peer_certificate() {
            let verified = self
                .clients
                .verify_client_cert(certificate, &[], UnixTime::now());
            let user = verified.ok().and_then(|_| common_name(certificate));
            let user = user.ok_or_else(unauthorized)?;
            return match self.masters.contains(&user) {
                true => Ok(()),
                false => Err(forbidden(&user)),
            };
        }
        let token = request
            .received
            .first("authorization")
            .and_then(|value| value.strip_prefix("Bearer "));
        let user = token.and_then(|token| self.scrapers.get(token));
        let user = user.ok_or_else(unauthorized)?;
        match request.path() == "/metrics" || request.path().starts_with("/metrics/") {
            true => Ok(()),
            false => Err(forbidden(user)),
        }
    }
}
