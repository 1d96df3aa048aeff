//! The keys of Node labels that the server stores for discovery and for `nodes --selector`, and the
//! names of Kubernetes.

use tunnel_process::settings::ConfigErrors;
pub(super) use tunnel_proto::wire::label::is_object_name;
pub use tunnel_proto::wire::label::{LabelKey, is_label_value};

/// Returns a text in which each character but letters and digits is `_`: the label name of Prometheus
/// and the group name of ansible.
pub fn underscored(text: &str) -> String {
    let allowed = |character: char| match character {
        'a'..='z' | 'A'..='Z' | '0'..='9' => character,
        _ => '_',
    };
    text.chars().map(allowed).collect()
}

/// Returns the keys of `--node-label`, sorted.
pub(super) fn check(texts: &[String], errors: &mut ConfigErrors) -> Vec<LabelKey> {
    let mut keys = errors.parse_list(SETTING, texts, str::parse::<LabelKey>);
    keys.sort();
    keys.dedup();
    if keys.len() > KEYS_MAX {
        errors.add(SETTING, format!("more than {KEYS_MAX} labels"));
    }
    for (position, key) in keys.iter().enumerate() {
        let name = underscored(key.as_str());
        let mut earlier = keys.iter().take(position);
        if let Some(other) = earlier.find(|other| underscored(other.as_str()) == name) {
            errors.add(
                SETTING,
                format!("{other} and {key} have one name in Prometheus, {name}; leave one out"),
            );
        }
    }
    keys
}

const SETTING: &str = "--node-label";
/// Maximum number of labels: 20,000 nodes with all of them need about 40 MB.
const KEYS_MAX: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::assert_contains;

    fn checked(texts: &[&str]) -> Result<Vec<LabelKey>, String> {
        let mut errors = ConfigErrors::default();
        let texts: Vec<String> = texts.iter().map(|text| (*text).to_owned()).collect();
        let keys = check(&texts, &mut errors);
        errors.finish(keys).map_err(|error| error.to_string())
    }

    #[test]
    fn keys_of_kubernetes_are_parsed_and_other_texts_are_not() {
        let longest = format!("{}/{}", "a".repeat(253), "b".repeat(63));
        for text in ["zone", "example.com/A_b.c-d", &longest] {
            assert_eq!(text.parse::<LabelKey>().unwrap().as_str(), text);
        }
        let long = "b".repeat(64);
        for text in [
            "", "a=b", "!a", "/a", "a/", "a/b/c", "A/b", "-a", "a-", "a b", "ä", "a\n", &long,
        ] {
            assert!(text.parse::<LabelKey>().is_err(), "{text:?}");
        }
        for (value, expected) in [("", true), ("1.2_3-X", true), ("-a", false), (&long, false)] {
            assert_eq!(is_label_value(value), expected, "{value:?}");
        }
    }

    #[test]
    fn keys_are_sorted_and_bounded_and_have_different_names_in_prometheus() {
        let keys = checked(&["zone", "example.com/rack", "zone"]).unwrap();
        let keys: Vec<_> = keys.iter().map(LabelKey::as_str).collect();
        assert_eq!(keys, ["example.com/rack", "zone"]);
        assert_eq!(underscored(keys[0]), "example_com_rack");
        let error = checked(&["a.b", "a_b"]).unwrap_err();
        assert_contains(&error, "a.b and a_b have one name in Prometheus, a_b");
        let many: Vec<String> = (0..17).map(|number| format!("label-{number}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert!(checked(&many[..16]).is_ok());
        assert_contains(&checked(&many).unwrap_err(), "more than 16 labels");
        let error = checked(&["zone=a"]).unwrap_err();
        assert_contains(&error, "--node-label: \"zone=a\" is not the key of a label");
    }
}
