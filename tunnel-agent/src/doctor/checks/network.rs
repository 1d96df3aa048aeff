//! Checks of the path to the servers. A fault is an error only if no server can be used: a session
//! over one address is enough to serve requests.

use std::time::Duration;

use tunnel_doctor::{Fault, NO_ANSWER, Severity};
use tunnel_process::name_list::NameList;
use tunnel_proto::identity::{BACKDATED, Role};
use tunnel_proto::wire::code::CloseCode;

use crate::config::TransportChoice;
use crate::doctor::credential::{CaSource, CredentialFacts, CredentialState};
use crate::doctor::facts::Facts;
use crate::doctor::probe::{EndpointFacts, QuicFacts, ServerFacts, TcpFacts, TlsFailure};

/// An address that was dialed.
struct Dialed<'a> {
    facts: &'a Facts,
    server: &'a ServerFacts,
    endpoint: &'a EndpointFacts,
}

/// Returns the addresses that were dialed, of all servers.
fn dialed(facts: &Facts) -> Result<Vec<Dialed<'_>>, String> {
    let servers = facts.servers.as_ref().map_err(Clone::clone)?;
    let dialed = servers.iter().flat_map(|server| {
        endpoints(server).iter().map(move |endpoint| Dialed {
            facts,
            server,
            endpoint,
        })
    });
    Ok(dialed.collect())
}

fn endpoints(server: &ServerFacts) -> &[EndpointFacts] {
    server.endpoints.as_deref().unwrap_or_default()
}

impl Facts {
    /// Returns whether the agent could get a session or a certificate over this address.
    fn is_usable(&self, endpoint: &EndpointFacts) -> bool {
        let over_tcp = match endpoint.tcp {
            TcpFacts::Ready { .. } | TcpFacts::Connected => true,
            TcpFacts::Failed(_) | TcpFacts::NotAuthenticated(_) | TcpFacts::Refused(_) => false,
        };
        let over_udp = matches!(endpoint.quic, Some(QuicFacts::Ready));
        let needs_udp = self.transport == TransportChoice::Quic && self.has_certificate();
        over_udp || (over_tcp && !needs_udp)
    }

    fn has_certificate(&self) -> bool {
        let credential = self.credential.as_ref();
        credential.is_ok_and(CredentialFacts::is_certificate)
    }

    /// Returns how serious it is that a server cannot be used.
    fn severity(&self) -> Severity {
        let servers = self.servers.iter().flatten();
        let mut all = servers.flat_map(endpoints);
        if all.any(|endpoint| self.is_usable(endpoint)) {
            Severity::Warning
        } else {
            Severity::Error
        }
    }
}

impl Dialed<'_> {
    /// Returns how serious a fault of this address is. The agent tries all addresses of a name, so
    /// that an address less is information while another one works.
    fn severity(&self) -> Severity {
        let facts = self.facts;
        let mut others = endpoints(self.server).iter();
        if !facts.is_usable(self.endpoint) && others.any(|endpoint| facts.is_usable(endpoint)) {
            return Severity::Info;
        }
        facts.severity()
    }

    fn fault(&self, what: String, fix: String) -> Fault {
        Fault {
            severity: self.severity(),
            place: self.name(),
            what,
            fix,
        }
    }

    /// Returns the address, with the server's name if the name is another text.
    fn name(&self) -> String {
        let (name, address) = (&self.server.name, &self.endpoint.address);
        match &self.server.proxy {
            Some(proxy) => format!("{name} through proxy {proxy}"),
            None if name == address => name.clone(),
            None => format!("{name} ({address})"),
        }
    }

    /// Returns the certificate that was presented, to append to a fault.
    fn presented(&self) -> String {
        let presented = self.endpoint.presented.as_ref();
        presented.map_or_else(String::new, |presented| {
            format!("; it presents {presented}")
        })
    }

    /// Returns whether what was presented is no certificate of a tunnel-server.
    fn is_other_program(&self) -> bool {
        let presented = self.endpoint.presented.as_ref();
        presented.is_some_and(|presented| presented.role != Some(Role::Server))
    }

    /// Returns the device or program that may open TLS.
    fn inspector(&self) -> String {
        match &self.server.proxy {
            Some(proxy) => format!("proxy {proxy}"),
            None => "firewall or proxy on the path".to_owned(),
        }
    }

    fn tls_failure(&self) -> Option<&TlsFailure> {
        match &self.endpoint.tcp {
            TcpFacts::Refused(failure) => Some(failure),
            TcpFacts::Failed(_)
            | TcpFacts::NotAuthenticated(_)
            | TcpFacts::Connected
            | TcpFacts::Ready { .. } => None,
        }
    }

    /// Returns whether the server rejected, by its clock, a certificate that is valid by this
    /// host's clock.
    fn is_clock_apart(&self, failure: &TlsFailure) -> bool {
        let TlsFailure::Rejected(CloseCode::CredentialExpired, _) = failure else {
            return false;
        };
        match self.facts.credential.as_ref().map(|facts| facts.state) {
            Ok(CredentialState::Certificate { not_after, .. }) => self.facts.now < not_after,
            Ok(CredentialState::Ended(_) | CredentialState::Token) | Err(_) => false,
        }
    }
}

