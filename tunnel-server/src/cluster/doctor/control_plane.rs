//! What the mirror Pod of a kube-apiserver shows of its flags and its resolver. Pure.

use serde_json::Value;

/// The part of a kube-apiserver's Pod that decides how it reaches kubelets. Other flags, which may
/// hold secrets, are not copied.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ApiServerFacts {
    pub(crate) pod: String,
    /// The value of `--egress-selector-config-file`.
    pub(crate) egress_selector: Option<String>,
    /// The value of `--kubelet-preferred-address-types`.
    pub(crate) address_types: Option<String>,
    /// The value of `--kubelet-certificate-authority`.
    pub(crate) kubelet_ca: Option<String>,
    pub(crate) dns_policy: String,
    /// Name servers of `dnsConfig`.
    pub(crate) nameservers: Vec<String>,
}

impl ApiServerFacts {
    /// Returns the facts of a Pod, or `None` if it has no container of kube-apiserver.
    pub(super) fn of_pod(pod: &Value) -> Option<Self> {
        let spec = &pod["spec"];
        let mut containers = spec["containers"].as_array()?.iter();
        let words = containers.find_map(|container| {
            let words = |key: &str| container[key].as_array().into_iter().flatten();
            let words = words("command").chain(words("args"));
            let words = command_words(words.filter_map(Value::as_str));
            let is_api_server =
                container["name"] == PROGRAM || words.iter().any(|word| word == PROGRAM);
            is_api_server.then_some(words)
        })?;
        let flag = |name: &str| flag(&words, name);
        let nameservers = spec["dnsConfig"]["nameservers"].as_array();
        Some(Self {
            pod: pod["metadata"]["name"].as_str()?.to_owned(),
            egress_selector: flag("--egress-selector-config-file"),
            address_types: flag("--kubelet-preferred-address-types"),
            kubelet_ca: flag("--kubelet-certificate-authority"),
            dns_policy: spec["dnsPolicy"].as_str().unwrap_or_default().to_owned(),
            nameservers: nameservers
                .into_iter()
                .flatten()
                .filter_map(|server| Some(server.as_str()?.to_owned()))
                .collect(),
        })
    }
}

/// Returns the words of a command as kubeadm writes them, from any form that installers use: a program
/// by its path, a shell's command line, a value in a word of its own or in quotes, and `_` for `-` in
/// the name of a flag.
pub(crate) fn command_words<'a>(words: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let words = words.into_iter().flat_map(str::split_whitespace);
    for word in words {
        let word = word.replace(['"', '\''], "");
        let name = word.rsplit('/').next().unwrap_or_default();
        // Flags without a value, as those of a wrapper, may stand before the program.
        let waits = name != PROGRAM
            && found
                .last()
                .is_some_and(|last| last.starts_with("--") && !last.contains('='));
        match word.strip_prefix("--") {
            Some("") => {}
            Some(flag) => found.push(match flag.split_once('=') {
                Some((name, value)) => format!("--{}={value}", name.replace('_', "-")),
                None => format!("--{}", flag.replace('_', "-")),
            }),
            None if waits => {
                let last = found.last_mut();
                last.into_iter()
                    .for_each(|last| *last += &format!("={word}"));
            }
            None => found.push(name.to_owned()),
        }
    }
    found
}

/// Returns the value of a flag in the words of [`command_words`]. The last one counts.
fn flag(words: &[String], name: &str) -> Option<String> {
    let mut values = words.iter().filter_map(|word| {
        let value = word.strip_prefix(name)?;
        value.strip_prefix('=').map(str::to_owned)
    });
    values.next_back()
}

/// The program of kube-apiserver, also as the first argument of hyperkube.
const PROGRAM: &str = "kube-apiserver";

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn flags_and_resolver_are_read_from_the_pod() {
        let pod = json!({
            "metadata": {"name": "kube-apiserver-a"},
            "spec": {
                "dnsPolicy": "None",
                "dnsConfig": {"nameservers": ["10.96.0.10", "192.0.2.53"]},
                "containers": [{
                    "name": "kube-apiserver",
                    "command": ["kube-apiserver", "--egress-selector-config-file=/etc/egress.yaml"],
                    "args": ["--kubelet-preferred-address-types", "Hostname,InternalIP"],
                }],
            },
        });
        let expected = ApiServerFacts {
            pod: "kube-apiserver-a".into(),
            egress_selector: Some("/etc/egress.yaml".into()),
            address_types: Some("Hostname,InternalIP".into()),
            kubelet_ca: None,
            dns_policy: "None".into(),
            nameservers: vec!["10.96.0.10".into(), "192.0.2.53".into()],
        };
        assert_eq!(ApiServerFacts::of_pod(&pod), Some(expected));
        assert_eq!(ApiServerFacts::of_pod(&json!({})), None);
    }

    #[test]
    fn last_flag_counts_and_a_longer_name_is_another_flag() {
        let words = command_words(["--a=1", "--a-b=2", "--a", "3", "--c"]);
        assert_eq!(flag(&words, "--a").as_deref(), Some("3"));
        assert_eq!(flag(&words, "--c"), None);
    }

    #[test]
    fn container_and_flags_are_found_in_each_form_that_installers_write() {
        let types = "kubelet-preferred-address-types";
        let forms = [
            json!([
                "/usr/local/bin/kube-apiserver",
                format!("--{types}=InternalIP")
            ]),
            json!(["kube-apiserver", format!("--{types}=\"InternalIP\"")]),
            json!([
                "/hyperkube",
                "kube-apiserver",
                format!("--{types}"),
                "InternalIP"
            ]),
            json!([
                "kube-apiserver",
                format!("--{}=InternalIP", types.replace('-', "_"))
            ]),
            json!([
                "/go-runner",
                "--log-file=/var/log/x",
                "--also-stdout",
                "/usr/local/bin/kube-apiserver",
                format!("--{types}=InternalIP")
            ]),
            json!([
                "tini",
                "--",
                "kube-apiserver",
                format!("--{types}=InternalIP")
            ]),
            json!([
                "/bin/sh",
                "-c",
                format!(
                    "tee -a /var/log/x & exec /usr/bin/kube-apiserver --v=2 --{types}=InternalIP > /tmp/pipe 2>&1"
                ),
            ]),
        ];
        for command in forms {
            let containers = json!([{"name": "sidecar"}, {"name": "api", "command": command}]);
            let pod = json!({"metadata": {"name": "a"}, "spec": {"containers": containers}});
            let facts = ApiServerFacts::of_pod(&pod).unwrap();
            assert_eq!(
                facts.address_types.as_deref(),
                Some("InternalIP"),
                "{command}"
            );
        }
        let other = json!([{"name": "sidecar", "command": ["sleep"]}]);
        let pod = json!({"metadata": {"name": "a"}, "spec": {"containers": other}});
        assert_eq!(ApiServerFacts::of_pod(&pod), None);
    }
}
