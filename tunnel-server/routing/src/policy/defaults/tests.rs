//! What each kind of caller may do without a file.

use tunnel_proto::wire::name::NodeName;

use super::super::rules::{Facts, Verdict};
use super::super::{CallerIdentity, UnreadToken};
use super::*;

/// Returns what a caller may do at the kubelet and at two listed ports, the second with operations.
fn allowed(
    listener: Listener,
    identity: &CallerIdentity,
    has_delegation: bool,
    has_token: bool,
) -> String {
    let ports = DefaultPorts {
        connect: "22".parse().unwrap(),
        operations: [(Port::new(8080).unwrap(), OperationSet::GENERIC)].into(),
        has_direct_list: false,
    };
    let table = RuleTable::defaults(&ports);
    let node: NodeName = "worker-1".parse().unwrap();
    let token = match has_token {
        true => UnreadToken::OfAny,
        false => UnreadToken::None,
    };
    let may = |port: u16, operation: Operation, kind: DestinationKind| {
        let facts = Facts {
            listener,
            identity: identity.clone(),
            has_delegation,
            token,
            source: None,
            kind,
            node: (kind == DestinationKind::Node).then(|| node.clone()),
            described: None,
            port: Port::new(port),
            is_kubelet: port == 10250,
            operation,
            without_upgrade: operation,
        };
        table.decide(&facts).verdict == Verdict::Allow
    };
    let mut may_do = Vec::new();
    for (port, operations) in [
        (
            10250,
            &[
                Operation::Metrics,
                Operation::Pods,
                Operation::ContainerLogs,
                Operation::Exec,
                Operation::Upgrade,
                Operation::Connect,
            ][..],
        ),
        (
            9100,
            &[
                Operation::Read,
                Operation::Write,
                Operation::Upgrade,
                Operation::Connect,
            ],
        ),
        (
            8080,
            &[
                Operation::Read,
                Operation::Write,
                Operation::Upgrade,
                Operation::Connect,
            ],
        ),
        (22, &[Operation::Connect]),
    ] {
        let of_port = operations
            .iter()
            .filter(|operation| may(port, **operation, DestinationKind::Node));
        let of_port: Vec<_> = of_port.map(|operation| operation.label()).collect();
        if !of_port.is_empty() {
            may_do.push(format!("{port} {}", of_port.join(" ")));
        }
    }
    if may(443, Operation::Connect, DestinationKind::Direct) {
        may_do.push("direct".to_owned());
    }
    if may(6443, Operation::Connect, DestinationKind::Target) {
        may_do.push("target".to_owned());
    }
    may_do.join(", ")
}

#[test]
fn each_listener_is_safe_without_a_file() {
    let certificate = CallerIdentity::Certificate("ops".into());
    let user = CallerIdentity::User("prometheus".into());
    let anonymous = CallerIdentity::Anonymous;
    let agent = CallerIdentity::Agent("gw-1".parse().unwrap());
    let reads = "10250 metrics, 9100 read, 8080 read write upgrade";
    let kubelet = "10250 metrics pods containerlogs exec upgrade connect";
    let all = "10250 metrics pods containerlogs exec upgrade connect, 9100 read write upgrade connect, \
               8080 read write upgrade connect, 22 connect";
    let connect = "10250 metrics connect, 9100 read, 8080 read write upgrade, 22 connect";
    for (listener, identity, [has_delegation, has_token], expected) in [
        (Listener::Http, &anonymous, [false; 2], reads.to_owned()),
        (Listener::Http, &anonymous, [false, true], reads.to_owned()),
        (Listener::Https, &anonymous, [false; 2], reads.to_owned()),
        (
            Listener::Https,
            &anonymous,
            [false, true],
            format!("{kubelet}, 9100 read, 8080 read write upgrade"),
        ),
        (Listener::Https, &certificate, [false; 2], reads.to_owned()),
        (
            Listener::Https,
            &certificate,
            [true, false],
            format!("{all}, direct, target"),
        ),
        (Listener::Connect, &user, [false; 2], connect.to_owned()),
        (
            Listener::Connect,
            &certificate,
            [false; 2],
            format!("{connect}, direct"),
        ),
        (
            Listener::Connect,
            &certificate,
            [true, false],
            format!("{connect}, direct"),
        ),
        (
            Listener::Unix,
            &CallerIdentity::Uid(0),
            [false; 2],
            format!("{all}, direct, target"),
        ),
        (
            Listener::Service,
            &anonymous,
            [false; 2],
            format!("{all}, direct, target"),
        ),
        (
            Listener::Agent,
            &agent,
            [false; 2],
            format!("{all}, direct, target"),
        ),
    ] {
        let may_do = allowed(listener, identity, has_delegation, has_token);
        assert_eq!(
            may_do, expected,
            "{listener} {identity} {has_delegation} {has_token}"
        );
    }
}