/// D19.resolve: the names of the servers.
pub(super) fn resolve(facts: &Facts) -> Result<Vec<Fault>, String> {
    let servers = facts.servers.as_ref().map_err(Clone::clone)?;
    let unresolved = servers.iter().filter_map(|server| {
        let reason = server.endpoints.as_ref().err()?;
        Some(Fault {
            severity: facts.severity(),
            place: server.name.clone(),
            what: reason.clone(),
            fix: "correct --server, or the resolver of this host: getent ahosts NAME; \
                  cat /etc/resolv.conf"
                .to_owned(),
        })
    });
    Ok(unresolved.collect())
}

/// D19.resolve: the addresses of the servers.
pub(super) fn resolved(facts: &Facts) -> Option<String> {
    let servers = facts.servers.as_ref().ok()?.iter();
    let resolved = servers.map(|server| {
        let addresses = endpoints(server).iter().map(|endpoint| &endpoint.address);
        let addresses: NameList = addresses.collect();
        format!("{}: {addresses}", server.name)
    });
    let resolved: NameList = resolved.collect();
    (!resolved.is_empty()).then(|| resolved.to_string())
}

/// D19.tcp: the shortest round trip of each server.
pub(super) fn round_trip(facts: &Facts) -> Option<String> {
    let servers = facts.servers.as_ref().ok()?.iter();
    let measured = servers.filter_map(|server| {
        let times = endpoints(server)
            .iter()
            .filter_map(|endpoint| match endpoint.tcp {
                TcpFacts::Ready { round_trip, .. } => round_trip,
                TcpFacts::Failed(_)
                | TcpFacts::NotAuthenticated(_)
                | TcpFacts::Connected
                | TcpFacts::Refused(_) => None,
            });
        let millis = times.min()?.as_secs_f64() * 1000.0;
        let proxy = server.proxy.as_ref();
        let proxy = proxy.map_or_else(String::new, |proxy| format!(" through proxy {proxy}"));
        Some(format!("{}{proxy}: round trip {millis:.1} ms", server.name))
    });
    let measured: NameList = measured.collect();
    (!measured.is_empty()).then(|| measured.to_string())
}

/// D19.udp: the addresses that answered over QUIC.
pub(super) fn answers_over_udp(facts: &Facts) -> Option<String> {
    let servers = facts.servers.as_ref().ok()?.iter();
    let ready = servers
        .flat_map(endpoints)
        .filter(|endpoint| matches!(endpoint.quic, Some(QuicFacts::Ready)));
    let ready: NameList = ready.map(|endpoint| &endpoint.address).collect();
    (!ready.is_empty()).then(|| format!("QUIC handshake with {ready}"))
}

