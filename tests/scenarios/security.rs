//! `tests/security.md` is correct: each test that it names exists, and no threat and no limit is
//! missing. The tests that `tests/promises.md` names exist, too.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

/// The page with threats and limits.
const MATRIX: &str = "tests/security.md";

/// Threats that the page must contain.
const IDS: [&str; 48] = [
    "R01", "R04", "R09", "R11", "R14", "S01", "S02", "S04", "S05", "S07", "S08", "S09", "S10",
    "S11", "S12", "S13", "S14", "S20", "S21", "S22", "S23", "S24", "S25", "S26", "T01", "T03",
    "T04", "T05", "T09", "T10", "T11", "T15", "T16", "T17", "T18", "T20", "T21", "T22", "F17",
    "F18", "F19", "F20", "F24", "F25", "F26", "P9", "S42", "S44",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Returns the cells of a page's table rows that have this number of columns.
fn rows(page: &str, columns: usize) -> Result<Vec<Vec<String>>> {
    let page = fs::read_to_string(root().join(page))?;
    let rows = page.lines().filter_map(|line| {
        let cells = line.strip_prefix("| ")?.strip_suffix('|')?;
        let cells: Vec<_> = cells
            .split('|')
            .map(|cell| cell.trim().to_owned())
            .collect();
        (cells.len() == columns).then_some(cells)
    });
    Ok(rows.collect())
}

/// Returns the words in backticks.
fn quoted(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

/// Collects the names of all functions in the sources of a folder.
fn functions(folder: &Path, found: &mut BTreeSet<String>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            functions(&path, found)?;
        } else if path.extension().is_some_and(|kind| kind == "rs") {
            let source = fs::read_to_string(&path)?;
            let names = source.lines().filter_map(|line| {
                let (_, rest) = line.split_once("fn ")?;
                Some(rest.split(['(', '<']).next()?.to_owned())
            });
            found.extend(names);
        }
    }
    Ok(())
}

fn tests() -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    for folder in [
        "proto",
        "tunnel-server",
        "tunnel-agent",
        "tests/scenarios",
        "tests/src",
        "tests/scale",
    ] {
        functions(&root().join(folder), &mut found)?;
    }
    Ok(found)
}

#[test]
fn every_threat_has_a_row_whose_tests_exist() -> Result<()> {
    let (rows, tests) = (rows(MATRIX, 5)?, tests()?);
    let by_id: BTreeMap<_, _> = rows.iter().map(|row| (row[0].as_str(), row)).collect();
    let mut wrong = Vec::new();
    for id in IDS.into_iter().chain([
        "C1", "C2", "C12", "F36", "K01", "K02", "K03", "P10", "P11", "P12", "C14", "C15", "T24",
        "T25", "T26", "T27", "T28", "T29",
    ]) {
        let Some(row) = by_id.get(id) else {
            wrong.push(format!("{id} has no row"));
            continue;
        };
        let named: Vec<_> = quoted(&row[3]).collect();
        if named.is_empty() {
            wrong.push(format!("{id} names no test"));
        }
        let missing = named.iter().filter(|name| !tests.contains(**name));
        wrong.extend(missing.map(|name| format!("{id} names {name}, which is no test")));
    }
    ensure!(wrong.is_empty(), "tests/security.md:\n{}", wrong.join("\n"));
    Ok(())
}

#[test]
fn every_promise_names_tests_that_exist() -> Result<()> {
    let (rows, tests) = (rows("tests/promises.md", 3)?, tests()?);
    let promises = rows.iter().filter(|row| row[0] != "promise");
    let mut wrong = Vec::new();
    for promise in promises {
        if quoted(&promise[2]).count() == 0 {
            wrong.push(format!("{} names no test", promise[0]));
        }
        let missing = quoted(&promise[2]).filter(|name| !tests.contains(*name));
        wrong.extend(missing.map(|name| format!("{name} is no test")));
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// Metrics of both ends.
const POOL_GAUGES: &str = "proto/src/transport/flow/pool_gauges.rs";

#[test]
fn every_limit_has_a_row_whose_metric_and_tests_exist() -> Result<()> {
    let (rows, tests) = (rows(MATRIX, 4)?, tests()?);
    let sources = |files: &[&str]| -> Result<String> {
        let read = files
            .iter()
            .map(|file| fs::read_to_string(root().join(file)));
        Ok(read.collect::<std::io::Result<Vec<_>>>()?.concat())
    };
    let metrics = BTreeMap::from([
        (
            "server",
            sources(&[
                "tunnel-server/src/metrics.rs",
                POOL_GAUGES,
                "tunnel-server/dns/src/server.rs",
                "tunnel-server/src/routing/peers/metrics.rs",
            ])?,
        ),
        (
            "agent",
            sources(&["tunnel-agent/src/metrics.rs", POOL_GAUGES])?,
        ),
    ]);
    let server = tunnel_server::config::LIMITS
        .iter()
        .map(|(name, ..)| ("server", *name));
    let agent = tunnel_agent::config::LIMITS
        .iter()
        .map(|(name, ..)| ("agent", *name));
    let mut wrong = Vec::new();
    for (end, limit) in server.chain(agent) {
        let cell = format!("`{limit}`");
        let row = rows.iter().find(|row| row[0] == end && row[1] == cell);
        let Some(row) = row else {
            wrong.push(format!("limits.{limit} of the {end} has no row"));
            continue;
        };
        for metric in quoted(&row[2]) {
            if !metrics[end].contains(&format!("\"{metric}\"")) {
                wrong.push(format!("{end} {limit}: {metric} is no metric"));
            }
        }
        if quoted(&row[2]).count() == 0 || quoted(&row[3]).count() == 0 {
            wrong.push(format!("{end} {limit} names no metric or no test"));
        }
        let missing = quoted(&row[3]).filter(|name| !tests.contains(*name));
        wrong.extend(missing.map(|name| format!("{end} {limit} names {name}, which is no test")));
    }
    ensure!(wrong.is_empty(), "tests/security.md:\n{}", wrong.join("\n"));
    Ok(())
}
