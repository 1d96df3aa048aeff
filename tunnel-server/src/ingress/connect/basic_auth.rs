//! Basic authentication of callers (RFC 7617). User names and passwords are stored as digests, and
//! a caller's credentials are compared in constant time.

use std::fmt;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use aws_lc_rs::constant_time::verify_slices_are_equal;
use base64::prelude::{BASE64_STANDARD, Engine as _};
use http::{HeaderMap, HeaderName};
use parking_lot::Mutex;
use tokio::time::Instant;
use tunnel_process::files;
use tunnel_proto::identity::sha256;
use zeroize::Zeroizing;

use super::throttle::{AttemptResult, NameDigest, PasswordThrottle};

/// The entries of the file of `--connect-auth` or `--status-auth`. A user can have several entries, for a change of
/// its password.
#[derive(Clone)]
pub struct BasicAuthUsers(Vec<Entry>);

#[derive(Clone)]
struct Entry {
    user: Arc<str>,
    /// Digest of the credentials that a caller sends for this entry.
    digest: [u8; 32],
}

/// Reason why a file is not a valid password file.
#[derive(Debug, thiserror::Error)]
pub enum BasicAuthFileError {
    /// The file cannot be read, or other users can write it.
    #[error(transparent)]
    Read(#[from] std::io::Error),
    /// The file is not UTF-8 text.
    #[error("{0} is not UTF-8 text")]
    NotText(String),
    /// A line is not `NAME:PASSWORD`. The message does not contain the line.
    #[error("{0}: line {1} is not NAME:PASSWORD with both parts")]
    InvalidLine(String, usize),
    /// A line begins or ends with a blank, which a client would have to send. The message does not
    /// contain the line.
    #[error("{0}: line {1} begins or ends with a blank; remove it")]
    Blank(String, usize),
    /// The password of a line is a hash of htpasswd or crypt(3). The message does not contain it.
    #[error(
        "{0}: line {1}: the password of {2:?} is a hash, as htpasswd writes it; write the password itself"
    )]
    Hash(String, usize, String),
    /// The password of a line is too short and easily guessed. The message does not contain the
    /// password.
    #[error(
        "{0}: line {1}: the password of {2:?} is shorter than {PASSWORD_MIN_CHARS} characters; make a random one"
    )]
    Short(String, usize, String),
    /// The file contains no entry.
    #[error("{0} has no line NAME:PASSWORD")]
    Empty(String),
}

impl BasicAuthFileError {
    /// Returns whether the content or the mode of the file is the cause, which somebody must change.
    pub fn is_in_content(&self) -> bool {
        match self {
            Self::Read(error) => error.kind() == std::io::ErrorKind::InvalidData,
            Self::NotText(_)
            | Self::InvalidLine(..)
            | Self::Blank(..)
            | Self::Hash(..)
            | Self::Short(..)
            | Self::Empty(_) => true,
        }
    }
}

impl fmt::Debug for BasicAuthUsers {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let users = self.0.iter().map(|entry| &entry.user);
        formatter.debug_list().entries(users).finish()
    }
}

impl BasicAuthUsers {
    /// Reads a password file. Returns the digest of its content and the users. Blocks the thread.
    ///
    /// # Errors
    /// Returns a [`BasicAuthFileError`] that names the file.
    pub fn load(path: &Path) -> Result<([u8; 32], Self), BasicAuthFileError> {
        let shown = path.display().to_string();
        let content = files::read_operator_file(path)?;
        let digest = sha256(&content);
        let text = std::str::from_utf8(&content)
            .map_err(|_bytes| BasicAuthFileError::NotText(shown.clone()))?;
        Ok((digest, Self::parse(text, &shown)?))
    }

    fn parse(text: &str, shown: &str) -> Result<Self, BasicAuthFileError> {
        let mut entries = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.trim_end_matches('\r');
            if line.trim().is_empty() || line.starts_with('#') {
                continue;
            }
            let parts = line.split_once(':');
            let parts = parts.filter(|(user, password)| !user.is_empty() && !password.is_empty());
            let Some((user, password)) = parts else {
                return Err(BasicAuthFileError::InvalidLine(shown.to_owned(), number));
            };
            if line.trim() != line {
                return Err(BasicAuthFileError::Blank(shown.to_owned(), number));
            }
            if HASHES.iter().any(|prefix| password.starts_with(prefix)) {
                let user = user.to_owned();
                return Err(BasicAuthFileError::Hash(shown.to_owned(), number, user));
            }
            if password.chars().count() < PASSWORD_MIN_CHARS {
                let user = user.to_owned();
                return Err(BasicAuthFileError::Short(shown.to_owned(), number, user));
            }
            entries.push(Entry {
                user: user.into(),
                digest: sha256(Zeroizing::new(BASE64_STANDARD.encode(line)).as_bytes()),
            });
        }
        if entries.is_empty() {
            return Err(BasicAuthFileError::Empty(shown.to_owned()));
        }
        Ok(Self(entries))
    }

    /// Returns the user with these credentials. The comparison takes equally long for each user.
    fn user(&self, credentials: &Credentials) -> Option<Arc<str>> {
        let mut matched = None;
        for entry in &self.0 {
            if verify_slices_are_equal(&entry.digest, &credentials.digest).is_ok() {
                matched = Some(entry.user.clone());
            }
        }
        matched
    }
}

