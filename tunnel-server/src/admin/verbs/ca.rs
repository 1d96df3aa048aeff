//! The command `ca`: prints the CA's certificate, exports, imports and replaces the CA, and makes
//! certificates for callers.

use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

use tunnel_process::files;
use tunnel_process::terminal::{Answer, ask};

use super::{CaArgs, CaVerb, VerbError, VerbOutput, load_ca, open_dir, rotate};
use crate::admin::AdminClient;
use tunnel_ca::CaMaterial;
use tunnel_ca::client::{CallerName, ClientCa};
use tunnel_ca::rotation::RotationAction;
use tunnel_ca::transfer::{self, StoredCa};
use tunnel_store::data_dir::{DataDir, rfc3339};

impl CaArgs {
    /// Prints the CA's certificate. Without a running server, a cluster's directory provides the
    /// last observed certificate, and another directory its CA, which is created only with
    /// --offline. The verbs export, import and replace the CA, and make a certificate for a caller.
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
        let can_create = match &self.verb {
            None | Some(CaVerb::Client { .. } | CaVerb::Rotate { .. }) => self.offline,
            Some(CaVerb::Export { .. } | CaVerb::Import { .. }) => true,
        };
        let dir = open_dir(&self.data_dir.path()?, can_create)?;
        match self.verb {
            None => Ok(VerbOutput::out(certificates(&dir, self.offline).await?)),
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
            Some(CaVerb::Rotate {
                status,
                next,
                abort,
                force,
                output,
            }) => {
                let action = match (next, abort) {
                    (true, _) if force => Some(RotationAction::ForceNext),
                    (true, _) => Some(RotationAction::Next),
                    (false, true) => Some(RotationAction::Abort),
                    (false, false) if status => None,
                    (false, false) => Some(RotationAction::Begin),
                };
                rotate::rotate(&dir, action, output).await
            }
            Some(CaVerb::Client {
                name,
                days,
                dir: output,
            }) => {
                if dir.is_cluster_managed() {
                    return Err(VerbError::ClientCaInCluster(dir.path().to_owned()));
                }
                let server_ca = certificates(&dir, self.offline).await?;
                client(&dir, &name, days, &output, &server_ca)
            }
        }
    }
}

/// Returns the CA's certificates as PEM.
async fn certificates(dir: &DataDir, offline: bool) -> Result<String, VerbError> {
    Ok(match AdminClient::connect(dir).await? {
        Some(server) => server.ca().await?,
        None if dir.is_cluster_managed() => {
            let path = dir.ca_certificate();
            let pem = files::read(&path)?.ok_or(VerbError::CaNotStored(path))?;
            String::from_utf8_lossy(&pem).into_owned()
        }
        None => load_ca(dir, offline)?.root_pem(),
    })
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
    create(file, &pem)?;
    let note = format!(
        "wrote the CA and its private key to {}; who has this file can issue certificates: remove it after the import\n",
        file.display()
    );
    Ok(VerbOutput {
        err: note,
        ..VerbOutput::out(String::new())
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

/// Makes a caller's certificate and writes it to `output` with its key and the CA of the server.
fn client(
    dir: &DataDir,
    name: &CallerName,
    days: u16,
    output: &Path,
    server_ca: &str,
) -> Result<VerbOutput, VerbError> {
    let life = DAY * u32::from(days);
    let issued = ClientCa::load_or_create(dir)?.issue(name, life, SystemTime::now())?;
    let key = output.join(format!("{}.key", name.as_str()));
    let certificate = output.join(format!("{}.crt", name.as_str()));
    let bundle = output.join("server-ca.crt");
    files::make_private_dir(output).map_err(|error| files::with_path(output, &error))?;
    files::replace(&bundle, server_ca.as_bytes())?;
    create(&key, &issued.key)?;
    create(&certificate, &issued.certificate).inspect_err(|_no_pair| {
        let _nothing_to_remove = std::fs::remove_file(&key);
    })?;
    let out = format!(
        "wrote {}, {} and {}; the certificate ends at {}\n",
        key.display(),
        certificate.display(),
        bundle.display(),
        rfc3339(issued.not_after)
    );
    let err = format!(
        "the server accepts the certificates of its client CA with --client-ca {}\n",
        dir.client_ca_certificate().display()
    );
    Ok(VerbOutput {
        err,
        ..VerbOutput::out(out)
    })
}

/// Creates a file that only its owner can read.
fn create(file: &Path, content: &str) -> Result<(), VerbError> {
    files::create(file, content.as_bytes()).map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => VerbError::FileExists(file.to_owned()),
        _ => VerbError::File(error),
    })
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

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
