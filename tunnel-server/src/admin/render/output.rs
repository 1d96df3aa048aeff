//! The output of `render`: a text is printed or written, or a file is compared with it.

use std::path::PathBuf;
use std::{fs, io};

use tunnel_process::command_line::EXIT_USAGE;
use tunnel_process::files::{self, FileAccess};
use tunnel_process::telemetry;

use super::check::{self, Format};

/// The file to write or to compare.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct OutputArgs {
    /// File to write, with mode 0644; without it the text is printed
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Overwrite the file of --file
    #[arg(long, requires = "file")]
    pub force: bool,
    /// Compare this file with the text: print what the file lacks, and exit with code 1 if
    /// anything is missing. The file may have more, as a complete Pod or Corefile does
    #[arg(long, value_name = "FILE", conflicts_with = "file")]
    pub check: Option<PathBuf>,
}

/// The reason why a text was not rendered, or the result of a check that found differences.
#[derive(Debug, thiserror::Error)]
pub enum RenderError {
    /// A file cannot be used; the text names the file.
    #[error("cannot use {0}")]
    File(io::Error),
    #[error("{} exists; add --force to overwrite it", .0.display())]
    FileExists(PathBuf),
    #[error("{} differs from the rendered text", .0.display())]
    Differs(PathBuf),
    #[error("{} is not valid YAML: {reason}", .path.display())]
    NotYaml { path: PathBuf, reason: String },
    #[error("cannot write to standard output")]
    Io(#[from] io::Error),
    /// The flags cannot be combined.
    #[error("{0}")]
    Usage(&'static str),
}

impl RenderError {
    /// Returns [`EXIT_USAGE`] if the flags are wrong, else 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) => EXIT_USAGE,
            Self::File(_)
            | Self::FileExists(_)
            | Self::Differs(_)
            | Self::NotYaml { .. }
            | Self::Io(_) => 1,
        }
    }
}

/// Prints or writes a text, or compares a file with it.
pub(super) fn finish(text: &str, format: Format, output: &OutputArgs) -> Result<(), RenderError> {
    let Some(path) = &output.check else {
        return write_or_print(text, output);
    };
    let content = fs::read_to_string(path)
        .map_err(|error| RenderError::File(files::with_path(path, &error)))?;
    let differences =
        check::differences(format, &content, text).map_err(|error| RenderError::NotYaml {
            path: path.clone(),
            reason: error.to_string(),
        })?;
    if differences.is_empty() {
        return Ok(());
    }
    let shown = format!(
        "--- {}\n+++ rendered\n{}\n",
        path.display(),
        differences.join("\n")
    );
    telemetry::print(shown.as_bytes())?;
    Err(RenderError::Differs(path.clone()))
}

fn write_or_print(text: &str, output: &OutputArgs) -> Result<(), RenderError> {
    let Some(path) = &output.file else {
        return Ok(telemetry::print(text.as_bytes())?);
    };
    let write = if output.force {
        files::replace_with
    } else {
        files::create_with
    };
    write(path, text.as_bytes(), FileAccess::READABLE).map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => RenderError::FileExists(path.clone()),
        _ => RenderError::File(error),
    })
}