/// The user name and the credentials of a request, as digests.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Credentials {
    name: NameDigest,
    digest: [u8; 32],
}

impl fmt::Debug for Credentials {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Credentials(..)")
    }
}

impl Credentials {
    /// Returns the credentials in a field of a request. Returns `None` if the field occurs more than
    /// once, has another scheme or is not valid base64.
    fn of(headers: &HeaderMap, field: HeaderName) -> Option<Self> {
        let mut values = headers.get_all(field).iter();
        let (Some(value), None) = (values.next(), values.next()) else {
            return None;
        };
        let (scheme, credentials) = value.to_str().ok()?.split_once(' ')?;
        if !scheme.eq_ignore_ascii_case("basic") {
            return None;
        }
        let credentials = credentials.trim();
        let plain = Zeroizing::new(BASE64_STANDARD.decode(credentials).ok()?);
        let name = plain.split(|byte| *byte == b':').next();
        Some(Self {
            name: sha256(name.unwrap_or_default()),
            digest: sha256(credentials.as_bytes()),
        })
    }
}

/// Reason why a request is not authenticated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BasicAuthError {
    Missing,
    Wrong,
    /// Too many attempts were wrong. The next attempt is checked after this time.
    Throttled(Duration),
}

/// The current passwords, which follow their file, and the failed attempts.
#[derive(Debug)]
pub struct BasicAuth {
    passwords: ArcSwap<BasicAuthUsers>,
    throttle: Mutex<PasswordThrottle>,
}

impl BasicAuth {
    pub fn new(passwords: BasicAuthUsers) -> Self {
        Self {
            passwords: ArcSwap::from_pointee(passwords),
            throttle: Mutex::default(),
        }
    }

    pub fn replace(&self, passwords: BasicAuthUsers) {
        self.passwords.store(Arc::new(passwords));
    }

    /// Returns the user of a request from `source`, whose credentials are in `field`. `shown` contains the last credentials that were
    /// accepted on the request's connection. These credentials are never throttled, because an
    /// attacker that guesses passwords of this user is not on that connection.
    pub(crate) fn authenticate(
        &self,
        field: HeaderName,
        headers: &HeaderMap,
        source: IpAddr,
        shown: &Mutex<Option<Credentials>>,
    ) -> Result<Arc<str>, BasicAuthError> {
        let credentials = Credentials::of(headers, field).ok_or(BasicAuthError::Missing)?;
        let passwords = self.passwords.load();
        let mut shown = shown.lock();
        if *shown == Some(credentials)
            && let Some(user) = passwords.user(&credentials)
        {
            return Ok(user);
        }
        let mut user = None;
        // Checked under the lock, so that many concurrent connections allow no more guesses than
        // one.
        let mut throttle = self.throttle.lock();
        let result = throttle.check(source, credentials.name, Instant::now(), || {
            user = passwords.user(&credentials);
            user.is_some()
        });
        drop(throttle);
        match (result, user) {
            (AttemptResult::Accepted, Some(user)) => {
                *shown = Some(credentials);
                Ok(user)
            }
            (AttemptResult::Throttled(left), _) => Err(BasicAuthError::Throttled(left)),
            (AttemptResult::Wrong | AttemptResult::Accepted, _) => Err(BasicAuthError::Wrong),
        }
    }
}

/// How hashes of htpasswd and crypt(3) begin.
const HASHES: [&str; 7] = ["$apr1$", "$2a$", "$2b$", "$2y$", "$5$", "$6$", "{SHA}"];

