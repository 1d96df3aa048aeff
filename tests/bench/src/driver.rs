//! `bench run`: enters a network namespace, starts all systems, runs the rounds and writes the
//! report.

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use tunnel_tests::netns::Namespace;
use tunnel_tests::process::ScratchDir;
use tunnel_tests::tools::{bin_dir, target_dir};

use crate::bench::{BenchRun, Options};
use crate::cases::{CASES, Case};
use crate::machine;
use crate::report;
use crate::systems::{NAMES, Systems};

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Run {
    /// Numbers of the cases, separated by commas, such as 1,2,8; all cases by default.
    #[arg(long, value_delimiter = ',')]
    case: Vec<u8>,
    /// Number of rounds of each case.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Measures about twice as long, and adds 512 stalled readers, 10,000 agents and case 14.
    #[arg(long)]
    full: bool,
    /// Number of agents of case 14; 10,000 by default.
    #[arg(long, value_parser = clap::value_parser!(u32).range(10..))]
    agents: Option<u32>,
    /// Keeps rounds in which other processes used more than 30 % of the machine.
    #[arg(long)]
    noisy: bool,
    /// Path of a rathole binary to compare with.
    #[arg(long)]
    rathole: Option<PathBuf>,
    /// Folder of the report; target/bench by default.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Factor for the duration of each measurement, below 1 for quick trials.
    #[arg(long, default_value_t = 1.0)]
    hurry: f64,
    /// Slowdown for tests: CPU time that the minimal relay over h2 wastes on each read.
    #[arg(long, default_value = "0s")]
    waste: humantime::Duration,
    /// Whether this process is already in the namespace.
    #[arg(long, hide = true)]
    inside: bool,
    /// Commit that is measured; the output of `git describe` by default.
    #[arg(long, hide = true)]
    commit: Option<String>,
}

/// Number of agents of case 14.
const AGENTS: u32 = 10_000;

/// Largest share of the machine that other processes may use in a round. Rounds above it are
/// dropped.
const FOREIGN_MOST: f64 = 0.3;

impl Run {
    pub(crate) async fn run(self) -> Result<ExitCode> {
        if !self.inside {
            match self.enter() {
                Ok(ended) => return ended,
                Err(skip) => writeln!(
                    std::io::stderr(),
                    "no network namespace, using the loopback interface: {skip:#}"
                )?,
            }
        }
        self.measure().await
    }

    /// Runs this command again in a network namespace of its own. The error says why the namespace
    /// cannot be created.
    fn enter(&self) -> Result<Result<ExitCode>> {
        let scratch = ScratchDir::new()?;
        let hosts = scratch.file("hosts", "127.0.0.1 localhost\n")?;
        let namespace =
            Namespace::new("bench", &hosts).map_err(|skip| anyhow::anyhow!("{skip}"))?;
        let mut command = namespace.command(std::env::current_exe()?);
        command
            .args(std::env::args_os().skip(1))
            .args(["--inside", "--commit", &self.commit()])
            .stdin(Stdio::null());
        let ended = command.status().context("run inside the namespace");
        Ok(ended.map(|status| match status.code() {
            Some(0) => ExitCode::SUCCESS,
            Some(_) | None => ExitCode::FAILURE,
        }))
    }

    fn commit(&self) -> String {
        if let Some(commit) = &self.commit {
            return commit.clone();
        }
        let mut git = std::process::Command::new("git");
        let described = git.args(["describe", "--always", "--dirty"]).output();
        let text = described.map(|output| output.stdout).unwrap_or_default();
        let text = String::from_utf8_lossy(&text).trim().to_owned();
        if text.is_empty() {
            "unknown".to_owned()
        } else {
            text
        }
    }

    fn cases(&self) -> Result<Vec<&'static Case>> {
        if self.case.is_empty() {
            let has_long = self.full || self.agents.is_some();
            let is_run = |case: &&Case| case.of_culvert && (has_long || !case.is_long);
            return Ok(CASES.iter().filter(is_run).collect());
        }
        let find = |number: &u8| {
            let mut cases = CASES.iter();
            let found = cases.find(|case| case.number == *number);
            found.with_context(|| format!("no case {number}"))
        };
        self.case.iter().map(find).collect()
    }

    async fn measure(self) -> Result<ExitCode> {
        let cases = self.cases()?;
        if cfg!(debug_assertions) && cases.iter().any(|case| case.of_culvert) {
            bail!("cannot measure a debug build; use cargo run --release");
        }
        let began = Instant::now();
        let load_before = machine::load();
        let culvert = cases.iter().any(|case| case.of_culvert);
        let systems = Systems::start(culvert, *self.waste, self.rathole.as_deref()).await?;
        let mut bench = BenchRun {
            systems,
            options: Options {
                full: self.full,
                hurry: self.hurry,
                agents: usize::try_from(self.agents.unwrap_or(AGENTS))?,
            },
            samples: Vec::new(),
            case: 0,
            round: 0,
            errors: Vec::new(),
        };
        let mut exit = ExitCode::SUCCESS;
        for round in 0..self.rounds {
            for case in &cases {
                if round >= case.rounds_most {
                    continue;
                }
                (bench.case, bench.round) = (case.number, round);
                let (number, title) = (case.number, case.title);
                let at = began.elapsed().as_secs();
                writeln!(
                    std::io::stderr(),
                    "{at:>5} s  round {}: case {number}, {title}",
                    round + 1
                )?;
                if let Err(error) = case.run(&mut bench).await {
                    let error = format!("case {number}, round {}: {error:#}", round + 1);
                    writeln!(std::io::stderr(), "{error}")?;
                    bench.errors.push(error);
                    exit = ExitCode::FAILURE;
                }
            }
        }
        let report = self.report(&bench, began.elapsed(), [load_before, machine::load()]);
        self.write(&report)?;
        Ok(exit)
    }

    /// Returns the conditions of the run, the definitions of its figures, and the samples. `load`
    /// is the load average before and after the run.
    fn report(&self, bench: &BenchRun, took: Duration, load: [f64; 2]) -> Value {
        let command: Vec<_> = std::env::args()
            .skip(1)
            .take_while(|word| word != "--inside")
            .collect();
        let samples: Vec<_> = bench.samples.iter().map(report::sample_value).collect();
        json!({
            "commit": self.commit(),
            "when": humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            "command": command.join(" "),
            "machine": machine::describe(),
            "build": build(),
            "load": load,
            "namespace": self.inside,
            "tookSeconds": took.as_secs(),
            "foreignMost": if self.noisy { 1.0 } else { FOREIGN_MOST },
            "rathole": self.rathole.is_some(),
            "errors": bench.errors,
            "systems": NAMES,
            "metrics": report::metrics(),
            "cases": report::cases(),
            "samples": samples,
        })
    }

    /// Writes the report and prints its path.
    fn write(&self, report: &Value) -> Result<()> {
        let folder = match &self.out {
            Some(out) => out.clone(),
            None => target_dir()
                .context("the build's target folder")?
                .join("bench"),
        };
        fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
        let path = folder.join("report.json");
        let text = serde_json::to_string_pretty(report)? + "\n";
        fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
        writeln!(std::io::stdout(), "{}", path.display())?;
        Ok(())
    }
}

/// Returns the build profile of the binaries, which is the name of their folder: `release`, or
/// `dist` for delivered binaries.
fn build() -> String {
    let folder = bin_dir().unwrap_or_default();
    let name = folder.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}
