use std::time::SystemTime;

use tunnel_doctor::{Finding, HostFacts, UdpBuffer};
use tunnel_process::limits::buffer_pool_fault;
use tunnel_proto::identity::{PresentedCertificate, Role};
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::header::Refusal;
use tunnel_proto::wire::name::Port;

use super::*;
use crate::doctor::credential::{CaSource, CredentialFacts};
use crate::doctor::facts::AgentFacts;
use crate::doctor::names::NameFacts;
use crate::doctor::probe::{EndpointFacts, QuicFacts, ServerFacts, TcpFacts, TlsFailure};

mod cloud;
mod names;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// A change of the facts, and the only finding that it causes: id, severity, and text.
type Case = (fn(&mut Facts), &'static str, Severity, &'static str);

#[test]
fn healthy_agent_has_no_finding_and_no_check_is_skipped() {
    let report = examine(&healthy());
    assert!(report.findings.is_empty(), "{:?}", report.findings);
    assert!(report.skipped.is_empty(), "{:?}", report.skipped);
    for (id, text) in [
        ("D19.resolve", "cloud:10262: 192.0.2.1:10262"),
        ("D19.tcp", "round trip 12.5 ms"),
        ("D19.tls", "valid for 364 more days"),
        ("D20", "session with server-1 over quic for 1m"),
    ] {
        let mut passed = report.passed.iter();
        let passed = passed.find(|passed| passed.id == id).unwrap();
        let value = passed.value.as_deref().unwrap_or_default();
        assert!(value.contains(text), "{passed:?}");
    }
}

/// What is presented decides whose fault it is, and nothing is destroyed where something else than a
/// server answers.
#[test]
fn certificate_of_another_program_is_named_and_costs_no_identity() {
    let presented = |issuer: &str, role| PresentedCertificate {
        subject: "CN=cloud".to_owned(),
        issuer: issuer.to_owned(),
        not_before: SystemTime::UNIX_EPOCH,
        not_after: SystemTime::UNIX_EPOCH + 366 * DAY,
        role,
    };
    let finding = |presented, source: CaSource, proxy: Option<&str>| {
        let mut facts = healthy();
        credential(&mut facts).ca_source = source;
        server(&mut facts).proxy = proxy.map(str::to_owned);
        refuse(&mut facts, TlsFailure::UnknownIssuer);
        endpoint(&mut facts).presented = presented;
        let mut report = examine(&facts);
        report.findings.retain(|finding| finding.id == "D19.tls");
        report.findings.remove(0)
    };
    for source in [CaSource::DataDir, CaSource::Pin] {
        let inspected = presented("CN=Corp Inspection", None);
        let found = finding(Some(inspected), source, Some("proxy:3128"));
        let named = "subject \"CN=cloud\", issuer \"CN=Corp Inspection\", valid from \
                     1970-01-01T00:00:00Z until 1971-01-02T00:00:00Z";
        assert!(found.what.contains(named), "{found:?}");
        let exempt = "exempt cloud:10262 from TLS inspection at the proxy proxy:3128";
        assert!(found.fix.contains(exempt), "{found:?}");
        assert!(!found.fix.contains("rm "), "{found:?}");
    }
    for presented in [None, Some(presented("CN=Culvert CA", Some(Role::Server)))] {
        let found = finding(presented, CaSource::DataDir, None);
        let (safe, destructive) = found.fix.split_once("Only if").unwrap();
        assert!(
            !safe.contains("rm ") && safe.contains("TLS inspection"),
            "{found:?}"
        );
        assert!(
            destructive.contains("destroys this node's identity"),
            "{found:?}"
        );
    }
    let file = CaSource::File("/ca.crt".into());
    let found = finding(Some(presented("CN=Corp", None)), file, None);
    assert!(
        found.fix.contains("exempt") && found.what.contains("CN=Corp"),
        "{found:?}"
    );
}

