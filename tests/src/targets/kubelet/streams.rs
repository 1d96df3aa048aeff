//! The kubelet's end of exec, attach and port-forward, in the protocols of kube-apiserver.
//!
//! Upstream: `kubernetes/kubernetes`
//! `staging/src/k8s.io/kubelet/pkg/cri/streaming/remotecommand/httpstream.go` and `websocket.go`,
//! `.../portforward/httpstream.go`.

use std::collections::BTreeMap;
use std::io;

use serde_json::json;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::spdy::{Frame, Spdy};
use crate::targets::answers::Request;
use crate::websocket::{Message, WebSocket};

/// The service on an upgraded connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Streams {
    /// A command that sends its stdin back on stdout, over SPDY/3.1.
    CommandOverSpdy,
    /// A command that sends its stdin back on stdout, over WebSocket `v5.channel.k8s.io`.
    CommandOverWebSocket,
    /// Ports whose other side sends back all data.
    PortForward,
}

impl Streams {
    /// Returns the service that `request` asks for, unless it asks for a script.
    pub(super) fn asked_for(request: &Request) -> Option<Self> {
        let head = &request.received;
        let command = request.query("output").is_some() || request.query("input").is_some();
        if head.lists("x-stream-protocol-version", "portforward.k8s.io") {
            Some(Self::PortForward)
        } else if command && head.lists("upgrade", "websocket") {
            Some(Self::CommandOverWebSocket)
        } else if command && head.lists("upgrade", "SPDY/3.1") {
            Some(Self::CommandOverSpdy)
        } else {
            None
        }
    }

    /// Serves until the command or the peer has ended.
    pub(super) async fn serve(
        self,
        stream: impl AsyncRead + AsyncWrite + Unpin,
        request: &Request,
    ) -> io::Result<()> {
        match self {
            Self::CommandOverSpdy => command_over_spdy(Spdy::server(stream), request).await,
            Self::CommandOverWebSocket => {
                let status = exit_status(request);
                command_over_websocket(WebSocket::server(stream), &status).await
            }
            Self::PortForward => port_forward(Spdy::server(stream)).await,
        }
    }
}

/// Accepts the streams that the query announces (like `httpstream.go` `waitForStreams`), then runs
/// the command. A command without stdin ends at once.
async fn command_over_spdy(
    mut spdy: Spdy<impl AsyncRead + AsyncWrite + Unpin>,
    request: &Request,
) -> io::Result<()> {
    let asked = |name: &str| request.query(name) == Some("1");
    let terminal = asked("tty");
    let wanted = 1
        + usize::from(asked("input"))
        + usize::from(asked("output"))
        + usize::from(asked("error") && !terminal)
        + usize::from(terminal);
    let status = exit_status(request);
    let mut streams: BTreeMap<String, u32> = BTreeMap::new();
    let mut received = 0;
    while let Some(frame) = spdy.next().await? {
        match frame {
            Frame::Open { id, fields, .. } => {
                spdy.reply(id).await?;
                streams.insert(field(&fields, "streamtype"), id);
                if streams.len() == wanted && !asked("input") {
                    return end_command(&mut spdy, &streams, received, &status).await;
                }
            }
            Frame::Ping(id) => spdy.ping(id).await?,
            Frame::Data { id, bytes, fin } if streams.len() == wanted => {
                let out = streams.get("stdout").copied();
                if streams.get("resize") == Some(&id) {
                    if let Some(out) = out.filter(|_| !bytes.is_empty()) {
                        let line = [b"resized to ", bytes.trim_ascii(), b"\r\n"].concat();
                        spdy.data(out, &line, false).await?;
                    }
                    continue;
                }
                if streams.get("stdin") != Some(&id) {
                    continue;
                }
                received += bytes.len();
                if let Some(out) = out.filter(|_| !bytes.is_empty()) {
                    spdy.data(out, &bytes, false).await?;
                }
                if fin {
                    return end_command(&mut spdy, &streams, received, &status).await;
                }
            }
            Frame::Data { .. } => return Err(io::Error::other("data before all streams")),
            Frame::GoAway => return Ok(()),
            Frame::Reply(_) | Frame::Reset(_) | Frame::Other(_) => {}
        }
    }
    Ok(())
}

