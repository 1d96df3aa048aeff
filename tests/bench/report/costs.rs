//! Tables of the cost of a unit of work in all cases, and of its growth with the number of agents.

use super::Summary;
use super::markdown::{push, show};
use crate::metric::{
    AGENTS_1000, AGENTS_10000, BULK_BESIDE_10, BULK_BESIDE_1000, BULK_BESIDE_10000,
    CONNECTION_BESIDE_10, CONNECTION_BESIDE_1000, CONNECTION_BESIDE_10000, CONNECTION_CPU,
    DOWN_CPU, HANDSHAKE_CPU, Metric, REQUEST_BESIDE_10, REQUEST_BESIDE_1000, REQUEST_BESIDE_10000,
    REQUEST_CPU, STREAM_AGENT, STREAM_SERVER,
};
use crate::systems::{FLOOR, H2, H2_HTTP, QUIC, QUIC_HTTP, RATHOLE};

/// A unit of work, its metric, and the cases that record the metric.
const UNITS: &[(&str, &Metric, &[u8])] = &[
    ("a GiB down, CPU s", &DOWN_CPU, &[1, 2]),
    (
        "a request over a kept connection, CPU us",
        &REQUEST_CPU,
        &[4],
    ),
    ("a new connection, CPU us", &CONNECTION_CPU, &[5]),
    ("an agent's session, server, CPU ms", &HANDSHAKE_CPU, &[9]),
    ("an idle agent, server, KiB", &AGENTS_1000, &[9]),
    ("an idle stream, server, KiB", &STREAM_SERVER, &[9]),
    ("an idle stream, agent, KiB", &STREAM_AGENT, &[9]),
];

const SYSTEMS: &[&str] = &[FLOOR, RATHOLE, H2, QUIC, H2_HTTP, QUIC_HTTP];

/// A unit of work, and its metrics next to 10, 1,000 and 10,000 agents.
const GROWING: &[(&str, [Option<&Metric>; 3])] = &[
    (
        "a GiB down, CPU s",
        [
            Some(&BULK_BESIDE_10),
            Some(&BULK_BESIDE_1000),
            Some(&BULK_BESIDE_10000),
        ],
    ),
    (
        "a request over a kept connection, CPU us",
        [
            Some(&REQUEST_BESIDE_10),
            Some(&REQUEST_BESIDE_1000),
            Some(&REQUEST_BESIDE_10000),
        ],
    ),
    (
        "a new connection, CPU us",
        [
            Some(&CONNECTION_BESIDE_10),
            Some(&CONNECTION_BESIDE_1000),
            Some(&CONNECTION_BESIDE_10000),
        ],
    ),
    (
        "an idle agent, server, KiB",
        [None, Some(&AGENTS_1000), Some(&AGENTS_10000)],
    ),
];

/// Number of the case that measures memory and many agents.
const MANY: u8 = 9;

/// Appends both tables. A table without figures is left out.
pub(super) fn tables(text: &mut String, summary: &Summary) {
    units(text, summary);
    growth(text, summary);
}

fn units(text: &mut String, summary: &Summary) {
    let found = |system: &str, metric: &Metric, cases: &[u8]| {
        let mut found = cases
            .iter()
            .filter_map(|case| summary.stat(*case, system, metric));
        found.next()
    };
    let systems: Vec<_> = SYSTEMS
        .iter()
        .filter(|system| {
            UNITS
                .iter()
                .any(|(_, metric, cases)| found(system, metric, cases).is_some())
        })
        .collect();
    if systems.is_empty() {
        return;
    }
    push(text, "\n### Cost of a unit: server and agent together\n");
    let names: Vec<_> = systems
        .iter()
        .map(|system| format!(" {system} |"))
        .collect();
    push(text, &format!("| |{}", names.concat()));
    push(text, &format!("| --- |{}", " ---: |".repeat(systems.len())));
    for (unit, metric, cases) in UNITS {
        let cells: Vec<_> = systems
            .iter()
            .map(|system| {
                let cell = found(system, metric, cases).map_or_else(|| "-".to_owned(), show);
                format!(" {cell} |")
            })
            .collect();
        push(text, &format!("| {unit} |{}", cells.concat()));
    }
}

fn growth(text: &mut String, summary: &Summary) {
    let mut rows = Vec::new();
    for system in [H2, QUIC] {
        for (unit, metrics) in GROWING {
            let cells = metrics.map(|metric| {
                let found = metric.and_then(|metric| summary.stat(MANY, system, metric));
                found.map_or_else(|| "-".to_owned(), show)
            });
            if cells.iter().any(|cell| cell != "-") {
                rows.push(format!("| {system} | {unit} | {} |", cells.join(" | ")));
            }
        }
    }
    if rows.is_empty() {
        return;
    }
    push(
        text,
        "\n### Cost of a unit of work by number of connected agents\n",
    );
    push(text, "| | | 10 | 1,000 | 10,000 |");
    push(text, "| --- | --- | ---: | ---: | ---: |");
    for row in rows {
        push(text, &row);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::json::tests::report;

    #[test]
    fn costs_of_all_cases_are_in_one_table_and_growth_in_another() {
        let mut report = report();
        let sample = report.samples[0].clone();
        let mut add = |case, system: &str, metric, value| {
            report.samples.push(crate::bench::Sample {
                case,
                system: system.to_owned(),
                metric,
                value,
                foreign: 0.0,
                ..sample.clone()
            });
        };
        add(4, H2, &REQUEST_CPU, 29.0);
        add(MANY, H2, &REQUEST_BESIDE_1000, 31.0);
        let mut text = String::new();
        tables(&mut text, &Summary::of(&report));
        let row = |begin: &str| {
            let mut lines = text.lines();
            lines
                .find(|line| line.starts_with(begin))
                .unwrap_or_default()
                .to_owned()
        };
        assert!(row("| a request over").contains(" 29.0 |"), "{text}");
        let growing = row("| culvert-h2 | a request over");
        assert!(growing.ends_with("| - | 31.0 | - |"), "{text}");
    }
}