#[test]
fn fault_on_the_path_to_the_server_has_the_id_of_its_cause() {
    let cases: &[Case] = &[
        (
            |facts| server(facts).endpoints = Err("cannot resolve the name".to_owned()),
            "D19.resolve",
            Severity::Error,
            "cannot resolve",
        ),
        (
            |facts| {
                tcp_fails(facts);
                endpoint(facts).quic = Some(QuicFacts::NoAnswer("no answer in time".to_owned()));
            },
            "D19.tcp",
            Severity::Error,
            "and no answer over UDP",
        ),
        (tcp_fails, "D19.tcp", Severity::Warning, "UDP works"),
        (udp_fails, "D19.udp", Severity::Warning, "sessions use h2"),
        (
            |facts| {
                udp_fails(facts);
                facts.transport = TransportChoice::Quic;
            },
            "D19.udp",
            Severity::Error,
            "allows no TCP",
        ),
        (
            |facts| {
                server(facts).proxy = Some("proxy:3128".to_owned());
                tcp_fails(facts);
            },
            "D19.proxy",
            Severity::Warning,
            "through the proxy",
        ),
        (
            |facts| {
                server(facts).proxy = Some("proxy:3128".to_owned());
                endpoint(facts).tcp = TcpFacts::Failed(tunnel_doctor::NO_ANSWER.to_owned());
            },
            "D19.proxy",
            Severity::Warning,
            "it hangs",
        ),
        (
            |facts| refuse(facts, TlsFailure::UnknownIssuer),
            "D19.tls",
            Severity::Error,
            "is of another CA",
        ),
        (
            |facts| {
                credential(facts).ca_source = CaSource::Pin;
                refuse(facts, TlsFailure::UnknownIssuer);
            },
            "D19.tls",
            Severity::Error,
            "the token pins another CA",
        ),
        (
            |facts| {
                refuse(
                    facts,
                    TlsFailure::Rejected(CloseCode::CredentialRevoked, "revoked"),
                )
            },
            "D19.tls",
            Severity::Error,
            "revoked",
        ),
        (
            |facts| refuse(facts, TlsFailure::OtherProtocol),
            "D19.alpn",
            Severity::Error,
            "accepts no agents",
        ),
    ];
    check_cases(cases);
}

#[test]
fn fault_of_the_credential_or_of_the_clock_is_found() {
    let cases: &[Case] = &[
        (
            |facts| facts.credential = Err(CredentialFault::Unusable("no certificate".to_owned())),
            "D19.tls",
            Severity::Error,
            "no certificate",
        ),
        (
            |facts| facts.credential = Err(CredentialFault::OtherNode("worker-2".to_owned())),
            "D19.name",
            Severity::Error,
            "worker-2",
        ),
        (
            |facts| credential(facts).state = CredentialState::Ended(facts.now),
            "D19.tls",
            Severity::Warning,
            "renews it with its key",
        ),
        (
            |facts| facts.now += 362 * DAY,
            "D19.tls",
            Severity::Warning,
            "was not renewed",
        ),
        (
            |facts| facts.now -= 2 * DAY,
            "D18",
            Severity::Warning,
            "at least 1day behind",
        ),
        (
            |facts| {
                refuse(
                    facts,
                    TlsFailure::OutsideValidity("certificate expired".to_owned()),
                )
            },
            "D18",
            Severity::Error,
            "certificate expired",
        ),
        (
            |facts| {
                refuse(
                    facts,
                    TlsFailure::Rejected(CloseCode::CredentialExpired, "expired"),
                )
            },
            "D18",
            Severity::Error,
            "clocks of this host and of the server differ",
        ),
    ];
    check_cases(cases);
}

