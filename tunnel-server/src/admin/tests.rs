use std::fs;
use std::os::unix::fs::MetadataExt;

use super::*;
use crate::ca::tokens::TokenState;
use crate::store::data_dir::testing::Scratch;

struct Fixture {
    scratch: Scratch,
    state: AdminState,
    shutdown: Shutdown,
}

impl Fixture {
    fn new() -> Self {
        let scratch = Scratch::new();
        let dir = &scratch.0;
        let state = AdminState {
            revocations: Arc::new(Revocations::open(dir, true).unwrap()),
            ca: Arc::new(LocalCa::load_or_create(dir).unwrap()),
            tokens: Arc::new(TokenStore::open(dir).unwrap()),
            nodes: Arc::new(KnownNodes::open(dir).unwrap()),
            status: Arc::new(|| {
                let mut status = serde_json::json!(status::NodeStatus::default());
                status["node"] = "worker-9".into();
                status["connected"] = true.into();
                vec![status]
            }),
            advertised: vec!["tunnel.example:10262".into()],
            can_issue: true,
            tunnels: None,
        };
        Self {
            scratch,
            state,
            shutdown: Shutdown::new(),
        }
    }

    fn start(&self) -> io::Result<()> {
        start(self.state.clone(), &self.scratch.0, &self.shutdown)
    }

    async fn client(&self) -> Option<AdminClient> {
        AdminClient::connect(&self.scratch.0).await.unwrap()
    }
}

fn token_request(node: &str) -> CreateToken {
    CreateToken {
        node: node.parse().unwrap(),
        ttl_seconds: 60,
        ips: vec!["192.168.33.221".parse().unwrap()],
    }
}

#[tokio::test]
async fn token_is_made_listed_and_revoked_over_the_socket() {
    let fixture = Fixture::new();
    fixture.start().unwrap();
    let client = fixture.client().await.unwrap();

    let created = client
        .create_token(&token_request("worker-1"))
        .await
        .unwrap();
    assert_eq!(
        created.command,
        format!(
            "tunnel-agent run --server tunnel.example:10262 --node-name worker-1 --token {}",
            created.token
        )
    );
    assert!(!format!("{created:?}").contains(&created.token));
    let known = fixture.state.nodes.snapshot();
    assert_eq!(
        known[&token_request("worker-1").node].addresses,
        token_request("worker-1").ips
    );

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
    let fixture = Fixture::new();
    fixture.start().unwrap();
    let client = fixture.client().await.unwrap();
    assert_eq!(client.ca().await.unwrap(), fixture.state.ca.root_pem());
    assert_eq!(client.nodes().await.unwrap()[0].node, "worker-9");
    fixture
        .state
        .nodes
        .record(&"worker-1".parse().unwrap(), &[]);
    assert!(
        client
            .forget_node(&"worker-1".parse().unwrap())
            .await
            .unwrap()
    );
    assert!(
        !client
            .forget_node(&"worker-1".parse().unwrap())
            .await
            .unwrap()
    );
    let connected = client.forget_node(&"worker-9".parse().unwrap()).await;
    let message = connected.unwrap_err().to_string();
    assert!(message.contains("worker-9 is connected"), "{message}");
    fixture.shutdown.finish().await;
}

#[tokio::test]
async fn refusals_carry_their_reason() {
    let fixture = Fixture::new();
    fixture.start().unwrap();
    let client = fixture.client().await.unwrap();
    let forever = CreateToken {
        ttl_seconds: u64::MAX,
        ..token_request("worker-1")
    };
    let error = client.create_token(&forever).await.unwrap_err();
    assert!(error.to_string().contains("365 days"), "{error}");
    fixture.shutdown.finish().await;
}

#[tokio::test]
async fn socket_is_private_exclusive_and_gone_at_the_end() {
    let fixture = Fixture::new();
    assert!(fixture.client().await.is_none());
    fixture.start().unwrap();
    let path = fixture.scratch.0.admin_socket();
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    let second = fixture.start().unwrap_err().to_string();
    assert!(second.contains("another tunnel-server runs"), "{second}");
    assert!(
        fixture.client().await.is_some(),
        "the first one still serves"
    );
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
    let error = fixture.start().unwrap_err().to_string();
    assert!(error.contains("admin.sock"), "{error}");
    assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
}

#[tokio::test]
async fn no_token_is_made_where_it_would_be_of_no_use() {
    let mut fixture = Fixture::new();
    fixture.state.can_issue = false;
    fixture.start().unwrap();
    let client = fixture.client().await.unwrap();
    let error = client
        .create_token(&token_request("worker-1"))
        .await
        .unwrap_err();
    let text = error.to_string();
    for words in ["--agent-ca", "culvert://agent/worker-1", "--cert-file"] {
        assert!(text.contains(words), "{text}");
    }
    assert!(fixture.state.tokens.list(SystemTime::now()).is_empty());
}

#[test]
fn tokens_are_taken_back_before_the_certificates_are_revoked() {
    let fixture = Fixture::new();
    let created = create_token(&fixture.state, token_request("worker-1"));
    created.unwrap_or_else(|refusal| panic!("{}", refusal.problem));
    let node: NodeName = "worker-1".parse().unwrap();
    let AdminState {
        revocations,
        tokens,
        ..
    } = &fixture.state;
    // The first change waits here for the lock on its file.
    let held = fixture.scratch.0.lock_files().unwrap();
    std::thread::scope(|scope| {
        let revoking = scope.spawn(|| revoke_node(revocations, tokens, &node));
        let is_token_back = || tokens.list(SystemTime::now())[0].state == TokenState::Revoked;
        while !is_token_back() && revocations.of_node(&node).is_none() {
            std::thread::yield_now();
        }
        let came_first = (is_token_back(), revocations.of_node(&node));
        drop(held);
        assert_eq!(revoking.join().unwrap().unwrap(), 1);
        assert_eq!(came_first, (true, None));
    });
    assert!(revocations.of_node(&node).is_some());
}
