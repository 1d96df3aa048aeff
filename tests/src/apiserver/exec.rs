//! Commands in pods: an upgrade goes through the egress selector to the kubelet of the pod's node.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use form_urlencoded::Serializer;
use http::header::{AUTHORIZATION, HOST};
use http::request::Parts;
use http::{HeaderName, HeaderValue, Response, StatusCode};
use http_body_util::{BodyExt, Empty};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::client::TlsStream;

use super::access::{self, Action, User};
use super::defaulting::key;
use super::http::{Body, Service};
use super::kinds::{Address, Kind};
use super::status::Status;
use crate::client::{ClientTls, EgressDialer, Tunnel, over_tls};

impl Service {
    /// Passes an exec on to the kubelet, which answers it.
    pub(super) async fn exec(
        &self,
        user: &User,
        verb: &str,
        address: &Address,
        head: &mut Parts,
    ) -> Result<Response<Body>, Status> {
        let failed = |error: anyhow::Error| {
            let message = format!("error dialing backend: {error:#}");
            Status::new(500, "InternalError", message)
        };
        let name = address.name.as_deref();
        let action = Action::new(verb, address, name);
        self.store
            .read(|content| access::check(content, user, &action))?;
        let upgrade = head.extensions.remove::<OnUpgrade>();
        let upgrade = upgrade.ok_or_else(|| Status::bad_request("Upgrade request required"))?;
        let (target, request) = self.kubelet_request(address, head).map_err(failed)?;
        let socket = self.egress.lock().await.clone();
        let (mut kubelet, response) = upgraded(socket.as_deref(), &target, &request)
            .await
            .map_err(failed)?;
        self.execs.lock().await.spawn(async move {
            if let Ok(caller) = upgrade.await {
                // Both ends see how the other has ended.
                let mut caller = TokioIo::new(caller);
                let _ended = tokio::io::copy_bidirectional(&mut caller, &mut kubelet).await;
            }
        });
        Ok(response)
    }

    /// Returns the kubelet's `HOST:PORT` and the head for it.
    fn kubelet_request(&self, address: &Address, head: &Parts) -> Result<(String, String)> {
        let (namespace, name) = (address.namespace.as_deref())
            .zip(address.name.as_deref())
            .context("no pod")?;
        let (node, port, first) = self.store.read(|content| {
            let pod = content.get(&key(address.kind, Some(namespace), name));
            let pod = pod.context("no such pod")?;
            let node = pod["spec"]["nodeName"].as_str().context("no node")?;
            let kind = Kind::find("", "nodes").context("no kind of nodes")?;
            let found = content
                .get(&key(kind, None, node))
                .context("no such node")?;
            let port = &found["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"];
            let port = port.as_u64().context("no port of the kubelet")?;
            let first = pod["spec"]["containers"][0]["name"].as_str();
            anyhow::Ok((node.to_owned(), port, first.unwrap_or_default().to_owned()))
        })?;
        let mut container = first;
        let mut query = Serializer::new(String::new());
        let asked = head.uri.query().unwrap_or_default();
        for (field, value) in form_urlencoded::parse(asked.as_bytes()) {
            let own = match &*field {
                "stdin" => "input",
                "stdout" => "output",
                "stderr" => "error",
                "container" => {
                    container = value.into_owned();
                    continue;
                }
                other => other,
            };
            query.append_pair(own, if value == "true" { "1" } else { &value });
        }
        let target = format!("{node}:{port}");
        let path = format!("/exec/{namespace}/{name}/{container}?{}", query.finish());
        let mut request = format!("{} {path} HTTP/1.1\r\nHost: {target}\r\n", head.method);
        for (field, value) in &head.headers {
            if field != HOST && field != AUTHORIZATION {
                request.push_str(&format!("{field}: {}\r\n", value.to_str()?));
            }
        }
        Ok((target, request + "\r\n"))
    }
}

/// Sends the request through the CONNECT listener. Returns the connection and the kubelet's 101.
async fn upgraded(
    socket: Option<&Path>,
    target: &str,
    request: &str,
) -> Result<(TlsStream<Tunnel>, Response<Body>)> {
    let dialer = EgressDialer::uds(socket.context("no egress selector")?);
    let tls = ClientTls::insecure("kubelet", None)?;
    let mut kubelet = over_tls(dialer.dial(target).await?, &tls).await?;
    kubelet.write_all(request.as_bytes()).await?;
    kubelet.flush().await?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(kubelet.read_u8().await?);
    }
    let head = String::from_utf8(head)?;
    ensure!(head.starts_with("HTTP/1.1 101 "), "{head}");
    let body = Empty::<Bytes>::new()
        .map_err(|never| match never {})
        .boxed_unsync();
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    for (field, value) in head.lines().filter_map(|line| line.split_once(": ")) {
        let field = HeaderName::from_bytes(field.as_bytes())?;
        let value = HeaderValue::from_str(value)?;
        response.headers_mut().insert(field, value);
    }
    Ok((kubelet, response))
}
