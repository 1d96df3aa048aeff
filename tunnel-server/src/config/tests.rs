use tracing::level_filters::LevelFilter;
use tunnel_process::yaml;
use tunnel_proto::session::LivenessLimits;

use super::*;
use crate::testing::assert_contains;
use tunnel_routing::policy::PortLists;
use tunnel_store::data_dir::testing::Scratch;

pub(super) fn raw(text: &str) -> Result<RawConfig, String> {
    let raw = yaml::parse::<RawConfig>(text).map_err(|error| error.to_string())?;
    Ok(raw.unwrap_or_default())
}

pub(super) fn yaml(text: &str) -> Result<Config, String> {
    let raw = raw(text)?;
    Config::try_from(raw).map_err(|error| error.to_string())
}

fn shown<T: ToString>(value: Option<T>) -> String {
    value.map(|value| value.to_string()).unwrap_or_default()
}

#[test]
fn defaults_are_those_of_the_contract() {
    let config = yaml("{}").unwrap();
    assert_eq!(config.listeners.agents[0].to_string(), "[::]:10262");
    assert_eq!(config.listeners.agents[1].to_string(), "0.0.0.0:10262");
    assert_eq!(shown(config.listeners.https), "127.0.0.1:10263");
    assert_eq!(shown(config.listeners.http), "127.0.0.1:10264");
    assert_eq!(config.meta_listen.unwrap().to_string(), "127.0.0.1:10265");
    assert_eq!(config.ports.lists.localhost.to_string(), "10266, 10267");
    assert_eq!(config.limits.streams_per_agent, 256);
    assert_eq!(config.limits.stream_window, 2 << 20);
    assert_eq!(config.limits.request_head_bytes, 1 << 20);
    assert_eq!(config.limits.buffer_pool, None);
    assert_eq!(config.limits.idle_timeout(), Duration::from_secs(75));
    let liveness = LivenessLimits {
        probes_idle: true,
        ..LivenessLimits::default()
    };
    assert_eq!(config.limits.liveness(), liveness);
    assert_eq!(config.quic_congestion, CongestionControl::Bbr);
    assert_eq!(config.warnings, [] as [&str; 0]);
}

#[test]
fn listeners_accept_on_after_sigterm_where_another_server_takes_over() {
    for (text, in_cluster, expected) in [
        ("{}", false, 0),
        ("{}", true, 5),
        ("singleReplica: true", true, 0),
        ("drainDelay: 8s", false, 8),
        ("drainDelay: 0s", true, 0),
    ] {
        let delay = around(text, in_cluster).unwrap().drain_delay;
        assert_eq!(delay, Duration::from_secs(expected), "{text}");
    }
}

#[test]
fn agents_move_within_half_of_the_drain() {
    for (timeout, expected) in [("30s", 10_000), ("5s", 2_500), ("0s", 0)] {
        let config = yaml(&format!("drainTimeout: {timeout}")).unwrap();
        assert_eq!(config.move_within(), Duration::from_millis(expected));
    }
}

#[test]
fn flags_win_over_the_file() {
    let file = "httpProxyPorts: 9100\nlogLevel: debug\n";
    let file = raw(file).unwrap();
    let flags = RawConfig {
        http_proxy_ports: Some("9200".into()),
        ..RawConfig::default()
    };
    let config = Config::try_from(flags.or(file)).unwrap();
    assert_eq!(config.ports.lists.http.to_string(), "9200");
    assert_eq!(config.log.level, LevelFilter::DEBUG);
}

