//! Uses of tokens for patterns. Each use is an object of its own, named after the node, so the creation
//! of the object is the compare-and-swap on the name, whatever tokens there are. It stays for a year,
//! so that no later token takes the name of a node that no server knows any more.
//!
//! How often a token may be used is shared out among up to 16 counters, each of which is an object,
//! too: servers that count at the same time hardly ever write the same one.

use std::collections::HashSet;
use std::io;
use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::Mutex;
use tunnel_proto::identity::sha256;
use tunnel_proto::wire::code::EnrollCode;
use tunnel_proto::wire::enroll::hex;
use tunnel_proto::wire::name::NodeName;
use tunnel_store::data_dir::whole_seconds;

use super::object::{LIFE_MAX, StoredToken, TokenObjects, TokenScope, unavailable};
use crate::renewal::EnrollRefusal;

/// The use of a token by the key of a node.
pub(super) struct TokenUse<'a> {
    /// Public part of the token.
    pub(super) token: &'a str,
    pub(super) node: &'a NodeName,
    pub(super) key: &'a str,
}

#[derive(Debug)]
pub(super) struct PatternUses {
    objects: Arc<dyn TokenObjects>,
    /// One for each counter of a token, held while it changes, so that the uses at this server do not
    /// conflict with each other.
    counting: [Mutex<()>; COUNTERS_MAX as usize],
    /// Ids of the uses that are being looked up or added, so that no use is counted twice.
    in_progress: Mutex<HashSet<String>>,
}

/// A use that is being looked up or added.
struct InProgress<'a> {
    ids: &'a Mutex<HashSet<String>>,
    id: String,
}

impl Drop for InProgress<'_> {
    fn drop(&mut self) {
        self.ids.lock().remove(&self.id);
    }
}

impl PatternUses {
    pub(super) fn of(objects: Arc<dyn TokenObjects>) -> Self {
        Self {
            objects,
            counting: Default::default(),
            in_progress: Mutex::default(),
        }
    }

    /// Lets a node use a token for a pattern that matches its name. The same key may repeat the use.
    /// A node that is known has no use of its own: somebody else could take its name.
    ///
    /// # Errors
    /// Returns the code and a message for the operator.
    pub(super) fn take(
        &self,
        token_use: &TokenUse<'_>,
        token: StoredToken,
        is_known: Option<bool>,
        now: SystemTime,
    ) -> Result<(), EnrollRefusal> {
        let in_progress = self.begin(token_use)?;
        let id = &in_progress.id;
        let found = self.objects.get(id).map_err(|error| unavailable(&error))?;
        let used = match found {
            Some(used) => used.token,
            None => {
                refuse_known(token_use.node, is_known)?;
                self.add_use(token_use, token, id, now)?
            }
        };
        let TokenScope::Use {
            token, is_approved, ..
        } = &used.scope
        else {
            return Err(unavailable(&io::Error::other(
                "an object is no use of a token",
            )));
        };
        if token != token_use.token {
            refuse_known(token_use.node, Some(true))?;
        }
        used.check(token_use.key, now)?;
        if *is_approved {
            return Ok(());
        }
        // It may have enrolled in another way since.
        refuse_known(token_use.node, is_known)?;
        let detail = format!("the node {} waits for an approval", token_use.node);
        Err((EnrollCode::Pending, detail))
    }

