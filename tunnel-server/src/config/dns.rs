//! Checks of the embedded DNS's settings.

use std::net::{IpAddr, SocketAddr};

use tunnel_process::host::primary_address;
use tunnel_process::settings::{ConfigErrors, parse_address, parse_quoted};
use tunnel_proto::wire::name::NodeName;

use super::{RawConfig, RawRecord};
use tunnel_dns::{
    Addresses, ClusterDomain, DnsSettings, Node, NodeLocation, Resolvers, is_this_server,
};

/// Returns the settings, or `None` if the DNS is off.
pub(super) fn check(raw: &RawConfig, errors: &mut ConfigErrors) -> Option<DnsSettings> {
    let listen = raw.dns_listen.as_deref().filter(|text| *text != OFF);
    let Some(listen) = listen else {
        if raw.dns_listen.is_none() {
            refuse_unused(raw, errors);
        }
        return None;
    };
    let listen = errors.ok_or_record(LISTEN, parse_address(listen));
    let zone = raw.dns_zone.as_deref();
    let zone = zone.and_then(|text| errors.ok_or_record("--dns-zone", dns_name(text)));
    let (clusters, default_resolvers) = upstreams(&raw.dns_upstream, errors);
    let answers = errors.parse_list(ANSWER, &raw.dns_answer, parse_quoted::<IpAddr>);
    let fixed = raw
        .dns_records
        .iter()
        .filter_map(|record| fixed(record, errors))
        .collect();
    let listen = listen?;
    if let Resolvers::These(resolvers) = &default_resolvers
        && let Some(own) = resolvers
            .iter()
            .find(|resolver| is_this_server(listen, **resolver))
    {
        errors.add(
            UPSTREAM,
            format!("{own} is this server itself (--dns-listen {listen})"),
        );
    }
    Some(DnsSettings {
        listen,
        zone,
        clusters,
        default_resolvers,
        answer: answer(listen, &answers, errors),
        fixed,
    })
}

/// Refuses settings that have no effect without the listener, because they are likely an error.
fn refuse_unused(raw: &RawConfig, errors: &mut ConfigErrors) {
    for (setting, is_set) in [
        ("--dns-zone", raw.dns_zone.is_some()),
        (UPSTREAM, !raw.dns_upstream.is_empty()),
        (ANSWER, !raw.dns_answer.is_empty()),
        ("dnsRecords", !raw.dns_records.is_empty()),
    ] {
        if is_set {
            errors.add(
                setting,
                "has no effect without --dns-listen (or set --dns-listen off)",
            );
        }
    }
}

/// Returns the addresses in answers for edge nodes: the configured ones, or else those at which
/// callers reach this server.
fn answer(listen: SocketAddr, values: &[IpAddr], errors: &mut ConfigErrors) -> Addresses {
    let answer = match values {
        [] if listen.ip().is_unspecified() => {
            let own = primary_address();
            if own.is_none() {
                errors.add(
                    ANSWER,
                    "is needed: this host has no address of its own to answer with",
                );
            }
            Addresses::first_of(own)
        }
        [] => Addresses::first_of([listen.ip()]),
        values => Addresses::first_of(values.iter().copied()),
    };
    if values.len() > answer.iter().count() {
        errors.add(ANSWER, "takes one address of each family");
    }
    if values.iter().any(IpAddr::is_unspecified) {
        errors.add(
            ANSWER,
            "0.0.0.0 and :: are no addresses that callers can reach",
        );
    }
    answer
}

