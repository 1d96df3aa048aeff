use std::io::ErrorKind;
use std::time::Duration;

use rustls::RootCertStore;
use rustls_pki_types::PrivatePkcs8KeyDer;

use crate::client::{BodyEnd, ClientTls, Endpoint, Exchange, RawRequest, UpgradeClient, request};
use crate::eventually::eventually;
use crate::targets::{FakeKubelet, TargetTls, deterministic_bytes, sha256_hex};

#[tokio::test]
async fn serves_health_metrics_and_the_pages_of_an_exporter() {
    for (_kubelet, endpoint) in both_kinds().await {
        let health = request(endpoint.clone(), &RawRequest::get("a", "/healthz"))
            .await
            .unwrap();
        assert_eq!(health.text(), "ok");
        let metrics = request(endpoint.clone(), &RawRequest::get("a", "/metrics"))
            .await
            .unwrap();
        assert!(metrics.text().starts_with("# node node-a\n"));
        let until_close = request(endpoint, &RawRequest::get("a", "/close-delimited/100000"))
            .await
            .unwrap();
        assert_eq!(
            (until_close.body.len(), until_close.ended),
            (100_000, BodyEnd::CleanClose)
        );
    }
}

#[tokio::test]
async fn logs_begin_with_the_node_and_follow() {
    for (kubelet, endpoint) in both_kinds().await {
        let path = "/containerLogs/ns/pod/c?follow=true";
        let mut logs = Exchange::start(endpoint.clone(), &RawRequest::get("a", path))
            .await
            .unwrap();
        assert_eq!(logs.line().await.as_deref(), Some("node-a: log of pod/c"));
        assert_eq!(kubelet.emit("hello"), 1);
        assert_eq!(logs.line().await.as_deref(), Some("hello"));
        kubelet.end_follows();
        assert_eq!(logs.line().await, None);
        assert_eq!(logs.ended(), Some(&BodyEnd::CleanChunked));

        let whole = request(endpoint, &RawRequest::get("a", "/containerLogs/ns/pod/c"))
            .await
            .unwrap();
        assert_eq!(whole.text(), "node-a: log of pod/c\n");
    }
}

#[tokio::test]
async fn echo_returns_bulk_and_ends_after_our_end() {
    for (_kubelet, endpoint) in both_kinds().await {
        for client in both_protocols("/exec/ns/pod/c?command=cat&script=echo") {
            let early = client.followed_by("early ");
            let mut stream = early
                .connect(endpoint.clone())
                .await
                .unwrap()
                .switched()
                .unwrap();
            assert_eq!(stream.receive(6).await.unwrap(), b"early ");
            let bulk = deterministic_bytes(5, BULK);
            let echoed = stream.talk(&bulk).await.unwrap();
            assert_eq!(echoed.ended, BodyEnd::CleanClose);
            assert_eq!(echoed.sha256(), sha256_hex(&bulk));
        }
    }
}

#[tokio::test]
async fn answer_after_our_end_arrives_whole() {
    for (kubelet, endpoint) in both_kinds().await {
        for client in both_protocols("/attach/ns/pod/c?script=sink-then-send&bytes=3000000") {
            let mut stream = client
                .connect(endpoint.clone())
                .await
                .unwrap()
                .switched()
                .unwrap();
            stream.send(b"all of our input").await.unwrap();
            stream.finish().await.unwrap();
            let answer = stream.read_to_end().await;
            assert_eq!(answer.ended, BodyEnd::CleanClose);
            let (line, data) = answer.bytes.split_at(65);
            assert_eq!(
                line,
                format!("{}\n", sha256_hex(b"all of our input")).as_bytes()
            );
            assert!(data == deterministic_bytes(0, 3_000_000));
        }
        assert_eq!(kubelet.received().len(), 2);
    }
}

#[tokio::test]
async fn our_input_after_their_end_arrives_whole() {
    for (kubelet, endpoint) in both_kinds().await {
        let client = UpgradeClient::spdy("a", "/exec/ns/pod/c?script=send-then-sink&bytes=1000");
        let mut stream = client.connect(endpoint).await.unwrap().switched().unwrap();
        let theirs = stream.read_to_end().await;
        assert_eq!(
            (theirs.bytes, theirs.ended),
            (deterministic_bytes(0, 1000), BodyEnd::CleanClose)
        );
        stream.send(b"still here").await.unwrap();
        stream.finish().await.unwrap();
        let received = eventually("the kubelet has it all", WAIT_TIMEOUT, || async {
            kubelet.received().pop()
        })
        .await;
        assert_eq!(
            (received.bytes, received.sha256),
            (10, sha256_hex(b"still here"))
        );
    }
}

