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
        let container = containers.find(|container| container["name"] == "kube-apiserver")?;
        let words = |key: &str| container[key].as_array().into_iter().flatten();
        let words: Vec<&str> = words("command")
            .chain(words("args"))
            .filter_map(Value::as_str)
            .collect();
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

/// Returns the value of a flag, in the form `--name=value` or `--name value`. The last one counts.
fn flag(words: &[&str], name: &str) -> Option<String> {
    let mut value = None;
    let mut words = words.iter();
    while let Some(word) = words.next() {
        if *word == name {
            value = words.next().copied();
        } else if let Some(inline) = word.strip_prefix(name)
            && let Some(inline) = inline.strip_prefix('=')
        {
            value = Some(inline);
        }
    }
    value.map(str::to_owned)
}

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
        let words = ["--a=1", "--a-b=2", "--a", "3", "--c"];
        assert_eq!(flag(&words, "--a").as_deref(), Some("3"));
        assert_eq!(flag(&words, "--c"), None);
    }
}
