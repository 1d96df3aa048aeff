//! Checks of the console's settings.

use std::net::SocketAddr;
use std::path::PathBuf;

use tunnel_process::settings::{ConfigErrors, optional, parse_address};

use super::RawConfig;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatusPageSettings {
    pub listen: SocketAddr,
    /// Whether the page is served over TLS, as on each address that is not loopback.
    pub has_tls: bool,
    /// CA of callers' certificates, with TLS only.
    pub client_ca: Option<PathBuf>,
    /// Passwords of callers without a certificate.
    pub auth: Option<PathBuf>,
}

impl StatusPageSettings {
    /// Returns the settings, or `None` if there is no console.
    pub(super) fn check(raw: &RawConfig, errors: &mut ConfigErrors) -> Option<Self> {
        if raw.status_auth.is_some() && raw.status_listen.is_none() {
            errors.add(AUTH, format!("has no effect without {LISTEN}"));
        }
        let listen = errors.parse_with(
            LISTEN,
            raw.status_listen.as_deref(),
            None,
            optional(OFF, parse_address),
        )?;
        let has_tls = !listen.ip().to_canonical().is_loopback();
        let auth = raw.status_auth.as_deref().map(PathBuf::from);
        let client_ca = raw.client_ca.as_deref().map(PathBuf::from);
        let client_ca = client_ca.filter(|_| has_tls);
        if has_tls && client_ca.is_none() && auth.is_none() {
            errors.add(
                LISTEN,
                format!(
                    "{listen} would show the nodes and their requests to anyone on the network; listen on loopback, or ask \
                     for certificates (--client-ca) or passwords ({AUTH})"
                ),
            );
        }
        Some(Self {
            listen,
            has_tls,
            client_ca,
            auth,
        })
    }
}

const LISTEN: &str = "--status-listen";
const AUTH: &str = "--status-auth";
const OFF: &str = "off";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::yaml as parse;

    fn yaml(text: &str) -> Result<Option<StatusPageSettings>, String> {
        parse(text).map(|config| config.status_page)
    }

    #[test]
    fn page_is_off_by_default_and_has_no_tls_on_loopback() {
        for off in ["{}", "statusListen: off"] {
            assert_eq!(yaml(off), Ok(None));
        }
        for loopback in ["127.0.0.1:10270", "[::1]:10270"] {
            let with_ca = format!("statusListen: '{loopback}'\nclientCa: /ca.crt");
            let settings = yaml(&with_ca).unwrap().unwrap();
            assert_eq!(settings.listen.to_string(), loopback);
            assert!(!settings.has_tls && settings.client_ca.is_none());
        }
    }

    #[test]
    fn wide_page_needs_certificates_or_passwords() {
        for wide in ["0.0.0.0:10270", "[::]:10270", "192.0.2.1:10270"] {
            let text = format!("statusListen: '{wide}'\n");
            let refused = yaml(&format!("{text}allowUnauthenticated: 'true'")).unwrap_err();
            let is_clear = refused.contains(LISTEN)
                && refused.contains("--client-ca")
                && refused.contains(AUTH);
            assert!(is_clear, "{refused}");
            let settings = yaml(&format!("{text}clientCa: /ca.crt")).unwrap().unwrap();
            assert_eq!(settings.client_ca, Some("/ca.crt".into()));
            let settings = yaml(&format!("{text}statusAuth: /f")).unwrap().unwrap();
            assert!(settings.has_tls && settings.client_ca.is_none());
            assert_eq!(settings.auth, Some("/f".into()));
        }
        assert!(yaml("statusListen: nowhere").is_err());
        let unused = yaml("statusAuth: /f").unwrap_err();
        assert!(unused.contains("--status-auth: has no effect"), "{unused}");
    }
}
