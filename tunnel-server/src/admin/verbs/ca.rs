//! The command `ca`: prints the CA's certificate, and exports and imports the CA with its key.

use std::io;
use std::path::Path;

use tunnel_proto::process::files;
use tunnel_proto::process::terminal::{Answer, ask};

use super::{CaArgs, CaVerb, VerbError, VerbOutput, load_ca, open_dir};
use crate::admin::AdminClient;
use crate::ca::CaMaterial;
use crate::ca::transfer::{self, StoredCa};
use crate::store::data_dir::DataDir;

impl CaArgs {
    /// Prints the CA's certificate. Without a running server, a cluster's directory provides the
    /// last observed certificate, and another directory its CA, which is created only with
    /// --offline. The verbs export and import the CA.
    ///
    /// # Errors
    /// Returns a [`VerbError`].
    pub async fn run(self) -> Result<(), VerbError> {
        self.execute(ask).await?.print()
    }

    /// Runs the command. `ask` asks a question in the terminal.
    pub(super) async fn execute(
        self,
        ask: impl FnOnce(&str) -> io::Result<Answer>,
    ) -> Result<VerbOutput, VerbError> {
        let can_create = self.offline || self.verb.is_some();
        let dir = open_dir(&self.data_dir.data_dir, can_create)?;
        match self.verb {
            None => print(&dir, self.offline).await,
            Some(CaVerb::Export { file }) => export(require_own_ca(&dir)?, file.as_deref()),
            Some(CaVerb::Import { file, force }) => {
                let is_confirmed = |question: &str| match ask(question)? {
                    Answer::Yes => Ok(true),
                    Answer::No => Ok(false),
                    Answer::NoTerminal => Err(VerbError::OtherCa(dir.path().to_owned())),
                };
                import(require_own_ca(&dir)?, &file, |question| {
                    if force {
                        Ok(true)
                    } else {
                        is_confirmed(question)
                    }
                })
            }
        }
    }
}

async fn print(dir: &DataDir, offline: bool) -> Result<VerbOutput, VerbError> {
    Ok(VerbOutput::out(match AdminClient::connect(dir).await? {
        Some(server) => server.ca().await?,
        None if dir.is_cluster_managed() => {
            let path = dir.ca_certificate();
            let pem = files::read(&path)?.ok_or(VerbError::CaNotStored(path))?;
            String::from_utf8_lossy(&pem).into_owned()
        }
        None => load_ca(dir, offline)?.root_pem(),
    }))
}

/// Returns `dir` if its CA is the one that a server with this directory uses.
fn require_own_ca(dir: &DataDir) -> Result<&DataDir, VerbError> {
    if dir.is_cluster_managed() {
        return Err(VerbError::CaInCluster(dir.path().to_owned()));
    }
    Ok(dir)
}

/// Writes the CA to a new file, or to standard output.
fn export(dir: &DataDir, file: Option<&Path>) -> Result<VerbOutput, VerbError> {
    let pem = transfer::export(dir)?;
    let Some(file) = file else {
        return Ok(VerbOutput::out(String::clone(&pem)));
    };
    files::create(file, pem.as_bytes()).map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => VerbError::FileExists(file.to_owned()),
        _ => VerbError::File(error),
    })?;
    let note = format!(
        "wrote the CA and its private key to {}; who has this file can issue certificates: remove it after the import\n",
        file.display()
    );
    Ok(VerbOutput {
        out: String::new(),
        err: note,
    })
}

/// Imports a CA. `can_replace` decides whether another CA is replaced.
fn import(
    dir: &DataDir,
    file: &Path,
    can_replace: impl FnOnce(&str) -> Result<bool, VerbError>,
) -> Result<VerbOutput, VerbError> {
    let material = read(file)?;
    // Held until the end, so that no server starts in the meantime.
    let Some(_lock) = dir.lock()? else {
        return Err(VerbError::ServerRuns(dir.path().to_owned()));
    };
    let shown = dir.path().display();
    match transfer::compare(dir, &material)? {
        StoredCa::Same => {
            return Ok(VerbOutput::out(format!("{shown} has this CA already\n")));
        }
        StoredCa::Other => {
            let question = format!(
                "{shown} has another CA. Servers with the imported one refuse the agents and join tokens of the other \
                 one. Replace it?"
            );
            if !can_replace(&question)? {
                return Ok(VerbOutput::out(format!("{shown} keeps its CA\n")));
            }
        }
        StoredCa::Missing => {}
    }
    transfer::import(dir, &material)?;
    Ok(VerbOutput::out(format!("{shown} has the imported CA\n")))
}

fn read(file: &Path) -> Result<CaMaterial, VerbError> {
    let name = file.display().to_string();
    let pem = files::read_secret(file)?;
    let pem = pem.ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::NotFound,
            format!("{name} does not exist; 'tunnel-server ca export FILE' creates it"),
        )
    })?;
    Ok(transfer::parse(&pem, &name)?)
}
