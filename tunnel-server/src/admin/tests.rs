use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::*;
use crate::admin::status::SessionSources;
use crate::config::{Config, RawConfig};
use crate::routing::routes::Routes;
use crate::testing::{Bench, assert_contains, peers_holding};
use tunnel_ca::tokens::TokenState;
use tunnel_store::data_dir::testing::Scratch;

struct Fixture {
    scratch: Scratch,
    state: AdminState,
    shutdown: Shutdown,
}

/// Returns the state of a server with this directory. The node `worker-9` is connected.
pub(super) fn state(dir: &DataDir) -> AdminState {
    let ca = Arc::new(LocalCa::load_or_create(dir).unwrap());
    let nodes = Arc::new(KnownNodes::open(dir).unwrap());
    let revocations = Arc::new(Revocations::open(dir, true).unwrap());
    AdminState {
        sources: NodeSources {
            nodes: nodes.clone(),
            routes: Routes::default(),
            revocations: revocations.clone(),
            sessions: Some(SessionSources {
                registry: Bench::new().sessions.registry.clone(),
                peers: peers_holding(&[node("worker-9")]),
                failures: Arc::default(),
            }),
        },
        revocations,
        peers: Peers::alone("server-1".parse().unwrap(), Vec::new()),
        rotator: Ok(Arc::new(CaRotator::new(
            ca.clone(),
            dir.clone(),
            nodes.clone(),
        ))),
        ca,
        tokens: Arc::new(TokenStore::open(dir).unwrap()),
        nodes,
        node_labels: vec!["zone".into()],
        advertised: vec!["tunnel.example:10262".into()],
        can_issue: true,
        tunnels: None,
        configuration: RunningConfig::new(
            &Config::try_from(RawConfig::default()).unwrap(),
            [1; 32],
            &Shutdown::new(),
        ),
        dry_run: DryRunReport::default(),
    }
}

fn node(name: &str) -> NodeName {
    name.parse().unwrap()
}

impl Fixture {
    fn new() -> Self {
        let scratch = Scratch::new();
        Self {
            state: state(&scratch.0),
            scratch,
            shutdown: Shutdown::new(),
        }
    }

    fn start(&self) -> io::Result<()> {
        start(self.state.clone(), &self.scratch.0, &self.shutdown)
    }

    async fn client(&self) -> Option<AdminClient> {
        AdminClient::connect(&self.scratch.0).await.unwrap()
    }

    /// Creates a fixture whose server runs, and its client.
    async fn started() -> (Self, AdminClient) {
        let fixture = Self::new();
        fixture.start().unwrap();
        let client = fixture.client().await.unwrap();
        (fixture, client)
    }
}

fn token_request() -> CreateToken {
    CreateToken {
        uses: None,
        needs_approval: false,
        node: TokenNodes::Node(node("worker-1")),
        ttl_seconds: 60,
        ips: vec!["192.168.33.221".parse().unwrap()],
        labels: BTreeMap::new(),
    }
}

#[tokio::test]
async fn token_is_made_listed_and_revoked_over_the_socket() {
    let (fixture, client) = Fixture::started().await;
    let created = client.create_token(&token_request()).await.unwrap();
    let command =
        "tunnel-agent join --server tunnel.example:10262 --node-name worker-1 --token-file -";
    assert_eq!(created.command, command);
    assert!(!format!("{created:?}").contains(&created.token));
    let known = fixture.state.nodes.get(&node("worker-1")).unwrap();
    assert_eq!(known.addresses, token_request().ips);

    let list = client.tokens().await.unwrap();
    assert_eq!(list[0].id, created.id);
    assert!(client.revoke_token(&created.id).await.unwrap());
    assert!(!client.revoke_token("zzzzzzzzzzzz").await.unwrap());
    assert!(!client.revoke_token("../nodes/x").await.unwrap());
    assert_eq!(client.tokens().await.unwrap()[0].state, TokenState::Revoked);
    fixture.shutdown.finish().await;
}

#[tokio::test]
async fn nodes_and_ca_are_read_and_only_absent_nodes_forgotten() {
    let (fixture, client) = Fixture::started().await;
    assert_eq!(client.ca().await.unwrap(), fixture.state.ca.root_pem());
    let page = client.nodes(&PageQuery::default()).await.unwrap();
    assert_eq!(page.nodes[0].node, "worker-9");
    let running = client.diag().await.unwrap();
    assert_eq!(running.settings, fixture.state.configuration.lines());
    assert_eq!(running.version, env!("CARGO_PKG_VERSION"));
    fixture.state.nodes.record(&node("worker-1"), &[]);
    let names = ["worker-1", "worker-9"].map(node);
    let outcome = client.forget_nodes(&names).await.unwrap();
    assert_eq!(outcome.forgotten, ["worker-1"]);
    assert_eq!(outcome.connected, ["worker-9"]);
    let again = client.forget_nodes(&names[..1]).await.unwrap();
    assert_eq!(again.unknown, ["worker-1"]);
    fixture.shutdown.finish().await;
}

/// Sends a request and returns the answer, status line included.
async fn raw(fixture: &Fixture, target: &str) -> String {
    let mut socket = UnixStream::connect(fixture.scratch.0.admin_socket())
        .await
        .unwrap();
    let request = format!("GET {target} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n");
    socket.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).await.unwrap();
    answer
}

