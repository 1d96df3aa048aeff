use tunnel_store::state_store::{OnDamage, Table};
use tunnel_store::testing::{Scratch, assert_contains};

use super::*;

const CA: [u8; 32] = [7; 32];
const KEY: [u8; 32] = [1; 32];
const OTHER_KEY: [u8; 32] = [2; 32];

/// No node is known.
const NEW: fn(&NodeName) -> Option<bool> = |_| Some(false);

fn name(text: &str) -> NodeName {
    text.parse().unwrap()
}

fn at(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000 + seconds)
}

struct Fixture {
    scratch: Scratch,
    store: TokenStore,
    token: JoinToken,
}

impl Fixture {
    /// Creates a store with one token for `worker-1`, created at 0 and valid for an hour.
    fn new() -> Self {
        let scratch = Scratch::new();
        let store = TokenStore::open(&scratch.0).unwrap();
        let hour = Duration::from_secs(3600);
        let token = store.create(
            &NodeOrder::new(&name("worker-1"), Order::default()),
            hour,
            vec![],
            CA,
            at(0),
        );
        let token = token.unwrap();
        Self {
            scratch,
            store,
            token,
        }
    }

    fn redeem(&self, key: [u8; 32], seconds: u64) -> Result<TokenGrant, EnrollCode> {
        self.try_text(&self.token.reveal(), key, seconds)
    }

    fn try_text(&self, text: &str, key: [u8; 32], seconds: u64) -> Result<TokenGrant, EnrollCode> {
        self.store
            .redeem(text, &name("worker-1"), key, &NEW, at(seconds))
            .map_err(|(code, _)| code)
    }

    fn with_wrong_secret(&self) -> String {
        forged(self.token.id())
    }

    /// Opens the store once more, as a restarted server or a verb does.
    fn open_again(&self) -> TokenStore {
        TokenStore::open(&self.scratch.0).unwrap()
    }
}

/// Returns a token with this id and a wrong secret.
fn forged(id: &str) -> String {
    let token = JoinToken::new(id, &[0; TOKEN_SECRET_BYTES], Some(CA));
    token.unwrap().reveal()
}

#[test]
fn first_key_may_repeat_a_token_until_it_ends_and_no_other_may_use_it() {
    let fixture = Fixture::new();
    let grant = fixture.redeem(KEY, 10).unwrap();
    assert_eq!(grant.id, fixture.token.id());
    assert_eq!(grant.node, name("worker-1"));
    assert!(fixture.redeem(KEY, 20).is_ok());
    assert_eq!(fixture.redeem(OTHER_KEY, 30), Err(EnrollCode::TokenUsed));
    assert_eq!(fixture.redeem(KEY, 3600), Err(EnrollCode::TokenExpired));
}

#[test]
fn use_survives_a_restart_and_the_secret_is_not_on_disk() {
    let fixture = Fixture::new();
    fixture.redeem(KEY, 10).unwrap();
    let again = fixture.open_again();
    let text = fixture.token.reveal();
    let other = again.redeem(&text, &name("worker-1"), OTHER_KEY, &NEW, at(20));
    assert_eq!(other.unwrap_err().0, EnrollCode::TokenUsed);
    assert!(
        again
            .redeem(&text, &name("worker-1"), KEY, &NEW, at(20))
            .is_ok()
    );
    let stored = std::fs::read(fixture.scratch.0.state()).unwrap();
    let stored = String::from_utf8_lossy(&stored);
    assert!(stored.contains(fixture.token.id()));
    assert!(!stored.contains(&hex(fixture.token.secret())));
    assert!(!format!("{again:?}").contains(&hex(fixture.token.secret())));
}

#[test]
fn token_is_for_one_node() {
    let fixture = Fixture::new();
    let (store, token) = (&fixture.store, fixture.token.reveal());
    let wrong = store.redeem(&token, &name("worker-2"), KEY, &NEW, at(1));
    let (code, detail) = wrong.unwrap_err();
    assert_eq!(code, EnrollCode::WrongNode);
    assert!(detail.contains("worker-1") && detail.contains("worker-2"));
    // A wrong node binds no key.
    assert!(fixture.redeem(OTHER_KEY, 2).is_ok());
}