#[tokio::test]
async fn reset_script_cuts_after_the_first_byte() {
    for ((_kubelet, endpoint), kind) in both_kinds()
        .await
        .into_iter()
        .zip([None, Some(ErrorKind::ConnectionReset)])
    {
        let client = UpgradeClient::spdy("a", "/exec/ns/pod/c?script=reset");
        let mut stream = client.connect(endpoint).await.unwrap().switched().unwrap();
        stream.send(b"x").await.unwrap();
        let reading = stream.read_to_end().await;
        let BodyEnd::Reset(found) = reading.ended else {
            panic!("{:?}", reading.ended)
        };
        assert_eq!(found, kind.unwrap_or(found));
        assert!(deterministic_bytes(0, 64 * 1024).starts_with(&reading.bytes));
    }
}

#[tokio::test]
async fn refusals_and_wrong_answers_are_distinguished() {
    for (_kubelet, endpoint) in both_kinds().await {
        for client in both_protocols("/exec/ns/pod/c?refuse=403") {
            let reply = client
                .connect(endpoint.clone())
                .await
                .unwrap()
                .refused()
                .unwrap();
            assert_eq!(
                (reply.status, reply.text().as_str()),
                (403, "refused with 403 as ordered\n")
            );
        }
        for client in both_protocols("/exec/ns/pod/c?mismatch=true") {
            let error = client.connect(endpoint.clone()).await.unwrap_err();
            assert!(error.to_string().contains("something-else/1"), "{error:#}");
        }
        let no_upgrade = request(endpoint, &RawRequest::get("a", "/exec/ns/pod/c"))
            .await
            .unwrap();
        assert_eq!(no_upgrade.status, 400);
    }
}

#[tokio::test]
async fn certificate_is_verified_when_asked_and_the_clients_one_is_recorded() {
    let made = rcgen::generate_simple_self_signed(vec!["caller".to_owned()]).unwrap();
    let kubelet = FakeKubelet::start("node-a").await.unwrap();
    let mut roots = RootCertStore::empty();
    roots
        .add(kubelet.tls().unwrap().certificate().clone())
        .unwrap();
    let whoami = RawRequest::get("a", "/client-certificate");

    let anonymous = ClientTls::verifying("node-a", roots.clone(), None).unwrap();
    assert_eq!(
        request(Endpoint::tls(kubelet.addr(), anonymous), &whoami)
            .await
            .unwrap()
            .text(),
        "none\n"
    );

    let key = PrivatePkcs8KeyDer::from(made.signing_key.serialize_der());
    let certificate = (vec![made.cert.der().clone()], key.into());
    let caller = ClientTls::verifying("node-a", roots.clone(), Some(certificate)).unwrap();
    let reply = request(Endpoint::tls(kubelet.addr(), caller), &whoami)
        .await
        .unwrap();
    assert_eq!(reply.text(), format!("{}\n", sha256_hex(made.cert.der())));

    let wrong_name = ClientTls::verifying("node-b", roots, None).unwrap();
    assert!(
        request(Endpoint::tls(kubelet.addr(), wrong_name), &whoami)
            .await
            .is_err()
    );
}

#[tokio::test]
async fn configured_certificate_is_served() {
    let made = rcgen::generate_simple_self_signed(vec!["given".to_owned()]).unwrap();
    let tls = TargetTls::from_pem(&made.cert.pem(), &made.signing_key.serialize_pem()).unwrap();
    let kubelet = FakeKubelet::start_on("127.0.0.1:0".parse().unwrap(), "node-a", Some(tls))
        .await
        .unwrap();
    let endpoint = Endpoint::tls(kubelet.addr(), ClientTls::insecure("node-a", None).unwrap());
    let client = UpgradeClient::spdy("a", "/exec/ns/pod/c");
    let stream = client.connect(endpoint).await.unwrap().switched().unwrap();
    assert_eq!(stream.peer_certificate(), Some(made.cert.der()));
}

#[tokio::test]
async fn cut_over_tls_is_no_clean_end() {
    let [(_kubelet, endpoint), _] = both_kinds().await;
    for path in [
        "/reset-mid-body",
        "/reset-chunked",
        "/reset-close-delimited",
    ] {
        let reply = request(endpoint.clone(), &RawRequest::get("a", path))
            .await
            .unwrap();
        assert!(
            matches!(reply.ended, BodyEnd::Reset(_)),
            "{path}: {:?}",
            reply.ended
        );
    }
}

async fn both_kinds() -> [(FakeKubelet, Endpoint); 2] {
    let tls = FakeKubelet::start("node-a").await.unwrap();
    let plain = FakeKubelet::plain("node-a").await.unwrap();
    let tls_endpoint = Endpoint::tls(tls.addr(), ClientTls::insecure("node-a", None).unwrap());
    let plain_endpoint = Endpoint::plain(plain.addr());
    [(tls, tls_endpoint), (plain, plain_endpoint)]
}

fn both_protocols(path: &str) -> [UpgradeClient; 2] {
    [
        UpgradeClient::spdy("node-a", path),
        UpgradeClient::websocket("node-a", path),
    ]
}

/// Larger than the buffers between the two ends, so that a missing half-close or a deadlock shows.
const BULK: usize = 8 << 20;

const WAIT_TIMEOUT: Duration = Duration::from_secs(5);
