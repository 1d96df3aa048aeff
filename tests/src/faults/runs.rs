//! The runs of one row of the matrix, and the checks of what they measure.

use std::env;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::clocks::Clocks;
use super::flow::FlowEnd;
use super::watch::Measured;
use crate::eventually::scaled;
use crate::gear::Gear;

/// The transports that an agent may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransportMode {
    /// The agent uses QUIC only.
    Quic,
    /// The agent uses h2 only.
    H2,
    /// Any transport that gets through.
    Auto,
}

/// One run of a case.
#[derive(Debug, Clone, Copy)]
pub struct Run {
    pub case: &'static str,
    /// Seed of the bytes and of the treatment of each packet.
    pub seed: u64,
    /// Timers of faults and bounds.
    pub clocks: Clocks,
    /// Timers of both binaries.
    pub limits: Clocks,
    pub transport_mode: TransportMode,
}

/// The cases of one row, each with all seeds. They run at the same time, since most of them wait.
#[derive(Debug)]
pub struct Runs {
    clocks: Clocks,
    limits: Clocks,
    seeds: Vec<u64>,
    permits: Arc<Semaphore>,
    running: JoinSet<Result<()>>,
}

impl Runs {
    /// Creates an empty set of runs that wait for timers.
    pub fn timed(clocks: Clocks) -> Result<Self> {
        Self::new(clocks, clocks, TIMED_AT_ONCE)
    }

    /// Creates an empty set of runs with several processes each.
    pub fn processes(clocks: Clocks) -> Result<Self> {
        Self::new(clocks, clocks, PROCESSES_AT_ONCE)
    }

    /// Creates an empty set of runs that measure throughput and must not compete for the machine.
    /// They depend on QUIC's own recovery, whose timers cannot be shortened, so both binaries have
    /// their default timers.
    pub fn throughput(clocks: Clocks) -> Result<Self> {
        let at_once = clocks.pick(THROUGHPUT_AT_ONCE, THROUGHPUT_AT_ONCE_SHORT);
        Self::new(clocks, Clocks::Full, at_once)
    }

    fn new(clocks: Clocks, limits: Clocks, at_once: usize) -> Result<Self> {
        Ok(Self {
            clocks,
            limits,
            seeds: seeds()?,
            permits: Arc::new(Semaphore::new(at_once)),
            running: JoinSet::new(),
        })
    }

    /// Starts a case with each seed.
    pub fn start<F>(
        &mut self,
        transport_mode: TransportMode,
        case: &'static str,
        body: impl Fn(Run) -> F,
    ) where
        F: Future<Output = Result<()>> + Send + 'static,
    {
        for &seed in &self.seeds {
            let run = Run {
                case,
                seed,
                clocks: self.clocks,
                limits: self.limits,
                transport_mode,
            };
            let (running, permits) = (body(run), self.permits.clone());
            self.running.spawn(async move {
                let _permit = permits.acquire().await?;
                running.await.with_context(|| run.to_string())
            });
        }
    }

    /// Waits for all runs.
    ///
    /// # Errors
    /// Returns an error that lists the runs that failed.
    pub async fn finish(mut self) -> Result<()> {
        let mut failures = Vec::new();
        while let Some(ended) = self.running.join_next().await {
            match ended {
                Ok(Ok(())) => {}
                Ok(Err(error)) => failures.push(format!("{error:#}")),
                Err(panicked) => failures.push(panicked.to_string()),
            }
        }
        ensure!(failures.is_empty(), "{}", failures.join("\n"));
        Ok(())
    }
}

impl Run {
    /// Prints a measured value to the test's output.
    #[expect(clippy::print_stderr, reason = "shown with the test's output")]
    pub fn report(&self, figure: impl fmt::Display) {
        eprintln!("{self}: {figure}");
    }

    /// Reports the time until an event, or the time that was waited in vain.
    pub fn observed(&self, what: &str, measured: Measured) {
        self.report(format_args!("{what}: {}", text(measured)));
    }

