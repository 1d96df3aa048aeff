//! The command `data`: what the store of a data directory has, and its repair.

use std::io::{self, BufWriter, Write};
use std::path::Path;

use tunnel_process::schema::SCHEMA_VERSION;

use super::{DataVerb, VerbError, VerbOutput};
use crate::admin::AdminClient;
use tunnel_ca::revocation::Revocations;
use tunnel_store::data_dir::DataDir;
use tunnel_store::state_store::{OnDamage, StateStore, Table, json_text};

impl DataVerb {
    /// Runs the command and prints the result.
    ///
    /// # Errors
    /// Returns a [`VerbError`].
    pub async fn run(self) -> Result<(), VerbError> {
        match self {
            Self::Dump { data_dir } => {
                let dir = open(&data_dir.path()?).await?;
                let store = dir.store(OnDamage::Stop)?;
                let out = BufWriter::new(io::stdout().lock());
                match dump(&store, out) {
                    Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
                    Ok(()) | Err(_) => Ok(()),
                }
            }
            Self::Repair { data_dir } => repair(&open(&data_dir.path()?).await?)?.print(),
        }
    }
}

/// Opens a data directory that no server uses.
async fn open(path: &Path) -> Result<DataDir, VerbError> {
    let dir = DataDir::open_existing(path)?;
    if AdminClient::connect(&dir).await?.is_some() {
        return Err(VerbError::StoreInUse(path.to_owned()));
    }
    Ok(dir)
}

/// Writes all rows as one JSON object, a line for each row.
pub(super) fn dump(store: &StateStore, mut out: impl Write) -> io::Result<()> {
    write!(out, "{{\n\"schemaVersion\": {SCHEMA_VERSION}")?;
    for table in Table::ALL {
        let rows = store.rows(table)?;
        write!(out, ",\n{:?}: {{", table.label())?;
        let mut before_row = "";
        for (key, content) in &rows {
            let key = serde_json::to_string(key).map_err(io::Error::other)?;
            write!(out, "{before_row}\n  {key}: {}", json_text(content))?;
            before_row = ",";
        }
        write!(out, "}}")?;
    }
    writeln!(out, "\n}}")?;
    out.flush()
}

/// Sets aside what keeps a server from its start.
pub(super) fn repair(dir: &DataDir) -> Result<VerbOutput, VerbError> {
    let store = dir.store(OnDamage::SetAside)?;
    let mut out: String = store
        .findings()
        .iter()
        .map(|line| format!("{line}\n"))
        .collect();
    if !out.is_empty() {
        out.push_str("revocations and unused join tokens are lost: revoke the nodes again, and create new tokens\n");
    }
    for name in Revocations::set_aside_damaged(&store)? {
        out.push_str(&format!(
            "the order about {name} was damaged and is set aside; if the node is to be refused: tunnel-server nodes revoke {name}\n"
        ));
    }
    if out.is_empty() {
        out.push_str("nothing is damaged that stops a start\n");
    }
    Ok(VerbOutput::out(out))
}
