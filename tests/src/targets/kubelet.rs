//! A fake kubelet: metrics, logs that follow, and the upgrades of exec and attach.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Result;
use tokio::io::AsyncWriteExt;

use super::accept::{ANY_LOOPBACK_PORT, Listening, Traffic, target_methods};
use super::answers::{After, Request, segments};
use super::byte_stream::ByteStream;
use super::data::{sha256_hex, websocket_accept};
use super::exporter::Site;
use super::head::Head;
use super::line_stream::FollowOptions;
use super::script::{Received, ReceivedLog, Script};
use super::tls::TargetTls;
pub use access::Access;
use streams::Streams;

mod access;
mod streams;

/// A server with the paths of a kubelet, and for all others those of an
/// [`Exporter`](super::Exporter).
///
/// | path | answer |
/// |---|---|
/// | `/healthz` | `ok` |
/// | `/containerLogs/NS/POD/C` | one line that names the node (`?tailLines=N`: N lines); with `?follow=true` further lines from [`Self::emit`] |
/// | `/exec/…`, `/attach/…`, `/portForward/…` | 101 with the requested protocol, then remote commands or a script |
/// | `/metrics/cadvisor`, `/stats/summary`, `/pods`, `POST /checkpoint/NS/POD/C` | a short text that names the node |
/// | `/client-certificate` | SHA-256 of the certificate the client presented, or `none` |
///
/// An upgrade that requests streams as kube-apiserver does (`input=1`, `output=1` ..., or the
/// protocol `portforward.k8s.io`) is served in SPDY/3.1 with `v4.channel.k8s.io` or in WebSocket
/// with `v5.channel.k8s.io`. The command sends its stdin back on stdout, prints each resize on
/// stdout, counts on stderr, and ends with its stdin: `command=exit-N` with exit code N, any other
/// with success. Forwarded ports echo.
///
/// Query of the other upgrades:
/// - `script=echo` (the default): sends back received data until FIN, then FIN;
/// - `script=sink-then-send&bytes=N`: reads to FIN, then sends the SHA-256 of the received data as
///   a line, N bytes of sequence 0 and FIN;
/// - `script=send-then-sink&bytes=N`: sends N bytes of sequence 0 (their beginning together with
///   the 101) and FIN, then reads to FIN;
/// - `script=reset`: after the first byte sends 64 KiB, then a TCP reset;
/// - `refuse=STATUS`: no upgrade, but an answer with that status and a body, with `&id=N` that of
///   [`refusal`];
/// - `mismatch=true`: a 101 for a protocol other than the requested one.
#[derive(Debug)]
pub struct FakeKubelet {
    listening: Listening,
    site: Arc<Site>,
    log: Arc<ReceivedLog>,
}

target_methods!(FakeKubelet);

impl FakeKubelet {
    /// Starts a kubelet of `node` with a self-signed certificate, on a free loopback port.
    pub async fn start(node: &str) -> Result<Self> {
        let tls = TargetTls::self_signed(&[node, "localhost", "127.0.0.1"])?;
        Self::start_on(ANY_LOOPBACK_PORT, node, Some(tls)).await
    }

    /// Starts a kubelet of `node` without TLS, on a free loopback port.
    pub async fn plain(node: &str) -> Result<Self> {
        Self::start_on(ANY_LOOPBACK_PORT, node, None).await
    }

    /// Starts a kubelet of `node` on `bind`, over TLS if `tls` is set.
    pub async fn start_on(bind: SocketAddr, node: &str, tls: Option<TargetTls>) -> Result<Self> {
        Self::listen(bind, node, tls, None).await
    }

    /// Starts a kubelet of `node` that authenticates its clients, on a free loopback port.
    pub async fn guarded(node: &str, tls: TargetTls, access: Access) -> Result<Self> {
        Self::listen(ANY_LOOPBACK_PORT, node, Some(tls), Some(access)).await
    }