/// Shortest password. Shorter ones can be found by guessing, even offline if the file is stolen.
const PASSWORD_MIN_CHARS: usize = 16;

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use http::header::PROXY_AUTHORIZATION;

    use super::*;

    fn user(passwords: &BasicAuthUsers, value: &str) -> Option<String> {
        let mut headers = HeaderMap::new();
        headers.insert(PROXY_AUTHORIZATION, HeaderValue::from_str(value).unwrap());
        let user =
            Credentials::of(&headers, PROXY_AUTHORIZATION).and_then(|shown| passwords.user(&shown));
        user.map(|user| user.to_string())
    }

    #[test]
    fn users_are_known_by_any_of_their_passwords_and_by_nothing_else() {
        let text = "# both hold while it changes\nprometheus:old:1234567890ab\n\nprometheus:new-1234567890ab\n\
                    other:x-1234567890abcd\n";
        let passwords = BasicAuthUsers::parse(text, "file").unwrap();
        let basic = |pair: &str| format!("Basic {}", BASE64_STANDARD.encode(pair));
        let other = "other:x-1234567890abcd";
        for (value, expected) in [
            (basic("prometheus:old:1234567890ab"), Some("prometheus")),
            (basic("prometheus:new-1234567890ab"), Some("prometheus")),
            (basic(other).replace("Basic", "bAsIc"), Some("other")),
            (basic("other:new-1234567890ab"), None),
            (basic("other:"), None),
            (basic("other"), None),
            (basic(""), None),
            (basic(other).replace("Basic", "Bearer"), None),
            ("Basic".to_owned(), None),
        ] {
            assert_eq!(user(&passwords, &value).as_deref(), expected, "{value}");
        }
        let mut twice = HeaderMap::new();
        for _ in 0..2 {
            let value = HeaderValue::from_str(&basic(other)).unwrap();
            twice.append(PROXY_AUTHORIZATION, value);
        }
        assert!(Credentials::of(&twice, PROXY_AUTHORIZATION).is_none());
        let shown = format!("{passwords:?}");
        assert!(!shown.contains("old") && !shown.contains("new"), "{shown}");
    }

    #[test]
    fn mistakes_name_the_line_and_repeat_nothing_of_it() {
        for (text, hint) in [
            ("a:0123456789abcdef\nsecret\n", "line 2"),
            (":secret\n", "line 1"),
            ("secret:\n", "line 1"),
            ("\n# none\n", "no line"),
            ("a:0123456789abcdef\nadmin:secret-89abcde\n", "line 2"),
            ("admin:secret-89abcde\n", "\"admin\""),
            ("admin:secret-89abcde\n", "16"),
            ("admin:secret-89abcdefghij \n", "a blank"),
            ("admin:$apr1$secret$0123456789abcdefghijk.\n", "a hash"),
        ] {
            let error = BasicAuthUsers::parse(text, "file").unwrap_err();
            assert!(error.is_in_content());
            let error = error.to_string();
            assert!(error.contains(hint) && !error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn sixteen_characters_are_enough_in_any_script() {
        for password in ["0123456789abcdef", "ßßßßßßßßßßßßßßßß"] {
            assert!(BasicAuthUsers::parse(&format!("a:{password}"), "file").is_ok());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn right_password_waits_with_its_name_except_on_its_own_connection() {
        let text = "prometheus:0123456789abcdef\nother:fedcba9876543210\n";
        let live = BasicAuth::new(BasicAuthUsers::parse(text, "file").unwrap());
        let site = "192.0.2.1".parse().unwrap();
        let ask = |pair: &str, shown: &Mutex<Option<Credentials>>| {
            let mut headers = HeaderMap::new();
            let value = format!("Basic {}", BASE64_STANDARD.encode(pair));
            headers.insert(PROXY_AUTHORIZATION, value.parse().unwrap());
            live.authenticate(PROXY_AUTHORIZATION, &headers, site, shown)
                .map(|user| user.to_string())
        };
        let (right, other) = ("prometheus:0123456789abcdef", "other:fedcba9876543210");
        let (known, new) = (Mutex::default(), Mutex::default());
        assert_eq!(ask(right, &known), Ok("prometheus".into()));
        for _ in 0..5 {
            let guess = ask("prometheus:guess", &new);
            assert_eq!(guess, Err(BasicAuthError::Wrong));
        }
        let second = Err(BasicAuthError::Throttled(Duration::from_secs(1)));
        assert_eq!(ask(right, &new), second);
        assert_eq!(ask("prometheus:guess", &known), second);
        assert_eq!(ask(right, &known), Ok("prometheus".into()));
        assert_eq!(ask(other, &new), Ok("other".into()));
        assert_eq!(ask("other", &new), Err(BasicAuthError::Wrong));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(ask(right, &new), Ok("prometheus".into()));
        // An entry that was removed from the file loses its effect on every connection.
        let left = BasicAuthUsers::parse("other:fedcba9876543210\n", "file").unwrap();
        live.replace(left);
        assert_eq!(ask(right, &known), Err(BasicAuthError::Wrong));
    }
}
