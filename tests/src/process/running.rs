//! Starts, observes and ends one process.

use std::ffi::OsString;
use std::fmt;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tokio::io::AsyncWriteExt as _;
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::{Log, Terminal};
use crate::audit_events::AuditEvents;
use crate::eventually::scaled;
use crate::netns::Namespace;
use crate::tools::{Skip, Tool, bin_dir};

/// A program with its arguments and environment.
#[derive(Debug, Clone)]
pub struct Program {
    label: String,
    argv: Vec<OsString>,
    environment: Vec<(OsString, OsString)>,
    own_group: bool,
}

impl Program {
    /// Returns a binary of this workspace, from the build that the running program belongs to.
    pub fn ours(name: &str) -> Result<Self> {
        let file = bin_dir().context("folder of the binaries")?.join(name);
        if !file.is_file() {
            bail!(
                "{} is missing: cargo build --workspace --bins makes it",
                file.display()
            );
        }
        Ok(Self::new(name, file))
    }

    /// Returns an external program.
    pub fn tool(tool: Tool) -> Result<Self, Skip> {
        let command = tool.command()?;
        let mut program = Self::new(tool.program(), command.get_program());
        for (name, value) in command.get_envs() {
            program
                .environment
                .extend(value.map(|value| (name.to_owned(), value.to_owned())));
        }
        Ok(program)
    }

    pub fn at(file: &Path) -> Self {
        let name = file.file_name().unwrap_or(file.as_os_str());
        Self::new(&name.to_string_lossy(), file)
    }

    fn new(label: &str, file: impl Into<OsString>) -> Self {
        Self {
            label: label.to_owned(),
            argv: vec![file.into()],
            environment: Vec::new(),
            own_group: false,
        }
    }

    pub fn arg(mut self, word: impl Into<OsString>) -> Self {
        self.argv.push(word.into());
        self
    }

    pub fn args<W: Into<OsString>>(mut self, argv: impl IntoIterator<Item = W>) -> Self {
        self.argv.extend(argv.into_iter().map(Into::into));
        self
    }

    pub fn env(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// Runs the program inside `namespace`, or in the current namespace without one.
    pub fn inside(mut self, namespace: Option<&Namespace>) -> Self {
        if let Some(namespace) = namespace {
            self.label = format!("{} in {}", self.label, namespace.name());
            self.argv.splice(0..0, namespace.enter());
        }
        self
    }

    /// Runs the program by another program, which receives the program and its arguments as its
    /// last arguments.
    pub fn through<W: Into<OsString>>(mut self, argv: impl IntoIterator<Item = W>) -> Self {
        self.argv.splice(0..0, argv.into_iter().map(Into::into));
        self
    }

    /// Protects the program from signals that a terminal sends to the whole process group.
    pub fn in_own_group(mut self) -> Self {
        self.own_group = true;
        self
    }

    /// Starts the program with an empty standard input.
    pub fn start(self) -> Result<Process> {
        self.start_logging_to(Stdio::piped())
    }

    /// Starts the program with the given standard error. Unless that is [`Stdio::piped`], the log
    /// stays empty.
    pub fn start_logging_to(self, stderr: Stdio) -> Result<Process> {
        let child = self.spawn(Stdio::null(), stderr)?;
        Ok(self.logged(child))
    }

    /// Starts the program with pipes for its standard input and output. The log has its standard
    /// error only.
    pub fn start_piped(self) -> Result<Piped> {
        let mut child = self.spawn(Stdio::piped(), Stdio::piped())?;
        let stdin = child.stdin.take().context("no pipe for stdin")?;
        let stdout = child.stdout.take().context("no pipe for stdout")?;
        Ok(Piped {
            process: self.logged(child),
            stdin,
            stdout,
        })
    }

    /// Starts the program with a terminal as its standard input and error.
    pub fn start_in_terminal(self) -> Result<(Process, Terminal)> {
        let (terminal, program) = Terminal::open()?;
        let child = self.spawn(program.try_clone()?.into(), program.into())?;
        Ok((self.logged(child), terminal))
    }

    /// Collects the output of the pipes that `child` still has.
    fn logged(self, mut child: Child) -> Process {
        let (log, audit) = (Log::new(), AuditEvents::default());
        let mut readers = JoinSet::new();
        if let Some(out) = child.stdout.take() {
            readers.spawn(log.clone().fill_from(out, audit.clone()));
        }
        if let Some(err) = child.stderr.take() {
            readers.spawn(log.clone().fill_from(err, audit.clone()));
        }
        Process {
            label: self.label,
            child,
            log,
            audit,
            readers,
        }
    }

    /// Runs the program to its end.
    pub async fn run(self) -> Result<Finished> {
        self.run_with(b"").await
    }

    /// Runs the program to its end with `input` on its standard input.
    pub async fn run_with(self, input: &[u8]) -> Result<Finished> {
        let mut child = self.spawn(Stdio::piped(), Stdio::piped())?;
        let stdin = child.stdin.take();
        let feed = async {
            if let Some(mut stdin) = stdin {
                // A program that does not read its input may have ended.
                let _ended = stdin.write_all(input).await;
            }
        };
        let output = async { tokio::join!(child.wait_with_output(), feed).0 };
        let output = timeout(scaled(RUN_TIMEOUT), output).await;
        let output = output.with_context(|| format!("{} does not end", self.label))?;
        let output = output.with_context(|| format!("run {}", self.label))?;
        Ok(Finished {
            label: self.label,
            status: output.status,
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        })
    }

    fn spawn(&self, stdin: Stdio, stderr: Stdio) -> Result<Child> {
        let (first, rest) = self.argv.split_first().context("a program has a name")?;
        let mut command = Command::new(first);
        command
            .args(rest)
            .envs(self.environment.iter().map(|(name, value)| (name, value)));
        if self.own_group {
            command.process_group(0);
        }
        command
            .stdin(stdin)
            .stdout(Stdio::piped())
            .stderr(stderr)
            .kill_on_drop(true);
        let spawned = command.spawn();
        spawned.with_context(|| format!("run {}", self.label))
    }
}

/// The result of a program that ran to its end.
#[derive(Debug, Clone)]
pub struct Finished {
    label: String,
    pub status: ExitStatus,
    pub out: String,
    pub err: String,
}

impl Finished {
    /// Returns the exit code, unless a signal ended the program.
    pub fn code(&self) -> Option<i32> {
        self.status.code()
    }

