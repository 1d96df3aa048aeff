//! The admin socket of the running server.

use std::io;
use std::path::Path;

use crate::admin::{AdminClient, AdminError};
use tunnel_store::data_dir::DataDir;

/// The reason why there is no connection to the admin socket.
pub(super) enum ConnectFailure {
    Forbidden(String),
    Other(String),
}

impl ConnectFailure {
    fn new(kind: io::ErrorKind, reason: String) -> Self {
        match kind {
            io::ErrorKind::PermissionDenied => Self::Forbidden(reason),
            _ => Self::Other(reason),
        }
    }
}

pub(super) async fn connect(data_dir: &Path) -> Result<Option<AdminClient>, ConnectFailure> {
    let dir = match open(data_dir).await {
        Ok(dir) => dir,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(ConnectFailure::new(error.kind(), error.to_string())),
    };
    AdminClient::connect(&dir).await.map_err(|error| {
        let kind = match &error {
            AdminError::Unreachable(_, cause) => cause.kind(),
            AdminError::ConnectionLost(_)
            | AdminError::Timeout
            | AdminError::InvalidResponse(_)
            | AdminError::Refused { .. } => io::ErrorKind::Other,
        };
        ConnectFailure::new(kind, error.to_string())
    })
}

/// Opens the data directory on another thread: its file system may not answer.
pub(super) async fn open(data_dir: &Path) -> io::Result<DataDir> {
    let path = data_dir.to_owned();
    tokio::task::spawn_blocking(move || DataDir::open_existing(&path))
        .await
        .map_err(io::Error::other)?
}
