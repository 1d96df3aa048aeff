//! TCP connections to servers through an HTTP proxy: CONNECT (RFC 9110, section 9.3.6).

use std::borrow::Cow;
use std::convert::Infallible;
use std::fmt;
use std::io;
use std::time::Duration;

use async_trait::async_trait;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tracing::debug;
use tunnel_process::telemetry::is_hidden;
use tunnel_proto::dial::{Resolve as _, SystemResolver, dial};
use tunnel_proto::tcp::{Connect, ServerAddr};
use tunnel_proto::wire::name::Port;

use crate::config::Secret;

mod choice;
mod no_proxy;
#[cfg(test)]
pub(crate) mod testing;
mod url;

pub use choice::{EnvironmentProxy, ProxyChoice};

/// An HTTP proxy that is addressed without TLS. `Display` prints its host and port, without user
/// and password.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpProxy {
    /// DNS name, or IP address without brackets.
    host: String,
    port: Port,
    authorization: Option<Secret>,
}

impl fmt::Display for HttpProxy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(formatter, "[{}]:{}", self.host, self.port)
        } else {
            write!(formatter, "{}:{}", self.host, self.port)
        }
    }
}

#[async_trait]
impl Connect for HttpProxy {
    async fn connect(&self, remote: &ServerAddr) -> io::Result<TcpStream> {
        let proxy = self;
        // The address that was checked, if this host resolved the name.
        let resolved = remote.address.map(|address| address.to_string());
        let target = resolved.as_ref().unwrap_or(&remote.name);
        debug!(%proxy, target, "connecting through the proxy");
        self.tunnel(target).await.map_err(|problem| {
            let kind = problem.kind();
            // One line, since most callers store only the text of an error.
            io::Error::new(kind, format!("proxy {self}: {problem}"))
        })
    }
}

/// The reason why the proxy gave no connection. Contains neither user nor password.
#[derive(Debug, thiserror::Error)]
enum ProxyError {
    #[error("cannot resolve the proxy name: {0}")]
    Resolve(io::Error),
    #[error("cannot connect: {0}")]
    Connect(io::Error),
    #[error("{0:?} is not a valid CONNECT target")]
    Target(String),
    #[error("connection failed before the response: {0}")]
    Broken(io::Error),
    #[error("closed the connection before the end of the response")]
    Closed,
    #[error("does not answer in HTTP/1.x; is this the port of an HTTP proxy?")]
    NotHttp,
    #[error("response head is longer than {HEAD_MAX} bytes")]
    Oversize,
    #[error("refuses {target}: {status_line}{}", advice(.status_line, *.authorized))]
    Refused {
        target: String,
        status_line: StatusLine,
        authorized: bool,
    },
}

impl ProxyError {
    fn kind(&self) -> io::ErrorKind {
        match self {
            Self::Resolve(error) | Self::Connect(error) | Self::Broken(error) => error.kind(),
            Self::Target(_) => io::ErrorKind::InvalidInput,
            Self::Closed => io::ErrorKind::UnexpectedEof,
            Self::NotHttp | Self::Oversize => io::ErrorKind::InvalidData,
            Self::Refused { status_line, .. } if status_line.code == 407 => {
                io::ErrorKind::PermissionDenied
            }
            Self::Refused { .. } => io::ErrorKind::ConnectionRefused,
        }
    }
}

/// Returns advice for the operator after an answer.
fn advice(answer: &StatusLine, authorized: bool) -> Cow<'static, str> {
    let offers_basic = answer
        .schemes
        .iter()
        .any(|scheme| scheme.eq_ignore_ascii_case("basic"));
    let text = match answer.code {
        407 if !answer.schemes.is_empty() && !offers_basic => {
            return format!(
                "; it offers {} only, and agents authenticate with Basic: ask its operator for that \
                 scheme or for a rule that lets this host pass, or run a local proxy that authenticates",
                answer.schemes.join(", ")
            )
            .into();
        }
        407 if authorized => "; it does not take the user and password of the proxy URL",
        407 => {
            "; proxy wants authentication: put user and password in front of the host of the proxy URL"
        }
        403 => "; its rules forbid this host or port: ask its operator to allow CONNECT to it",
        400 | 404 | 405 | 501 => "; is this the port of an HTTP proxy that allows CONNECT?",
        502..=504 => {
            "; it does not reach the server: is --server right, and may the proxy resolve and dial it?"
        }
        _ => "",
    };
    text.into()
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct StatusLine {
    code: u16,
    reason: String,
    /// The schemes of `Proxy-Authenticate`, at most [`SCHEMES_MAX`].
    schemes: Vec<String>,
}

impl fmt::Display for StatusLine {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} {}", self.code, self.reason)?;
        Ok(())
    }
}

impl HttpProxy {
    async fn tunnel(&self, target: &str) -> Result<TcpStream, ProxyError> {
        if target.is_empty() || !target.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(ProxyError::Target(target.to_owned()));
        }
        // One lookup for each connection that is dialed.
        let resolver = SystemResolver::new(1);
        let found = resolver.resolve(&self.host, self.port.get()).await;
        let found = found.map_err(ProxyError::Resolve)?.into_iter();
        let candidates = found.map(|address| Ok::<_, Infallible>(address.into()));
        let dialed = dial(candidates, Instant::now() + DIAL_LIMIT).await;
        let (mut socket, _) = dialed.map_err(|error| ProxyError::Connect(error.into()))?;
        socket.set_nodelay(true).map_err(ProxyError::Broken)?;
        let request = self.request(target);
        socket
            .write_all(request.as_bytes())
            .await
            .map_err(ProxyError::Broken)?;
        let status_line = status_line(&mut socket).await?;
        // After 2xx the content length in a head has no meaning: the tunnel begins after the head.
        if !(200..300).contains(&status_line.code) {
            return Err(ProxyError::Refused {
                target: target.to_owned(),
                status_line,
                authorized: self.authorization.is_some(),
            });
        }
        Ok(socket)
    }

    fn request(&self, target: &str) -> String {
        let authorization = match &self.authorization {
            Some(Secret(value)) => format!("Proxy-Authorization: {value}\r\n"),
            None => String::new(),
        };
        format!(
            "CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{authorization}User-Agent: {USER_AGENT}\r\n\r\n"
        )
    }
}

