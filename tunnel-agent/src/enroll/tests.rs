use tunnel_process::meta::Readiness;
use tunnel_proto::wire::code::EnrollCode;
use tunnel_proto::wire::enroll::EnrollReply;

use super::*;
use crate::config::Secret;
use crate::proxy::testing::FakeProxy;
use crate::testing::server::Server;
use crate::testing::{Ca, ScratchDir, stored};

const LONG: Duration = Duration::from_secs(10);

fn enrollment(server: &Server, token: JoinToken, scratch: &ScratchDir) -> Enrollment {
    Enrollment {
        servers: vec![server.address().to_string().parse().unwrap()],
        proxy: ProxyChoice::default(),
        node: "worker-1".parse().unwrap(),
        proof: ProofSource::Token(TokenSource::Inline(token), None),
        ca: CaFile::channel(None).1,
        store: CredentialStore::open(scratch.path()).unwrap(),
        statuses: Arc::new(SessionStatuses::new(Readiness::default())),
        within: LONG,
    }
}

fn roots(server: &Server) -> TrustRoots {
    TrustRoots::new(vec![server.ca.der().clone()]).unwrap()
}

/// Returns the first attempt's result, and whether the server received a request.
async fn once(
    enrollment: &Enrollment,
    server: &Server,
    answer: impl FnOnce(EnrollRequest) -> Option<EnrollReply>,
) -> (Result<Credentials, EnrollError>, io::Result<()>) {
    let mut rotation = EndpointRotation::default();
    let attempt = attempt(enrollment, &mut rotation);
    let both = async { tokio::join!(attempt, server.enrollment(answer)) };
    timeout(LONG, both).await.unwrap()
}

/// Issues worker-1's certificate to the key in the directory.
fn issue(server: &Server, scratch: &ScratchDir) -> Option<EnrollReply> {
    Some(server.issue(scratch.path(), "culvert://agent/worker-1"))
}

#[tokio::test]
async fn certificate_for_our_key_and_name_is_stored() {
    let (server, scratch) = (Server::start().await, ScratchDir::new().unwrap());
    let enrollment = enrollment(&server, server.token(), &scratch);
    let (enrolled, served) = once(&enrollment, &server, |request| {
        assert_eq!(*request.token, server.token().reveal());
        assert_eq!(request.node_name.as_str(), "worker-1");
        assert!(!request.csr.is_empty());
        issue(&server, &scratch)
    })
    .await;
    served.unwrap();
    enrolled.unwrap();
    stored(scratch.path());
}

#[tokio::test]
async fn server_of_another_ca_gets_no_byte_of_the_token() {
    let (server, other, scratch) = (
        Server::start().await,
        Server::start().await,
        ScratchDir::new().unwrap(),
    );
    let enrollment = enrollment(&server, other.token(), &scratch);
    let (enrolled, served) = once(&enrollment, &server, |_| panic!("a request arrived")).await;
    served.unwrap_err();
    let error = enrolled.unwrap_err();
    assert!(matches!(error, EnrollError::OtherCa { .. }), "{error:?}");
    assert!(error.is_retryable());
    let text = causes(&error);
    let advice = "the token pins another CA, and nothing secret was sent; create a new token on \
                  this server: tunnel-server token create --node worker-1";
    assert!(text.contains(advice), "{text}");
}

#[tokio::test]
async fn configured_ca_replaces_the_pin() {
    let (server, other, scratch) = (
        Server::start().await,
        Server::start().await,
        ScratchDir::new().unwrap(),
    );
    let mut enrollment = enrollment(&server, other.token(), &scratch);
    enrollment.ca = CaFile::channel(Some(roots(&server))).1;
    let (enrolled, _) = once(&enrollment, &server, |_| issue(&server, &scratch)).await;
    enrolled.unwrap();
}

/// Returns an enrollment whose server has a name that only the proxy can resolve.
fn behind(fake_proxy: &FakeProxy, server: &Server, scratch: &ScratchDir) -> Enrollment {
    let servers = vec!["cloud.invalid:10262".parse().unwrap()];
    let url = Secret(format!("http://me:hunter2@{}", fake_proxy.address()));
    Enrollment {
        proxy: ProxyChoice::decide(Some(&url), None, &servers).unwrap(),
        servers,
        ..enrollment(server, server.token(), scratch)
    }
}

