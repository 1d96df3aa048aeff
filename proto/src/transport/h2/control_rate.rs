//! Limits the rate of control frames from a peer that moves no data. Each frame costs this end a
//! poll of h2, and SETTINGS and PING also cost an answer.

use std::time::Duration;

use tokio::time::Instant;

/// Control frames per second that a peer may send without data. Keep-alive and probes need fewer
/// than one.
const FRAMES_PER_SECOND: u64 = 10_000;
/// Each KiB of data, in either direction, allows one more frame. A receiver of bulk data sends
/// WINDOW_UPDATE and no DATA.
const BYTES_PER_FRAME: u64 = 1024;
const WINDOW: Duration = Duration::from_secs(1);

/// Length of the client's connection preface (RFC 9113, section 3.4), which is not a frame.
pub(super) const PREFACE_BYTES: usize = 24;
/// Length of a frame header: length (24 bits), type, flags, stream id (RFC 9113, section 4.1).
const HEADER_BYTES: usize = 9;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const CONTINUATION: u8 = 9;

/// The error for a peer that floods the connection with control frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("peer sends more than {FRAMES_PER_SECOND} control frames a second without data")]
pub(super) struct ControlFlood;

/// A counter of a connection's frames in windows of one second. The counter parses the frame
/// headers in the connection's bytes.
#[derive(Debug)]
pub(super) struct ControlRate {
    /// Bytes until the next frame header.
    skip: usize,
    header: [u8; HEADER_BYTES],
    header_len: usize,
    since: Instant,
    frames: u64,
    data_bytes: u64,
}

impl ControlRate {
    /// Creates a counter for a connection on which `skip` bytes precede the first frame header.
    pub(super) fn new(skip: usize) -> Self {
        Self {
            skip,
            header: [0; HEADER_BYTES],
            header_len: 0,
            since: Instant::now(),
            frames: 0,
            data_bytes: 0,
        }
    }

    /// Counts bytes sent to the peer.
    pub(super) fn sent(&mut self, bytes: usize) {
        self.data_bytes += bytes as u64;
    }

    /// Counts the frames that begin in `bytes`.
    pub(super) fn received(&mut self, mut bytes: &[u8]) -> Result<(), ControlFlood> {
        let frames_before = self.frames;
        loop {
            let skipped = self.skip.min(bytes.len());
            self.skip -= skipped;
            bytes = bytes.get(skipped..).unwrap_or_default();
            let Some((first, rest)) = bytes.split_first() else {
                break;
            };
            if let Some(slot) = self.header.get_mut(self.header_len) {
                *slot = *first;
                self.header_len += 1;
                bytes = rest;
            }
            if self.header_len == HEADER_BYTES {
                self.frame();
            }
        }
        if self.frames == frames_before {
            return Ok(());
        }
        let now = Instant::now();
        if now.duration_since(self.since) >= WINDOW {
            (self.since, self.frames, self.data_bytes) = (now, self.frames - frames_before, 0);
        }
        if self.frames > FRAMES_PER_SECOND + self.data_bytes / BYTES_PER_FRAME {
            return Err(ControlFlood);
        }
        Ok(())
    }

    /// Counts a frame after its header is complete.
    fn frame(&mut self) {
        let [high, middle, low, kind, ..] = self.header;
        let length = u32::from_be_bytes([0, high, middle, low]);
        self.skip = usize::try_from(length).unwrap_or(usize::MAX);
        self.header_len = 0;
        match kind {
            DATA => self.data_bytes += u64::from(length),
            // A stream that begins may need a WINDOW_UPDATE.
            HEADERS => self.data_bytes += BYTES_PER_FRAME,
            // h2 limits CONTINUATION (CVE-2024-27316). RST_STREAM costs h2 only a lookup, and a
            // session must survive bursts of it.
            RST_STREAM | CONTINUATION => {}
            _control_or_unknown => self.frames += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    const PING: u8 = 6;
    const WINDOW_UPDATE: u8 = 8;
    const UNKNOWN: u8 = 0xaa;

    fn frame(kind: u8, payload: usize) -> Vec<u8> {
        let length = u32::try_from(payload).unwrap().to_be_bytes();
        let mut frame = vec![length[1], length[2], length[3], kind, 0, 0, 0, 0, 0];
        frame.resize(HEADER_BYTES + payload, 0xff);
        frame
    }

    fn burst(rate: &mut ControlRate, kind: u8, count: u64) -> Result<(), ControlFlood> {
        let frame = frame(kind, 8);
        (0..count).try_for_each(|_| rate.received(&frame))
    }

    #[tokio::test(start_paused = true)]
    async fn control_frames_without_data_are_bounded_by_the_second() {
        for kind in [2, 4, PING, 7, WINDOW_UPDATE, UNKNOWN] {
            let mut rate = ControlRate::new(0);
            assert_eq!(
                burst(&mut rate, kind, FRAMES_PER_SECOND),
                Ok(()),
                "at the limit"
            );
            advance(WINDOW).await;
            assert_eq!(
                burst(&mut rate, kind, FRAMES_PER_SECOND),
                Ok(()),
                "next second"
            );
            assert_eq!(burst(&mut rate, kind, 1), Err(ControlFlood), "one above");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn data_in_either_direction_allows_more() {
        let mut receiver = ControlRate::new(0);
        receiver.sent(64 << 20);
        assert_eq!(
            burst(&mut receiver, WINDOW_UPDATE, 3 * FRAMES_PER_SECOND),
            Ok(())
        );
        let mut sender = ControlRate::new(0);
        for _ in 0..4096 {
            assert_eq!(sender.received(&frame(DATA, 16 << 10)), Ok(()));
        }
        assert_eq!(burst(&mut sender, PING, 3 * FRAMES_PER_SECOND), Ok(()));
        advance(WINDOW).await;
        assert_eq!(
            burst(&mut sender, PING, FRAMES_PER_SECOND + 1),
            Err(ControlFlood),
            "data of the second before does not count"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn frames_are_found_however_the_bytes_are_split() {
        let mut bytes = vec![b'P'; PREFACE_BYTES];
        for (kind, payload) in [(4, 18), (HEADERS, 40), (DATA, 300), (PING, 8), (UNKNOWN, 0)] {
            bytes.extend(frame(kind, payload));
        }
        for split in 1..bytes.len() {
            let mut rate = ControlRate::new(PREFACE_BYTES);
            for piece in bytes.chunks(split) {
                assert_eq!(rate.received(piece), Ok(()));
            }
            assert_eq!(
                (rate.frames, rate.data_bytes),
                (3, 300 + BYTES_PER_FRAME),
                "split by {split}"
            );
        }
    }
}
