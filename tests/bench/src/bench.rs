//! State of one run: the systems, the options and the samples so far.

use std::time::Duration;

use anyhow::Result;

use crate::machine::{CpuMonitor, CpuUsage};
use crate::metric::Metric;
use crate::systems::{System, Systems};

/// Options of a run.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    /// Whether measurements take longer and include the sizes that take long. Set by `--full`.
    pub(crate) full: bool,
    /// Factor for the duration of each measurement. Set by `--hurry`, 1.0 by default.
    pub(crate) hurry: f64,
    /// Number of agents of case 14. Set by `--agents`, 10,000 by default.
    pub(crate) agents: usize,
}

/// Factors for the duration of each measurement. With them, five rounds of all cases take about 17
/// minutes, and about 29 minutes with `--full`.
const QUICK: f64 = 0.6;
const FULL: f64 = 1.1;

impl Options {
    fn scale(&self) -> f64 {
        self.hurry * if self.full { FULL } else { QUICK }
    }
}

/// Value of one metric in one round.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Sample {
    pub(crate) case: u8,
    pub(crate) system: String,
    pub(crate) round: u32,
    pub(crate) metric: &'static Metric,
    pub(crate) value: f64,
    /// Share of the machine that other processes used during the measurement, 0 to 1.
    pub(crate) foreign: f64,
}

/// State of a run.
#[derive(Debug)]
pub(crate) struct BenchRun {
    pub(crate) systems: Systems,
    pub(crate) options: Options,
    pub(crate) samples: Vec<Sample>,
    pub(crate) case: u8,
    pub(crate) round: u32,
    /// Errors of single systems, one text each.
    pub(crate) errors: Vec<String>,
}

impl BenchRun {
    /// Returns the duration of a measurement of `seconds`, scaled by the options.
    pub(crate) fn length(&self, seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds * self.options.scale())
    }

    /// Returns the size of a measurement of `bytes`, scaled by the options.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a share of gibibytes"
    )]
    pub(crate) fn bytes(&self, bytes: u64) -> u64 {
        (bytes as f64 * self.options.scale()) as u64
    }

    /// Returns the systems with these names. Each round begins with another system.
    pub(crate) fn rotated_systems(&mut self, names: &[&str]) -> Vec<System> {
        let all = self.systems.all();
        let mut rotated_systems: Vec<_> = names
            .iter()
            .filter_map(|name| all.iter().find(|system| system.name == *name).cloned())
            .collect();
        let first = self.round as usize % rotated_systems.len().max(1);
        rotated_systems.rotate_left(first);
        rotated_systems
    }

    /// Runs `work` and measures the CPU time of the machine, of the processes of the systems and of
    /// `others` during it.
    pub(crate) async fn watch<T>(
        &mut self,
        others: &[u32],
        work: impl Future<Output = Result<T>>,
    ) -> Result<(T, CpuUsage)> {
        let mut processes = self.systems.processes();
        processes.extend(others);
        let watch = CpuMonitor::begin(&processes);
        let done = work.await?;
        Ok((done, watch.end()))
    }

    /// Records a figure of the current case and round.
    pub(crate) fn record(
        &mut self,
        system: &str,
        metric: &'static Metric,
        value: f64,
        foreign: f64,
    ) {
        self.samples.push(Sample {
            case: self.case,
            system: system.to_owned(),
            round: self.round,
            metric,
            value,
            foreign,
        });
    }

    /// Returns the last figure of this round, of any case.
    pub(crate) fn last_figure(&self, system: &str, metric: &Metric) -> Option<f64> {
        let of_round = |sample: &&Sample| {
            sample.round == self.round && sample.system == system && sample.metric == metric
        };
        let found = self.samples.iter().rev().find(of_round);
        found.map(|sample| sample.value)
    }

    /// Records an error of one system as a failure. The case continues with the other systems.
    pub(crate) fn record_error(&mut self, system: &str, error: &anyhow::Error) {
        self.record(system, &crate::metric::FAILED, 1.0, 0.0);
        let (case, round) = (self.case, self.round);
        self.errors
            .push(format!("case {case}, round {round}, {system}: {error:#}"));
    }
}

pub(crate) const GIB: f64 = 1_073_741_824.0;

/// Returns the CPU time of servers and agent in microseconds, divided by `count`.
#[expect(clippy::cast_precision_loss, reason = "a figure for people")]
pub(crate) fn micros_each(usage: &CpuUsage, system: &System, count: usize) -> f64 {
    let servers = usage.cpu(system.server) + usage.cpu(system.hop);
    (servers + usage.cpu(system.agent)) * 1e6 / count.max(1) as f64
}

/// Returns a duration in microseconds.
pub(crate) fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
