//! The index of files: what the first sentence of each source file says.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::put;

/// Folders of the crates' sources, in the order of their dependencies.
const FOLDERS: &[&str] = &["proto", "tunnel-server", "tunnel-agent"];

const HEAD: &str = "# Files

Generated from the code by `make docs`; do not edit.

Each source file of the product without its tests, and what its first sentence says.
[ARCHITECTURE.md](../../ARCHITECTURE.md) is the map.
";

/// Returns the page, read from the sources of this repository. A file that cannot be read is a row
/// with the error.
pub(super) fn page() -> String {
    let mut page = HEAD.to_owned();
    for folder in FOLDERS {
        put(
            &mut page,
            format_args!("\n## {folder}\n\n| file | |\n|---|---|\n"),
        );
        let root = root();
        let mut files = Vec::new();
        if let Err(error) = collect(&root.join(folder), &mut files) {
            put(&mut page, format_args!("| `{folder}` | {error} |\n"));
        }
        files.sort();
        for file in files {
            let path = file.strip_prefix(&root).unwrap_or(&file).display();
            let sentence = match fs::read_to_string(&file) {
                Ok(source) => first_sentence(&source),
                Err(error) => error.to_string(),
            };
            put(&mut page, format_args!("| `{path}` | {sentence} |\n"));
        }
    }
    page
}

fn root() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().unwrap_or(tests).to_owned()
}

/// Adds the source files below a folder, without those of tests.
fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_stem().and_then(|name| name.to_str());
        if matches!(name, None | Some("tests" | "testing" | "target" | "build")) {
            continue;
        }
        if path.is_dir() {
            collect(&path, files)?;
        } else if path.extension().is_some_and(|kind| kind == "rs") {
            files.push(path);
        }
    }
    Ok(())
}

/// Returns the first sentence of the module's documentation, in one line, without links.
fn first_sentence(source: &str) -> String {
    let paragraph: Vec<_> = source
        .lines()
        .map_while(|line| line.strip_prefix("//!").map(str::trim))
        .take_while(|line| !line.is_empty())
        .collect();
    let paragraph = paragraph.join(" ").replace("[`", "`").replace("`]", "`");
    let end = paragraph
        .match_indices(". ")
        .map(|(at, _)| at)
        .next()
        .unwrap_or(paragraph.len());
    paragraph[..end].trim_end_matches('.').replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_sentence_ends_before_the_second_and_has_no_links() {
        let source =
            "//! Copies [`bytes`] in both\n//! directions. More.\n//!\n//! Details.\nuse x;\n";
        assert_eq!(first_sentence(source), "Copies `bytes` in both directions");
        assert_eq!(first_sentence("use x;\n"), "");
    }
}
