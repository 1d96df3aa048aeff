//! Cuts that stay behind the bytes of their stream.
//!
//! A receiver discards what it has not read of a stream that is reset (RFC 9000, section 3.2), and a
//! FIN would be a clean end. The end that cuts a stream therefore announces the number of bytes that
//! it has written, alone on a unidirectional stream, and leaves the half open. The other end reads
//! up to that number, reports the cut, and stops the half (STOP_SENDING), which is then reset. If
//! that takes longer than [`CUT_LIMIT`], the half is reset anyway.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::task::Context;

use bytes::BytesMut;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use futures_util::task::AtomicWaker;
use parking_lot::Mutex;
use quinn::{Connection, SendStream, StreamId, VarInt};
use tokio::time::timeout;

use crate::transport::{CUT_LIMIT, CutSignal};
use crate::wire::code::ResetCode;
use crate::wire::cut::{CUT_MESSAGE_MAX, CutAnnouncement};
use crate::wire::frame;

/// Announcements that a peer may have under way at once. More wait, and those streams are reset
/// after [`CUT_LIMIT`] at the latest.
pub(super) const ANNOUNCEMENTS_MAX: u32 = 64;
/// Announcements that are remembered for streams that this end has not accepted yet. A further one
/// replaces the oldest, whose stream is reset by its sender.
const EARLY_MAX: usize = 64;
/// No cut was announced.
const NO_OFFSET: u64 = u64::MAX;

/// The announced cut of the half that the peer sends.
#[derive(Debug)]
pub(super) struct AnnouncedCut {
    offset: AtomicU64,
    code: AtomicU32,
    is_lost: AtomicBool,
    reader: AtomicWaker,
}

impl CutSignal for AnnouncedCut {
    fn is_cut(&self) -> bool {
        self.is_lost.load(Ordering::Relaxed) || self.announced().is_some()
    }
}

impl AnnouncedCut {
    fn new(is_lost: bool) -> Self {
        Self {
            offset: AtomicU64::new(NO_OFFSET),
            code: AtomicU32::new(0),
            is_lost: AtomicBool::new(is_lost),
            reader: AtomicWaker::new(),
        }
    }

    fn announce(&self, cut: CutAnnouncement) {
        self.code.store(cut.code.number(), Ordering::Relaxed);
        self.offset.store(cut.offset, Ordering::Release);
        self.reader.wake();
    }

    /// Returns the code of the cut if `read` bytes are all that were written before it.
    pub(super) fn after(&self, read: u64) -> Option<ResetCode> {
        let is_reached = self.offset.load(Ordering::Acquire) <= read;
        is_reached.then(|| self.code())
    }

    /// Returns the code of the cut, even if bytes before it are unread.
    pub(super) fn announced(&self) -> Option<ResetCode> {
        let is_announced = self.offset.load(Ordering::Acquire) != NO_OFFSET;
        is_announced.then(|| self.code())
    }

    fn code(&self) -> ResetCode {
        ResetCode::from_number(self.code.load(Ordering::Relaxed))
    }

    /// Registers the task to wake when a cut is announced.
    pub(super) fn register(&self, cx: &Context<'_>) {
        self.reader.register(cx.waker());
    }
}

/// The cuts that the peer of a session has announced.
#[derive(Debug, Default)]
pub(super) struct AnnouncedCuts(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    open: HashMap<StreamId, Arc<AnnouncedCut>>,
    /// Announcements that arrived before their stream.
    early: VecDeque<CutAnnouncement>,
    /// The number of streams that this end has accepted.
    accepted: u64,
    /// Set when the session has ended: all of its streams are cut.
    is_lost: bool,
}

impl AnnouncedCuts {
    /// Registers a stream that this end has opened.
    pub(super) fn opened(&self, id: StreamId) -> Arc<AnnouncedCut> {
        let mut state = self.0.lock();
        let cut = Arc::new(AnnouncedCut::new(state.is_lost));
        state.open.insert(id, cut.clone());
        cut
    }

    /// Registers a stream that this end has accepted, which happens in the order of the ids.
    pub(super) fn accepted(&self, id: StreamId) -> Arc<AnnouncedCut> {
        let cut = self.opened(id);
        let mut state = self.0.lock();
        state.accepted = id.index() + 1;
        let is_for = |early: &CutAnnouncement| early.stream == VarInt::from(id).into_inner();
        if let Some(index) = state.early.iter().position(is_for)
            && let Some(early) = state.early.remove(index)
        {
            cut.announce(early);
        }
        cut
    }

    /// Removes a stream that has ended.
    pub(super) fn remove(&self, id: StreamId) {
        self.0.lock().open.remove(&id);
    }