#[tokio::test]
async fn pages_are_bounded_for_many_readers_and_broken_queries_refused() {
    let (fixture, client) = Fixture::started().await;
    for number in 0..2500 {
        let name = format!("edge-{number:04}");
        fixture.state.nodes.record(&node(&name), &[]);
    }
    let mut readers = tokio::task::JoinSet::new();
    for _ in 0..4 * CONNECTIONS_MAX {
        let client = client.clone();
        let all = PageQuery {
            after: None,
            limit: usize::MAX,
        };
        readers.spawn(async move { client.nodes(&all).await });
    }
    while let Some(page) = readers.join_next().await {
        let page = page.unwrap().unwrap();
        assert_eq!(page.nodes.len(), PAGE_MAX);
        assert_eq!(page.r#continue.as_deref(), Some("edge-0999"));
    }
    let page = raw(&fixture, "/nodes?limit=2&continue=edge-2498").await;
    assert!(page.starts_with("HTTP/1.1 200"), "{page}");
    assert!(
        page.contains("edge-2499") && page.contains("worker-9"),
        "{page}"
    );
    for query in [
        "limit=0",
        "limit=1e9",
        "continue=..%2f",
        "continue=",
        "search=a",
    ] {
        for list in ["nodes", "revocations"] {
            let refused = raw(&fixture, &format!("/{list}?{query}")).await;
            assert!(refused.starts_with("HTTP/1.1 400"), "{query}: {refused}");
            assert!(!refused.contains("2f"), "{refused}");
        }
    }
    let many: Vec<_> = (0..=PAGE_MAX)
        .map(|number| node(&format!("n{number}")))
        .collect();
    let refused = client.named_nodes(&many).await.unwrap_err();
    assert_contains(&refused, "at most 1000 nodes");
    let named = client
        .named_nodes(&["edge-2000", "x", "edge-0001"].map(node))
        .await;
    let named: Vec<_> = named
        .unwrap()
        .nodes
        .into_iter()
        .map(|status| status.node)
        .collect();
    assert_eq!(named, ["edge-2000", "edge-0001"]);
    fixture.shutdown.finish().await;
}

#[tokio::test]
async fn ca_of_an_operator_is_not_rotated() {
    let mut fixture = Fixture::new();
    fixture.state.rotator = Err(NoRotation::OwnCertificates);
    fixture.start().unwrap();
    let client = fixture.client().await.unwrap();
    let page = "own-certificates.md";
    assert_contains(&client.ca_rotation().await.unwrap_err(), page);
    let begun = client.rotate_ca(RotationAction::Begin).await;
    assert_contains(&begun.unwrap_err(), page);
    fixture.shutdown.finish().await;
}

#[tokio::test]
async fn refusals_carry_their_reason() {
    let (fixture, client) = Fixture::started().await;
    let forever = CreateToken {
        ttl_seconds: u64::MAX,
        ..token_request()
    };
    let error = client.create_token(&forever).await.unwrap_err();
    assert_contains(&error, "365 days");
    fixture.shutdown.finish().await;
}

#[tokio::test]
async fn socket_is_private_exclusive_and_gone_at_the_end() {
    let fixture = Fixture::new();
    assert!(fixture.client().await.is_none());
    fixture.start().unwrap();
    let path = fixture.scratch.0.admin_socket();
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    let second = fixture.start().unwrap_err();
    assert_contains(&second, "another tunnel-server runs");
    // The first one still serves.
    assert!(fixture.client().await.is_some());
    fixture.shutdown.finish().await;
    assert!(!path.exists());
}

#[tokio::test]
async fn socket_of_a_dead_server_is_replaced_but_no_other_file() {
    let fixture = Fixture::new();
    let path = fixture.scratch.0.admin_socket();
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    assert!(fixture.client().await.is_none());
    fixture.start().unwrap();
    assert!(fixture.client().await.is_some());
    fixture.shutdown.finish().await;

    fs::write(&path, "precious").unwrap();
    assert_contains(&fixture.start().unwrap_err(), "admin.sock");
    assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
}

#[tokio::test]
async fn no_token_is_made_where_it_would_be_of_no_use() {
    let mut fixture = Fixture::new();
    fixture.state.can_issue = false;
    fixture.start().unwrap();
    let client = fixture.client().await.unwrap();
    let error = client.create_token(&token_request()).await.unwrap_err();
    for words in ["--agent-ca", "culvert://agent/worker-1", "--cert-file"] {
        assert_contains(&error, words);
    }
    assert!(
        fixture
            .state
            .tokens
            .list(SystemTime::now())
            .unwrap()
            .is_empty()
    );
}

#[tokio::test]
async fn work_that_takes_too_long_is_answered_with_what_to_do() {
    let scratch = Scratch::new();
    let state = Arc::new(state(&scratch.0));
    let (goes_on, ended) = std::sync::mpsc::channel::<()>();
    let work = move |_state: Arc<AdminState>| ended.recv().is_ok();
    let answered = blocking_until(&state, Instant::now(), work).await;
    let slow = answered.err().unwrap();
    assert_eq!(slow.status, StatusCode::GATEWAY_TIMEOUT);
    assert_contains(&slow.problem, "ca rotate --status");
    drop(goes_on);
}
