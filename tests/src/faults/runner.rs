//! Runs cases with several seeds, many at once, since most of them wait.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use super::findings::{Findings, Measure, Verdict};
use super::{Case, Clocks, Cost, Run};
use crate::eventually::scaled;

/// The runs to execute.
#[derive(Debug)]
pub struct Plan {
    pub cases: Vec<&'static Case>,
    /// Seeds; each case runs once with each of them.
    pub seeds: Vec<u64>,
    /// Timers of all runs.
    pub clocks: Clocks,
    /// Number of parallel runs, in addition to idle ones.
    pub jobs: usize,
}

/// A run that has ended.
#[derive(Debug)]
pub struct FinishedRun {
    /// Case of the run.
    pub case: &'static Case,
    /// Seed of the run.
    pub seed: u64,
    /// Duration of the run.
    pub took: Duration,
    /// Findings, or the reason why the run could not be measured.
    pub findings: Result<Findings, String>,
}

/// An event during [`run`].
#[derive(Debug)]
pub enum RunEvent<'a> {
    /// A run has begun.
    Began(&'static Case, u64),
    /// A run has ended.
    Ended(&'a FinishedRun),
}

impl Plan {
    /// Returns the number of runs.
    #[must_use]
    pub fn runs(&self) -> usize {
        self.cases.len() * self.seeds.len()
    }

    /// Returns all runs, longest first.
    fn order(&self) -> Vec<(&'static Case, u64)> {
        let seeds = self.seeds.iter();
        let mut runs: Vec<_> = seeds
            .flat_map(|seed| self.cases.iter().map(|case| (*case, *seed)))
            .collect();
        runs.sort_by_key(|(case, _)| (case.cost != Cost::Idle, std::cmp::Reverse(case.about)));
        runs
    }
}

impl FinishedRun {
    /// Returns the worst verdict of the measures. A run without measures is a miss.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        let Ok(findings) = &self.findings else {
            return Verdict::Miss;
        };
        let verdicts = findings.measures.iter().map(Measure::verdict);
        verdicts.max().unwrap_or(Verdict::Miss)
    }
}

/// Executes the plan and returns the completed runs. If `stop` is canceled, returns those completed
/// up to then.
pub async fn run(
    plan: &Plan,
    stop: &CancellationToken,
    mut on_event: impl FnMut(RunEvent<'_>),
) -> Vec<FinishedRun> {
    let permits = Arc::new(RunPermits {
        all: Semaphore::new(plan.jobs),
        works: Semaphore::new(plan.clocks.pick(WORKERS, WORKERS_SHORT).min(plan.jobs)),
    });
    let (begin, mut begun) = mpsc::channel(plan.runs().max(1));
    let mut runs = JoinSet::new();
    for (case, seed) in plan.order() {
        let (permits, begin, clocks) = (permits.clone(), begin.clone(), plan.clocks);
        runs.spawn(async move {
            let _permits = permits.acquire_for(case.cost).await;
            // The send fails only if the receiver is gone.
            let _nobody_listens = begin.send((case, seed)).await;
            one(case, seed, clocks).await
        });
    }
    drop(begin);
    let mut done = Vec::new();
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => {
                runs.shutdown().await;
                return done;
            }
            Some((case, seed)) = begun.recv() => on_event(RunEvent::Began(case, seed)),
            joined = runs.join_next() => match joined {
                None => return done,
                Some(Ok(one)) => {
                    on_event(RunEvent::Ended(&one));
                    done.push(one);
                }
                // `one` catches panics of its run; this is the runner's own panic.
                Some(Err(_)) => {}
            },
        }
    }
}

async fn one(case: &'static Case, seed: u64, clocks: Clocks) -> FinishedRun {
    let began = Instant::now();
    let limit = scaled(case.about * 3 + LIMIT_LEAST);
    let mut running = JoinSet::new();
    running.spawn((case.run)(Run {
        case: case.what,
        seed,
        clocks,
        limits: match case.cost {
            Cost::Timed | Cost::Idle => clocks,
            // These depend on QUIC's own recovery, whose timers cannot be shortened.
            Cost::Throughput | Cost::SlowThroughput => Clocks::Full,
        },
        transport_mode: case.transport_mode,
    }));
    let findings = match timeout(limit, running.join_next()).await {
        Ok(Some(Ok(Ok(findings)))) => Ok(findings),
        Ok(Some(Ok(Err(error)))) => Err(format!("{error:#}")),
        Ok(Some(Err(panicked))) => Err(panic_text(panicked)),
        Ok(None) => Err("did not run".to_owned()),
        Err(_elapsed) => Err(format!("not done after {limit:?}")),
    };
    // Dropping the set ends the run's tasks at their next await point, which does not wait for
    // their processes.
    running.shutdown().await;
    FinishedRun {
        case,
        seed,
        took: began.elapsed(),
        findings,
    }
}

fn panic_text(panicked: tokio::task::JoinError) -> String {
    match panicked.try_into_panic() {
        Ok(payload) => {
            let text = payload.downcast_ref::<String>().cloned();
            let text = text.or_else(|| {
                payload
                    .downcast_ref::<&str>()
                    .map(|text| (*text).to_owned())
            });
            format!("panicked: {}", text.unwrap_or_default())
        }
        Err(error) => error.to_string(),
    }
}

/// The permits that runs share.
struct RunPermits {
    all: Semaphore,
    works: Semaphore,
}

impl RunPermits {
    /// Acquires the permits of a run. Both semaphores are fair, so that runs begin in order.
    async fn acquire_for(&self, cost: Cost) -> Vec<tokio::sync::SemaphorePermit<'_>> {
        let wanted = match cost {
            Cost::Idle => &[][..],
            Cost::Timed => &[&self.all],
            Cost::Throughput | Cost::SlowThroughput => &[&self.works, &self.all],
        };
        let mut permits = Vec::new();
        for semaphore in wanted {
            // The semaphores are never closed.
            permits.extend(semaphore.acquire().await.ok());
        }
        permits
    }
}

/// Throughput measurements must not compete for the machine.
const WORKERS: usize = 2;
/// With short timers the transfers are smaller.
const WORKERS_SHORT: usize = 8;
/// Minimum time limit of a run.
const LIMIT_LEAST: Duration = Duration::from_secs(120);
