//! Lists of nodes for ssh and ansible, which connect with `tunnel-server connect`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use crate::admin::status::NodeStatus;
use crate::config::underscored;

/// Returns the entry of a node for `~/.ssh/config`.
pub(super) fn ssh_entry(node: &NodeStatus) -> String {
    format!("Host {}\n  ProxyCommand {PROXY_COMMAND}\n", node.node)
}

/// An inventory for ansible: all nodes, and a group for each label.
#[derive(Debug, Default)]
pub(super) struct Inventory {
    hosts: BTreeSet<String>,
    groups: BTreeMap<String, BTreeSet<String>>,
}

impl Inventory {
    pub(super) fn add(&mut self, node: &NodeStatus) {
        for (key, value) in &node.labels {
            let group = self.groups.entry(group_name(key, value)).or_default();
            group.insert(node.node.clone());
        }
        self.hosts.insert(node.node.clone());
    }

    /// Returns the inventory in YAML.
    pub(super) fn document(&self) -> String {
        let mut text = format!(
            "all:\n  vars:\n    ansible_ssh_common_args: -o ProxyCommand=\"{PROXY_COMMAND}\"\n"
        );
        text.push_str("  hosts:");
        add_hosts(&mut text, &self.hosts, "    ");
        if !self.groups.is_empty() {
            text.push_str("  children:\n");
        }
        for (group, hosts) in &self.groups {
            let _infallible = write!(text, "    {group}:\n      hosts:");
            add_hosts(&mut text, hosts, "        ");
        }
        text
    }
}

/// Adds the hosts as the keys of a mapping. A name may look like a number.
fn add_hosts(text: &mut String, hosts: &BTreeSet<String>, margin: &str) {
    text.push_str(if hosts.is_empty() { " {}\n" } else { "\n" });
    for host in hosts {
        let _infallible = writeln!(text, "{margin}\"{host}\": {{}}");
    }
}

/// Returns the group of a label, with the characters that ansible accepts.
fn group_name(key: &str, value: &str) -> String {
    let name = underscored(&format!("{key}_{value}"));
    if name.starts_with(|first: char| first.is_ascii_digit()) {
        format!("_{name}")
    } else {
        name
    }
}

/// ssh replaces %h and %p.
const PROXY_COMMAND: &str = "tunnel-server connect %h %p";

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, labels: &[(&str, &str)]) -> NodeStatus {
        let labels = labels.iter();
        NodeStatus {
            node: name.to_owned(),
            labels: labels
                .map(|(key, value)| ((*key).into(), (*value).into()))
                .collect(),
            ..NodeStatus::default()
        }
    }

    #[test]
    fn inventory_has_all_nodes_and_a_group_for_each_label() {
        let mut inventory = Inventory::default();
        assert!(inventory.document().ends_with("  hosts: {}\n"));
        inventory.add(&node("cam-1", &[("zone", "north")]));
        inventory.add(&node("7", &[("zone", "north"), ("a.b/c", "x-1")]));
        let expected = "\
all:
  vars:
    ansible_ssh_common_args: -o ProxyCommand=\"tunnel-server connect %h %p\"
  hosts:
    \"7\": {}
    \"cam-1\": {}
  children:
    a_b_c_x_1:
      hosts:
        \"7\": {}
    zone_north:
      hosts:
        \"7\": {}
        \"cam-1\": {}
";
        assert_eq!(inventory.document(), expected);
    }
}
