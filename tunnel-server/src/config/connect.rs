//! Checks of the CONNECT listeners' settings.

use std::net::SocketAddr;
use std::path::PathBuf;

use tunnel_process::settings::{ConfigErrors, optional, parse_address};

use super::RawConfig;
use tunnel_routing::dial_policy::DirectTarget;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectSettings {
    pub listen: Option<SocketAddr>,
    pub unix: Option<UnixListenerSettings>,
    /// CA of callers' certificates. If it is set, the TCP listener uses TLS.
    pub client_ca: Option<PathBuf>,
    /// File with names and passwords for the TCP listener.
    pub auth: Option<PathBuf>,
    /// Dial policy for connections without an agent; `None` means the ranges of the cluster.
    pub direct: Option<Vec<DirectTarget>>,
}

/// The path and permissions of a Unix socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnixListenerSettings {
    pub path: PathBuf,
    pub mode: u32,
    /// Owner and group of the socket file.
    pub owner: Option<(u32, Option<u32>)>,
}

impl ConnectSettings {
    /// Returns the settings, or `None` if there is no CONNECT listener.
    pub(super) fn check(raw: &RawConfig, errors: &mut ConfigErrors) -> Option<Self> {
        refuse_unused(raw, errors);
        let settings = Self {
            listen: errors.parse_with(
                LISTEN,
                raw.connect_listen.as_deref(),
                None,
                optional(OFF, parse_address),
            ),
            unix: UnixListenerSettings::check(raw, errors),
            client_ca: raw.client_ca.as_deref().map(PathBuf::from),
            auth: raw.connect_auth.as_deref().map(PathBuf::from),
            direct: direct(&raw.connect_direct, errors),
        };
        if let Some(address) = settings.listen
            && settings.client_ca.is_none()
            && settings.auth.is_none()
            && !address.ip().to_canonical().is_loopback()
            && raw.allow_unauthenticated.as_deref() != Some("true")
        {
            errors.add(
                LISTEN,
                format!(
                    "{address} would let anyone on the network reach the nodes and more; listen on loopback, ask for \
                     certificates (--client-ca) or passwords (--connect-auth), or set --allow-unauthenticated"
                ),
            );
        }
        (settings.listen.is_some() || settings.unix.is_some()).then_some(settings)
    }

    /// Returns a warning if passwords cross a network unencrypted.
    pub(super) fn warning(&self) -> Option<String> {
        let wide = self
            .listen
            .filter(|address| !address.ip().to_canonical().is_loopback());
        let address = wide.filter(|_| self.auth.is_some())?;
        Some(match self.client_ca {
            None => format!(
                "{LISTEN} {address} accepts the passwords of {AUTH} without TLS, readable on the network; set \
                 --client-ca too, so that callers can use TLS, or listen on loopback"
            ),
            Some(_) => format!(
                "{LISTEN} {address} takes the passwords of {AUTH} with and without TLS: have callers use https, or who sees \
                 the network reads them"
            ),
        })
    }
}

impl UnixListenerSettings {
    fn check(raw: &RawConfig, errors: &mut ConfigErrors) -> Option<Self> {
        let mode = errors.parse_with(
            UDS_MODE,
            raw.connect_uds_mode.as_deref(),
            DEFAULT_MODE,
            parse_mode,
        );
        let owner = raw.connect_uds_owner.as_deref();
        let owner = owner.and_then(|text| errors.ok_or_record(UDS_OWNER, parse_owner(text)));
        let path = raw.connect_uds.as_deref().filter(|text| *text != OFF)?;
        Some(Self {
            path: path.into(),
            mode,
            owner,
        })
    }
}

/// Refuses settings that have no effect without their listener, because they are likely an error.
fn refuse_unused(raw: &RawConfig, errors: &mut ConfigErrors) {
    // A listener that is off explicitly may have settings.
    let (has_tcp, has_unix) = (raw.connect_listen.is_some(), raw.connect_uds.is_some());
    let has_direct = !raw.connect_direct.is_empty();
    for (setting, is_unused, listener) in [
        (AUTH, raw.connect_auth.is_some() && !has_tcp, LISTEN),
        (UDS_MODE, raw.connect_uds_mode.is_some() && !has_unix, UDS),
        (UDS_OWNER, raw.connect_uds_owner.is_some() && !has_unix, UDS),
        (
            DIRECT,
            has_direct && !has_tcp && !has_unix,
            "--connect-listen or --connect-uds",
        ),
    ] {
        if is_unused {
            errors.add(setting, format!("has no effect without {listener}"));
        }
    }
}

fn parse_mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok();
    mode.filter(|mode| *mode <= 0o777)
        .ok_or_else(|| format!("{text:?} is not an octal mode, as in 660"))
}

