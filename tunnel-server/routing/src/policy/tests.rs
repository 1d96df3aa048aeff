use std::collections::BTreeMap;

use http::Method;

use super::*;
use crate::operation::OperationSet;
use crate::routes::{RouteNode, RouteSource, RouteTable};
use crate::testing::located;
use rules::{Effect, Rule};

fn port(number: u16) -> Port {
    Port::new(number).unwrap()
}

fn policy() -> PortPolicy {
    let lists = PortLists {
        http: "9100".parse().unwrap(),
        localhost: "10266".parse().unwrap(),
        ..PortLists::default()
    };
    PortPolicy::of_lists(lists, vec![port(10264)])
}

/// Returns the target, `direct`, or the kind of denial. `, Host` follows a target that keeps Host.
fn answer(caller: AccessCaller<'_>, destination: RequestedDestination<()>) -> String {
    let access = Access {
        caller,
        destination,
        operation: RequestedOperation::Connect,
    };
    match located(&policy(), access) {
        Ok(Route::Agent(target)) if target.keeps_host => {
            format!("{}, Host", target.destination)
        }
        Ok(Route::Agent(target)) => target.destination.to_string(),
        Ok(Route::Direct(())) => "direct".to_owned(),
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
    assert_eq!(
        answer(caller, RequestedDestination::Direct((), port(443))),
        "direct"
    );
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
            ..AccessCaller::ANONYMOUS
        };
        let requested = node(RequestedPort::Named(port(9100)));
        assert_eq!(answer(caller, requested), expected, "{identity}");
    }
}

fn settings() -> PortSettings {
    let lists = PortLists {
        http: "9100, 9200, 2222".parse().unwrap(),
        https: "9200, 9443, 10250".parse().unwrap(),
        localhost: "10266, 10267, 2222, 5432".parse().unwrap(),
    };
    let entry = |scheme, class, listeners: &[Listener]| PortEntry {
        scheme,
        class,
        listeners: listeners.iter().copied().collect(),
        names_connect: false,
        operations: None,
    };
    let both = [Listener::Http, Listener::Https];
    PortSettings {
        lists,
        connect: "22, 2222".parse().unwrap(),
        named: BTreeMap::from([
            (
                port(8080),
                entry(Some(Scheme::Http), TargetClass::Loopback, &both),
            ),
            (
                port(8443),
                entry(Some(Scheme::Https), TargetClass::Node, &[Listener::Connect]),
            ),
            (
                port(5432),
                entry(None, TargetClass::Node, &[Listener::Connect]),
            ),
        ]),
    }
}

/// A listener accepts what its lists, `connect` and `ports:` say; the last of them decides.
#[test]
fn each_port_is_open_on_its_listeners_at_its_address_and_others_have_a_reason() {
    let policy = PortPolicy::new(settings(), vec![port(10264), port(9100)]);
    let every = "http, https, connect";
    for (number, allowed, target) in [
        (10250, every, "node:10250"),
        (10255, every, "node:10255"),
        (9100, every, "node:9100"),
        (10266, every, "loopback:10266"),
        (22, "connect", "node:22"),
        (2222, "connect", "loopback:2222"),
        (8080, "http, https", "loopback:8080"),
        (8443, "connect", "node:8443"),
        (5432, "connect", "node:5432"),
    ] {
        let open = Listener::ALL.into_iter();
        let open: ListenerSet = open
            .filter(|listener| ListenerSet::OF_PORTS.contains(*listener))
            .filter(|listener| policy.target(port(number), *listener).is_ok())
            .collect();
        assert_eq!(open.to_string(), allowed, "{number}");
        let class = policy.entry(port(number)).unwrap().class;
        assert_eq!(class.target(port(number)).to_string(), target);
    }
    let over_socket = policy.target(port(22), Listener::Unix);
    assert!(over_socket.is_ok(), "a CONNECT listener");
    let refusal = |number| policy.target(port(number), Listener::Http).unwrap_err();
    assert_eq!(refusal(10264), PortPolicyError::OwnPort(port(10264)));
    assert_eq!(refusal(23), PortPolicyError::NotListed(port(23)));
    assert_eq!(
        refusal(22).to_string(),
        "port 22 is not allowed on the http listener; the server allows it on: connect (ports, --connect-ports)"
    );
}

#[test]
fn ports_with_a_scheme_that_its_listener_accepts_may_be_bound() {
    let policy = PortPolicy::new(settings(), Vec::new());
    let extra: Vec<_> = policy
        .extra_ports()
        .map(|(port, scheme)| (port.get(), scheme))
        .collect();
    let (http, https) = (Scheme::Http, Scheme::Https);
    assert_eq!(
        extra,
        [(8080, http), (9100, http), (9200, https), (9443, https)]
    );
}

#[test]
fn other_servers_reach_what_some_listener_accepts_at_the_same_address() {
    let policy = PortPolicy::new(settings(), Vec::new());
    for (target, expected) in [
        (Target::Node(port(22)), true),
        (Target::Loopback(port(22)), false),
        (Target::Loopback(port(2222)), true),
        (Target::Node(port(23)), false),
        (Target::Node(port(10350)), true),
        (Target::Loopback(port(10350)), false),
    ] {
        let checked = policy.check_target(&target, Some(port(10350)));
        assert_eq!(checked.is_ok(), expected, "{target}");
    }
}

