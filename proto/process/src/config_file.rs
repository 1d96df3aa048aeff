//! The configuration file of a process: where it is, what flags and variables override in it, and its
//! mistakes with their lines.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

use crate::files;
use crate::settings::{ConfigError, Layers, key};
use crate::yaml::{self, YamlError};

/// The reason why a file has no settings.
#[derive(Debug, thiserror::Error)]
pub enum ConfigFileError {
    /// The file is absent, or must not be used as it is. A later start may find it.
    #[error("cannot read the configuration file: {0}")]
    Unreadable(io::Error),
    /// The content is not YAML.
    #[error("--config: {}: {mistake}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// The first mistake.
        mistake: String,
    },
}

impl ConfigFileError {
    /// Returns whether somebody must change the file: its content, or its mode.
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Unreadable(error) => error.kind() == io::ErrorKind::InvalidData,
            Self::Syntax { .. } => true,
        }
    }
}

/// The reason why a process has no settings.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file has none.
    #[error(transparent)]
    File(#[from] ConfigFileError),
    /// They cannot be used.
    #[error(transparent)]
    Invalid(#[from] ConfigError),
}

impl LoadError {
    /// Returns whether the settings are wrong in every environment. An absent file may appear later.
    pub fn is_usage(&self) -> bool {
        match self {
            Self::File(error) => error.is_usage(),
            Self::Invalid(error) => error.is_usage(),
        }
    }
}

impl From<&LoadError> for ConfigError {
    fn from(error: &LoadError) -> Self {
        match error {
            LoadError::File(file) if file.is_usage() => Self::mistake(file.to_string()),
            LoadError::File(file) => Self::fact(file.to_string()),
            LoadError::Invalid(errors) => errors.clone(),
        }
    }
}

/// The settings of all layers before the checks, which `Debug` leaves out.
#[derive(Clone)]
pub struct RawSettings<T>(pub Box<T>);

impl<T> fmt::Debug for RawSettings<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("..")
    }
}

/// A file of settings as it was read, with the layer over it.
#[derive(Clone)]
pub struct ConfigFile<T> {
    /// The file, as it was named.
    pub path: PathBuf,
    /// Digest of the content.
    pub digest: [u8; 32],
    /// Keys of the file that a flag or a variable overrides.
    pub overridden: BTreeSet<String>,
    /// A warning about the file.
    pub warning: Option<String>,
    upper: T,
    mistakes: Vec<String>,
    bad_keys: BTreeSet<String>,
    lines: BTreeMap<String, u64>,
}

impl<T> fmt::Debug for ConfigFile<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.path.fmt(formatter)
    }
}

impl<T: Layers + Clone + Default + DeserializeOwned> ConfigFile<T> {
    /// Reads a file. Returns the settings of both layers, which must be checked with
    /// [`Self::check`]. `digest` hashes the content. Blocks the thread.
    ///
    /// # Errors
    /// [`ConfigFileError`]
    pub fn read(
        path: &Path,
        upper: T,
        digest: fn(&[u8]) -> [u8; 32],
    ) -> Result<(Self, T), ConfigFileError> {
        let (bytes, warning) = files::read_config(path).map_err(ConfigFileError::Unreadable)?;
        let syntax = |mistake| ConfigFileError::Syntax {
            path: path.to_owned(),
            mistake,
        };
        let text = std::str::from_utf8(&bytes).map_err(|error| syntax(error.to_string()))?;
        let read = yaml::read::<T>(text);
        let read = read.map_err(|YamlError(mistakes)| syntax(mistakes.join("; ")))?;
        let lower = read.settings.unwrap_or_default();
        let file = Self {
            path: path.to_owned(),
            digest: digest(&bytes),
            overridden: &upper.keys() & &lower.keys(),
            warning,
            upper: upper.clone(),
            mistakes: read.mistakes,
            bad_keys: read.bad_keys,
            lines: read.lines,
        };
        Ok((file, upper.over(lower)))
    }

    /// Returns what `check` makes of the settings, or all mistakes: those of the file, and those that
    /// `check` finds, with their lines in the file.
    ///
    /// # Errors
    /// [`ConfigError`] with all mistakes.
    pub fn check<C>(
        &self,
        settings: T,
        check: impl FnOnce(T) -> Result<C, ConfigError>,
    ) -> Result<C, ConfigError> {
        let checked = check(settings);
        let path = self.path.display();
        let in_file = self.mistakes.iter();
        let mut mistakes: Vec<String> = in_file
            .map(|mistake| format!("--config: {path}: {mistake}"))
            .collect();
        let mut facts = Vec::new();
        match checked {
            Ok(checked) if mistakes.is_empty() => return Ok(checked),
            Ok(_) => {}
            Err(errors) => {
                let of_values = errors.mistakes.into_iter();
                mistakes.extend(of_values.filter_map(|mistake| self.with_line(mistake)));
                facts = errors.facts;
            }
        }
        Err(ConfigError { mistakes, facts })
    }

