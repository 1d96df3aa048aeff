//! The `limits:` section of the file: every limit and timer of the agent by name.

use std::time::Duration;

use serde::Deserialize;
use tunnel_proto::process::settings::{ConfigErrors, format_size, parse_size, positive};
use tunnel_proto::transport::liveness::LivenessLimits;

/// Declares the limits once: the typed structure, the section of the file, and the table for the
/// reference.
macro_rules! limits {
    ($($(#[doc = $doc:literal])+ $field:ident ($name:literal): $type:ty = $default:literal via $parse:path,)+) => {
        /// Limits and timers, with the defaults of [`LIMITS`].
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub struct Limits { $($(#[doc = $doc])+ pub $field: $type,)+ }

        /// The `limits:` section as written; absent entries use their defaults.
        #[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct RawLimits { $($(#[doc = $doc])+ #[serde(rename = $name)] pub $field: Option<String>,)+ }

        /// Name, default and description of every limit, for the configuration reference.
        pub const LIMITS: &[(&str, &str, &str)] = &[$(($name, $default, concat!($($doc),+)),)+];

        impl Limits {
            pub(super) fn check(raw: RawLimits, mistakes: &mut ConfigErrors) -> Self {
                let mut readable = true;
                let limits = Self {
                    $($field: {
                        let parsed = $parse(raw.$field.as_deref().unwrap_or($default));
                        readable &= parsed.is_ok();
                        mistakes.unwrap_or_record(concat!("limits.", $name), parsed, Default::default())
                    },)+
                };
                // Limits are compared with each other only if all of them could be parsed.
                if readable {
                    limits.check_together(mistakes);
                }
                limits
            }
        }

        impl Default for Limits {
            fn default() -> Self {
                Self::check(RawLimits::default(), &mut ConfigErrors::default())
            }
        }
    };
}

limits! {
    /// Time limit for resolving a server, for dialing it until the session is ready, and for each
    /// step of enrollment.
    handshake_timeout ("handshakeTimeout"): Duration = "5s" via duration,
    /// Time limit for connecting to a target, over all its addresses. The server may request less.
    target_dial_timeout ("targetDialTimeout"): Duration = "5s" via duration,
    /// Time limit for the header of a stream to arrive.
    request_head_timeout ("requestHeadTimeout"): Duration = "10s" via duration,
    /// Bytes of one stream that may be in flight and unread, from 64KiB to 64MiB.
    stream_window ("streamWindow"): u32 = "2MiB" via window,
    /// Streams served at once, from 1 to 65536; more are refused. The default is twice the server's
    /// limit, since a stream ends at the server first.
    streams_per_agent ("streamsPerAgent"): u32 = "512" via streams,
    /// Size of the buffer pool for data that targets have not read, at least 4 x streamWindow. When
    /// it is full, or one session holds a quarter of it, new streams are refused; open ones are not
    /// cut.
    buffer_pool ("bufferPool"): u64 = "128MiB" via parse_size,
    /// Interval between keep-alives of an idle session (+- 20 %).
    keep_alive ("keepAlive"): Duration = "5s" via duration,
    /// A session that is silent for this long while requests wait is suspect: another session is
    /// dialed in parallel.
    suspect_after_busy ("suspectAfterBusy"): Duration = "5s" via duration,
    /// Like suspectAfterBusy, but for a session without requests.
    suspect_after_idle ("suspectAfterIdle"): Duration = "15s" via duration,
    /// A session that is silent for this long is dead: it is closed and its streams are cut.
    dead_after ("deadAfter"): Duration = "60s" via duration,
    /// Interval for reading the files of --cert-file, --key-file and --ca-file again.
    reload_every ("reloadEvery"): Duration = "10s" via duration,
    /// With --transport auto: time that one transport may give no answer before the other is tried
    /// in parallel.
    quic_head_start ("quicHeadStart"): Duration = "3s" via duration,
    /// Interval for trying QUIC while h2 carries the session.
    quic_probe_every ("quicProbeEvery"): Duration = "45s" via duration,
    /// If QUIC is lost sooner than this after it took over from h2, it is tried again only after 2,
    /// 4, ... 30 minutes.
    quic_steady_after ("quicSteadyAfter"): Duration = "60s" via duration,
}

impl Limits {
    /// Returns the liveness limits of sessions. The transport's keep-alive probes idle sessions.
    pub(crate) fn liveness(&self) -> LivenessLimits {
        LivenessLimits {
            keep_alive: self.keep_alive,
            suspect_after_busy: self.suspect_after_busy,
            suspect_after_idle: self.suspect_after_idle,
            dead_after: self.dead_after,
            probes_idle: false,
        }
    }

    fn check_together(&self, mistakes: &mut ConfigErrors) {
        let keep_alive_most = self.keep_alive.mul_f64(KEEP_ALIVE_SPREAD);
        let pool_least = POOL_WINDOWS_LEAST * u64::from(self.stream_window);
        let show = humantime::format_duration;
        let mut note = |name: &str, wrong: bool, problem: String| {
            if wrong {
                mistakes.add(&format!("limits.{name}"), problem);
            }
        };
        note(
            "suspectAfterBusy",
            self.suspect_after_busy > self.suspect_after_idle,
            format!(
                "{} is more than suspectAfterIdle, {}",
                show(self.suspect_after_busy),
                show(self.suspect_after_idle)
            ),
        );
        note(
            "suspectAfterIdle",
            self.suspect_after_idle > self.dead_after,
            format!(
                "{} is more than deadAfter, {}",
                show(self.suspect_after_idle),
                show(self.dead_after)
            ),
        );
        note(
            "keepAlive",
            keep_alive_most >= self.suspect_after_idle,
            format!(
                "{} and 20 % are not less than suspectAfterIdle, {}: idle sessions would be suspect",
                show(self.keep_alive),
                show(self.suspect_after_idle)
            ),
        );
        note(
            "bufferPool",
            self.buffer_pool < pool_least,
            format!(
                "{} is less than {POOL_WINDOWS_LEAST} x streamWindow, {}",
                format_size(self.buffer_pool),
                format_size(pool_least)
            ),
        );
    }
}

/// A single target that does not read must not use up a session's share of the pool, which is a
/// quarter.
const POOL_WINDOWS_LEAST: u64 = 4;
/// Largest factor by which keep-alives are later than configured.
const KEEP_ALIVE_SPREAD: f64 = 1.2;

fn duration(text: &str) -> Result<Duration, String> {
    let parsed = super::checked::duration(text)?;
    Ok(positive(parsed)?)
}

fn window(text: &str) -> Result<u32, String> {
    let bytes = parse_size(text)?;
    u32::try_from(bytes)
        .ok()
        .filter(|bytes| (64 << 10..=64 << 20).contains(bytes))
        .ok_or_else(|| format!("{text:?} is not from 64KiB to 64MiB"))
}

fn streams(text: &str) -> Result<u32, String> {
    text.parse()
        .ok()
        .filter(|count| (1..=65536).contains(count))
        .ok_or_else(|| format!("{text:?} is not a number from 1 to 65536"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mistakes(change: impl FnOnce(&mut RawLimits)) -> Vec<String> {
        let (mut raw, mut mistakes) = (RawLimits::default(), ConfigErrors::default());
        change(&mut raw);
        Limits::check(raw, &mut mistakes);
        mistakes
            .finish(())
            .map_or_else(|error| error.0, |()| Vec::new())
    }

    #[test]
    fn contradicting_limits_are_reported_by_name() {
        let set = |text: &str| Some(text.to_owned());
        assert_eq!(mistakes(|_| {}), [""; 0]);
        for (change, named) in [
            (
                (|raw| raw.suspect_after_busy = Some("16s".into())) as fn(&mut RawLimits),
                "limits.suspectAfterBusy: 16s is more than suspectAfterIdle, 15s",
            ),
            (
                |raw| raw.dead_after = Some("14s".into()),
                "limits.suspectAfterIdle: 15s is more than deadAfter, 14s",
            ),
            (
                |raw| raw.keep_alive = Some("13s".into()),
                "limits.keepAlive: 13s and 20 %",
            ),
            (
                |raw| raw.buffer_pool = Some("7MiB".into()),
                "limits.bufferPool: 7MiB is less than 4 x streamWindow, 8MiB",
            ),
        ] {
            let found = mistakes(change);
            assert!(found.len() == 1 && found[0].starts_with(named), "{found:?}");
        }
        let found = mistakes(|raw| {
            raw.dead_after = set("soon");
            raw.suspect_after_busy = set("16s");
        });
        assert!(found.len() == 1 && found[0].starts_with("limits.deadAfter"));
    }
}
