//! Sends the agent's control messages on a ready session. A task of its own sends them, since a
//! send may hang on a dead path.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use tracing::{Instrument, debug};
use tunnel_proto::session::control::ControlWriter;
use tunnel_proto::wire::control::ControlMessage;

/// Sends control messages as soon as the stream accepts them. Messages that were withdrawn in the
/// meantime are not sent.
#[derive(Debug)]
pub(super) struct ControlSender {
    pending: watch::Sender<PendingMessages>,
    send_task: AbortOnDropHandle<()>,
}

/// All messages of a session after Hello.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct PendingMessages {
    withdraw: bool,
    doubt: bool,
    /// The number of certificate requests, and the last request.
    renew: (u64, Arc<[u8]>),
    bye: Option<&'static str>,
}

impl ControlSender {
    /// Takes the sending half and starts the task. Must be called inside a tokio runtime.
    pub(super) fn new(writer: ControlWriter) -> Self {
        let (pending, wanted) = watch::channel(PendingMessages::default());
        let send_task = TaskTracker::new().spawn(send_pending(writer, wanted).in_current_span());
        Self {
            pending,
            send_task: AbortOnDropHandle::new(send_task),
        }
    }

    /// Asks the server to open no more streams.
    pub(super) fn withdraw(&self) {
        self.change(|pending| pending.withdraw = true);
    }

    /// Reports whether this end receives nothing from the server.
    pub(super) fn doubt(&self, doubt: bool) {
        self.change(|pending| pending.doubt = doubt);
    }

    /// Requests another certificate.
    pub(super) fn renew(&self, request: Vec<u8>) {
        self.change(|pending| pending.renew = (pending.renew.0 + 1, request.into()));
    }

    /// Sends Bye and returns when the server has it, or after `within`.
    pub(super) async fn bye(&mut self, reason: &'static str, within: Duration) {
        self.change(|pending| pending.bye = Some(reason));
        let _peer_may_be_gone = timeout(within, &mut self.send_task).await;
    }

    fn change(&self, change: impl FnOnce(&mut PendingMessages)) {
        self.pending.send_if_modified(|pending| {
            let before = pending.clone();
            change(pending);
            *pending != before
        });
    }
}

async fn send_pending(mut writer: ControlWriter, mut wanted: watch::Receiver<PendingMessages>) {
    let mut sent = PendingMessages::default();
    loop {
        let pending = wanted.borrow_and_update().clone();
        match sent.next(&pending) {
            Some(message) => {
                if let Err(error) = writer.send(&message).await {
                    return debug!(%error, "control message was not sent");
                }
            }
            None if pending.bye.is_some() => {
                let _peer_may_be_gone = writer.finish().await;
                return;
            }
            None => {
                if wanted.changed().await.is_err() {
                    return;
                }
            }
        }
    }
}

impl PendingMessages {
    /// Returns the next message that leads from the sent state to the wanted state.
    fn next(&mut self, wanted: &Self) -> Option<ControlMessage> {
        if wanted.withdraw && !self.withdraw {
            self.withdraw = true;
            return Some(ControlMessage::Withdraw);
        }
        if wanted.doubt != self.doubt {
            self.doubt = wanted.doubt;
            return Some(ControlMessage::Suspect(wanted.doubt));
        }
        if wanted.renew.0 != self.renew.0 {
            self.renew = wanted.renew.clone();
            return Some(ControlMessage::Renew(wanted.renew.1.to_vec()));
        }
        if let (Some(reason), None) = (wanted.bye, self.bye) {
            self.bye = wanted.bye;
            return Some(ControlMessage::Bye(reason.to_owned()));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_message_is_sent_once_and_bye_is_the_last() {
        let wanted = PendingMessages {
            withdraw: true,
            doubt: true,
            bye: Some("done"),
            renew: (1, Arc::from([7])),
        };
        let mut sent = PendingMessages::default();
        let mut all = Vec::new();
        while let Some(message) = sent.next(&wanted) {
            all.push(message);
        }
        let expected = [
            ControlMessage::Withdraw,
            ControlMessage::Suspect(true),
            ControlMessage::Renew(vec![7]),
            ControlMessage::Bye("done".into()),
        ];
        assert_eq!(all, expected);
        assert_eq!(sent, wanted);
    }

    #[test]
    fn doubt_withdrawn_before_it_was_sent_is_not_sent() {
        let mut sent = PendingMessages::default();
        let doubts = |doubt| PendingMessages {
            doubt,
            ..PendingMessages::default()
        };
        assert_eq!(sent.next(&doubts(false)), None);
        assert_eq!(
            sent.next(&doubts(true)),
            Some(ControlMessage::Suspect(true))
        );
        assert_eq!(
            sent.next(&doubts(false)),
            Some(ControlMessage::Suspect(false))
        );
        assert_eq!(sent.next(&doubts(false)), None);
    }
}