fn parse_owner(text: &str) -> Result<(u32, Option<u32>), String> {
    let (user, group) = match text.split_once(':') {
        Some((user, group)) => (user, Some(group)),
        None => (text, None),
    };
    let number = |text: &str| {
        text.parse::<u32>()
            .map_err(|error| format!("{text:?} is not the number of a user or group: {error}"))
    };
    Ok((number(user)?, group.map(number).transpose()?))
}

fn direct(values: &[String], errors: &mut ConfigErrors) -> Option<Vec<DirectTarget>> {
    let targets = values.iter().filter(|text| *text != OFF);
    (!values.is_empty()).then(|| errors.parse_list(DIRECT, targets, str::parse::<DirectTarget>))
}

const LISTEN: &str = "--connect-listen";
const UDS: &str = "--connect-uds";
const UDS_MODE: &str = "--connect-uds-mode";
const UDS_OWNER: &str = "--connect-uds-owner";
const AUTH: &str = "--connect-auth";
const DIRECT: &str = "--connect-direct";
const OFF: &str = "off";
/// Access for the server's user only.
const DEFAULT_MODE: u32 = 0o600;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::yaml as parse;

    fn yaml(text: &str) -> Result<Option<ConnectSettings>, String> {
        parse(text).map(|config| config.connect)
    }

    #[test]
    fn connect_listeners_are_off_until_they_are_configured() {
        assert_eq!(yaml("{}"), Ok(None));
        let off = "connectListen: off\nconnectAuth: /f\nconnectDirect: [10.0.0.0/8]";
        assert_eq!(yaml(off), Ok(None));
        let settings = yaml(
            "connectUds: /run/c.sock\nconnectUdsMode: '660'\nconnectUdsOwner: '0:1000'\n\
             connectDirect: ['10.96.0.0/12:443', '[fd00::/8]:443', '192.0.2.1']",
        );
        let settings = settings.unwrap().unwrap();
        let unix = settings.unix.unwrap();
        assert_eq!((unix.mode, unix.owner), (0o660, Some((0, Some(1000)))));
        assert_eq!(settings.direct.unwrap().len(), 3);
        let none = yaml("connectUds: /s\nconnectDirect: [off]").unwrap();
        assert_eq!(none.unwrap().direct, Some(vec![]));
    }

    #[test]
    fn wide_listener_without_authentication_is_refused() {
        let wide = "connectListen: 0.0.0.0:8131\n";
        let refused = yaml(wide).unwrap_err();
        assert!(refused.contains("--connect-listen"), "{refused}");
        for more in [
            "clientCa: /ca.crt",
            "connectAuth: /passwords",
            "allowUnauthenticated: 'true'",
        ] {
            yaml(&format!("{wide}{more}")).unwrap();
        }
        yaml("connectListen: 127.0.0.1:8131").unwrap();
    }

    #[test]
    fn passwords_on_a_wide_listener_without_tls_are_warned_of() {
        let warnings = |text: &str| {
            let mut warnings = parse(text).unwrap().warnings;
            warnings.retain(|text| text.contains(AUTH));
            warnings
        };
        let wide = "connectListen: 0.0.0.0:8131\nconnectAuth: /f\n";
        let with_tls = format!("{wide}clientCa: /ca.crt");
        for (text, expected) in [(wide, "without TLS"), (&*with_tls, "with and without TLS")] {
            let warnings = warnings(text);
            assert_eq!(warnings.len(), 1, "{text}");
            assert!(warnings[0].contains(expected), "{warnings:?}");
        }
        for quiet in [
            "connectListen: 127.0.0.1:8131\nconnectAuth: /f\n",
            "connectListen: '[::1]:8131'\nconnectAuth: /f\n",
            "connectListen: 0.0.0.0:8131\nclientCa: /ca.crt\n",
        ] {
            assert!(warnings(quiet).is_empty(), "{quiet}");
        }
    }

    #[test]
    fn malformed_settings_are_reported() {
        let direct = |target| format!("connectUds: /s\nconnectDirect: ['{target}']");
        for (text, hint) in [
            ("connectAuth: /f", "--connect-auth"),
            ("connectUdsMode: '600'", "--connect-uds-mode"),
            ("connectDirect: [10.0.0.0/8]", "--connect-direct"),
            ("connectUds: /s\nconnectUdsMode: '9'", "octal"),
            ("connectUds: /s\nconnectUdsOwner: root", "number"),
            (&*direct("10.1.0.0/8"), "write 10.0.0.0/8"),
            (&*direct("10.0.0.0/8:"), "names no port"),
            (&*direct("example.com"), "not a network"),
        ] {
            let error = yaml(text).unwrap_err();
            assert!(error.contains(hint), "{text}: {error}");
        }
    }
}