    fn announce(&self, local: quinn::Side, cut: CutAnnouncement) {
        let Ok(id) = VarInt::from_u64(cut.stream) else {
            return;
        };
        let id = StreamId::from(id);
        let mut state = self.0.lock();
        if let Some(open) = state.open.get(&id) {
            return open.announce(cut);
        }
        // The stream has ended, unless it is still to be accepted.
        if id.initiator() != local && id.index() >= state.accepted {
            if state.early.len() >= EARLY_MAX {
                state.early.pop_front();
            }
            state.early.push_back(cut);
        }
    }
}

/// Cuts all streams of a session when it is dropped, however the task that owns it ends.
struct LostOnDrop(Arc<AnnouncedCuts>);

impl Drop for LostOnDrop {
    fn drop(&mut self) {
        let mut state = self.0.0.lock();
        state.is_lost = true;
        for open in state.open.values() {
            open.is_lost.store(true, Ordering::Relaxed);
        }
    }
}

/// Receives the peer's announcements until the session ends. All streams that the peer has opened
/// for them are read at once, so that what they hold is bounded whatever the peer sends on them.
pub(super) async fn receive_cuts(connection: Connection, cuts: Arc<AnnouncedCuts>) {
    let cuts = LostOnDrop(cuts);
    let local = connection.side();
    let mut arriving = FuturesUnordered::new();
    loop {
        tokio::select! {
            accepted = connection.accept_uni() => match accepted {
                Ok(mut stream) => arriving.push(async move {
                    stream.read_to_end(CUT_MESSAGE_MAX + 1).await
                }),
                Err(_ended) => return,
            },
            Some(read) = arriving.next() => {
                // What is no announcement is ignored.
                let mut message = BytesMut::from(&read.unwrap_or_default()[..]);
                let content = frame::take(&mut message, CUT_MESSAGE_MAX);
                if let Ok(Some(content)) = content
                    && let Ok(cut) = CutAnnouncement::decode(&content)
                {
                    cuts.0.announce(local, cut);
                }
            }
        }
    }
}

/// Announces that `send` is cut behind the `offset` bytes that were written to it, waits until the
/// peer has read them, and resets it.
pub(super) async fn cut_behind(
    connection: Connection,
    mut send: SendStream,
    offset: u64,
    code: ResetCode,
) {
    let announced = async {
        let mut message = BytesMut::new();
        let cut = CutAnnouncement {
            stream: VarInt::from(send.id()).into_inner(),
            offset,
            code,
        };
        let (Ok(()), Ok(mut announcement)) =
            (cut.encode(&mut message), connection.open_uni().await)
        else {
            return;
        };
        if announcement.write_all(&message).await.is_ok() && announcement.finish().is_ok() {
            let _stopped_or_lost = send.stopped().await;
        }
    };
    let _elapsed = timeout(CUT_LIMIT, announced).await;
    let _already_ended = send.reset(code.number().into());
}

#[cfg(test)]
mod tests {
    use quinn::{Dir, Side};

    use super::*;

    fn cut(id: StreamId, offset: u64) -> CutAnnouncement {
        CutAnnouncement {
            stream: VarInt::from(id).into_inner(),
            offset,
            code: ResetCode::PeerCut,
        }
    }

    #[test]
    fn cut_is_behind_its_bytes() {
        let cuts = AnnouncedCuts::default();
        let id = StreamId::new(Side::Client, Dir::Bi, 3);
        let open = cuts.opened(id);
        assert_eq!((open.announced(), open.after(u64::MAX - 1)), (None, None));
        cuts.announce(Side::Client, cut(id, 100));
        assert_eq!(open.announced(), Some(ResetCode::PeerCut));
        assert_eq!(open.after(99), None);
        assert_eq!(open.after(100), Some(ResetCode::PeerCut));
    }

    #[test]
    fn streams_of_a_lost_session_are_cut() {
        let cuts = Arc::<AnnouncedCuts>::default();
        let id = |index| StreamId::new(Side::Client, Dir::Bi, index);
        let before = cuts.opened(id(0));
        assert!(!before.is_cut());
        drop(LostOnDrop(cuts.clone()));
        assert!(before.is_cut() && cuts.opened(id(1)).is_cut());
    }

    #[test]
    fn announcement_before_its_stream_is_remembered_and_bounded() {
        let cuts = AnnouncedCuts::default();
        let id = |index| StreamId::new(Side::Server, Dir::Bi, index);
        cuts.accepted(id(0));
        cuts.remove(id(0));
        let own = StreamId::new(Side::Client, Dir::Bi, 70);
        for ended_or_own in [id(0), own] {
            cuts.announce(Side::Client, cut(ended_or_own, 1));
        }
        assert!(cuts.0.lock().early.is_empty());
        for index in 1..=65 {
            cuts.announce(Side::Client, cut(id(index), index));
        }
        assert_eq!(cuts.0.lock().early.len(), EARLY_MAX);
        assert_eq!(cuts.accepted(id(1)).announced(), None, "the oldest");
        assert!(cuts.accepted(id(65)).announced().is_some());
        assert_eq!(cuts.0.lock().early.len(), EARLY_MAX - 1);
    }
}
