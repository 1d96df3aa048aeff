//! Names and passwords of callers (Basic, RFC 7617), as digests; what a caller sends is compared in constant time.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use arc_swap::ArcSwap;
use aws_lc_rs::constant_time::verify_slices_are_equal;
use http::HeaderMap;
use http::header::PROXY_AUTHORIZATION;
use tunnel_proto::identity::sha256;
use tunnel_proto::process::base64;
use tunnel_proto::process::files;
use zeroize::Zeroizing;

/// The lines of `--connect-auth`. A name may have several, for a change of its password.
#[derive(Clone)]
pub struct Passwords(Vec<Entry>);

#[derive(Clone)]
struct Entry {
    user: Arc<str>,
    /// Of what a caller sends for it.
    digest: [u8; 32],
}

/// Why a file is no list of passwords.
#[derive(Debug, thiserror::Error)]
pub enum PasswordsError {
    /// It cannot be read, or others may write it.
    #[error("{0}")]
    Read(#[from] std::io::Error),
    /// It is not text.
    #[error("{0} is not UTF-8 text")]
    NotText(String),
    /// A line is not `NAME:PASSWORD`; it is not repeated here.
    #[error("{0}: line {1} is not NAME:PASSWORD with both parts")]
    Line(String, usize),
    /// There is none.
    #[error("{0} has no line NAME:PASSWORD")]
    Empty(String),
}

impl fmt::Debug for Passwords {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let users = self.0.iter().map(|entry| &entry.user);
        formatter.debug_list().entries(users).finish()
    }
}

impl Passwords {
    /// Reads a file; says its content's digest too. Blocks the thread.
    ///
    /// # Errors
    /// [`PasswordsError`], naming the file.
    pub fn load(path: &Path) -> Result<([u8; 32], Self), PasswordsError> {
        let shown = path.display().to_string();
        let content = files::read_given(path)?;
        let digest = sha256(&content);
        let text = std::str::from_utf8(&content)
            .map_err(|_bytes| PasswordsError::NotText(shown.clone()))?;
        Ok((digest, Self::parse(text, &shown)?))
    }

    fn parse(text: &str, shown: &str) -> Result<Self, PasswordsError> {
        let mut entries = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.trim_end_matches('\r');
            if line.trim().is_empty() || line.starts_with('#') {
                continue;
            }
            let parts = line.split_once(':');
            let parts = parts.filter(|(user, password)| !user.is_empty() && !password.is_empty());
            let Some((user, _)) = parts else {
                return Err(PasswordsError::Line(shown.to_owned(), number));
            };
            entries.push(Entry {
                user: user.into(),
                digest: sha256(Zeroizing::new(base64::encode(line.as_bytes())).as_bytes()),
            });
        }
        if entries.is_empty() {
            return Err(PasswordsError::Empty(shown.to_owned()));
        }
        Ok(Self(entries))
    }

    /// The user whose credentials a request carries. Takes as long whoever it is.
    #[must_use]
    pub fn user(&self, headers: &HeaderMap) -> Option<Arc<str>> {
        let mut values = headers.get_all(PROXY_AUTHORIZATION).iter();
        let (Some(value), None) = (values.next(), values.next()) else {
            return None;
        };
        let (scheme, credentials) = value.to_str().ok()?.split_once(' ')?;
        if !scheme.eq_ignore_ascii_case("basic") {
            return None;
        }
        let digest = sha256(credentials.trim().as_bytes());
        let mut found = None;
        for entry in &self.0 {
            if verify_slices_are_equal(&entry.digest, &digest).is_ok() {
                found = Some(entry.user.clone());
            }
        }
        found
    }
}

/// The passwords in force; the file is followed.
#[derive(Debug)]
pub struct LivePasswords(ArcSwap<Passwords>);

impl LivePasswords {
    /// With these.
    #[must_use]
    pub fn new(passwords: Passwords) -> Self {
        Self(ArcSwap::from_pointee(passwords))
    }

    /// Puts others in force.
    pub fn replace(&self, passwords: Passwords) {
        self.0.store(Arc::new(passwords));
    }

    /// The passwords of this moment.
    #[must_use]
    pub fn load(&self) -> Arc<Passwords> {
        self.0.load_full()
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn user(passwords: &Passwords, value: &str) -> Option<String> {
        let mut headers = HeaderMap::new();
        headers.insert(PROXY_AUTHORIZATION, HeaderValue::from_str(value).unwrap());
        passwords.user(&headers).map(|user| user.to_string())
    }

    #[test]
    fn users_are_known_by_any_of_their_passwords_and_by_nothing_else() {
        let text = "# both hold while it changes\nprometheus:old:1\n\nprometheus:new\nother:x\n";
        let passwords = Passwords::parse(text, "file").unwrap();
        let basic = |pair: &str| format!("Basic {}", base64::encode(pair.as_bytes()));
        for (value, expected) in [
            (basic("prometheus:old:1"), Some("prometheus")),
            (basic("prometheus:new"), Some("prometheus")),
            (basic("other:x").replace("Basic", "bAsIc"), Some("other")),
            (basic("other:new"), None),
            (basic("other:"), None),
            (basic(""), None),
            (basic("other:x").replace("Basic", "Bearer"), None),
            ("Basic".to_owned(), None),
        ] {
            assert_eq!(user(&passwords, &value).as_deref(), expected, "{value}");
        }
        let mut twice = HeaderMap::new();
        for _ in 0..2 {
            let value = HeaderValue::from_str(&basic("other:x")).unwrap();
            twice.append(PROXY_AUTHORIZATION, value);
        }
        assert_eq!(passwords.user(&twice), None);
        let shown = format!("{passwords:?}");
        assert!(!shown.contains("old") && !shown.contains("new"), "{shown}");
    }

    #[test]
    fn mistakes_name_the_line_and_repeat_nothing_of_it() {
        for (text, hint) in [
            ("a:b\nsecret\n", "line 2"),
            (":secret\n", "line 1"),
            ("secret:\n", "line 1"),
            ("\n# none\n", "no line"),
        ] {
            let error = Passwords::parse(text, "file").unwrap_err().to_string();
            assert!(error.contains(hint) && !error.contains("secret"), "{error}");
        }
    }
}
