use std::os::unix::fs::PermissionsExt as _;

use clap::Parser;
use tunnel_process::shutdown::Shutdown;
use tunnel_process::terminal::Answer;

use super::*;
use crate::admin::{self, AdminState};
use crate::testing::assert_contains;
use tunnel_ca::tokens::{TokenInfo, TokenState};
use tunnel_store::data_dir::testing::Scratch;
use tunnel_store::known_nodes::NodeMap;
use tunnel_store::state_store::{OnDamage, RowChange, Table};

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
    let words = format!("tunnel-server {line} --data-dir {dir}");
    let words = words.split(' ');
    match Cli::try_parse_from(words).unwrap() {
        Cli::Token(verb) => verb.execute().await,
        Cli::Nodes(args) => {
            let mut list = Vec::new();
            let output = args.execute(&mut list).await?;
            let list = String::from_utf8(list).unwrap();
            Ok(VerbOutput {
                out: list + &output.out,
                ..output
            })
        }
        Cli::Ca(args) => args.execute(|_question| Ok(Answer::NoTerminal)).await,
        Cli::Healthcheck(_) => unreachable!("has no data directory"),
    }
}

async fn out(scratch: &Scratch, line: &str) -> String {
    verb(scratch, line).await.unwrap().out
}

async fn error(scratch: &Scratch, line: &str) -> VerbError {
    verb(scratch, line).await.err().unwrap()
}

async fn tokens(scratch: &Scratch) -> Vec<TokenInfo> {
    let document = out(scratch, "token list -o json").await;
    let document: serde_json::Value = serde_json::from_str(&document).unwrap();
    assert_eq!(document["schemaVersion"], 1);
    serde_json::from_value(document["tokens"].clone()).unwrap()
}

fn start(scratch: &Scratch, shutdown: &Shutdown) -> AdminState {
    let dir = &scratch.0;
    let mut state = admin::tests::state(dir);
    state.sources.sessions = None;
    let (nodes, routes) = (state.nodes.clone(), state.sources.routes.clone());
    let (mut changed, mut handled) = (nodes.changed(), NodeMap::default());
    shutdown.spawn_service(async move {
        while changed.changed().await.is_ok() {
            routes.follow_known(nodes.snapshot(), &mut handled);
        }
    });
    state.node_labels = vec!["zone".into()];
    state.advertised = vec!["running.example:10262".into()];
    admin::start(state.clone(), dir, shutdown).unwrap();
    state
}

