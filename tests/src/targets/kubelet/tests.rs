use crate::client::{RawRequest, UpgradeClient, request};
use crate::targets::FakeKubelet;

#[tokio::test]
async fn wrong_protocol_is_an_error_and_no_upgrade_is_a_400() {
    let kubelet = FakeKubelet::plain("node-a").await.unwrap();
    let mismatch = "/exec/ns/pod/c?mismatch=true";
    for client in [
        UpgradeClient::spdy("node-a", mismatch),
        UpgradeClient::websocket("node-a", mismatch),
    ] {
        let error = client.connect(kubelet.addr()).await.unwrap_err();
        assert!(error.to_string().contains("something-else/1"), "{error:#}");
    }
    let no_upgrade = RawRequest::get("a", "/exec/ns/pod/c");
    let reply = request(kubelet.addr(), &no_upgrade).await.unwrap();
    assert_eq!(reply.status, 400);
}