#[test]
fn unknown_ids_and_wrong_secrets_get_the_same_answer() {
    let fixture = Fixture::new();
    let wrong = fixture.with_wrong_secret();
    let answers = [wrong, forged("zzzzzzzzzzzz"), "nonsense".into()].map(|text| {
        let answer = fixture
            .store
            .redeem(&text, &name("worker-1"), KEY, &NEW, at(1));
        answer.unwrap_err()
    });
    assert_eq!(answers[0].0, EnrollCode::BadToken);
    assert_eq!(answers[1], answers[0]);
    assert_eq!(answers[2], answers[0]);
}

#[test]
fn revoked_token_is_refused_also_after_its_use() {
    let fixture = Fixture::new();
    fixture.redeem(KEY, 1).unwrap();
    assert!(fixture.store.revoke(fixture.token.id()).unwrap());
    assert!(!fixture.store.revoke("zzzzzzzzzzzz").unwrap());
    assert_eq!(fixture.redeem(KEY, 3), Err(EnrollCode::Revoked));
    let again = fixture.open_again();
    assert_eq!(again.list(at(3)).unwrap()[0].state, TokenState::Revoked);
}

#[test]
fn failures_are_limited_per_token_but_the_right_secret_always_passes() {
    let fixture = Fixture::new();
    let wrong = fixture.with_wrong_secret();
    for _ in 0..FAILURES_PER_MINUTE {
        assert_eq!(fixture.try_text(&wrong, KEY, 1), Err(EnrollCode::BadToken));
    }
    let limited = fixture.try_text(&wrong, KEY, 2);
    assert_eq!(limited, Err(EnrollCode::RateLimited));
    assert!(fixture.redeem(KEY, 3).is_ok());
    assert_eq!(fixture.try_text(&wrong, KEY, 61), Err(EnrollCode::BadToken));
}

#[test]
fn unknown_ids_are_limited_together_without_memory_of_each() {
    let fixture = Fixture::new();
    let unknown = |number: u32| forged(&format!("{number:012}"));
    for number in 0..UNKNOWN_PER_MINUTE {
        let answer = fixture.try_text(&unknown(number), KEY, 1);
        assert_eq!(answer, Err(EnrollCode::BadToken));
    }
    let limited = fixture.try_text(&unknown(99), KEY, 1);
    assert_eq!(limited, Err(EnrollCode::RateLimited));
    assert!(fixture.store.failures.lock().by_token.is_empty());
    assert!(fixture.redeem(KEY, 2).is_ok());
}

#[test]
fn list_shows_states_and_forgets_no_token_by_the_clock() {
    let fixture = Fixture::new();
    let ip = "192.168.33.221".parse().unwrap();
    let (store, minute) = (&fixture.store, Duration::from_secs(60));
    let second = store.create(
        &NodeOrder::new(&name("worker-2"), Order::default()),
        minute,
        vec![ip],
        CA,
        at(5),
    );
    let second = second.unwrap();
    fixture.redeem(KEY, 10).unwrap();
    let states = |seconds| {
        let list = fixture.store.list(at(seconds)).unwrap();
        list.iter().map(|token| token.state).collect::<Vec<_>>()
    };
    assert_eq!(states(20), [TokenState::Used, TokenState::Active]);
    assert_eq!(states(100), [TokenState::Used, TokenState::Expired]);
    let list = fixture.store.list(at(20)).unwrap();
    assert_eq!(list[1].id, second.id());
    assert_eq!(list[1].ips, [ip]);
    assert_eq!(list[0].used_by.as_deref(), Some(hex(&KEY).as_str()));
    assert_eq!(states(48 * 3600), [TokenState::Used, TokenState::Expired]);
    assert_eq!(states(20), [TokenState::Used, TokenState::Active]);
    let text = serde_json::to_string(&list).unwrap();
    assert_contains(&text, "usedBy");
    assert_contains(&text, "\"active\"");
    assert_eq!(serde_json::from_str::<Vec<TokenInfo>>(&text).unwrap(), list);
}