/// Runs the commands for the life of a token and its node.
async fn tour(scratch: &Scratch, server: &str) {
    let create = "token create --offline --node Worker-1 --ip 192.168.33.221 --ttl 2h";
    let created = verb(scratch, create).await.unwrap();
    let token = created.out.trim_end();
    // The token is alone on standard output.
    assert_eq!(token.split('.').count(), 3);
    let command = format!("--server {server} --node-name worker-1 --token-file -");
    assert_contains(&created.err, &format!("tunnel-agent join {command}"));
    assert!(!created.err.contains(token), "{}", created.err);
    out(scratch, "token create --node worker-2 --ip 192.168.33.221").await;

    let list = tokens(scratch).await;
    assert_eq!(list.len(), 2);
    let id = token.split('.').next().unwrap();
    let ours = list.iter().find(|token| token.id == id).unwrap();
    assert_eq!(ours.expires, ours.created + Duration::from_secs(7200));
    assert!(out(scratch, "token list").await.contains(id));
    out(scratch, &format!("token revoke {id}")).await;
    let list = tokens(scratch).await;
    let ours = list.iter().find(|token| token.id == id).unwrap();
    assert_eq!(ours.state, TokenState::Revoked);
    let unknown = error(scratch, "token revoke nosuchtoken1").await;
    assert!(matches!(unknown, VerbError::UnknownToken(_)));

    let shared = "192.168.33.221: reach by name, since it is shared by worker-1, worker-2";
    assert_contains(&out(scratch, "nodes").await, shared);
    out(scratch, "nodes forget worker-2").await;
    let again = error(scratch, "nodes forget worker-2").await;
    assert!(matches!(again, VerbError::UnknownNodes(_)));
    let unknown = error(scratch, "nodes worker-1 worker-9").await;
    assert!(matches!(unknown, VerbError::UnknownNodes(_)));
    assert_eq!(
        out(scratch, "nodes -o name --away worker-1").await,
        "worker-1\n"
    );
    let document = out(scratch, "nodes -o json").await;
    let document: serde_json::Value = serde_json::from_str(&document).unwrap();
    let nodes = &document["nodes"];
    assert_eq!(nodes.as_array().unwrap().len(), 1);
    assert_eq!(nodes[0]["node"], "worker-1");
    assert_eq!(nodes[0]["connected"], false);
    assert_eq!(nodes[0]["connectedSince"], serde_json::Value::Null);
    assert_eq!(nodes[0]["addresses"][0], "192.168.33.221");

    assert_contains(
        &out(scratch, "nodes revocations").await,
        "no node is revoked",
    );
    let revoked = out(scratch, "nodes revoke worker-1 worker-2").await;
    let until = "until 'tunnel-server nodes unrevoke NAME' no certificate";
    assert_contains(&revoked, until);
    let refused = error(scratch, "token create --node worker-1").await;
    assert_contains(&refused, "nodes unrevoke worker-1");
    let revocations = out(scratch, "nodes revocations -o json").await;
    let revocations: serde_json::Value = serde_json::from_str(&revocations).unwrap();
    assert_eq!(revocations["schemaVersion"], 1);
    assert_eq!(revocations["revocations"][0]["node"], "worker-1");
    assert_contains(&out(scratch, "nodes revocations").await, "worker-1");
    assert_contains(
        &out(scratch, "nodes reissue worker-1").await,
        "token create --node worker-1",
    );
    // What is not revoked is named, and the others are done.
    let ended = out(scratch, "nodes unrevoke worker-1 worker-9 worker-2").await;
    assert!(ended.contains("worker-1 is no longer") && ended.contains("worker-2 is no longer"));
    let again = error(scratch, "nodes unrevoke worker-1").await;
    assert!(matches!(again, VerbError::NotRevoked(_)));
    assert_eq!(again.exit_code(), 1);
    assert_contains(
        &out(scratch, "nodes revocations").await,
        "no node is revoked",
    );

    let stored = std::fs::read_to_string(scratch.0.ca_certificate());
    assert_eq!(out(scratch, "ca").await, stored.unwrap());
}

#[tokio::test]
async fn verbs_work_on_the_files_when_no_server_runs() {
    let scratch = Scratch::new();
    let advertised = ["kept.example:10262".to_owned()];
    scratch.0.set_advertised(&advertised).unwrap();
    tour(&scratch, &advertised[0]).await;
}

#[test]
fn store_is_printed_as_json_and_a_damaged_order_is_set_aside() {
    let scratch = Scratch::new();
    let store = scratch.0.store(OnDamage::Stop).unwrap();
    store.change(
        Table::Orders,
        vec![
            RowChange::upsert("worker-1", &"?"),
            RowChange::upsert("worker-2", &serde_json::json!({"order": {"counter": 7}})),
        ],
    );
    let dumped = || -> serde_json::Value {
        let mut out = Vec::new();
        data::dump(&store, &mut out).unwrap();
        serde_json::from_slice(&out).unwrap()
    };
    assert_eq!(dumped()["orders"]["worker-2"]["order"]["counter"], 7);
    assert_eq!(dumped()["nodes"], serde_json::json!({}));
    let repaired = data::repair(&scratch.0).unwrap();
    assert_contains(&repaired.out, "tunnel-server nodes revoke worker-1");
    assert!(!repaired.out.contains("worker-2"), "{}", repaired.out);
    assert!(dumped()["orders"]["worker-1"].is_null());
    assert!(dumped()["damaged"]["orders/worker-1"].is_string());
    drop(store);
    let again = data::repair(&scratch.0).unwrap();
    assert_contains(&again.out, "nothing is damaged");
}