/// D19.tcp: connections without a proxy.
pub(super) fn tcp(facts: &Facts) -> Result<Vec<Fault>, String> {
    let dialed = dialed(facts)?.into_iter();
    let direct = dialed.filter(|dialed| dialed.server.proxy.is_none());
    let faults = direct.filter_map(|dialed| {
        let TcpFacts::Failed(reason) = &dialed.endpoint.tcp else {
            return None;
        };
        let udp = match &dialed.endpoint.quic {
            Some(QuicFacts::NoAnswer(_)) => ", and no answer over UDP",
            Some(QuicFacts::Ready | QuicFacts::Refused(_)) => "; UDP works",
            None => "",
        };
        let what = format!("no connection over TCP{udp}: {reason}");
        let fix = "start the server; allow TCP 10262 (in the manifests: node port 31008) from this \
                   node to it; or give --proxy";
        Some(dialed.fault(what, fix.to_owned()))
    });
    Ok(faults.collect())
}

/// D19.proxy: connections through a proxy.
pub(super) fn proxy(facts: &Facts) -> Result<Vec<Fault>, String> {
    let faults = dialed(facts)?.into_iter().filter_map(|dialed| {
        let proxy = dialed.server.proxy.as_ref()?;
        let (reason, fix) = match &dialed.endpoint.tcp {
            TcpFacts::Failed(reason) if reason == NO_ANSWER => (
                "it does not answer CONNECT: it hangs, or does not reach the server".to_owned(),
                format!("curl -v -p -x {proxy} {}; restart the proxy", dialed.server.name),
            ),
            TcpFacts::Failed(reason) => (
                reason.clone(),
                format!("allow CONNECT {} at {proxy}", dialed.server.name),
            ),
            TcpFacts::NotAuthenticated(reason) => (
                reason.clone(),
                "put user and password of an account in front of the host of --proxy, if the proxy \
                 takes them"
                    .to_owned(),
            ),
            TcpFacts::Connected | TcpFacts::Refused(_) | TcpFacts::Ready { .. } => return None,
        };
        let what = format!("no connection through the proxy: {reason}");
        let fix = format!("{fix}; or --proxy off, or NO_PROXY");
        Some(dialed.fault(what, fix))
    });
    Ok(faults.collect())
}

/// D19.udp: QUIC where TCP works, or where QUIC is the only transport.
pub(super) fn udp(facts: &Facts) -> Result<Vec<Fault>, String> {
    let dialed = dialed(facts)?;
    if facts.transport == TransportChoice::H2 {
        return Ok(Vec::new());
    }
    if !facts.has_certificate() {
        return Err("UDP is dialed with a certificate, and there is none yet".to_owned());
    }
    let faults = dialed.iter().filter_map(|dialed| {
        let Some(QuicFacts::NoAnswer(reason)) = &dialed.endpoint.quic else {
            return None;
        };
        let is_away = matches!(
            dialed.endpoint.tcp,
            TcpFacts::Failed(_) | TcpFacts::Refused(TlsFailure::OtherProtocol)
        );
        match facts.transport {
            TransportChoice::Quic => {
                let what = format!("no answer over UDP; --transport quic allows no TCP: {reason}");
                let fix = "allow UDP 10262 (in the manifests: node port 31008) from this node to \
                           the server; or --transport auto";
                Some(dialed.fault(what, fix.to_owned()))
            }
            // The server itself is away, as D19.tcp, D19.proxy or D19.alpn says.
            TransportChoice::Auto | TransportChoice::H2 if is_away => None,
            TransportChoice::Auto | TransportChoice::H2 => {
                let what = format!("no answer over UDP, so sessions use h2 over TCP: {reason}");
                let fix = "allow UDP 10262 (in the manifests: node port 31008) from this node to \
                           the server; --transport auto, the default, then returns to QUIC";
                Some(dialed.fault(what, fix.to_owned()))
            }
        }
    });
    Ok(faults.collect())
}