#[tokio::test]
async fn refusal_and_silence_of_a_proxy_are_reported_and_retried() {
    let (server, scratch) = (Server::start().await, ScratchDir::new().unwrap());
    let fake_proxy = FakeProxy::start().await;
    let mut enrollment = behind(&fake_proxy, &server, &scratch);
    let mut rotation = EndpointRotation::default();
    let refuse = fake_proxy.answer(b"HTTP/1.1 407 No\r\n\r\n");
    let both = async { tokio::join!(attempt(&enrollment, &mut rotation), refuse) };
    let error = timeout(LONG, both).await.unwrap().0.unwrap_err();
    assert!(error.is_retryable());
    let text = causes(&error);
    let proxy = fake_proxy.address();
    let begin = format!("cloud.invalid:10262 through proxy {proxy}: cannot connect");
    assert!(text.starts_with(&begin), "{text}");
    assert!(text.contains("407 No"), "{text}");
    assert!(!format!("{text} {error:?}").contains("hunter2"));

    enrollment.within = Duration::from_millis(20);
    let error = timeout(LONG, attempt(&enrollment, &mut rotation)).await;
    let error = error.unwrap().unwrap_err();
    assert!(matches!(error, EnrollError::Connect { .. }), "{error:?}");
    assert!(error.is_retryable());
}

#[tokio::test]
async fn every_attempt_moves_on_to_the_next_server_and_address() {
    let (server, scratch) = (Server::start().await, ScratchDir::new().unwrap());
    let mut enrollment = enrollment(&server, server.token(), &scratch);
    let names = ["127.0.0.1:1", "does-not-exist.invalid:2", "[::1]:3"];
    enrollment.servers = names.map(|name| name.parse().unwrap()).to_vec();
    let mut rotation = EndpointRotation::default();
    for expected in [Some(names[0]), None, Some(names[2]), Some(names[0])] {
        let endpoint = rotation.next(&enrollment).await;
        let endpoint = endpoint.ok().map(|endpoint| endpoint.to_string());
        assert_eq!(endpoint.as_deref(), expected);
    }
    enrollment.servers.clear();
    let error = rotation.next(&enrollment).await.unwrap_err();
    assert!(matches!(error, ResolveError::NoServer), "{error}");
}

