//! ServiceAccount tokens that were used for a certificate, each with its key. An attacker who reads
//! a token later cannot use it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use tokio::time::Instant;

/// Maximum number of bindings, of about 100 bytes each. Only tokens that the cluster attested are
/// bound.
const TOKENS_MAX: usize = 65_536;
/// Minimum time for which a token is bound, if the clock is wrong when it is used: the usual life of
/// a token of a pod.
const BOUND_MIN: Duration = Duration::from_secs(60 * 60);

/// The first key of each token. A binding lives until the token has expired by the wall clock and by
/// the time of this process, or the process ends. Clones share the bindings.
#[derive(Debug, Clone, Default)]
pub(crate) struct KeyBindings(Arc<Mutex<HashMap<[u8; 32], BoundKey>>>);

#[derive(Debug)]
struct BoundKey {
    key: [u8; 32],
    ends: SystemTime,
    /// When the token ends by the time of this process; `None` is never.
    stays_until: Option<Instant>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyBinding {
    /// The token is bound to this key.
    Granted,
    BoundToOtherKey,
    /// The maximum number of bindings is reached.
    Full,
}

impl KeyBindings {
    /// Binds a token, by its hash, to the first key that uses it. The same key may bind the token
    /// again.
    pub(crate) fn bind(
        &self,
        token: [u8; 32],
        key: [u8; 32],
        ends: SystemTime,
        now: SystemTime,
    ) -> KeyBinding {
        let mut all = self.0.lock();
        let instant = Instant::now();
        if all.len() >= TOKENS_MAX {
            all.retain(|_, bound| {
                bound.ends > now || bound.stays_until.is_none_or(|until| until > instant)
            });
        }
        match all.get(&token) {
            Some(bound) if bound.key == key => KeyBinding::Granted,
            Some(_) => KeyBinding::BoundToOtherKey,
            None if all.len() >= TOKENS_MAX => KeyBinding::Full,
            None => {
                let left = ends.duration_since(now).unwrap_or_default();
                let bound = BoundKey {
                    key,
                    ends,
                    stays_until: instant.checked_add(left.max(BOUND_MIN)),
                };
                all.insert(token, bound);
                KeyBinding::Granted
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(number: usize) -> [u8; 32] {
        let mut hash = [0; 32];
        hash[..8].copy_from_slice(&number.to_be_bytes());
        hash
    }

    #[test]
    fn first_key_has_the_token_and_may_ask_again() {
        let (keys, now) = (KeyBindings::default(), SystemTime::now());
        let ends = now + Duration::from_secs(3600);
        let bind = |token, key| keys.bind(hash(token), hash(key), ends, now);
        assert_eq!(bind(1, 1), KeyBinding::Granted);
        assert_eq!(bind(1, 1), KeyBinding::Granted);
        assert_eq!(bind(1, 2), KeyBinding::BoundToOtherKey);
        assert_eq!(bind(2, 2), KeyBinding::Granted);
    }

    #[tokio::test(start_paused = true)]
    async fn tokens_are_forgotten_when_they_end_by_both_clocks() {
        let (keys, now) = (KeyBindings::default(), SystemTime::now());
        let ends = now + Duration::from_secs(3600);
        let bind = |token, key| keys.bind(hash(token), hash(key), ends, now);
        for token in 0..TOKENS_MAX {
            assert_eq!(bind(token, 1), KeyBinding::Granted);
        }
        let next = hash(TOKENS_MAX);
        assert_eq!(bind(TOKENS_MAX, 1), KeyBinding::Full);
        assert_eq!(bind(7, 2), KeyBinding::BoundToOtherKey);
        let later = ends + Duration::from_secs(1);
        let bind_later = || keys.bind(next, hash(1), later, later);
        assert_eq!(bind_later(), KeyBinding::Full, "the clock is wrong");
        tokio::time::advance(Duration::from_secs(3601)).await;
        assert_eq!(bind(7, 2), KeyBinding::BoundToOtherKey, "the clock is late");
        assert_eq!(bind_later(), KeyBinding::Granted);
    }
}
