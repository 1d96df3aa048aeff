//! Settings in layers: defaults < file < environment < flags; durations and sizes in human-readable
//! form.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

/// Declares a structure of optional settings. clap fills it from flags and environment variables,
/// and serde from a YAML file. The macro also defines how one layer overrides another. Every field
/// is an `Option`, or a `Vec` that is replaced as a whole.
#[macro_export]
macro_rules! layered {
    ($(#[$meta:meta])* pub struct $name:ident { $($(#[$fmeta:meta])* pub $field:ident: $type:ty,)+ }) => {
        $(#[$meta])*
        pub struct $name { $($(#[$fmeta])* pub $field: $type,)+ }

        impl $name {
            /// Returns this layer's settings, and those of `lower` where this layer has none.
            pub fn or(self, lower: Self) -> Self {
                Self { $($field: $crate::settings::Layer::or(self.$field, lower.$field),)+ }
            }
        }
    };
}

/// A setting that may be absent from a layer.
pub trait Layer {
    /// Returns `self` if the setting is present, else `lower`.
    fn or(self, lower: Self) -> Self;
}

impl<T> Layer for Option<T> {
    fn or(self, lower: Self) -> Self {
        Self::or(self, lower)
    }
}

impl<T> Layer for Vec<T> {
    fn or(self, lower: Self) -> Self {
        if self.is_empty() { lower } else { self }
    }
}

/// A list of all errors of a configuration, so that a user sees them at once.
#[derive(Debug, Default)]
pub struct ConfigErrors(Vec<String>);

impl ConfigErrors {
    /// Records an error of a setting. `setting` is the name of the flag.
    pub fn add(&mut self, setting: &str, error: impl Display) {
        self.0.push(format!("{setting}: {error}"));
    }

    /// Returns the parsed value. On an error, records it and returns `None`, so that checking can
    /// continue.
    pub fn ok_or_record<T, E: Display>(
        &mut self,
        setting: &str,
        parsed: Result<T, E>,
    ) -> Option<T> {
        parsed.map_err(|error| self.add(setting, error)).ok()
    }

    /// Parses the text of a setting. Returns `default` if the setting is absent or has an error,
    /// which is recorded.
    pub fn parse<T: FromStr<Err: Display>>(
        &mut self,
        setting: &str,
        text: Option<&str>,
        default: T,
    ) -> T {
        self.parse_with(setting, text, default, str::parse::<T>)
    }

    /// Parses the text of a setting, or the text `default` if the setting is absent. Records an
    /// error.
    pub fn parse_or<T: FromStr<Err: Display> + Default>(
        &mut self,
        setting: &str,
        text: Option<&str>,
        default: &str,
    ) -> T {
        self.parse(setting, text.or(Some(default)), T::default())
    }

    /// Parses the text of a setting with `parse`, otherwise like [`ConfigErrors::parse`].
    pub fn parse_with<T, E: Display>(
        &mut self,
        setting: &str,
        text: Option<&str>,
        default: T,
        parse: impl FnOnce(&str) -> Result<T, E>,
    ) -> T {
        match text {
            Some(text) => self.ok_or_record(setting, parse(text)).unwrap_or(default),
            None => default,
        }
    }

    /// Parses the texts of a setting that can be repeated. Records an error for each text that
    /// cannot be parsed.
    pub fn parse_list<T, E: Display>(
        &mut self,
        setting: &str,
        texts: impl IntoIterator<Item: AsRef<str>>,
        parse: impl Fn(&str) -> Result<T, E>,
    ) -> Vec<T> {
        texts
            .into_iter()
            .filter_map(|text| self.ok_or_record(setting, parse(text.as_ref())))
            .collect()
    }

    /// Returns `value` if there was no error.
    ///
    /// # Errors
    /// [`ConfigError`] with every recorded error.
    pub fn finish<T>(self, value: T) -> Result<T, ConfigError> {
        if self.0.is_empty() {
            Ok(value)
        } else {
            Err(ConfigError(self.0))
        }
    }
}

/// All errors of a configuration, one per line.
#[derive(Debug, thiserror::Error)]
#[error("invalid configuration, {} error(s):\n  {}", .0.len(), .0.join("\n  "))]
pub struct ConfigError(pub Vec<String>);

/// Returns the environment variables that begin with `prefix` and are not in `known`. Kubernetes
/// injects such variables for every Service.
pub fn unknown_variables(prefix: &str, known: &BTreeSet<String>) -> Vec<String> {
    std::env::vars_os()
        .filter_map(|(name, _)| name.into_string().ok())
        .filter(|name| name.starts_with(prefix) && !known.contains(name))
        .collect()
}

/// Parses a value whose errors do not contain its text.
///
/// # Errors
/// The text in quotes and the error of the type.
pub fn parse_quoted<T: FromStr<Err: Display>>(text: &str) -> Result<T, String> {
    text.parse::<T>()
        .map_err(|error| format!("{text:?}: {error}"))
}

/// Parses an address with a port, such as `127.0.0.1:10264`.
///
/// # Errors
/// A one-line message for users.
pub fn parse_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_syntax| {
        format!("{text:?} is not an address with a port, as in 127.0.0.1:10264 or [::]:10262")
    })
}

/// Returns the parser of a value that may be `keyword`, such as `off` or `auto`, which is `None`.
pub fn optional<T, E>(
    keyword: &'static str,
    parse: impl Fn(&str) -> Result<T, E>,
) -> impl Fn(&str) -> Result<Option<T>, E> {
    move |text| {
        if text == keyword {
            Ok(None)
        } else {
            parse(text).map(Some)
        }
    }
}

/// Parses a size such as `64KiB`, `2MiB`, `1GiB` or plain bytes.
///
/// # Errors
/// A one-line message for users.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.trim_end_matches(|character: char| !character.is_ascii_digit());
    let unit = match text[digits.len()..].trim() {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        other => return Err(format!("unknown unit {other:?}; use B, KiB, MiB or GiB")),
    };
    let number: u64 = digits
        .parse()
        .map_err(|_parse| format!("{text:?} is not a size such as 64KiB"))?;
    number
        .checked_mul(unit)
        .ok_or_else(|| format!("{text:?} is too large"))
}

/// Formats a size in the form that [`parse_size`] accepts.
pub fn format_size(bytes: u64) -> String {
    for (unit, name) in [(1u64 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")] {
        if bytes >= unit && bytes.is_multiple_of(unit) {
            return format!("{}{name}", bytes / unit);
        }
    }
    format!("{bytes}B")
}

/// Parses a duration such as `30s` or `5m`.
///
/// # Errors
/// A one-line message for users.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text.trim())
        .map_err(|error| format!("{text:?} is not a duration such as 30s or 5m: {error}"))
}

/// Checks that a duration is not zero.
///
/// # Errors
/// A one-line message for users.
pub fn positive(duration: Duration) -> Result<Duration, &'static str> {
    if duration.is_zero() {
        Err("must be more than 0")
    } else {
        Ok(duration)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_have_their_default_or_a_recorded_error() {
        let mut errors = ConfigErrors::default();
        assert_eq!(errors.parse("--a", None, 7), 7);
        assert_eq!(errors.parse("--a", Some("8"), 7), 8);
        assert_eq!(errors.parse("--a", Some("x"), 7), 7);
        let mut number = |text| errors.parse_or::<u16>("--b", text, "80");
        assert_eq!((number(None), number(Some("y"))), (80, 0));
        let numbers = errors.parse_list("--c", ["1", "z", "2"], parse_quoted::<u8>);
        assert_eq!(numbers, [1, 2]);
        let listen = optional("off", parse_address);
        assert_eq!(listen("off"), Ok(None));
        assert_eq!(listen("[::]:1"), Ok("[::]:1".parse().ok()));
        assert!(listen("80").is_err());
        let ConfigError(texts) = errors.finish(()).unwrap_err();
        let texts: Vec<&str> = texts.iter().map(|text| &text[..6]).collect();
        assert_eq!(texts, ["--a: i", "--b: i", "--c: \""]);
    }

    #[test]
    fn sizes_are_read_with_binary_units() {
        for (text, bytes) in [
            ("64KiB", 65536),
            ("2 MiB", 2 << 20),
            ("1GiB", 1 << 30),
            ("12", 12),
            ("12B", 12),
        ] {
            assert_eq!(parse_size(text), Ok(bytes));
            assert_eq!(parse_size(&format_size(bytes)), Ok(bytes));
        }
        for text in ["", "KiB", "1KB", "-1", "1.5MiB", "99999999999GiB"] {
            assert!(parse_size(text).is_err(), "{text:?}");
        }
    }
}
