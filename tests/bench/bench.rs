//! One run: the systems, how long things take, and the samples so far.

use std::time::Duration;

use anyhow::Result;

use crate::machine::{CpuMonitor, CpuUsage};
use crate::metric::Metric;
use crate::systems::{System, Systems};

/// How a run is made.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    /// Longer runs, and the sizes that take long.
    pub(crate) full: bool,
    /// A fraction of the time of each run; for trying things out.
    pub(crate) hurry: f64,
}

/// With these five rounds of all cases take some 13 minutes, and some 26 in full.
const QUICK: f64 = 0.6;
const FULL: f64 = 1.1;

impl Options {
    fn scale(&self) -> f64 {
        self.hurry * if self.full { FULL } else { QUICK }
    }
}

/// One figure of one round.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Sample {
    pub(crate) case: u8,
    pub(crate) system: String,
    pub(crate) round: u32,
    pub(crate) metric: &'static Metric,
    pub(crate) value: f64,
    /// Share of the machine that others used meanwhile.
    pub(crate) foreign: f64,
}

/// The run so far.
#[derive(Debug)]
pub(crate) struct BenchRun {
    pub(crate) systems: Systems,
    pub(crate) options: Options,
    pub(crate) samples: Vec<Sample>,
    pub(crate) case: u8,
    pub(crate) round: u32,
    /// What a case was not able to do.
    pub(crate) errors: Vec<String>,
}

impl BenchRun {
    /// How long a run of this length takes.
    pub(crate) fn length(&self, seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds * self.options.scale())
    }

    /// Bytes of a run, alike.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a share of gibibytes"
    )]
    pub(crate) fn bytes(&self, bytes: u64) -> u64 {
        (bytes as f64 * self.options.scale()) as u64
    }

    /// The systems of these names, beginning with another one each round.
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

    /// Runs `work` with an eye on the machine, and on `others` beside the processes of the systems.
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

    /// Keeps a figure.
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

    /// Tells what went wrong with one system; the others go on.
    pub(crate) fn record_error(&mut self, system: &str, error: &anyhow::Error) {
        self.record(system, &crate::metric::FAILED, 1.0, 0.0);
        let (case, round) = (self.case, self.round);
        self.errors
            .push(format!("case {case}, round {round}, {system}: {error:#}"));
    }
}

/// Bytes of a gibibyte.
pub(crate) const GIB: f64 = 1_073_741_824.0;

/// CPU microseconds of server and agent for each of `count`.
#[expect(clippy::cast_precision_loss, reason = "a figure for people")]
pub(crate) fn micros_each(usage: &CpuUsage, system: &System, count: usize) -> f64 {
    (usage.cpu(system.server) + usage.cpu(system.agent)) * 1e6 / count.max(1) as f64
}

/// Microseconds.
pub(crate) fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
