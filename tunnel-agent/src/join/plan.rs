//! The files of a join: their content, how they differ from the existing ones, and their writing.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use tunnel_process::files::{self, FileAccess};
use tunnel_proto::wire::enroll::JoinToken;
use zeroize::Zeroizing;

use super::config_file::{ConfigFile, FileState, JoinSettings};
use super::error::JoinCommandError;
use super::paths::{self, TOKEN, below};
use super::unit;
use crate::config::parse_token;

/// The files of a join.
pub(super) struct Plan {
    root: Option<PathBuf>,
    files: Vec<PlannedFile>,
}

struct PlannedFile {
    /// Path on the host.
    path: &'static str,
    content: Zeroizing<Vec<u8>>,
    access: FileAccess,
    state: FileState,
}

impl PlannedFile {
    /// Returns whether this is the configuration, and a user without rights cannot read it.
    fn is_private_config(&self) -> bool {
        self.path == paths::CONFIG && self.access.mode & 0o004 == 0
    }
}

impl Plan {
    /// Reads the existing files, and writes none.
    pub(super) fn new(
        root: Option<&Path>,
        settings: &JoinSettings,
        token: &JoinToken,
    ) -> Result<Self, JoinCommandError> {
        let unit = plan_unit(root)?;
        let access = match unit {
            // systemd reads the token as root, and passes it to the service.
            Some(_) => FileAccess::PRIVATE,
            None => FileAccess {
                owner: Some(unit::package_user(root)?),
                ..FileAccess::PRIVATE
            },
        };
        let mut files = vec![
            plan_token(root, token, access)?,
            plan_config(root, settings)?,
        ];
        let has_own_user = unit.is_some();
        if has_own_user && files.iter().any(PlannedFile::is_private_config) {
            return Err(JoinCommandError::ConfigUnreadable(paths::CONFIG));
        }
        files.extend(unit);
        Ok(Self {
            root: root.map(Path::to_owned),
            files,
        })
    }

    /// Returns a text for each content that the operator has to give up.
    pub(super) fn differences(&self) -> Vec<String> {
        self.files
            .iter()
            .filter_map(|file| match &file.state {
                FileState::Missing | FileState::Same | FileState::Unset => None,
                FileState::Differs(differences) => Some(differences),
            })
            .flatten()
            .cloned()
            .collect()
    }

    /// Writes the files that are not the same.
    pub(super) fn write(&self) -> Result<(), JoinCommandError> {
        for file in self.changed() {
            let path = below(self.root.as_deref(), file.path);
            if let Some(folder) = path.parent() {
                make_readable_dir(folder)?;
            }
            files::replace_with(&path, &file.content, file.access)?;
        }
        Ok(())
    }

    /// Returns a line for each file. `verb` is "wrote" or "would write".
    pub(super) fn report(&self, verb: &str) -> String {
        if self.changed().next().is_none() {
            return "nothing to change: all files have these values\n".to_owned();
        }
        let line = |file: &PlannedFile| match &file.state {
            FileState::Same => format!("unchanged: {}\n", file.path),
            FileState::Missing | FileState::Unset | FileState::Differs(_) => {
                format!("{verb} {} (mode {:04o})\n", file.path, file.access.mode)
            }
        };
        self.files.iter().map(line).collect()
    }

    /// Returns the arguments of each call of systemctl that starts the service, or restarts it with
    /// the new files. The unit is loaded in any case, since an earlier run may have ended before.
    pub(super) fn commands(&self) -> Vec<&'static [&'static str]> {
        let has_unit = self.files.iter().any(|file| file.path == paths::UNIT);
        let is_restarted = self
            .changed()
            .any(|file| matches!(file.state, FileState::Unset | FileState::Differs(_)));
        let mut commands: Vec<&'static [&'static str]> = Vec::new();
        if has_unit {
            commands.push(&["daemon-reload"]);
        }
        if is_restarted {
            commands.push(&["try-restart", paths::SERVICE]);
        }
        commands.push(&["enable", "--now", paths::SERVICE]);
        commands
    }

    fn changed(&self) -> impl Iterator<Item = &PlannedFile> {
        let files = self.files.iter();
        files.filter(|file| file.state != FileState::Same)
    }
}

fn plan_config(
    root: Option<&Path>,
    settings: &JoinSettings,
) -> Result<PlannedFile, JoinCommandError> {
    let path = below(root, paths::CONFIG);
    let existing = files::read(&path)?;
    let access = match existing {
        Some(_) => FileAccess::of(&path)?,
        None => FileAccess::READABLE,
    };
    let existing = existing.map(|content| String::from_utf8_lossy(&content).into_owned());
    let file = ConfigFile::plan(existing.as_deref(), settings)?;
    Ok(PlannedFile {
        path: paths::CONFIG,
        content: Zeroizing::new(file.text.into_bytes()),
        access,
        state: file.state,
    })
}

fn plan_token(
    root: Option<&Path>,
    token: &JoinToken,
    access: FileAccess,
) -> Result<PlannedFile, JoinCommandError> {
    let existing = files::read(&below(root, TOKEN))?.map(Zeroizing::new);
    let state = existing.map_or(FileState::Missing, |content| {
        token_state(&String::from_utf8_lossy(&content), token)
    });
    Ok(PlannedFile {
        path: TOKEN,
        content: Zeroizing::new(token.reveal().into_bytes()),
        access,
        state,
    })
}

/// Compares the content of a token file. The ids of tokens are public.
fn token_state(content: &str, token: &JoinToken) -> FileState {
    match parse_token(content) {
        Ok(existing) if existing == *token => FileState::Same,
        Ok(existing) => FileState::Differs(vec![format!(
            "{TOKEN} has token {}, and would have token {}",
            existing.id(),
            token.id()
        )]),
        Err(_) if content.trim().is_empty() => FileState::Unset,
        Err(_other_content) => FileState::Differs(vec![format!(
            "{TOKEN} has another content than a join token"
        )]),
    }
}

/// Returns the unit, or `None` if that of a package is in effect.
fn plan_unit(root: Option<&Path>) -> Result<Option<PlannedFile>, JoinCommandError> {
    let existing = files::read(&below(root, paths::UNIT))?;
    if existing.is_none() && unit::has_package(root) {
        return Ok(None);
    }
    let content = unit::text(&unit::program(root)?).into_bytes();
    let state = match existing {
        None => FileState::Missing,
        Some(existing) if existing == content => FileState::Same,
        Some(_) => FileState::Differs(vec![format!("{} has another content", paths::UNIT)]),
    };
    Ok(Some(PlannedFile {
        path: paths::UNIT,
        content: Zeroizing::new(content),
        access: FileAccess::READABLE,
        state,
    }))
}

/// Creates a directory that the user of the service can enter, unless it exists.
fn make_readable_dir(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    fs::create_dir_all(path)
        .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(0o755)))
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}
