use std::time::Duration;

use tunnel_process::settings::ConfigError;
use tunnel_proto::transport::CongestionControl;
use tunnel_proto::wire::enroll::{CA_HASH_BYTES, JoinToken, TOKEN_SECRET_BYTES};

use super::*;
use crate::testing::ScratchDir;

fn settings() -> RawConfig {
    RawConfig {
        server: vec!["cloud.example.com:10262".into()],
        node_name: Some("Worker-1".into()),
        ..RawConfig::default()
    }
}

fn errors(change: impl FnOnce(&mut RawConfig)) -> Vec<String> {
    refusal(change).mistakes
}

fn refusal(change: impl FnOnce(&mut RawConfig)) -> ConfigError {
    let mut settings = settings();
    change(&mut settings);
    Config::check(settings).unwrap_err()
}

fn from_yaml(yaml: &str) -> Result<RawConfig, LoadError> {
    let scratch = ScratchDir::new().unwrap();
    let path = scratch.path().join("agent.yaml");
    std::fs::write(&path, yaml).unwrap();
    layers(RawConfig::default(), Some(&path), |_| None)
}

/// Returns the configuration of settings that `change` adapts.
fn checked(change: impl FnOnce(&mut RawConfig)) -> Config {
    let mut settings = settings();
    change(&mut settings);
    Config::check(settings).unwrap()
}

#[test]
fn defaults_are_those_of_the_contract() {
    let config = Config::check(settings()).unwrap();
    assert_eq!(config.node_name.as_str(), "worker-1");
    assert_eq!(config.servers[0].to_string(), "cloud.example.com:10262");
    assert_eq!(config.data_dir, Path::new("/var/lib/tunnel-agent"));
    let localhost_ports = config.dial_policy.localhost_ports.to_string();
    assert_eq!(localhost_ports, "10250, 10255, 10266, 10267");
    let deny_ports = config.dial_policy.deny_ports.to_string();
    assert_eq!(deny_ports, "2379-2381, 10248, 10249, 10257, 10259");
    assert_eq!(config.meta_listen.unwrap().to_string(), "127.0.0.1:10266");
    assert_eq!(config.drain_timeout, Duration::from_secs(30));
    assert_eq!(config.worker_threads, 1);
    assert_eq!(config.limits, Limits::default());
    assert_eq!(config.transport, TransportChoice::Auto);
    assert_eq!(config.replicas, 2);
    assert_eq!(config.proxy.to_string(), "none");
    assert_eq!(config.quic_congestion, CongestionControl::default());
    assert_eq!(config.limits.stream_window, 2 << 20);
    assert_eq!(config.limits.dead_after, Duration::from_secs(60));
}

#[test]
fn help_shows_the_defaults_that_hold() {
    let command = crate::cli::command();
    let run = command.find_subcommand("run").unwrap();
    let config = Config::check(settings()).unwrap();
    let (policy, congestion) = (config.dial_policy, config.quic_congestion);
    for (flag, default) in [
        ("data_dir", config.data_dir.display().to_string()),
        ("localhost_ports", policy.localhost_ports.to_string()),
        ("deny_ports", policy.deny_ports.to_string()),
        ("meta_listen", config.meta_listen.unwrap().to_string()),
        ("drain_timeout", "30s".to_owned()),
        ("log_level", config.log.level.to_string()),
        ("replicas", config.replicas.to_string()),
        ("transport", "auto".to_owned()),
        ("quic_congestion", format!("{congestion:?}").to_lowercase()),
    ] {
        let flag = run.get_arguments().find(|arg| arg.get_id() == flag);
        let help = flag.unwrap().get_help().unwrap().to_string();
        assert!(help.contains(&format!("[default: {default}]")), "{help}");
    }
}

#[test]
fn flags_win_over_kubernetes_variables_and_those_over_the_file() {
    let scratch = ScratchDir::new().unwrap();
    let path = scratch.path().join("agent.yaml");
    let yaml = "server: [file:1]\nnodeName: from-file\nnodeIp: 10.0.0.1\nlogLevel: debug\nlimits:\n  keepAlive: 1s\n";
    std::fs::write(&path, yaml).unwrap();
    let variable = |name: &str| match name {
        "NODE_NAME" => Some("from-variable".to_owned()),
        "NODE_IP" => Some(String::new()),
        _ => None,
    };
    let flags = RawConfig {
        server: vec!["flag:2".into()],
        ..RawConfig::default()
    };
    let config = load(flags, Some(&path), variable).unwrap();
    assert_eq!(config.servers[0].to_string(), "flag:2");
    assert_eq!(config.node_name.as_str(), "from-variable");
    let from_file = NodeIpSetting::Fixed([10, 0, 0, 1].into());
    assert_eq!(config.node_ip, from_file);
    assert_eq!(config.log.level, tracing::level_filters::LevelFilter::DEBUG);
    assert_eq!(config.limits.keep_alive, Duration::from_secs(1));
}

