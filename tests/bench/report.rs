//! The report of a run: for people, for programs, and as plots.

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

/// Everything that a run has found.
#[derive(Debug, Clone)]
pub(crate) struct Report {
    pub(crate) commit: String,
    pub(crate) when: String,
    pub(crate) command: String,
    pub(crate) machine: String,
    /// The build of the binaries, by the name of its folder: `release`, or `dist` as delivered.
    pub(crate) build: String,
    /// Load average before and after.
    pub(crate) load: (f64, f64),
    /// Whether the run had a network of its own.
    pub(crate) namespace: bool,
    pub(crate) took_seconds: u64,
    /// A round with a larger foreign share is dropped.
    pub(crate) foreign_most: f64,
    pub(crate) rathole: bool,
    pub(crate) samples: Vec<Sample>,
    pub(crate) errors: Vec<String>,
}

impl Report {
    /// Writes all forms of it, shows it, and replaces the tables of `docs` if given.
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

/// Shows a report that was written before, and replaces the tables of `docs` if given.
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

/// Where reports go.
pub(crate) fn folder() -> Result<PathBuf> {
    let target = tunnel_tests::tools::target_dir().context("the build's target folder")?;
    Ok(target.join("bench"))
}
