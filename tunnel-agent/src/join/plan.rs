//! The files of a join: their content, how they differ from the existing ones, and their writing.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use tunnel_process::files::{self, FileAccess, FileOwner};
use tunnel_proto::wire::enroll::JoinToken;
use zeroize::Zeroizing;

use super::config_file::{self, ConfigFile, FileState, JoinSettings};
use super::error::JoinCommandError;
use super::paths::{self, TOKEN, below};
use super::service;
use super::unit;
use crate::config::{LoadError, RawConfig, parse_token};

/// The files of a join.
pub(super) struct Plan {
    root: Option<PathBuf>,
    /// User of the service; `None` until it is created.
    user: Option<FileOwner>,
    files: Vec<PlannedFile>,
}

struct PlannedFile {
    /// Path on the host.
    path: &'static str,
    content: Zeroizing<Vec<u8>>,
    access: FileAccess,
    state: FileState,
    before: Option<ExistingFile>,
}

/// A file as it was found.
struct ExistingFile {
    content: Zeroizing<Vec<u8>>,
    access: FileAccess,
}

impl ExistingFile {
    fn read(root: Option<&Path>, path: &str) -> Result<Option<Self>, JoinCommandError> {
        let path = below(root, path);
        let Some(content) = files::read(&path)? else {
            return Ok(None);
        };
        Ok(Some(Self {
            content: Zeroizing::new(content),
            access: FileAccess::of(&path)?,
        }))
    }
}

impl PlannedFile {
    /// Plans a file whose whole content is that of this verb.
    fn own(
        root: Option<&Path>,
        path: &'static str,
        content: String,
    ) -> Result<Self, JoinCommandError> {
        let before = ExistingFile::read(root, path)?;
        let state = match &before {
            None => FileState::Missing,
            Some(existing) if *existing.content == content.as_bytes() => FileState::Same,
            Some(_) => FileState::Differs(vec![format!("{path} has another content")]),
        };
        Ok(Self {
            path,
            content: Zeroizing::new(content.into_bytes()),
            access: FileAccess::READABLE,
            state,
            before,
        })
    }

    /// Returns whether a user can read the file. Every user can read the file of an unknown user.
    fn is_readable_for(&self, user: Option<FileOwner>) -> bool {
        let FileAccess { mode, owner } = self.access;
        let owns = |is_own: fn(FileOwner, FileOwner) -> bool| {
            let both = owner.zip(user);
            both.is_some_and(|(owner, user)| is_own(owner, user))
        };
        mode & 0o004 != 0
            || mode & 0o040 != 0 && owns(|owner, user| owner.group == user.group)
            || mode & 0o400 != 0 && owns(|owner, user| owner.user == user.user)
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
        let user = unit::service_user(root)?;
        if unit.is_none() && user.is_none() {
            return Err(JoinCommandError::NoUser);
        }
        let mut files = Vec::new();
        if unit.is_some() {
            let line = unit::SYSUSERS_LINE.to_owned();
            files.push(PlannedFile::own(root, paths::SYSUSERS, line)?);
        }
        // An image has the user only after its first start.
        if root.is_some() && user.is_none() {
            let line = unit::TMPFILES_LINE.to_owned();
            files.push(PlannedFile::own(root, paths::TMPFILES, line)?);
        }
        files.push(plan_token(root, token, user)?);
        let config = plan_config(root, settings)?;
        if !config.is_readable_for(user) {
            return Err(JoinCommandError::ConfigUnreadable(paths::CONFIG));
        }
        files.push(config);
        files.extend(unit);
        Ok(Self {
            root: root.map(Path::to_owned),
            user,
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

    /// Writes the files that are not the same, and creates the user of the service on this host.
    pub(super) fn write(&mut self) -> Result<(), JoinCommandError> {
        let root = self.root.clone();
        for file in &mut self.files {
            if file.path == TOKEN {
                file.access.owner = self.user;
            }
            if file.state != FileState::Same {
                let path = below(root.as_deref(), file.path);
                if let Some(folder) = path.parent() {
                    make_readable_dir(folder)?;
                }
                files::replace_with(&path, &file.content, file.access)?;
            }
            if file.path == paths::SYSUSERS && root.is_none() && self.user.is_none() {
                service::create_user(paths::SYSUSERS)?;
                self.user = unit::service_user(None)?;
                self.user.ok_or(JoinCommandError::NoUser)?;
            }
        }
        Ok(())
    }

    /// Returns the settings of the agent.
    pub(super) fn settings(&self) -> Result<RawConfig, LoadError> {
        let config = self.files.iter().find(|file| file.path == paths::CONFIG);
        let text = config.map_or(&[][..], |file| file.content.as_slice());
        config_file::parse(&String::from_utf8_lossy(text))
    }

    /// Returns whether a file is not the same.
    pub(super) fn has_changes(&self) -> bool {
        self.changed().next().is_some()
    }

    /// Gives the files back their content from before, and removes those that are new.
    pub(super) fn restore(&self) -> io::Result<()> {
        for file in self.changed() {
            let path = below(self.root.as_deref(), file.path);
            match &file.before {
                Some(before) => files::replace_with(&path, &before.content, before.access)?,
                None => files::remove(&path)?,
            }
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
    let before = ExistingFile::read(root, paths::CONFIG)?;
    let existing = before.as_ref();
    let existing = existing.map(|file| String::from_utf8_lossy(&file.content).into_owned());
    let file = ConfigFile::plan(existing.as_deref(), settings)?;
    Ok(PlannedFile {
        path: paths::CONFIG,
        content: Zeroizing::new(file.text.into_bytes()),
        access: before
            .as_ref()
            .map_or(FileAccess::READABLE, |file| file.access),
        state: file.state,
        before,
    })
}

/// Plans the token for the user of the service.
fn plan_token(
    root: Option<&Path>,
    token: &JoinToken,
    user: Option<FileOwner>,
) -> Result<PlannedFile, JoinCommandError> {
    let before = ExistingFile::read(root, TOKEN)?;
    let access = FileAccess {
        owner: user,
        ..FileAccess::PRIVATE
    };
    let state = match &before {
        None => FileState::Missing,
        Some(existing) => match token_state(&String::from_utf8_lossy(&existing.content), token) {
            // The service may not be able to read it.
            FileState::Same if user.is_some() && existing.access != access => FileState::Unset,
            state => state,
        },
    };
    Ok(PlannedFile {
        path: TOKEN,
        content: Zeroizing::new(token.reveal().into_bytes()),
        access,
        state,
        before,
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
    if unit::has_package(root) && !below(root, paths::UNIT).exists() {
        return Ok(None);
    }
    let text = unit::text(&unit::program(root)?);
    PlannedFile::own(root, paths::UNIT, text).map(Some)
}

/// Creates a directory that the user of the service can enter, unless it exists.
fn make_readable_dir(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    fs::create_dir_all(path)
        .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(0o755)))
        .map_err(|error| files::with_path(path, &error))
}