#[test]
fn address_that_the_operator_set_wins_over_that_of_the_pod() {
    let of_pod = |name: &str| (name == "NODE_IP").then(|| "10.0.0.2".to_owned());
    let with = |node_ip: Option<&str>| {
        let flags = RawConfig {
            node_ip: node_ip.map(str::to_owned),
            ..settings()
        };
        load(flags, None, of_pod).unwrap().node_ip
    };
    assert_eq!(with(None), NodeIpSetting::Initial([10, 0, 0, 2].into()));
    let fixed = NodeIpSetting::Fixed([10, 0, 0, 1].into());
    assert_eq!(with(Some("10.0.0.1")), fixed);
    let unusable = |name: &str| (name == "NODE_IP").then(|| "169.254.1.1".to_owned());
    let error = load(settings(), None, unusable).unwrap_err().to_string();
    assert!(
        error.contains("NODE_IP: 169.254.1.1 is never dialed"),
        "{error}"
    );
}

#[test]
fn file_takes_numbers_where_people_write_them_and_names_what_it_does_not_know() {
    let settings =
        from_yaml("denyPorts: 2379\nlimits: {streamsPerAgent: 8, streamWindow: 128KiB}\n").unwrap();
    assert_eq!(settings.deny_ports.as_deref(), Some("2379"));
    let lists = from_yaml("denyPorts: [2379, 90-99]\nserver: a:1\n").unwrap();
    assert_eq!(lists.deny_ports.as_deref(), Some("2379, 90-99"));
    assert_eq!(lists.server, ["a:1"]);
    let limits = settings.limits.unwrap();
    assert_eq!(limits.streams_per_agent.as_deref(), Some("8"));
    for empty in ["", "# nothing yet\n", "---\n"] {
        assert_eq!(from_yaml(empty).unwrap(), RawConfig::default(), "{empty:?}");
    }
    for (yaml, named) in [
        ("proxies: x\n", "proxies"),
        ("environmentProxy: {}\n", "environmentProxy"),
        ("node-name: x\n", "node-name"),
        ("limits: {keepalive: 1s}\n", "keepalive"),
        (
            "proxies: x\nserver: {}\n",
            "line 2: server: a mapping where a list",
        ),
        (
            "node-name: x\n",
            "line 1: unknown key node-name; did you mean nodeName?",
        ),
        ("limits: {keepalive: 1s}\n", "did you mean keepAlive?"),
        (": :\n\t-", "line"),
    ] {
        let error = from_yaml(yaml).unwrap_err().to_string();
        assert!(error.contains(named), "{yaml:?}: {error}");
    }
}

#[test]
fn all_errors_are_shown_at_once() {
    let refused = refusal(|settings| {
        settings.server = vec!["no-port".into(), "::1:10262".into(), "a b:1".into()];
        settings.node_name = Some("under_score".into());
        settings.node_ip = Some("169.254.1.1".into());
        settings.replicas = Some("9".into());
        settings.transport = Some("h3".into());
        settings.proxy = Some("https://proxy.example.com".into());
        settings.quic_congestion = Some("reno".into());
        settings.localhost_ports = Some("x".into());
        settings.deny_ports = Some("9-1".into());
        settings.allow_targets = Some("10.0.0.0/8".into());
        settings.meta_listen = Some("10266".into());
        settings.drain_timeout = Some("30".into());
        settings.worker_threads = Some("0".into());
        settings.log_level = Some("loud".into());
        settings.log_format = Some("xml".into());
        settings.ca_file = Some("/nonexistent/ca".into());
        settings.token = Some("x.y".into());
        settings.limits = Some(RawLimits {
            keep_alive: Some("0s".into()),
            stream_window: Some("1".into()),
            ..RawLimits::default()
        });
    });
    let expected = [
        "--server",
        "--server",
        "--server",
        "--replicas",
        "--transport",
        "--proxy",
        "--quic-congestion",
        "--node-name",
        "--node-ip",
        "--token",
        "--meta-listen",
        "--localhost-ports",
        "--deny-ports",
        "--allow-targets",
        "--drain-timeout",
        "--worker-threads",
        "--log-level",
        "--log-format",
        "limits.streamWindow",
        "limits.keepAlive",
    ];
    let mistakes = refused.mistakes.iter();
    let names = mistakes.map(|line| line.split(':').next().unwrap());
    assert!(names.eq(expected), "{refused:#?}");
    // A later start may find the file.
    let [fact] = &refused.facts[..] else {
        panic!("{refused:#?}");
    };
    assert!(fact.starts_with("--ca-file:"), "{fact}");
    assert!(errors(|settings| settings.server.clear())[0].contains("required"));
}

