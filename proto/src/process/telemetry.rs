//! Logs: text on a terminal, JSON elsewhere, one level for our crates and a quieter one for libraries.

use std::io::{self, IsTerminal, Stderr};
use std::str::FromStr;

use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, fmt};

mod outlet;
mod plain;

use outlet::{Emptier, Outlet};
use plain::{Lines, Plain};

/// The `target` of access records.
pub const ACCESS: &str = "access";

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

impl LogFormat {
    /// Text when standard error is a terminal, else JSON.
    #[must_use]
    pub fn detect() -> Self {
        if io::stderr().is_terminal() {
            Self::Text
        } else {
            Self::Json
        }
    }
}

impl FromStr for LogFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            other => Err(format!(
                "log format {other:?} is neither \"text\" nor \"json\""
            )),
        }
    }
}

/// Logging that was started. To be kept until the process ends: dropped, it writes what still waits, and from then on every
/// line is written by whoever logs it.
#[derive(Debug)]
#[must_use = "the last access records are written when it goes"]
pub struct Logs {
    _emptier: Emptier<Stderr>,
}

/// Starts logging to standard error. Libraries log at `warn`, except at `trace`, where they log at `debug`; no query of
/// the embedded DNS is logged above that. Panics are lines like others from here on. Access records ([`ACCESS`]) are
/// written some 20 ms later, many at once, and before any other line; a process that is killed takes those with it.
///
/// # Errors
/// Logging was started before, or there can be no further thread.
pub fn start(level: LevelFilter, format: LogFormat) -> io::Result<Logs> {
    super::panics::tell();
    let libraries = if level == LevelFilter::TRACE {
        LevelFilter::DEBUG
    } else {
        level.min(LevelFilter::WARN)
    };
    let ours = [
        "tunnel_proto",
        "tunnel_server",
        "tunnel_agent",
        "tunnel_tests",
        ACCESS,
    ];
    let filter = Targets::new()
        .with_default(libraries)
        // Warns about each forged answer, with the names that were asked for.
        .with_target("hickory_net", libraries.min(LevelFilter::ERROR))
        .with_targets(ours.map(|target| (target, level)));
    let registry = tracing_subscriber::registry();
    let outlet = Outlet::new(io::stderr());
    let lines = |plain| Lines {
        plain,
        outlet: outlet.clone(),
    };
    let started = match format {
        LogFormat::Text => {
            let ansi = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
            let layer = fmt::layer()
                .with_writer(lines(Plain {
                    json: false,
                    colours: ansi,
                }))
                .with_ansi(ansi)
                .with_target(false);
            registry.with(layer.with_filter(filter)).try_init()
        }
        LogFormat::Json => {
            let layer = fmt::layer()
                .json()
                .flatten_event(true)
                // Events have a field of that name: what a request was for.
                .with_target(false)
                .with_current_span(true)
                .with_span_list(false);
            let layer = layer.with_writer(lines(Plain {
                json: true,
                colours: false,
            }));
            registry.with(layer.with_filter(filter)).try_init()
        }
    };
    started.map_err(io::Error::other)?;
    Ok(Logs {
        _emptier: Emptier::start(outlet)?,
    })
}
