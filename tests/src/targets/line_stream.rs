//! Endless answers whose lines a test or a timer emits one at a time.

use std::io;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::sync::broadcast::{self, error::RecvError};
use tokio::time::{Interval, MissedTickBehavior, interval};

use super::answers::{After, Request, chunk, last_chunk};
use super::byte_stream::ByteStream;

/// Sends lines to all followers of a target.
#[derive(Debug)]
pub(crate) struct LineStream {
    events: broadcast::Sender<Event>,
}

#[derive(Debug, Clone)]
enum Event {
    Line(String),
    End,
}

/// Options of one answer that follows a [`LineStream`].
#[derive(Debug, Default)]
pub(crate) struct FollowOptions {
    /// Line sent at once.
    pub(crate) first_line: Option<String>,
    /// Interval of numbered lines, sent in addition to those of the stream.
    pub(crate) every: Option<Duration>,
    /// Node name in the numbered lines.
    pub(crate) node: String,
}

impl LineStream {
    pub(crate) fn new() -> Self {
        Self {
            events: broadcast::Sender::new(BACKLOG),
        }
    }

    /// Sends `line` (without line end) to all followers and returns their number.
    pub(crate) fn emit(&self, line: &str) -> usize {
        self.events.send(Event::Line(line.to_owned())).unwrap_or(0)
    }

    /// Ends all answers cleanly and returns their number.
    pub(crate) fn end(&self) -> usize {
        self.events.send(Event::End).unwrap_or(0)
    }

    pub(crate) fn followers(&self) -> usize {
        self.events.receiver_count()
    }

    /// Answers `request` with future lines until the stream ends, the peer is gone, or the peer is
    /// so slow that lines were lost. In the last case the connection is cut.
    pub(crate) async fn follow(
        &self,
        wire: &mut ByteStream,
        request: &Request,
        following: FollowOptions,
    ) -> io::Result<After> {
        // Subscribed before the head is sent, so that a client that has received the head misses no
        // line.
        let mut events = self.events.subscribe();
        let mut start = request.head(
            200,
            &[
                ("Content-Type", "text/plain"),
                ("Transfer-Encoding", "chunked"),
            ],
        );
        if let Some(line) = following.first_line {
            start.extend(chunk(format!("{line}\n").as_bytes()));
        }
        wire.write_all(&start).await?;
        wire.flush().await?;

        let mut ticks = following.every.map(interval);
        if let Some(ticks) = &mut ticks {
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        }
        let mut number = 0_u64;
        loop {
            let line = tokio::select! {
                event = events.recv() => match event {
                    Ok(Event::Line(line)) => line,
                    Ok(Event::End) | Err(RecvError::Closed) => {
                        wire.write_all(last_chunk()).await?;
                        wire.flush().await?;
                        return Ok(After::KeepAlive);
                    }
                    Err(RecvError::Lagged(_)) => return Ok(After::Reset),
                },
                () = tick(&mut ticks) => {
                    number += 1;
                    format!("{} line {number}", following.node)
                }
                gone = wire.peer_gone() => return gone.map(|()| After::Close),
            };
            wire.write_all(&chunk(format!("{line}\n").as_bytes()))
                .await?;
            wire.flush().await?;
        }
    }
}

async fn tick(ticks: &mut Option<Interval>) {
    match ticks {
        Some(ticks) => drop(ticks.tick().await),
        None => std::future::pending().await,
    }
}

/// Number of lines that a follower may be behind.
const BACKLOG: usize = 4096;
