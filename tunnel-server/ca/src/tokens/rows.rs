//! Join tokens of a standalone server: rows of the store of its data directory.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use tokio::time::Instant;
use tracing::info;
use tunnel_process::shutdown::Shutdown;
use tunnel_store::data_dir::DataDir;
use tunnel_store::state_store::{OnDamage, RowChange, StateStore, Table};

use super::object::{RETENTION_AFTER_EXPIRY, StoredToken, TokenObject, TokenObjects};

/// The tokens of a store, which has one user at a time.
#[derive(Debug)]
pub(super) struct TokenRows {
    store: StateStore,
    tokens: Mutex<BTreeMap<String, StoredToken>>,
}

impl TokenRows {
    /// Loads the tokens. One that cannot be read is set aside: its agent needs another one.
    pub(super) fn open(dir: &DataDir) -> io::Result<Self> {
        let store = dir.store(OnDamage::Stop)?;
        let tokens = Mutex::new(store.load_readable(Table::Tokens, "")?);
        Ok(Self { store, tokens })
    }

    fn set_if(&self, id: &str, expected: Option<&StoredToken>, token: Option<StoredToken>) -> bool {
        let mut tokens = self.tokens.lock();
        if tokens.get(id) != expected {
            return false;
        }
        let row = RowChange::of(id, token.as_ref());
        match token {
            Some(token) => tokens.insert(id.to_owned(), token),
            None => tokens.remove(id),
        };
        // Under the lock, so that an older token never replaces a newer one.
        self.store.change(Table::Tokens, vec![row]);
        true
    }

    /// Removes the tokens that expired more than a day ago, by the wall clock and by the time of this
    /// process.
    fn clean(&self, old: &mut OldTokens, now: SystemTime, instant: Instant) {
        let mut tokens = self.tokens.lock();
        let found = tokens.iter().filter(|(_, token)| token.is_old(now));
        let found: BTreeSet<_> = found.map(|(id, _)| id.clone()).collect();
        old.retain(|id, _| found.contains(id));
        let mut removed = Vec::new();
        for id in found {
            let since = *old.entry(id.clone()).or_insert(instant);
            if instant.saturating_duration_since(since) >= RETENTION_AFTER_EXPIRY {
                tokens.remove(&id);
                removed.push(RowChange::remove(&id));
                info!(token = id, "removed an expired join token");
            }
        }
        self.store.change(Table::Tokens, removed);
    }
}

impl TokenObjects for TokenRows {
    fn get(&self, id: &str) -> io::Result<Option<TokenObject>> {
        let token = self.tokens.lock().get(id).cloned();
        token
            .map(|token| {
                let version = version(&token)?;
                Ok(TokenObject { token, version })
            })
            .transpose()
    }

    /// Creates a token. One that cannot be saved is undone: nobody has seen its secret.
    fn create(&self, id: &str, token: &StoredToken) -> io::Result<bool> {
        if !self.set_if(id, None, Some(token.clone())) {
            return Ok(false);
        }
        let saved = self.store.flush(Table::Tokens).map(|()| true);
        saved.inspect_err(|_unsaved| {
            self.set_if(id, Some(token), None);
        })
    }

    /// Replaces a token. What cannot be saved is in force and is saved later: to undo it could bring a
    /// token back that somebody else has used or revoked meanwhile.
    fn replace(&self, id: &str, object: &TokenObject) -> io::Result<bool> {
        let current = self.tokens.lock().get(id).cloned();
        let Some(current) = current else {
            return Ok(false);
        };
        let is_expected = version(&current)? == object.version;
        if !is_expected || !self.set_if(id, Some(&current), Some(object.token.clone())) {
            return Ok(false);
        }
        let saved = self.store.flush(Table::Tokens).map(|()| true);
        saved.map_err(|error| {
            io::Error::other(format!(
                "the change is in force here but not saved: {error}; the server tries again"
            ))
        })
    }

    fn confirm(&self) -> io::Result<()> {
        self.store.flush(Table::Tokens)
    }

    fn list(&self) -> io::Result<Vec<(String, StoredToken)>> {
        let tokens = self.tokens.lock();
        let tokens = tokens.iter().filter(|(_, token)| !token.is_settled_use());
        Ok(tokens
            .map(|(id, token)| (id.clone(), token.clone()))
            .collect())
    }
}

fn version(token: &StoredToken) -> io::Result<String> {
    serde_json::to_string(token).map_err(io::Error::other)
}

/// Removes tokens that expired more than a day ago, until `shutdown` stops. The wall clock alone
/// removes none: a token has to be expired for a day of this process, too.
pub(super) fn clean(rows: Arc<TokenRows>, shutdown: &Shutdown) {
    shutdown.spawn_service(async move {
        let mut old = OldTokens::new();
        loop {
            tokio::time::sleep(CLEAN_INTERVAL).await;
            rows.clean(&mut old, SystemTime::now(), Instant::now());
        }
    });
}

/// When this process first found that a token expired more than a day ago.
type OldTokens = HashMap<String, Instant>;

const CLEAN_INTERVAL: Duration = Duration::from_secs(60 * 60);

#[cfg(test)]
mod tests {
    use tunnel_proto::wire::order::{NodeOrder, Order};
    use tunnel_store::testing::{Scratch, node};

    use super::super::TokenStore;
    use super::*;

    #[test]
    fn clock_that_was_wrong_once_removes_no_token() {
        const DAY: Duration = Duration::from_secs(86400);
        let scratch = Scratch::new();
        let (now, instant) = (SystemTime::now(), Instant::now());
        let hour = Duration::from_secs(3600);
        let rows = Arc::new(TokenRows::open(&scratch.0).unwrap());
        let store = TokenStore::of(rows.clone());
        let token = store.create(
            &NodeOrder::new(&node(), Order::default()),
            hour,
            vec![],
            [7; 32],
            now,
        );
        let text = token.unwrap().reveal();
        let far = now + 40 * DAY;
        let refused = store.redeem(&text, &node(), [1; 32], &|_| Some(false), far);
        assert!(refused.unwrap_err().1.contains("ended at"));
        let mut old = OldTokens::new();
        rows.clean(&mut old, far, instant);
        rows.clean(&mut old, far, instant + hour);
        // The clock is right again.
        rows.clean(&mut old, now, instant + DAY);
        rows.clean(&mut old, far, instant + 2 * DAY);
        assert!(
            store
                .redeem(&text, &node(), [1; 32], &|_| Some(false), now)
                .is_ok()
        );
        rows.clean(&mut old, far, instant + 3 * DAY);
        assert!(store.list(now).unwrap().is_empty());
        drop((rows, store));
        let again = TokenStore::open(&scratch.0).unwrap();
        assert!(again.list(now).unwrap().is_empty());
    }
}
