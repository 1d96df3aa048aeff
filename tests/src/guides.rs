//! The guides of `docs/`: their code blocks, the marks of the blocks, and the runnable blocks
//! combined into one script.
//!
//! A block of commands begins ```` ```sh run ````, ```` ```sh run RUNNER ```` or ```` ```sh not run here: REASON ````.
//! The blocks of a page without a runner are one script; a runner names another place where the others run
//! (`RUNNERS` of the test of the guides). The word `action` marks a block as one of the manual actions, which are
//! counted. A file of settings begins ```` ```yaml server ```` or ```` ```yaml agent ````.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::manifests::repository;

/// A fenced code block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// Line number of the opening fence, from 1.
    pub line: usize,
    /// First word after the fence.
    pub language: String,
    /// Rest of the line after the language.
    pub mark: String,
    /// Text inside the block, without the fence's indentation.
    pub text: String,
}

impl Block {
    /// Returns whether the block contains shell commands.
    pub fn is_commands(&self) -> bool {
        matches!(self.language.as_str(), "sh" | "bash" | "console" | "shell")
    }

    /// Returns whether a test runs the block.
    pub fn is_run(&self) -> bool {
        self.runner().is_some()
    }

    /// Returns what runs the block: empty for the script of its page, `None` for nothing.
    pub fn runner(&self) -> Option<&str> {
        let words = self.mark.strip_prefix("run")?;
        let mut words = words.split_whitespace().filter(|word| *word != "action");
        Some(words.next().unwrap_or_default())
    }

    /// Returns the reason why no test runs the block.
    pub fn reason(&self) -> Option<&str> {
        let (_, reason) = self.mark.split_once("not run here:")?;
        Some(reason.trim()).filter(|reason| !reason.is_empty())
    }

    /// Returns whether the block is a counted manual action.
    pub fn is_action(&self) -> bool {
        let (words, _) = self.mark.split_once("not run").unwrap_or((&self.mark, ""));
        words.split_whitespace().any(|word| word == "action")
    }
}

pub fn page(path: &str) -> Result<String> {
    fs::read_to_string(repository().join(path)).with_context(|| path.to_owned())
}

/// Returns all pages: the README and all below `docs/`, as paths in the repository.
pub fn pages() -> Result<Vec<String>> {
    let mut pages = vec!["README.md".to_owned()];
    let mut folders = vec!["docs".to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(repository().join(&folder))? {
            let entry = entry?;
            let path = format!("{folder}/{}", entry.file_name().to_string_lossy());
            if entry.file_type()?.is_dir() {
                folders.push(path);
            } else if Path::new(&path).extension().is_some_and(|end| end == "md") {
                pages.push(path);
            }
        }
    }
    pages.sort();
    Ok(pages)
}

/// Returns the fenced blocks of a page.
pub fn blocks(page: &str) -> Vec<Block> {
    let mut found = Vec::new();
    let mut open: Option<(Block, usize)> = None;
    for (index, line) in page.lines().enumerate() {
        let indent = line.len() - line.trim_start().len();
        let fence = line.trim_start().strip_prefix("```");
        match (&mut open, fence) {
            (Some(_), Some("")) => found.extend(open.take().map(|(block, _)| block)),
            (Some((block, indent)), _) => {
                block.text.push_str(line.get(*indent..).unwrap_or_default());
                block.text.push('\n');
            }
            (None, Some(words)) => {
                let (language, mark) = words.split_once(' ').unwrap_or((words, ""));
                let block = Block {
                    line: index + 1,
                    language: language.to_owned(),
                    mark: mark.trim().to_owned(),
                    text: String::new(),
                };
                open = Some((block, indent));
            }
            (None, None) => {}
        }
    }
    found
}

/// Combines the runnable blocks into one bash script. The script prints the current line of the
/// page and ends at the first failure. Its background processes end with it.
pub fn script(blocks: &[Block]) -> String {
    let mut script =
        "set -euo pipefail\ntrap 'set +e; jobs -p | xargs -r kill; wait' EXIT\n".to_owned();
    for block in blocks.iter().filter(|block| block.runner() == Some("")) {
        script.push_str(&format!("echo '--- line {}'\n{}", block.line, block.text));
    }
    script
}

/// Returns the targets of a page's relative links, without anchors.
pub fn links(page: &str) -> Vec<String> {
    let ends = page.split("](").skip(1);
    let targets = ends.filter_map(|rest| rest.split_once(')').map(|(target, _)| target));
    targets
        .filter(|target| !target.contains("://") && !target.starts_with('#'))
        .filter_map(|target| target.split('#').next().map(str::to_owned))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_keep_their_marks_and_lose_the_indentation_of_their_fence() {
        let text = "x\n```sh run action\na\n```\n1. y\n   ```sh action not run here: no cluster\n   b\n     c\n   ```\n```yaml\nd\n```\n```sh run host\ne\n```\n";
        let found = blocks(text);
        assert_eq!(found.len(), 4);
        assert!(found[0].is_commands() && found[0].is_action());
        assert_eq!(
            (found[0].runner(), found[3].runner()),
            (Some(""), Some("host"))
        );
        assert_eq!((found[0].line, found[0].text.as_str()), (2, "a\n"));
        assert_eq!(found[1].reason(), Some("no cluster"));
        assert!(found[1].is_action() && found[1].runner().is_none());
        assert_eq!(found[1].text, "b\n  c\n");
        assert!(!found[2].is_commands() && !found[2].is_action());
        assert!(script(&found).ends_with("echo '--- line 2'\na\n"));
    }

    #[test]
    fn links_are_relative_ones_without_their_anchors() {
        let text = "[a](b.md) [c](https://example.com) [d](e/f.md#g) [h](#i)";
        assert_eq!(links(text), ["b.md", "e/f.md"]);
    }
}