    async fn listen(
        bind: SocketAddr,
        node: &str,
        tls: Option<TargetTls>,
        access: Option<Access>,
    ) -> Result<Self> {
        let (site, log) = (Arc::new(Site::new(node)), Arc::new(ReceivedLog::default()));
        let served = Arc::new(Served {
            site: Arc::clone(&site),
            log: Arc::clone(&log),
            access,
        });
        let listening = Listening::start(bind, tls, move |wire, traffic| {
            serve(Arc::clone(&served), wire, traffic)
        });
        Ok(Self {
            listening: listening.await?,
            site,
            log,
        })
    }

    /// Sends `line` (without line end) to all followers of logs and returns their number.
    pub fn emit(&self, line: &str) -> usize {
        self.site.line_stream.emit(line)
    }

    /// Ends all following answers cleanly and returns their number.
    pub fn end_follows(&self) -> usize {
        self.site.line_stream.end()
    }

    /// Returns the number of followed log requests.
    pub fn followers(&self) -> usize {
        self.site.line_stream.followers()
    }

    /// Returns the data received by upgraded connections that ended cleanly.
    pub fn received(&self) -> Vec<Received> {
        self.log.all()
    }
}

/// State shared by connections.
struct Served {
    site: Arc<Site>,
    log: Arc<ReceivedLog>,
    access: Option<Access>,
}

async fn serve(served: Arc<Served>, mut wire: ByteStream, traffic: Arc<Traffic>) -> io::Result<()> {
    let Served { site, log, access } = &*served;
    while let Some(mut request) = Request::read(&mut wire, &traffic).await? {
        let path = request.path().to_owned();
        let authorized = match access {
            Some(access) => access.authorize(&wire, &request),
            None => Ok(()),
        };
        let after = match *segments(&path) {
            _ if let Err((status, text)) = &authorized => {
                request.answer(&mut wire, *status, text).await?
            }
            _ if let Some(text) = page(&site.node, &path) => {
                request.answer(&mut wire, 200, &text).await?
            }
            ["containerLogs", _, pod, container] => {
                let line = format!("{}: log of {pod}/{container}", site.node);
                let lines = request.query("tailLines").and_then(|n| n.parse().ok());
                let lines = vec![line; lines.unwrap_or(1)].join("\n");
                logs(site, &mut wire, &request, lines).await?
            }
            ["exec" | "attach" | "portForward", ..] => {
                upgrade(&mut wire, &request, &traffic, log).await?
            }
            ["client-certificate"] => {
                let digest = wire
                    .peer_certificate()
                    .map(|certificate| sha256_hex(certificate));
                request
                    .answer(
                        &mut wire,
                        200,
                        &format!("{}\n", digest.as_deref().unwrap_or("none")),
                    )
                    .await?
            }
            _ => site.answer(&mut wire, &mut request, &traffic).await?,
        };
        match request.settle(wire, after).await? {
            Some(reusable) => wire = reusable,
            None => return Ok(()),
        }
    }
    wire.close().await
}

/// Returns the text of a short page.
fn page(node: &str, path: &str) -> Option<String> {
    Some(match *segments(path) {
        ["healthz"] => "ok".to_owned(),
        ["metrics", "cadvisor" | "resource" | "probes"] => {
            format!("# {path}\ncontainer_scrape_error{{node=\"{node}\"}} 0\n")
        }
        ["stats", "summary"] => format!("{{\"node\":{{\"nodeName\":\"{node}\"}},\"pods\":[]}}\n"),
        ["pods"] => format!("{{\"kind\":\"PodList\",\"node\":\"{node}\",\"items\":[]}}\n"),
        ["checkpoint", _, pod, container] => {
            format!("{{\"items\":[\"{node}/checkpoint-{pod}-{container}.tar\"]}}\n")
        }
        _ => return None,
    })
}

