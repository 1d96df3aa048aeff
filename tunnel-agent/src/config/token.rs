//! Tokens for enrollment, and where they come from.

use std::path::PathBuf;

use tunnel_proto::process::settings::ConfigErrors;
use tunnel_proto::wire::enroll::{JoinToken, is_service_account_token};

use super::raw::RawConfig;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenSource {
    Inline(JoinToken),
    /// A file that is read when the token is needed. The file may be gone once a certificate is
    /// stored.
    File(PathBuf),
}

impl TokenSource {
    /// Returns the source of the token, or `None` if none is configured.
    pub(super) fn check(settings: &RawConfig, errors: &mut ConfigErrors) -> Option<Self> {
        let inline = settings.token.as_ref();
        let inline = inline.filter(|token| !token.0.trim().is_empty());
        match (inline, &settings.token_file) {
            (Some(_), Some(_)) => {
                errors.add("--token", "and --token-file exclude each other");
                None
            }
            (Some(token), None) => errors
                .ok_or_record("--token", parse_token(&token.0))
                .map(Self::Inline),
            (None, file) => file.clone().map(Self::File),
        }
    }
}

/// Parses a join token.
///
/// # Errors
/// Returns a message for the operator that never contains the token.
pub(crate) fn parse_token(text: &str) -> Result<JoinToken, String> {
    if is_service_account_token(text) {
        return Err(
            "is a ServiceAccount token; give the file of its projected volume instead (--token-file), since the kubelet \
             replaces it"
                .to_owned(),
        );
    }
    text.parse().map_err(|error| {
        let pins_a_ca = text.trim().split('.').count() > 2;
        let hint = if pins_a_ca {
            ""
        } else {
            "; without its third part a token needs --ca-file"
        };
        format!("{error}{hint}")
    })
}

/// Error text for a ServiceAccount token without a CA.
pub(crate) const NO_CA: &str = "is a ServiceAccount token, which pins no CA, so the CA must be given: --ca-file with the output of \
                                'tunnel-server ca'";
/// Error text for a token that pins no CA, without a CA.
pub(crate) const NO_PIN: &str = "pins no CA (it has no third part), so the CA must be given: --ca-file with the output of \
                                 'tunnel-server ca'";