#[test]
fn all_config_errors_are_reported_at_once() {
    let text = "
agentListen: nowhere
quicCongestion: reno
httpProxyPorts: 9100, 70000
httpsClientAuth: require
httpsCertFile: /a
kubernetes: on
drainDelay: later
drainTimeout: soon
peers: [b]
peerListen: here
advertise: [here]
limits: { streamWindow: 1KB, streamsPerAgent: 0, openTimeout: 0s }
services: [{ name: db, listen: x, node: 'a b', target: y }]
";
    let error = yaml(text).unwrap_err();
    let settings = "--agent-listen --quic-congestion --http-proxy-ports --https-client-auth \
                    --https-cert-file --kubernetes --drain-delay --drain-timeout --advertise --peer --peer-listen \
                    limits.streamWindow limits.streamsPerAgent limits.openTimeout";
    let services = ["listen", "node", "target"].map(|field| format!("services: db: {field}"));
    for setting in settings
        .split(' ')
        .chain(services.iter().map(String::as_str))
    {
        assert_contains(&error, setting);
    }
}

/// The server and its agents read the same ConfigMap, so the server accepts what agents accept.
#[test]
fn advertised_addresses_may_have_spaces_around() {
    let config = yaml("advertise: ['a.example:31008', ' [2001:db8::1]:443 ']").unwrap();
    assert_eq!(config.advertise, ["a.example:31008", "[2001:db8::1]:443"]);
    let empty = yaml("advertise: ['']").unwrap();
    assert_eq!(empty.advertise, [] as [&str; 0]);
}

#[test]
fn unknown_keys_are_refused() {
    let text = "httpListne: 1\nlimits: { openTimout: 1s }\nservices: [{ nam: a }]";
    let error = yaml(text).unwrap_err();
    for expected in [
        "line 1: unknown key httpListne; did you mean httpListen?",
        "line 2: limits: unknown key openTimout; did you mean openTimeout?",
        "line 3: services[0]: unknown key nam; did you mean name?",
        "line 3: services[0]: name is missing",
    ] {
        assert_contains(&error, expected);
    }
}

#[test]
fn ports_and_lists_are_read_in_each_form() {
    for ports in ["9100", "'9100'", "[9100]", "['9100']"] {
        let config = yaml(&format!("httpProxyPorts: {ports}")).unwrap();
        assert_eq!(config.ports.lists.http.to_string(), "9100", "{ports}");
    }
    let config = yaml("httpProxyPorts: [9100, 9200-9201]\nadvertise: a.example:1").unwrap();
    assert_eq!(config.ports.lists.http.to_string(), "9100, 9200-9201");
    assert_eq!(config.advertise, ["a.example:1"]);
}

#[test]
fn every_mistake_of_a_file_names_the_file() {
    let scratch = Scratch::new();
    let path = scratch.0.path().join("server.yaml");
    std::fs::write(&path, "httpListne: a\ndataDir: [b]\n").unwrap();
    let LoadError::Invalid(error) = load(RawConfig::default(), Some(&path)).unwrap_err() else {
        panic!("not read");
    };
    let texts = error.mistakes;
    assert_eq!(texts.len(), 2, "{texts:?}");
    let begin = format!("--config: {}: line ", path.display());
    assert!(
        texts.iter().all(|text| text.starts_with(&begin)),
        "{texts:?}"
    );
    std::fs::write(&path, vec![b'a'; 10 << 20]).unwrap();
    let error = load(RawConfig::default(), Some(&path)).unwrap_err();
    assert!(error.is_usage());
    assert_contains(&error.to_string(), "is larger than 4 MiB");
}

#[test]
fn listeners_open_to_the_network_need_an_explicit_flag() {
    for text in [
        "httpListen: 0.0.0.0:10264",
        "httpsListen: '[::]:10263'",
        "httpProxyPorts: 9100\nproxyPortListen: 0.0.0.0",
        "services: [{ name: db, listen: '0.0.0.0:5432', node: a, target: 5432 }]",
    ] {
        let error = yaml(text).unwrap_err();
        assert_contains(&error, "--allow-unauthenticated");
        yaml(&format!("{text}\nallowUnauthenticated: true")).unwrap();
    }
    let config = yaml("{ clientCa: /ca, httpsClientAuth: require }").unwrap();
    assert_eq!(shown(config.listeners.https), "[::]:10263");
}

