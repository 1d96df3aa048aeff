//! Rules of the house that a compiler does not check.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use tunnel_tests::reference::{PAGES, render};
use tunnel_tests::tools::{Tool, or_skip};

mod log_fields;

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
        ("tunnel-networks", &[][..]),
        ("tunnel-process", &["tunnel-networks"][..]),
        ("tunnel-doctor", &["tunnel-process"][..]),
        ("tunnel-proto", &["tunnel-process"][..]),
        ("tunnel-tables", &[][..]),
        (
            "tunnel-dns",
            &["tunnel-process", "tunnel-proto", "tunnel-tables"][..],
        ),
        (
            "tunnel-routing",
            &["tunnel-networks", "tunnel-proto", "tunnel-tables"][..],
        ),
        ("tunnel-store", &["tunnel-proto", "tunnel-tables"][..]),
        ("tunnel-ca", &["tunnel-proto", "tunnel-store"][..]),
        (
            "tunnel-server",
            &[
                "tunnel-ca",
                "tunnel-dns",
                "tunnel-doctor",
                "tunnel-proto",
                "tunnel-routing",
                "tunnel-store",
                "tunnel-tables",
            ][..],
        ),
        ("tunnel-agent", &["tunnel-doctor", "tunnel-proto"][..]),
        (
            "tunnel-tests",
            &[
                "tunnel-agent",
                "tunnel-doctor",
                "tunnel-proto",
                "tunnel-server",
            ][..],
        ),
        (
            "tunnel-bench",
            &[
                "tunnel-agent",
                "tunnel-proto",
                "tunnel-server",
                "tunnel-tests",
            ][..],
        ),
        ("tunnel-demo", &["tunnel-tests"][..]),
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
fn shape_of_the_code_is_within_its_bounds() {
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

/// What names and texts say instead of words that readers of this field do not know.
const GLOSSARY: &[(&str, &[&str])] = &[
    ("listener", &["door", "doors"]),
    ("unauthenticated", &["stranger", "strangers"]),
    ("dial policy", &["ceiling"]),
    ("delegation", &["lend", "lends", "lent"]),
    ("delegate", &["borrow", "borrows", "borrowed", "borrowers"]),
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
];

/// Words of the glossary that are plain English in texts.
const NAME_GLOSSARY: &[(&str, &[&str])] = &[
    ("upgrade", &["climb"]),
    ("happy eyeballs, session task", &["lane", "lanes"]),
    ("control sender", &["voice"]),
    ("rotating credentials", &["keeper"]),
    ("close, shutdown, reset", &["fate"]),
    ("timeouts", &["course", "patience"]),
    ("report, log, send", &["tell", "tells", "told"]),
    ("receive, handle", &["heard"]),
    ("request, target", &["goal"]),
    ("observed", &["world"]),
    ("conditions", &["problems"]),
];

/// Phrases, and words that names in reports have.
const TEXT_GLOSSARY: &[(&str, &[&str])] = &[
    ("next to, in addition to", &["beside"]),
    ("evicts, is evicted", &["pushes out", "pushed out"]),
    ("fails, yields", &["gives way"]),
    ("is reported, is logged", &["is told", "are told"]),
];

/// Whole names that say nothing. `line` stays for a line of text, and `place` for that of a finding.
const EMPTY_NAMES: &[&str] = &[
    "places", "way", "ways", "side", "turn", "step", "rest", "goal", "kept", "held", "seen",
    "given", "found", "news", "word", "words", "part", "parts", "thing",
];

#[test]
fn names_are_those_of_the_glossary() {
    let mut findings = Vec::new();
    for file in sources().unwrap() {
        for name in defined_names(&code_of(&std::fs::read_to_string(&file).unwrap())) {
            let words = words_of(&name);
            let row = GLOSSARY.iter().chain(NAME_GLOSSARY).find(|(_, banned)| {
                banned
                    .iter()
                    .any(|word| words.iter().any(|own| own == word))
            });
            if let Some((say, _)) = row {
                findings.push(format!("{}: {name}: say {say}", file.display()));
            } else if EMPTY_NAMES.contains(&name.to_lowercase().as_str()) {
                findings.push(format!("{}: {name} says nothing", file.display()));
            }
        }
    }
    assert!(findings.is_empty(), "{}", findings.join("\n"));
}

/// Checks comments, too, since those of clap are help. This file has the glossary, and the metrics
/// of the benchmark keep their names so that reports can be compared.
#[test]
fn texts_are_free_of_the_private_words() {
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
        let text = std::fs::read_to_string(&file).unwrap();
        let text = match file.extension() {
            Some(extension) if extension == "rs" => split_source(&text).1,
            _ => text,
        };
        for finding in private_words(&text) {
            findings.push(format!("{}:{finding}", file.display()));
        }
    }
    assert!(findings.is_empty(), "{}", findings.join("\n"));
}

#[test]
fn private_words_are_found_in_texts_and_not_in_code() {
    let source = "fn door() {} // A Door.\n\"so\\nis\n/// told; enrol.lock is beside it\"";
    let findings = [
        "1: door: say listener",
        "2: is told: say is reported, is logged",
        "3: beside: say next to, in addition to",
    ];
    assert_eq!(private_words(&split_source(source).1), findings);
    let page = format!("a\n{TABLES}\nanew\n{END_OF_TABLES}\nwhom\n");
    assert_eq!(private_words(&page), ["5: whom: say the actor's name"]);
}