#[test]
fn fault_of_the_host_of_a_port_or_of_the_agent_is_found() {
    let cases: &[Case] = &[
        (
            |facts| facts.host.buffers[0].bytes = Ok(212_992),
            "D18",
            Severity::Warning,
            "at most 212992 bytes",
        ),
        (
            |facts| running_agent(facts).descriptors = Ok(Some(256)),
            "D18",
            Severity::Warning,
            "may open 256 files",
        ),
        (
            |facts| facts.host.buffer_pool = buffer_pool_fault(65 << 20, Some(128 << 20)),
            "D18",
            Severity::Warning,
            "65MiB is more than half of the memory limit 128MiB",
        ),
        (
            |facts| facts.host.disk = Ok(Some("the disk is full".to_owned())),
            "D18",
            Severity::Error,
            "the disk is full",
        ),
        (
            |facts| {
                facts.ports = vec![PortFacts {
                    port: Port::new(9100).unwrap(),
                    dialed: Err(Refusal {
                        code: RefusalCode::Policy,
                        detail: "agent's --deny-ports lists 9100".to_owned(),
                    }),
                }];
            },
            "D19.ports",
            Severity::Error,
            "--deny-ports lists 9100",
        ),
        (
            |facts| facts.agent.answer = AgentAnswer::OtherProgram("404 Not Found".to_owned()),
            "D19.ports",
            Severity::Error,
            "another program",
        ),
        (
            |facts| {
                facts.agent.answer = AgentAnswer::NotRunning;
                facts.cloud.listeners.clear();
                facts.cloud.rules.table = Ok(None);
            },
            "D20",
            Severity::Error,
            "no agent runs",
        ),
        (
            |facts| running_agent(facts).sessions = Ok(vec![missing()]),
            "D20",
            Severity::Error,
            "no session with any server: refused",
        ),
        (
            |facts| {
                let sessions = running_agent(facts).sessions.as_mut().unwrap();
                sessions.push(missing());
            },
            "D20",
            Severity::Warning,
            "no session with any server: refused",
        ),
        (
            |facts| {
                let readiness = &mut running_agent(facts).readiness;
                readiness.push("[!] disk: the disk is full".to_owned());
            },
            "D20",
            Severity::Warning,
            "the disk is full",
        ),
    ];
    check_cases(cases);
}

/// A node with IPv4 only and a server with both families is healthy.
#[test]
fn address_that_fails_next_to_one_that_works_is_information() {
    let mut facts = healthy();
    let failing = EndpointFacts {
        address: "[2001:db8::1]:10262".to_owned(),
        tcp: TcpFacts::Failed("network is unreachable".to_owned()),
        presented: None,
        quic: Some(QuicFacts::NoAnswer("network is unreachable".to_owned())),
    };
    server(&mut facts).endpoints.as_mut().unwrap().push(failing);
    let report = examine(&facts);
    assert_eq!(report.exit_code(), 0);
    let [Finding { id, severity, .. }] = &report.findings[..] else {
        panic!("{:?}", report.findings);
    };
    assert_eq!((*id, *severity), ("D19.tcp", Severity::Info));
}

#[test]
fn what_cannot_be_read_is_skipped() {
    let mut facts = healthy();
    facts.credential = Err(CredentialFault::Unreadable("permission denied".to_owned()));
    running_agent(&mut facts).sessions = Err("no list".to_owned());
    endpoint(&mut facts).tcp = TcpFacts::Connected;
    endpoint(&mut facts).quic = None;
    let report = examine(&facts);
    assert!(report.findings.is_empty(), "{:?}", report.findings);
    let ids: Vec<&str> = report.skipped.iter().map(|skipped| skipped.id).collect();
    assert_eq!(ids, ["D18", "D19.name", "D19.tls", "D19.udp", "D20"]);
}

fn check_cases(cases: &[Case]) {
    for (change, id, severity, text) in cases {
        let mut facts = healthy();
        change(&mut facts);
        let report = examine(&facts);
        let [finding] = &report.findings[..] else {
            panic!("{id} {text}: {:?}", report.findings);
        };
        assert_eq!((finding.id, finding.severity), (*id, *severity), "{text}");
        assert!(finding.what.contains(text), "{finding:?}");
        assert!(!finding.fix.is_empty(), "{finding:?}");
    }
}

