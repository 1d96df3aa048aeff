//! The switch of the access log: which requests have a line, and where the lines go.

use std::convert::Infallible;
use std::io;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use tracing::level_filters::LevelFilter;

use super::line_file::LineFile;
use super::output::LogOutput;
use crate::settings::ConfigErrors;

crate::named! {
    /// The requests and streams that have a line in the access log.
    #[derive(Default)]
    pub enum AccessLogMode: FromStr {
        /// No stream is recorded.
        Off = "off",
        /// Streams whose code is not `ok` are recorded.
        Errors = "errors",
        /// Every stream is recorded.
        #[default]
        All = "all",
    }
}

/// The output of the access log.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum AccessLogOutput {
    /// Standard error, with the other lines.
    #[default]
    Stderr,
    /// The process's standard output.
    Stdout,
    /// A file, to which lines are appended.
    File(PathBuf),
}

impl FromStr for AccessLogOutput {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text {
            "stderr" => Self::Stderr,
            "stdout" => Self::Stdout,
            path => Self::File(path.into()),
        })
    }
}

/// The settings of the access log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccessLogSettings {
    /// The requests that have a line.
    pub mode: AccessLogMode,
    /// The output of the lines.
    pub output: AccessLogOutput,
    /// One of this many requests with code `ok` has a line.
    pub sample: NonZeroU32,
}

impl Default for AccessLogSettings {
    fn default() -> Self {
        Self {
            mode: AccessLogMode::default(),
            output: AccessLogOutput::default(),
            sample: NonZeroU32::MIN,
        }
    }
}

impl AccessLogSettings {
    /// Parses the texts of --access-log, --access-log-output and --access-log-sample. Records
    /// errors. Without a mode, `level` decides: access log lines have the level info.
    pub fn check(
        errors: &mut ConfigErrors,
        level: LevelFilter,
        mode: Option<&str>,
        output: Option<&str>,
        sample: Option<&str>,
    ) -> Self {
        let by_level = if level >= LevelFilter::INFO {
            AccessLogMode::All
        } else {
            AccessLogMode::Off
        };
        Self {
            mode: errors.parse("--access-log", mode, by_level),
            output: errors.parse("--access-log-output", output, AccessLogOutput::Stderr),
            sample: errors.parse("--access-log-sample", sample, NonZeroU32::MIN),
        }
    }

    /// Returns the level of access log lines among the other lines.
    pub(super) fn level_on_stderr(&self) -> LevelFilter {
        if self.mode == AccessLogMode::Off || self.output != AccessLogOutput::Stderr {
            LevelFilter::OFF
        } else {
            LevelFilter::INFO
        }
    }

    /// Opens an output of its own, if there is one. It is open without lines, too, because the mode
    /// may change while the process runs.
    ///
    /// # Errors
    /// When the file cannot be opened. The text names the file.
    pub(super) fn open(&self) -> io::Result<Option<LogOutput>> {
        match &self.output {
            AccessLogOutput::Stderr => Ok(None),
            AccessLogOutput::Stdout => Ok(Some(LogOutput::Stdout(io::stdout()))),
            AccessLogOutput::File(path) => {
                let file = LineFile::open("--access-log-output", path, None)?;
                Ok(Some(LogOutput::File(file)))
            }
        }
    }
}

/// Returns whether a request is to have a line in the access log. `is_error` says whether its code
/// is not `ok`. Ask once for each request, since the answer is counted.
pub fn admits_access(is_error: bool) -> bool {
    SWITCH.admits(is_error)
}

/// Which requests have a line, in a form that each request can read.
#[derive(Debug)]
pub(super) struct AccessSwitch {
    errors: AtomicBool,
    /// One of this many other requests has a line; 0 for none.
    sample: AtomicU32,
    others: AtomicU32,
}

/// A process has one access log, so it has one switch.
pub(super) static SWITCH: AccessSwitch = AccessSwitch::new();

impl AccessSwitch {
    const fn new() -> Self {
        Self {
            errors: AtomicBool::new(true),
            sample: AtomicU32::new(1),
            others: AtomicU32::new(0),
        }
    }

    pub(super) fn set(&self, settings: &AccessLogSettings) {
        let (errors, sample) = match settings.mode {
            AccessLogMode::Off => (false, 0),
            AccessLogMode::Errors => (true, 0),
            AccessLogMode::All => (true, settings.sample.get()),
        };
        self.errors.store(errors, Ordering::Relaxed);
        self.sample.store(sample, Ordering::Relaxed);
    }

    fn admits(&self, is_error: bool) -> bool {
        if is_error {
            return self.errors.load(Ordering::Relaxed);
        }
        match self.sample.load(Ordering::Relaxed) {
            0 => false,
            1 => true,
            sample => self
                .others
                .fetch_add(1, Ordering::Relaxed)
                .is_multiple_of(sample),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn switch_admits_errors_and_a_sample_of_the_others() {
        for (mode, sample, errors, others) in [
            (AccessLogMode::Off, 1, 0, 0),
            (AccessLogMode::Errors, 1, 100, 0),
            (AccessLogMode::All, 1, 100, 100),
            (AccessLogMode::All, 10, 100, 10),
        ] {
            let switch = AccessSwitch::new();
            switch.set(&AccessLogSettings {
                mode,
                sample: NonZeroU32::new(sample).unwrap(),
                ..AccessLogSettings::default()
            });
            let admitted = |is_error| (0..100).filter(|_| switch.admits(is_error)).count();
            let counts = (admitted(true), admitted(false));
            assert_eq!(counts, (errors, others), "{mode:?} {sample}");
        }
    }

    #[test]
    fn texts_are_parsed_and_mistakes_recorded() {
        let check = |mode: Option<&str>, output, sample| {
            let mut errors = ConfigErrors::default();
            let (info, warn) = (LevelFilter::INFO, LevelFilter::WARN);
            let level = if mode == Some("by warn") { warn } else { info };
            let mode = mode.filter(|mode| *mode != "by warn");
            let settings = AccessLogSettings::check(&mut errors, level, mode, output, sample);
            errors.finish(settings).map_err(|error| error.to_string())
        };
        assert_eq!(check(None, None, None), Ok(AccessLogSettings::default()));
        let quiet = check(Some("by warn"), None, None).unwrap();
        assert_eq!(quiet.mode, AccessLogMode::Off);
        let own = check(Some("errors"), Some("/var/log/a"), Some("3")).unwrap();
        assert_eq!(own.output, AccessLogOutput::File("/var/log/a".into()));
        assert_eq!((own.mode, own.sample.get()), (AccessLogMode::Errors, 3));
        assert_eq!(own.level_on_stderr(), LevelFilter::OFF);
        let mistakes = check(Some("none"), None, Some("0")).unwrap_err();
        assert!(mistakes.contains("--access-log: "), "{mistakes}");
        assert!(mistakes.contains("--access-log-sample: "), "{mistakes}");
    }
}