#[test]
fn glossary_is_checked_in_names_and_not_in_comments_or_texts() {
    let code = code_of(
        "struct Kept { door_name: u8 } // fn told() {}\nfn heard() { let s = \"fn voice() {}\"; }",
    );
    assert_eq!(defined_names(&code), ["Kept", "door_name", "heard"]);
    assert_eq!(words_of("HTTPDoorTls_x"), ["http", "door", "tls", "x"]);
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

/// The source without its comments and the contents of its string literals.
fn code_of(source: &str) -> String {
    split_source(source).0
}

/// The code of a source, and its comments and string literals, which keep their lines.
fn split_source(source: &str) -> (String, String) {
    let (mut code, mut texts, mut rest) = (String::new(), String::new(), source);
    while let Some(next) = rest.chars().next() {
        let text_length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |end| end + 2)
        } else if next == '"' {
            string_length(rest)
        } else if next == 'r' && (rest.starts_with("r\"") || rest.starts_with("r#\"")) {
            let end = if rest.starts_with("r#") { "\"#" } else { "\"" };
            let open = end.len() + 1;
            rest[open..]
                .find(end)
                .map_or(rest.len(), |at| open + at + end.len())
        } else {
            0
        };
        texts.push_str(&rest[..text_length]);
        rest = &rest[text_length..];
        if text_length == 0 {
            // A quote in a character literal begins no string.
            let length = if rest.starts_with("'\"'") {
                3
            } else {
                next.len_utf8()
            };
            code.push_str(&rest[..length]);
            texts.push(if next == '\n' { next } else { ' ' });
            rest = &rest[length..];
        }
    }
    (code, texts)
}

fn string_length(text: &str) -> usize {
    let mut is_escaped = false;
    for (at, next) in text.char_indices().skip(1) {
        match next {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            '"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Returns line, phrase and the glossary's word of each private phrase. Words that `-`, `_` or `.`
/// join are a name, such as that of a file. The benchmark's tables change with its next run.
fn private_words(text: &str) -> Vec<String> {
    let joints = ['-', '_', '.'];
    let (mut words, mut is_table) = (Vec::new(), false);
    for (at, line) in text.lines().enumerate() {
        is_table = (is_table || line == TABLES) && line != END_OF_TABLES;
        if is_table {
            continue;
        }
        let line = line.replace("\\n", " ").to_lowercase();
        for word in line.split(|next: char| !next.is_alphanumeric() && !joints.contains(&next)) {
            let word = word.trim_matches(joints);
            if !word.is_empty() {
                words.push((at + 1, word.to_owned()));
            }
        }
    }
    let mut findings = Vec::new();
    for (say, banned) in GLOSSARY.iter().chain(TEXT_GLOSSARY) {
        for phrase in *banned {
            for run in words.windows(phrase.split(' ').count()) {
                let run_words = run.iter().map(|(_, word)| word.as_str());
                if run_words.eq(phrase.split(' ')) {
                    findings.push((run[0].0, phrase, say));
                }
            }
        }
    }
    findings.sort();
    findings
        .into_iter()
        .map(|(line, phrase, say)| format!("{line}: {phrase}: say {say}"))
        .collect()
}

const TABLES: &str = "<!-- tables of the benchmark -->";
const END_OF_TABLES: &str = "<!-- end of the tables -->";

/// The names of types, functions, constants, modules, and of fields of structs.
fn defined_names(code: &str) -> Vec<String> {
    let is_name = |next: char| next.is_alphanumeric() || next == '_';
    let (mut names, mut rest, mut before) = (Vec::new(), code, "");
    // The depth of braces at which the fields of a struct are.
    let (mut depth, mut fields_at, mut is_struct) = (0, None, false);
    while let Some(next) = rest.chars().next() {
        let length = rest.find(|next| !is_name(next)).unwrap_or(rest.len());
        if length > 0 {
            let name = &rest[..length];
            let after = rest[length..].trim_start();
            let is_field =
                fields_at == Some(depth) && after.starts_with(':') && !after.starts_with("::");
            if is_field || DEFINING.contains(&before) {
                names.push(name.to_owned());
            }
            is_struct |= before == "struct";
            before = name;
            rest = &rest[length..];
            continue;
        }
        match next {
            '{' => {
                depth += 1;
                if std::mem::take(&mut is_struct) {
                    fields_at = Some(depth);
                }
            }
            '}' => {
                if fields_at == Some(depth) {
                    fields_at = None;
                }
                depth -= 1;
            }
            ';' => is_struct = false,
            _ => {}
        }
        if !next.is_whitespace() {
            before = "";
        }
        rest = &rest[next.len_utf8()..];
    }
    names
}

const DEFINING: &[&str] = &[
    "struct", "enum", "trait", "type", "fn", "mod", "const", "static",
];

/// The words of a name in snake or camel case, in lower case.
fn words_of(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let letters: Vec<char> = name.chars().collect();
    for (at, &letter) in letters.iter().enumerate() {
        let is_after_lower = at > 0 && letters[at - 1].is_lowercase();
        let is_before_lower = letters.get(at + 1).is_some_and(|next| next.is_lowercase());
        let begins = letter == '_'
            || letter.is_uppercase() && (is_after_lower || (at > 0 && is_before_lower));
        if begins {
            words.push(String::new());
        }
        if letter != '_'
            && let Some(word) = words.last_mut()
        {
            word.extend(letter.to_lowercase());
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

/// Only one folder of the server speaks to Kubernetes.
#[test]
fn only_the_cluster_folder_names_kube() {
    for file in sources().unwrap() {
        let path = file.display().to_string();
        let is_server = path.contains("tunnel-server/src/");
        if !is_server || path.contains("/src/cluster") {
            continue;
        }
        let code = code_of(&std::fs::read_to_string(&file).unwrap());
        let names = ["kube::", "k8s_openapi::"];
        assert!(names.iter().all(|name| !code.contains(name)), "{path}");
    }
}