/// D19.tls: the handshake, except for protocols and clocks.
pub(super) fn tls(facts: &Facts) -> Result<Vec<Fault>, String> {
    let faults = dialed(facts)?.into_iter().filter_map(|dialed| {
        if let (TcpFacts::Failed(_), Some(QuicFacts::Refused(text))) =
            (&dialed.endpoint.tcp, &dialed.endpoint.quic)
        {
            let what = format!("TLS over QUIC failed: {text}");
            let fix = "tunnel-agent doctor --explain D19.tls".to_owned();
            return Some(dialed.fault(what, fix));
        }
        let failure = dialed.tls_failure()?;
        match failure {
            TlsFailure::OtherProtocol | TlsFailure::OutsideValidity(_) => None,
            _ if dialed.is_clock_apart(failure) => None,
            TlsFailure::UnknownIssuer => Some(unknown_issuer(&dialed)),
            TlsFailure::Rejected(code, text) => {
                let fix = rejection_fix(facts, *code);
                Some(dialed.fault((*text).to_owned(), fix))
            }
            TlsFailure::Ended(text) => {
                let what = format!("the connection ended during TLS: {text}");
                let fix = "on the server: tunnel-server nodes --failed; let balancers and firewalls \
                           pass TLS on unopened and without PROXY protocol";
                Some(dialed.fault(what, fix.to_owned()))
            }
            TlsFailure::Other(text) => {
                let what = format!("TLS failed: {text}{}", dialed.presented());
                let fix = "compare --server with the server's --advertise; see its log";
                Some(dialed.fault(what, fix.to_owned()))
            }
        }
    });
    Ok(faults.collect())
}

/// Returns the fault of a certificate that this node does not accept as the server's. Whose it is
/// decides what to do.
fn unknown_issuer(dialed: &Dialed<'_>) -> Fault {
    let facts = dialed.facts;
    let (node, dir) = (&facts.node, facts.data_dir.display());
    let (server, inspector) = (&dialed.server.name, dialed.inspector());
    let source = facts.credential.as_ref().map(|facts| &facts.ca_source);
    let presented = dialed.presented();
    let exempt = format!("exempt {server} from TLS inspection at the {inspector}");
    let token = format!("on this server: tunnel-server token create --node {node}");
    let (what, fix) = match source {
        // With certificates of the operator's own, those of servers may have no role.
        Ok(CaSource::File(path)) => {
            let path = path.display();
            (
                format!("no CA in {path} (--ca-file) issued the certificate of the server"),
                format!(
                    "if the issuer is a proxy or firewall: {exempt}; if it is the server's CA: put \
                     the output of 'tunnel-server ca', from the server's host, into {path}"
                ),
            )
        }
        _ if dialed.is_other_program() => (
            "the certificate is none of a tunnel-server: a proxy or firewall opens TLS, or --server \
             leads to another program"
                .to_owned(),
            format!("{exempt}, or correct --server; this node's certificate and token are good"),
        ),
        Ok(CaSource::Pin) => (
            "the token pins another CA than that of the server".to_owned(),
            format!("{token}; start with it; or correct --server"),
        ),
        Ok(CaSource::DataDir) | Err(_) => (
            format!("the certificate in {dir} is of another CA than that of the server"),
            format!(
                "correct --server if it is another server; if {inspector} opens TLS: {exempt}; if \
                 the server lost its CA: restore its data directory. Only if that CA is gone for \
                 good: {token}; then rm {dir}/agent.key {dir}/agent.crt, which destroys this node's \
                 identity, and start the agent with the token"
            ),
        ),
    };
    dialed.fault(format!("{what}{presented}"), fix)
}

