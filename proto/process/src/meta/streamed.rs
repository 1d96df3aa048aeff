//! Bodies that are made in chunks while the caller reads them.

use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{Either, Full};
use hyper::body::{Body, Frame};
use tokio::task::JoinError;
use tokio::time::{Instant, sleep};
use tracing::warn;

use crate::making;

/// A body in memory, or one that is made while it is read.
pub(super) type MetaBody = Either<Full<Bytes>, StreamedBody>;

/// A body for a source, which has one chunk in making at a time over all its connections.
pub(super) struct StreamedBody {
    source: IpAddr,
    /// Makes the next chunk. `None` after the last one.
    making: Option<Pin<Box<dyn Future<Output = Made> + Send>>>,
}

/// The chunks of a response. They are made outside the runtime's own threads, one of a source at a
/// time. After an error the connection ends before the response is complete.
pub type Chunks = Box<dyn Iterator<Item = io::Result<Bytes>> + Send>;

/// The next chunk, those after it, and the time that it took; or a panic.
type Made = Result<(Option<io::Result<Bytes>>, Chunks, Duration), JoinError>;

impl StreamedBody {
    pub(super) fn new(source: IpAddr, chunks: Chunks) -> Self {
        Self {
            source,
            making: Some(Box::pin(make(source, chunks, None))),
        }
    }
}

/// Makes the next chunk. The source has half a processor for its bodies: a chunk waits for as long as
/// the one before it took, and the first one as other documents do.
async fn make(source: IpAddr, mut chunks: Chunks, before: Option<Duration>) -> Made {
    let mut permit = making::acquire(source).await;
    match before {
        Some(took) => sleep(took).await,
        None => permit.pause().await,
    }
    let making = permit.make(move || {
        let began = Instant::now();
        let chunk = chunks.next();
        (chunk, chunks, began.elapsed())
    });
    making.await
}

impl Body for StreamedBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let Some(making) = &mut self.making else {
            return Poll::Ready(None);
        };
        let made = ready!(making.as_mut().poll(context));
        self.making = None;
        let frame = match made {
            Ok((Some(Ok(chunk)), chunks, took)) => {
                self.making = Some(Box::pin(make(self.source, chunks, Some(took))));
                Some(Ok(Frame::data(chunk)))
            }
            Ok((None, ..)) => None,
            Ok((Some(Err(error)), ..)) => Some(Err(error)),
            Err(panic) => Some(Err(io::Error::other(panic))),
        };
        if let Some(Err(error)) = &frame {
            warn!(%error, "cannot make a page of the meta port");
        }
        Poll::Ready(frame)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use http_body_util::BodyExt;

    use super::*;

    const SOURCE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 77));

    #[tokio::test]
    async fn chunks_are_made_while_they_are_read() {
        let made = Arc::new(AtomicUsize::new(0));
        let counted = made.clone();
        let chunks = (0..100).map(move |number: u8| {
            counted.fetch_add(1, Ordering::Relaxed);
            Ok(Bytes::from(vec![number]))
        });
        let mut body = StreamedBody::new(SOURCE, Box::new(chunks));
        assert_eq!(made.load(Ordering::Relaxed), 0);
        for number in 0..10 {
            let frame = body.frame().await.unwrap().unwrap();
            assert_eq!(frame.into_data().unwrap(), [number][..]);
            assert_eq!(made.load(Ordering::Relaxed), usize::from(number) + 1);
        }
        let remaining = body.collect().await.unwrap().to_bytes();
        assert_eq!(remaining.len(), 90);
    }

    /// Each has its turn, so that none of them waits until another one is complete.
    #[tokio::test(start_paused = true)]
    async fn bodies_of_one_source_that_are_read_at_once_advance_together() {
        const CHUNKS: usize = 50;
        let read = async || {
            let chunks = (0..CHUNKS).map(|_| Ok(Bytes::from_static(b"x")));
            let mut body = StreamedBody::new(SOURCE, Box::new(chunks));
            let mut frames = 0;
            while let Some(frame) = body.frame().await {
                frame.unwrap();
                frames += 1;
                READ.fetch_add(1, Ordering::Relaxed);
            }
            // What the others have read when this one is complete.
            (frames, READ.load(Ordering::Relaxed))
        };
        static READ: AtomicUsize = AtomicUsize::new(0);
        let bodies = futures_util::future::join_all((0..8).map(|_| read())).await;
        for (frames, read) in bodies {
            assert_eq!(frames, CHUNKS);
            assert!(read > 8 * CHUNKS * 3 / 4, "{read} of all chunks were read");
        }
    }

    #[tokio::test]
    async fn error_or_panic_ends_the_body_without_its_end() {
        let failing = [Ok("a".into()), Err(io::Error::other("a test"))];
        let panicking = ["a", "b"].map(|text| {
            move || {
                assert_eq!(text, "a", "a test");
                Ok(Bytes::from(text))
            }
        });
        let bodies: [Chunks; 2] = [
            Box::new(failing.into_iter()),
            Box::new(panicking.into_iter().map(|chunk| chunk())),
        ];
        for chunks in bodies {
            let mut body = StreamedBody::new(SOURCE, chunks);
            assert!(body.frame().await.unwrap().is_ok());
            assert!(body.frame().await.unwrap().is_err());
            assert!(body.frame().await.is_none());
        }
    }
}
