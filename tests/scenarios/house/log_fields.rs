//! The fields of log lines in the sources are those of the reference.

use std::collections::BTreeSet;

use anyhow::Result;
use tunnel_tests::reference::LOG_FIELDS;

use super::files_below;

const MACROS: &[&str] = &[
    "trace!(",
    "debug!(",
    "info!(",
    "warn!(",
    "error!(",
    "trace_span!(",
    "debug_span!(",
    "info_span!(",
    "warn_span!(",
    "error_span!(",
];

/// Fields that each JSON line, and the object of its span, has from the formatter.
const LINE_FIELDS: [&str; 4] = ["timestamp", "level", "message", "span"];
const SPAN_FIELDS: [&str; 1] = ["name"];

#[test]
fn no_json_line_has_a_field_twice() {
    for source in sources().unwrap() {
        for (start, arguments) in events(&product(&source)) {
            let names: Vec<_> = arguments.into_iter().filter_map(field_name).collect();
            let distinct: BTreeSet<_> = names.iter().collect();
            assert_eq!(distinct.len(), names.len(), "{start} {names:?}");
            let is_span = start.ends_with("span!(");
            let taken: &[&str] = if is_span { &SPAN_FIELDS } else { &LINE_FIELDS };
            let has_taken = names.iter().any(|name| taken.contains(name));
            assert!(!has_taken, "{start} {names:?}");
        }
    }
}

#[test]
fn log_fields_of_the_sources_are_those_of_the_reference() {
    let mut used = BTreeSet::new();
    for source in sources().unwrap() {
        used.extend(fields(&source));
    }
    let listed: Vec<&str> = LOG_FIELDS.iter().map(|(name, _)| *name).collect();
    let used: Vec<&str> = used.iter().map(String::as_str).collect();
    assert_eq!(used, listed, "used, and listed in LOG_FIELDS (sorted)");
}

#[test]
fn fields_are_found_in_macros_and_not_in_messages_or_tests() {
    let source = "// info!(commented)
        tracing::info!(target: ACCESS, %node, ?error, session = a.b(1, \"c, d\"), \"text, {x}\");
        info_span!(\"conn\", peer = %address); compile_error!(not_a_field);
        warn!(count, \"{}\", self.other);
        #[cfg(test)]
        mod tests { fn f() { debug!(in_a_test); } }";
    let found: Vec<String> = fields(source).into_iter().collect();
    assert_eq!(found, ["count", "error", "node", "peer", "session"]);
}

/// Returns the sources of the product.
fn sources() -> Result<Vec<String>> {
    let files = files_below(&["proto", "tunnel-server", "tunnel-agent"])?;
    let is_product = |file: &std::path::PathBuf| {
        let path = file.to_string_lossy();
        let below = path.rsplit_once("/src/").map(|(_, below)| below);
        below.is_some_and(|below| below.ends_with(".rs") && !below.contains("test"))
    };
    let files = files.into_iter().filter(is_product);
    Ok(files
        .map(std::fs::read_to_string)
        .collect::<Result<_, _>>()?)
}

/// Returns the fields that the tracing macros of a source name, without those of its tests.
fn fields(source: &str) -> BTreeSet<String> {
    let product = product(source);
    let events = events(&product).into_iter();
    events
        .flat_map(|(_, arguments)| arguments)
        .filter_map(field_name)
        .map(str::to_owned)
        .collect()
}

/// Returns a source without its tests and comments.
fn product(source: &str) -> String {
    let product = source.split("mod tests {").next().unwrap_or_default();
    let lines = product
        .lines()
        .filter(|line| !line.trim().starts_with("//"));
    lines.flat_map(|line| [line, "\n"]).collect()
}

/// Returns the tracing macros of a source with their arguments.
fn events(product: &str) -> Vec<(&'static str, Vec<&str>)> {
    let mut found = Vec::new();
    for start in MACROS {
        for (at, _) in product.match_indices(start) {
            let is_whole = !product[..at].ends_with(is_word);
            if is_whole {
                found.push((*start, arguments(&product[at + start.len()..])));
            }
        }
    }
    found
}

/// Returns the arguments of a macro. `text` begins behind the opening parenthesis.
fn arguments(text: &str) -> Vec<&str> {
    let (mut found, mut begin, mut depth) = (Vec::new(), 0, 0);
    let mut letters = text.char_indices();
    while let Some((at, letter)) = letters.next() {
        match letter {
            '"' => {
                let mut is_escaped = false;
                for (_, inner) in letters.by_ref() {
                    if inner == '"' && !is_escaped {
                        break;
                    }
                    is_escaped = inner == '\\' && !is_escaped;
                }
            }
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' if depth == 0 => {
                found.push(text[begin..at].trim());
                return found;
            }
            ')' | ']' | '}' => depth -= 1,
            ',' if depth == 0 => {
                found.push(text[begin..at].trim());
                begin = at + 1;
            }
            _ => {}
        }
    }
    found
}

/// Returns the name of the field in an argument, which is `name = value`, `name`, `%name` or
/// `?name`. Messages, targets and parents are no fields.
fn field_name(argument: &str) -> Option<&str> {
    let name = match argument.split_once('=') {
        Some((name, _)) => name.trim(),
        None => argument.trim_start_matches(['%', '?']),
    };
    let is_name = name.chars().all(is_word) && !name.contains(char::is_uppercase);
    (is_name && !name.is_empty()).then_some(name)
}

fn is_word(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || letter == '_'
}
