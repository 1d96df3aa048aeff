//! The report as JSON, which `bench compare` and `bench show` read.

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::summary::{Summary, verdict};
use super::{Report, Stat};
use crate::bench::Sample;
use crate::metric::Metric;

/// Renders the whole report.
pub(crate) fn render(report: &Report, summary: &Summary) -> Result<String> {
    let samples: Vec<_> = report.samples.iter().map(sample_value).collect();
    let targets: Vec<_> = summary
        .targets()
        .into_iter()
        .map(|(case, target, found)| {
            json!({
                "case": case,
                "system": target.system,
                "metric": target.metric.name,
                "of": target.of.to_string().trim_start(),
                "bound": target.bound.to_string(),
                "found": found.map(stat_value),
                "verdict": verdict(target, found),
            })
        })
        .collect();
    let dropped: usize = summary
        .dropped
        .values()
        .map(std::collections::BTreeSet::len)
        .sum();
    let value = json!({
        "commit": report.commit,
        "when": report.when,
        "command": report.command,
        "machine": report.machine,
        "build": report.build,
        "load": [report.load.0, report.load.1],
        "namespace": report.namespace,
        "tookSeconds": report.took_seconds,
        "foreignMost": report.foreign_most,
        "roundsDropped": dropped,
        "rathole": report.rathole,
        "troubles": report.errors,
        "targets": targets,
        "samples": samples,
    });
    Ok(serde_json::to_string_pretty(&value)? + "\n")
}

fn stat_value(stat: Stat) -> Value {
    json!({"median": stat.median, "least": stat.least, "most": stat.most, "rounds": stat.rounds})
}

fn sample_value(sample: &Sample) -> Value {
    json!({
        "case": sample.case,
        "system": sample.system,
        "round": sample.round,
        "metric": sample.metric.name,
        "unit": sample.metric.unit,
        "value": sample.value,
        "foreign": sample.foreign,
    })
}

/// Reads a report. Figures of metrics that this version does not have are left out.
pub(crate) fn read(path: &Path) -> Result<Report> {
    parse(&std::fs::read_to_string(path)?)
}

fn parse(text: &str) -> Result<Report> {
    let value: Value = serde_json::from_str(text)?;
    let text = |name: &str| value[name].as_str().unwrap_or_default().to_owned();
    let samples = value["samples"].as_array().context("no samples")?;
    let load = |at: usize| value["load"][at].as_f64().unwrap_or_default();
    Ok(Report {
        commit: text("commit"),
        when: text("when"),
        command: text("command"),
        machine: text("machine"),
        build: text("build"),
        load: (load(0), load(1)),
        namespace: value["namespace"] == true,
        took_seconds: value["tookSeconds"].as_u64().unwrap_or_default(),
        foreign_most: value["foreignMost"].as_f64().context("no foreignMost")?,
        rathole: value["rathole"] == true,
        samples: samples.iter().filter_map(sample).collect(),
        errors: value["troubles"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|record_error| Some(record_error.as_str()?.to_owned()))
            .collect(),
    })
}

fn sample(value: &Value) -> Option<Sample> {
    Some(Sample {
        case: u8::try_from(value["case"].as_u64()?).ok()?,
        system: value["system"].as_str()?.to_owned(),
        round: u32::try_from(value["round"].as_u64()?).ok()?,
        metric: Metric::named(value["metric"].as_str()?)?,
        value: value["value"].as_f64()?,
        foreign: value["foreign"].as_f64()?,
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::metric::{DOWN, DOWN_CPU};

    /// Returns three rounds of case 1, in which the throughput of the machine differs between
    /// rounds.
    pub(in crate::report) fn report() -> Report {
        let mut samples = Vec::new();
        for round in 0..3 {
            let speed = 1000.0 * f64::from(round + 1);
            for (system, metric, value) in [
                ("direct", &DOWN, speed),
                ("floor", &DOWN, speed / 2.0),
                ("floor", &DOWN_CPU, 0.8),
            ] {
                samples.push(Sample {
                    case: 1,
                    system: system.to_owned(),
                    round,
                    metric,
                    value: if round == 2 && *metric == DOWN {
                        value / 3.0
                    } else {
                        value
                    },
                    foreign: 0.1,
                });
            }
        }
        Report {
            commit: "0123456".to_owned(),
            when: "2026-01-01T00:00:00Z".to_owned(),
            command: "run".to_owned(),
            machine: "a machine".to_owned(),
            build: "release".to_owned(),
            load: (0.0, 1.0),
            namespace: true,
            took_seconds: 1,
            foreign_most: 0.3,
            rathole: false,
            samples,
            errors: vec!["case 1: a cable broke".to_owned()],
        }
    }

    #[test]
    fn report_comes_back_as_it_was() {
        let report = report();
        let text = render(&report, &Summary::of(&report)).unwrap();
        let back = parse(&text).unwrap();
        assert_eq!(back.samples, report.samples);
        assert_eq!(back.foreign_most, report.foreign_most);
        assert_eq!(back.errors, report.errors);
    }
}
