//! Replaces what looks like a secret in a document.

use std::borrow::Cow;

use serde_json::Value;

/// Text in place of a secret.
const REDACTED: &str = "[redacted]";
/// Length from which the hexadecimal second part of a word with dots is the secret of a join token.
const SECRET_HEX_MIN: usize = 32;

/// Replaces what looks like a secret in every text of a value.
pub fn redacted(value: Value) -> Value {
    match value {
        Value::String(text) => Value::String(redact(&text)),
        Value::Array(values) => values.into_iter().map(redacted).collect(),
        Value::Object(fields) => {
            let fields = fields.into_iter();
            fields
                .map(|(name, value)| (name, redacted(value)))
                .collect()
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => value,
    }
}

/// Replaces what looks like a secret: private keys in PEM, join tokens, JSON web tokens, the user
/// and password of a URL, and the word behind an authentication scheme.
pub fn redact(text: &str) -> String {
    if text.contains("PRIVATE KEY-----") {
        return REDACTED.to_owned();
    }
    let text: String = text
        .split_inclusive(is_boundary)
        .map(without_user)
        .collect();
    let mut redacted = String::with_capacity(text.len());
    let mut is_after_scheme = false;
    for piece in text.split_inclusive(is_delimiter) {
        let word = piece.trim_end_matches(is_delimiter);
        let end = piece.strip_prefix(word).unwrap_or_default();
        if !word.is_empty() {
            if is_after_scheme || is_token(word) {
                redacted.push_str(REDACTED);
            } else {
                redacted.push_str(word);
            }
            is_after_scheme = ["basic", "bearer"].contains(&word.to_ascii_lowercase().as_str());
        }
        redacted.push_str(end);
    }
    redacted
}

/// Returns a text with a URL or an address without its user and password. A user alone may be a
/// token, and a password may contain delimiters.
fn without_user(text: &str) -> Cow<'_, str> {
    let credentials = text.rsplit_once('@');
    let Some((before, host)) = credentials.and_then(|(credentials, host)| {
        let (before, _password) = credentials.split_once(':')?;
        Some((before, host))
    }) else {
        return text.into();
    };
    let user = before.rsplit(is_delimiter).next().unwrap_or_default();
    let prefix = before.strip_suffix(user).unwrap_or_default();
    format!("{prefix}{REDACTED}@{host}").into()
}

/// Returns whether a word has the form of a join token, or of a JSON web token such as that of a
/// ServiceAccount.
fn is_token(word: &str) -> bool {
    let mut parts = word.split('.').skip(1);
    let (second, third) = (parts.next(), parts.next());
    let is_join_token = second.is_some_and(|secret| {
        let is_hex = secret.bytes().all(|byte| byte.is_ascii_hexdigit());
        secret.len() >= SECRET_HEX_MIN && is_hex
    });
    is_join_token || (word.starts_with("eyJ") && third.is_some())
}

/// Returns whether a character ends a URL (RFC 3986, appendix C).
fn is_boundary(letter: char) -> bool {
    letter.is_whitespace() || "\"`<>\\".contains(letter)
}

fn is_delimiter(letter: char) -> bool {
    letter.is_whitespace() || "\"'`,;()<>=\\".contains(letter)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_looks_like_a_secret_is_replaced() {
        let join_token = format!("abcdefgh.{}.{}", "0f".repeat(16), "ab".repeat(32));
        let flag = format!("--token={join_token}");
        for (text, expected) in [
            ("http://user:canary@proxy:3128", "[redacted]@proxy:3128"),
            (
                "url: \"http://canary@proxy/\"",
                "url: \"[redacted]@proxy/\"",
            ),
            ("user:canary@proxy:3128", "[redacted]@proxy:3128"),
            ("http://u:ca;na,ry(=@proxy:3128", "[redacted]@proxy:3128"),
            (
                "--proxy=u:canary,canary@proxy --x",
                "--proxy=[redacted]@proxy --x",
            ),
            ("Some(http://u:canary'canary@p), n", "Some([redacted]@p), n"),
            ("http://a:canary@p,http://b:canary@q", "[redacted]@q"),
            (
                "{\"url\":\"http://u:can/ary;@p\"}",
                "{\"url\":\"[redacted]@p\"}",
            ),
            (
                "Authorization: Bearer canary",
                "Authorization: Bearer [redacted]",
            ),
            (
                "{\"authorization\":\"basic canary=\"}",
                "{\"authorization\":\"basic [redacted]=\"}",
            ),
            (join_token.as_str(), REDACTED),
            (flag.as_str(), "--token=[redacted]"),
            ("token eyJhbGciOiJub25lIn0.e30.c2ln;", "token [redacted];"),
            ("-----BEGIN PRIVATE KEY-----\nQUJD\n", REDACTED),
        ] {
            assert_eq!(redact(text), expected);
        }
        for text in [
            "tunnel_server_agents{transport=\"quic\"} 3",
            "node worker-1.example.com at 192.168.33.221:10250",
            "ssh root@worker-1",
            "connect to [fd00::1]:10262",
            "commit 0123456789abcdef0123456789abcdef01234567",
        ] {
            assert_eq!(redact(text), text);
        }
    }
}
