//! Sets keys in the text of the agent's configuration file, and leaves all other text as it is.

use std::fmt::Write as _;
use std::path::PathBuf;

use serde_json::Value;
use tunnel_process::config_file::ConfigFileError;
use tunnel_process::yaml;

use super::error::JoinCommandError;
use super::paths::{CONFIG, TOKEN};
use crate::config::{Config, LoadError, RawConfig};

/// The values that the verb sets.
#[derive(Debug, Clone)]
pub(super) struct JoinSettings {
    pub(super) server: Vec<String>,
    /// `None` leaves the key as it is, and without the key the agent uses the host name.
    pub(super) node_name: Option<String>,
}

/// The existing file in comparison with the planned one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum FileState {
    Missing,
    Same,
    /// The values are missing in the file, and are written without a question.
    Unset,
    /// A text for each difference.
    Differs(Vec<String>),
}

/// The text of the file, and how it differs from the existing one.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ConfigFile {
    pub(super) text: String,
    pub(super) state: FileState,
}

impl ConfigFile {
    /// Returns the file with the settings. The result is checked as `check-config` does.
    pub(super) fn plan(
        existing: Option<&str>,
        wanted: &JoinSettings,
    ) -> Result<Self, JoinCommandError> {
        let settings = existing.map(parse).transpose()?.unwrap_or_default();
        let complete = wanted.apply(settings.clone());
        Config::check(complete.clone()).map_err(LoadError::from)?;
        let Some(existing) = existing else {
            let mut text = HEAD.to_owned();
            wanted.keys().iter().for_each(|key| text.push_str(&key.1));
            return Ok(Self {
                text,
                state: FileState::Missing,
            });
        };
        if settings == complete {
            return Ok(Self {
                text: existing.to_owned(),
                state: FileState::Same,
            });
        }
        let keys = wanted.keys();
        let text = with_keys(existing, &keys);
        // Text of other forms, such as a mapping on one line, is not edited correctly.
        if !parse(&text).is_ok_and(|edited| edited == complete) {
            let lines: String = keys.into_iter().map(|(_, lines)| lines).collect();
            return Err(JoinCommandError::CannotEdit {
                file: CONFIG,
                keys: lines.trim_end().to_owned(),
            });
        }
        let state = if is_unset(&settings, &complete) {
            FileState::Unset
        } else {
            FileState::Differs(differences(&settings, &complete))
        };
        Ok(Self { text, state })
    }
}

impl JoinSettings {
    fn apply(&self, settings: RawConfig) -> RawConfig {
        RawConfig {
            server: self.server.clone(),
            node_name: self.node_name.clone().or(settings.node_name),
            token_file: Some(TOKEN.into()),
            ..settings
        }
    }

    /// Returns each key with its lines. A text in JSON is a text in YAML as well.
    fn keys(&self) -> Vec<(&'static str, String)> {
        let quoted = |text: &str| Value::from(text).to_string();
        let mut servers = "server:\n".to_owned();
        for server in &self.server {
            let _infallible = writeln!(servers, "  - {}", quoted(server));
        }
        let mut keys = vec![("server", servers)];
        if let Some(name) = &self.node_name {
            keys.push(("nodeName", format!("nodeName: {}\n", quoted(name))));
        }
        keys.push(("tokenFile", format!("tokenFile: {TOKEN}\n")));
        keys
    }
}

pub(super) fn parse(text: &str) -> Result<RawConfig, LoadError> {
    let settings = yaml::parse(text).map_err(|error| ConfigFileError::Syntax {
        path: PathBuf::from(CONFIG),
        mistake: error.to_string(),
    })?;
    Ok(settings.unwrap_or_default())
}

/// Returns whether keys are only added, and to a file that no agent can use yet, like that of the
/// package.
fn is_unset(settings: &RawConfig, complete: &RawConfig) -> bool {
    let has_other_name = settings.node_name.is_some() && settings.node_name != complete.node_name;
    let has_other_file =
        settings.token_file.is_some() && settings.token_file != complete.token_file;
    settings.server.is_empty() && !has_other_name && !has_other_file
}

/// Returns a text for each key that would change.
fn differences(settings: &RawConfig, complete: &RawConfig) -> Vec<String> {
    let path = |settings: &RawConfig| {
        let file = settings.token_file.as_ref()?;
        Some(file.display().to_string())
    };
    let servers = |settings: &RawConfig| {
        let text = settings.server.join(", ");
        Some(text).filter(|text| !text.is_empty())
    };
    let name = |settings: &RawConfig| settings.node_name.clone();
    [
        ("server", servers(settings), servers(complete)),
        ("nodeName", name(settings), name(complete)),
        ("tokenFile", path(settings), path(complete)),
    ]
    .into_iter()
    .filter(|(_, old, new)| old != new)
    .map(|(key, old, new)| {
        let old = old.unwrap_or_else(|| "not set".to_owned());
        let new = new.unwrap_or_default();
        format!("{key} in {CONFIG} is {old}, and would be {new}")
    })
    .collect()
}

