//! The operation of a request against the answers of the real router, and the verbs of the kubelet.

use super::*;

fn at_kubelet(method: &str, target: &str) -> Result<Operation, UnclearPath> {
    let method = method.parse().unwrap();
    let request = RequestedOperation::Http {
        method: &method,
        path: target.split('?').next().unwrap(),
        may_be_upgrade: false,
    };
    request.at(true)
}

/// Answers of net/http and go-restful, registered as in Kubernetes 1.35, to these spellings:
/// `tests/kubelet_router/main.go` prints them.
const ROUTER: &str = include_str!("kubelet_router.tsv");

#[test]
fn every_spelling_is_read_as_by_the_router_of_the_kubelet_or_refused() {
    let (mut equal, mut refused) = (0, 0);
    for line in ROUTER.lines() {
        let mut fields = line.split('\t');
        let (method, target) = (fields.next().unwrap(), fields.next().unwrap());
        let (handler, subresources) = (fields.next().unwrap(), fields.next());
        let path = target.strip_prefix("http://node:10250").unwrap_or(target);
        let path = path.strip_prefix("http://other").unwrap_or(path);
        let ours = at_kubelet(method, path);
        let Ok(operation) = ours else {
            // Nothing that a client sends by default is refused.
            assert!(
                path.contains(['%', '.', '\\']) || path.contains("//") || !path.starts_with('/'),
                "{line}"
            );
            refused += 1;
            continue;
        };
        match handler {
            "404" | "405" => {}
            // The router adds the slash at the end of /logs, /stats, /runningpods or /checkpoint.
            "301" => assert!(
                !path.ends_with('/')
                    && !path[1..]
                        .trim_end_matches("pprof")
                        .trim_end_matches('/')
                        .contains('/'),
                "{line}"
            ),
            handler => {
                let subresources = subresources.unwrap();
                assert_eq!(operation.subresources().join(","), subresources, "{line}");
                let is_flagz = operation == Operation::Flagz;
                assert_eq!(
                    if is_flagz {
                        "configz"
                    } else {
                        operation.label()
                    },
                    handler,
                    "{line}"
                );
                equal += 1;
            }
        }
    }
    assert!(
        equal >= 90 && refused >= 100,
        "{equal} equal, {refused} refused"
    );
}

#[test]
fn shell_is_create_with_every_method_and_other_verbs_are_those_of_the_kubelet() {
    for method in ["GET", "POST", "HEAD", "BREW"] {
        let method = method.parse().unwrap();
        for operation in [
            Operation::Exec,
            Operation::Attach,
            Operation::Run,
            Operation::PortForward,
        ] {
            assert_eq!(
                operation.verb(&method),
                Some("create"),
                "{method} {operation}"
            );
        }
    }
    for (method, verb) in [
        ("GET", Some("get")),
        ("POST", Some("create")),
        ("PUT", Some("update")),
        ("PATCH", Some("patch")),
        ("DELETE", Some("delete")),
        ("HEAD", None),
    ] {
        assert_eq!(
            Operation::Metrics.verb(&method.parse().unwrap()),
            verb,
            "{method}"
        );
    }
}

#[test]
fn method_and_upgrade_decide_at_other_ports_and_an_upgrade_of_metrics_is_none() {
    for (method, path, may_be_upgrade, is_kubelet, expected) in [
        ("GET", "/x", false, false, Operation::Read),
        ("HEAD", "//../x", false, false, Operation::Read),
        ("GET", "/exec/ns/pod/c", false, false, Operation::Read),
        ("POST", "/x", false, false, Operation::Write),
        ("OPTIONS", "/x", false, false, Operation::Write),
        ("GET", "/x", true, false, Operation::Upgrade),
        ("GET", "/metrics", true, true, Operation::Upgrade),
        (
            "GET",
            "/containerLogs/ns/pod/c",
            true,
            true,
            Operation::Upgrade,
        ),
        ("GET", "/exec/ns/pod/c", true, true, Operation::Exec),
        ("GET", "/attach/ns/pod/c", true, true, Operation::Attach),
        ("POST", "/run/ns/pod/c", true, true, Operation::Upgrade),
        (
            "POST",
            "/portForward/ns/pod",
            true,
            true,
            Operation::PortForward,
        ),
    ] {
        let method = method.parse().unwrap();
        let request = RequestedOperation::Http {
            method: &method,
            path,
            may_be_upgrade,
        };
        assert_eq!(request.at(is_kubelet), Ok(expected), "{method} {path}");
    }
    assert_eq!(RequestedOperation::Connect.at(true), Ok(Operation::Connect));
}

#[test]
fn bytes_may_be_the_operations_of_their_port_an_upgrade_and_bytes() {
    for (operation, at_kubelet, elsewhere) in [
        (Operation::Exec, true, false),
        (Operation::Unknown, true, false),
        (Operation::Read, false, true),
        (Operation::Write, false, true),
        (Operation::Upgrade, true, true),
        (Operation::Connect, true, true),
    ] {
        let set = OperationSet::of(&[operation]);
        let possible = [true, false].map(|is_kubelet| set.may_be_bytes(is_kubelet));
        assert_eq!(possible, [at_kubelet, elsewhere], "{operation}");
    }
}

#[test]
fn names_and_groups_are_parsed_and_unknown_ones_are_named() {
    for operation in Operation::ALL {
        let parsed: OperationSet = operation.label().parse().unwrap();
        assert_eq!(parsed, OperationSet::of(&[operation]));
    }
    assert_eq!("shell".parse(), Ok(OperationSet::SHELL));
    let error = "logs".parse::<OperationSet>().unwrap_err().to_string();
    assert!(
        error.starts_with("is no operation; there are shell, observe, metrics, "),
        "{error}"
    );
}
