//! `bench run`: into a network namespace, all systems up, round after round, and the report.

use std::io::Write;
use std::path::PathBuf;
use std::process::{ExitCode, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use tunnel_tests::netns::Namespace;
use tunnel_tests::process::ScratchDir;

use crate::bench::{BenchRun, Options};
use crate::cases::{CASES, Case};
use crate::machine;
use crate::report::{self, Report};
use crate::systems::Systems;

/// Runs the cases.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Run {
    /// Cases by number, separated by commas: 1,2,8; all without it.
    #[arg(long, value_delimiter = ',')]
    case: Vec<u8>,
    /// Rounds of each case.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Twice as long runs, 512 stalled readers, ten thousand agents.
    #[arg(long)]
    full: bool,
    /// Keeps rounds in which other work took much of the machine.
    #[arg(long)]
    noisy: bool,
    /// A rathole binary to compare with.
    #[arg(long)]
    rathole: Option<PathBuf>,
    /// Where the report goes; target/bench without it.
    #[arg(long)]
    out: Option<PathBuf>,
    /// A document whose tables are written anew from the report.
    #[arg(long)]
    docs: Option<PathBuf>,
    /// A fraction of the time of each run, for trying things out.
    #[arg(long, default_value_t = 1.0)]
    hurry: f64,
    /// Planted slowdown: CPU time that the floor wastes on each read.
    #[arg(long, default_value = "0s")]
    waste: humantime::Duration,
    /// Already inside the namespace.
    #[arg(long, hide = true)]
    inside: bool,
    /// The commit that is measured; asked of git without it.
    #[arg(long, hide = true)]
    commit: Option<String>,
}

/// A round in which other work took more of the machine says nothing.
const FOREIGN_MOST: f64 = 0.3;

impl Run {
    pub(crate) async fn run(self) -> Result<ExitCode> {
        if !self.inside {
            match self.enter() {
                Ok(ended) => return ended,
                Err(skip) => writeln!(
                    std::io::stderr(),
                    "no network namespace, so plain loopback: {skip:#}"
                )?,
            }
        }
        self.measure().await
    }

    /// Runs the same again in a namespace of its own. The error says why that is not possible here.
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
            return Ok(CASES.iter().filter(|case| case.of_culvert).collect());
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
            bail!("a debug build measures nothing: cargo run --release");
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
            },
            samples: Vec::new(),
            case: 0,
            round: 0,
            errors: Vec::new(),
        };
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
                case.run(&mut bench)
                    .await
                    .with_context(|| format!("case {number}"))?;
            }
        }
        let foreign_most = if self.noisy { 1.0 } else { FOREIGN_MOST };
        let report = Report {
            commit: self.commit(),
            when: humantime::format_rfc3339_seconds(std::time::SystemTime::now()).to_string(),
            command: std::env::args()
                .skip(1)
                .take_while(|word| word != "--inside")
                .collect::<Vec<_>>()
                .join(" "),
            machine: machine::describe(),
            build: build(),
            load: (load_before, machine::load()),
            namespace: self.inside,
            took_seconds: began.elapsed().as_secs(),
            foreign_most,
            rathole: self.rathole.is_some(),
            samples: bench.samples,
            errors: bench.errors,
        };
        let folder = match &self.out {
            Some(out) => out.clone(),
            None => report::folder()?,
        };
        report.write(&folder, self.docs.as_deref())?;
        Ok(ExitCode::SUCCESS)
    }
}

/// The name of the binaries' folder.
fn build() -> String {
    let folder = tunnel_tests::tools::bin_dir().unwrap_or_default();
    let name = folder.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}
