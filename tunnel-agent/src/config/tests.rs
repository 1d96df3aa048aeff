use std::net::IpAddr;
use std::time::Duration;

use tunnel_proto::wire::enroll::{CA_HASH_BYTES, JoinToken, TOKEN_SECRET_BYTES};

use super::*;

fn settings() -> Settings {
    Settings {
        server: vec!["cloud.example.com:10262".into()],
        node_name: Some("Worker-1".into()),
        ..Settings::default()
    }
}

fn mistakes(change: impl FnOnce(&mut Settings)) -> Vec<String> {
    let mut settings = settings();
    change(&mut settings);
    Config::check(settings).unwrap_err().0
}

fn from_yaml(yaml: &str) -> Result<Settings, LoadError> {
    let path = std::env::temp_dir().join(format!(
        "culvert-agent-config-{}-{:p}",
        std::process::id(),
        yaml
    ));
    std::fs::write(&path, yaml).unwrap();
    let settings = layers(Settings::default(), Some(&path), |_| None);
    std::fs::remove_file(path).unwrap();
    settings
}

#[test]
fn defaults_are_those_of_the_contract() {
    let config = Config::check(settings()).unwrap();
    assert_eq!(config.node_name.as_str(), "worker-1");
    assert_eq!(config.servers[0].to_string(), "cloud.example.com:10262");
    assert_eq!(config.data_dir, Path::new("/var/lib/tunnel-agent"));
    assert_eq!(
        config.ceiling.localhost_ports.to_string(),
        "10250, 10255, 10266, 10267"
    );
    assert_eq!(
        config.ceiling.deny_ports.to_string(),
        "2379-2381, 10248, 10249, 10257, 10259"
    );
    assert_eq!(config.meta_listen.unwrap().to_string(), "127.0.0.1:10266");
    assert_eq!(config.drain_timeout, Duration::from_secs(30));
    assert_eq!(config.limits, Limits::default());
    assert_eq!(config.limits.stream_window, 2 << 20);
    assert_eq!(config.limits.dead_after, Duration::from_secs(60));
}

#[test]
fn help_shows_the_defaults_that_hold() {
    let command = crate::cli::command();
    let run = command.find_subcommand("run").unwrap();
    let config = Config::check(settings()).unwrap();
    for (flag, default) in [
        ("data_dir", config.data_dir.display().to_string()),
        (
            "localhost_ports",
            config.ceiling.localhost_ports.to_string(),
        ),
        ("deny_ports", config.ceiling.deny_ports.to_string()),
        ("meta_listen", config.meta_listen.unwrap().to_string()),
        ("drain_timeout", "30s".to_owned()),
        ("log_level", config.log_level.to_string()),
        ("transport", "auto".to_owned()),
    ] {
        let flag = run
            .get_arguments()
            .find(|arg| arg.get_id() == flag)
            .unwrap();
        let help = flag.get_help().unwrap().to_string();
        assert!(help.contains(&format!("[default: {default}]")), "{help}");
    }
}

#[test]
fn flags_win_over_kubernetes_variables_and_those_over_the_file() {
    let path = std::env::temp_dir().join(format!("culvert-agent-layers-{}", std::process::id()));
    std::fs::write(
        &path,
        "server: [file:1]\nnodeName: from-file\nnodeIp: 10.0.0.1\nlogLevel: debug\nlimits:\n  keepAlive: 1s\n",
    )
    .unwrap();
    let variable = |name: &str| match name {
        "NODE_NAME" => Some("from-variable".to_owned()),
        "NODE_IP" => Some(String::new()),
        _ => None,
    };
    let given = Settings {
        server: vec!["flag:2".into()],
        ..Settings::default()
    };
    let config = load(given, Some(&path), variable).unwrap();
    assert_eq!(config.servers[0].to_string(), "flag:2");
    assert_eq!(config.node_name.as_str(), "from-variable");
    assert_eq!(config.node_ip, Some(IpAddr::from([10, 0, 0, 1])));
    assert_eq!(config.log_level, tracing::level_filters::LevelFilter::DEBUG);
    assert_eq!(config.limits.keep_alive, Duration::from_secs(1));
    std::fs::remove_file(path).unwrap();
}

