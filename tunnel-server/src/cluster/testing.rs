//! A mock API server for tests. The test provides every answer.

use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::Frame;
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use tower_test::mock::{self, Handle, SendResponse};

use crate::testing::WAIT_TIMEOUT;

pub(super) const NAMESPACE: &str = "kube-system";

type Answer = UnsyncBoxBody<Bytes, std::io::Error>;

/// The server side of the mock.
pub(super) struct ApiServer(Handle<Request<Body>, Response<Answer>>);

/// One request that waits for its answer.
pub(super) struct Call {
    /// Method and path, such as `GET /api/v1/nodes?limit=500`.
    pub(super) what: String,
    /// The body as JSON, or null if there is none.
    pub(super) body: Value,
    answer: SendResponse<Response<Answer>>,
}

/// Returns a client and the mock server that it connects to.
pub(super) fn api_server() -> (Client, ApiServer) {
    let (service, handle) = mock::pair();
    (Client::new(service, NAMESPACE), ApiServer(handle))
}

impl ApiServer {
    /// Returns the next request.
    pub(super) async fn call(&mut self) -> Call {
        let next = tokio::time::timeout(WAIT_TIMEOUT, self.0.next_request());
        let (request, answer) = next.await.expect("a request").expect("a client");
        let what = format!("{} {}", request.method(), request.uri());
        let body = request.into_body().collect().await.unwrap().to_bytes();
        Call {
            what,
            body: serde_json::from_slice(&body).unwrap_or_default(),
            answer,
        }
    }

    /// Returns the next request, which must equal `what`.
    pub(super) async fn expect(&mut self, what: &str) -> Call {
        let call = self.call().await;
        assert_eq!(call.what, what);
        call
    }

    /// Fails if a request arrives within this time of the test's clock.
    pub(super) async fn is_quiet_for(&mut self, time: Duration) {
        if let Ok(Some((request, _))) = tokio::time::timeout(time, self.0.next_request()).await {
            panic!("unexpected {} {}", request.method(), request.uri());
        }
    }
}

impl Call {
    /// Answers with an object.
    pub(super) fn answer(self, object: &Value) {
        self.respond(200, object.to_string());
    }

    /// Answers with the object of the request.
    pub(super) fn accept(self) {
        let object = self.body.clone();
        self.answer(&object);
    }

    /// Answers with a watch that sends these events and stays open.
    pub(super) fn stream(self, events: &[Value]) -> tokio::sync::mpsc::Sender<String> {
        let (more, mut lines) = tokio::sync::mpsc::channel::<String>(16);
        let first: String = events.iter().map(|event| format!("{event}\n")).collect();
        let first = futures_util::stream::once(async move { first });
        let rest = futures_util::stream::poll_fn(move |context| lines.poll_recv(context));
        let lines = futures_util::StreamExt::chain(first, rest);
        let frames = futures_util::StreamExt::map(lines, |line| Ok(Frame::data(line.into())));
        let body = StreamBody::new(frames).boxed_unsync();
        self.answer.send_response(Response::new(body));
        more
    }

    /// Answers with the Status of a failure.
    pub(super) fn refuse(self, code: u16, reason: &str) {
        let status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": reason, "reason": reason, "code": code,
        });
        self.respond(code, status.to_string());
    }

    fn respond(self, code: u16, body: String) {
        let body = Full::from(body).map_err(|never| match never {});
        let response = Response::builder().status(code);
        let response = response.body(body.boxed_unsync());
        self.answer.send_response(response.unwrap());
    }
}