/// Parses the upstreams: `IP`, `IP:PORT`, `DOMAIN=IP`, and `off` instead of an address.
fn upstreams(values: &[String], errors: &mut ConfigErrors) -> (Vec<ClusterDomain>, Resolvers) {
    let mut clusters: Vec<ClusterDomain> = Vec::new();
    let mut default_resolvers = None;
    for (domain, resolver) in errors.parse_list(UPSTREAM, values, upstream) {
        let list = match domain {
            None => default_resolvers.get_or_insert_with(Vec::new),
            Some(domain) => {
                let known = clusters.iter().position(|cluster| cluster.domain == domain);
                let location = known.unwrap_or(clusters.len());
                if known.is_none() {
                    let resolvers = Vec::new();
                    clusters.push(ClusterDomain { domain, resolvers });
                }
                &mut clusters[location].resolvers
            }
        };
        list.extend(resolver);
    }
    let has_default = clusters
        .iter()
        .any(|cluster| cluster.domain.as_str() == CLUSTER_DOMAIN);
    if let (false, Ok(domain)) = (has_default, CLUSTER_DOMAIN.parse()) {
        let resolvers = Vec::new();
        clusters.push(ClusterDomain { domain, resolvers });
    }
    (
        clusters,
        default_resolvers.map_or(Resolvers::Host, Resolvers::These),
    )
}

/// Parses a name that DNS can carry.
fn dns_name(text: &str) -> Result<NodeName, String> {
    let name: NodeName = parse_quoted(text)?;
    name.for_dns().map_err(|error| format!("{text:?}: {error}"))
}

/// Parses the domain of an upstream, if it has one, and its address.
fn upstream(text: &str) -> Result<(Option<NodeName>, Option<SocketAddr>), String> {
    match text.split_once('=') {
        Some((domain, resolver)) => Ok((Some(dns_name(domain)?), resolver_address(resolver)?)),
        None => Ok((None, resolver_address(text)?)),
    }
}

/// Parses a resolver's address. Returns `None` for `off`.
fn resolver_address(text: &str) -> Result<Option<SocketAddr>, String> {
    if text == OFF {
        return Ok(None);
    }
    let address = text.trim_matches(['[', ']']).parse::<IpAddr>();
    let resolver = match address {
        Ok(address) => SocketAddr::new(address, RESOLVER_PORT),
        Err(_not_bare) => text.parse().map_err(|_neither| {
            format!("{text:?} is not IP, IP:PORT or off (resolvers are not found by name)")
        })?,
    };
    if resolver.port() == 0 || resolver.ip().is_unspecified() {
        return Err(format!("{text:?} is no address that can be asked"));
    }
    Ok(Some(resolver))
}

fn fixed(raw: &RawRecord, errors: &mut ConfigErrors) -> Option<Node> {
    let setting = format!("dnsRecords: {}", raw.name);
    let name = errors.ok_or_record(&setting, dns_name(&raw.name));
    let addresses = errors.parse_list(&setting, &raw.addresses, parse_quoted);
    if raw.addresses.is_empty() {
        errors.add(&setting, "needs at least one address");
    }
    Some(Node {
        name: name?,
        hostname: None,
        location: NodeLocation::Cloud(addresses),
    })
}

