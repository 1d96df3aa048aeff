//! What the agent says on the control stream of a ready session, in a task of its own: on a dead path a send may hang.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use tracing::{Instrument, debug};
use tunnel_proto::transport::control::ControlWriter;
use tunnel_proto::wire::control::ControlMessage;

/// Says what is to be said as soon as the stream takes it; what was taken back meanwhile is not said at all.
#[derive(Debug)]
pub(super) struct Voice {
    words: watch::Sender<Words>,
    speaking: AbortOnDropHandle<()>,
}

/// All that a session says after Hello.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Words {
    withdraw: bool,
    doubt: bool,
    /// The last request for a certificate, and how many there were.
    renew: (u64, Arc<[u8]>),
    bye: Option<&'static str>,
}

impl Voice {
    /// Takes over the sending half. Must be called inside a tokio runtime.
    pub(super) fn new(writer: ControlWriter) -> Self {
        let (words, wanted) = watch::channel(Words::default());
        let speaking = TaskTracker::new().spawn(speak(writer, wanted).in_current_span());
        Self {
            words,
            speaking: AbortOnDropHandle::new(speaking),
        }
    }

    /// No more streams, please.
    pub(super) fn withdraw(&self) {
        self.change(|words| words.withdraw = true);
    }

    /// Whether this end has stopped hearing from the server.
    pub(super) fn doubt(&self, doubt: bool) {
        self.change(|words| words.doubt = doubt);
    }

    /// Another certificate, please.
    pub(super) fn renew(&self, request: Vec<u8>) {
        self.change(|words| words.renew = (words.renew.0 + 1, request.into()));
    }

    /// The last words; returns when the server has them, or after `within`.
    pub(super) async fn bye(&mut self, reason: &'static str, within: Duration) {
        self.change(|words| words.bye = Some(reason));
        let _peer_may_be_gone = timeout(within, &mut self.speaking).await;
    }

    fn change(&self, change: impl FnOnce(&mut Words)) {
        self.words.send_if_modified(|words| {
            let before = words.clone();
            change(words);
            *words != before
        });
    }
}

async fn speak(mut writer: ControlWriter, mut wanted: watch::Receiver<Words>) {
    let mut said = Words::default();
    loop {
        let words = wanted.borrow_and_update().clone();
        match said.next(&words) {
            Some(message) => {
                if let Err(error) = writer.send(&message).await {
                    return debug!(%error, "control message was not sent");
                }
            }
            None if words.bye.is_some() => {
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

impl Words {
    /// The next message on the way from what was said to what is wanted.
    fn next(&mut self, wanted: &Self) -> Option<ControlMessage> {
        if wanted.withdraw && !self.withdraw {
            self.withdraw = true;
            return Some(ControlMessage::Withdraw);
        }
        if wanted.doubt != self.doubt {
            self.doubt = wanted.doubt;
            return Some(ControlMessage::Doubt(wanted.doubt));
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
    fn each_word_is_said_once_and_bye_is_the_last() {
        let wanted = Words {
            withdraw: true,
            doubt: true,
            bye: Some("done"),
            renew: (1, Arc::from([7])),
        };
        let mut said = Words::default();
        let mut all = Vec::new();
        while let Some(message) = said.next(&wanted) {
            all.push(message);
        }
        let expected = [
            ControlMessage::Withdraw,
            ControlMessage::Doubt(true),
            ControlMessage::Renew(vec![7]),
            ControlMessage::Bye("done".into()),
        ];
        assert_eq!(all, expected);
        assert_eq!(said, wanted);
    }

    #[test]
    fn doubt_that_went_away_unsaid_is_not_said() {
        let mut said = Words::default();
        let doubts = |doubt| Words {
            doubt,
            ..Words::default()
        };
        assert_eq!(said.next(&doubts(false)), None);
        assert_eq!(said.next(&doubts(true)), Some(ControlMessage::Doubt(true)));
        assert_eq!(
            said.next(&doubts(false)),
            Some(ControlMessage::Doubt(false))
        );
        assert_eq!(said.next(&doubts(false)), None);
    }
}
