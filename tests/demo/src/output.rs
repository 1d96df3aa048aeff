//! One step of the tour: a shell line and its expected answer.

use std::process::{Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::process::Command;
use tokio::time::timeout;

use super::terminal::Terminal;

/// One shell line, shown and run.
pub(super) struct TourStep {
    /// The shell line, exactly as run.
    pub(super) line: String,
    /// Texts that the answer must contain.
    expected: Vec<String>,
    /// Whether the line must fail.
    fails: bool,
}

/// Numbers of steps.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) failures: usize,
    pub(super) shown: usize,
}

impl TourStep {
    pub(super) fn new(line: String, expected: &[&str]) -> Self {
        let expected = expected.iter().map(|text| (*text).to_owned()).collect();
        Self {
            line,
            expected,
            fails: false,
        }
    }

    /// Returns the step with a line that must fail.
    pub(super) fn failing(self) -> Self {
        Self {
            fails: true,
            ..self
        }
    }

    /// Creates a step whose answer is the metrics of `node`.
    pub(super) fn metrics(node: &str, line: String) -> Self {
        Self::new(line, &[&format!("node=\"{node}\"")])
    }

    /// Shows and runs the line, and shows the answer.
    pub(super) async fn show(&self, terminal: &Terminal, tally: &mut Tally) -> Result<()> {
        terminal.command(&self.line);
        let output = self.run().await?;
        self.show_answer(&output, terminal, tally);
        Ok(())
    }

    pub(super) async fn run(&self) -> Result<Output> {
        let mut shell = Command::new("sh");
        shell
            .args(["-c", &self.line])
            .stdin(Stdio::null())
            .kill_on_drop(true);
        let output = timeout(STEP_TIMEOUT, shell.output()).await;
        output
            .with_context(|| format!("no end of {}", self.line))?
            .context("run sh")
    }

    pub(super) fn show_answer(&self, output: &Output, terminal: &Terminal, tally: &mut Tally) {
        terminal.output(&printed(output));
        let verdict = self.check(output);
        terminal.verdict(&verdict);
        tally.failures += usize::from(verdict.is_err());
        tally.shown += 1;
    }

    fn check(&self, output: &Output) -> Result<(), String> {
        if output.status.success() == self.fails {
            return Err(format!("ended with {}", output.status));
        }
        let text = printed(output);
        let mut expected = self.expected.iter();
        match expected.find(|part| !text.contains(part.as_str())) {
            Some(missing) => Err(format!("no {missing:?} in the answer")),
            None => Ok(()),
        }
    }
}

fn printed(output: &Output) -> String {
    let both =
        [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    both.concat().replace('\r', "")
}

/// Most steps take well under a second, and the download without UDP 15 s. The tunnel itself gives
/// up on a target sooner than this.
const STEP_TIMEOUT: Duration = Duration::from_secs(45);