const LISTEN: &str = "--dns-listen";
const UPSTREAM: &str = "--dns-upstream";
const ANSWER: &str = "--dns-answer";
const OFF: &str = "off";
const RESOLVER_PORT: u16 = 53;
/// Domain of nearly every cluster. Resolvers outside cannot answer names below it.
const CLUSTER_DOMAIN: &str = "cluster.local";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::yaml as parse;

    fn yaml(text: &str) -> Result<DnsSettings, String> {
        let config = parse(text)?;
        config.dns.ok_or_else(|| "off".to_owned())
    }

    fn cluster(domain: &str, resolvers: &[&str]) -> ClusterDomain {
        ClusterDomain {
            domain: domain.parse().unwrap(),
            resolvers: resolvers.iter().map(|text| text.parse().unwrap()).collect(),
        }
    }

    #[test]
    fn dns_is_off_unless_it_is_asked_for() {
        assert_eq!(yaml("{}").unwrap_err(), "off");
        assert_eq!(yaml("dnsListen: off\ndnsZone: a.b").unwrap_err(), "off");
        let idle = "dnsZone: a\ndnsUpstream: [192.0.2.1]\ndnsAnswer: [192.0.2.1]\ndnsRecords: [{ name: a, addresses: [192.0.2.1] }]";
        let error = yaml(idle).unwrap_err();
        assert!(error.contains("4 error(s)"), "{error}");
    }

    #[test]
    fn defaults_ask_the_host_and_answer_with_the_listeners_address() {
        let dns = yaml("dnsListen: 127.0.0.1:5353").unwrap();
        assert_eq!(dns.default_resolvers, Resolvers::Host);
        assert_eq!(dns.clusters, [cluster("cluster.local", &[])]);
        let answer = dns.answer.iter().map(|address| address.to_string());
        assert_eq!(answer.collect::<Vec<_>>(), ["127.0.0.1"]);
        assert_eq!(dns.zone, None);
    }

    #[test]
    fn resolvers_domains_answers_and_records_are_read() {
        let text = "
dnsListen: '[::]:5353'
dnsZone: Nodes.Tunnel.Internal.
dnsUpstream: [192.0.2.1, '192.0.2.2:5300', '2001:db8::1', '[2001:db8::2]:54', cluster.local=10.96.0.10, b.test=off]
dnsAnswer: [10.0.0.1, 'fd00::1']
dnsRecords: [{ name: master-1, addresses: [192.168.33.220] }]
";
        let dns = yaml(text).unwrap();
        let resolvers = [
            "192.0.2.1:53",
            "192.0.2.2:5300",
            "[2001:db8::1]:53",
            "[2001:db8::2]:54",
        ];
        let resolvers = resolvers.map(|text| text.parse().unwrap()).to_vec();
        assert_eq!(dns.default_resolvers, Resolvers::These(resolvers));
        let clusters = [
            cluster("cluster.local", &["10.96.0.10:53"]),
            cluster("b.test", &[]),
        ];
        assert_eq!(dns.clusters, clusters);
        assert_eq!(dns.zone.unwrap().as_str(), "nodes.tunnel.internal");
        assert_eq!(dns.answer.iter().count(), 2);
        assert_eq!(dns.fixed[0].name.as_str(), "master-1");
        let off = yaml("{ dnsListen: '127.0.0.1:5353', dnsUpstream: [off] }").unwrap();
        assert_eq!(off.default_resolvers, Resolvers::These(Vec::new()));
    }

    #[test]
    fn every_error_names_its_setting() {
        let bad_name = "dnsRecords: [{ name: 'a b', addresses: [10.0.0.1] }]";
        for (text, expected) in [
            ("dnsListen: 5353", "--dns-listen"),
            ("dnsZone: a..b", "--dns-zone"),
            (&*format!("dnsZone: {}.x", "a".repeat(64)), "--dns-zone"),
            ("dnsUpstream: [dns.example]", "--dns-upstream"),
            ("dnsUpstream: ['192.0.2.1:0']", "--dns-upstream"),
            ("dnsUpstream: ['a b=192.0.2.1']", "--dns-upstream"),
            ("dnsUpstream: ['127.0.0.1:5353']", "is this server itself"),
            ("dnsAnswer: [name]", "--dns-answer"),
            ("dnsAnswer: [0.0.0.0]", "--dns-answer"),
            ("dnsAnswer: [10.0.0.1, 10.0.0.2]", "one address of each"),
            (bad_name, "dnsRecords: a b"),
            ("dnsRecords: [{ name: a, addresses: [x] }]", "dnsRecords: a"),
            ("dnsRecords: [{ name: a, addresses: [] }]", "dnsRecords: a"),
            ("limits: { dnsForwards: 0 }", "limits.dnsForwards"),
        ] {
            let text = match text.starts_with("dnsListen") {
                true => text.to_owned(),
                false => format!("dnsListen: 0.0.0.0:5353\n{text}"),
            };
            let error = yaml(&text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
