use std::sync::Arc;

use clap::Parser;
use tunnel_proto::process::shutdown::Shutdown;

use super::*;
use crate::admin::{self, AdminState};
use crate::ca::tokens::{TokenInfo, TokenState};
use crate::store::data_dir::testing::Scratch;

#[derive(Parser, Debug)]
enum Cli {
    #[command(subcommand)]
    Token(TokenVerb),
    Nodes(NodesArgs),
    Ca(CaArgs),
    Healthcheck(HealthcheckArgs),
}

async fn verb(scratch: &Scratch, line: &str) -> Result<VerbOutput, VerbError> {
    let dir = scratch.0.path().to_str().unwrap();
    let words = ["tunnel-server"]
        .into_iter()
        .chain(line.split(' '))
        .chain(["--data-dir", dir]);
    match Cli::try_parse_from(words).unwrap() {
        Cli::Token(verb) => verb.execute().await,
        Cli::Nodes(args) => args.execute().await,
        Cli::Ca(args) => args.execute().await,
        Cli::Healthcheck(_) => unreachable!("has no data directory"),
    }
}

async fn out(scratch: &Scratch, line: &str) -> String {
    verb(scratch, line).await.unwrap().out
}

fn start(scratch: &Scratch, shutdown: &Shutdown) -> AdminState {
    let dir = &scratch.0;
    let nodes = Arc::new(KnownNodes::open(dir).unwrap());
    let listed = nodes.clone();
    let state = AdminState {
        revocations: Arc::new(Revocations::open(dir, true).unwrap()),
        ca: Arc::new(LocalCa::load_or_create(dir).unwrap()),
        tokens: Arc::new(TokenStore::open(dir).unwrap()),
        nodes,
        status: Arc::new(move || {
            stored_nodes(&listed)
                .iter()
                .map(|node| serde_json::json!(node))
                .collect()
        }),
        advertised: vec!["running.example:10262".into()],
        can_issue: true,
        tunnels: None,
    };
    admin::start(state.clone(), dir, shutdown).unwrap();
    state
}

/// Runs the commands for the life of a token and its node.
async fn tour(scratch: &Scratch, server: &str) {
    let created = verb(
        scratch,
        "token create --node Worker-1 --ip 192.168.33.221 --ttl 2h",
    )
    .await
    .unwrap();
    let token = created.out.trim_end();
    assert_eq!(
        token.split('.').count(),
        3,
        "the token alone on standard output"
    );
    let command =
        format!("tunnel-agent run --server {server} --node-name worker-1 --token {token}");
    assert!(created.err.contains(&command), "{}", created.err);
    out(scratch, "token create --node worker-2 --ip 192.168.33.221").await;

    let list: Vec<TokenInfo> =
        serde_json::from_str(&out(scratch, "token list -o json").await).unwrap();
    assert_eq!(list.len(), 2);
    let id = token.split('.').next().unwrap();
    let ours = list.iter().find(|token| token.id == id).unwrap();
    assert_eq!(ours.expires, ours.created + Duration::from_secs(7200));
    assert!(out(scratch, "token list").await.contains(id));
    out(scratch, &format!("token revoke {id}")).await;
    let list: Vec<TokenInfo> =
        serde_json::from_str(&out(scratch, "token list -o json").await).unwrap();
    assert!(
        list.iter()
            .any(|token| token.id == id && token.state == TokenState::Revoked)
    );
    let unknown = verb(scratch, "token revoke nosuchtoken1").await;
    assert!(matches!(unknown, Err(VerbError::UnknownToken(_))));

    let table = out(scratch, "nodes").await;
    let shared = "192.168.33.221 is the address of worker-1, worker-2: reach them by name";
    assert!(table.contains(shared), "{table}");
    out(scratch, "nodes forget worker-2").await;
    let again = verb(scratch, "nodes forget worker-2").await;
    assert!(matches!(again, Err(VerbError::UnknownNode(_))));
    let nodes: serde_json::Value =
        serde_json::from_str(&out(scratch, "nodes -o json").await).unwrap();
    assert_eq!(nodes.as_array().unwrap().len(), 1);
    assert_eq!(nodes[0]["node"], "worker-1");
    assert_eq!(nodes[0]["connected"], false);
    assert_eq!(nodes[0]["connectedSince"], serde_json::Value::Null);
    assert_eq!(nodes[0]["addresses"][0], "192.168.33.221");

    let pem = out(scratch, "ca").await;
    assert_eq!(
        pem,
        std::fs::read_to_string(scratch.0.ca_certificate()).unwrap()
    );
}

