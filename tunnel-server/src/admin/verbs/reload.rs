//! The command `reload`: has the running server read its files again, and prints what became of them.

use serde::Serialize;
use tunnel_process::config_report::ConfigStatus;
use tunnel_process::output::OutputFormat;

use super::{ReloadArgs, VerbError, VerbOutput, json, running};
use tunnel_store::data_dir::DataDir;

impl ReloadArgs {
    /// Asks the running server and prints the result.
    ///
    /// # Errors
    /// Returns [`VerbError::NotRunning`] without a server, and [`VerbError::UnusableFile`] if the
    /// file cannot be used.
    pub async fn run(self) -> Result<(), VerbError> {
        let server = running(&DataDir::open_existing(&self.data_dir.path()?)?).await?;
        let status = server.reload().await?;
        let ends = self.end_running && status.check().is_ok();
        let ended = if ends {
            Some(server.end_running().await?)
        } else {
            None
        };
        let text = match self.output {
            OutputFormat::Table => {
                let ended = ended.map(|ended| format!("ended, refused by the rules: {ended}\n"));
                status.table() + &ended.unwrap_or_default()
            }
            OutputFormat::Json => json(&Reloaded {
                status: &status,
                ended,
            })?,
        };
        VerbOutput::out(text).print()?;
        Ok(status.check()?)
    }
}

/// The result as JSON.
#[derive(Debug, Serialize)]
struct Reloaded<'a> {
    #[serde(flatten)]
    status: &'a ConfigStatus,
    /// Requests and streams that ended because the rules refuse them.
    #[serde(skip_serializing_if = "Option::is_none")]
    ended: Option<usize>,
}
