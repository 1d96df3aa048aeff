//! Sends the control messages that follow Welcome.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::control::ControlWriter;
use crate::wire::control::{ControlMessage, Member};
use crate::wire::enroll::EnrollReply;
use crate::wire::name::SessionId;

/// The sender of control messages on a ready session. Its methods return at once, because a message
/// may never leave on a dead path. Only the latest value of each kind is sent, and a value that was
/// withdrawn in the meantime is not sent.
#[derive(Debug)]
pub struct ControlSender {
    shared: Arc<SharedMessages>,
}

impl ControlSender {
    /// Creates the sender and the future that writes its messages. The future completes after
    /// [`ControlSender::bye`], when the sender is dropped, or with the error of a message that
    /// cannot be sent.
    ///
    /// Not cancel-safe: if the future is dropped, a part of a message may have been sent.
    pub fn new(writer: ControlWriter) -> (Self, impl Future<Output = io::Result<()>>) {
        let shared = Arc::<SharedMessages>::default();
        let sending = send_pending(writer, shared.clone());
        (Self { shared }, sending)
    }

    /// Asks the server to open no more streams.
    pub fn withdraw(&self) {
        self.shared.set(|pending| pending.withdraw.value = true);
    }

    /// Asks the agent to complete its open streams within `deadline`, and to dial another server at
    /// a random moment within `move_within`.
    pub fn drain(&self, deadline: Duration, move_within: Duration) {
        let drain = Some((deadline, move_within));
        self.shared.set(|pending| pending.drain.value = drain);
    }

    /// Tells the agent which servers there are.
    pub fn members(&self, members: Vec<Member>) {
        self.shared.set(|pending| pending.members = Some(members));
    }

    /// Reports whether this end has stopped receiving from its peer.
    pub fn suspect(&self, is_suspect: bool) {
        // Each check of a session reports, and most of them report no change.
        if self.shared.pending.lock().suspect.value != is_suspect {
            self.shared
                .set(|pending| pending.suspect.value = is_suspect);
        }
    }

    /// Reports that data of the peer has arrived since the last report.
    pub fn receiving(&self) {
        self.shared.set(|pending| pending.receiving = Some(()));
    }

    /// Requests another certificate with a PKCS#10 request (DER).
    pub fn renew(&self, csr: Vec<u8>) {
        self.shared.set(|pending| pending.renew = Some(csr));
    }

    /// Answers the last certificate request.
    pub fn renewed(&self, reply: EnrollReply) {
        self.shared.set(|pending| pending.renewed = Some(reply));
    }

    /// Asks the agent for facts about itself.
    pub fn diag_request(&self) {
        self.shared.set(|pending| pending.diag_request = Some(()));
    }

    /// Asks the agent to renew its certificate at a random moment within this time.
    pub fn renew_soon(&self, within: Duration) {
        self.shared.set(|pending| pending.renew_soon = Some(within));
    }

    /// Answers the last request for facts.
    pub fn diag_reply(&self, document: String) {
        self.shared
            .set(|pending| pending.diag_reply = Some(document));
    }

    /// Names sessions of this agent process with the same server that have ended at this end.
    /// Without any, sends nothing.
    pub fn lost(&self, sessions: Vec<SessionId>) {
        let lost = Some(sessions).filter(|sessions| !sessions.is_empty());
        self.shared.set(|pending| pending.lost = lost);
    }

    /// Sends Bye as the last message and ends the sent half.
    pub fn bye(&self, reason: &str) {
        let bye = Some(reason.to_owned());
        self.shared.set(|pending| pending.bye = bye);
    }
}

impl Drop for ControlSender {
    fn drop(&mut self) {
        self.shared.set(|pending| pending.is_closed = true);
    }
}

/// The messages that the sender sets, and that its future takes.
#[derive(Debug, Default)]
struct SharedMessages {
    pending: Mutex<PendingMessages>,
    changed: Notify,
}

impl SharedMessages {
    fn set(&self, set: impl FnOnce(&mut PendingMessages)) {
        set(&mut self.pending.lock());
        self.changed.notify_one();
    }