#[test]
fn tokens_are_join_tokens_and_are_never_repeated() {
    let pin = Some([1; CA_HASH_BYTES]);
    let token = JoinToken::new("abcdef012345", &[0xa5; TOKEN_SECRET_BYTES], pin);
    let token = token.unwrap().reveal();
    let mut flags = settings();
    flags.token = Some(Secret(token.clone()));
    let debug = format!("{flags:?} {:?}", Config::check(flags.clone()).unwrap());
    assert!(!debug.contains("a5a5"), "{debug}");

    flags.token_file = Some("/t".into());
    assert!(Config::check(flags).unwrap_err().mistakes[0].contains("exclude"));

    let web_token = "eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJrdWJlcm5ldGVzIn0.c2lnbmF0dXJl";
    let found = errors(|settings| settings.token = Some(web_token.into()));
    assert!(found[0].contains("ServiceAccount"), "{found:?}");
    let found = errors(|settings| settings.token = Some("abcdef012345".into()));
    assert!(found[0].contains("ID.SECRET.CAHASH"), "{found:?}");
    let without_pin = token.rsplit_once('.').unwrap().0.to_owned();
    let found = errors(|settings| settings.token = Some(Secret(without_pin)));
    assert!(found[0].contains("--ca-file"), "{found:?}");
    assert!(!found[0].contains("a5a5"), "{found:?}");
    let empty = checked(|settings| settings.token = Some("".into()));
    assert_eq!(empty.token, None);
}

#[test]
fn proxy_that_is_named_means_h2_unless_quic_was_asked_for() {
    use TransportChoice::{Auto, H2, Quic};
    let (quic, environment) = (Some("quic"), ("HTTPS_PROXY", "http://env:1"));
    for (transport, proxy, variable, chosen, way) in [
        (None, None, None, Auto, "none"),
        (quic, None, None, Quic, "none"),
        (Some("h2"), None, None, H2, "none"),
        (None, Some("p:1"), None, H2, "p:1 (--proxy)"),
        (Some("auto"), Some("p:1"), None, H2, "p:1 (--proxy)"),
        (quic, Some("p:1"), None, Quic, "p:1 (--proxy)"),
        (Some("h2"), Some("p:1"), None, H2, "p:1 (--proxy)"),
        (None, None, Some(environment), Auto, "env:1 (HTTPS_PROXY)"),
        (quic, None, Some(environment), Quic, "env:1 (HTTPS_PROXY)"),
        (None, Some("p:1"), Some(environment), H2, "p:1 (--proxy)"),
        (None, Some("off"), Some(environment), Auto, "none"),
    ] {
        let flags = RawConfig {
            transport: transport.map(str::to_owned),
            proxy: proxy.map(Secret::from),
            ..settings()
        };
        let lookup = |name: &str| {
            let found = variable.filter(|(wanted, _)| *wanted == name);
            found.map(|(_, value)| value.to_owned())
        };
        let config = load(flags, None, lookup).unwrap();
        let case = (transport, proxy, variable);
        assert_eq!(config.transport, chosen, "{case:?}");
        assert_eq!(config.proxy.to_string(), way, "{case:?}");
    }
}

#[test]
fn proxy_of_a_layer_goes_before_the_environment_and_its_password_is_never_shown() {
    let shared = |name: &str| {
        let url = "http://me:hunter2@env.example.com:1";
        (name == "HTTPS_PROXY").then(|| url.to_owned())
    };
    let scratch = ScratchDir::new().unwrap();
    let path = scratch.path().join("agent.yaml");
    for (proxy, way) in [
        ("http://me:hunter2@file:2", "file:2 (--proxy)"),
        ("off", "none"),
        ("\"\"", "none"),
    ] {
        std::fs::write(&path, format!("proxy: {proxy}\n")).unwrap();
        let config = load(settings(), Some(&path), shared).unwrap();
        assert_eq!(config.proxy.to_string(), way);
        let flags = RawConfig {
            proxy: Some("http://me:hunter2@flag.example.com:3".into()),
            ..settings()
        };
        let debug = format!("{flags:?}");
        let config = load(flags, Some(&path), shared).unwrap();
        assert_eq!(config.proxy.to_string(), "flag.example.com:3 (--proxy)");
        let shown = format!("{debug} {config:?}");
        assert!(!shown.contains("hunter2"), "{shown}");
        assert!(!shown.contains("bWU6"), "{shown}");
    }

    for yaml in [
        "proxy: http://me:hunter2@p:1\n  x: y\n",
        "proxy: http://me:hunter2@p:1\nnotKnown: 1\n",
        "proxy: [http://me:hunter2@p:1]\n",
        "proxy: {http://me:hunter2@p:1}\n",
        "proxy: \"http://me:hunter2@p:1\n",
        "proxy:http://me:hunter2@p:1\n",
        "http://me:hunter2@p:1\n",
        "- http://me:hunter2@p:1\n",
    ] {
        let error = format!("{:?}", from_yaml(yaml).unwrap_err());
        assert!(!error.contains("hunter2"), "{yaml:?}: {error}");
    }
    let broken = |name: &str| (name == "https_proxy").then(|| "https://me:hunter2@p:1".to_owned());
    let error = load(settings(), None, broken).unwrap_err().to_string();
    assert!(error.contains("https_proxy: "), "{error}");
    assert!(!error.contains("hunter2"), "{error}");
}

