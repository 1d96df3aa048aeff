//! The checks: pure functions from facts to faults. Those about the path to the servers are in
//! [`network`], those about listeners for targets of the cloud in [`cloud`], and that of the node's
//! names in [`names`].

use std::time::Duration;

use tunnel_doctor::{
    Check, Checks, Explanation, Fault, Found, Report, Severity, conditions, waits_for,
};
use tunnel_proto::transport::quic::UDP_BUFFER_BYTES;
use tunnel_proto::wire::code::RefusalCode;

use super::credential::{CredentialFault, CredentialState};
use super::facts::{AgentAnswer, Facts, PortFacts, RunningAgent};
use super::report;
use crate::config::TransportChoice;
use crate::connector::status::{SESSION, SessionReport};
use crate::ingress::listeners::CONDITION;

mod cloud;
mod names;
mod network;

const CHECKS: Checks<Facts> = Checks {
    single: SINGLE,
    grouped: &[],
    values: &[
        (&report::RESOLVE, network::resolved),
        (&report::TCP, network::round_trip),
        (&report::UDP, network::answers_over_udp),
        (&report::TLS, certificate_days),
        (&report::AGENT, sessions),
        (&report::NAMES, names::cache),
    ],
};

const SINGLE: &[(&Explanation, Check<Facts>)] = &[
    (&report::HOST, host),
    (&report::HOST, network::clock),
    (&report::RESOLVE, network::resolve),
    (&report::TCP, network::tcp),
    (&report::UDP, network::udp),
    (&report::PROXY, network::proxy),
    (&report::TLS, certificate),
    (&report::TLS, network::tls),
    (&report::ALPN, network::alpn),
    (&report::NAME, name),
    (&report::PORTS, ports),
    (&report::AGENT, agent),
    (&report::NAMES, names::names),
    (&report::CLOUD_LISTEN, cloud::listen),
    (&report::CLOUD_ADDRESS, cloud::address),
    (&report::CLOUD_NFT, cloud::nft),
    (&report::CLOUD_DATA_PATH, cloud::data_path),
    (&report::CLOUD_SAN, cloud::san),
];

/// Does all checks and returns their results, sorted.
pub(super) fn examine(facts: &Facts) -> Report {
    Report {
        capacity: facts.capacity.clone(),
        ..tunnel_doctor::examine(facts, &CHECKS)
    }
}

/// D18: UDP buffers, open files and the disk.
fn host(facts: &Facts) -> Result<Vec<Fault>, String> {
    let mut found = match facts.transport {
        TransportChoice::H2 => Found::default(),
        TransportChoice::Auto | TransportChoice::Quic => facts.host.small_buffers(UDP_BUFFER_BYTES),
    };
    if let AgentAnswer::Running(RunningAgent {
        descriptors: Ok(Some(files)),
        ..
    }) = &facts.agent.answer
        && *files < facts.descriptors_min
    {
        let needed = facts.descriptors_min;
        found.faults.push(Fault {
            severity: Severity::Warning,
            place: "open files".to_owned(),
            what: format!("the agent may open {files} files, and its limits need {needed}"),
            fix: "LimitNOFILE=65536 in the unit of the agent".to_owned(),
        });
    }
    facts.host.add_storage(&facts.data_dir, &mut found);
    found.result()
}

