//! Tests of the check of the node's names.

use std::net::Ipv4Addr;

use tunnel_doctor::Severity;

use super::healthy;
use crate::doctor::checks::names::{cache as cache_value, names};
use crate::doctor::facts::Facts;
use crate::doctor::names::ResolverFacts;

#[test]
fn way_of_names_is_reported_with_what_happens_while_the_link_is_down() {
    let cache = |interface: &str| ResolverFacts {
        address: CACHE.into(),
        interfaces: vec![interface.to_owned()],
        answer: Ok(()),
    };
    let elsewhere = ResolverFacts {
        interfaces: Vec::new(),
        ..cache("")
    };
    let silent = ResolverFacts {
        answer: Err("no answer".to_owned()),
        ..cache("nodelocaldns")
    };
    let listener = ResolverFacts {
        address: LISTENER.into(),
        ..cache("lo")
    };
    let cases: [(Change, Severity, &str); 6] = [
        (
            Box::new(pods_ask(cache("kube-ipvs0"))),
            Severity::Warning,
            "not on this node",
        ),
        (
            Box::new(pods_ask(elsewhere.clone())),
            Severity::Warning,
            "not on this node",
        ),
        (
            Box::new(pods_ask(silent)),
            Severity::Error,
            "does not answer",
        ),
        (Box::new(pods_ask(listener)), Severity::Error, "TCP only"),
        (
            Box::new(|facts: &mut Facts| facts.names.host = vec![LISTENER.into()]),
            Severity::Error,
            "finds none",
        ),
        (
            Box::new(move |facts: &mut Facts| {
                pods_ask(elsewhere.clone())(facts);
                facts.cloud.listeners.clear();
            }),
            Severity::Info,
            "not on this node",
        ),
    ];
    for (change, severity, what) in cases {
        let mut facts = healthy();
        facts.cloud.listeners[0].listener = format!("dns={}:53", Ipv4Addr::from(LISTENER))
            .parse()
            .unwrap();
        change(&mut facts);
        let found = names(&facts).unwrap();
        let [fault] = &found[..] else {
            panic!("{what}: {found:?}");
        };
        assert_eq!(fault.severity, severity, "{what}");
        assert!(fault.what.contains(what), "{fault:?}");
    }
    let mut facts = healthy();
    facts.names.pods = Err("no kubelet".to_owned());
    assert_eq!(names(&facts).unwrap_err(), "no kubelet");
    facts.names.pods = Ok(vec![cache("nodelocaldns")]);
    assert!(names(&facts).unwrap().is_empty());
    let value = cache_value(&facts).unwrap();
    assert!(
        value.contains("pods ask 169.254.20.10 on this node"),
        "{value}"
    );
    // The host asks its own cache.
    facts.names.host = vec![CACHE.into()];
    assert_eq!(names(&facts).unwrap().len(), 1);
}

fn pods_ask(resolver: ResolverFacts) -> impl Fn(&mut Facts) {
    move |facts| facts.names.pods = Ok(vec![resolver.clone()])
}

type Change = Box<dyn Fn(&mut Facts)>;

const CACHE: [u8; 4] = [169, 254, 20, 10];
const LISTENER: [u8; 4] = [169, 254, 20, 11];
