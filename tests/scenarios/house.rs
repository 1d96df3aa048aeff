//! Rules of the house that a compiler does not check.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::process::Command;

use tunnel_tests::reference::{PAGES, render};
use tunnel_tests::tools::{Tool, or_skip};

mod log_fields;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The crates of each folder of the product use those of few folders. Tests may use all.
#[test]
fn crates_of_server_and_agent_are_apart_and_stand_on_proto() {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--format-version=1", "--no-deps", "--offline"])
        .current_dir(root())
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let workspace = metadata["workspace_root"].as_str().unwrap();
    let folder = |path: &str| {
        let below = path.strip_prefix(workspace).unwrap();
        below.split('/').nth(1).unwrap().to_owned()
    };
    let mut folders = BTreeSet::new();
    for package in metadata["packages"].as_array().unwrap() {
        let own = folder(package["manifest_path"].as_str().unwrap());
        let allowed: &[&str] = match own.as_str() {
            "proto" => &["proto"],
            "tunnel-server" => &["proto", "tunnel-server"],
            "tunnel-agent" => &["proto", "tunnel-agent"],
            "tests" => &["proto", "tunnel-server", "tunnel-agent", "tests"],
            other => panic!("no rule for {other}"),
        };
        for dependency in package["dependencies"].as_array().unwrap() {
            if let Some(path) = dependency["path"].as_str() {
                let (name, used) = (&package["name"], folder(path));
                assert!(allowed.contains(&used.as_str()), "{name} uses {path}");
                folders.insert((own.clone(), used));
            }
        }
    }
    assert!(folders.len() > 3, "{folders:?}");
}