#[tokio::test]
async fn directory_of_a_cluster_has_its_ca_and_nothing_that_could_be_changed() {
    let scratch = Scratch::new();
    let dir = &scratch.0;
    std::fs::write(dir.authority(), "{}").unwrap();
    let refused = error(&scratch, "ca").await;
    assert!(matches!(refused, VerbError::CaNotStored(_)), "{refused}");
    assert!(!dir.ca_key().exists(), "no other CA is made");
    std::fs::write(dir.ca_certificate(), "the cluster's\n").unwrap();
    assert_eq!(out(&scratch, "ca").await, "the cluster's\n");
    for line in ["ca export", "ca import ca.pem"] {
        let refused = error(&scratch, line).await;
        let is_in_cluster = matches!(refused, VerbError::CaInCluster(_));
        assert!(is_in_cluster, "{line}: {refused}");
    }
    for line in [
        "token create --node worker-1",
        "token list",
        "token revoke abcdef012345",
        "nodes revoke worker-1",
        "nodes unrevoke worker-1",
        "nodes reissue worker-1",
        "nodes revocations",
    ] {
        let refused = error(&scratch, line).await;
        let is_managed = matches!(refused, VerbError::ClusterManaged(_));
        assert!(is_managed, "{line}: {refused}");
        assert_contains(&refused, "Secrets");
    }
    assert!(!dir.state().exists());
}

#[tokio::test]
async fn ca_moves_to_another_directory_and_replaces_none_by_accident() {
    let (one, other) = (Scratch::new(), Scratch::new());
    let file = one.0.path().join("exported.pem");
    let file = file.to_str().unwrap();
    let pem = out(&one, "ca export").await;
    verb(&one, &format!("ca export {file}")).await.unwrap();
    assert_eq!(std::fs::read_to_string(file).unwrap(), pem);
    let again = error(&one, &format!("ca export {file}")).await;
    assert!(matches!(again, VerbError::FileExists(_)), "{again}");

    let import = format!("ca import {file}");
    let running = other.0.lock().unwrap();
    let refused = error(&other, &import).await;
    assert!(matches!(refused, VerbError::ServerRuns(_)), "{refused}");
    assert!(!other.0.ca_key().exists());
    drop(running);
    out(&other, &import).await;
    assert_eq!(out(&other, "ca").await, out(&one, "ca").await);
    assert_eq!(out(&other, "ca export").await, pem);
    assert_contains(&out(&other, &import).await, "already");

    let third = Scratch::new();
    let own = out(&third, "ca --offline").await;
    let refused = error(&third, &import).await;
    assert_contains(&refused, "--force");
    assert_eq!(out(&third, "ca").await, own);
    let words = ["tunnel-server", "ca", "import", file, "--data-dir"].into_iter();
    let args = Cli::try_parse_from(words.chain(third.0.path().to_str()));
    let Ok(Cli::Ca(args)) = args else {
        panic!("{args:?}");
    };
    let kept = args.clone().execute(|_question| Ok(Answer::No)).await;
    assert_contains(&kept.unwrap().out, "keeps");
    assert_eq!(out(&third, "ca").await, own);
    args.execute(|_question| Ok(Answer::Yes)).await.unwrap();
    assert_eq!(out(&third, "ca export").await, pem);
    let fourth = Scratch::new();
    out(&fourth, "ca --offline").await;
    out(&fourth, &format!("{import} --force")).await;
    assert_eq!(out(&fourth, "ca export").await, pem);
}

