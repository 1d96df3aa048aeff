//! The command `reload`: has the running server read its files again, and prints what became of them.

use std::fmt::Write as _;

use tunnel_process::output::OutputFormat;

use super::{ReloadArgs, VerbError, VerbOutput, json};
use crate::admin::AdminClient;
use crate::admin::configuration::ConfigStatus;
use tunnel_store::data_dir::{DataDir, rfc3339};

impl ReloadArgs {
    /// Asks the running server and prints the result.
    ///
    /// # Errors
    /// Returns [`VerbError::NotRunning`] without a server, and [`VerbError::ConfigMistakes`] if the
    /// file cannot be used.
    pub async fn run(self) -> Result<(), VerbError> {
        let path = self.data_dir.path()?;
        let dir = DataDir::open_existing(&path)?;
        let server = AdminClient::connect(&dir).await?;
        let server = server.ok_or(VerbError::NotRunning(path))?;
        let status = server.reload().await?;
        let text = match self.output {
            OutputFormat::Table => describe(&status),
            OutputFormat::Json => json(&status)?,
        };
        VerbOutput::out(text).print()?;
        if status.mistakes.is_empty() {
            return Ok(());
        }
        Err(VerbError::ConfigMistakes(status.mistakes))
    }
}

fn describe(status: &ConfigStatus) -> String {
    let mut text = String::new();
    let file = match &status.file {
        Some(file) => format!("{}, read", file.display()),
        None => "flags and variables alone, which never change; read".to_owned(),
    };
    let since = rfc3339(status.loaded_at);
    let _infallible = writeln!(
        text,
        "settings in use: {file} {since}, hash {:.16}",
        status.hash
    );
    for (what, keys) in [
        ("last change applied", &status.applied),
        ("needs a restart", &status.needs_restart),
        ("overridden by a flag or a variable", &status.overridden),
    ] {
        if !keys.is_empty() {
            let _infallible = writeln!(text, "{what}: {}", keys.join(", "));
        }
    }
    text
}
