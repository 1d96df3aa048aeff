//! The live sessions with servers that have targets of the cloud, and streams over them.

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tunnel_proto::stream_record::StreamEnd;
use tunnel_proto::transport::{Session, SessionError, Stream, StreamCut, find_cause};
use tunnel_proto::wire::code::RefusalCode;
use tunnel_proto::wire::header::{Refusal, StreamHeader};
use tunnel_proto::wire::name::SessionId;

/// The registered sessions of an agent.
#[derive(Debug, Default)]
pub(crate) struct CloudSessions {
    registrations: Mutex<Registrations>,
    /// Notified of a client that finds no live session.
    wanted: Notify,
}

#[derive(Debug, Default)]
struct Registrations {
    next_key: u64,
    /// The oldest session first.
    sessions: Vec<Registration>,
}

#[derive(Debug)]
struct Registration {
    key: u64,
    is_live: watch::Sender<bool>,
    session: CloudSession,
}

/// A session that can open streams to targets of the cloud.
#[derive(Debug, Clone)]
pub(super) struct CloudSession {
    id: SessionId,
    session: Arc<dyn Session>,
    opened: Arc<Notify>,
    is_live: watch::Receiver<bool>,
}

/// The registration of a session, which ends when the value is dropped.
#[derive(Debug)]
pub(crate) struct CloudSessionGuard {
    sessions: Arc<CloudSessions>,
    key: u64,
    opened: Arc<Notify>,
}

/// A stream that the server has accepted.
pub(super) struct OpenedStream {
    pub(super) stream: Stream,
    pub(super) session: SessionId,
    /// Address that the server dialed, if the server reported it.
    pub(super) dialed: String,
}

/// The reason why no stream was opened.
#[derive(Debug, thiserror::Error)]
pub(super) enum OpenError {
    #[error("no live session with a server that has targets of the cloud")]
    NoSession,
    #[error("session was lost before the server accepted the stream: {0}")]
    Lost(String),
    #[error("server did not accept the stream in time")]
    NoReply,
    #[error("{}", .0.detail)]
    Refused(Refusal),
}

impl CloudSessions {
    /// Registers a live session until the guard is dropped.
    pub(crate) fn register(
        self: &Arc<Self>,
        id: SessionId,
        session: Arc<dyn Session>,
    ) -> CloudSessionGuard {
        let opened = Arc::new(Notify::new());
        let (live_sender, is_live) = watch::channel(true);
        let mut registrations = self.registrations.lock();
        let key = registrations.next_key;
        registrations.next_key += 1;
        registrations.sessions.push(Registration {
            key,
            is_live: live_sender,
            session: CloudSession {
                id,
                session,
                opened: opened.clone(),
                is_live,
            },
        });
        CloudSessionGuard {
            sessions: self.clone(),
            key,
            opened,
        }
    }

    /// Returns the sessions that are live, the newest first.
    pub(super) fn newest_first(&self) -> Vec<CloudSession> {
        let registrations = self.registrations.lock();
        let sessions = registrations.sessions.iter();
        let live = sessions.filter(|entry| *entry.is_live.borrow());
        live.rev().map(|entry| entry.session.clone()).collect()
    }

    /// Records that a client needs a session.
    pub(super) fn want(&self) {
        self.wanted.notify_one();
    }

    /// Waits until a client has needed a session since the last call. Cancel-safe.
    pub(crate) async fn wanted(&self) {
        self.wanted.notified().await;
    }
}

#[cfg(test)]
impl CloudSessions {
    /// Returns the number of live sessions.
    pub(crate) fn live(&self) -> usize {
        self.newest_first().len()
    }
}

impl CloudSessionGuard {
    /// Sets whether new streams may be opened over the session.
    pub(crate) fn set_live(&self, is_live: bool) {
        let registrations = self.sessions.registrations.lock();
        let sessions = registrations.sessions.iter();
        for registration in sessions.filter(|entry| entry.key == self.key) {
            registration.is_live.send_replace(is_live);
        }
    }

    /// Returns the notification of each stream that is opened over the session.
    pub(crate) fn opened(&self) -> Arc<Notify> {
        self.opened.clone()
    }
}

impl Drop for CloudSessionGuard {
    fn drop(&mut self) {
        let mut registrations = self.sessions.registrations.lock();
        registrations.sessions.retain(|entry| entry.key != self.key);
    }
}

impl CloudSession {
    pub(super) fn id(&self) -> SessionId {
        self.id
    }

    /// Opens a stream and waits until the server has accepted it, unless the session becomes suspect
    /// before that. Cancel-safe: the stream is reset if the future is dropped.
    pub(super) async fn open(
        &self,
        header: &StreamHeader,
        reply_timeout: Duration,
    ) -> Result<OpenedStream, OpenError> {
        let mut is_live = self.is_live.clone();
        let suspect = async {
            if is_live.wait_for(|is_live| !is_live).await.is_err() {
                // A session that is not registered any more keeps the streams that it has.
                pending().await
            }
        };
        tokio::select! {
            biased;
            opened = self.open_accepted(header, reply_timeout) => opened,
            () = suspect => Err(OpenError::Lost(SUSPECT.to_owned())),
        }
    }

    async fn open_accepted(
        &self,
        header: &StreamHeader,
        reply_timeout: Duration,
    ) -> Result<OpenedStream, OpenError> {
        let mut stream = self.session.open(header, reply_timeout).await?;
        self.opened.notify_one();
        let dialed = match stream.accepted().await {
            Ok(dialed) => dialed.to_owned(),
            Err(error) => return Err(OpenError::of_reply(&error)),
        };
        Ok(OpenedStream {
            stream,
            session: self.id,
            dialed,
        })
    }
}

impl From<SessionError> for OpenError {
    fn from(error: SessionError) -> Self {
        Self::Lost(error.to_string())
    }
}

impl OpenError {
    fn of_reply(error: &std::io::Error) -> Self {
        if let Some(refusal) = find_cause::<Refusal>(error) {
            return Self::Refused(refusal.clone());
        }
        match find_cause::<StreamCut>(error) {
            Some(StreamCut::ReplyTimeout) => Self::NoReply,
            Some(_) | None => Self::Lost(error.to_string()),
        }
    }

    /// Returns whether another session may open the stream.
    pub(super) fn is_retryable(&self) -> bool {
        match self {
            Self::NoSession => false,
            Self::Lost(_) | Self::NoReply => true,
            Self::Refused(refusal) => refusal.code == RefusalCode::Draining,
        }
    }

    pub(super) fn end(&self) -> StreamEnd {
        match self {
            Self::NoSession => StreamEnd::NoSession,
            Self::Lost(_) => StreamEnd::CutByPeer,
            Self::NoReply => StreamEnd::NoReply,
            Self::Refused(refusal) => StreamEnd::Refused(refusal.code),
        }
    }
}

const SUSPECT: &str = "nothing arrives from the server";
