//! Join tokens in the data directory of a standalone server: a file for each.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;
use tracing::{info, warn};
use tunnel_proto::process::files;
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::wire::enroll::TOKEN_ID_LEN;

use super::object::{RETENTION_AFTER_EXPIRY, StoredToken, TokenObject, TokenObjects};
use crate::store::data_dir::DataDir;

/// The files of the tokens. A change holds the lock of the directory.
#[derive(Debug)]
pub(super) struct TokenFiles(DataDir);

impl TokenFiles {
    pub(super) fn new(dir: &DataDir) -> Self {
        Self(dir.clone())
    }

    fn path(&self, id: &str) -> PathBuf {
        self.0.tokens().join(format!("{id}.json"))
    }

    fn read(&self, id: &str) -> io::Result<Option<String>> {
        // Ids are names of files.
        if id.len() != TOKEN_ID_LEN || !id.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            return Ok(None);
        }
        let _accessing = self.0.activity().begin();
        match fs::read_to_string(self.path(id)) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(self.problem(id, &error)),
        }
    }

    fn write(&self, id: &str, token: &StoredToken) -> io::Result<()> {
        let _accessing = self.0.activity().begin();
        files::make_private_dir(&self.0.tokens())?;
        let content = serde_json::to_vec_pretty(token).map_err(io::Error::other)?;
        files::replace(&self.path(id), &content)
    }

    fn parse(&self, id: &str, text: &str) -> io::Result<StoredToken> {
        let damaged = |error| self.problem(id, &format!("is damaged: {error}"));
        serde_json::from_str(text).map_err(damaged)
    }

    fn problem(&self, id: &str, problem: &dyn std::fmt::Display) -> io::Error {
        io::Error::other(format!("{}: {problem}", self.path(id).display()))
    }
}

impl TokenObjects for TokenFiles {
    fn get(&self, id: &str) -> io::Result<Option<TokenObject>> {
        let Some(version) = self.read(id)? else {
            return Ok(None);
        };
        let token = self.parse(id, &version)?;
        Ok(Some(TokenObject { token, version }))
    }

    fn create(&self, id: &str, token: &StoredToken) -> io::Result<()> {
        let _changing = self.0.lock_files()?;
        self.write(id, token)
    }

    fn replace(&self, id: &str, object: &TokenObject) -> io::Result<bool> {
        let _changing = self.0.lock_files()?;
        let is_same = self.read(id)?.as_ref() == Some(&object.version);
        if is_same {
            self.write(id, &object.token)?;
        }
        Ok(is_same)
    }

    fn list(&self) -> io::Result<Vec<(String, StoredToken)>> {
        let _accessing = self.0.activity().begin();
        let entries = match fs::read_dir(self.0.tokens()) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut tokens = Vec::new();
        for entry in entries {
            let name = entry?.file_name();
            let Some(id) = name.to_str().and_then(|name| name.strip_suffix(".json")) else {
                continue;
            };
            if let Some(text) = self.read(id)? {
                // One damaged token hides no other.
                match self.parse(id, &text) {
                    Ok(token) => tokens.push((id.to_owned(), token)),
                    Err(error) => warn!(%error, "cannot read a join token"),
                }
            }
        }
        Ok(tokens)
    }
}

/// Removes the files of tokens that expired more than a day ago, until `shutdown` stops. The wall
/// clock alone removes none: a token has to be expired for a day of this process, too.
pub(crate) fn clean(dir: &DataDir, shutdown: &Shutdown) {
    let files = TokenFiles::new(dir);
    shutdown.spawn_service(async move {
        let (mut files, mut old) = (files, OldTokens::default());
        loop {
            tokio::time::sleep(CLEAN_INTERVAL).await;
            let cleaning = tokio::task::spawn_blocking(move || {
                if let Err(error) = files.clean(&mut old, SystemTime::now(), Instant::now()) {
                    warn!(%error, "cannot remove expired join tokens");
                }
                (files, old)
            });
            match cleaning.await {
                Ok(after) => (files, old) = after,
                Err(error) => return warn!(%error, "task that removes join tokens failed"),
            }
        }
    });
}