/// D19.tls: the credential itself.
fn certificate(facts: &Facts) -> Result<Vec<Fault>, String> {
    let data_dir = facts.data_dir.display();
    let new_token = format!("tunnel-server token create --node {}", facts.node);
    let (state, location) = match &facts.credential {
        Ok(credential) => (credential.state, credential.location.clone()),
        // Reported as D19.name.
        Err(CredentialFault::OtherNode(_)) => return Ok(Vec::new()),
        Err(CredentialFault::Unreadable(reason)) => return Err(reason.clone()),
        Err(CredentialFault::Unusable(what)) => {
            return Ok(vec![Fault {
                severity: Severity::Error,
                place: "credential".to_owned(),
                what: what.clone(),
                fix: format!(
                    "{new_token}; start the agent with --token-file; if agent.key and agent.crt in \
                     {data_dir} are damaged, remove them first, which destroys this node's identity"
                ),
            }]);
        }
    };
    let fault = |severity, what, fix| {
        Ok(vec![Fault {
            severity,
            place: location,
            what,
            fix,
        }])
    };
    match state {
        CredentialState::Token => Ok(Vec::new()),
        CredentialState::Ended(ended) => {
            let ended = humantime::format_rfc3339_seconds(ended);
            let what = format!(
                "the certificate ended {ended} by this host's clock; a running agent renews it \
                 with its key"
            );
            let fix = format!("date -u; systemctl restart tunnel-agent; else {new_token}");
            fault(Severity::Warning, what, fix)
        }
        CredentialState::Certificate { issued, not_after } => {
            let end = humantime::format_rfc3339_seconds(not_after);
            let life = not_after.duration_since(issued).unwrap_or_default();
            let margin = (life / 4).min(RENEWAL_MARGIN_MAX);
            match not_after.duration_since(facts.now) {
                Ok(left) if left >= margin => Ok(Vec::new()),
                Ok(_short) => {
                    let what = format!("the certificate ends {end} and was not renewed");
                    let fix = "tunnel-agent status; journalctl -u tunnel-agent; files of \
                               --cert-file: replace them";
                    fault(Severity::Warning, what, fix.to_owned())
                }
                Err(_past) => {
                    let what = format!("the certificate ended {end} by this host's clock");
                    let fix = "date -u; replace the files of --cert-file and --key-file";
                    fault(Severity::Error, what, fix.to_owned())
                }
            }
        }
    }
}

/// D19.tls: the days that are left of the certificate.
fn certificate_days(facts: &Facts) -> Option<String> {
    let credential = facts.credential.as_ref().ok()?;
    let CredentialState::Certificate { not_after, .. } = credential.state else {
        return None;
    };
    let left = not_after.duration_since(facts.now).ok()?;
    let days = left.as_secs() / (24 * 60 * 60);
    Some(format!(
        "the certificate is valid for {days} more days, and the server accepts it"
    ))
}

/// D20: the sessions of the running agent.
fn sessions(facts: &Facts) -> Option<String> {
    let AgentAnswer::Running(agent) = &facts.agent.answer else {
        return None;
    };
    let live = agent.sessions.as_ref().ok()?.iter();
    let live: Vec<String> = live
        .filter_map(|session| {
            let (server, transport) = (session.server.as_ref()?, session.transport.as_ref()?);
            let age = Duration::from_secs_f64(session.age_seconds.unwrap_or(0.0).max(0.0));
            let age = humantime::format_duration(Duration::from_secs(age.as_secs()));
            Some(format!("session with {server} over {transport} for {age}"))
        })
        .collect();
    (!live.is_empty()).then(|| live.join("; "))
}

/// D19.name: the name in the certificate.
fn name(facts: &Facts) -> Result<Vec<Fault>, String> {
    match &facts.credential {
        Err(CredentialFault::OtherNode(what)) => Ok(vec![Fault {
            severity: Severity::Error,
            place: facts.node.to_string(),
            what: what.clone(),
            fix: format!(
                "give the --node-name of the certificate; for the other name: tunnel-server token \
                 create --node {}, then remove agent.crt, which destroys the identity under the old \
                 name, and enroll",
                facts.node
            ),
        }]),
        Err(CredentialFault::Unreadable(reason)) => Err(reason.clone()),
        Err(CredentialFault::Unusable(_)) | Ok(_) => Ok(Vec::new()),
    }
}

/// D19.ports: the ports of --port, and another program on the meta port's address.
fn ports(facts: &Facts) -> Result<Vec<Fault>, String> {
    let mut faults: Vec<Fault> = facts.ports.iter().filter_map(port_fault).collect();
    let address = &facts.agent.address;
    if let AgentAnswer::OtherProgram(answer) = &facts.agent.answer {
        faults.push(Fault {
            severity: Severity::Error,
            place: address.clone(),
            what: format!("another program listens on the address of --meta-listen: {answer}"),
            fix: format!("ss -ltnp 'src {address}'; stop the program, or change --meta-listen"),
        });
    }
    Ok(faults)
}

