//! The program `faults`: arguments, progress output, and the final table.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Parser;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, interval};
use tokio_util::sync::CancellationToken;
use tunnel_proto::process::telemetry::{self, LogFormat};

use super::findings::Verdict;
use super::runner::{FinishedRun, Plan, RunEvent, run};
use super::table::{Table, verdict_label};
use super::{CASES, Case, Clocks, Cost, spawn};
use crate::eventually::calibration;

/// Puts the tunnel on bad networks and compares its behavior with fixed bounds.
///
/// Each case creates a server, an agent, targets and callers, impairs the network between server
/// and agent (or stops one of the two), and measures: how long a stream stalls, when new requests
/// are served again, over which transport, whether every byte that arrives is the byte that was
/// sent. Each case runs with several seeds, which determine the bytes and the treatment of each
/// packet.
///
/// Progress goes to standard error, the table to standard output. The bound of a time is multiplied
/// by a factor that is measured at the start and printed: 1 on an idle machine, more on a slow or
/// busy one. Ctrl-C ends the program with the table of the completed runs.
///
/// Exit code: 0 if every value is within its bound, 1 if one is not or a run could not be measured,
/// 130 after Ctrl-C, 64 for wrong arguments.
#[derive(Debug, Parser)]
#[command(name = "faults", after_help = EXAMPLES)]
pub struct Arguments {
    /// Run only these rows of the matrix, as in F06 or F13,F14
    #[arg(long, value_name = "ROWS", value_delimiter = ',')]
    only: Vec<String>,

    /// Run only cases over this transport: quic, h2 or auto (any that gets through)
    #[arg(long, value_name = "NAME")]
    over: Option<String>,

    /// Number of runs of each case, with the seeds 1 to N
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,

    /// Run each case with this seed alone, to reproduce a miss
    #[arg(long, value_name = "SEED", conflicts_with = "seeds")]
    seed: Option<u64>,

    /// Number of parallel runs. Most of them wait; at most two of them measure throughput, and F32
    /// runs in parallel with all others
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..))]
    jobs: u16,

    /// Use short timers: about ten times faster, with limits of both binaries set to match. For a
    /// quick check; the bounds are defined for the default timers
    #[arg(long)]
    quick: bool,

    /// Also write the table to this file, as Markdown
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,

    /// List the cases and exit
    #[arg(long)]
    list: bool,

    /// Log the server and agent of this process to standard error: error, warn, info, debug or
    /// trace
    #[arg(long, value_name = "LEVEL")]
    log: Option<String>,
}

impl Arguments {
    fn clocks(&self) -> Clocks {
        if self.quick {
            Clocks::Short
        } else {
            Clocks::Full
        }
    }
}

const EXAMPLES: &str = "\
Examples:
  make faults                              all of it, some 11 minutes, since F32 takes 10
  make faults ARGS=--quick                 all of it with short clocks, in about 2 minutes
  make faults ONLY=F06 SEEDS=1             one row once
  make faults ONLY=F14 ARGS='--seed 2 --log debug'
                                           one run of it again, with the log of both ends";

/// Runs the program with its arguments.
///
/// # Errors
/// Returns an error if signals cannot be handled or the Markdown file cannot be written.
pub async fn main(arguments: Arguments) -> Result<ExitCode> {
    let cases = match chosen(&arguments) {
        Ok(cases) => cases,
        Err(error) => {
            note(&format!("faults: {error:#}"));
            return Ok(ExitCode::from(USAGE));
        }
    };
    if arguments.list {
        say(&list(&cases));
        return Ok(ExitCode::SUCCESS);
    }
    let _logs = match &arguments.log {
        Some(level) => {
            let Ok(level) = level.parse() else {
                note(&format!("faults: --log: {level:?} is no level"));
                return Ok(ExitCode::from(USAGE));
            };
            Some(telemetry::start(level, LogFormat::Text).context("start the log")?)
        }
        None => None,
    };
    let plan = Plan {
        cases,
        seeds: match arguments.seed {
            Some(seed) => vec![seed],
            None => (1..=arguments.seeds).collect(),
        },
        clocks: arguments.clocks(),
        jobs: usize::from(arguments.jobs),
    };
    let began = Instant::now();
    let machine = format!(
        "calibration factor {:.2} (bounds on times are multiplied by it), load {}",
        calibration(),
        load()
    );
    note(&machine);
    note(&introduction(&plan));
    let (done, interrupted) = with_progress(&plan, began).await?;
    let table = Table::new(&plan, &done);
    let runs = plan.runs();
    let mut text = format!(
        "{}\n{machine}; at the end {}\n{}\n{} of {runs} runs in {} s; {}\n",
        table.text(),
        load(),
        plan.clocks.describe(),
        done.len(),
        began.elapsed().as_secs(),
        table.summary()
    );
    if interrupted {
        text.push_str("ended by Ctrl-C: the other runs were not made\n");
    }
    for miss in table.misses() {
        text.push_str(&format!("MISS {miss}\n"));
    }
    say(&text);
    if let Some(file) = &arguments.markdown {
        write_markdown(file, &table, &machine, &plan)?;
    }
    Ok(match (interrupted, table.misses().is_empty()) {
        (_, false) => ExitCode::FAILURE,
        (true, true) => ExitCode::from(INTERRUPTED),
        (false, true) => ExitCode::SUCCESS,
    })
}