    /// Checks the time until an event. The bound is for the reference machine.
    ///
    /// # Errors
    /// Returns an error if the event came later than the scaled bound, or not at all.
    pub fn within(&self, what: &str, bound: Duration, measured: Measured) -> Result<()> {
        let figure = format!("{what}: {}, bound {bound:.2?}", text(measured));
        self.report(&figure);
        let limit = scaled(bound);
        ensure!(
            measured.is_ok_and(|took| took <= limit),
            "{figure}, here {limit:.2?}"
        );
        Ok(())
    }

    /// Checks that streams arrived complete and equal.
    ///
    /// # Errors
    /// Returns an error that describes the streams that did not.
    pub fn equal(&self, what: &str, ends: &[FlowEnd]) -> Result<()> {
        self.streams(what, ends, FlowEnd::unequal)
    }

    /// Checks that streams arrived complete and equal, or were cut visibly for both ends.
    ///
    /// # Errors
    /// Returns an error that describes the streams that did not.
    pub fn equal_or_reset(&self, what: &str, ends: &[FlowEnd]) -> Result<()> {
        self.streams(what, ends, FlowEnd::unreported_loss)
    }

    fn streams(
        &self,
        what: &str,
        ends: &[FlowEnd],
        wrong: fn(&FlowEnd) -> Option<String>,
    ) -> Result<()> {
        let hashed: u64 = ends.iter().map(FlowEnd::hashed).sum();
        self.report(format_args!("{what}: {hashed} bytes hashed at both ends"));
        let wrong: Vec<_> = ends.iter().filter_map(wrong).collect();
        ensure!(wrong.is_empty(), "{what}: {}", wrong.join("; "));
        Ok(())
    }
}

impl TransportMode {
    /// Returns the value of `--transport`.
    pub fn setting(self) -> &'static str {
        match self {
            Self::Quic => "quic",
            Self::H2 => "h2",
            Self::Auto => "auto",
        }
    }
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { case, seed, .. } = self;
        write!(f, "{}, {case}, seed {seed}", self.transport_mode.setting())
    }
}

fn text(measured: Measured) -> String {
    match measured {
        Ok(took) => format!("{took:.2?}"),
        Err(waited) => format!("not in {waited:.2?}"),
    }
}

/// Returns the seeds of the environment, by default those of the run's gear.
fn seeds() -> Result<Vec<u64>> {
    let by_gear = Gear::current().pick("1", "1,2,3");
    let seeds = env::var(SEEDS_VARIABLE).unwrap_or_else(|_unset| by_gear.to_owned());
    seeds
        .split(',')
        .map(|seed| seed.trim().parse::<u64>())
        .collect::<Result<Vec<_>, _>>()
        .with_context(|| format!("{SEEDS_VARIABLE}={seeds}: expected numbers, as in 1,2,3"))
}

const SEEDS_VARIABLE: &str = "CULVERT_TEST_SEEDS";

/// The largest rows have twelve runs with three seeds.
const TIMED_AT_ONCE: usize = 16;
/// Each run has four processes or more.
const PROCESSES_AT_ONCE: usize = 4;
const THROUGHPUT_AT_ONCE: usize = 2;
/// With short timers the transfers are smaller.
const THROUGHPUT_AT_ONCE_SHORT: usize = 8;

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn event_that_came_too_late_or_never_is_an_error() {
        let run = Run {
            case: "idle",
            seed: 1,
            clocks: Clocks::Full,
            limits: Clocks::Full,
            transport_mode: TransportMode::Quic,
        };
        let bound = Duration::from_secs(1);
        assert!(run.within("served", bound, Ok(bound / 2)).is_ok());
        assert!(run.within("served", bound, Ok(bound * 10_000)).is_err());
        assert!(run.within("served", bound, Err(bound / 2)).is_err());
    }

    #[tokio::test]
    async fn failed_runs_are_listed_with_their_cases() {
        let mut runs = Runs::timed(Clocks::Short).unwrap();
        runs.start(TransportMode::H2, "good", |_run| async { Ok(()) });
        runs.start(TransportMode::H2, "bad", |_run| async {
            Err(anyhow!("lost"))
        });
        let error = runs.finish().await.unwrap_err().to_string();
        assert!(error.starts_with("h2, bad, seed "), "{error}");
        assert!(error.ends_with(": lost"), "{error}");
    }
}
