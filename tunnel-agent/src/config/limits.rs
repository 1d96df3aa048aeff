//! The `limits:` section of the file: every limit and timer of the agent by name.

use std::time::Duration;

use serde::Deserialize;
use tunnel_proto::process::settings::{Mistakes, parse_size, positive};

/// Declares the limits once: the typed structure, the section of the file, and the table for the reference.
macro_rules! limits {
    ($($(#[doc = $doc:literal])+ $field:ident ($name:literal): $type:ty = $default:literal via $parse:path,)+) => {
        /// Limits and timers, with the defaults of [`LIMITS`].
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub struct Limits { $($(#[doc = $doc])+ pub $field: $type,)+ }

        /// The `limits:` section as written; absent entries keep their defaults.
        #[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct RawLimits { $($(#[doc = $doc])+ #[serde(rename = $name)] pub $field: Option<String>,)+ }

        /// Name, default and meaning of every limit, for the configuration reference.
        pub const LIMITS: &[(&str, &str, &str)] = &[$(($name, $default, concat!($($doc),+)),)+];

        impl Limits {
            pub(super) fn check(raw: RawLimits, mistakes: &mut Mistakes) -> Self {
                Self {
                    $($field: {
                        let text = raw.$field.as_deref().unwrap_or($default);
                        mistakes.take(concat!("limits.", $name), $parse(text), Default::default())
                    },)+
                }
            }
        }

        impl Default for Limits {
            fn default() -> Self {
                Self::check(RawLimits::default(), &mut Mistakes::default())
            }
        }
    };
}

limits! {
    /// Time for resolving and dialling a server until the session is ready, each; also for each step of enrolment.
    handshake_timeout ("handshakeTimeout"): Duration = "5s" via duration,
    /// Time to connect to a target, over all its addresses. The server may ask for less.
    target_dial_timeout ("targetDialTimeout"): Duration = "5s" via duration,
    /// Time for the header of a stream to arrive.
    request_head_timeout ("requestHeadTimeout"): Duration = "10s" via duration,
    /// Bytes of one stream that may be on their way unread, from 64KiB to 64MiB.
    stream_window ("streamWindow"): u32 = "2MiB" via window,
    /// Streams served at once, from 1 to 65536; more are refused. Twice the server's limit by default, since a stream
    /// ends at the server first.
    streams_per_agent ("streamsPerAgent"): u32 = "512" via streams,
    /// An idle session sends a sign of life this often (+- 20 %).
    keep_alive ("keepAlive"): Duration = "5s" via duration,
    /// A session on which nothing was heard for this long is dead: closed, and dialled anew.
    dead_after ("deadAfter"): Duration = "60s" via duration,
}

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
