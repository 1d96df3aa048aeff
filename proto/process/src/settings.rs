//! Settings in layers: defaults < file < environment < flags; durations and sizes in human-readable
//! form.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

use tunnel_networks::none_of;

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

        impl $crate::settings::Layers for $name {
            fn over(self, lower: Self) -> Self {
                self.or(lower)
            }

            fn keys(&self) -> std::collections::BTreeSet<String> {
                let keys = [
                    $($crate::settings::Layer::is_set(&self.$field)
                        .then(|| $crate::settings::key(stringify!($field))),)+
                ];
                keys.into_iter().flatten().collect()
            }

            fn changed_keys(&self, other: &Self) -> std::collections::BTreeSet<String> {
                let keys = [
                    $((self.$field != other.$field)
                        .then(|| $crate::settings::key(stringify!($field))),)+
                ];
                keys.into_iter().flatten().collect()
            }

            fn with(self, other: Self, is_taken: impl Fn(&str) -> bool) -> Self {
                Self {
                    $($field: if is_taken(&$crate::settings::key(stringify!($field))) {
                        other.$field
                    } else {
                        self.$field
                    },)+
                }
            }

            fn lines(&self, is_selected: impl Fn(&str) -> bool) -> String {
                let mut lines = String::new();
                $(if $crate::settings::Layer::is_set(&self.$field) {
                    let key = $crate::settings::key(stringify!($field));
                    if is_selected(&key) {
                        lines.push_str(&format!("{key}: {:?}\n", self.$field));
                    }
                })+
                lines
            }
        }
    };
}

/// A layer of settings, as [`layered!`](crate::layered) declares it. Keys are as a file spells them.
pub trait Layers: Sized {
    /// Returns this layer's settings, and those of `lower` where this layer has none.
    #[must_use]
    fn over(self, lower: Self) -> Self;

    /// Returns the keys of the settings that this layer has.
    fn keys(&self) -> BTreeSet<String>;

    /// Returns the keys of the settings that differ from those of `other`.
    fn changed_keys(&self, other: &Self) -> BTreeSet<String>;

    /// Returns these settings with those of `other` whose keys `is_taken` selects.
    #[must_use]
    fn with(self, other: Self, is_taken: impl Fn(&str) -> bool) -> Self;

    /// Returns a line for each setting that is present and whose key `is_selected` selects. Equal
    /// settings have equal lines, on every host.
    fn lines(&self, is_selected: impl Fn(&str) -> bool) -> String;
}

/// A setting that may be absent from a layer.
pub trait Layer {
    /// Returns `self` if the setting is present, else `lower`.
    #[must_use]
    fn or(self, lower: Self) -> Self;

    /// Returns whether the setting is present.
    fn is_set(&self) -> bool;
}

impl<T> Layer for Option<T> {
    fn or(self, lower: Self) -> Self {
        Self::or(self, lower)
    }

    fn is_set(&self) -> bool {
        self.is_some()
    }
}

impl<T> Layer for Vec<T> {
    fn or(self, lower: Self) -> Self {
        if self.is_empty() { lower } else { self }
    }

    fn is_set(&self) -> bool {
        !self.is_empty()
    }
}

/// Returns the key of a file for the name of a field: `http_listen` is `httpListen`.
pub fn key(field: &str) -> String {
    let mut words = field.split('_');
    let mut key = words.next().unwrap_or_default().to_owned();
    for word in words {
        let mut letters = word.chars();
        key.extend(letters.next().map(|first| first.to_ascii_uppercase()));
        key.push_str(letters.as_str());
    }
    key
}

/// A list of all errors of a configuration, so that a user sees them at once.
#[derive(Debug, Default)]
pub struct ConfigErrors(ConfigError);

impl ConfigErrors {
    /// Records an error of a setting. `setting` is the name of the flag.
    pub fn add(&mut self, setting: &str, error: impl Display) {
        self.0.mistakes.push(format!("{setting}: {error}"));
    }

    /// Records that a setting cannot be used at this moment, because a file cannot be read for
    /// example. A later start may find what it needs.
    pub fn add_fact(&mut self, setting: &str, error: impl Display) {
        self.0.facts.push(format!("{setting}: {error}"));
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

    /// Returns the value of the choice with this name, or records an error that lists the names.
    pub fn one_of<T: Copy>(
        &mut self,
        setting: &str,
        text: &str,
        choices: &[(&str, T)],
    ) -> Option<T> {
        let chosen = choices.iter().find(|(name, _)| *name == text);
        let names = || Vec::from_iter(choices.iter().map(|(name, _)| *name));
        let chosen = chosen.ok_or_else(|| none_of(text, &names()));
        self.ok_or_record(setting, chosen).map(|(_, value)| *value)
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
            Err(self.0)
        }
    }
}

