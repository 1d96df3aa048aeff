//! Checks of the CONNECT listeners' settings.

use std::net::SocketAddr;
use std::path::PathBuf;

use tunnel_proto::process::settings::ConfigErrors;

use super::RawConfig;
use super::check::{address, parsed};
use crate::routing::dial_policy::DirectTarget;

/// The settings of the CONNECT listeners.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectSettings {
    /// Address of the TCP listener.
    pub listen: Option<SocketAddr>,
    /// Settings of the Unix socket.
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
    /// Path of the socket.
    pub path: PathBuf,
    /// Mode of the socket file.
    pub mode: u32,
    /// Owner and group of the socket file.
    pub owner: Option<(u32, Option<u32>)>,
}

impl ConnectSettings {
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

/// Returns the settings, or `None` if there is no CONNECT listener.
pub(super) fn check(errors: &mut ConfigErrors, raw: &RawConfig) -> Option<ConnectSettings> {
    let listen = raw.connect_listen.as_deref().filter(|text| *text != OFF);
    let path = raw.connect_uds.as_deref().filter(|text| *text != OFF);
    refuse_unused(errors, raw, (listen.is_some(), path.is_some()));
    let mode = raw.connect_uds_mode.as_deref().map(mode);
    let mode = mode.map_or(DEFAULT_MODE, |mode| {
        errors.unwrap_or_record(UDS_MODE, mode, DEFAULT_MODE)
    });
    let owner = raw.connect_uds_owner.as_deref().map(owner);
    let owner = owner.and_then(|owner| errors.unwrap_or_record(UDS_OWNER, owner.map(Some), None));
    let direct = direct(errors, &raw.connect_direct);
    if listen.is_none() && path.is_none() {
        return None;
    }
    let settings = ConnectSettings {
        listen: listen.and_then(|text| address(errors, LISTEN, text)),
        unix: path.map(|path| UnixListenerSettings {
            path: path.into(),
            mode,
            owner,
        }),
        client_ca: raw.client_ca.as_deref().map(PathBuf::from),
        auth: raw.connect_auth.as_deref().map(PathBuf::from),
        direct,
    };
    let allows = raw.allow_unauthenticated.as_deref();
    let allows_unauthenticated = parsed(&mut ConfigErrors::default(), "", allows, false);
    if let Some(address) = settings.listen
        && settings.client_ca.is_none()
        && settings.auth.is_none()
        && !address.ip().to_canonical().is_loopback()
        && !allows_unauthenticated
    {
        errors.add(
            LISTEN,
            format!(
                "{address} would let anyone on the network reach the nodes and more; listen on loopback, ask for \
                 certificates (--client-ca) or passwords (--connect-auth), or set --allow-unauthenticated"
            ),
        );
    }
    Some(settings)
}

/// Refuses settings that have no effect without their listener, because they are likely a mistake.
fn refuse_unused(errors: &mut ConfigErrors, raw: &RawConfig, (tcp, unix): (bool, bool)) {
    let is_off = |text: &Option<String>| text.as_deref() == Some(OFF);
    let listeners = "--connect-listen or --connect-uds";
    for (setting, is_unused, listener, is_listener_off) in [
        (
            AUTH,
            raw.connect_auth.is_some() && !tcp,
            LISTEN,
            is_off(&raw.connect_listen),
        ),
        (
            UDS_MODE,
            raw.connect_uds_mode.is_some() && !unix,
            UDS,
            is_off(&raw.connect_uds),
        ),
        (
            UDS_OWNER,
            raw.connect_uds_owner.is_some() && !unix,
            UDS,
            is_off(&raw.connect_uds),
        ),
        (
            DIRECT,
            !raw.connect_direct.is_empty() && !tcp && !unix,
            listeners,
            is_off(&raw.connect_listen) || is_off(&raw.connect_uds),
        ),
    ] {
        if is_unused && !is_listener_off {
            errors.add(setting, format!("has no effect without {listener}"));
        }
    }
}

fn mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok();
    mode.filter(|mode| *mode <= 0o777)
        .ok_or_else(|| format!("{text:?} is not an octal mode, as in 660"))
}

fn owner(text: &str) -> Result<(u32, Option<u32>), String> {
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

fn direct(errors: &mut ConfigErrors, values: &[String]) -> Option<Vec<DirectTarget>> {
    if values.is_empty() {
        return None;
    }
    let mut targets = Vec::new();
    for text in values.iter().filter(|text| *text != OFF) {
        match text.parse() {
            Ok(target) => targets.push(target),
            Err(problem) => errors.add(DIRECT, problem),
        }
    }
    Some(targets)
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
    use crate::config::Config;

    fn yaml(text: &str) -> Result<Option<ConnectSettings>, String> {
        let raw: RawConfig = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
        let config = Config::try_from(raw).map_err(|error| error.to_string())?;
        Ok(config.connect)
    }

    #[test]
    fn connect_listeners_are_off_until_they_are_configured() {
        assert_eq!(yaml("{}"), Ok(None));
        assert_eq!(
            yaml("connectListen: off\nconnectAuth: /f\nconnectDirect: [10.0.0.0/8]"),
            Ok(None)
        );
        let settings = yaml(
            "connectUds: /run/c.sock\nconnectUdsMode: '660'\nconnectUdsOwner: '0:1000'\n\
             connectDirect: ['10.96.0.0/12:443', '[fd00::/8]:443', '192.0.2.1']",
        );
        let settings = settings.unwrap().unwrap();
        let unix = settings.unix.unwrap();
        assert_eq!((unix.mode, unix.owner), (0o660, Some((0, Some(1000)))));
        assert_eq!(settings.direct.unwrap().len(), 3);
        assert_eq!(
            yaml("connectUds: /s\nconnectDirect: [off]")
                .unwrap()
                .unwrap()
                .direct,
            Some(vec![])
        );
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
            let raw: RawConfig = serde_saphyr::from_str(text).unwrap();
            let warnings = Config::try_from(raw).unwrap().warnings;
            let ours = warnings.into_iter().filter(|text| text.contains(AUTH));
            ours.collect::<Vec<_>>()
        };
        let wide = "connectListen: 0.0.0.0:8131\nconnectAuth: /f\n";
        let [plain] = &warnings(wide)[..] else {
            panic!("no warning")
        };
        assert!(plain.contains("without TLS"), "{plain}");
        let [both] = &warnings(&format!("{wide}clientCa: /ca.crt"))[..] else {
            panic!("no warning")
        };
        assert!(both.contains("with and without TLS"), "{both}");
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
        for (text, hint) in [
            ("connectAuth: /f", "--connect-auth"),
            ("connectUdsMode: '600'", "--connect-uds-mode"),
            ("connectDirect: [10.0.0.0/8]", "--connect-direct"),
            ("connectUds: /s\nconnectUdsMode: '9'", "octal"),
            ("connectUds: /s\nconnectUdsOwner: root", "number"),
            (
                "connectUds: /s\nconnectDirect: [10.1.0.0/8]",
                "write 10.0.0.0/8",
            ),
            (
                "connectUds: /s\nconnectDirect: ['10.0.0.0/8:']",
                "names no port",
            ),
            (
                "connectUds: /s\nconnectDirect: [example.com]",
                "not a network",
            ),
        ] {
            let error = yaml(text).unwrap_err();
            assert!(error.contains(hint), "{text}: {error}");
        }
    }
}