/// When this process first found that a token expired more than a day ago.
type OldTokens = HashMap<String, Instant>;

impl TokenFiles {
    fn clean(&self, old: &mut OldTokens, now: SystemTime, instant: Instant) -> io::Result<()> {
        let tokens = self.list()?.into_iter();
        let found: Vec<_> = tokens.filter(|(_, token)| token.is_old(now)).collect();
        old.retain(|id, _| found.iter().any(|(other, _)| other == id));
        let ids = found.into_iter().map(|(id, _)| id).filter(|id| {
            let since = *old.entry(id.clone()).or_insert(instant);
            instant.saturating_duration_since(since) >= RETENTION_AFTER_EXPIRY
        });
        self.remove(ids)
    }

    /// Removes the files of tokens. One that cannot be removed stops no other.
    fn remove(&self, ids: impl IntoIterator<Item = String>) -> io::Result<()> {
        let mut failed = None;
        for id in ids {
            let _changing = self.0.lock_files()?;
            match fs::remove_file(self.path(&id)) {
                Ok(()) => info!(token = id, "removed an expired join token"),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => failed = failed.or_else(|| Some(self.problem(&id, &error))),
            }
        }
        failed.map_or(Ok(()), Err)
    }
}

const CLEAN_INTERVAL: Duration = Duration::from_secs(60 * 60);

#[cfg(test)]
mod tests {
    use tunnel_proto::wire::order::{NodeOrder, Order};

    use super::super::TokenStore;
    use super::*;
    use crate::store::data_dir::testing::Scratch;
    use crate::testing::node;

    #[test]
    fn token_that_cannot_be_removed_stops_no_other() {
        let scratch = Scratch::new();
        let store = TokenStore::open(&scratch.0);
        let (order, now) = (NodeOrder::new(&node(), Order::default()), SystemTime::now());
        let token = store.create(&order, Duration::from_secs(60), vec![], [7; 32], now);
        let id = token.unwrap().id().to_owned();
        let files = TokenFiles::new(&scratch.0);
        let directory = files.path("directory000");
        fs::create_dir(&directory).unwrap();
        let ids = ["absent000000", "directory000", &id].map(str::to_owned);
        let error = files.remove(ids).unwrap_err().to_string();
        assert!(error.contains("directory000"), "{error}");
        assert!(!files.path(&id).exists());
    }

    #[test]
    fn clock_that_was_wrong_once_removes_no_token() {
        const DAY: Duration = Duration::from_secs(86400);
        let scratch = Scratch::new();
        let (now, instant) = (SystemTime::now(), Instant::now());
        let hour = Duration::from_secs(3600);
        let store = TokenStore::open(&scratch.0);
        let token = store.create(
            &NodeOrder::new(&node(), Order::default()),
            hour,
            vec![],
            [7; 32],
            now,
        );
        let text = token.unwrap().reveal();
        let far = now + 40 * DAY;
        let refused = store.redeem(&text, &node(), [1; 32], far);
        assert!(refused.unwrap_err().1.contains("ended at"));
        let (files, mut old) = (TokenFiles::new(&scratch.0), OldTokens::new());
        files.clean(&mut old, far, instant).unwrap();
        files.clean(&mut old, far, instant + hour).unwrap();
        // The clock is right again.
        files.clean(&mut old, now, instant + DAY).unwrap();
        files.clean(&mut old, far, instant + 2 * DAY).unwrap();
        assert!(store.redeem(&text, &node(), [1; 32], now).is_ok());
        files.clean(&mut old, far, instant + 3 * DAY).unwrap();
        assert!(store.list(now).unwrap().is_empty());
    }
}