    /// Fails unless the program exited with `code` and its standard error contains the parts.
    pub fn ensure_failed(&self, code: i32, parts: &[&str]) -> Result<()> {
        ensure!(self.code() == Some(code), "{self}");
        for part in parts {
            ensure!(self.err.contains(part), "no word of {part}: {self}");
        }
        Ok(())
    }

    /// Returns the standard output if the program exited with 0.
    ///
    /// # Errors
    /// Returns an error with the output for any other exit status.
    pub fn ok(self) -> Result<String> {
        if self.status.success() {
            return Ok(self.out);
        }
        bail!("{self}")
    }
}

impl fmt::Display for Finished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (label, status) = (&self.label, self.status);
        let (out, err) = (&self.out, &self.err);
        write!(f, "{label}: {status}\nstdout: {out}\nstderr: {err}")
    }
}

/// A running process with the pipes for its standard input and output.
#[derive(Debug)]
pub struct Piped {
    pub process: Process,
    pub stdin: ChildStdin,
    pub stdout: ChildStdout,
}

/// A running process. Dropping it kills the process.
#[derive(Debug)]
pub struct Process {
    label: String,
    child: Child,
    log: Log,
    audit: AuditEvents,
    readers: JoinSet<()>,
}

impl Process {
    /// Returns the process ID, or `None` once the end of the process was observed.
    pub fn id(&self) -> Option<u32> {
        self.child.id()
    }

    pub fn log(&self) -> &Log {
        &self.log
    }

    /// Returns the audit events that the process has written to its standard output.
    pub fn audit(&self) -> &AuditEvents {
        &self.audit
    }

    /// Waits for a line for which `look` returns a value.
    ///
    /// # Errors
    /// Returns an error with the end of the log if the process ends or the scaled `patience` is
    /// over. `what` is for that message.
    pub async fn wait_for_line<T>(
        &mut self,
        what: &str,
        patience: Duration,
        look: impl FnMut(&str) -> Option<T>,
    ) -> Result<T> {
        let log = self.log.clone();
        let ended = tokio::select! {
            biased;
            found = timeout(scaled(patience), log.find(look)) => match found {
                Ok(found) => return Ok(found),
                Err(_elapsed) => format!("after {:?}", scaled(patience)),
            },
            ended = self.ended() => format!("it ended: {ended:?}"),
        };
        bail!("{}: no {what}, {ended}; its log:{}", self.label, self.log)
    }

