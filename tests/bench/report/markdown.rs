//! The report as Markdown: for the terminal, for `report.md`, and for the tables of a document.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result};

use super::Report;
use super::summary::{Stat, Summary, verdict};
use crate::cases::CASES;
use crate::metric::{ALL, Better, Metric};
use crate::systems::{DIRECT, FLOOR, RATHOLE};
use crate::target::Of;

/// Renders the report without the title of the document.
pub(super) fn render(report: &Report, summary: &Summary) -> String {
    let mut text = String::new();
    let dropped: usize = summary
        .dropped
        .values()
        .map(std::collections::BTreeSet::len)
        .sum();
    let run: usize = summary
        .run
        .values()
        .map(std::collections::BTreeSet::len)
        .sum();
    let network = if report.namespace {
        "in a network namespace of its own"
    } else {
        "on the machine's own loopback interface, without a namespace"
    };
    push(
        &mut text,
        &format!(
            "- command: `bench {}`, {} s",
            report.command, report.took_seconds
        ),
    );
    push(
        &mut text,
        &format!(
            "- commit {}, {}, binaries of the build `{}`",
            report.commit, report.when, report.build
        ),
    );
    push(&mut text, &format!("- {}, {network}", report.machine));
    push(
        &mut text,
        &format!(
            "- load average {} before, {} after",
            report.load.0, report.load.1
        ),
    );
    push(
        &mut text,
        &format!(
            "- {run} rounds, of which {dropped} were dropped because other processes used more than {:.0} % of the machine",
            report.foreign_most * 100.0
        ),
    );
    text.push_str("\nMedians, with the minimum and the maximum of all rounds in parentheses.\n");
    targets(&mut text, summary);
    super::costs::tables(&mut text, summary);
    for number in summary.cases() {
        let title = CASES
            .iter()
            .find(|case| case.number == number)
            .map_or("", |case| case.title);
        push(&mut text, &format!("\n### Case {number}: {title}\n"));
        for metric in ALL {
            figure(&mut text, report, summary, number, metric);
        }
    }
    if !report.errors.is_empty() {
        push(&mut text, "\n### Errors\n");
        for error in &report.errors {
            push(&mut text, &format!("- {error}"));
        }
    }
    text
}

fn targets(text: &mut String, summary: &Summary) {
    let all = summary.targets();
    if all.is_empty() {
        return;
    }
    let met = all
        .iter()
        .filter(|(_, target, found)| verdict(target, *found) == "met")
        .count();
    push(
        text,
        &format!("\n### Targets: {met} of {} met\n", all.len()),
    );
    push(text, "| case | system | figure | target | found | |");
    push(text, "| ---: | --- | --- | --- | ---: | --- |");
    for (case, target, found) in all {
        let figure = format!("{}{}", target.metric.name, target.of);
        let unit = match target.of {
            Of::Itself | Of::Above(_) => target.metric.unit,
            Of::Ratio(_) => "",
        };
        let verdict = verdict(target, found);
        let verdict = if verdict == "met" {
            verdict.to_owned()
        } else {
            format!("**{verdict}**")
        };
        let found = found.map_or_else(|| "-".to_owned(), show);
        push(
            text,
            &format!(
                "| {case} | {} | {figure} | {} {unit} | {found} | {verdict} |",
                target.system, target.bound
            ),
        );
    }
}

/// Appends the table of one metric for all systems. The table has ratios if the direct connection
/// is one of the systems.
fn figure(
    text: &mut String,
    report: &Report,
    summary: &Summary,
    case: u8,
    metric: &'static Metric,
) {
    let mut systems = summary.systems(case, metric);
    let nothing_failed = |system: &&str| {
        let found = summary.stat(case, system, metric);
        found.is_none_or(|found| metric.gate == Some(0.0) && found.most == 0.0)
    };
    if systems.iter().all(nothing_failed) {
        return;
    }
    let absent = !report.rathole && systems.contains(&FLOOR) && metric.better == Better::Higher;
    if absent {
        systems.push(RATHOLE);
    }
    let unit = if metric.unit.is_empty() {
        String::new()
    } else {
        format!(", {}", metric.unit)
    };
    let compared = systems.contains(&DIRECT);
    push(
        text,
        &format!(
            "\n| {}{unit} | |{}",
            metric.name,
            if compared {
                " of direct | of floor |"
            } else {
                ""
            }
        ),
    );
    push(
        text,
        &format!(
            "| --- | ---: |{}",
            if compared { " ---: | ---: |" } else { "" }
        ),
    );
    for system in systems {
        let ratio = |other: &'static str| {
            let ratio = summary.related(case, system, metric, Of::Ratio(other));
            ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{:.3}", ratio.median))
        };
        let found = summary.stat(case, system, metric);
        let found = found.map_or_else(|| "not measured".to_owned(), show);
        let ratios = if compared {
            format!(" {} | {} |", ratio(DIRECT), ratio(FLOOR))
        } else {
            String::new()
        };
        push(text, &format!("| {system} | {found} |{ratios}"));
    }
}

pub(super) fn show(stat: Stat) -> String {
    if stat.rounds == 1 {
        return number(stat.median);
    }
    let some = if stat.rounds < stat.of {
        format!(", {} of {} rounds", stat.rounds, stat.of)
    } else {
        String::new()
    };
    format!(
        "{} ({} to {}{some})",
        number(stat.median),
        number(stat.least),
        number(stat.most)
    )
}

/// Formats a value with about three digits.
pub(super) fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ if value == 0.0 => "0".to_owned(),
        _ => format!("{value:.2}"),
    }
}

pub(super) fn push(text: &mut String, line: &str) {
    let _infallible = writeln!(text, "{line}");
}

/// Replaces the text between the two marks of a document.
pub(super) fn replace_tables(path: &Path, tables: &str) -> Result<()> {
    let old = std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    let new =
        between_marks(&old, tables).with_context(|| format!("no marks in {}", path.display()))?;
    std::fs::write(path, new).with_context(|| format!("write {}", path.display()))
}

fn between_marks(old: &str, tables: &str) -> Option<String> {
    let (before, rest) = old.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{BEGIN}\n{tables}\n{END}{after}"))
}

const BEGIN: &str = "<!-- tables of the benchmark -->";
const END: &str = "<!-- end of the tables -->";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::json::tests::report;

    #[test]
    fn peer_that_is_not_here_reads_not_measured() {
        let report = report();
        let text = render(&report, &Summary::of(&report));
        assert!(
            text.contains("| rathole | not measured | - | - |"),
            "{text}"
        );
        assert!(
            text.contains("| floor | 500 (500 to 1000) | 0.500 | 1.000 |"),
            "{text}"
        );
        assert!(text.contains("**not measured**"), "{text}");
    }

    #[test]
    fn only_what_is_between_the_marks_is_replaced() {
        let old = format!("a\n{BEGIN}\nold\n{END}\nb\n");
        let new = between_marks(&old, "new").unwrap();
        assert_eq!(new, format!("a\n{BEGIN}\nnew\n{END}\nb\n"));
        assert!(between_marks("a", "new").is_none());
    }
}
