//! Limits and timers of a binary: the section `limits:` of its YAML file, declared once by
//! `limits!`.

use std::time::Duration;

use super::settings::{ConfigErrors, format_size, parse_size};

/// Minimum size of a buffer pool in stream windows. A single stalled stream must not use up a
/// session's share of the pool, which is a quarter.
const POOL_WINDOWS_MIN: u64 = 4;

/// Declares the limits of a binary once. An entry has its description, its field, its name in the
/// file, the variant of `Limit` if a metric counts how often it is reached, its type, its default,
/// and the function that parses it. With `live` at its end, the limit applies while the process runs,
/// when the file changes; other limits need a restart.
///
/// The macro defines the structures `Limits` and `RawLimits`, the table `LIMITS` for the
/// configuration reference, and the enum `Limit`. The caller defines
/// `Limits::check_together(&self, &mut ConfigErrors)`, which compares limits with each other.
#[macro_export]
macro_rules! limits {
    ($(
        $(#[doc = $doc:literal])+
        $field:ident ($name:literal $(, counted as $counted:ident)?): $type:ty
            = $default:literal, $parse:expr $(, $live:ident)?;
    )+) => {
        /// Limits and timers. The default has the defaults of [`LIMITS`].
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub struct Limits { $($(#[doc = $doc])+ pub $field: $type,)+ }

        /// The `limits:` section as written; absent entries use their defaults.
        #[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct RawLimits {
            $($(#[doc = $doc])+ #[serde(rename = $name)] pub $field: Option<String>,)+
        }

        /// Name, default and description of every limit, for the configuration reference.
        pub const LIMITS: &[(&str, &str, &str)] =
            &[$(($name, $default, concat!($($doc),+ $(, " ", $crate::live_note!($live))?)),)+];

        $crate::label_values! {
            /// A limit whose effect the metric `limits_reached_total` counts. Its name is that of the
            /// entry in `limits:`.
            pub enum Limit { $($(#[doc = $name] $counted = $name,)?)+ }
        }

        impl Limits {
            /// Returns these limits with those of `new` that apply while the process runs, and the
            /// names of the others that differ.
            pub fn with_live(self, new: Self) -> (Self, Vec<&'static str>) {
                let mut other = Vec::new();
                let limits = Self {
                    $($field: {
                        let markers: &[&str] = &[$(stringify!($live))?];
                        if markers.is_empty() && self.$field != new.$field {
                            other.push(concat!("limits.", $name));
                        }
                        if markers.is_empty() { self.$field } else { new.$field }
                    },)+
                };
                (limits, other)
            }

            /// Parses and checks the limits of a file. Records every error.
            pub fn check(
                raw: &RawLimits,
                errors: &mut $crate::settings::ConfigErrors,
            ) -> Self {
                let mut is_readable = true;
                let limits = Self {
                    $($field: {
                        let parsed = $parse(raw.$field.as_deref().unwrap_or($default));
                        is_readable &= parsed.is_ok();
                        errors.ok_or_record(concat!("limits.", $name), parsed).unwrap_or_default()
                    },)+
                };
                // Limits are compared with each other only if all of them could be parsed.
                if is_readable {
                    limits.check_together(errors);
                }
                limits
            }
        }

        impl Default for Limits {
            fn default() -> Self {
                Self::check(&RawLimits::default(), &mut Default::default())
            }
        }
    };
}

/// The end of the description of a limit that applies while the process runs.
#[macro_export]
macro_rules! live_note {
    (live) => {
        "Applies while the process runs."
    };
}

/// Parses a duration of more than zero, such as `30s` or `5m`.
///
/// # Errors
/// A one-line message for users.
pub fn duration(text: &str) -> Result<Duration, String> {
    let duration = super::settings::parse_duration(text)?;
    Ok(super::settings::positive(duration)?)
}

/// Returns the parser of a duration from `min` to `max`.
pub fn duration_within(min: Duration, max: Duration) -> impl Fn(&str) -> Result<Duration, String> {
    move |text| {
        let found = duration(text)?;
        if (min..=max).contains(&found) {
            return Ok(found);
        }
        let [min, max] = [min, max].map(humantime::format_duration);
        Err(format!("{text:?} is not from {min} to {max}"))
    }
}

/// Returns the parser of a size from `min` to `max` bytes.
pub fn size<T: TryFrom<u64>>(min: u64, max: u64) -> impl Fn(&str) -> Result<T, String> {
    move |text| {
        let bytes = parse_size(text)?;
        let in_range = Some(bytes).filter(|bytes| (min..=max).contains(bytes));
        in_range
            .and_then(|bytes| T::try_from(bytes).ok())
            .ok_or_else(|| {
                let (min, max) = (format_size(min), format_size(max));
                format!("{text:?} is not from {min} to {max}")
            })
    }
}

/// Returns the parser of a number from 1 to `max`.
pub fn count<T: TryFrom<u64>>(max: u64) -> impl Fn(&str) -> Result<T, String> {
    move |text| {
        let number = text.parse::<u64>().ok();
        number
            .filter(|number| (1..=max).contains(number))
            .and_then(|number| T::try_from(number).ok())
            .ok_or_else(|| format!("{text:?} is not a number from 1 to {max}"))
    }
}

/// The size of a buffer pool that an operator has not configured.
#[derive(Debug, Clone, Copy)]
pub struct AutoBufferPool {
    /// Divisor for the share of the memory limit. Reservations are bytes of memory, so the pool is
    /// what unread data uses at most.
    pub memory_share: u64,
    /// Maximum size in bytes, which is also the size without a memory limit.
    pub max: u64,
}

impl AutoBufferPool {
    /// Returns the size in bytes: `configured`, or a share of the memory limit.
    pub fn bytes(self, configured: Option<u64>, memory: Option<u64>, stream_window: u32) -> u64 {
        let min = POOL_WINDOWS_MIN * u64::from(stream_window);
        let auto = memory.map_or(self.max, |memory| memory / self.memory_share);
        configured.unwrap_or_else(|| auto.min(self.max).max(min))
    }
}

/// Returns what is wrong with a buffer pool of `bytes`, if unread data could use more than half of
/// the memory limit.
pub fn buffer_pool_fault(bytes: u64, memory: Option<u64>) -> Option<String> {
    let memory = memory.filter(|memory| bytes > memory / 2)?;
    let (pool, memory) = (format_size(bytes), format_size(memory));
    Some(format!(
        "limits.bufferPool {pool} is more than half of the memory limit {memory}; unread data may fill all of it"
    ))
}

/// Checks that a stalled stream does not use up a session's share of the buffer pool.
pub fn check_buffer_pool(buffer_pool: Option<u64>, stream_window: u32, errors: &mut ConfigErrors) {
    let min = POOL_WINDOWS_MIN * u64::from(stream_window);
    if let Some(buffer_pool) = buffer_pool.filter(|bytes| *bytes < min) {
        let (pool, min) = (format_size(buffer_pool), format_size(min));
        errors.add(
            "limits.bufferPool",
            format!("{pool} is less than {POOL_WINDOWS_MIN} x streamWindow, {min}"),
        );
    }
}