#[test]
fn https_listener_without_client_certificates_is_warned_of() {
    let warned = |text: &str, in_cluster| {
        let warnings = around(text, in_cluster).unwrap().warnings;
        let mut warnings = warnings.iter();
        warnings.any(|warning| warning.contains("--https-listen"))
    };
    let wide = "httpsListen: '[::]:10263'\nallowUnauthenticated: true\n";
    for (text, in_cluster, expected) in [
        (wide, false, true),
        (&*format!("{wide}clientCa: /ca"), false, true),
        ("clientCa: /ca\nhttpsClientAuth: require", false, false),
        ("{}", false, false),
        ("{}", true, true),
        ("clientCa: /ca\nhttpsClientAuth: none", true, true),
        ("clientCa: /ca", true, false),
        ("httpsListen: 127.0.0.1:10263", true, false),
    ] {
        assert_eq!(warned(text, in_cluster), expected, "{text}");
    }
}

#[test]
fn extra_ports_follow_their_listener_or_the_configured_host() {
    let listeners = |text: &str| {
        let listeners = yaml(text).unwrap().extra_listeners();
        let addresses = listeners.iter().map(|(address, ..)| address.to_string());
        addresses.collect::<Vec<_>>().join(" ")
    };
    let both = "127.0.0.1:9100 127.0.0.1:9443";
    for (more, expected) in [
        ("httpsProxyPorts: '9443, 10250'", both),
        ("proxyPortListen: 127.0.0.9", "127.0.0.9:9100"),
        ("proxyPortListen: off", ""),
        ("httpListen: off", ""),
    ] {
        let listeners = listeners(&format!("httpProxyPorts: 9100\n{more}"));
        assert_eq!(listeners, expected, "{more}");
    }
    let error = yaml("httpProxyPorts: 1024-65535").unwrap_err();
    assert_contains(&error, "more than 64 ports");
}

#[test]
fn service_targets_are_ports_of_the_node_loopback_or_other_hosts() {
    let lists = PortLists {
        localhost: "10266".parse().unwrap(),
        ..PortLists::default()
    };
    let ports = PortPolicy::of_lists(lists, Vec::new());
    let target =
        |text: &str| listeners::tcp_service_target(text, &ports).map(|target| target.to_string());
    assert_eq!(target("5432").unwrap(), "node:5432");
    assert_eq!(target("10266").unwrap(), "loopback:10266");
    assert_eq!(target("127.0.0.1:22").unwrap(), "loopback:22");
    assert_eq!(target("[::1]:22").unwrap(), "loopback:22");
    assert_eq!(target("localhost:22").unwrap(), "loopback:22");
    assert_eq!(target("10.0.0.5:502").unwrap(), "10.0.0.5:502");
    assert_eq!(target("plc.local:502").unwrap(), "plc.local:502");
    for text in ["", "a", "a:b", "a b:1", ":1"] {
        assert!(target(text).is_err(), "{text:?}");
    }
}

#[test]
fn limits_of_a_session_must_fit_each_other() {
    for (limits, setting) in [
        ("suspectAfterBusy: 16s", "limits.suspectAfterBusy: 16s"),
        ("suspectAfterIdle: 61s", "limits.suspectAfterIdle: 1m 1s"),
        ("deadAfter: 10s", "limits.suspectAfterIdle: 15s"),
        ("keepAlive: 15s", "limits.keepAlive: 15s"),
        ("bufferPool: 7MiB", "limits.bufferPool: 7MiB"),
    ] {
        let error = yaml(&format!("limits: {{ {limits} }}")).unwrap_err();
        assert!(error.contains("1 error(s)"), "{limits}: {error}");
        assert!(error.contains(setting), "{limits}: {error}");
    }
    let equal = "suspectAfterBusy: 2s, suspectAfterIdle: 2s, deadAfter: 2s, keepAlive: 1s, bufferPool: 8MiB";
    yaml(&format!("limits: {{ {equal} }}")).unwrap();
    let error = yaml("limits: { deadAfter: soon, suspectAfterIdle: 20s }").unwrap_err();
    assert!(error.contains("1 error(s)"), "{error}");
}