/// Reads the final answer without a byte after its head, since those bytes are the server's.
async fn status_line(socket: &mut TcpStream) -> Result<StatusLine, ProxyError> {
    let mut room = HEAD_MAX;
    loop {
        let head = head(socket, room).await?;
        let status_line = status(&head).ok_or(ProxyError::NotHttp)?;
        // Interim answers may arrive without a request (RFC 9110, section 15.2). After 101 the
        // connection is no longer HTTP.
        if !(100..200).contains(&status_line.code) || status_line.code == 101 {
            return Ok(status_line);
        }
        room -= head.len();
    }
}

async fn head(socket: &mut TcpStream, room: usize) -> Result<Vec<u8>, ProxyError> {
    let mut head = Vec::new();
    let mut buffer = [0; 1024];
    loop {
        let count = socket.peek(&mut buffer).await.map_err(ProxyError::Broken)?;
        if count == 0 {
            return Err(ProxyError::Closed);
        }
        let previous_len = head.len();
        head.extend_from_slice(&buffer[..count]);
        let end = end_of_head(&head, previous_len);
        head.truncate(end.unwrap_or(head.len()));
        let count_read = head.len() - previous_len;
        socket
            .read_exact(&mut buffer[..count_read])
            .await
            .map_err(ProxyError::Broken)?;
        // Checked at once, since a peer that is not a proxy may wait for the agent while the agent
        // waits for the end of a head.
        if !head.iter().zip(HTTP_1).all(|(is, should)| is == should) {
            return Err(ProxyError::NotHttp);
        }
        if head.len() > room {
            return Err(ProxyError::Oversize);
        }
        if end.is_some() {
            return Ok(head);
        }
    }
}

/// Returns the position of the empty line; `..from` is known to contain no end. Lines may end
/// without CR (RFC 9112, section 2.2).
fn end_of_head(head: &[u8], from: usize) -> Option<usize> {
    (from..head.len())
        .find(|index| {
            let before = &head[..*index];
            head[*index] == b'\n' && (before.ends_with(b"\n") || before.ends_with(b"\n\r"))
        })
        .map(|index| index + 1)
}

fn status(head: &[u8]) -> Option<StatusLine> {
    let line = head.split(|byte| *byte == b'\n').next()?;
    let line = String::from_utf8_lossy(line.strip_prefix(HTTP_1)?);
    let (minor, rest) = line.split_once(' ')?;
    let rest = rest.trim();
    let (code, reason) = rest.split_once(' ').unwrap_or((rest, ""));
    let digits =
        |text: &str, count| text.len() == count && text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(minor, 1) || !digits(code, 3) {
        return None;
    }
    let shown = reason.chars().filter(|character| !is_hidden(*character));
    Some(StatusLine {
        code: code.parse().ok().filter(|code| *code >= 100)?,
        reason: shown.take(REASON_MAX).collect(),
        schemes: schemes(head),
    })
}

/// Returns the schemes of authentication that a head offers (RFC 9110, section 11.7.1).
fn schemes(head: &[u8]) -> Vec<String> {
    let lines = head.split(|byte| *byte == b'\n').skip(1);
    let schemes = lines.filter_map(|line| {
        let line = std::str::from_utf8(line).ok()?;
        let (name, value) = line.split_once(':')?;
        let is_offer = name.eq_ignore_ascii_case("Proxy-Authenticate");
        let scheme = value.split_whitespace().next().filter(|_| is_offer)?;
        let is_token = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        let is_plain = scheme.len() <= SCHEME_MAX && scheme.bytes().all(is_token);
        is_plain.then(|| scheme.to_owned())
    });
    schemes.take(SCHEMES_MAX).collect()
}

/// Returns the head at the beginning of a proxy's answer, with its code and reason. Returns `None`
/// if the bytes do not begin with a whole head. The entry point of the fuzz target.
#[cfg(feature = "test-util")]
pub fn proxy_answer(bytes: &[u8]) -> Option<(&[u8], u16, String)> {
    let head = bytes.get(..end_of_head(bytes, 0)?)?;
    let StatusLine { code, reason, .. } = status(head)?;
    Some((head, code, reason))
}

/// Heads of answers have a few hundred bytes; some proxies add cookies and long explanations.
const HEAD_MAX: usize = 16 << 10;
/// Maximum characters of a reason in an error: enough for any sentence, too few to flood a log.
const REASON_MAX: usize = 120;
/// Schemes in an error.
const SCHEMES_MAX: usize = 4;
/// Maximum characters of a scheme in an error.
const SCHEME_MAX: usize = 20;
const HTTP_1: &[u8] = b"HTTP/1.";
const USER_AGENT: &str = concat!("tunnel-agent/", env!("CARGO_PKG_VERSION"));
/// Longer than those who connect wait.
const DIAL_LIMIT: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests;