/// Ends the streams of a command, the error stream with `status`.
async fn end_command(
    spdy: &mut Spdy<impl AsyncRead + AsyncWrite + Unpin>,
    streams: &BTreeMap<String, u32>,
    received: usize,
    status: &str,
) -> io::Result<()> {
    let count = format!("{received} bytes\n");
    for (kind, last) in [
        ("stderr", count.as_str()),
        ("stdout", ""),
        ("error", status),
    ] {
        if let Some(id) = streams.get(kind) {
            spdy.data(*id, last.as_bytes(), true).await?;
        }
    }
    spdy.go_away().await
}

/// Returns the `Status` of `v4` and `v5`: `remotecommand/exec.go` `ServeExec`.
fn exit_status(request: &Request) -> String {
    let code = request
        .query("command")
        .and_then(|command| command.strip_prefix("exit-"));
    let Some(code) = code else {
        return "{\"metadata\":{},\"status\":\"Success\"}".to_owned();
    };
    let message = format!("command terminated with non-zero exit code: exit status {code}");
    json!({
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": "NonZeroExitCode",
        "details": { "causes": [{ "reason": "ExitCode", "message": code }] },
    })
    .to_string()
}

async fn command_over_websocket(
    mut socket: WebSocket<impl AsyncRead + AsyncWrite + Unpin>,
    status: &str,
) -> io::Result<()> {
    let mut received = 0;
    while let Some(message) = socket.next().await? {
        let bytes = match message {
            Message::Binary(bytes) => bytes,
            Message::Ping(bytes) => {
                socket.send(&Message::Pong(bytes)).await?;
                continue;
            }
            Message::Pong(_) => continue,
            Message::Close(_) => return Ok(()),
        };
        match bytes.as_slice() {
            [STDIN, data @ ..] => {
                received += data.len();
                socket.send(&channel(STDOUT, data)).await?;
            }
            [RESIZE, size @ ..] => {
                let line = [b"resized to ", size.trim_ascii(), b"\r\n"].concat();
                socket.send(&channel(STDOUT, &line)).await?;
            }
            // The signal that `v5` added: the client half-closes one channel.
            [CLOSE, STDIN] => {
                let line = format!("{received} bytes\n");
                socket.send(&channel(STDERR, line.as_bytes())).await?;
                socket.send(&channel(ERROR, status.as_bytes())).await?;
                socket.send(&Message::Close(Some(1000))).await?;
                return Ok(());
            }
            _ => {
                return Err(io::Error::other(format!(
                    "unknown channel {:?}",
                    bytes.first()
                )));
            }
        }
    }
    Ok(())
}

/// Serves port-forward. Each connection has an error stream and a data stream with one request ID.
async fn port_forward(mut spdy: Spdy<impl AsyncRead + AsyncWrite + Unpin>) -> io::Result<()> {
    let mut pairs: Vec<(String, Option<u32>, Option<u32>)> = Vec::new();
    while let Some(frame) = spdy.next().await? {
        match frame {
            Frame::Open { id, fields, .. } => {
                spdy.reply(id).await?;
                let request_id = field(&fields, "requestid");
                let known = pairs.iter().position(|(known, ..)| *known == request_id);
                let index = known.unwrap_or_else(|| {
                    pairs.push((request_id, None, None));
                    pairs.len() - 1
                });
                if let Some((_, error, data)) = pairs.get_mut(index) {
                    match field(&fields, "streamtype").as_str() {
                        "error" => *error = Some(id),
                        _ => *data = Some(id),
                    }
                }
            }
            Frame::Data { id, bytes, fin } => {
                let Some((_, error, _)) = pairs.iter().find(|(.., data)| *data == Some(id)) else {
                    continue;
                };
                let error = *error;
                spdy.data(id, &bytes, fin).await?;
                if let Some(error) = error.filter(|_| fin) {
                    spdy.data(error, b"", true).await?;
                }
            }
            Frame::Ping(id) => spdy.ping(id).await?,
            Frame::GoAway => return Ok(()),
            Frame::Reply(_) | Frame::Reset(_) | Frame::Other(_) => {}
        }
    }
    Ok(())
}

/// Returns the value of a field, or an empty one.
fn field(fields: &[(String, String)], name: &str) -> String {
    let found = fields.iter().find(|(key, _)| key == name);
    found.map(|(_, value)| value.clone()).unwrap_or_default()
}

fn channel(channel: u8, data: &[u8]) -> Message {
    Message::Binary([&[channel], data].concat())
}

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
const RESIZE: u8 = 4;
const CLOSE: u8 = 255;