#[test]
fn life_of_certificates_is_long_enough_for_renewals_and_ends_before_the_ca() {
    for (life, is_valid) in [
        ("1s", false),
        ("5s", false),
        ("6s", true),
        ("3650d", true),
        ("36500d", false),
    ] {
        let checked = yaml(&format!("limits: {{ certificateLife: {life} }}"));
        assert_eq!(checked.is_ok(), is_valid, "{life}");
        if let Err(error) = checked {
            assert!(error.contains("is not from 6s to 10years"), "{error}");
        }
    }
}

#[test]
fn congestion_control_is_chosen_by_name() {
    let chosen = |text: &str| yaml(text).unwrap().quic_congestion;
    assert_eq!(chosen("quicCongestion: cubic"), CongestionControl::Cubic);
    assert_eq!(chosen("quicCongestion: bbr"), CongestionControl::Bbr);
}

pub(super) fn around(text: &str, in_cluster: bool) -> Result<Config, String> {
    let raw = raw(text)?;
    Config::check(&raw, Environment { in_cluster }).map_err(|error| error.to_string())
}

#[test]
fn container_of_a_cluster_follows_it_and_opens_the_https_listener() {
    let config = around("httpListen: '[::]:10264'", true).unwrap();
    let kubernetes = config.kubernetes.clone().unwrap();
    assert_eq!(kubernetes.names, ObjectNames::default());
    assert_eq!(kubernetes.edge_label, "openyurt.io/is-edge-worker");
    assert_eq!((kubernetes.namespace, kubernetes.kubeconfig), (None, None));
    assert!(kubernetes.pod_lookup && !kubernetes.edge_by_agent);
    assert_eq!(shown(config.listeners.https), "[::]:10263");
    assert_eq!(config.listeners.proxy_ports, ProxyPortListen::Off);
    let config = around("kubernetes: off", true).unwrap();
    assert_eq!(config.kubernetes, None);
    assert_eq!(shown(config.listeners.https), "127.0.0.1:10263");
    assert_eq!(config.listeners.proxy_ports, ProxyPortListen::WithListener);
    assert!(around("{ kubernetes: off, httpListen: '[::]:10264' }", true).is_err());
}

#[test]
fn kubeconfig_follows_a_cluster_from_outside_with_loopback_listeners() {
    // The server reads the file when it starts.
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let text = format!(
        "{{ kubeconfig: '{file}', namespace: edge, edgeNodes: label-or-agent, leaderLease: other, podLookup: 'false', \
         recordNames: ['*.edge.example.com', gateway] }}"
    );
    let config = around(&text, false).unwrap();
    let kubernetes = config.kubernetes.unwrap();
    assert_eq!(kubernetes.namespace.as_deref(), Some("edge"));
    assert_eq!(kubernetes.names.leader_lease, "other");
    assert!(kubernetes.edge_by_agent && !kubernetes.pod_lookup);
    let patterns = kubernetes.record_names.iter().map(ToString::to_string);
    let patterns: Vec<_> = patterns.collect();
    assert_eq!(patterns, ["*.edge.example.com", "gateway"]);
    assert_eq!(shown(config.listeners.https), "127.0.0.1:10263");
    let text = "{ kubeconfig: /nonexistent, namespace: A, recordNames: ['**'], edgeNodes: all, \
                internalService: a_b, nodesConfigMap: '' }";
    let errors = around(text, false).unwrap_err();
    for setting in [
        "--namespace",
        "--edge-nodes",
        "--record-names: \"**\": a label may have one '*'",
        "--internal-service",
        "--nodes-config-map",
    ] {
        assert_contains(&errors, setting);
    }
}

#[test]
fn cluster_is_followed_only_where_there_is_one() {
    assert_eq!(around("kubernetes: auto", false).unwrap().kubernetes, None);
    let error = around("kubernetes: on", false).unwrap_err();
    assert_contains(&error, "--kubernetes: ");
    let error = around("kubernetes: maybe", true).unwrap_err();
    assert_contains(&error, "auto, on, off");
}