#[tokio::test]
async fn verbs_work_on_the_files_when_no_server_runs() {
    let scratch = Scratch::new();
    scratch
        .0
        .set_advertised(&["kept.example:10262".into()])
        .unwrap();
    tour(&scratch, "kept.example:10262").await;
}

#[tokio::test]
async fn directory_of_a_cluster_has_its_ca_and_nothing_that_could_be_changed() {
    let scratch = Scratch::new();
    let dir = &scratch.0;
    std::fs::write(dir.authority(), "{}").unwrap();
    let error = verb(&scratch, "ca").await.err().unwrap();
    assert!(matches!(error, VerbError::CaNotStored(_)), "{error}");
    assert!(!dir.ca_key().exists(), "no other CA is made");
    std::fs::write(dir.ca_certificate(), "the cluster's\n").unwrap();
    assert_eq!(out(&scratch, "ca").await, "the cluster's\n");
    for line in [
        "token create --node worker-1",
        "token list",
        "token revoke abcdef012345",
        "nodes revoke worker-1",
    ] {
        let error = verb(&scratch, line).await.err().unwrap();
        assert!(
            matches!(error, VerbError::ClusterManaged(_)),
            "{line}: {error}"
        );
        assert!(error.to_string().contains("Secrets"), "{error}");
    }
    assert!(!dir.tokens().exists() && !dir.revoked().exists());
}

#[tokio::test]
async fn verbs_work_through_a_running_server() {
    let scratch = Scratch::new();
    let shutdown = Shutdown::new();
    let state = start(&scratch, &shutdown);
    tour(&scratch, "running.example:10262").await;
    assert_eq!(
        state.tokens.list(SystemTime::now()).len(),
        2,
        "the server knows them"
    );
    let error = verb(&scratch, "token create --node a --ttl 1000d").await;
    assert_eq!(error.err().unwrap().exit_code(), 64);
    shutdown.finish().await;
    assert_eq!(
        out(&scratch, "token list -o json")
            .await
            .matches("\"id\"")
            .count(),
        2
    );
}

#[tokio::test]
async fn token_without_an_advertised_address_comes_with_a_hint() {
    let scratch = Scratch::new();
    let created = verb(&scratch, "token create --node worker-1")
        .await
        .unwrap();
    assert!(created.err.contains("--advertise"), "{}", created.err);
    let error = verb(&scratch, "token create --node a --ttl 0s")
        .await
        .err()
        .unwrap();
    assert_eq!(error.exit_code(), 64);
}

#[test]
fn bad_arguments_are_explained() {
    for (line, words) in [
        ("token create --node a_b", "not a DNS subdomain"),
        ("token create --node 10.0.0.1", "looks like an IP address"),
        ("token create --node a --ttl soon", "--ttl"),
        ("token create --node a --ip 300.0.0.1", "--ip"),
        ("token create", "--node"),
        ("nodes -o yaml", "possible values: table, json"),
    ] {
        let words_in = ["tunnel-server"].into_iter().chain(line.split(' '));
        let error = Cli::try_parse_from(words_in).unwrap_err().to_string();
        assert!(error.contains(words), "{line}: {error}");
    }
}

#[tokio::test]
async fn looking_makes_no_data_directory() {
    let args = Cli::try_parse_from([
        "tunnel-server",
        "nodes",
        "--data-dir",
        "/nonexistent/culvert",
    ]);
    let Ok(Cli::Nodes(args)) = args else {
        panic!("{args:?}");
    };
    let error = args.execute().await.err().unwrap();
    assert!(
        error.to_string().contains("/nonexistent/culvert"),
        "{error}"
    );
}

#[test]
fn command_line_is_consistent() {
    use clap::CommandFactory as _;
    Cli::command().debug_assert();
}