/// All errors of a configuration, one per line.
#[derive(Debug, Default, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.text())]
pub struct ConfigError {
    /// What is wrong in every environment.
    pub mistakes: Vec<String>,
    /// What is wrong at this moment: a file that cannot be read, a port that is in use. A later start
    /// may succeed.
    pub facts: Vec<String>,
}

impl ConfigError {
    /// Creates the error of one mistake.
    pub fn mistake(text: impl Into<String>) -> Self {
        Self {
            mistakes: vec![text.into()],
            facts: Vec::new(),
        }
    }

    /// Creates the error of one fact, that may change by itself.
    pub fn fact(text: impl Into<String>) -> Self {
        Self {
            mistakes: Vec::new(),
            facts: vec![text.into()],
        }
    }

    /// Returns whether a person must change the configuration.
    pub fn is_usage(&self) -> bool {
        !self.mistakes.is_empty()
    }

    /// Returns whether there is no error.
    pub fn is_empty(&self) -> bool {
        self.mistakes.is_empty() && self.facts.is_empty()
    }

    /// Returns the mistakes and the facts.
    pub fn lines(&self) -> Vec<&str> {
        let lines = self.mistakes.iter().chain(&self.facts);
        lines.map(String::as_str).collect()
    }

    /// Adds the errors of another part of the configuration.
    pub fn extend(&mut self, other: Self) {
        self.mistakes.extend(other.mistakes);
        self.facts.extend(other.facts);
    }

    fn text(&self) -> String {
        let mut parts = Vec::new();
        for (what, texts) in [
            ("invalid configuration", &self.mistakes),
            (
                "the configuration cannot be used on this host at this moment",
                &self.facts,
            ),
        ] {
            if !texts.is_empty() {
                let count = texts.len();
                parts.push(format!(
                    "{what}, {count} error(s):\n  {}",
                    texts.join("\n  ")
                ));
            }
        }
        parts.join("\n")
    }
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
#[expect(unreachable_pub, reason = "the macro declares what other crates use")]
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
        let choices = [("on", true), ("off", false)];
        assert_eq!(errors.one_of("--d", "off", &choices), Some(false));
        assert_eq!(errors.one_of("--d", "On", &choices), None);
        let listen = optional("off", parse_address);
        assert_eq!(listen("off"), Ok(None));
        assert_eq!(listen("[::]:1"), Ok("[::]:1".parse().ok()));
        assert!(listen("80").is_err());
        let error = errors.finish(()).unwrap_err();
        let texts: Vec<&str> = error.mistakes.iter().map(|text| &text[..6]).collect();
        assert_eq!(texts, ["--a: i", "--b: i", "--c: \"", "--d: \""]);
        assert_eq!(error.mistakes[3], "--d: \"On\" is none of on, off");
    }

    crate::layered! {
        #[derive(Debug, Clone, Default)]
        pub struct Layered {
            pub http_listen: Option<String>,
            pub peers: Vec<String>,
            pub zone: Option<String>,
        }
    }

    #[test]
    fn layers_are_compared_and_mixed_by_the_keys_of_a_file() {
        let layer = |listen: &str, peers: &[&str]| Layered {
            http_listen: Some(listen.to_owned()),
            peers: peers.iter().map(ToString::to_string).collect(),
            zone: None,
        };
        let (old, new) = (layer("a", &["p"]), layer("b", &["p", "q"]));
        let texts = |keys: BTreeSet<String>| Vec::from_iter(keys).join(" ");
        assert_eq!(texts(old.keys()), "httpListen peers");
        assert_eq!(texts(old.changed_keys(&new)), "httpListen peers");
        assert_eq!(texts(old.changed_keys(&old)), "");
        assert_eq!(old.lines(|key| key == "peers"), "peers: [\"p\"]\n");
        let mixed = old.clone().with(new, |key| key == "peers");
        assert_eq!(mixed.http_listen, old.http_listen);
        assert_eq!(mixed.peers, ["p", "q"]);
        assert_eq!(texts(old.changed_keys(&mixed)), "peers");
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
