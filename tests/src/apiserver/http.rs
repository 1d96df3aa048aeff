//! Connections of clients: TLS, authentication, HTTP, and the answers to requests.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use futures_util::stream::unfold;
use http::header::{AUTHORIZATION, CONTENT_TYPE, RETRY_AFTER, USER_AGENT};
use http::{HeaderMap, Method, Response};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, Limited, StreamBody};
use hyper::body::Incoming;
use serde_json::{Value, json};
use tokio::sync::Mutex;
use tokio::task::JoinSet;

use super::access::{self, User};
use super::discovery;
use super::faults::{Faults, Presence};
use super::kinds::{Address, ApiRoute, Kind};
use super::record::{RecordedRequest, RequestLog};
use super::request::{Answer, Query, Request};
use super::status::Status;
use super::store::Store;
use super::tokens::{Signer, TokenClaims};
use super::watching::{Signals, Watch};
use crate::manifests::items;

/// State shared by all connections.
#[derive(Debug)]
pub(super) struct Service {
    pub(super) store: Store,
    pub(super) faults: Faults,
    pub(super) record: RequestLog,
    pub(super) tokens: HashMap<String, User>,
    pub(super) signer: Signer,
    /// First addresses of the Service ranges, the primary family first.
    pub(super) families: Vec<IpAddr>,
    /// CONNECT listener through which kubelets are reached.
    pub(super) egress: Mutex<Option<PathBuf>>,
    /// Running commands in pods.
    pub(super) execs: Mutex<JoinSet<()>>,
}

pub(super) type Body = UnsyncBoxBody<Bytes, io::Error>;

impl Service {
    /// Answers one request. `certified` is the user of the client's certificate.
    pub(super) async fn answer(
        self: Arc<Self>,
        request: http::Request<Incoming>,
        certified: Option<User>,
    ) -> Result<Response<Body>, io::Error> {
        let mut presence = self.faults.presence();
        let here = presence.wait_for(|presence| *presence == Presence::Here);
        here.await
            .map_err(|_closed| io::Error::from(io::ErrorKind::ConnectionAborted))?;
        let (mut head, body) = request.into_parts();
        let user = certified.or_else(|| self.bearer(&head.headers));
        let route = ApiRoute::of(head.uri.path());
        let query = Query::parse(head.uri.query().unwrap_or_default());
        let verb = verb(&head.method, &route, &query);
        let recorded = recorded(&head, &route, verb, user.as_ref());
        let injected = self.faults.inject(&recorded);
        let number = self.record.push(recorded);
        tokio::time::sleep(injected.delay).await;
        let body = Limited::new(body, LARGEST_BODY).collect().await;
        let outcome = match (user, injected.answer, body) {
            (_, Some(status), _) => Err(status),
            (None, ..) => Err(Status::unauthorized()),
            (_, _, Err(_)) => Err(Status::new(
                413,
                "RequestEntityTooLarge",
                "Request entity too large: limit is 3145728",
            )),
            (Some(user), None, Ok(_)) if let Some(address) = exec_address(&route) => {
                self.exec(&user, verb, address, &mut head).await
            }
            (Some(user), None, Ok(body)) => {
                let request = |address: Address| Request {
                    user,
                    verb,
                    address,
                    query,
                    content_type: text(&head.headers, CONTENT_TYPE),
                    body: body.to_bytes().to_vec(),
                };
                self.reply(route, request)
            }
        };
        let response = outcome.unwrap_or_else(|status| failure(&status));
        self.record.answered(number, response.status().as_u16());
        Ok(response)
    }

    fn bearer(&self, headers: &HeaderMap) -> Option<User> {
        let value = headers.get(AUTHORIZATION)?.to_str().ok()?;
        self.tokens.get(value.strip_prefix("Bearer ")?).cloned()
    }

    fn reply(
        &self,
        route: ApiRoute,
        request: impl FnOnce(Address) -> Request,
    ) -> Result<Response<Body>, Status> {
        match route {
            ApiRoute::Versions => Ok(json_body(200, &discovery::versions())),
            ApiRoute::Groups => Ok(json_body(200, &discovery::group_list())),
            ApiRoute::Resources(group) => Ok(json_body(200, &discovery::resources(group))),
            ApiRoute::Version => Ok(json_body(200, &discovery::version())),
            ApiRoute::Health => Ok(respond(200, "text/plain", b"ok".to_vec())),
            ApiRoute::OpenApi => Ok(respond(200, discovery::OPENAPI, b"\x0a\x032.0".to_vec())),
            ApiRoute::Unknown => Err(Status::no_such_path()),
            ApiRoute::Objects(address) => {
                let request = request(address);
                if request.verb == "watch" {
                    return self.watch(&request);
                }
                self.objects(&request)
            }
        }
    }

    fn watch(&self, request: &Request) -> Result<Response<Body>, Status> {
        request.authorize(&self.store)?;
        let signals = Signals {
            cuts: self.faults.cuts(),
            presence: self.faults.presence(),
        };
        let watch = Watch::begin(request, &self.store, signals)?;
        let mut response =
            Response::new(StreamBody::new(unfold(watch, Watch::next)).boxed_unsync());
        response.headers_mut().insert(CONTENT_TYPE, JSON);
        Ok(response)
    }

