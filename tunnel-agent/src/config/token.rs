//! Tokens for enrollment, and where they come from.

use std::path::PathBuf;

use base64::prelude::{BASE64_STANDARD, Engine as _};
use tunnel_process::settings::ConfigErrors;
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
        if let Some(content) = other_content(text) {
            return content.to_owned();
        }
        let pins_a_ca = text.trim().split('.').count() > 2;
        let hint = if pins_a_ca {
            ""
        } else {
            "; without its third part a token needs --ca-file"
        };
        format!("{error}{hint}")
    })
}

/// Returns what people write into a token file in place of the token alone, with the remedy.
fn other_content(text: &str) -> Option<&'static str> {
    let text = text.trim();
    let decoded = || BASE64_STANDARD.decode(text).ok();
    let is_token = |bytes: Vec<u8>| {
        String::from_utf8(bytes).is_ok_and(|text| text.parse::<JoinToken>().is_ok())
    };
    if text.is_empty() {
        Some("is empty; 'tunnel-server token create' prints a token")
    } else if text.lines().count() > 1 {
        Some("has several lines; write the token alone, without comments")
    } else if text.starts_with(['"', '\'']) {
        Some("has quotes around the token; write the token without them")
    } else if text.contains([':', '=', ' ']) && !text.ends_with('=') {
        Some("has more than the token; write the token alone, without a key")
    } else if decoded().is_some_and(is_token) {
        Some("is encoded in base64, as the data of a Secret is; decode it with base64 -d")
    } else {
        None
    }
}

/// Error text for a ServiceAccount token without a CA.
pub(crate) const NO_CA: &str = "is a ServiceAccount token, which pins no CA, so the CA must be given: --ca-file with the output of \
                                'tunnel-server ca'";
/// Error text for a token that pins no CA, without a CA.
pub(crate) const NO_PIN: &str = "pins no CA (it has no third part), so the CA must be given: --ca-file with the output of \
                                 'tunnel-server ca'";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_of_a_token_file_are_named_without_the_token() {
        let token = format!("abcdefghijkl.{}.{}", "5e".repeat(24), "ca".repeat(32));
        assert!(parse_token(&format!(" {token} \r\n\n")).is_ok());
        for (text, words) in [
            (String::new(), "is empty"),
            (format!("# worker-1\n{token}"), "several lines"),
            (format!("\"{token}\"\n"), "quotes"),
            (format!("token: {token}"), "without a key"),
            (BASE64_STANDARD.encode(&token), "base64 -d"),
            (token[..60].to_owned(), "--ca-file"),
        ] {
            let error = parse_token(&text).unwrap_err();
            assert!(error.contains(words) && !error.contains("5e5e"), "{error}");
        }
    }
}