    /// Waits for the next message. Returns `None` after Bye, and when the sender is dropped and
    /// nothing is pending. Cancel-safe.
    async fn next(&self) -> Option<ControlMessage> {
        loop {
            {
                let mut pending = self.pending.lock();
                let message = pending.next();
                if message.is_some() || pending.is_bye_sent || pending.is_closed {
                    return message;
                }
            }
            self.changed.notified().await;
        }
    }
}

/// The latest value of each message. What was sent is dropped, since a server has thousands of sessions.
#[derive(Debug, Default)]
struct PendingMessages {
    withdraw: Latest<bool>,
    drain: Latest<Option<(Duration, Duration)>>,
    members: Option<Vec<Member>>,
    suspect: Latest<bool>,
    renew: Option<Vec<u8>>,
    renewed: Option<EnrollReply>,
    renew_soon: Option<Duration>,
    diag_request: Option<()>,
    diag_reply: Option<String>,
    lost: Option<Vec<SessionId>>,
    bye: Option<String>,
    receiving: Option<()>,
    /// Whether Bye is taken, which is the last message.
    is_bye_sent: bool,
    /// Whether the sender is dropped.
    is_closed: bool,
}

impl PendingMessages {
    /// Takes the next message.
    fn next(&mut self) -> Option<ControlMessage> {
        if self.is_bye_sent {
            return None;
        }
        let drain = |(deadline, move_within)| ControlMessage::Drain {
            deadline,
            move_within,
        };
        (self.withdraw.take().map(|_| ControlMessage::Withdraw))
            .or_else(|| self.drain.take().flatten().map(drain))
            .or_else(|| self.members.take().map(ControlMessage::Members))
            .or_else(|| self.suspect.take().map(ControlMessage::Suspect))
            .or_else(|| self.renew.take().map(ControlMessage::Renew))
            .or_else(|| self.renewed.take().map(ControlMessage::Renewed))
            .or_else(|| self.renew_soon.take().map(ControlMessage::RenewSoon))
            .or_else(|| {
                self.diag_request
                    .take()
                    .map(|()| ControlMessage::DiagRequest)
            })
            .or_else(|| self.diag_reply.take().map(ControlMessage::DiagReply))
            .or_else(|| self.lost.take().map(ControlMessage::Lost))
            .or_else(|| {
                let reason = self.bye.take()?;
                self.is_bye_sent = true;
                Some(ControlMessage::Bye(reason))
            })
            // A peer that causes many of these delays nothing else.
            .or_else(|| self.receiving.take().map(|()| ControlMessage::Receiving))
    }
}

/// A value that is sent only if it differs from the one that was sent last.
#[derive(Debug, Default)]
struct Latest<T> {
    value: T,
    sent: T,
}

impl<T: Copy + PartialEq> Latest<T> {
    /// Returns the value to send, which then counts as sent.
    fn take(&mut self) -> Option<T> {
        let sent = std::mem::replace(&mut self.sent, self.value);
        (self.value != sent).then_some(self.value)
    }
}

