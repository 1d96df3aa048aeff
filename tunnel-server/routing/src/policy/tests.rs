use super::*;

fn port(number: u16) -> Port {
    Port::new(number).unwrap()
}

fn policy() -> PortPolicy {
    PortPolicy {
        http: "9100".parse().unwrap(),
        localhost: "10266".parse().unwrap(),
        own: vec![port(10264)],
        ..PortPolicy::default()
    }
}

/// Returns the target, `direct`, or the kind of denial. `, Host` follows a target that keeps Host.
fn answer(caller: AccessCaller<'_>, destination: RequestedDestination<()>) -> String {
    let access = Access {
        caller,
        destination,
    };
    match authorize(&policy(), access) {
        Ok(Authorized::Agent(target)) if target.keeps_host => {
            format!("{}, Host", target.destination)
        }
        Ok(Authorized::Agent(target)) => target.destination.to_string(),
        Ok(Authorized::Direct(())) => "direct".to_owned(),
        Err(denied) => denied.kind().to_owned(),
    }
}

fn node(port: RequestedPort) -> RequestedDestination<()> {
    let node = "worker-1".parse().unwrap();
    RequestedDestination::Node(RequestedNode { node, port })
}

#[test]
fn lists_decide_about_ports_and_delegation_about_the_kubelet() {
    let named = |number| RequestedPort::Named(port(number));
    let kubelet = |number| RequestedPort::Kubelet(port(number));
    let either = |number| RequestedPort::NamedOrKubelet {
        named: port(number),
        kubelet: port(10350),
    };
    for (requested, others, delegated) in [
        (named(9100), "worker-1 node:9100", "worker-1 node:9100"),
        (named(10250), "worker-1 node:10250", "worker-1 node:10250"),
        (
            named(10266),
            "worker-1 loopback:10266",
            "worker-1 loopback:10266",
        ),
        (named(22), "port_denied", "port_denied"),
        (named(10264), "port_denied", "port_denied"),
        (
            kubelet(10350),
            "worker-1 node:10350",
            "worker-1 node:10350, Host",
        ),
        (
            kubelet(10266),
            "worker-1 loopback:10266",
            "worker-1 loopback:10266, Host",
        ),
        (either(9100), "worker-1 node:9100", "worker-1 node:9100"),
        (either(6443), "port_denied", "worker-1 node:10350, Host"),
    ] {
        for (has_delegation, expected) in [(false, others), (true, delegated)] {
            let caller = AccessCaller {
                has_delegation,
                ..AccessCaller::ANONYMOUS
            };
            assert_eq!(answer(caller, node(requested)), expected, "{requested:?}");
        }
    }
}

#[test]
fn lists_are_not_asked_for_configured_and_direct_targets() {
    let caller = AccessCaller::ANONYMOUS;
    let configured = RequestedDestination::Configured(Destination {
        node: "worker-1".parse().unwrap(),
        target: Target::Node(port(22)),
    });
    assert_eq!(answer(caller, configured), "worker-1 node:22");
    assert_eq!(answer(caller, RequestedDestination::Direct(())), "direct");
}

#[test]
fn listener_with_authentication_serves_only_callers_with_an_identity() {
    let identities = [
        (CallerIdentity::Anonymous, "credentials_required"),
        (CallerIdentity::User("scraper".into()), "worker-1 node:9100"),
        (CallerIdentity::Certificate("".into()), "worker-1 node:9100"),
        (CallerIdentity::Uid(0), "worker-1 node:9100"),
    ];
    for (identity, expected) in identities {
        let caller = AccessCaller {
            identity: &identity,
            must_authenticate: true,
            has_delegation: false,
        };
        let requested = node(RequestedPort::Named(port(9100)));
        assert_eq!(answer(caller, requested), expected, "{identity}");
    }
}

fn lists() -> PortPolicy {
    PortPolicy {
        http: "9100, 9200".parse().unwrap(),
        https: "9200, 9443, 10250".parse().unwrap(),
        localhost: "10266, 10267".parse().unwrap(),
        own: vec![port(10264), port(9100)],
    }
}

#[test]
fn listed_ports_get_their_class_and_others_a_reason() {
    let policy = lists();
    assert_eq!(policy.target(port(10250)), Ok(Target::Node(port(10250))));
    assert_eq!(policy.target(port(10255)), Ok(Target::Node(port(10255))));
    assert_eq!(
        policy.target(port(9100)),
        Ok(Target::Node(port(9100))),
        "a list beats the hint"
    );
    assert_eq!(
        policy.target(port(10266)),
        Ok(Target::Loopback(port(10266)))
    );
    assert_eq!(
        policy.target(port(10264)),
        Err(PortPolicyError::OwnPort(port(10264)))
    );
    assert_eq!(
        policy.target(port(22)),
        Err(PortPolicyError::NotListed(port(22)))
    );
}

#[test]
fn https_wins_where_both_lists_have_a_port() {
    let extra: Vec<_> = lists().extra_ports().collect();
    assert_eq!(
        extra,
        [(port(9200), true), (port(9443), true), (port(9100), false)]
    );
}
