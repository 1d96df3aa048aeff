//! The verb `diag`: collects facts about an agent and its host for a bug report.

use tunnel_process::diag::DiagDocument;

use crate::config::{self, Config, DEFAULT_DATA_DIR, LoadError, RawConfig};

/// Collects the facts of an agent with these settings. The settings need not be complete: the data
/// directory and the meta address have defaults.
pub async fn collect(settings: Result<RawConfig, LoadError>) -> DiagDocument {
    let mut document = DiagDocument::new("tunnel-agent", env!("CARGO_PKG_VERSION"));
    let (data_dir, meta_listen) = match &settings {
        Ok(settings) => (settings.data_dir.clone(), settings.meta_listen.clone()),
        Err(_unreadable) => (None, None),
    };
    let checked = settings.and_then(|settings| Config::check(settings).map_err(LoadError::from));
    document.add_settings(checked);
    match config::meta_address(meta_listen.as_deref()) {
        Ok(Some(address)) => document.add_meta(address).await,
        Ok(None) => document.add_error("conditions", "--meta-listen is off"),
        Err(problem) => document.add_error("conditions", &problem),
    }
    document.add_error("log", NO_LOG);
    let data_dir = data_dir.unwrap_or_else(|| DEFAULT_DATA_DIR.into());
    document.add_files(data_dir).await;
    document
}

/// The meta port of an agent can be reached through the tunnel, and another interface does not
/// exist.
const NO_LOG: &str = "the agent offers its log to no command; add the lines of journalctl -u tunnel-agent or kubectl logs";
