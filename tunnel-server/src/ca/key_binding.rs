//! ServiceAccount tokens that were used for a certificate, each with its key. An attacker who reads
//! a token later cannot use it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::Mutex;

/// Maximum number of bindings, of about 100 bytes each. Only tokens that the cluster attested are
/// bound.
const TOKENS_MAX: usize = 65_536;

/// The first key of each token. A binding lives until the token expires or the process ends. Clones
/// share the bindings.
#[derive(Debug, Clone, Default)]
pub(crate) struct KeyBindings(Arc<Mutex<HashMap<[u8; 32], BoundKey>>>);

#[derive(Debug)]
struct BoundKey {
    key: [u8; 32],
    ends: SystemTime,
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
        if all.len() >= TOKENS_MAX {
            all.retain(|_, bound| bound.ends > now);
        }
        match all.get(&token) {
            Some(bound) if bound.key == key => KeyBinding::Granted,
            Some(_) => KeyBinding::BoundToOtherKey,
            None if all.len() >= TOKENS_MAX => KeyBinding::Full,
            None => {
                all.insert(token, BoundKey { key, ends });
                KeyBinding::Granted
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

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

    #[test]
    fn tokens_are_forgotten_when_they_end_and_never_before() {
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
        assert_eq!(keys.bind(next, hash(1), later, later), KeyBinding::Granted);
    }
}
