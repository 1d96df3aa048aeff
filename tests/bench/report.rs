//! The report of a run as Markdown, as JSON and as plots.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::bench::Sample;

pub(crate) mod compare;
mod costs;
pub(crate) mod json;
mod markdown;
mod plot;
mod summary;

pub(crate) use summary::{Stat, Summary};

/// Results of a run, and the conditions under which they were measured.
#[derive(Debug, Clone)]
pub(crate) struct Report {
    pub(crate) commit: String,
    pub(crate) when: String,
    pub(crate) command: String,
    pub(crate) machine: String,
    /// Build profile of the binaries, which is the name of their folder: `release`, or `dist` for
    /// delivered binaries.
    pub(crate) build: String,
    /// Load average before and after the run.
    pub(crate) load: (f64, f64),
    /// Whether the run had a network namespace of its own.
    pub(crate) namespace: bool,
    pub(crate) took_seconds: u64,
    /// Largest accepted share of other processes. Rounds with a larger share are dropped.
    pub(crate) foreign_most: f64,
    pub(crate) rathole: bool,
    pub(crate) samples: Vec<Sample>,
    pub(crate) errors: Vec<String>,
}

impl Report {
    /// Writes the report in all formats, prints it, and replaces the tables of `docs` if given.
    pub(crate) fn write(&self, folder: &Path, docs: Option<&Path>) -> Result<()> {
        fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
        let summary = Summary::of(self);
        let text = markdown::render(self, &summary);
        fs::write(folder.join("report.md"), &text)?;
        fs::write(folder.join("report.json"), json::render(self, &summary)?)?;
        for (name, svg) in plot::render(&summary) {
            fs::write(folder.join(name), svg)?;
        }
        publish(&text, docs)?;
        writeln!(std::io::stdout(), "written to {}", folder.display())?;
        Ok(())
    }
}

/// Prints an existing report, and replaces the tables of `docs` if given.
pub(crate) fn show(report: &Report, docs: Option<&Path>) -> Result<()> {
    publish(&markdown::render(report, &Summary::of(report)), docs)
}

fn publish(text: &str, docs: Option<&Path>) -> Result<()> {
    if let Some(docs) = docs {
        markdown::replace_tables(docs, text)?;
    }
    writeln!(std::io::stdout(), "{text}")?;
    Ok(())
}

/// Returns the default folder of reports.
pub(crate) fn folder() -> Result<PathBuf> {
    let target = tunnel_tests::tools::target_dir().context("the build's target folder")?;
    Ok(target.join("bench"))
}