/// Returns the text without the lines of the keys, and with their new lines at the place of the
/// first, or at the end.
fn with_keys(text: &str, keys: &[(&str, String)]) -> String {
    let mut edited = String::with_capacity(text.len() + 256);
    let mut is_replaced = false;
    let mut written: Vec<&str> = Vec::new();
    for line in text.lines() {
        let has_key = |key: &str| {
            line.strip_prefix(key)
                .is_some_and(|after| after.starts_with(':'))
        };
        let is_continued = line.starts_with([' ', '\t']) || line == "-" || line.starts_with("- ");
        if let Some((key, lines)) = keys.iter().find(|(key, _)| has_key(key)) {
            is_replaced = true;
            if !written.contains(key) {
                edited.push_str(lines);
                written.push(*key);
            }
        } else if !(is_replaced && is_continued) {
            is_replaced = false;
            edited.push_str(line);
            edited.push('\n');
        }
    }
    for (_, lines) in keys.iter().filter(|(key, _)| !written.contains(key)) {
        edited.push_str(lines);
    }
    edited
}

const HEAD: &str = "\
# Configuration of tunnel-agent, written by `tunnel-agent join`. Each flag of `tunnel-agent run` is a
# key here, in camelCase: --node-name is nodeName. Check an edit with
#   tunnel-agent check-config --config /etc/culvert/tunnel-agent.yaml

";

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(server: &str) -> JoinSettings {
        JoinSettings {
            server: vec![server.to_owned()],
            node_name: Some("worker-1".to_owned()),
        }
    }

    fn planned(existing: Option<&str>, server: &str) -> ConfigFile {
        ConfigFile::plan(existing, &wanted(server)).unwrap()
    }

    #[test]
    fn new_file_has_the_settings_and_is_the_same_in_the_next_run() {
        for server in ["cloud.example:10262", "[2001:db8::1]:10262"] {
            let new = planned(None, server);
            assert_eq!(new.state, FileState::Missing);
            let settings = parse(&new.text).unwrap();
            assert_eq!(settings.server, [server]);
            assert_eq!(settings.node_name.as_deref(), Some("worker-1"));
            let again = planned(Some(&new.text), server);
            assert_eq!(again.state, FileState::Same);
            assert_eq!(again.text, new.text);
        }
    }

    #[test]
    fn file_of_the_package_is_filled_in_without_a_question() {
        let package = include_str!("../../../deploy/deb/tunnel-agent.yaml");
        let filled = planned(Some(package), "cloud.example:10262");
        assert_eq!(filled.state, FileState::Unset);
        assert!(filled.text.starts_with("# Configuration of tunnel-agent"));
        let settings = parse(&filled.text).unwrap();
        assert_eq!(
            settings,
            wanted("cloud.example:10262").apply(settings.clone())
        );
    }

    #[test]
    fn missing_keys_are_added_to_those_of_the_operator() {
        let filled = planned(Some("nodeIp: 10.0.0.1\n"), "a:1");
        assert_eq!(filled.state, FileState::Unset);
        assert!(filled.text.starts_with("nodeIp: 10.0.0.1\nserver:\n"));
        for used in ["server: [\"a:1\"]\n", "nodeName: worker-7\n"] {
            let differs = planned(Some(used), "a:1");
            assert!(matches!(differs.state, FileState::Differs(_)), "{used}");
        }
    }

    #[test]
    fn keys_and_comments_of_the_operator_stay() {
        let own = "# ours\nserver:\n# the old one\n- a:1\n- b:2\nnodeIp: 10.0.0.1 # fixed\nlimits:\n  keepAlive: 3s\n\
                   nodeName: worker-1\ntokenFile: /etc/culvert/tunnel-agent.token\n";
        let wanted_server = "c.example:3";
        // A comment inside of a list ends the edit, and the result would not be the wanted one.
        assert!(ConfigFile::plan(Some(own), &wanted(wanted_server)).is_err());
        let own = own.replace("# the old one\n", "");
        let edited = planned(Some(&own), wanted_server);
        let expected = own.replace("- a:1\n- b:2\n", "  - \"c.example:3\"\n");
        let expected = expected.replace("nodeName: worker-1", "nodeName: \"worker-1\"");
        assert_eq!(edited.text, expected);
        let difference =
            "server in /etc/culvert/tunnel-agent.yaml is a:1, b:2, and would be c.example:3";
        let state = FileState::Differs(vec![difference.to_owned()]);
        assert_eq!(edited.state, state);
    }

    #[test]
    fn other_forms_of_yaml_are_left_to_the_operator() {
        for own in [
            "{server: \"a:1\", nodeName: worker-1}\n",
            "\"server\": [\"a:1\"]\n",
        ] {
            let error = ConfigFile::plan(Some(own), &wanted("b:2")).unwrap_err();
            let is_expected = matches!(error, JoinCommandError::CannotEdit { .. });
            assert!(is_expected, "{error}");
        }
    }

    #[test]
    fn mistakes_are_usage_errors() {
        let existing = Some("tokenFil: x\n");
        for (existing, server) in [(None, "no-port"), (None, "\n:1"), (existing, "a:1")] {
            let error = ConfigFile::plan(existing, &wanted(server)).unwrap_err();
            assert!(error.is_usage(), "{error}");
        }
    }

    #[test]
    fn name_of_the_node_stays_if_none_is_given() {
        let own =
            "server: [\"a:1\"]\nnodeName: worker-7\ntokenFile: /etc/culvert/tunnel-agent.token\n";
        let wanted = JoinSettings {
            server: vec!["a:1".to_owned()],
            node_name: None,
        };
        let same = ConfigFile::plan(Some(own), &wanted).unwrap();
        assert_eq!(same.state, FileState::Same);
    }
}
