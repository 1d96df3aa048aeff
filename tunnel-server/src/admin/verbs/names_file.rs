//! Files with the names of nodes, for verbs that are about many nodes.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use tunnel_process::name_list::NAMES_SHOWN_MAX;
use tunnel_proto::wire::name::{NameError, NodeName};

/// The reason why a file with names cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum NamesFileError {
    #[error("cannot read {}", .0.display())]
    Read(PathBuf, #[source] io::Error),
    #[error("{} has more than {} MiB", .0.display(), FILE_MAX_BYTES >> 20)]
    TooLarge(PathBuf),
    #[error("{}", .problems.text(.file))]
    Names { file: PathBuf, problems: BadLines },
    /// An empty file is more likely a mistake than the wish for nothing, or for all nodes.
    #[error("{} has no name", .0.display())]
    Empty(PathBuf),
}

/// The first lines without a valid name, and the number of all of them.
#[derive(Debug, Default)]
pub struct BadLines {
    shown: Vec<(usize, NameError)>,
    count: usize,
}

impl BadLines {
    fn push(&mut self, line: usize, problem: NameError) {
        self.count += 1;
        if self.shown.len() < NAMES_SHOWN_MAX {
            self.shown.push((line, problem));
        }
    }

    fn text(&self, file: &Path) -> String {
        let file = file.display();
        let shown = self.shown.iter();
        let mut lines: Vec<_> = shown
            .map(|(line, problem)| format!("{file}, line {line}: {problem}"))
            .collect();
        match self.count - self.shown.len() {
            0 => {}
            others => lines.push(format!("and {others} more lines of {file}")),
        }
        lines.join("\n")
    }
}

/// Returns the names of the arguments and of the file, ordered and each once. Blocks the thread.
///
/// # Errors
/// Returns a [`NamesFileError`] if the file cannot be read, or has no name or one that is not valid.
pub(crate) fn load_names(
    names: &[NodeName],
    file: Option<&Path>,
) -> Result<Vec<NodeName>, NamesFileError> {
    let mut all: BTreeSet<NodeName> = names.iter().cloned().collect();
    if let Some(file) = file {
        all.extend(read(file)?);
    }
    Ok(all.into_iter().collect())
}

fn read(path: &Path) -> Result<Vec<NodeName>, NamesFileError> {
    let text = if path == Path::new("-") {
        read_bounded(io::stdin())
    } else {
        File::open(path).and_then(read_bounded)
    };
    let text = text.map_err(|error| NamesFileError::Read(path.to_owned(), error))?;
    let text = text.ok_or_else(|| NamesFileError::TooLarge(path.to_owned()))?;
    let names = parse(&text).map_err(|problems| NamesFileError::Names {
        file: path.to_owned(),
        problems,
    })?;
    if names.is_empty() {
        return Err(NamesFileError::Empty(path.to_owned()));
    }
    Ok(names)
}

/// Reads a text, or returns `None` if it is too large.
fn read_bounded(reader: impl Read) -> io::Result<Option<String>> {
    let mut text = String::new();
    reader.take(FILE_MAX_BYTES + 1).read_to_string(&mut text)?;
    Ok((text.len() as u64 <= FILE_MAX_BYTES).then_some(text))
}

/// Parses the names. Other programs begin a file with a byte order mark.
fn parse(text: &str) -> Result<Vec<NodeName>, BadLines> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let (mut names, mut bad) = (Vec::new(), BadLines::default());
    for (index, line) in text.lines().enumerate() {
        let name = line.split('#').next().unwrap_or_default().trim();
        if name.is_empty() {
            continue;
        }
        match name.parse() {
            Ok(name) => names.push(name),
            Err(problem) => bad.push(index + 1, problem),
        }
    }
    if bad.count == 0 { Ok(names) } else { Err(bad) }
}

/// Maximum size of a file: some 100,000 of the longest names.
const FILE_MAX_BYTES: u64 = 32 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::assert_contains;
    use tunnel_store::data_dir::testing::Scratch;

    fn load(content: &[u8], names: &[&str]) -> Result<Vec<String>, NamesFileError> {
        let scratch = Scratch::new();
        let file = scratch.0.path().join("names");
        std::fs::write(&file, content).unwrap();
        let names: Vec<NodeName> = names.iter().map(|name| name.parse().unwrap()).collect();
        let loaded = load_names(&names, Some(&file))?;
        Ok(loaded.iter().map(NodeName::to_string).collect())
    }

    #[test]
    fn names_of_file_and_arguments_are_ordered_and_occur_once() {
        let content = b"# a site\r\nworker-2  # the second\n\n  Worker-1.\nworker-2";
        let loaded = load(content, &["worker-3", "worker-1"]).unwrap();
        assert_eq!(loaded, ["worker-1", "worker-2", "worker-3"]);
    }

    #[test]
    fn files_without_names_or_with_others_are_refused_with_the_line() {
        for (content, expected) in [
            (&b""[..], "has no name"),
            (b"# none\n\n", "has no name"),
            (b"a\nb c\n", "line 2"),
            (b"a\n\n../nodes\n", "line 3"),
            (b"..\na\nb c\n", "line 1"),
            (b"..\na\nb c\n", "line 3"),
            (b"\xff\xfe", "cannot read"),
        ] {
            assert_contains(&load(content, &["a"]).unwrap_err(), expected);
        }
        let rubbish = load("x y\n".repeat(10_000).as_bytes(), &[]).unwrap_err();
        assert_contains(&rubbish, "line 10: ");
        assert_contains(&rubbish, "and 9990 more lines");
        assert_eq!(load(b"\xef\xbb\xbfa\r\n", &[]).unwrap(), ["a"]);
        let missing = load_names(&[], Some(Path::new("/nonexistent/names"))).unwrap_err();
        assert_contains(&missing, "/nonexistent/names");
        let endless = read_bounded(io::repeat(b'a')).unwrap();
        assert_eq!(endless, None);
    }
}