#[test]
fn congestion_control_is_cubic_or_bbr() {
    for (text, parsed) in [
        ("cubic", CongestionControl::Cubic),
        ("bbr", CongestionControl::Bbr),
    ] {
        let config = checked(|settings| settings.quic_congestion = Some(text.into()));
        assert_eq!(config.quic_congestion, parsed);
    }
}

#[test]
fn replicas_are_1_to_8() {
    for count in [1, 8] {
        let config = checked(|settings| settings.replicas = Some(count.to_string()));
        assert_eq!(config.replicas, count);
    }
    for text in ["0", "9", "two"] {
        let found = errors(|settings| settings.replicas = Some(text.into()));
        assert!(found[0].contains("1 to 8"), "{found:?}");
    }
    let settings = from_yaml("replicas: 3\n").unwrap();
    assert_eq!(settings.replicas.as_deref(), Some("3"));
}

#[test]
fn meta_port_can_be_off() {
    let config = checked(|settings| settings.meta_listen = Some("off".into()));
    assert_eq!(config.meta_listen, None);
}

#[test]
fn listeners_for_targets_of_the_cloud_are_local_unless_they_may_be_wide() {
    let config = checked(|raw| {
        let listen = [
            "apiserver=127.0.0.1:10268",
            "apiserver=[::1]:10268",
            "x=[::ffff:169.254.2.1]:1",
        ];
        raw.cloud_listen = listen.map(str::to_owned).to_vec();
    });
    let addresses = config.cloud_listeners.iter();
    let addresses: Vec<_> = addresses.map(|at| at.address.to_string()).collect();
    let expected = ["127.0.0.1:10268", "[::1]:10268", "169.254.2.1:1"];
    assert_eq!(addresses, expected);
    assert_eq!(config.cloud_listeners[0].target.as_str(), "apiserver");
    assert_eq!(config.dial_policy.cloud_listeners.len(), 3);
    for (listen, hint) in [
        ("127.0.0.1:10268", "NAME=ADDR:PORT"),
        ("api.server=127.0.0.1:1", "DNS label"),
        ("apiserver=localhost:1", "address with a port"),
        ("apiserver=0.0.0.0:1", "--cloud-listen-wide"),
        ("apiserver=10.0.0.1:1", "--cloud-listen-wide"),
        ("apiserver=[fd00::1]:1", "--cloud-listen-wide"),
        ("apiserver=127.0.0.1:10266", "--meta-listen"),
    ] {
        let errors = errors(|raw| raw.cloud_listen = vec![listen.into()]);
        assert!(errors.len() == 1 && errors[0].contains(hint), "{errors:?}");
    }
    let off = from_yaml("cloudListen: off\n").unwrap();
    let listen = vec!["apiserver=127.0.0.1:1".to_owned()];
    assert!(
        checked(|raw| *raw = off.or(raw.clone()))
            .cloud_listeners
            .is_empty()
    );
    let also = errors(|raw| raw.cloud_listen = [vec!["off".to_owned()], listen].concat());
    assert!(also[0].contains("NAME=ADDR:PORT"), "{also:?}");
    let twice = ["a=127.0.0.1:1", "b=127.0.0.1:1"];
    let twice = errors(|raw| raw.cloud_listen = twice.map(str::to_owned).to_vec());
    assert!(twice[0].contains("set twice"), "{twice:?}");
    let wide =
        from_yaml("cloudListen: [apiserver=0.0.0.0:10268]\ncloudListenWide: true\n").unwrap();
    let wide = checked(|raw| *raw = wide.or(raw.clone()));
    assert_eq!(wide.cloud_listeners[0].address.to_string(), "0.0.0.0:10268");
}
