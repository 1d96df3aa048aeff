//! Pure parser for the ports ConfigMap. Valid entries become the port policy of the listeners.
//! Invalid entries are reported and do not affect the others.

use std::collections::{BTreeMap, BTreeSet};

use tunnel_proto::process::settings::PortSet;
use tunnel_proto::wire::name::Port;

use super::objects::{HTTP_PORTS_KEY, HTTPS_PORTS_KEY, LOCALHOST_PORTS_KEY, PORT_PAIRS_KEY};
use crate::config::LOCALHOST_PORTS;
use crate::policy::PortPolicy;

/// Maximum number of reported entries per list. Further entries are only counted.
const MISTAKES_MAX: usize = 20;
/// Maximum number of characters shown of an entry.
const SHOWN_MAX: usize = 40;

/// Content of a ports ConfigMap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ParsedPorts {
    /// Port policy of the listeners.
    pub(super) policy: PortPolicy,
    /// Ignored entries with the reasons.
    pub(super) mistakes: Vec<String>,
}

/// Parses the values of the ConfigMap. `http_port` is the port of the HTTP listener, which pairs of
/// the deprecated key must name. `own` are the ports of the tunnel itself.
pub(super) fn read(data: &BTreeMap<String, String>, http_port: u16, own: &[Port]) -> ParsedPorts {
    let mut mistakes = Vec::new();
    let text = |key: &str| data.get(key).map(String::as_str);
    let mut http = list(
        HTTP_PORTS_KEY,
        text(HTTP_PORTS_KEY).unwrap_or(""),
        &mut mistakes,
    );
    let pairs = text(PORT_PAIRS_KEY).unwrap_or("");
    http.extend(pair_list(pairs, http_port, &mut mistakes));
    let https = list(
        HTTPS_PORTS_KEY,
        text(HTTPS_PORTS_KEY).unwrap_or(""),
        &mut mistakes,
    );
    let localhost = text(LOCALHOST_PORTS_KEY).unwrap_or(LOCALHOST_PORTS);
    let localhost = list(LOCALHOST_PORTS_KEY, localhost, &mut mistakes);
    ParsedPorts {
        policy: PortPolicy {
            http: PortSet::of(http),
            https: PortSet::of(https),
            localhost: PortSet::of(localhost),
            own: own.to_vec(),
        },
        mistakes,
    }
}

/// Parses a list such as `9100, 9256`. Entries are separated by commas. Blanks around entries and
/// empty entries are ignored.
fn list(key: &str, text: &str, mistakes: &mut Vec<String>) -> BTreeSet<Port> {
    entries(key, text, mistakes, |entry| {
        entry
            .parse()
            .map_err(|_error| "not a port from 1 to 65535".to_owned())
    })
}

/// Parses pairs such as `9100=10264, 9256=10264`. A text without `=` is a plain list.
fn pair_list(text: &str, http_port: u16, mistakes: &mut Vec<String>) -> BTreeSet<Port> {
    if !text.contains('=') {
        return list(PORT_PAIRS_KEY, text, mistakes);
    }
    entries(PORT_PAIRS_KEY, text, mistakes, |entry| {
        let pair = entry.split_once('=');
        let port = pair.and_then(|(port, target_port)| {
            let is_http = target_port.trim().parse::<u16>() == Ok(http_port);
            if is_http {
                port.trim().parse().ok()
            } else {
                None
            }
        });
        port.ok_or_else(|| format!("not PORT={http_port} (the port of the HTTP listener)"))
    })
}

fn entries(
    key: &str,
    text: &str,
    mistakes: &mut Vec<String>,
    read: impl Fn(&str) -> Result<Port, String>,
) -> BTreeSet<Port> {
    let mut ports = BTreeSet::new();
    let mut bad = 0;
    for entry in text
        .split(',')
        .map(str::trim)
        .filter(|entry| !entry.is_empty())
    {
        match read(entry) {
            Ok(port) => {
                ports.insert(port);
            }
            Err(problem) => {
                bad += 1;
                if bad <= MISTAKES_MAX {
                    let shown: String = entry.chars().take(SHOWN_MAX).collect();
                    mistakes.push(format!("{key}: {shown:?} is {problem}"));
                }
            }
        }
    }
    if bad > MISTAKES_MAX {
        mistakes.push(format!("{key}: {} more", bad - MISTAKES_MAX));
    }
    ports
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(entries: &[(&str, &str)]) -> BTreeMap<String, String> {
        let entries = entries.iter();
        entries
            .map(|(key, text)| ((*key).to_owned(), (*text).to_owned()))
            .collect()
    }

    fn read_from(entries: &[(&str, &str)]) -> ParsedPorts {
        read(&data(entries), 10264, &[])
    }

    /// The reading half of DNS-3.
    #[test]
    fn bad_entries_are_named_and_the_rest_applies() {
        let parsed = read_from(&[("https-proxy-ports", "9100, 9100,,70000,abc, 10250")]);
        assert_eq!(parsed.policy.https.to_string(), "9100, 10250");
        assert_eq!(parsed.policy.extra_ports().count(), 1);
        assert_eq!(
            parsed.mistakes,
            [
                "https-proxy-ports: \"70000\" is not a port from 1 to 65535",
                "https-proxy-ports: \"abc\" is not a port from 1 to 65535",
            ]
        );
    }

    #[test]
    fn leading_zeros_signs_and_ranges_make_no_second_name() {
        let parsed = read_from(&[(
            "http-proxy-ports",
            "09100,9100,+9100,9200-9300,0, 65536,9100=",
        )]);
        assert_eq!(parsed.policy.http.to_string(), "9100");
        assert_eq!(parsed.mistakes.len(), 5, "{:?}", parsed.mistakes);
    }

    #[test]
    fn pairs_count_when_they_name_the_http_listener() {
        for (text, ports, mistakes) in [
            ("9100=10264, 9200 = 10264", "9100, 9200", 0),
            ("9100=10263,9200=10264,x=10264", "9200", 2),
            ("9100,9200", "9100, 9200", 0),
            ("9100,9200=10264", "9200", 1),
        ] {
            let parsed = read_from(&[("dnat-ports-pair", text)]);
            assert_eq!(parsed.policy.http.to_string(), ports, "{text}");
            assert_eq!(parsed.mistakes.len(), mistakes, "{text}");
        }
    }

    #[test]
    fn localhost_ports_have_a_default_only_while_the_key_is_absent() {
        assert_eq!(read_from(&[]).policy.localhost.to_string(), "10266, 10267");
        let parsed = read_from(&[("localhost-proxy-ports", "")]);
        assert_eq!(parsed.policy.localhost.to_string(), "");
    }

    #[test]
    fn floods_of_mistakes_are_counted() {
        let text = vec!["x"; 5000].join(",");
        let parsed = read_from(&[("http-proxy-ports", &text)]);
        assert_eq!(parsed.mistakes.len(), MISTAKES_MAX + 1);
        assert_eq!(
            parsed.mistakes.last().map(String::as_str),
            Some("http-proxy-ports: 4980 more")
        );
    }
}