    /// Returns a mistake of a setting with its line, if the setting is of the file. A value that could
    /// not be read has its mistake already.
    fn with_line(&self, mistake: String) -> Option<String> {
        let key = setting_key(&mistake);
        let section = key.split('.').next().unwrap_or_default();
        if self.bad_keys.contains(section) {
            return None;
        }
        let is_of_file = !self.overridden.contains(section);
        let line = self.lines.get(&key).or_else(|| self.lines.get(section));
        Some(match line.filter(|_| is_of_file) {
            Some(line) => format!("{mistake} (line {line} of {})", self.path.display()),
            None => mistake,
        })
    }

    /// Returns the layer over the file.
    pub fn upper(&self) -> &T {
        &self.upper
    }
}

/// Returns the key of the setting with which a mistake begins: `httpListen` of `--http-listen: ...`,
/// and `limits.openTimeout` or `services` as they are.
fn setting_key(mistake: &str) -> String {
    let setting = mistake.split(':').next().unwrap_or_default();
    match setting.strip_prefix("--") {
        Some(flag) => key(&flag.replace('-', "_")),
        None => setting.to_owned(),
    }
}

/// Returns the digest of a file's content, which is not parsed. Blocks the thread.
///
/// # Errors
/// [`ConfigFileError::Unreadable`]
pub fn content_digest(
    path: &Path,
    digest: fn(&[u8]) -> [u8; 32],
) -> Result<[u8; 32], ConfigFileError> {
    let (bytes, _warning) = files::read_config(path).map_err(ConfigFileError::Unreadable)?;
    Ok(digest(&bytes))
}

/// Returns the file to read: `named`, or the default one if it exists. `name` is its name in
/// `/etc/culvert` and in the current directory. `off` is no file.
pub fn config_path(named: Option<&Path>, name: &str) -> Option<PathBuf> {
    match named {
        Some(path) if path == Path::new("off") => None,
        Some(path) => Some(path.to_owned()),
        None => {
            let system = Path::new(CONFIG_DIR).join(name);
            if system.exists() {
                return Some(system);
            }
            let local = Path::new(".").join(name);
            is_trusted(&local).then_some(local)
        }
    }
}

/// Returns whether nobody else has put the file into the current directory, which may be `/tmp`.
fn is_trusted(path: &Path) -> bool {
    let own = rustix::process::geteuid().as_raw();
    // A link and its target.
    let files = [std::fs::symlink_metadata(path), std::fs::metadata(path)];
    let mut owners = files.into_iter().map(|file| file.map(|file| file.uid()));
    owners.all(|owner| owner.is_ok_and(|owner| owner == 0 || owner == own))
}

/// Directory of the default files.
const CONFIG_DIR: &str = "/etc/culvert";

#[cfg(test)]
#[expect(unreachable_pub, reason = "the macro declares what other crates use")]
mod tests {
    use serde::Deserialize;

    use super::*;
    use crate::scratch::ScratchDir;
    use crate::settings::ConfigErrors;

    crate::layered! {
        #[derive(Debug, Clone, Default, Deserialize)]
        #[serde(rename_all = "camelCase", deny_unknown_fields, default)]
        pub struct Settings {
            pub http_listen: Option<String>,
            pub log_level: Option<String>,
            pub peers: Vec<String>,
        }
    }

    fn checked(text: &str, upper: Settings) -> Vec<String> {
        let scratch = ScratchDir::new().unwrap();
        let path = scratch.file("config.yaml", text).unwrap();
        let read = ConfigFile::read(&path, upper, |_| [0; 32]);
        let (file, settings) = match read {
            Ok(read) => read,
            Err(error) => return vec![error.to_string().replace(path.to_str().unwrap(), "F")],
        };
        let check = |settings: Settings| {
            let mut errors = ConfigErrors::default();
            let listen = settings.http_listen.as_deref();
            errors.parse_or::<u16>("--http-listen", listen, "80");
            errors.parse_or::<u16>("--log-level", settings.log_level.as_deref(), "1");
            errors.finish(())
        };
        let mistakes = file.check(settings, check);
        let mistakes = mistakes.map_or_else(|error| error.mistakes, |()| Vec::new());
        let texts = mistakes.iter();
        texts
            .map(|text| text.replace(path.to_str().unwrap(), "F"))
            .collect()
    }

    #[test]
    fn mistakes_of_keys_and_values_are_reported_together_with_their_lines() {
        let no_flags = Settings::default();
        assert_eq!(checked("httpListen: 1\n", no_flags.clone()), [""; 0]);
        let text = "peers: {}\nhtpListen: 1\n\nhttpListen: x\nlogLevel: [a]\n";
        assert_eq!(
            checked(text, no_flags),
            [
                "--config: F: line 1: peers: a mapping where a list is expected",
                "--config: F: line 2: unknown key htpListen; did you mean httpListen?",
                "--config: F: line 5: logLevel: a list where a single value is expected",
                "--http-listen: invalid digit found in string (line 4 of F)",
            ]
        );
        let flags = Settings {
            http_listen: Some("y".to_owned()),
            ..Settings::default()
        };
        let of_flag = "--http-listen: invalid digit found in string";
        assert_eq!(checked("httpListen: 1\n", flags), [of_flag]);
        let syntax = checked("a: [", Settings::default());
        assert!(syntax[0].starts_with("--config: F: "), "{syntax:?}");
    }
}