#[test]
fn of_keys_that_use_a_token_at_once_one_gets_it() {
    let fixture = Fixture::new();
    let granted = std::thread::scope(|threads| {
        let keys = (0..8).map(|key| {
            let (fixture, text) = (&fixture, fixture.token.reveal());
            threads.spawn(move || {
                fixture
                    .store
                    .redeem(&text, &name("worker-1"), [key; 32], &NEW, at(1))
                    .is_ok()
            })
        });
        let keys: Vec<_> = keys.collect();
        keys.into_iter()
            .map(|key| key.join().unwrap())
            .filter(|ok| *ok)
            .count()
    });
    assert_eq!(granted, 1);
}

#[test]
fn life_is_bounded() {
    let fixture = Fixture::new();
    let too_long = LIFE_MAX + Duration::from_secs(1);
    for ttl in [Duration::ZERO, too_long, Duration::MAX] {
        let made = fixture.store.create(
            &NodeOrder::new(&name("a"), Order::default()),
            ttl,
            vec![],
            CA,
            at(0),
        );
        assert!(matches!(made, Err(CreateTokenError::InvalidTtl)));
    }
}

/// Replaces the file of the store by a directory, so that nothing can be saved.
fn block(fixture: &Fixture) -> std::path::PathBuf {
    let path = fixture.scratch.0.state();
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    path
}

#[test]
fn use_that_cannot_be_saved_is_refused_and_only_its_key_may_repeat_it() {
    let fixture = Fixture::new();
    let store = fixture.scratch.0.store(OnDamage::Stop).unwrap();
    let blocked = block(&fixture);
    assert_eq!(fixture.redeem(KEY, 1), Err(EnrollCode::Unavailable));
    assert_eq!(fixture.redeem(KEY, 1), Err(EnrollCode::Unavailable));
    std::fs::remove_dir(&blocked).unwrap();
    assert_eq!(fixture.redeem(OTHER_KEY, 2), Err(EnrollCode::TokenUsed));
    assert!(fixture.redeem(KEY, 2).is_ok());
    store.flush(Table::Tokens).unwrap();
    let again = fixture.open_again();
    assert_eq!(again.list(at(3)).unwrap()[0].state, TokenState::Used);
}

#[test]
fn revocation_of_a_token_that_cannot_be_saved_is_in_force_and_saved_later() {
    let fixture = Fixture::new();
    let blocked = block(&fixture);
    let id = fixture.token.id();
    let error = fixture.store.revoke(id).unwrap_err().to_string();
    assert_contains(&error, "in force here but not saved");
    // A use that cannot be saved, either, does not bring it back.
    assert_eq!(fixture.redeem(KEY, 1), Err(EnrollCode::Revoked));
    // A token that cannot be saved is none.
    let node = NodeOrder::new(&name("worker-2"), Order::default());
    let hour = Duration::from_secs(3600);
    let refused = fixture.store.create(&node, hour, vec![], CA, at(0));
    assert!(matches!(refused, Err(CreateTokenError::File(_))));
    std::fs::remove_dir(&blocked).unwrap();
    let store = fixture.scratch.0.store(OnDamage::Stop).unwrap();
    store.flush(Table::Tokens).unwrap();
    let listed = fixture.open_again().list(at(3)).unwrap();
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].state, TokenState::Revoked);
}

fn for_cams(store: &TokenStore, uses_max: u32, needs_approval: bool) -> JoinToken {
    let nodes = NewNodes {
        pattern: "cam-*".parse().unwrap(),
        uses_max,
        needs_approval,
        labels: BTreeMap::new(),
    };
    let hour = Duration::from_secs(3600);
    store.create_for_pattern(nodes, hour, CA, at(0)).unwrap()
}