#[tokio::test]
async fn certificate_of_a_caller_comes_with_its_key_and_the_ca_of_the_server() {
    let scratch = Scratch::new();
    let refused = error(&scratch, "ca client alice").await;
    assert!(matches!(refused, VerbError::NoServer(_)), "{refused}");
    let own = out(&scratch, "ca --offline").await;
    let output = scratch.0.path().join("alice");
    let client = format!("ca client alice --days 30 -d {}", output.display());
    let made = verb(&scratch, &client).await.unwrap();
    let flag = format!(
        "--client-ca {}",
        scratch.0.client_ca_certificate().display()
    );
    assert_contains(&made.err, &flag);
    let file = |name: &str| std::fs::read_to_string(output.join(name)).unwrap();
    assert_eq!(file("server-ca.crt"), own);
    assert_contains(&file("alice.crt"), "BEGIN CERTIFICATE");
    assert_contains(&file("alice.key"), "PRIVATE KEY");
    let mode = std::fs::metadata(output.join("alice.key")).unwrap();
    assert_eq!(mode.permissions().mode() & 0o777, 0o600);
    // An existing key is not replaced.
    let again = error(&scratch, &client).await;
    assert!(matches!(again, VerbError::FileExists(_)), "{again}");
}

#[tokio::test]
async fn ca_is_rotated_through_the_running_server_only() {
    let scratch = Scratch::new();
    out(&scratch, "ca --offline").await;
    let refused = error(&scratch, "ca rotate").await;
    assert!(matches!(refused, VerbError::NotRunning(_)), "{refused}");
    let shutdown = Shutdown::new();
    let state = start(&scratch, &shutdown);
    let before = state.ca.root();
    assert_contains(&out(&scratch, "ca rotate --status").await, "stage: none");
    let refused = error(&scratch, "ca rotate --next").await;
    assert_contains(&refused, "'tunnel-server ca rotate' begins");
    assert_contains(&out(&scratch, "ca rotate").await, "stage: announced");
    assert_eq!(out(&scratch, "ca").await.matches("BEGIN").count(), 4);
    assert_contains(&out(&scratch, "ca rotate --next").await, "stage: issuing");
    assert_contains(
        &out(&scratch, "ca rotate --abort").await,
        "stage: returning",
    );
    assert_contains(&out(&scratch, "ca rotate --next --force").await, "none");
    assert_eq!(state.ca.roots(), [before]);
    shutdown.finish().await;
}

#[tokio::test]
async fn verbs_work_through_a_running_server() {
    let scratch = Scratch::new();
    let shutdown = Shutdown::new();
    let state = start(&scratch, &shutdown);
    tour(&scratch, "running.example:10262").await;
    // More than one request has room for.
    let names = (0..1100).map(|number| format!("n{number}.{}", ["a"; 60].concat()));
    let names = names.collect::<Vec<_>>().join(" ");
    let revoked = out(&scratch, &format!("nodes revoke {names}")).await;
    assert_eq!(revoked.matches(" revoked\n").count(), 1100);
    // Names in a file, of which two are listed and one is not revoked.
    let file = scratch.0.path().join("names");
    std::fs::write(&file, "# a site\nworker-1\nworker-3\n").unwrap();
    let file = file.display();
    let listed = verb(&scratch, &format!("nodes -o name -f {file}")).await;
    assert!(matches!(listed, Err(VerbError::UnknownNodes(_))));
    let revoked = verb(&scratch, &format!("nodes revoke worker-2 -f {file}"))
        .await
        .unwrap();
    assert_eq!(revoked.out.matches(" revoked\n").count(), 3);
    assert_contains(
        &revoked.err,
        "no node of this name is known: worker-2, worker-3;",
    );
    out(&scratch, &format!("nodes unrevoke --file {file}")).await;
    let forgotten = verb(&scratch, &format!("nodes forget -f {file}"))
        .await
        .unwrap();
    assert_eq!(forgotten.out, "node worker-1 forgotten\n");
    assert_contains(&forgotten.err, "no node has the name worker-3;");
    let listed = out(&scratch, "nodes revocations").await;
    assert_eq!(
        listed.lines().count(),
        1 + 1100 + 1,
        "in pages, with one header"
    );
    out(&scratch, "nodes -l !zone").await;
    let refused = error(&scratch, "nodes -l rack").await;
    assert_contains(&refused, "it stores only zone");
    assert_eq!(refused.exit_code(), 64);
    let known = state.tokens.list(SystemTime::now()).unwrap();
    assert_eq!(known.len(), 2, "the server knows them");
    let refused = error(&scratch, "token create --node a --ttl 1000d").await;
    assert_eq!(refused.exit_code(), 64);
    shutdown.finish().await;
    drop(state);
    assert_eq!(tokens(&scratch).await.len(), 2);
}