/// Returns what to do about a certificate that the server rejects. What destroys the node's identity
/// comes last.
fn rejection_fix(facts: &Facts, code: CloseCode) -> String {
    let (node, dir) = (&facts.node, facts.data_dir.display());
    let again = format!(
        "tunnel-server token create --node {node}; then rm {dir}/agent.key {dir}/agent.crt, which \
         destroys this node's identity, and start the agent with the token"
    );
    match code {
        CloseCode::CredentialRevoked => format!(
            "if the node may serve again: tunnel-server nodes unrevoke {node}; after reissue, or for \
             a new identity: {again}"
        ),
        _ => format!(
            "is --server the server that issued the certificate? If that server's CA was replaced: \
             docs/how-to/replace-ca.md; else {again}"
        ),
    }
}

/// D19.alpn: ports where no agents are accepted.
pub(super) fn alpn(facts: &Facts) -> Result<Vec<Fault>, String> {
    let faults = dialed(facts)?.into_iter().filter_map(|dialed| {
        let failure = dialed.tls_failure()?;
        (*failure == TlsFailure::OtherProtocol).then(|| {
            let presented = dialed.presented();
            let what = format!("the port speaks another protocol and accepts no agents{presented}");
            let fix = "give --server the port of the server's --agent-listen, usually 10262; let \
                       proxies and firewalls on the path pass TLS on unopened";
            dialed.fault(what, fix.to_owned())
        })
    });
    Ok(faults.collect())
}

/// D18: this host's clock against the certificates of both ends.
pub(super) fn clock(facts: &Facts) -> Result<Vec<Fault>, String> {
    let dialed = dialed(facts)?;
    let fix = || "date -u, on both hosts; timedatectl set-ntp true".to_owned();
    let mut faults: Vec<Fault> = dialed
        .iter()
        .filter_map(|dialed| {
            let failure = dialed.tls_failure()?;
            let what = match failure {
                TlsFailure::OutsideValidity(text) => format!("{text}{}", dialed.presented()),
                TlsFailure::Rejected(_, text) if dialed.is_clock_apart(failure) => {
                    format!("the clocks of this host and of the server differ: {text}")
                }
                _ => return None,
            };
            Some(dialed.fault(what, fix()))
        })
        .collect();
    // A certificate cannot have been issued later than now.
    let own = match facts.credential.as_ref().map(|facts| facts.state) {
        Ok(CredentialState::Certificate { issued, .. }) => Some(issued),
        Ok(CredentialState::Ended(_) | CredentialState::Token) | Err(_) => None,
    };
    let of_servers = dialed
        .iter()
        .filter_map(|dialed| match dialed.endpoint.tcp {
            TcpFacts::Ready { not_before, .. } => Some(not_before + backdated(facts)),
            TcpFacts::Failed(_)
            | TcpFacts::NotAuthenticated(_)
            | TcpFacts::Connected
            | TcpFacts::Refused(_) => None,
        });
    let issued: Vec<_> = of_servers.chain(own).collect();
    let is_known = !issued.is_empty() || !faults.is_empty();
    let behind = issued
        .into_iter()
        .filter_map(|issued| issued.duration_since(facts.now).ok())
        .max()
        .filter(|behind| *behind > CLOCK_APART_MAX);
    if let Some(behind) = behind {
        let behind = humantime::format_duration(Duration::from_secs(behind.as_secs()));
        faults.push(Fault {
            severity: Severity::Warning,
            place: "clock".to_owned(),
            what: format!("the clock of this host is at least {behind} behind"),
            fix: fix(),
        });
    }
    if is_known {
        Ok(faults)
    } else {
        Err("clock: there is no certificate to compare it with".to_owned())
    }
}

/// Returns the time by which certificates of the servers begin before their issue: that of our CA,
/// or none for a CA that the operator brings.
fn backdated(facts: &Facts) -> Duration {
    match facts.credential.as_ref().map(|facts| &facts.ca_source) {
        Ok(CaSource::Pin | CaSource::DataDir) => BACKDATED,
        Ok(CaSource::File(_)) | Err(_) => Duration::ZERO,
    }
}

/// Difference of clocks that does no harm.
const CLOCK_APART_MAX: Duration = Duration::from_secs(30);