#[test]
fn token_for_a_pattern_enrolls_new_matching_nodes_as_often_as_it_may() {
    let fixture = Fixture::new();
    let (store, token) = (&fixture.store, for_cams(&fixture.store, 2, false));
    let enroll = |node: &str, key: u8, seconds| {
        let is_known = |name: &NodeName| match name.as_str() {
            "cam-later" => None,
            name => Some(name == "cam-known"),
        };
        let granted = store.redeem(
            &token.reveal(),
            &name(node),
            [key; 32],
            &is_known,
            at(seconds),
        );
        granted.map(|grant| grant.node).map_err(|(code, _)| code)
    };
    for (node, refused) in [
        ("worker-1", EnrollCode::WrongNode),
        ("cam-a.site", EnrollCode::WrongNode),
        ("cam-known", EnrollCode::WrongNode),
        ("cam-later", EnrollCode::Unavailable),
    ] {
        assert_eq!(enroll(node, 9, 1), Err(refused), "{node}");
    }
    assert_eq!(enroll("cam-1", 1, 1), Ok(name("cam-1")));
    // A lost answer is repeated; a second machine of the name is none of its uses.
    assert_eq!(enroll("cam-1", 1, 2), Ok(name("cam-1")));
    assert_eq!(enroll("cam-1", 2, 2), Err(EnrollCode::TokenUsed));
    let listed = store.list(at(2)).unwrap();
    let token_row = listed.iter().find(|row| row.id == token.id()).unwrap();
    assert_eq!((token_row.uses, token_row.uses_max), (Some(1), Some(2)));
    assert_eq!(
        (&*token_row.node, token_row.state),
        ("cam-*", TokenState::Active)
    );
    assert_eq!(listed.len(), 2, "uses are no tokens");
    assert_eq!(enroll("cam-2", 2, 3), Ok(name("cam-2")));
    assert_eq!(enroll("cam-3", 3, 3), Err(EnrollCode::TokenUsed));
    assert_eq!(enroll("cam-2", 2, 4), Ok(name("cam-2")));
    assert_eq!(enroll("cam-2", 2, 3600), Err(EnrollCode::TokenExpired));
    // Another token does not take the name, also where no server knows the node.
    let second = for_cams(store, 2, false);
    for key in [1, 9] {
        let other = store.redeem(&second.reveal(), &name("cam-1"), [key; 32], &NEW, at(4));
        assert_eq!(other.unwrap_err().0, EnrollCode::WrongNode);
    }
    // A restarted server knows the uses.
    let again = fixture.open_again();
    let other = again.redeem(&token.reveal(), &name("cam-3"), KEY, &NEW, at(5));
    assert_eq!(other.unwrap_err().0, EnrollCode::TokenUsed);
    assert!(store.revoke(token.id()).unwrap());
    assert_eq!(enroll("cam-1", 1, 6), Err(EnrollCode::Revoked));
}

#[test]
fn address_matches_no_pattern_and_use_is_no_token() {
    let fixture = Fixture::new();
    let nodes = NewNodes {
        pattern: "*.1.1.*".parse().unwrap(),
        uses_max: 5,
        needs_approval: false,
        labels: BTreeMap::new(),
    };
    let hour = Duration::from_secs(3600);
    let store = &fixture.store;
    let token = store.create_for_pattern(nodes, hour, CA, at(0)).unwrap();
    let enroll = |node| store.redeem(&token.reveal(), &name(node), KEY, &NEW, at(1));
    assert_eq!(enroll("10.1.1.7").unwrap_err().0, EnrollCode::WrongNode);
    assert!(enroll("a.1.1.b").is_ok());
    let token_use = TokenUse {
        token: token.id(),
        node: &name("a.1.1.b"),
        key: "",
    };
    let id = token_use.id();
    assert!(store.objects.get(&id).unwrap().is_some());
    assert!(JoinToken::new(&id, &[0; TOKEN_SECRET_BYTES], None).is_err());
}