fn chosen(arguments: &Arguments) -> Result<Vec<&'static Case>> {
    let rows: BTreeSet<&str> = CASES.iter().map(|case| case.id).collect();
    let wanted: Vec<String> = arguments
        .only
        .iter()
        .map(|row| row.to_uppercase())
        .collect();
    if let Some(row) = wanted.iter().find(|row| !rows.contains(row.as_str())) {
        let rows: Vec<_> = rows.iter().copied().collect();
        bail!("there is no row {row}; there are {}", rows.join(", "));
    }
    let cases = CASES.iter().filter(|case| {
        let row = wanted.is_empty() || wanted.iter().any(|row| row == case.id);
        let over = arguments.over.as_deref();
        row && over.is_none_or(|over| case.transport_mode.to_string() == over)
    });
    let clocks = arguments.clocks();
    let (cases, left_out): (Vec<_>, Vec<_>) = cases.partition(|case| case.suits(clocks));
    for case in left_out {
        note(&format!(
            "left out, since its times cannot be shortened: {} {} {}",
            case.id, case.transport_mode, case.what
        ));
    }
    if cases.is_empty() {
        bail!("no case is left by --only and --over; --list shows what there is");
    }
    Ok(cases)
}

fn list(cases: &[&Case]) -> String {
    let line = |case: &&Case| {
        let seconds = case.about.as_secs();
        format!(
            "{}  {:<4}  {:<44} some {seconds} s\n",
            case.id, case.transport_mode, case.what
        )
    };
    cases
        .iter()
        .map(line)
        .collect::<String>()
        .trim_end()
        .to_owned()
}

fn introduction(plan: &Plan) -> String {
    let mut text = format!(
        "{} cases with {} seeds are {} runs, {} at once; {}",
        plan.cases.len(),
        plan.seeds.len(),
        plan.runs(),
        plan.jobs,
        plan.clocks.describe()
    );
    let idles = plan.cases.iter().filter(|case| case.cost == Cost::Idle);
    if let (Some(longest), Clocks::Full) = (idles.map(|case| case.about).max(), plan.clocks) {
        text.push_str(&format!(
            "\nF32 takes {} minutes, and runs next to the others",
            longest.as_secs() / 60
        ));
    }
    text
}

/// Runs the plan. Returns the completed runs, and whether Ctrl-C ended it.
async fn with_progress(plan: &Plan, began: Instant) -> Result<(Vec<FinishedRun>, bool)> {
    let stop = CancellationToken::new();
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for Ctrl-C")?;
    let mut terminate = signal(SignalKind::terminate()).context("listen for TERM")?;
    let stopping = stop.clone();
    let _listening = spawn(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        note("stopping");
        stopping.cancel();
    });
    let progress = std::sync::Arc::new(std::sync::Mutex::new(Progress {
        runs: plan.runs(),
        ended: 0,
        running: Vec::new(),
        began,
    }));
    let shown = progress.clone();
    let _beating = spawn(async move {
        let mut beats = interval(BEAT);
        beats.tick().await;
        loop {
            beats.tick().await;
            note(&lock(&shown).beat());
        }
    });
    let done = run(plan, &stop, |event| lock(&progress).take(&event)).await;
    Ok((done, stop.is_cancelled()))
}

struct Progress {
    runs: usize,
    ended: usize,
    running: Vec<String>,
    began: Instant,
}

impl Progress {
    fn take(&mut self, event: &RunEvent<'_>) {
        match event {
            RunEvent::Began(case, seed) => self.running.push(name(case, *seed)),
            RunEvent::Ended(done) => {
                let ended = name(done.case, done.seed);
                self.running.retain(|running| *running != ended);
                self.ended += 1;
                note(&self.line(done));
            }
        }
    }

    fn line(&self, done: &FinishedRun) -> String {
        let verdict = done.verdict();
        let mut line = format!(
            "[{:>3} of {}, {:>4} s] {:<4} {} {} seed {}: {} in {:.0} s",
            self.ended,
            self.runs,
            self.began.elapsed().as_secs(),
            verdict_label(verdict),
            done.case.id,
            done.case.transport_mode,
            done.seed,
            done.case.what,
            done.took.as_secs_f64()
        );
        match &done.findings {
            Ok(findings) => {
                let missed = findings.measures.iter();
                let missed = missed.filter(|measure| measure.verdict() == Verdict::Miss);
                for measure in missed {
                    let (what, value) = (&measure.what, &measure.value);
                    line.push_str(&format!("\n      {what}: {value}, bound {}", measure.bound));
                }
            }
            Err(why) => line.push_str(&format!("\n      not measured: {why}")),
        }
        line
    }

    fn beat(&self) -> String {
        format!(
            "[{:>3} of {}, {:>4} s] running: {}",
            self.ended,
            self.runs,
            self.began.elapsed().as_secs(),
            self.running.join(", ")
        )
    }
}

fn name(case: &Case, seed: u64) -> String {
    format!(
        "{} {} \"{}\" seed {seed}",
        case.id, case.transport_mode, case.what
    )
}

fn write_markdown(file: &Path, table: &Table, machine: &str, plan: &Plan) -> Result<()> {
    let mut text = format!(
        "{machine}; {}.\n\n{}\n{}.\n",
        plan.clocks.describe(),
        table.markdown(),
        table.summary()
    );
    for miss in table.misses() {
        text.push_str(&format!("\n- MISS {miss}"));
    }
    fs::write(file, text).with_context(|| format!("write {}", file.display()))
}

fn load() -> String {
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    load.split_whitespace()
        .next()
        .unwrap_or("unknown")
        .to_owned()
}

fn lock(progress: &std::sync::Mutex<Progress>) -> std::sync::MutexGuard<'_, Progress> {
    progress
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn say(text: &str) {
    let mut out = io::stdout().lock();
    // A closed pipe is not an error.
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
}

fn note(text: &str) {
    // Errors are lost if standard error is closed.
    let _ = writeln!(io::stderr(), "{text}");
}

/// Time between two lines with the current runs.
const BEAT: Duration = Duration::from_secs(30);
const USAGE: u8 = 64;
const INTERRUPTED: u8 = 130;