#[tokio::test]
async fn refusal_says_what_to_do() {
    let (server, scratch) = (Server::start().await, ScratchDir::new().unwrap());
    let enrollment = enrollment(&server, server.token(), &scratch);
    for (code, retryable, words) in [
        (EnrollCode::TokenUsed, false, "create a new token"),
        (EnrollCode::TokenExpired, false, "create a new token"),
        (EnrollCode::WrongNode, false, "--node-name"),
        (EnrollCode::Unavailable, true, "refused here"),
    ] {
        let refused = EnrollReply::Refused(code, "refused here".into());
        let (enrolled, _) = once(&enrollment, &server, |_| Some(refused)).await;
        let error = enrolled.unwrap_err();
        assert_eq!(error.is_retryable(), retryable);
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[tokio::test]
async fn answers_for_another_node_key_or_ca_are_not_stored() {
    let (server, other, scratch) = (
        Server::start().await,
        Server::start().await,
        ScratchDir::new().unwrap(),
    );
    let enrollment = enrollment(&server, server.token(), &scratch);
    let foreign_key = KeyPair::generate().unwrap();
    let uri = "culvert://agent/worker-1";
    enrollment.store.key().unwrap();
    let issue = |server: &Server, uri| server.issue(scratch.path(), uri);
    for (reply, words) in [
        (issue(&server, "culvert://agent/worker-2"), "another node"),
        (issue(&server, "culvert://server"), "another node"),
        (server.ca.reply(&foreign_key, uri), "another key"),
        (issue(&other, uri), "token pins"),
    ] {
        let (enrolled, _) = once(&enrollment, &server, |_| Some(reply)).await;
        let error = enrolled.unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
        assert!(!scratch.path().join("agent.crt").exists());
    }
}

#[tokio::test]
async fn lost_answer_is_asked_for_again_with_the_same_key() {
    let (server, scratch) = (Server::start().await, ScratchDir::new().unwrap());
    let enrollment = enrollment(&server, server.token(), &scratch);
    let serving = async {
        let read = || std::fs::read(scratch.path().join("agent.key")).unwrap();
        let mut first = Vec::new();
        let lose = |_| {
            first = read();
            None
        };
        server.enrollment(lose).await.unwrap();
        let answer = |_| {
            assert_eq!(read(), first);
            issue(&server, &scratch)
        };
        server.enrollment(answer).await.unwrap();
    };
    let both = async { tokio::join!(enroll(&enrollment), serving) };
    timeout(LONG, both).await.unwrap().0.unwrap();
}

/// The ConfigMap with the servers' CA is mounted, and the kubelet replaces it some time after the servers
/// have another CA. Meanwhile an operator has replaced the file of the token.
#[tokio::test]
async fn each_attempt_uses_the_roots_and_the_token_of_its_time() {
    let (server, old, scratch) = (
        Server::start().await,
        Server::start().await,
        ScratchDir::new().unwrap(),
    );
    let token_file = scratch.path().join("token");
    std::fs::write(&token_file, old.token().reveal()).unwrap();
    let source = TokenSource::File(token_file.clone());
    let (ca_sender, ca) = CaFile::channel(Some(roots(&old)));
    let ended = SystemTime::now() + Duration::from_secs(3600);
    let enrollment = Enrollment {
        proof: ProofSource::Token(source, Some(ended)),
        ca,
        ..enrollment(&server, server.token(), &scratch)
    };
    let mut backoff = reenroll_backoff(Duration::from_millis(20));
    let serving = async {
        for _ in 0..3 {
            let refused = server.enrollment(|_| panic!("a request arrived")).await;
            refused.unwrap_err();
        }
        std::fs::write(&token_file, server.token().reveal()).unwrap();
        ca_sender.send_replace(Some(roots(&server)));
        let answer = |request: EnrollRequest| {
            assert_eq!(*request.token, server.token().reveal());
            issue(&server, &scratch)
        };
        server.enrollment(answer).await.unwrap();
    };
    let both = async { tokio::join!(enroll_again(&enrollment, &mut backoff), serving) };
    let enrolled = timeout(LONG, both).await.unwrap().0;
    assert_eq!(enrolled.roots.certificates(), roots(&server).certificates());
}

#[test]
fn waits_before_another_enrollment_are_any_up_to_a_minute_doubling_to_ten() {
    let minutes = |count: u64| Duration::from_secs(count * 60);
    let mut backoff = reenroll_backoff(minutes(1));
    for wait in [1, 2, 4, 8, 10, 10] {
        assert_eq!(backoff.next(1.0), minutes(wait));
    }
    backoff.restart();
    assert_eq!(backoff.next(0.0), Duration::ZERO);
}

/// Returns the certificate that the server issued to the agent before, for the key in the
/// directory.
fn ended(server: &Server, scratch: &ScratchDir) -> Credentials {
    let store = CredentialStore::open(scratch.path()).unwrap();
    let key = store.key().unwrap();
    let Some(EnrollReply::Issued { chain, roots }) = issue(server, scratch) else {
        panic!("refused")
    };
    Credentials::issued(Arc::new(key), &chain, &roots).unwrap()
}

fn late(server: &Server, ended: Credentials, scratch: &ScratchDir) -> Enrollment {
    Enrollment {
        proof: ProofSource::ExpiredCertificate(Box::new(ended)),
        ..enrollment(server, server.token(), scratch)
    }
}

/// The stored certificate is valid by the clock of this host, but the server reports it as expired.
#[tokio::test]
async fn ended_certificate_is_not_renewed_by_itself_but_by_one_that_ends_later() {
    let (server, scratch) = (Server::start().await, ScratchDir::new().unwrap());
    let mut ended = ended(&server, &scratch);
    let stored = ended.own.cert[0].clone();
    let store = CredentialStore::open(scratch.path()).unwrap();
    store.save(&ended).unwrap();
    let renewal = late(&server, ended.clone(), &scratch);
    let (renewed, served) = once(&renewal, &server, |request| {
        assert!(request.proof.is_some());
        issue(&server, &scratch)
    })
    .await;
    served.unwrap();
    assert_ne!(renewed.unwrap().own.cert[0], stored);

    ended.not_after = SystemTime::now() - Duration::from_secs(1);
    let late = late(&server, ended, &scratch);
    let found = timeout(LONG, attempt(&late, &mut EndpointRotation::default())).await;
    let found = found.unwrap().unwrap();
    assert_eq!(found.own.cert[0], stored);
}

#[tokio::test]
async fn directory_that_cannot_be_used_stops_a_token_but_no_renewal() {
    let (server, scratch) = (Server::start().await, ScratchDir::new().unwrap());
    let ended = ended(&server, &scratch);
    let by_token = enrollment(&server, server.token(), &scratch);
    let late = late(&server, ended, &scratch);
    let path = scratch.path().join("enrol.lock");
    let _absent = std::fs::remove_file(&path);
    std::fs::create_dir(&path).unwrap();
    let enrolled = attempt(&by_token, &mut EndpointRotation::default()).await;
    let error = enrolled.unwrap_err();
    assert!(matches!(error, EnrollError::Credentials(_)), "{error:?}");
    let (renewed, served) = once(&late, &server, |_| issue(&server, &scratch)).await;
    served.unwrap();
    renewed.unwrap();
}

/// A loss of power leaves empty files, files of zeros or parts of them.
#[tokio::test]
async fn stored_files_that_lost_their_content_are_replaced_by_the_token() {
    let (server, scratch) = (Server::start().await, ScratchDir::new().unwrap());
    let enrollment = enrollment(&server, server.token(), &scratch);
    let (enrolled, _) = once(&enrollment, &server, |_| issue(&server, &scratch)).await;
    enrolled.unwrap();
    for name in ["agent.crt", "ca.crt", "agent.key"] {
        for content in ["", "\0\0\0\0", "-----BEGIN CERT"] {
            std::fs::write(scratch.path().join(name), content).unwrap();
            let (enrolled, served) = once(&enrollment, &server, |_| issue(&server, &scratch)).await;
            served.unwrap();
            enrolled.unwrap_or_else(|error| panic!("{name} {content:?}: {error}"));
            let now = SystemTime::now();
            let stored = enrollment.store.load(&enrollment.node, None, now);
            assert!(matches!(stored, Ok(Stored::Valid(_))), "{name} {content:?}");
        }
    }
}

/// A rebuilt server has another CA, which only the token pins.
#[tokio::test]
async fn token_is_tried_when_the_server_has_another_ca() {
    let (server, old, scratch) = (
        Server::start().await,
        Server::start().await,
        ScratchDir::new().unwrap(),
    );
    let ended = ended(&old, &scratch);
    let by_token = enrollment(&server, server.token(), &scratch);
    let late = late(&server, ended, &scratch);
    let serving = async {
        let refused = server.enrollment(|_| panic!("a proof arrived")).await;
        refused.unwrap_err();
        let answer = |request: EnrollRequest| {
            assert_eq!(*request.token, server.token().reveal());
            issue(&server, &scratch)
        };
        server.enrollment(answer).await.unwrap();
    };
    let both = async { tokio::join!(renew_or_enroll(&late, &by_token), serving) };
    timeout(LONG, both).await.unwrap().0.unwrap();
    assert!(scratch.path().join("agent.crt").exists());
}

#[tokio::test]
async fn token_that_is_refused_does_not_end_a_renewal_that_may_still_work() {
    let (server, scratch) = (Server::start().await, ScratchDir::new().unwrap());
    let ended = ended(&server, &scratch);
    let by_token = enrollment(&server, server.token(), &scratch);
    let late = late(&server, ended, &scratch);
    let serving = async {
        server.enrollment(|_| None).await.unwrap();
        let refused = EnrollReply::Refused(EnrollCode::TokenExpired, "long ago".into());
        server.enrollment(|_| Some(refused)).await.unwrap();
        let answer = |request: EnrollRequest| {
            assert!(request.proof.is_some());
            issue(&server, &scratch)
        };
        server.enrollment(answer).await.unwrap();
    };
    let both = async { tokio::join!(renew_or_enroll(&late, &by_token), serving) };
    timeout(LONG, both).await.unwrap().0.unwrap();
}

/// Who has the certificate of one server, but not the CA, brings no CA of its own.
#[tokio::test]
async fn answer_with_a_root_that_no_trusted_ca_signed_is_refused_and_a_signed_one_is_taken() {
    let (server, own, scratch) = (Server::start().await, Ca::new(), ScratchDir::new().unwrap());
    let by_token = enrollment(&server, server.token(), &scratch);
    let late = late(&server, ended(&server, &scratch), &scratch);
    let answer = |issuer: &Ca, roots: Vec<Vec<u8>>| {
        let EnrollReply::Issued { chain, .. } = server.issue_by(issuer, scratch.path()) else {
            panic!("refused")
        };
        Some(EnrollReply::Issued { chain, roots })
    };
    let both = vec![server.ca.der().to_vec(), own.der().to_vec()];
    let signed = [both.clone(), vec![server.ca.cross_sign(&own).to_vec()]].concat();
    for enrollment in [&late, &by_token] {
        for issuer in [&own, &server.ca] {
            let (enrolled, _) = once(enrollment, &server, |_| answer(issuer, both.clone())).await;
            let error = enrolled.unwrap_err().to_string();
            assert!(
                error.contains("is not signed by a CA that this agent trusts"),
                "{error}"
            );
        }
        assert!(!scratch.path().join("agent.crt").exists());
        let (enrolled, _) = once(enrollment, &server, |_| answer(&own, signed.clone())).await;
        enrolled.unwrap();
    }
}
