//! Checks of the status page's settings.

use std::net::SocketAddr;
use std::path::PathBuf;

use tunnel_proto::process::settings::{ConfigErrors, optional, parse_address};

use super::RawConfig;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatusPageSettings {
    pub listen: SocketAddr,
    /// CA of callers' certificates; `None` on a loopback address, where the page has no TLS.
    pub client_ca: Option<PathBuf>,
}

impl StatusPageSettings {
    /// Returns the settings, or `None` if there is no status page.
    pub(super) fn check(raw: &RawConfig, errors: &mut ConfigErrors) -> Option<Self> {
        let listen = errors.parse_with(
            LISTEN,
            raw.status_listen.as_deref(),
            None,
            optional(OFF, parse_address),
        )?;
        if listen.ip().to_canonical().is_loopback() {
            return Some(Self {
                listen,
                client_ca: None,
            });
        }
        let client_ca = raw.client_ca.as_deref().map(PathBuf::from);
        if client_ca.is_none() {
            errors.add(
                LISTEN,
                format!(
                    "{listen} would show the nodes and their requests to anyone on the network; listen on loopback, or ask \
                     for certificates (--client-ca)"
                ),
            );
        }
        Some(Self { listen, client_ca })
    }
}

const LISTEN: &str = "--status-listen";
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
            assert_eq!(settings.client_ca, None);
        }
    }

    #[test]
    fn wide_page_needs_certificates() {
        for wide in ["0.0.0.0:10270", "[::]:10270", "192.0.2.1:10270"] {
            let text = format!("statusListen: '{wide}'\n");
            let refused = yaml(&format!("{text}allowUnauthenticated: 'true'")).unwrap_err();
            let is_clear = refused.contains(LISTEN) && refused.contains("--client-ca");
            assert!(is_clear, "{refused}");
            let settings = yaml(&format!("{text}clientCa: /ca.crt")).unwrap().unwrap();
            assert_eq!(settings.client_ca, Some("/ca.crt".into()));
        }
        assert!(yaml("statusListen: nowhere").is_err());
    }
}