#[test]
fn node_waits_until_it_is_approved() {
    let fixture = Fixture::new();
    let (store, token) = (&fixture.store, for_cams(&fixture.store, 2, true));
    let enroll = || {
        let granted = store.redeem(&token.reveal(), &name("cam-1"), KEY, &NEW, at(1));
        granted.map(|_| ()).map_err(|(code, _)| code)
    };
    assert_eq!(store.approve(&[name("cam-1")]).unwrap(), []);
    assert_eq!(enroll(), Err(EnrollCode::Pending));
    assert_eq!(enroll(), Err(EnrollCode::Pending));
    // An approval is for one key, since nobody else can wait with this name.
    let second = for_cams(store, 2, true);
    let other = store.redeem(&second.reveal(), &name("cam-1"), OTHER_KEY, &NEW, at(1));
    assert_eq!(other.unwrap_err().0, EnrollCode::WrongNode);
    let known: fn(&NodeName) -> Option<bool> = |_| Some(true);
    let later = store.redeem(&token.reveal(), &name("cam-1"), KEY, &known, at(1));
    assert_eq!(
        later.unwrap_err().0,
        EnrollCode::WrongNode,
        "it enrolled otherwise"
    );
    let states = |id_part: &str| {
        let listed = store.list(at(1)).unwrap().into_iter();
        let listed = listed.filter(|row| row.id.contains(id_part));
        listed.map(|row| (row.node, row.state)).collect::<Vec<_>>()
    };
    assert_eq!(states("-"), [("cam-1".to_owned(), TokenState::Pending)]);
    assert_eq!(
        store.approve(&[name("cam-2"), name("cam-1")]).unwrap(),
        [name("cam-1")]
    );
    assert_eq!(enroll(), Ok(()));
    assert_eq!(states("-"), []);
}

#[test]
fn uses_at_once_are_counted_exactly() {
    let fixture = Fixture::new();
    let token = for_cams(&fixture.store, 5, false);
    let granted = std::thread::scope(|threads| {
        let nodes = (0..12).map(|number: u8| {
            let (store, text) = (&fixture.store, token.reveal());
            threads.spawn(move || {
                let node = name(&format!("cam-{number}"));
                store
                    .redeem(&text, &node, [number; 32], &NEW, at(1))
                    .is_ok()
            })
        });
        let nodes: Vec<_> = nodes.collect();
        let granted = nodes.into_iter().map(|node| node.join().unwrap());
        granted.filter(|is_granted| *is_granted).count()
    });
    assert_eq!(granted, 5);
}

/// The rows of a store of which one object is always written by another server first.
#[derive(Debug)]
struct Contended {
    rows: TokenRows,
    object: Mutex<String>,
}

impl Contended {
    fn wins(&self, id: &str) -> bool {
        *self.object.lock() != id
    }
}

impl TokenObjects for Contended {
    fn get(&self, id: &str) -> io::Result<Option<TokenObject>> {
        self.rows.get(id)
    }

    fn create(&self, id: &str, token: &StoredToken) -> io::Result<bool> {
        Ok(self.wins(id) && self.rows.create(id, token)?)
    }

    fn replace(&self, id: &str, object: &TokenObject) -> io::Result<bool> {
        Ok(self.wins(id) && self.rows.replace(id, object)?)
    }

    fn list(&self) -> io::Result<Vec<(String, StoredToken)>> {
        self.rows.list()
    }
}

/// Every object that uses of one token share may be written by others all the time: the token itself,
/// and a counter.
#[test]
fn conflicts_about_one_object_refuse_no_use() {
    let fixture = Fixture::new();
    let objects = Arc::new(Contended {
        rows: TokenRows::open(&fixture.scratch.0).unwrap(),
        object: Mutex::default(),
    });
    let store = TokenStore::of(objects.clone());
    let token = for_cams(&store, 40, false);
    let enroll = |number: u8| {
        let node = name(&format!("cam-{number}"));
        let granted = store.redeem(&token.reveal(), &node, [number; 32], &NEW, at(1));
        granted.map(|_| ()).map_err(|(code, _)| code)
    };
    token.id().clone_into(&mut objects.object.lock());
    assert_eq!(enroll(0), Ok(()));
    *objects.object.lock() = format!("count-{}-0", token.id());
    for number in 1..30 {
        assert_eq!(enroll(number), Ok(()), "{number}");
    }
    objects.object.lock().clear();
    for number in 30..40 {
        assert_eq!(enroll(number), Ok(()), "{number}");
    }
    assert_eq!(enroll(40), Err(EnrollCode::TokenUsed));
    let listed = store.list(at(1)).unwrap();
    let row = listed.iter().find(|row| row.id == token.id()).unwrap();
    assert_eq!((row.uses, row.state), (Some(40), TokenState::Used));
    assert_eq!(listed.len(), 2, "counters are no tokens");
}
