//! The errors of the CA.

use std::io;

/// The reason why the CA cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CaError {
    /// A file cannot be read or created; the text names the file.
    #[error("{0}")]
    File(#[from] io::Error),
    /// The certificate exists, but its private key does not.
    #[error(
        "{0} exists, but its key {1} is missing; restore the key, or remove both to create a new CA"
    )]
    KeyMissing(String, String),
    /// The content of a file does not match its name.
    #[error("{name} holds no usable {what}: {problem}")]
    Damaged {
        /// Path of the file, or key in the Secret.
        name: String,
        /// Kind of content that was expected.
        what: &'static str,
        problem: String,
    },
    /// The key and the certificate do not match.
    #[error("{0} and {1} do not belong together")]
    Mismatch(String, String),
    /// The persisted rotation is that of another CA.
    #[error("{0} does not belong to the key {1}; remove it to continue with the CA of that key")]
    OtherRotation(String, String),
    /// The Secret has a CA that does not continue the one in use.
    #[error(
        "the Secret has another CA than the one in use; /readyz?verbose says what to do about it"
    )]
    OtherCa,
    /// A new key or certificate cannot be generated.
    #[error("cannot generate a key or certificate")]
    Generate(#[source] rcgen::Error),
    /// The TLS library rejects the new key.
    #[error("cannot use a new key for TLS")]
    Tls(#[source] rustls::Error),
}

/// The reason why a certificate is not issued.
#[derive(Debug, thiserror::Error)]
pub enum IssueError {
    /// The request does not parse, is not signed by its own key, or asks for unknown extensions.
    #[error("certificate request is malformed or not signed by its own key")]
    Request(#[source] rcgen::Error),
    /// The type or size of the key is not supported.
    #[error("key is not P-256, P-384, Ed25519 or RSA of at least 2048 bits")]
    Key,
    #[error("cannot sign a certificate")]
    Sign(#[source] rcgen::Error),
    /// The operating system returned no random bytes.
    #[error("cannot generate a serial number")]
    Serial(#[source] io::Error),
}