    pub fn signal(&self, signal: Signal) -> Result<()> {
        let id = self
            .child
            .id()
            .with_context(|| format!("{} has ended", self.label))?;
        // The shell's own `kill`, since not every machine has the program.
        let mut kill = std::process::Command::new("sh");
        kill.args(["-c", "kill -s \"$1\" \"$2\"", "sh"]);
        kill.args([signal.name(), &id.to_string()]);
        let status = kill.status().context("run sh")?;
        if !status.success() {
            bail!("{}: cannot send {}", self.label, signal.name());
        }
        Ok(())
    }

    /// Waits for the end of the process and the last line of its log.
    ///
    /// # Errors
    /// Returns an error with the end of the log if the process is still running after the scaled
    /// `patience`.
    pub async fn end(&mut self, patience: Duration) -> Result<ExitStatus> {
        match timeout(scaled(patience), self.ended()).await {
            Ok(status) => status,
            Err(_elapsed) => bail!("still running after {patience:?}; {self}"),
        }
    }

    /// Stops the process with TERM, or with KILL if it has not ended after the scaled `patience`.
    pub async fn stop(mut self, patience: Duration) -> Result<ExitStatus> {
        if self.child.id().is_some() {
            self.signal(Signal::Term)?;
        }
        if let Ok(ended) = timeout(scaled(patience), self.ended()).await {
            return ended;
        }
        self.kill().await
    }

    /// Kills the process with KILL, which acts like a power failure.
    pub async fn kill(mut self) -> Result<ExitStatus> {
        // Fails only for a process that has ended.
        let _ = self.child.start_kill();
        self.ended().await
    }

    async fn ended(&mut self) -> Result<ExitStatus> {
        let status = self
            .child
            .wait()
            .await
            .with_context(|| format!("wait for {}", self.label))?;
        // A child of the process may hold the pipes open. Its output does not matter here.
        let _ = timeout(scaled(LOG_END), async {
            while self.readers.join_next().await.is_some() {}
        })
        .await;
        Ok(status)
    }
}

impl Drop for Process {
    /// Kills the process and waits for its end, so that it does not write into a directory that is
    /// being removed.
    fn drop(&mut self) {
        // Fails only for a process that has ended.
        let _ = self.child.start_kill();
        for _ in 0..REAP_TRIES {
            match self.child.try_wait() {
                Ok(None) => std::thread::park_timeout(REAP_PAUSE),
                Ok(Some(_)) | Err(_) => break,
            }
        }
    }
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "log of {}:{}", self.label, self.log)
    }
}

/// The signals that tests send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// Drains the process and ends it.
    Term,
    /// The signal of Ctrl-C.
    Int,
    /// Ends the process at once.
    Kill,
    /// Suspend the process, which acts like a hanging machine.
    Stop,
    /// Continue a process after [`Self::Stop`].
    Cont,
    /// Read the files again.
    Hangup,
}

impl Signal {
    fn name(self) -> &'static str {
        match self {
            Self::Term => "TERM",
            Self::Int => "INT",
            Self::Kill => "KILL",
            Self::Stop => "STOP",
            Self::Cont => "CONT",
            Self::Hangup => "HUP",
        }
    }
}

/// Time limit for verbs and tools, which take well under a second.
const RUN_TIMEOUT: Duration = Duration::from_secs(60);

/// A killed process is gone within a few milliseconds, on a busy machine within a second.
const REAP_TRIES: u32 = 1000;
const REAP_PAUSE: Duration = Duration::from_millis(1);

/// Time limit for the last lines of a process that has ended.
const LOG_END: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    const WAIT_TIMEOUT: Duration = Duration::from_secs(5);

    fn shell(script: &str) -> Program {
        Program::new("sh", "sh").args(["-c", script])
    }

    #[tokio::test]
    async fn who_waits_for_a_line_learns_of_the_end() {
        let mut process = shell("echo boom; exit 1").start().unwrap();
        let missing = process.wait_for_line("port", WAIT_TIMEOUT, |line| {
            line.strip_prefix("port=").map(drop)
        });
        let error = missing.await.unwrap_err().to_string();
        assert!(
            error.contains("no port") && error.contains("boom"),
            "{error}"
        );
    }

    #[tokio::test]
    async fn who_ignores_term_is_killed() {
        let mut deaf = shell("trap '' TERM; echo deaf; exec sleep 600")
            .start()
            .unwrap();
        deaf.wait_for_line("word", WAIT_TIMEOUT, |line| (line == "deaf").then_some(()))
            .await
            .unwrap();
        let ended = deaf.stop(Duration::from_millis(50)).await.unwrap();
        assert_eq!(ended.signal(), Some(9));
    }
}