    fn objects(&self, request: &Request) -> Result<Response<Body>, Status> {
        request.authorize(&self.store)?;
        let kind = request.address.kind;
        if kind.is_review() {
            return self.review(request);
        }
        if kind.plural == "serviceaccounts"
            && request.address.subresource.as_deref() == Some("token")
        {
            return self.issue(request);
        }
        match request.serve(&self.store, &self.families)? {
            Answer::Object(code, object) if object["kind"] == "Status" => {
                Ok(json_body(code, &object))
            }
            Answer::Object(code, object) => Ok(json_body(code, &shown(kind, &object))),
            Answer::List(objects, metadata) => {
                let mut items = objects
                    .iter()
                    .map(|object| shown(kind, object))
                    .collect::<Vec<_>>();
                for item in &mut items {
                    // As in the real API server, items of a list do not repeat their kind and
                    // version.
                    if let Some(item) = item.as_object_mut() {
                        item.remove("kind");
                        item.remove("apiVersion");
                    }
                }
                let list = json!({ "kind": format!("{}List", kind.kind), "apiVersion": kind.api_version(), "metadata": metadata, "items": items });
                Ok(json_body(200, &list))
            }
        }
    }

    /// Answers a TokenRequest, as a kubelet sends it for a projected volume.
    fn issue(&self, request: &Request) -> Result<Response<Body>, Status> {
        let asked = request.sent()?;
        let address = &request.address;
        let account = (address.namespace.as_deref()).zip(address.name.as_deref());
        let account = account.ok_or_else(Status::no_such_path)?;
        let account = (account.0.to_owned(), account.1.to_owned());
        let token = self.signer.sign(&TokenClaims::requested(account, &asked));
        let mut answer = asked;
        answer["status"] = json!({ "token": token });
        Ok(json_body(201, &answer))
    }

    fn review(&self, request: &Request) -> Result<Response<Body>, Status> {
        let asked = request.sent()?;
        if request.address.kind.kind == "TokenReview" {
            let mut answer = asked.clone();
            let token = asked["spec"]["token"].as_str().unwrap_or_default();
            let audiences: Vec<_> = items(&asked["spec"]["audiences"])
                .filter_map(Value::as_str)
                .collect();
            answer["status"] = self
                .store
                .read(|content| self.signer.review(content, token, &audiences));
            return Ok(json_body(201, &answer));
        }
        let kind = request.address.kind;
        let answer = self
            .store
            .read(|content| access::review(content, &request.user, kind, &asked));
        Ok(json_body(201, &answer))
    }
}

/// Returns an object in the form of the path's group.
pub(super) fn shown(kind: &Kind, object: &Value) -> Value {
    let mut object = object.clone();
    object["kind"] = kind.kind.into();
    object["apiVersion"] = kind.api_version().into();
    object
}

/// Returns the pod of an exec.
fn exec_address(route: &ApiRoute) -> Option<&Address> {
    let ApiRoute::Objects(address) = route else {
        return None;
    };
    let is_exec = address.subresource.as_deref() == Some("exec");
    (is_exec && address.kind.plural == "pods").then_some(address)
}

fn verb(method: &Method, route: &ApiRoute, query: &Query) -> &'static str {
    let named = matches!(route, ApiRoute::Objects(address) if address.name.is_some());
    match (method.as_str(), named) {
        ("GET", true) => "get",
        ("GET", false) if query.is_true("watch") => "watch",
        ("GET", false) if matches!(route, ApiRoute::Objects(_)) => "list",
        ("GET", false) => "get",
        ("POST", _) => "create",
        ("PUT", _) => "update",
        ("PATCH", _) => "patch",
        ("DELETE", _) => "delete",
        _ => "unknown",
    }
}

fn recorded(
    head: &http::request::Parts,
    route: &ApiRoute,
    verb: &str,
    user: Option<&User>,
) -> RecordedRequest {
    let address = match route {
        ApiRoute::Objects(address) => Some(address),
        _ => None,
    };
    let part = |part: Option<&String>| part.cloned().unwrap_or_default();
    RecordedRequest {
        at: Instant::now(),
        user: user.map(|user| user.name.clone()).unwrap_or_default(),
        verb: verb.to_owned(),
        method: head.method.to_string(),
        resource: address.map_or_else(String::new, |address| address.kind.plural.to_owned()),
        subresource: part(address.and_then(|address| address.subresource.as_ref())),
        namespace: part(address.and_then(|address| address.namespace.as_ref())),
        name: part(address.and_then(|address| address.name.as_ref())),
        path: head.uri.to_string(),
        user_agent: text(&head.headers, USER_AGENT),
        content_type: text(&head.headers, CONTENT_TYPE),
        status: 0,
    }
}

fn text(headers: &HeaderMap, name: http::HeaderName) -> String {
    headers
        .get(name)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default()
        .to_owned()
}

fn failure(status: &Status) -> Response<Body> {
    let mut response = json_body(status.code, &status.object());
    if let Some(seconds) = status.retry_after {
        response.headers_mut().insert(RETRY_AFTER, seconds.into());
    }
    response
}

fn json_body(code: u16, value: &Value) -> Response<Body> {
    respond(code, "application/json", value.to_string().into_bytes())
}

fn respond(code: u16, kind: &'static str, body: Vec<u8>) -> Response<Body> {
    let body = Full::new(Bytes::from(body))
        .map_err(|never| match never {})
        .boxed_unsync();
    let mut response = Response::new(body);
    *response.status_mut() =
        http::StatusCode::from_u16(code).unwrap_or(http::StatusCode::INTERNAL_SERVER_ERROR);
    response
        .headers_mut()
        .insert(CONTENT_TYPE, http::HeaderValue::from_static(kind));
    response
}

const JSON: http::HeaderValue = http::HeaderValue::from_static("application/json");

/// Limit of the real API server.
const LARGEST_BODY: usize = 3 * 1024 * 1024;
