use rustls::RootCertStore;
use rustls_pki_types::PrivatePkcs8KeyDer;

use crate::client::{BodyEnd, ClientTls, Endpoint, RawRequest, UpgradeClient, request};
use crate::targets::{FakeKubelet, sha256_hex};

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