async fn send_pending(mut writer: ControlWriter, shared: Arc<SharedMessages>) -> io::Result<()> {
    while let Some(message) = shared.next().await {
        writer.send(&message).await?;
        if matches!(message, ControlMessage::Bye(_)) {
            let _peer_may_be_gone = writer.finish().await;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::control::tests::control_stream;
    use crate::wire::code::EnrollCode;

    const DEADLINE: Duration = Duration::from_secs(30);
    const MOVE_WITHIN: Duration = Duration::from_secs(10);
    const DRAIN: ControlMessage = ControlMessage::Drain {
        deadline: DEADLINE,
        move_within: MOVE_WITHIN,
    };

    fn reply() -> EnrollReply {
        EnrollReply::Refused(EnrollCode::Unavailable, "not now".into())
    }

    /// Returns everything that is sent before the half ends.
    async fn sent(send: impl FnOnce(&ControlSender)) -> Vec<ControlMessage> {
        let (mut peer, own, _sessions) = control_stream().await;
        let (control_sender, sending) = ControlSender::new(own.1);
        send(&control_sender);
        let receiving = async {
            let mut received = Vec::new();
            while let Some(message) = peer.0.receive().await.unwrap() {
                received.push(message);
            }
            received
        };
        let (sent, received) = tokio::join!(sending, receiving);
        sent.unwrap();
        received
    }

    #[tokio::test]
    async fn each_message_is_sent_once_and_bye_is_the_last() {
        let messages = sent(|control_sender| {
            control_sender.bye("done");
            for _ in 0..2 {
                control_sender.withdraw();
                control_sender.drain(DEADLINE, MOVE_WITHIN);
                control_sender.suspect(true);
            }
            control_sender.members(Vec::new());
            control_sender.renew(vec![7]);
            control_sender.renewed(reply());
            control_sender.renew_soon(MOVE_WITHIN);
            control_sender.diag_request();
            control_sender.diag_reply("{}".into());
            control_sender.lost(vec![SessionId(7)]);
        });
        let expected = [
            ControlMessage::Withdraw,
            DRAIN,
            ControlMessage::Members(Vec::new()),
            ControlMessage::Suspect(true),
            ControlMessage::Renew(vec![7]),
            ControlMessage::Renewed(reply()),
            ControlMessage::RenewSoon(MOVE_WITHIN),
            ControlMessage::DiagRequest,
            ControlMessage::DiagReply("{}".into()),
            ControlMessage::Lost(vec![SessionId(7)]),
            ControlMessage::Bye("done".into()),
        ];
        assert_eq!(messages.await, expected);
    }

    #[tokio::test]
    async fn latest_value_alone_is_sent() {
        let messages = sent(|control_sender| {
            control_sender.drain(DEADLINE * 2, MOVE_WITHIN);
            control_sender.drain(DEADLINE, MOVE_WITHIN);
            control_sender.suspect(true);
            control_sender.suspect(false);
            control_sender.renew(vec![7]);
            control_sender.renew(vec![8]);
            control_sender.lost(Vec::new());
            control_sender.bye("done");
        });
        let expected = [
            DRAIN,
            ControlMessage::Renew(vec![8]),
            ControlMessage::Bye("done".into()),
        ];
        assert_eq!(messages.await, expected);
    }

    #[test]
    fn later_values_are_sent_again_if_they_differ_and_requests_in_any_case() {
        let mut pending = PendingMessages::default();
        assert_eq!(pending.next(), None);
        for suspect in [true, false] {
            pending.suspect.value = suspect;
            let message = ControlMessage::Suspect(suspect);
            assert_eq!(pending.next(), Some(message));
            assert_eq!(pending.next(), None);
        }
        for _ in 0..2 {
            (pending.renew, pending.renewed) = (Some(vec![7]), Some(reply()));
            let request = ControlMessage::Renew(vec![7]);
            assert_eq!(pending.next(), Some(request));
            let answer = ControlMessage::Renewed(reply());
            assert_eq!(pending.next(), Some(answer));
            assert_eq!(pending.next(), None);
        }
    }

    #[test]
    fn reports_of_received_data_delay_nothing_else() {
        let mut pending = PendingMessages {
            receiving: Some(()),
            ..PendingMessages::default()
        };
        pending.suspect.value = true;
        for message in [ControlMessage::Suspect(true), ControlMessage::Receiving] {
            assert_eq!(pending.next(), Some(message));
        }
        assert_eq!(pending.next(), None);
        (pending.receiving, pending.bye) = (Some(()), Some("done".into()));
        let bye = ControlMessage::Bye("done".into());
        assert_eq!(pending.next(), Some(bye));
        assert_eq!(pending.next(), None);
    }

    #[test]
    fn nothing_follows_bye() {
        let mut pending = PendingMessages {
            bye: Some("done".into()),
            ..PendingMessages::default()
        };
        assert!(matches!(pending.next(), Some(ControlMessage::Bye(_))));
        (pending.withdraw.value, pending.suspect.value) = (true, true);
        assert_eq!(pending.next(), None);
    }

    #[tokio::test]
    async fn dropped_sender_ends_the_future_and_cuts_the_stream() {
        let (mut peer, own, _sessions) = control_stream().await;
        let (control_sender, sending) = ControlSender::new(own.1);
        drop((control_sender, own.0));
        sending.await.unwrap();
        let error = peer.0.receive().await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    }
}