#[test]
fn file_takes_numbers_where_people_write_them_and_names_what_it_does_not_know() {
    let settings =
        from_yaml("denyPorts: 2379\nlimits: {streamsPerAgent: 8, streamWindow: 128KiB}\n").unwrap();
    assert_eq!(settings.deny_ports.as_deref(), Some("2379"));
    let limits = settings.limits.unwrap();
    assert_eq!(limits.streams_per_agent.as_deref(), Some("8"));
    for empty in ["", "# nothing yet\n", "---\n"] {
        assert_eq!(from_yaml(empty).unwrap(), Settings::default(), "{empty:?}");
    }
    for (yaml, named) in [
        ("proxy: x\n", "proxy"),
        ("node-name: x\n", "node-name"),
        ("limits: {keepalive: 1s}\n", "keepalive"),
        ("server: 5\n", "server"),
        (": :\n\t-", "line"),
    ] {
        let error = from_yaml(yaml).unwrap_err().to_string();
        assert!(error.contains(named), "{yaml:?}: {error}");
    }
}

#[test]
fn all_mistakes_are_shown_at_once() {
    let found = mistakes(|settings| {
        settings.server = vec!["no-port".into(), "::1:10262".into(), "a b:1".into()];
        settings.node_name = Some("under_score".into());
        settings.node_ip = Some("169.254.1.1".into());
        settings.transport = Some("h2".into());
        settings.localhost_ports = Some("x".into());
        settings.deny_ports = Some("9-1".into());
        settings.allow_targets = Some("10.0.0.0/8".into());
        settings.meta_listen = Some("10266".into());
        settings.drain_timeout = Some("30".into());
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
    let names: Vec<&str> = found
        .iter()
        .map(|line| line.split(':').next().unwrap())
        .collect();
    assert_eq!(
        names,
        [
            "--server",
            "--server",
            "--server",
            "--transport",
            "--node-name",
            "--node-ip",
            "--token",
            "--ca-file",
            "--localhost-ports",
            "--deny-ports",
            "--allow-targets",
            "--meta-listen",
            "--drain-timeout",
            "--log-level",
            "--log-format",
            "limits.streamWindow",
            "limits.keepAlive",
        ],
        "{found:#?}"
    );
    assert!(mistakes(|settings| settings.server.clear())[0].contains("required"));
}

#[test]
fn tokens_are_join_tokens_and_are_never_repeated() {
    let token = JoinToken::new(
        "abcdef012345",
        &[0xa5; TOKEN_SECRET_BYTES],
        Some([1; CA_HASH_BYTES]),
    )
    .unwrap()
    .reveal();
    let mut given = settings();
    given.token = Some(Secret(token.clone()));
    let debug = format!("{given:?} {:?}", Config::check(given.clone()).unwrap());
    assert!(!debug.contains("a5a5"), "{debug}");

    given.token_file = Some("/t".into());
    assert!(Config::check(given).unwrap_err().0[0].contains("exclude"));

    let web_token = "eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJrdWJlcm5ldGVzIn0.c2lnbmF0dXJl";
    let found = mistakes(|settings| settings.token = Some(web_token.into()));
    assert!(found[0].contains("ServiceAccount"), "{found:?}");
    let found = mistakes(|settings| settings.token = Some("abcdef012345".into()));
    assert!(found[0].contains("ID.SECRET.CAHASH"), "{found:?}");
    let without_pin = token.rsplit_once('.').unwrap().0.to_owned();
    let found = mistakes(|settings| settings.token = Some(Secret(without_pin)));
    assert!(
        found[0].contains("--ca-file") && !found[0].contains("a5a5"),
        "{found:?}"
    );
    let empty = Settings {
        token: Some("".into()),
        ..settings()
    };
    assert_eq!(Config::check(empty).unwrap().token, None);
}

#[test]
fn meta_port_can_be_off() {
    let off = Settings {
        meta_listen: Some("off".into()),
        ..settings()
    };
    assert_eq!(Config::check(off).unwrap().meta_listen, None);
}

#[test]
fn table_of_limits_holds_every_limit() {
    let names: Vec<&str> = LIMITS.iter().map(|(name, _, _)| *name).collect();
    assert_eq!(
        names,
        [
            "handshakeTimeout",
            "targetDialTimeout",
            "requestHeadTimeout",
            "streamWindow",
            "streamsPerAgent",
            "keepAlive",
            "deadAfter"
        ]
    );
    assert!(LIMITS.iter().all(|(_, _, doc)| doc.ends_with('.')));
}