#[test]
fn wire_format_and_routing_have_no_runtime_in_their_trees() {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    for package in ["tunnel-proto", "tunnel-routing"] {
        let output = Command::new(&cargo)
            .args(["tree", "--package", package, "--no-default-features"])
            .args(["--edges=normal", "--prefix=none", "--offline"])
            .current_dir(root())
            .output()
            .unwrap();
        let tree = String::from_utf8(output.stdout).unwrap();
        let mut names = tree.lines().filter_map(|line| line.split(' ').next());
        assert_eq!(names.next(), Some(package));
        assert!(names.all(|name| name != "tokio"), "{tree}");
    }
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
fn names_that_the_map_puts_into_a_file_are_there() {
    let map = std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let pieces: Vec<_> = map.split('`').collect();
    let pairs: Vec<_> = pieces
        .windows(3)
        .filter(|window| window[1] == " in " && window[2].ends_with(".rs"))
        .map(|window| (window[0], window[2]))
        .filter(|(_, path)| path.contains("/src/"))
        .collect();
    assert!(pairs.len() > 5, "{pairs:?}");
    let missing: Vec<_> = pairs
        .into_iter()
        .filter(|(name, path)| {
            let name = name.rsplit("::").next().unwrap_or_default();
            !std::fs::read_to_string(root().join(path)).is_ok_and(|text| text.contains(name))
        })
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
}

/// Of the words in the data paths, those of two parts, as `OpenStream`.
#[test]
fn types_of_the_data_paths_exist() {
    let map = std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let paths = map.split("## Data paths").nth(1).unwrap();
    let paths = paths.split("```").nth(1).unwrap();
    let is_type = |word: &&str| {
        let capitals = word.chars().filter(char::is_ascii_uppercase).count();
        let is_capital = |first: char| first.is_ascii_uppercase();
        word.starts_with(is_capital) && (2..word.len()).contains(&capitals)
    };
    let words = paths.split(|next: char| !next.is_ascii_alphanumeric());
    let mut missing: BTreeSet<_> = words.filter(is_type).collect();
    assert!(missing.len() > 15, "{missing:?}");
    // Of tokio.
    missing.remove("TcpStream");
    for file in sources().unwrap() {
        let text = std::fs::read_to_string(&file).unwrap();
        missing.retain(|name| {
            let kinds = ["struct", "enum", "trait", "type"];
            !kinds
                .iter()
                .any(|kind| text.contains(&format!("{kind} {name}")))
        });
    }
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn files_and_folders_of_a_crate_use_each_other_in_no_circle() {
    let Some(mut python) = or_skip(Tool::Python.command()) else {
        return;
    };
    let output = python
        .args(["tests/measure.py", "--check"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn generated_pages_are_those_of_the_code() {
    for page in PAGES {
        let written = std::fs::read_to_string(root().join(page.path)).unwrap_or_default();
        assert!(
            written == render(page),
            "{} is stale; run: make docs",
            page.path
        );
    }
}

/// Words that readers of this field do not know, and what names and texts say instead.
const GLOSSARY: &[(&str, &[&str])] = &[
    ("listener", &["door", "doors"]),
    ("unauthenticated", &["stranger", "strangers"]),
    ("dial policy", &["ceiling"]),
    ("delegation", &["lend", "lends", "lent", "borrowers"]),
    ("fallback, upgrade", &["ladder", "rung"]),
    ("session task", &["tether"]),
    ("session monitor", &["vigil"]),
    ("close, shutdown, reset", &["farewell"]),
    ("authenticate", &["vouch", "vouches", "vouched"]),
    ("receive, handle", &["heed", "heeds", "heeded"]),
    ("enrollment", &["enrol", "enrolment", "enrolments"]),
    ("dialed", &["dialled"]),
    ("fix", &["mend", "mends", "mended"]),
    ("again", &["anew"]),
    ("the actor's name", &["whom"]),
    ("next to, in addition to", &["beside"]),
    ("evicts, is evicted", &["pushes out", "pushed out"]),
    ("fails, yields", &["gives way"]),
    ("is reported, is logged", &["is told", "are told"]),
];

/// This file has the glossary, and the metrics of the benchmark keep their names so that reports
/// can be compared.
#[test]
fn code_and_pages_are_free_of_the_private_words() {
    let mut files = sources().unwrap();
    files.retain(|file| {
        let path = file.display().to_string();
        !path.ends_with("/scenarios/house.rs") && !path.contains("/tests/bench/")
    });
    files.extend(files_below(&["deploy", "docs"]).unwrap());
    let pages = [
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "tests/security.md",
    ];
    files.extend(pages.map(|page| root().join(page)));
    let mut findings = Vec::new();
    for file in files {
        for finding in private_words(&std::fs::read_to_string(&file).unwrap()) {
            findings.push(format!("{}:{finding}", file.display()));
        }
    }
    assert!(findings.is_empty(), "{}", findings.join("\n"));
}

#[test]
fn private_words_are_found_as_whole_words() {
    let text = "fn door() {} // A Door.\n\"so\\nis\n/// told; enrol.lock is beside_it\"";
    let findings = [
        "1: door: say listener",
        "1: door: say listener",
        "3: is told: say is reported, is logged",
    ];
    assert_eq!(private_words(text), findings);
    let page = format!("a\n{TABLES}\nanew\n{END_OF_TABLES}\nwhom\n");
    assert_eq!(private_words(&page), ["5: whom: say the actor's name"]);
}

/// The Rust files of all crates.
fn sources() -> std::io::Result<Vec<PathBuf>> {
    let mut files = files_below(&["proto", "tunnel-server", "tunnel-agent", "tests"])?;
    files.retain(|path| path.extension().is_some_and(|extension| extension == "rs"));
    Ok(files)
}

fn files_below(folders: &[&str]) -> std::io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut folders: Vec<_> = folders.iter().map(|folder| root().join(folder)).collect();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

/// Returns line, phrase and the glossary's word of each private phrase. Words that `-`, `_` or `.`
/// join are a name, such as that of a file. The benchmark's tables change with its next run.
fn private_words(text: &str) -> Vec<String> {
    let rows = GLOSSARY.iter();
    let banned: HashMap<&str, &str> = rows
        .flat_map(|(say, banned)| banned.iter().map(|phrase| (*phrase, *say)))
        .collect();
    let joints = ['-', '_', '.'];
    let (mut findings, mut is_table, mut before) = (Vec::new(), false, String::new());
    for (at, line) in text.lines().enumerate() {
        is_table = (is_table || line == TABLES) && line != END_OF_TABLES;
        if is_table {
            continue;
        }
        let line = line.replace("\\n", " ").to_lowercase();
        for word in line.split(|next: char| !next.is_alphanumeric() && !joints.contains(&next)) {
            let word = word.trim_matches(joints);
            if word.is_empty() {
                continue;
            }
            before.push_str(word);
            for phrase in [word, &before] {
                if let Some(say) = banned.get(phrase) {
                    findings.push(format!("{}: {phrase}: say {say}", at + 1));
                }
            }
            before = format!("{word} ");
        }
    }
    findings
}

const TABLES: &str = "<!-- tables of the benchmark -->";
const END_OF_TABLES: &str = "<!-- end of the tables -->";

/// Only one folder of the server speaks to Kubernetes.
#[test]
fn only_the_cluster_folder_names_kube() {
    for file in sources().unwrap() {
        let path = file.display().to_string();
        let is_server = path.contains("/tunnel-server/");
        if !is_server || path.contains("/src/cluster") {
            continue;
        }
        let source = std::fs::read_to_string(&file).unwrap();
        let mut code = source
            .lines()
            .filter(|line| !line.trim_start().starts_with("//"));
        let is_named = code.any(|line| line.contains("kube::") || line.contains("k8s_openapi::"));
        assert!(!is_named, "{path}");
    }
}