async fn logs(
    site: &Site,
    wire: &mut ByteStream,
    request: &Request,
    first_line: String,
) -> io::Result<After> {
    if request.query("follow") != Some("true") {
        return request.answer(wire, 200, &format!("{first_line}\n")).await;
    }
    let following = FollowOptions {
        first_line: Some(first_line),
        ..FollowOptions::default()
    };
    site.line_stream.follow(wire, request, following).await
}

async fn upgrade(
    wire: &mut ByteStream,
    request: &Request,
    traffic: &Traffic,
    log: &ReceivedLog,
) -> io::Result<After> {
    if let Some(status) = request.query("refuse") {
        let status = status.parse().unwrap_or(403);
        let body = match request.query("id").map(str::parse) {
            Some(Ok(id)) => refusal(id),
            Some(Err(_)) | None => format!("refused with {status} as ordered\n"),
        };
        return request.answer(wire, status, &body).await;
    }
    let streams = Streams::asked_for(request);
    let Some(script) = Script::asked_for(request) else {
        return request.answer(wire, 400, "no such script\n").await;
    };
    let Some(mut fields) = switching_fields(&request.received) else {
        return request
            .answer(wire, 400, "not an upgrade that this kubelet knows\n")
            .await;
    };
    if request.query("mismatch") == Some("true") {
        fields.retain(|(name, _)| *name != "Upgrade");
        fields.push(("Upgrade", "something-else/1".to_owned()));
    }
    let head = switching_head(&fields);
    if let Some(streams) = streams {
        wire.write_all(&head).await?;
        streams.serve(wire, request).await?;
        return Ok(After::Close);
    }
    script.act(wire, head, traffic, log).await
}

/// Returns the text of the refusal with this ID: lines with the ID and its SHA-256, more of them
/// for some IDs.
pub fn refusal(id: u64) -> String {
    let lines = usize::try_from(id % 97).unwrap_or_default() + 1;
    format!("{id} {}\n", sha256_hex(&id.to_be_bytes())).repeat(lines)
}

/// Returns the fields of the 101 that answers `request`, if it asks for an upgrade.
fn switching_fields(request: &Head) -> Option<Vec<(&'static str, String)>> {
    let protocol = request
        .first("upgrade")
        .filter(|_| request.lists("connection", "upgrade"))?;
    let mut fields = vec![
        ("Connection", "Upgrade".to_owned()),
        ("Upgrade", protocol.to_owned()),
    ];
    if protocol.eq_ignore_ascii_case("websocket") {
        fields.push((
            "Sec-WebSocket-Accept",
            websocket_accept(request.first("sec-websocket-key")?),
        ));
        if let Some(chosen) = chosen_protocol(request, "sec-websocket-protocol", OVER_WEBSOCKET) {
            fields.push(("Sec-WebSocket-Protocol", chosen));
        }
    } else if let Some(chosen) = chosen_protocol(request, "x-stream-protocol-version", OVER_SPDY) {
        fields.push(("X-Stream-Protocol-Version", chosen));
    }
    Some(fields)
}

/// Returns the protocol `newest` if offered, else the first offer.
fn chosen_protocol(request: &Head, field: &str, newest: &str) -> Option<String> {
    if request.lists(field, newest) {
        return Some(newest.to_owned());
    }
    let first = request.first(field)?.split(',').next()?;
    Some(first.trim().to_owned())
}

fn switching_head(fields: &[(&str, String)]) -> Vec<u8> {
    let fields: String = fields
        .iter()
        .map(|(name, value)| format!("{name}: {value}\r\n"))
        .collect();
    format!("HTTP/1.1 101 Switching Protocols\r\n{fields}\r\n").into_bytes()
}

/// The newest protocols of remote commands that a kubelet supports.
const OVER_WEBSOCKET: &str = "v5.channel.k8s.io";
const OVER_SPDY: &str = "v4.channel.k8s.io";

#[cfg(test)]
mod tests;
