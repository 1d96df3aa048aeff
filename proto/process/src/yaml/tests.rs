use std::fmt::Write as _;

use super::*;

#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct Settings {
    data_dir: Option<String>,
    token_file: Option<String>,
    advertise: Vec<String>,
    #[serde(deserialize_with = "text_or_list")]
    proxy_ports: Option<String>,
    services: Vec<Service>,
    limits: Option<Limits>,
}

#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Service {
    name: String,
    target: String,
    protocol: Option<String>,
}

#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct Limits {
    open_timeout: Option<String>,
    streams_per_agent: Option<String>,
}

fn settings(text: &str) -> Settings {
    let parsed = parse(text).unwrap_or_else(|error| panic!("{text:?}: {error}"));
    parsed.unwrap_or_default()
}

fn mistakes(text: &str) -> Vec<String> {
    parse::<Settings>(text).unwrap_err().0
}

#[test]
fn every_mistake_has_its_line_and_the_key_that_is_meant() {
    for (text, expected) in [
        (
            "dataDri: /a\nadvertise: [a]\ntoken-file: /b\nzebra: 1\n",
            &[
                "line 1: unknown key dataDri; did you mean dataDir?",
                "line 3: unknown key token-file; did you mean tokenFile?",
                "line 4: unknown key zebra",
            ][..],
        ),
        (
            "limits:\n  openTimout: 1s\n  streamsPerAgent: [8]\n  streamWindow: 1\n",
            &[
                "line 2: limits: unknown key openTimout; did you mean openTimeout?",
                "line 3: limits.streamsPerAgent: a list where a single value is expected",
                "line 4: limits: unknown key streamWindow",
            ][..],
        ),
        (
            "dataDir: [a]\ntokenFile: {a: b}\nadvertise: {a: b}\nservices: tcp\nlimits: 5\n",
            &[
                "line 1: dataDir: a list where a single value is expected",
                "line 2: tokenFile: a mapping where a single value is expected",
                "line 3: advertise: a mapping where a list is expected",
                "line 4: services: a single value where a mapping is expected",
                "line 5: limits: a single value where a mapping is expected",
            ][..],
        ),
        (
            "services:\n- {name: a, target: 1, prot: tcp}\n- {name: [], target: 2}\n- name: c\n",
            &[
                "line 2: services[0]: unknown key prot",
                "line 3: services[1].name: a list where a single value is expected",
                "line 4: services[2]: target is missing",
            ],
        ),
        (
            "advertise: [a, [b], ~]\nproxyPorts: {a: 1}\n",
            &[
                "line 1: advertise[1]: a list where a single value is expected",
                "line 1: advertise[2]: no value where a single value is expected",
                "line 2: proxyPorts: a mapping where a list is expected",
            ][..],
        ),
        (
            "just a text\n",
            &["line 1: a single value where a mapping is expected"][..],
        ),
    ] {
        assert_eq!(mistakes(text), expected, "{text:?}");
    }
}

#[test]
fn single_value_is_a_list_and_ports_may_be_one() {
    assert_eq!(settings("advertise: a:1").advertise, ["a:1"]);
    assert_eq!(settings("advertise: [a, b]").advertise, ["a", "b"]);
    assert_eq!(settings("advertise:").advertise, [] as [&str; 0]);
    for (text, expected) in [
        ("proxyPorts: 9100", Some("9100")),
        ("proxyPorts: 9100, 80-90", Some("9100, 80-90")),
        ("proxyPorts: [9100, 80-90, '443']", Some("9100, 80-90, 443")),
        ("proxyPorts:\n- 9100\n- 80", Some("9100, 80")),
        ("proxyPorts: ''", Some("")),
        ("proxyPorts: []", Some("")),
        ("proxyPorts:", None),
        ("{}", None),
    ] {
        assert_eq!(settings(text).proxy_ports.as_deref(), expected, "{text}");
    }
}

#[test]
fn values_are_read_as_written() {
    for (value, expected) in [
        ("0755", Some("0755")),
        ("1.10", Some("1.10")),
        ("1_000", Some("1_000")),
        ("0x10  # hexadecimal", Some("0x10")),
        ("-5", Some("-5")),
        ("off", Some("off")),
        ("True", Some("True")),
        (".inf", Some(".inf")),
        ("1e999", Some("1e999")),
        ("!!int 8", Some("8")),
        ("&name 8", Some("8")),
        ("\"8\"", Some("8")),
        ("'~'", Some("~")),
        ("ü: 8", None),
        ("~", None),
        ("", None),
    ] {
        let text = format!("# größer\n\ntokenFile: ü\ndataDir: {value}\n");
        let parsed = parse::<Settings>(&text).ok().flatten();
        let data_dir = parsed.and_then(|settings| settings.data_dir);
        assert_eq!(data_dir.as_deref(), expected, "{value:?}");
    }
    let text = "tokenFile: &a 0755\ndataDir: *a\nlimits: &b {openTimeout: 1s}\n";
    let read = settings(text);
    assert_eq!(read.data_dir.as_deref(), Some("0755"));
}

#[test]
fn file_without_settings_is_none() {
    for text in ["", "# nothing\n", "---\n", "~\n"] {
        assert_eq!(parse::<Settings>(text).unwrap(), None, "{text:?}");
    }
}

#[test]
fn messages_are_bounded_and_contain_no_value() {
    let mut text = String::new();
    for index in 0..MANY {
        writeln!(text, "unknown{index}: secret").unwrap();
    }
    let found = mistakes(&text);
    assert!(found.len() < 40, "{}", found.len());
    assert!(found.last().unwrap().starts_with("and "), "{found:?}");
    let long = format!("{}: secret\ndataDir: [secret]\n", "k".repeat(900));
    let text = YamlError(mistakes(&long)).to_string();
    assert!(text.len() < 300 && !text.contains("secret"), "{text}");
    let unclosed = YamlError(mistakes("dataDir: 'secret\n")).to_string();
    assert!(!unclosed.contains("secret"), "{unclosed}");
}

#[test]
fn hostile_files_end_at_a_limit_of_the_parser() {
    let lists = format!("advertise: {}", "[".repeat(100_000));
    let blocks: String = (0..1000).fold(String::new(), |mut text, depth| {
        let _always_ok = writeln!(text, "{}a:", " ".repeat(depth));
        text
    });
    let many = format!("advertise: [{}]", "a,".repeat(1 << 20));
    let mut aliases = "a: &a [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
    for (above, name) in ('a'..='h').zip('b'..='i') {
        let repeated = format!("*{above},").repeat(10);
        writeln!(aliases, "{name}: &{name} [{repeated}]").unwrap();
    }
    for text in [lists, blocks, many, aliases] {
        let found = mistakes(&text);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].len() < 500, "{}", found[0]);
    }
}

/// More mistakes than a message contains.
const MANY: usize = 1000;