fn port_fault(facts: &PortFacts) -> Option<Fault> {
    let refusal = facts.dialed.as_ref().err()?;
    let port = facts.port;
    let fix = match refusal.code {
        RefusalCode::Policy => {
            "change --deny-ports, or --localhost-ports for a node without an address of its own, \
             and restart the agent"
                .to_owned()
        }
        _ => format!("ss -ltn 'sport = :{port}'; start the program, or let it listen on --node-ip"),
    };
    Some(Fault {
        severity: Severity::Error,
        place: format!("port {port}"),
        what: format!("the agent does not reach the port: {}", refusal.detail),
        fix,
    })
}

/// D20: the running agent.
fn agent(facts: &Facts) -> Result<Vec<Fault>, String> {
    let one = |severity, what: String, fix: &str| {
        Ok(vec![Fault {
            severity,
            place: facts.agent.address.clone(),
            what,
            fix: fix.to_owned(),
        }])
    };
    match &facts.agent.answer {
        AgentAnswer::OtherProgram(_) => Err("another program listens, see D19.ports".to_owned()),
        AgentAnswer::NotRunning => {
            // Before the first start there is no agent to find.
            let credential = facts.credential.as_ref();
            let is_first = credential.is_ok_and(|facts| facts.state == CredentialState::Token);
            let severity = if is_first {
                Severity::Info
            } else {
                Severity::Error
            };
            let what = "no agent runs with these settings".to_owned();
            one(severity, what, "systemctl start tunnel-agent")
        }
        AgentAnswer::NoAnswer(reason) => {
            let what = format!("the agent gives no answer: {reason}");
            let fix = "journalctl -u tunnel-agent; systemctl restart tunnel-agent";
            one(Severity::Error, what, fix)
        }
        AgentAnswer::Running(agent) => running(facts, agent),
    }
}

/// D20: sessions and conditions of a running agent.
fn running(facts: &Facts, agent: &RunningAgent) -> Result<Vec<Fault>, String> {
    let sessions = agent.sessions.as_ref().map_err(Clone::clone)?;
    let is_connected = sessions.iter().any(SessionReport::is_live);
    let severity = if is_connected {
        Severity::Warning
    } else {
        Severity::Error
    };
    let missing = sessions.iter().filter(|session| !session.is_live());
    let mut faults: Vec<Fault> = missing
        .map(|session| {
            let server = session.server.as_deref().unwrap_or("any server");
            let reason = session.reason.as_deref().unwrap_or("being dialed");
            Fault {
                severity,
                place: facts.agent.address.clone(),
                what: format!("no session with {server}: {reason}"),
                fix: "see the findings D19; tunnel-agent status; journalctl -u tunnel-agent"
                    .to_owned(),
            }
        })
        .collect();
    if sessions.is_empty() {
        faults.push(Fault {
            severity,
            place: facts.agent.address.clone(),
            what: "no session: the agent enrolls or stops".to_owned(),
            fix: "see the findings D19; journalctl -u tunnel-agent".to_owned(),
        });
    }
    let page = agent.readiness.iter().map(String::as_str);
    let waiting = waits_for(page).filter(|component| *component != SESSION);
    faults.extend(waiting.map(|component| Fault {
        severity: Severity::Error,
        place: facts.agent.address.clone(),
        what: format!("the agent is not ready: it waits for {component}"),
        fix: "journalctl -u tunnel-agent".to_owned(),
    }));
    // The list of sessions has what the condition about them says, and D16.listen the other one.
    let others = conditions(&agent.readiness)
        .filter(|condition| ![SESSION, CONDITION].contains(&condition.component));
    faults.extend(others.map(|condition| condition.fault(Severity::Warning)));
    Ok(faults)
}

/// Certificates are renewed at half of their life, so the margin of a short life is a quarter.
const RENEWAL_MARGIN_MAX: Duration = Duration::from_secs(7 * 24 * 60 * 60);

#[cfg(test)]
mod tests;
