//! Errors of loading credentials, and whether the configuration is at fault.

use std::io;
use std::path::PathBuf;

use tunnel_proto::tls::files::FileError;
use tunnel_proto::wire::name::NodeName;

/// The reason why there are no usable credentials.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CredentialError {
    /// The directory or a file in it cannot be used.
    #[error("data directory {dir} cannot be used; {}", storage_advice(.source))]
    Storage {
        dir: PathBuf,
        #[source]
        source: io::Error,
    },
    /// A file exists but cannot be parsed.
    #[error("{path} {problem}; remove the file and enroll again with a new join token")]
    Damaged { path: PathBuf, problem: String },
    /// The certificate is for another node.
    #[error(
        "--node-name is {configured} but must equal the credential's name, {stored} (certificate in {dir}); \
         give --node-name {stored}, or remove agent.crt there and enroll as {configured}"
    )]
    StoredNodeMismatch {
        configured: NodeName,
        stored: NodeName,
        dir: PathBuf,
    },
    /// The certificate has expired, its key is missing for renewal, and there is no token.
    #[error(
        "certificate in {dir} ended at {ended} and agent.key is missing or does not match; enroll again with --token and a new join token \
         (tunnel-server token create --node {node})"
    )]
    Expired {
        dir: PathBuf,
        ended: String,
        node: NodeName,
    },
    /// There is no certificate and no token.
    #[error(
        "no certificate in {dir} and no --token; create one where the server runs: tunnel-server token create --node {node}"
    )]
    NoToken { dir: PathBuf, node: NodeName },
    /// The token's file cannot be read.
    #[error("--token-file {path}")]
    TokenFile {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The files of --cert-file, --key-file or --ca-file cannot be used.
    #[error(transparent)]
    Files(#[from] FileError),
    /// The certificate of --cert-file is for another node.
    #[error(
        "--node-name is {configured} but must equal the credential's name, {named} (certificate in {path})"
    )]
    FileNodeMismatch {
        configured: NodeName,
        named: NodeName,
        path: PathBuf,
    },
    /// Newer files arrived before the previous ones were in use.
    #[error("previous credentials are not in use yet")]
    Busy,
    /// The file does not contain a token.
    #[error("--token-file {path}: {problem}")]
    BadToken { path: PathBuf, problem: String },
}

/// Returns what an operator does about an error of the file system.
fn storage_advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "make space on its file system"
        }
        io::ErrorKind::ReadOnlyFilesystem => {
            "its file system is read-only: repair it, or give --data-dir"
        }
        io::ErrorKind::PermissionDenied => "give --data-dir or run as a user who may write there",
        _ => "give --data-dir, or repair the file system",
    }
}

impl CredentialError {
    /// Returns whether the configuration must change (exit code 64).
    pub(crate) fn is_usage(&self) -> bool {
        match self {
            Self::StoredNodeMismatch { .. }
            | Self::FileNodeMismatch { .. }
            | Self::BadToken { .. } => true,
            Self::Files(error) => error.is_in_content(),
            // Its mode, which somebody must change.
            Self::TokenFile { source, .. } => source.kind() == io::ErrorKind::InvalidData,
            // A disk that is mounted later has the certificate or the token.
            Self::NoToken { .. }
            | Self::Storage { .. }
            | Self::Damaged { .. }
            | Self::Expired { .. }
            | Self::Busy => false,
        }
    }
}
