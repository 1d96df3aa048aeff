//! The files that the settings name, read as the server reads them at its start, so that all mistakes
//! are reported at once.

use std::io;
use std::path::Path;

use tunnel_process::settings::{ConfigError, ConfigErrors};
use tunnel_proto::tls::files::{FileError, KeyPairFiles, load_roots};

use crate::cluster::check_kubeconfig;
use crate::config::{Config, CredentialFiles, KubeletClientCa};
use crate::ingress::connect::basic_auth::{BasicAuthFileError, BasicAuthUsers};

/// Reads each file that the settings name, as the server does at its start. Blocks the thread.
///
/// # Errors
/// [`ConfigError`] with a text for each file that cannot be used. A file whose content is wrong is a
/// mistake, and one that is absent or must not be used as it is a fact.
pub fn check_config_files(config: &Config) -> Result<(), ConfigError> {
    let mut files = Files::default();
    if let Some(pair) = &config.https_certificate.files {
        files.pair("--https-cert-file", pair);
    }
    files.credentials(
        ["--agent-ca", "--agent-cert-file"],
        config.agent_files.as_ref(),
    );
    files.credentials(
        ["--peer-ca", "--peer-cert-file"],
        config.peers.files.as_ref(),
    );
    let (connect, page) = (config.connect.as_ref(), config.status_page.as_ref());
    let client_ca = config.client_auth.as_ref().map(|auth| &auth.ca);
    let client_ca = client_ca
        .or_else(|| connect?.client_ca.as_ref())
        .or_else(|| page?.client_ca.as_ref());
    files.roots("--client-ca", client_ca);
    files.passwords("--connect-auth", connect.and_then(|it| it.auth.as_ref()));
    files.passwords("--status-auth", page.and_then(|it| it.auth.as_ref()));
    files.roots("--target-ca", config.targets.ca.as_ref());
    // Without these files the server starts with a condition, and waits for them.
    if let Some(pair) = &config.targets.identity
        && !matches!(pair.load(), Err(error) if error.is_absent())
    {
        files.pair("--target-cert-file", pair);
    }
    if let KubeletClientCa::File(path) = &config.kubelet_client_ca {
        files.roots("--kubelet-client-ca", Some(path));
    }
    let kubernetes = config.kubernetes.as_ref();
    if let Some(path) = kubernetes.and_then(|it| it.kubeconfig.as_ref()) {
        files.kubeconfig(path);
    }
    files.0.finish(())
}

/// The files that cannot be used.
#[derive(Debug, Default)]
struct Files(ConfigErrors);

impl Files {
    fn credentials(&mut self, [ca, certificate]: [&str; 2], files: Option<&CredentialFiles>) {
        if let Some(files) = files {
            self.roots(ca, Some(&files.ca));
            self.pair(certificate, &files.pair);
        }
    }

    fn pair(&mut self, setting: &str, files: &KeyPairFiles) {
        let loaded = files.load();
        self.add(setting, loaded, FileError::is_in_content);
    }

    fn roots(&mut self, setting: &str, path: Option<impl AsRef<Path>>) {
        if let Some(path) = path {
            let loaded = load_roots(path.as_ref());
            self.add(setting, loaded, FileError::is_in_content);
        }
    }

    fn passwords(&mut self, setting: &str, path: Option<impl AsRef<Path>>) {
        if let Some(path) = path {
            let loaded = BasicAuthUsers::load(path.as_ref());
            self.add(setting, loaded, BasicAuthFileError::is_in_content);
        }
    }

    fn kubeconfig(&mut self, path: &Path) {
        match check_kubeconfig(path) {
            Ok(checked) => self.add("--kubeconfig", checked, |_error| true),
            Err(error) => {
                let error = io::Error::new(error.kind(), format!("{}: {error}", path.display()));
                self.add("--kubeconfig", Err::<(), _>(error), |_error| false);
            }
        }
    }

    fn add<T, E>(&mut self, setting: &str, loaded: Result<T, E>, is_in_content: fn(&E) -> bool)
    where
        E: std::error::Error + Send + Sync + 'static,
    {
        let Err(error) = loaded else {
            return;
        };
        let is_in_content = is_in_content(&error);
        let mut texts: Vec<_> = anyhow::Error::from(error)
            .chain()
            .map(ToString::to_string)
            .collect();
        // The text of an error of the file system is that of its cause.
        texts.dedup();
        let text = texts.join(": ");
        if is_in_content {
            self.0.add(setting, text);
        } else {
            self.0.add_fact(setting, text);
        }
    }
}