#[tokio::test]
async fn token_without_an_advertised_address_comes_with_a_hint() {
    let scratch = Scratch::new();
    let created = verb(&scratch, "token create --offline --node worker-1").await;
    assert_contains(&created.unwrap().err, "--advertise");
    let refused = error(&scratch, "token create --node a --ttl 0s").await;
    assert_eq!(refused.exit_code(), 64);
}

#[test]
fn bad_arguments_are_explained() {
    for (line, words) in [
        ("token create --node a_b", "not a DNS subdomain"),
        ("token create --node edge_gw_01", "edge-gw-01 would do"),
        ("token create --node a --ttl soon", "--ttl"),
        ("token create --node a --ip 300.0.0.1", "--ip"),
        ("token create", "--node"),
        ("nodes revoke", "<NAME>"),
        (
            "nodes -o yaml",
            "possible values: table, wide, json, name, ssh-config, ansible",
        ),
    ] {
        let words_in = ["tunnel-server"].into_iter().chain(line.split(' '));
        let error = Cli::try_parse_from(words_in).unwrap_err().to_string();
        assert!(error.contains(words), "{line}: {error}");
    }
}

#[tokio::test]
async fn directory_without_a_server_gets_no_ca_by_accident() {
    let scratch = Scratch::new();
    for line in ["token create --node worker-1", "ca"] {
        let refused = error(&scratch, line).await;
        assert!(matches!(refused, VerbError::NoServer(_)), "{refused}");
        assert_contains(&refused, "no tunnel-server runs with");
        assert_contains(&refused, "--offline");
        assert!(!scratch.0.ca_key().exists(), "{line}");
    }
    let missing = scratch.0.path().join("missing");
    let words = [
        "tunnel-server",
        "token",
        "create",
        "--node",
        "a",
        "--data-dir",
    ]
    .into_iter();
    let args = Cli::try_parse_from(words.chain(missing.to_str()));
    let Ok(Cli::Token(args)) = args else {
        panic!("{args:?}");
    };
    let refused = args.execute().await.err().unwrap();
    assert!(matches!(refused, VerbError::NoServer(_)), "{refused}");
    assert!(!missing.exists());
    for line in ["nodes", "nodes --selector zone"] {
        let listed = verb(&scratch, line).await.unwrap();
        let failure = listed.failure.unwrap();
        assert!(matches!(failure, VerbError::NotRunning(_)), "{line}");
        assert_contains(&failure, "no tunnel-server runs with");
    }
    out(&scratch, "ca --offline").await;
    out(&scratch, "token create --node worker-1").await;
}

#[tokio::test]
async fn looking_makes_no_data_directory() {
    let line = "tunnel-server nodes --data-dir /nonexistent/culvert";
    let args = Cli::try_parse_from(line.split(' '));
    let Ok(Cli::Nodes(args)) = args else {
        panic!("{args:?}");
    };
    let error = args.execute(&mut Vec::new()).await.err().unwrap();
    assert_contains(&error, "/nonexistent/culvert");
}

#[test]
fn command_line_is_consistent() {
    use clap::CommandFactory as _;
    Cli::command().debug_assert();
}
