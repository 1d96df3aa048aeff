//! What `check-config` tries in addition to the settings: the files that they name and the addresses of
//! the listeners, with the code of the start.

use std::net::TcpListener;
use std::time::SystemTime;

use tunnel_process::errors::causes;
use tunnel_process::settings::{ConfigError, ConfigErrors};
use tunnel_proto::tcp::listen_freebind;

use crate::config::Config;
use crate::credentials::{CredentialError, CredentialStore, Stored, read_token};

/// Reads the files of the credentials, and binds each address for a moment unless an agent has it
/// (`is_running`). Blocks the thread.
///
/// # Errors
/// [`ConfigError`] with everything that is wrong.
pub fn check_environment(config: &Config, is_running: bool) -> Result<(), ConfigError> {
    let mut errors = ConfigErrors::default();
    if let Err(error) = check_credentials(config) {
        let text = causes(&error).to_string();
        if error.is_usage() {
            errors.add("credentials", text);
        } else {
            errors.add_fact("credentials", text);
        }
    }
    if !is_running {
        if let Some(address) = config.meta_listen
            && let Err(error) = TcpListener::bind(address)
        {
            errors.add_fact(
                "--meta-listen",
                format!("cannot listen on {address}: {error}"),
            );
        }
        for listener in &config.cloud_listeners {
            let address = listener.address;
            if let Err(error) = listen_freebind(address) {
                errors.add_fact(
                    "--cloud-listen",
                    format!("cannot listen on {address}: {error}"),
                );
            }
        }
    }
    errors.finish(())
}

/// Reads the operator's files, or the stored certificate, or the token, as the start does.
fn check_credentials(config: &Config) -> Result<(), CredentialError> {
    let node = &config.node_name;
    if let Some(files) = &config.credential_files {
        return files.load(node).map(drop);
    }
    let stored = if config.data_dir.exists() {
        let store = CredentialStore::open(&config.data_dir)?;
        match store.load(node, config.ca.as_deref(), SystemTime::now()) {
            Err(CredentialError::Damaged { .. }) if config.token.is_some() => Stored::Missing,
            loaded => loaded?,
        }
    } else {
        Stored::Missing
    };
    match (stored, &config.token) {
        (Stored::Valid(_) | Stored::Expired(_, Some(_)), _) => Ok(()),
        (Stored::Expired(..) | Stored::Missing, Some(token)) => {
            read_token(token, config.ca.is_some()).map(drop)
        }
        (Stored::Expired(..) | Stored::Missing, None) => Err(CredentialError::NoToken {
            dir: config.data_dir.clone(),
            node: node.clone(),
        }),
    }
}