/// The facts of a node with one server and a session over QUIC.
fn healthy() -> Facts {
    let now = SystemTime::UNIX_EPOCH + 20_000 * DAY;
    let server = ServerFacts {
        name: "cloud:10262".to_owned(),
        proxy: None,
        endpoints: Ok(vec![EndpointFacts {
            address: "192.0.2.1:10262".to_owned(),
            tcp: TcpFacts::Ready {
                not_before: now - 30 * DAY,
                round_trip: Some(Duration::from_micros(12_500)),
            },
            presented: None,
            quic: Some(QuicFacts::Ready),
        }]),
    };
    let live = SessionReport {
        server: Some("server-1".to_owned()),
        zone: None,
        transport: Some("quic".to_owned()),
        age_seconds: Some(60.0),
        reason: None,
        retry_in_seconds: None,
    };
    Facts {
        node: "worker-1".parse().unwrap(),
        data_dir: "/var/lib/tunnel-agent".into(),
        transport: TransportChoice::Auto,
        descriptors_min: 1088,
        now,
        credential: Ok(CredentialFacts {
            state: CredentialState::Certificate {
                issued: now - DAY,
                not_after: now + 364 * DAY,
            },
            ca_source: CaSource::DataDir,
            location: "/var/lib/tunnel-agent/agent.crt".to_owned(),
        }),
        servers: Ok(vec![server]),
        ports: Vec::new(),
        host: HostFacts {
            buffers: vec![UdpBuffer {
                setting: "net.core.rmem_max",
                bytes: Ok(UDP_BUFFER_BYTES as u64),
            }],
            disk: Ok(None),
            buffer_pool: None,
        },
        capacity: String::new(),
        agent: AgentFacts {
            address: "127.0.0.1:10266".to_owned(),
            answer: AgentAnswer::Running(RunningAgent {
                sessions: Ok(vec![live]),
                readiness: vec![
                    "[+] session".to_owned(),
                    "[!] session: 1 of 2 servers".to_owned(),
                    "ok".to_owned(),
                ],
                descriptors: Ok(Some(65_536)),
            }),
        },
        cloud: cloud::healthy_cloud(),
        names: NameFacts {
            pods: Ok(Vec::new()),
            host: vec![[192, 0, 2, 53].into()],
        },
    }
}

fn missing() -> SessionReport {
    SessionReport {
        server: None,
        zone: None,
        transport: None,
        age_seconds: None,
        reason: Some("refused".to_owned()),
        retry_in_seconds: Some(2.0),
    }
}

fn server(facts: &mut Facts) -> &mut ServerFacts {
    &mut facts.servers.as_mut().unwrap()[0]
}

fn endpoint(facts: &mut Facts) -> &mut EndpointFacts {
    &mut server(facts).endpoints.as_mut().unwrap()[0]
}

fn credential(facts: &mut Facts) -> &mut CredentialFacts {
    facts.credential.as_mut().unwrap()
}

fn running_agent(facts: &mut Facts) -> &mut RunningAgent {
    match &mut facts.agent.answer {
        AgentAnswer::Running(agent) => agent,
        other => panic!("{other:?}"),
    }
}

fn tcp_fails(facts: &mut Facts) {
    endpoint(facts).tcp = TcpFacts::Failed("connection refused".to_owned());
}

fn udp_fails(facts: &mut Facts) {
    endpoint(facts).quic = Some(QuicFacts::NoAnswer("no answer in time".to_owned()));
}

/// Lets TLS fail over both transports.
fn refuse(facts: &mut Facts, failure: TlsFailure) {
    endpoint(facts).tcp = TcpFacts::Refused(failure);
    endpoint(facts).quic = Some(QuicFacts::Refused("alert".to_owned()));
}
