//! A request head that is larger than the permit of its connection counts for. It is read without
//! hyper, within memory that is reserved from the buffer pool before the bytes are read, and hyper
//! gets it when it is complete. After its response hyper is replaced, which frees the buffers.

use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;
use tracing::debug;
use tunnel_proto::relay::PollCut;

use super::conn::HttpConn;
use super::head_check::HeadPhase;
use super::head_check::size::{FIELDS_MAX, HeadExcess, HeadLimits, HeadSize, TARGET_MAX_BYTES};
use super::timeouts::{TimedStream, TimeoutKind};
use crate::config::{CONNECTION_HEAD_BYTES, Limit};
use crate::ingress::error::ProxyError;
use crate::ingress::head_memory::HeadPermit;
use crate::ingress::request_record::RequestRecord;
use crate::outcome::Outcome;

/// Memory of a head, in percent of its bytes: the buffer of hyper, and the copy for the target, which
/// both can be twice as large as their content, and the copy for a second attempt.
const MEMORY_PERCENT: u64 = 500;
/// Memory of one field, in addition to its bytes.
const FIELD_BYTES: u64 = 512;
/// Time for the answer to a head that is refused.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// A complete head, and the memory for it.
pub(super) struct LargeHead {
    pub(super) size: HeadSize,
    _memory: HeadPermit,
}

/// Why a large head was not read.
pub(super) enum LargeHeadEnd {
    /// The server has answered.
    Refused,
    /// The caller disconnected, or the server drains.
    Gone,
    Evicted,
    TimedOut(TimeoutKind),
}

impl HttpConn {
    /// Reads a large head, whose beginning `stream` has withheld from hyper. Then `stream` has the
    /// whole head.
    pub(super) async fn read_large_head<S>(
        &self,
        stream: &mut TimedStream<S>,
    ) -> Result<LargeHead, LargeHeadEnd>
    where
        S: AsyncRead + AsyncWrite + PollCut + Unpin,
    {
        self.timeouts.begin_large_head();
        let refused = tokio::select! {
            biased;
            read = self.read_with_memory(stream) => match read {
                Ok(Ok(head)) => return Ok(head),
                Ok(Err(refused)) => refused,
                Err(Gone) => return Err(LargeHeadEnd::Gone),
            },
            () = self.caller.permit.evicted() => return Err(LargeHeadEnd::Evicted),
            () = self.ingress.shutdown.drain().cancelled() => return Err(LargeHeadEnd::Gone),
            expired = self.timeouts.expired_in_state() => {
                return Err(LargeHeadEnd::TimedOut(expired));
            }
        };
        self.refuse_head(stream, &refused).await;
        Err(LargeHeadEnd::Refused)
    }

    async fn read_with_memory<S>(
        &self,
        stream: &mut TimedStream<S>,
    ) -> Result<Result<LargeHead, ProxyError>, Gone>
    where
        S: AsyncRead + Unpin,
    {
        let ingress = &self.ingress;
        let limits = HeadLimits::with_memory(ingress.limits.load().request_head_bytes);
        let mut memory = ingress.head_memory.permit(self.caller.addr.source());
        let mut head = stream.take_large_head();
        loop {
            let data = match stream.read_unchecked().await {
                Ok(data) if !data.is_empty() => data,
                Ok(_) | Err(_) => return Err(Gone),
            };
            let progress = self.timeouts.read_large_head(&data, limits);
            if let HeadPhase::Excess(excess) = progress.phase {
                return Ok(Err(too_large(excess, limits)));
            }
            if !memory.grow(memory_of(progress.size)) {
                return Ok(Err(no_memory()));
            }
            append(&mut head, data.get(..progress.checked).unwrap_or_default());
            stream.put_back_unchecked(data.slice(progress.checked..));
            if progress.phase == HeadPhase::End {
                stream.put_back(head.freeze());
                return Ok(Ok(LargeHead {
                    size: progress.size,
                    _memory: memory,
                }));
            }
        }
    }

    async fn refuse_head<S: AsyncWrite + PollCut + Unpin>(
        &self,
        stream: &mut TimedStream<S>,
        failure: &ProxyError,
    ) {
        let metrics = &self.ingress.metrics;
        let mut record = RequestRecord::start(
            self.listener.name,
            self.caller.addr,
            "large request head",
            metrics,
        );
        record.unreadable();
        record.caller(&self.caller.identity);
        record.status(failure.outcome.status());
        record.fail(failure);
        let answer = failure.last_answer();
        let answered = async {
            stream.write_all(answer.as_bytes()).await?;
            stream.shutdown().await
        };
        match timeout(ANSWER_TIMEOUT, answered).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => debug!(%error, "cannot answer a head that is too large"),
            Err(_elapsed) => debug!("answer to a head that is too large timed out"),
        }
    }
}

/// The caller's direction has ended.
struct Gone;

/// Appends bytes without memory for twice as many.
fn append(head: &mut BytesMut, data: &[u8]) {
    if head.capacity() - head.len() < data.len() {
        let mut larger = BytesMut::with_capacity(head.len() + data.len().max(head.len() / 4));
        larger.extend_from_slice(head);
        *head = larger;
    }
    head.extend_from_slice(data);
}

fn memory_of(size: HeadSize) -> u64 {
    let (bytes, fields) = (size.bytes as u64, size.fields as u64);
    bytes * MEMORY_PERCENT / 100 + fields * FIELD_BYTES
}

fn too_large(excess: HeadExcess, limits: HeadLimits) -> ProxyError {
    match excess {
        HeadExcess::Target => ProxyError::new(
            Outcome::UriTooLong,
            format!(
                "the request target is longer than {TARGET_MAX_BYTES} bytes; a long script for kubectl \
                 exec goes to its standard input (-i), or into a file"
            ),
        ),
        HeadExcess::Bytes => ProxyError::new(
            Outcome::HeadTooLarge,
            format!("the request head is larger than {} bytes", limits.bytes),
        )
        .with_limit(Limit::RequestHeadBytes),
        HeadExcess::Fields => ProxyError::new(
            Outcome::HeadTooLarge,
            format!("the request head has more than {FIELDS_MAX} fields"),
        ),
    }
}

fn no_memory() -> ProxyError {
    ProxyError::new(
        Outcome::Overloaded,
        format!(
            "the server has no memory for a request head of more than {} KiB or 100 fields at this \
             moment; try again later",
            CONNECTION_HEAD_BYTES >> 10
        ),
    )
    .with_limit(Limit::BufferPool)
}
