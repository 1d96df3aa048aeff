//! Pure plan for the nodes ConfigMap: the write that brings the records into it, if any.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::ObjectMeta;

use super::objects::{CONFIG_MAP_MAX_BYTES, RECORDS_KEY};

/// Action for the observed ConfigMap.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum HostsPlan {
    /// The ConfigMap is up to date.
    Nothing,
    /// The ConfigMap does not exist.
    Create(ConfigMap),
    /// The ConfigMap differs. The update preserves all foreign data.
    Update(ConfigMap),
    /// The records do not fit. The value is the total size of all values in bytes. The old records
    /// stay.
    TooLarge(usize),
}

/// Plans the write of a hosts text. Without a text only a missing ConfigMap is created, with an
/// empty text for pods that mount it.
pub(super) fn plan(name: &str, found: Option<&ConfigMap>, hosts: Option<&str>) -> HostsPlan {
    let Some(found) = found else {
        let text = hosts.unwrap_or_default();
        if text.len() > CONFIG_MAP_MAX_BYTES {
            return HostsPlan::TooLarge(text.len());
        }
        return HostsPlan::Create(ConfigMap {
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                ..ObjectMeta::default()
            },
            data: Some(BTreeMap::from([(RECORDS_KEY.to_owned(), text.to_owned())])),
            ..ConfigMap::default()
        });
    };
    let Some(hosts) = hosts else {
        return HostsPlan::Nothing;
    };
    let current = found.data.as_ref().and_then(|data| data.get(RECORDS_KEY));
    if current.map(String::as_str) == Some(hosts) {
        return HostsPlan::Nothing;
    }
    let bytes = hosts.len() + foreign_bytes(found);
    if bytes > CONFIG_MAP_MAX_BYTES {
        return HostsPlan::TooLarge(bytes);
    }
    let mut updated = found.clone();
    let data = updated.data.get_or_insert_default();
    data.insert(RECORDS_KEY.to_owned(), hosts.to_owned());
    HostsPlan::Update(updated)
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

    fn map(data: &[(&str, &str)]) -> ConfigMap {
        let owned = |(key, text): &(&str, &str)| ((*key).to_owned(), (*text).to_owned());
        ConfigMap {
            data: Some(data.iter().map(owned).collect()),
            ..ConfigMap::default()
        }
    }

    #[test]
    fn only_our_key_is_written_and_only_when_it_differs() {
        let found = map(&[("tunnel-nodes", "old"), ("theirs", "kept")]);
        let expected = map(&[("tunnel-nodes", "new"), ("theirs", "kept")]);
        let changed = plan("n", Some(&found), Some("new"));
        assert_eq!(changed, HostsPlan::Update(expected));
        assert_eq!(plan("n", Some(&found), Some("old")), HostsPlan::Nothing);
        assert_eq!(plan("n", Some(&found), None), HostsPlan::Nothing);
    }

    /// DNS-7, a ConfigMap without data, and a missing ConfigMap.
    #[test]
    fn missing_data_and_missing_object_are_made() {
        let empty = ConfigMap::default();
        let expected = map(&[("tunnel-nodes", "")]);
        let filled = plan("n", Some(&empty), Some(""));
        assert_eq!(filled, HostsPlan::Update(expected.clone()));
        let HostsPlan::Create(made) = plan("n", None, None) else {
            panic!("nothing is made")
        };
        assert_eq!(made.metadata.name.as_deref(), Some("n"));
        assert_eq!(made.data, expected.data);
    }

    /// T14: the bytes of foreign keys count, as they do in the API server.
    #[test]
    fn records_that_do_not_fit_are_not_written() {
        let text = "x".repeat(CONFIG_MAP_MAX_BYTES);
        assert!(matches!(plan("n", None, Some(&text)), HostsPlan::Create(_)));
        let found = map(&[("tunnel-nodes", "old"), ("theirs", "y")]);
        let refused = HostsPlan::TooLarge(CONFIG_MAP_MAX_BYTES + 1);
        assert_eq!(plan("n", Some(&found), Some(&text)), refused);
        assert_eq!(plan("n", None, Some(&format!("{text}x"))), refused);
    }
}
