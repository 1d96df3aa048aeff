//! The command `reload`: has the running server read its files again, and prints what became of them.

use tunnel_process::output::OutputFormat;

use super::{ReloadArgs, VerbError, VerbOutput, json};
use crate::admin::AdminClient;
use tunnel_store::data_dir::DataDir;

impl ReloadArgs {
    /// Asks the running server and prints the result.
    ///
    /// # Errors
    /// Returns [`VerbError::NotRunning`] without a server, and [`VerbError::UnusableFile`] if the
    /// file cannot be used.
    pub async fn run(self) -> Result<(), VerbError> {
        let path = self.data_dir.path()?;
        let dir = DataDir::open_existing(&path)?;
        let server = AdminClient::connect(&dir).await?;
        let server = server.ok_or(VerbError::NotRunning(path))?;
        let status = server.reload().await?;
        let text = match self.output {
            OutputFormat::Table => status.table(),
            OutputFormat::Json => json(&status)?,
        };
        VerbOutput::out(text).print()?;
        Ok(status.check()?)
    }
}
