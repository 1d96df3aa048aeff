//! Bodies in chunked coding, as the check of request heads follows them and as hyper reads them.

use std::convert::Infallible;
use std::error::Error as _;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use anyhow::{Result, ensure};
use bytes::{Buf, Bytes};
use http::{Request, Response};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tunnel_server::ingress::fuzz::{ChunkedEnd, chunked_end, head_errors};

pub(super) fn bodies() -> Result<Vec<Vec<u8>>> {
    Ok([
        "0\r\n\r\n",
        "5\r\nhello\r\n0\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n",
        "5;a=b\r\n0\r\n\r\n\r\n000 \t;x\r\n\r\n",
        "A\r\n0123456789\r\n0\r\nX: y\r\nZ: \r\n\r\nGET / HTTP/1.1\r\n",
        "1\r\n\n\r\n00;x\r\n\r\n\r\n",
        "ffffffffffffffff\r\n",
        "10000000000000000\r\n",
        "0\n\n",
        "1\r\na0\r\n\r\n",
        "0;a\n\r\n",
        "0\r\nX: y\rZ: a\r\n\r\n",
        "0\r\n\n\r\n",
    ]
    .map(|body| body.as_bytes().to_vec())
    .into())
}

/// The end of a body does not depend on how the body arrives, and is where hyper finds it. What hyper
/// refuses has no end, unless hyper refuses the trailer fields.
pub(super) fn check_body(input: &[u8]) -> Result<()> {
    let at_once = chunked_end(input, input.len());
    let connection = [HEAD.as_bytes(), input].concat();
    let errors = head_errors(&connection, connection.len());
    for length in [1, 3, 7] {
        let in_pieces = chunked_end(input, length);
        ensure!(
            in_pieces == at_once,
            "{in_pieces:?}, and {at_once:?} at once"
        );
        let in_pieces = head_errors(&connection, length);
        ensure!(in_pieces == errors, "{in_pieces:?}, and {errors:?} at once");
    }
    for length in [1, 5, connection.len()] {
        let by_hyper = hyper_end(&connection, length)?;
        let agrees = match (at_once, by_hyper) {
            (ChunkedEnd::At(own), ChunkedEnd::Malformed) => has_trailers(&input[..own])?,
            (ChunkedEnd::Within, ChunkedEnd::Malformed) => has_trailers(input)?,
            (own, by_hyper) => own == by_hyper,
        };
        ensure!(
            agrees,
            "{at_once:?}, and {by_hyper:?} for hyper by {length}"
        );
    }
    Ok(())
}

/// Returns whether a body has trailer fields, whose syntax the check does not know: for hyper an empty
/// line in their place would be its end.
fn has_trailers(body: &[u8]) -> Result<bool> {
    for length in (2..body.len()).filter(|length| body[..*length].ends_with(b"\r\n")) {
        let without = [HEAD.as_bytes(), &body[..length], b"\r\n"].concat();
        if hyper_end(&without, without.len())? == ChunkedEnd::At(length + 2) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns whether hyper has read all bytes and expects more.
fn is_end_of_input(error: &hyper::Error) -> bool {
    let cause = error.source();
    let cause = cause.and_then(|cause| cause.downcast_ref::<io::Error>());
    error.is_incomplete_message()
        || cause.is_some_and(|cause| cause.kind() == io::ErrorKind::UnexpectedEof)
}

/// Reads a request with hyper, and returns the end of its body.
fn hyper_end(connection: &[u8], length: usize) -> Result<ChunkedEnd> {
    let (is_complete, is_malformed) = (AtomicBool::new(false), AtomicBool::new(false));
    let service = service_fn(|request: Request<Incoming>| {
        let (is_complete, is_malformed) = (&is_complete, &is_malformed);
        Box::pin(async move {
            match request.into_body().collect().await {
                Ok(_body) => is_complete.store(true, Ordering::Relaxed),
                Err(error) if is_end_of_input(&error) => {}
                Err(_error) => is_malformed.store(true, Ordering::Relaxed),
            }
            let answer = Response::builder().header("Connection", "close");
            Ok::<_, Infallible>(answer.body(Empty::<Bytes>::new()).unwrap_or_default())
        })
    });
    let input = Pieces {
        left: Bytes::copy_from_slice(connection),
        length,
    };
    let mut serving = http1::Builder::new()
        .half_close(true)
        .serve_connection(TokioIo::new(input), service);
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    // The errors are those of the body.
    let _ended = runtime.block_on(std::future::poll_fn(|cx| serving.poll_without_shutdown(cx)));
    let parts = serving.into_parts();
    let unread = parts.read_buf.len() + parts.io.into_inner().left.len();
    Ok(if is_complete.load(Ordering::Relaxed) {
        ChunkedEnd::At(connection.len() - HEAD.len() - unread)
    } else if is_malformed.load(Ordering::Relaxed) {
        ChunkedEnd::Malformed
    } else {
        ChunkedEnd::Within
    })
}

const HEAD: &str = "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";

/// Bytes that arrive in pieces of a length. What is written is dropped.
struct Pieces {
    left: Bytes,
    length: usize,
}

impl AsyncRead for Pieces {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let count = self.left.remaining().min(self.length).min(out.remaining());
        out.put_slice(&self.left.split_to(count));
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Pieces {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        Poll::Ready(Ok(data.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
