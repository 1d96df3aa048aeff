use serde_json::{Value, json};

use crate::client::{RawRequest, UpgradeClient, request};
use crate::spdy::{Frame, Spdy};
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

#[tokio::test]
async fn command_without_stdin_ends_with_its_exit_code() {
    let kubelet = FakeKubelet::plain("node-a").await.unwrap();
    let path = "/exec/ns/pod/c?command=exit-3&error=1&output=1";
    let client = UpgradeClient::spdy("node-a", path);
    let upgraded = client.connect(kubelet.addr()).await.unwrap();
    let mut spdy = Spdy::client(upgraded.switched().unwrap());
    let mut ids = Vec::new();
    for kind in ["error", "stdout", "stderr"] {
        let id = spdy.open(&[("streamType", kind)]).await.unwrap();
        assert_eq!(spdy.next().await.unwrap(), Some(Frame::Reply(id)));
        ids.push(id);
    }
    let mut last_bytes = Vec::new();
    for id in [ids[2], ids[1], ids[0]] {
        let Some(Frame::Data { id: of, bytes, fin }) = spdy.next().await.unwrap() else {
            panic!("no end of stream {id}");
        };
        assert_eq!((of, fin), (id, true));
        last_bytes = bytes;
    }
    assert_eq!(spdy.next().await.unwrap(), Some(Frame::GoAway));
    let status: Value = serde_json::from_slice(&last_bytes).unwrap();
    assert_eq!(status["reason"], "NonZeroExitCode");
    let causes = json!([{ "reason": "ExitCode", "message": "3" }]);
    assert_eq!(status["details"]["causes"], causes);
}
