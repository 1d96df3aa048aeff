//! Pure plan for the nodes ConfigMap: the write that brings the records into it, if any.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::ObjectMeta;

use super::objects::{CONFIG_MAP_MAX_BYTES, RECORDS_KEY};
use tunnel_dns::{LeftOut, RecordSet};

/// The write of the nodes ConfigMap, and the records that do not fit into it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct HostsPlan {
    pub(super) action: HostsAction,
    pub(super) left_out: Option<LeftOut>,
}

/// Action for the observed ConfigMap.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum HostsAction {
    /// The ConfigMap is up to date.
    Nothing,
    /// The ConfigMap does not exist.
    Create(ConfigMap),
    /// The ConfigMap differs. The update preserves all foreign data.
    Update(ConfigMap),
}

/// Plans the write of the records that fit next to foreign data. Without records only a missing
/// ConfigMap is created, with an empty text for pods that mount it.
pub(super) fn plan(
    name: &str,
    found: Option<&ConfigMap>,
    records: Option<&RecordSet>,
) -> HostsPlan {
    let hosts = records.map(|records| records.hosts_within(capacity(found)));
    let (text, left_out) = hosts.map_or((None, None), |hosts| (Some(hosts.text), hosts.left_out));
    let action = match (found, text) {
        (None, text) => HostsAction::Create(ConfigMap {
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                ..ObjectMeta::default()
            },
            data: Some(BTreeMap::from([(
                RECORDS_KEY.to_owned(),
                text.unwrap_or_default(),
            )])),
            ..ConfigMap::default()
        }),
        (Some(_), None) => HostsAction::Nothing,
        (Some(found), Some(text)) => {
            let current = found.data.as_ref().and_then(|data| data.get(RECORDS_KEY));
            if current == Some(&text) {
                HostsAction::Nothing
            } else {
                let mut updated = found.clone();
                let data = updated.data.get_or_insert_default();
                data.insert(RECORDS_KEY.to_owned(), text);
                HostsAction::Update(updated)
            }
        }
    };
    HostsPlan { action, left_out }
}

/// Returns the number of bytes for the records next to foreign data.
pub(super) fn capacity(found: Option<&ConfigMap>) -> usize {
    CONFIG_MAP_MAX_BYTES.saturating_sub(found.map_or(0, foreign_bytes))
}

fn foreign_bytes(map: &ConfigMap) -> usize {
    let data = map.data.iter().flatten();
    let texts = data.filter(|(key, _)| *key != RECORDS_KEY);
    let binary = map.binary_data.iter().flatten();
    texts.map(|(_, text)| text.len()).sum::<usize>()
        + binary.map(|(_, bytes)| bytes.0.len()).sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tunnel_dns::Addresses;

    fn map(data: &[(&str, &str)]) -> ConfigMap {
        let owned = |(key, text): &(&str, &str)| ((*key).to_owned(), (*text).to_owned());
        ConfigMap {
            data: Some(data.iter().map(owned).collect()),
            ..ConfigMap::default()
        }
    }

    fn records(names: &[&str]) -> RecordSet {
        let address = Addresses::first_of(["10.0.0.1".parse().unwrap()]);
        RecordSet::of(names.iter().map(|name| (name.parse().unwrap(), address)))
    }

    fn action(found: Option<&ConfigMap>, records: Option<&RecordSet>) -> HostsAction {
        let plan = plan("n", found, records);
        assert_eq!(plan.left_out, None);
        plan.action
    }

    #[test]
    fn only_our_key_is_written_and_only_when_it_differs() {
        let found = map(&[("tunnel-nodes", "10.0.0.1\ta"), ("theirs", "kept")]);
        let expected = map(&[("tunnel-nodes", "10.0.0.1\tb"), ("theirs", "kept")]);
        let changed = action(Some(&found), Some(&records(&["b"])));
        assert_eq!(changed, HostsAction::Update(expected));
        let same = action(Some(&found), Some(&records(&["a"])));
        assert_eq!(same, HostsAction::Nothing);
        assert_eq!(action(Some(&found), None), HostsAction::Nothing);
    }

    /// DNS-7, a ConfigMap without data, and a missing ConfigMap.
    #[test]
    fn missing_data_and_missing_object_are_made() {
        let empty = ConfigMap::default();
        let expected = map(&[("tunnel-nodes", "")]);
        let filled = action(Some(&empty), Some(&records(&[])));
        assert_eq!(filled, HostsAction::Update(expected.clone()));
        let HostsAction::Create(made) = action(None, None) else {
            panic!("nothing is made")
        };
        assert_eq!(made.metadata.name.as_deref(), Some("n"));
        assert_eq!(made.data, expected.data);
    }

    /// T14: the bytes of foreign keys count, as they do in the API server. A record that is removed
    /// makes room for the next one.
    #[test]
    fn records_that_fit_are_written_and_the_others_are_counted() {
        let both = "10.0.0.1\ta\n10.0.0.1\tb";
        let full = |records: &str| {
            let theirs = "x".repeat(CONFIG_MAP_MAX_BYTES - "10.0.0.1\ta".len());
            map(&[("tunnel-nodes", records), ("theirs", &theirs)])
        };
        let planned = plan("n", Some(&full(both)), Some(&records(&["a", "b", "c"])));
        let action = HostsAction::Update(full("10.0.0.1\ta"));
        let left_out = LeftOut {
            first: "b".parse().unwrap(),
            names: 2,
        };
        let left_out = Some(left_out);
        assert_eq!(planned, HostsPlan { action, left_out });
        let planned = plan("n", Some(&full("10.0.0.1\ta")), Some(&records(&["b"])));
        let action = HostsAction::Update(full("10.0.0.1\tb"));
        let left_out = None;
        assert_eq!(planned, HostsPlan { action, left_out });
    }
}
