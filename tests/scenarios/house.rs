//! Rules of the house that a compiler does not check.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use tunnel_tests::reference::{PAGES, render};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

#[test]
fn crates_depend_on_each_other_as_the_map_says() {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--format-version=1", "--no-deps", "--offline"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let mut ours: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for package in metadata["packages"].as_array().unwrap() {
        let dependencies = package["dependencies"].as_array().unwrap();
        let names = dependencies
            .iter()
            .map(|dependency| dependency["name"].as_str().unwrap().to_owned());
        let names = names.filter(|name| name.starts_with("tunnel-"));
        ours.insert(
            package["name"].as_str().unwrap().to_owned(),
            names.collect(),
        );
    }
    let expected = [
        ("tunnel-proto", &[][..]),
        ("tunnel-server", &["tunnel-proto"][..]),
        ("tunnel-agent", &["tunnel-proto"][..]),
        (
            "tunnel-tests",
            &["tunnel-agent", "tunnel-proto", "tunnel-server"][..],
        ),
    ];
    let expected = expected.map(|(name, uses)| {
        (
            name.to_owned(),
            uses.iter().map(ToString::to_string).collect(),
        )
    });
    assert_eq!(ours, BTreeMap::from(expected));
}

#[test]
fn files_that_the_map_names_exist() {
    let map = std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let named = map
        .split('`')
        .filter(|word| word.contains("/src/") && word.ends_with(".rs"));
    let missing: Vec<_> = named.filter(|path| !root().join(path).exists()).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn configuration_reference_is_that_of_the_code() {
    for page in PAGES {
        let written = std::fs::read_to_string(root().join(page.path)).unwrap_or_default();
        assert!(
            written == render(page),
            "{} is stale; run: make docs",
            page.path
        );
    }
}
