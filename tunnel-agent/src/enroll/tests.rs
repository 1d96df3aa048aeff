use tokio::task::JoinSet;
use tunnel_proto::wire::enroll::EnrollReply;

use super::*;
use crate::testing::Scratch;
use crate::testing::server::Server;

const LONG: Duration = Duration::from_secs(10);

fn enrolment(server: &Server, token: JoinToken, scratch: &Scratch) -> Enrolment {
    Enrolment {
        servers: vec![server.address().to_string().parse().unwrap()],
        node: "worker-1".parse().unwrap(),
        token,
        ca: None,
        store: Store::open(scratch.path()).unwrap(),
        within: LONG,
    }
}

/// The first attempt's result, and whether the server got a request.
async fn once(
    enrolment: &Enrolment,
    server: &Server,
    answer: impl FnOnce(EnrollRequest) -> Option<EnrollReply>,
) -> (Result<Credentials, EnrollError>, io::Result<()>) {
    let mut endpoints = Endpoints::default();
    let attempt = attempt(enrolment, &mut endpoints);
    timeout(LONG, async {
        tokio::join!(attempt, server.enrolment(answer))
    })
    .await
    .unwrap()
}

#[tokio::test]
async fn certificate_for_our_key_and_name_is_kept() {
    let (server, scratch) = (Server::start().await, Scratch::new());
    let enrolment = enrolment(&server, server.token(), &scratch);
    let (enrolled, served) = once(&enrolment, &server, |request| {
        assert_eq!(request.token, server.token().reveal());
        assert_eq!(request.node_name.as_str(), "worker-1");
        assert!(!request.csr.is_empty());
        Some(server.issue(scratch.path(), "culvert://agent/worker-1"))
    })
    .await;
    served.unwrap();
    enrolled.unwrap();
    let stored = enrolment
        .store
        .load(&enrolment.node, None, SystemTime::now());
    assert!(matches!(stored, Ok(Stored::Valid(_))));
}

#[tokio::test]
async fn server_of_another_ca_gets_no_byte_of_the_token() {
    let (server, other, scratch) = (Server::start().await, Server::start().await, Scratch::new());
    let enrolment = enrolment(&server, other.token(), &scratch);
    let (enrolled, served) = once(&enrolment, &server, |_| panic!("a request arrived")).await;
    served.unwrap_err();
    let error = enrolled.unwrap_err();
    assert!(matches!(error, EnrollError::Tls { .. }), "{error:?}");
    assert!(error.is_retryable());
}

#[tokio::test]
async fn given_ca_replaces_the_pin() {
    let (server, other, scratch) = (Server::start().await, Server::start().await, Scratch::new());
    let mut enrolment = enrolment(&server, other.token(), &scratch);
    enrolment.ca = Some(vec![server.ca.der().clone()]);
    let (enrolled, _) = once(&enrolment, &server, |_| {
        Some(server.issue(scratch.path(), "culvert://agent/worker-1"))
    })
    .await;
    enrolled.unwrap();
}

#[tokio::test]
async fn refusal_says_what_to_do() {
    let (server, scratch) = (Server::start().await, Scratch::new());
    let enrolment = enrolment(&server, server.token(), &scratch);
    for (code, retryable, words) in [
        (EnrollCode::TokenUsed, false, "create a new token"),
        (EnrollCode::TokenExpired, false, "create a new token"),
        (EnrollCode::WrongNode, false, "--node-name"),
        (EnrollCode::Unavailable, true, "refused here"),
    ] {
        let (enrolled, _) = once(&enrolment, &server, |_| {
            Some(EnrollReply::Refused(code, "refused here".into()))
        })
        .await;
        let error = enrolled.unwrap_err();
        assert_eq!(error.is_retryable(), retryable);
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[tokio::test]
async fn answers_for_another_node_key_or_ca_are_not_kept() {
    let (server, other, scratch) = (Server::start().await, Server::start().await, Scratch::new());
    let enrolment = enrolment(&server, server.token(), &scratch);
    let foreign_key = KeyPair::generate().unwrap();
    let uri = "culvert://agent/worker-1";
    let foreign = EnrollReply::Issued {
        chain: vec![server.ca.issue(&foreign_key, uri).to_vec()],
        roots: vec![server.ca.der().to_vec()],
    };
    enrolment.store.key().unwrap();
    for (reply, words) in [
        (
            server.issue(scratch.path(), "culvert://agent/worker-2"),
            "another node",
        ),
        (
            server.issue(scratch.path(), "culvert://server"),
            "another node",
        ),
        (foreign, "another key"),
        (other.issue(scratch.path(), uri), "token pins"),
    ] {
        let (enrolled, _) = once(&enrolment, &server, |_| Some(reply)).await;
        let error = enrolled.unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
        assert!(!scratch.path().join("agent.crt").exists());
    }
}

#[tokio::test]
async fn lost_answer_is_asked_for_again_with_the_same_key() {
    let (server, scratch) = (Arc::new(Server::start().await), Arc::new(Scratch::new()));
    let enrolment = enrolment(&server, server.token(), &scratch);
    let mut serving = JoinSet::new();
    let (issuer, dir) = (server.clone(), scratch.clone());
    serving.spawn(async move {
        let read = || std::fs::read(dir.path().join("agent.key")).unwrap();
        let mut first = Vec::new();
        issuer
            .enrolment(|_| {
                first = read();
                None
            })
            .await
            .unwrap();
        issuer
            .enrolment(|_| {
                assert_eq!(read(), first);
                Some(issuer.issue(dir.path(), "culvert://agent/worker-1"))
            })
            .await
            .unwrap();
    });
    timeout(LONG, enroll(&enrolment)).await.unwrap().unwrap();
    serving.join_next().await.unwrap().unwrap();
}