    /// Begins with a use, unless another request for the node is in progress: that of an agent that has
    /// given up.
    fn begin(&self, token_use: &TokenUse<'_>) -> Result<InProgress<'_>, EnrollRefusal> {
        let id = token_use.id();
        if self.in_progress.lock().insert(id.clone()) {
            let ids = &self.in_progress;
            return Ok(InProgress { ids, id });
        }
        let detail = "another request for this node is in progress; try again later";
        Err((EnrollCode::Unavailable, detail.to_owned()))
    }

    /// Counts a use, and creates its object. Returns the use, which may be that of another key.
    fn add_use(
        &self,
        token_use: &TokenUse<'_>,
        token: StoredToken,
        id: &str,
        now: SystemTime,
    ) -> Result<StoredToken, EnrollRefusal> {
        let TokenScope::Pattern {
            uses_max,
            needs_approval,
            ..
        } = token.scope
        else {
            return Err(unavailable(&io::Error::other("the token is for one node")));
        };
        self.count_use(token_use.token, &token, uses_max, now)?;
        let used = StoredToken {
            scope: TokenScope::Use {
                node: token_use.node.clone(),
                token: token_use.token.to_owned(),
                is_approved: !needs_approval,
            },
            secret_sha256: String::new(),
            created: whole_seconds(now),
            ttl_seconds: LIFE_MAX.as_secs(),
            used_by: Some(token_use.key.to_owned()),
            ..token
        };
        if self
            .objects
            .create(id, &used)
            .map_err(|error| unavailable(&error))?
        {
            return Ok(used);
        }
        // Another server created it.
        let found = self.objects.get(id).map_err(|error| unavailable(&error))?;
        let gone = || unavailable(&io::Error::other("the use of the token keeps changing"));
        found.map(|found| found.token).ok_or_else(gone)
    }

    /// Counts a use before it is granted, so that a token is never used more often than it may be. A
    /// crash behind it loses this use.
    fn count_use(
        &self,
        id: &str,
        token: &StoredToken,
        uses_max: u32,
        now: SystemTime,
    ) -> Result<(), EnrollRefusal> {
        let mut counters = counters(uses_max);
        for _ in 0..COUNT_ATTEMPTS_MAX {
            if counters.is_empty() {
                let detail = format!(
                    "the token was used {uses_max} times, and cannot be used more often; create a new one"
                );
                return Err((EnrollCode::TokenUsed, detail));
            }
            // Another one after a conflict, too, so that servers part.
            let chosen = rand::random_range(0..counters.len());
            let (counter, limit) = counters[chosen];
            let counted = self.increment(id, token, counter, limit, now);
            match counted.map_err(|error| unavailable(&error))? {
                Counted::Yes => return Ok(()),
                Counted::Full => {
                    counters.swap_remove(chosen);
                }
                Counted::Conflict => {}
            }
        }
        Err(unavailable(&io::Error::other(
            "the counters of the token keep changing",
        )))
    }

    fn increment(
        &self,
        token_id: &str,
        token: &StoredToken,
        counter: usize,
        limit: u32,
        now: SystemTime,
    ) -> io::Result<Counted> {
        let id = format!("count-{token_id}-{counter}");
        // No more than these two calls: with a slow API server they bound the nodes that join in a second,
        // one for each counter at a time.
        let _counting = self.counting[counter].lock();
        let is_counted = if let Some(mut object) = self.objects.get(&id)? {
            let TokenScope::Counter { uses, .. } = &mut object.token.scope else {
                return Err(io::Error::other(format!("{id} is no counter of uses")));
            };
            if *uses >= limit {
                return Ok(Counted::Full);
            }
            *uses += 1;
            self.objects.replace(&id, &object)?
        } else {
            let created = StoredToken {
                scope: TokenScope::Counter {
                    token: token_id.to_owned(),
                    uses: 1,
                },
                secret_sha256: String::new(),
                created: whole_seconds(now),
                ..token.clone()
            };
            self.objects.create(&id, &created)?
        };
        Ok(if is_counted {
            Counted::Yes
        } else {
            Counted::Conflict
        })
    }

    /// Approves the uses of tokens by these nodes that wait for it. Returns the nodes that were
    /// approved.
    ///
    /// # Errors
    /// Returns an error if the tokens cannot be read or saved.
    pub(super) fn approve(&self, nodes: &[NodeName]) -> io::Result<Vec<NodeName>> {
        let mut approved = Vec::new();
        for (id, token) in self.objects.list()? {
            let TokenScope::Use {
                node,
                is_approved: false,
                ..
            } = token.scope
            else {
                continue;
            };
            if !nodes.contains(&node) {
                continue;
            }
            // Nothing else changes a use but its revocation, and that has the last word.
            while let Some(mut object) = self.objects.get(&id)? {
                if let TokenScope::Use { is_approved, .. } = &mut object.token.scope {
                    *is_approved = true;
                }
                if self.objects.replace(&id, &object)? {
                    approved.push(node);
                    break;
                }
            }
        }
        Ok(approved)
    }
}

/// What became of a use at one counter.
enum Counted {
    Yes,
    /// The counter has no use left.
    Full,
    /// Another server counted at the same time.
    Conflict,
}

/// Returns the counters of a token that can be used so often, with the uses that each admits.
fn counters(uses_max: u32) -> Vec<(usize, u32)> {
    let count = uses_max.min(COUNTERS_MAX);
    let limits = (0..count).map(|counter| (uses_max - counter).div_ceil(count));
    limits.enumerate().collect()
}

impl TokenUse<'_> {
    /// Returns the id of the object. No token has such an id.
    pub(super) fn id(&self) -> String {
        let node = hex(&sha256(self.node.as_str().as_bytes()));
        format!("use-{}", node.get(..NODE_HASH_LEN).unwrap_or(&node))
    }
}

/// Refuses a node that is known, and every node while it is not known which nodes there are.
fn refuse_known(node: &NodeName, is_known: Option<bool>) -> Result<(), EnrollRefusal> {
    match is_known {
        Some(false) => Ok(()),
        Some(true) => {
            let detail = format!(
                "the node {node} is known already, and a token for a pattern enrolls new nodes only; create a token for this node"
            );
            Err((EnrollCode::WrongNode, detail))
        }
        None => {
            let detail = "this server does not know the nodes of the cluster yet; try again later";
            Err((EnrollCode::Unavailable, detail.to_owned()))
        }
    }
}

/// Objects among which the uses of a token are shared out. The last uses look at all of them.
const COUNTERS_MAX: u32 = 16;
/// Attempts to count a use: each counter may be full, and be written by another server some times.
const COUNT_ATTEMPTS_MAX: u32 = 4 * COUNTERS_MAX;
/// Hexadecimal digits of the hash of a node's name in the id of a use.
const NODE_HASH_LEN: usize = 32;