#[test]
fn access_that_has_begun_is_refused_when_the_setting_that_opened_it_is_gone() {
    let name = "kube-apiserver-kubelet-client";
    let service = Destination {
        node: "worker-1".parse().unwrap(),
        target: Target::Node(port(22)),
    };
    let all = Policy {
        services: vec![service.clone()],
        delegation: DelegationPolicy::named([name.to_owned()]),
        ..policy().into()
    };
    let identity = CallerIdentity::Certificate(name.into());
    let either = RequestedPort::NamedOrKubelet {
        named: port(9100),
        kubelet: port(10350),
    };
    let changes: [fn(&mut Policy); 4] = [
        |_| {},
        |policy| policy.ports = PortPolicy::default(),
        |policy| policy.services[0].target = Target::Node(port(2222)),
        |policy| policy.delegation = DelegationPolicy::default(),
    ];
    for (destination, has_delegation, expected) in [
        (
            node(RequestedPort::Named(port(9100))),
            false,
            ["", "port_denied", "", ""],
        ),
        (node(either), true, ["", "port_denied", "", "not_open"]),
        (
            node(RequestedPort::Kubelet(port(10350))),
            true,
            ["", "", "", "not_open"],
        ),
        (
            RequestedDestination::Configured(service),
            false,
            ["", "", "not_open", ""],
        ),
        (
            RequestedDestination::Direct((), port(443)),
            false,
            ["", "", "", ""],
        ),
    ] {
        let caller = AccessCaller {
            identity: &identity,
            has_delegation,
            ..AccessCaller::ANONYMOUS
        };
        let asked = Access {
            caller,
            destination: destination.clone(),
            operation: RequestedOperation::Connect,
        };
        let mut begun = locate(&all.ports, asked).unwrap().access;
        let refused = changes.map(|change| {
            let mut policy = all.clone();
            change(&mut policy);
            let admitted = policy.admit(&mut begun, &RouteTable::default());
            admitted.err().map_or("", |denied| denied.kind())
        });
        assert_eq!(refused, expected, "{destination:?}");
    }
}

#[test]
fn service_at_the_kubelet_of_a_node_is_denied_with_the_shells_of_kubelets() {
    let node: NodeName = "worker-1".parse().unwrap();
    let mut routes = RouteTable::default();
    let known = RouteNode {
        kubelet_port: Some(port(10350)),
        ..RouteNode::edge(node.clone(), Vec::new())
    };
    routes.replace(RouteSource::Cluster, &node, Some(known));
    let no_shell = Rule {
        operations: Some(OperationSet::SHELL),
        ..Rule::new("no-shell", Effect::Deny)
    };
    let table = RuleTable {
        rules: vec![no_shell, Rule::new("all", Effect::Allow)],
        ..RuleTable::default()
    };
    for (number, expected) in [(10250, "rule_denied"), (10350, "rule_denied"), (22, "")] {
        let service = Destination {
            node: node.clone(),
            target: Target::Node(port(number)),
        };
        let policy = Policy {
            rules: table.clone().into(),
            services: vec![service.clone()],
            ..Policy::default()
        };
        let asked = Access {
            caller: AccessCaller::ANONYMOUS,
            destination: RequestedDestination::<()>::Configured(service),
            operation: RequestedOperation::Connect,
        };
        let mut access = locate(&policy.ports, asked).unwrap().access;
        let admitted = policy.admit(&mut access, &routes);
        let decided = admitted.and_then(|()| authorize(&policy.rules.in_force, &access.facts));
        let denied = decided.err().map_or("", |denied| denied.kind());
        assert_eq!(denied, expected, "{number}");
    }
}

#[test]
fn deny_of_an_operation_applies_to_a_request_that_may_become_another_protocol() {
    let no_metrics = Rule {
        operations: Some(OperationSet::OBSERVE),
        ..Rule::new("no-metrics", Effect::Deny)
    };
    let table = RuleTable {
        rules: vec![no_metrics, Rule::new("all", Effect::Allow)],
        ..RuleTable::default()
    };
    for (path, expected) in [("/metrics", "rule_denied"), ("/pods", "")] {
        let asked = Access {
            caller: AccessCaller::ANONYMOUS,
            destination: node(RequestedPort::Named(port(10250))),
            operation: RequestedOperation::Http {
                method: &Method::GET,
                path,
                may_be_upgrade: true,
            },
        };
        let access = locate(&policy(), asked).unwrap().access;
        assert_eq!(access.facts.operation, Operation::Upgrade);
        let decided = authorize(&table, &access.facts);
        let denied = decided.err().map_or("", |denied| denied.kind());
        assert_eq!(denied, expected, "{path}");
    }
}

#[test]
fn stream_of_an_agent_has_the_port_that_all_addresses_share_and_one_may_be_a_kubelet() {
    let node = "gw-1".parse().unwrap();
    for (numbers, shared, is_kubelet) in [
        (&[443][..], Some(443), false),
        (&[], None, false),
        (&[443, 443], Some(443), false),
        (&[443, 6443], None, false),
        (&[443, 10250], None, true),
    ] {
        let ports: Vec<_> = numbers.iter().map(|number| port(*number)).collect();
        let facts = access_of_agent(&node, &ports).facts;
        assert_eq!(facts.port.map(Port::get), shared, "{numbers:?}");
        assert_eq!(facts.is_kubelet, is_kubelet, "{numbers:?}");
    }
}
