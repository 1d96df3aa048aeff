//! The head of a request that was sent, as bytes. Few requests are sent a second time, and a clone of the
//! parsed head has several times as many allocations.

use std::convert::Infallible;
use std::fmt;
use std::future::ready;

use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response};
use http_body_util::Empty;
use hyper::body::Incoming;
use hyper::server::conn::http1::Builder;
use hyper::service::service_fn;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;

use crate::ingress::http::head_check::size::FIELDS_MAX;

/// Fields that the server may add to those of a caller.
const ADDED_FIELDS: usize = 8;
/// Smallest buffer that hyper accepts.
const BUFFER_MIN_BYTES: usize = 8 * 1024;

/// A head as hyper has written it.
pub(super) struct SentHead(Box<[u8]>);

impl fmt::Debug for SentHead {
    /// Leaves out the content, which has credentials.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "SentHead({} bytes)", self.0.len())
    }
}

impl From<&[u8]> for SentHead {
    fn from(bytes: &[u8]) -> Self {
        Self(bytes.into())
    }
}

impl SentHead {
    /// Returns the parsed head. hyper reads it, because it alone parses heads, and keeps the case of the
    /// names.
    pub(super) async fn parse(&self) -> Option<Parts> {
        let parsed = Mutex::new(None);
        let service = service_fn(|request: Request<Incoming>| {
            *parsed.lock() = Some(request.into_parts().0);
            ready(Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new())))
        });
        let mut builder = Builder::new();
        builder
            .header_read_timeout(None)
            .max_headers(FIELDS_MAX + ADDED_FIELDS)
            .max_buf_size(BUFFER_MIN_BYTES.max(self.0.len() + 1))
            .preserve_header_case(true);
        let io = TokioIo::new(tokio::io::join(&*self.0, tokio::io::sink()));
        let _answered = builder.serve_connection(io, service).await;
        let mut head = parsed.into_inner()?;
        head.extensions.remove::<OnUpgrade>();
        Some(head)
    }
}

#[cfg(test)]
mod tests {
    use hyper::client::conn::http1::Builder;
    use tokio::io::{AsyncReadExt, duplex};

    use super::*;

    /// Returns the head that hyper sends for a request.
    async fn sent(request: Request<Empty<Bytes>>) -> String {
        let (near, mut far) = duplex(1 << 20);
        let mut builder = Builder::new();
        builder.preserve_header_case(true);
        let (mut sender, connection) = builder.handshake(TokioIo::new(near)).await.unwrap();
        let mut head = Vec::new();
        let reading = async {
            while !head.ends_with(b"\r\n\r\n") {
                assert_ne!(far.read_buf(&mut head).await.unwrap(), 0);
            }
        };
        tokio::select! {
            () = reading => {}
            _unanswered = async { tokio::join!(sender.send_request(request), connection) } => {}
        }
        String::from_utf8(head).unwrap()
    }

    #[tokio::test]
    async fn request_is_the_same_the_second_time() {
        let long = format!(
            "GET / HTTP/1.1\r\nhost: a\r\nCookie: {}\r\n\r\n",
            "z".repeat(1 << 19)
        );
        let fields: String = (0..FIELDS_MAX)
            .map(|field| format!("X-{field}: y\r\n"))
            .collect();
        for head in [
            "GET /a?b=%2f HTTP/1.1\r\nHost: a:1\r\nX-lower-UPPER: 1\r\nx-LOWER-upper: 2\r\nAccept: */*\r\n\r\n",
            "HEAD / HTTP/1.1\r\nhOsT: a\r\nConnection: close, TE\r\nTE: trailers\r\n\r\n",
            "OPTIONS /x HTTP/1.1\r\nhost: a\r\nauthorization: Bearer x\r\n\r\n",
            "POST /exec HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n",
            "DELETE / HTTP/1.1\r\nHost: a\r\nEmpty:\r\n\r\n",
            &long,
            &format!("GET / HTTP/1.1\r\n{fields}\r\n"),
        ] {
            let parsed = SentHead::from(head.as_bytes()).parse().await.unwrap();
            let again = sent(Request::from_parts(parsed, Empty::new())).await;
            assert_eq!(again, head);
        }
    }

    #[tokio::test]
    async fn part_of_a_head_is_no_request() {
        for head in ["", "GET / HTTP/1.1\r\nHost: a\r\n"] {
            let parsed = SentHead::from(head.as_bytes()).parse().await;
            assert!(parsed.is_none(), "{head:?}");
        }
    }
}
