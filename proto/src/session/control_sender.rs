//! Sends the control messages that follow Welcome.

use std::io;
use std::time::Duration;

use tokio::sync::watch;

use super::control::ControlWriter;
use crate::wire::control::{ControlMessage, Member};
use crate::wire::enroll::EnrollReply;
use crate::wire::name::SessionId;

/// The sender of control messages on a ready session. Its methods return at once, because a message
/// may never leave on a dead path. Only the latest value of each kind is sent, and a value that was
/// withdrawn in the meantime is not sent.
#[derive(Debug)]
pub struct ControlSender {
    pending: watch::Sender<PendingMessages>,
}

impl ControlSender {
    /// Creates the sender and the future that writes its messages. The future completes after
    /// [`ControlSender::bye`], when the sender is dropped, or with the error of a message that
    /// cannot be sent.
    ///
    /// Not cancel-safe: if the future is dropped, a part of a message may have been sent.
    pub fn new(writer: ControlWriter) -> (Self, impl Future<Output = io::Result<()>>) {
        let (pending, changes) = watch::channel(PendingMessages::default());
        (Self { pending }, send_pending(writer, changes))
    }

    /// Asks the server to open no more streams.
    pub fn withdraw(&self) {
        self.pending.send_modify(|pending| pending.withdraw = true);
    }

    /// Asks the agent to complete its open streams within `deadline`, and to dial another server at
    /// a random moment within `move_within`.
    pub fn drain(&self, deadline: Duration, move_within: Duration) {
        let drain = Some((deadline, move_within));
        self.pending.send_modify(|pending| pending.drain = drain);
    }

    /// Tells the agent which servers there are.
    pub fn members(&self, members: Vec<Member>) {
        self.pending.send_modify(|pending| {
            pending.members = Some(members);
            count(&mut pending.members_count);
        });
    }

    /// Reports whether this end has stopped receiving from its peer.
    pub fn suspect(&self, is_suspect: bool) {
        self.pending.send_if_modified(|pending| {
            std::mem::replace(&mut pending.suspect, is_suspect) != is_suspect
        });
    }

    /// Reports that data of the peer has arrived since the last report.
    pub fn receiving(&self) {
        self.pending
            .send_modify(|pending| count(&mut pending.receiving_count));
    }

    /// Requests another certificate with a PKCS#10 request (DER).
    pub fn renew(&self, csr: Vec<u8>) {
        self.pending.send_modify(|pending| {
            pending.renew = Some(csr);
            count(&mut pending.renew_count);
        });
    }

    /// Answers the last certificate request.
    pub fn renewed(&self, reply: EnrollReply) {
        self.pending.send_modify(|pending| {
            pending.renewed = Some(reply);
            count(&mut pending.renewed_count);
        });
    }

    /// Asks the agent for facts about itself.
    pub fn diag_request(&self) {
        self.pending
            .send_modify(|pending| count(&mut pending.diag_request_count));
    }

    /// Asks the agent to renew its certificate at a random moment within this time.
    pub fn renew_soon(&self, within: Duration) {
        self.pending.send_modify(|pending| {
            pending.renew_soon = within;
            count(&mut pending.renew_soon_count);
        });
    }

    /// Answers the last request for facts.
    pub fn diag_reply(&self, document: String) {
        self.pending.send_modify(|pending| {
            pending.diag_reply = Some(document);
            count(&mut pending.diag_reply_count);
        });
    }

    /// Names sessions of this agent process with the same server that have ended at this end.
    pub fn lost(&self, sessions: Vec<SessionId>) {
        self.pending.send_modify(|pending| pending.lost = sessions);
    }

    /// Sends Bye as the last message and ends the sent half.
    pub fn bye(&self, reason: &str) {
        let bye = Some(reason.to_owned());
        self.pending.send_modify(|pending| pending.bye = bye);
    }
}

/// The latest value of each message, and how often the values that repeat were set.
#[derive(Debug, Default)]
struct PendingMessages {
    withdraw: bool,
    drain: Option<(Duration, Duration)>,
    members: Option<Vec<Member>>,
    members_count: u32,
    suspect: bool,
    receiving_count: u32,
    renew: Option<Vec<u8>>,
    renew_count: u32,
    renewed: Option<EnrollReply>,
    renewed_count: u32,
    renew_soon: Duration,
    renew_soon_count: u32,
    diag_request_count: u32,
    diag_reply: Option<String>,
    diag_reply_count: u32,
    lost: Vec<SessionId>,
    bye: Option<String>,
}

/// Counts one more. The numbers are small, since a server has thousands of sessions, and they are only
/// compared for equality.
fn count(number: &mut u32) {
    *number = number.wrapping_add(1);
}

/// The messages that were sent. Without their content, since a server has thousands of sessions.
#[derive(Debug, Default)]
struct SentMessages {
    withdraw: bool,
    drain: Option<(Duration, Duration)>,
    members_count: u32,
    suspect: bool,
    receiving_count: u32,
    renew_count: u32,
    renewed_count: u32,
    renew_soon_count: u32,
    diag_request_count: u32,
    diag_reply_count: u32,
    lost: Vec<SessionId>,
    bye: bool,
}

impl SentMessages {
    /// Returns the next message that leads from the sent messages to the pending ones.
    fn next(&mut self, pending: &PendingMessages) -> Option<ControlMessage> {
        if self.bye {
            return None;
        }
        if pending.withdraw && !self.withdraw {
            self.withdraw = true;
            return Some(ControlMessage::Withdraw);
        }
        if let Some((deadline, move_within)) = pending.drain
            && pending.drain != self.drain
        {
            self.drain = pending.drain;
            return Some(ControlMessage::Drain {
                deadline,
                move_within,
            });
        }
        if let Some(members) = &pending.members
            && pending.members_count != self.members_count
        {
            self.members_count = pending.members_count;
            return Some(ControlMessage::Members(members.clone()));
        }
        if pending.suspect != self.suspect {
            self.suspect = pending.suspect;
            return Some(ControlMessage::Suspect(pending.suspect));
        }
        if let Some(csr) = &pending.renew
            && pending.renew_count != self.renew_count
        {
            self.renew_count = pending.renew_count;
            return Some(ControlMessage::Renew(csr.clone()));
        }
        if let Some(reply) = &pending.renewed
            && pending.renewed_count != self.renewed_count
        {
            self.renewed_count = pending.renewed_count;
            return Some(ControlMessage::Renewed(reply.clone()));
        }
        if pending.renew_soon_count != self.renew_soon_count {
            self.renew_soon_count = pending.renew_soon_count;
            return Some(ControlMessage::RenewSoon(pending.renew_soon));
        }
        if pending.diag_request_count != self.diag_request_count {
            self.diag_request_count = pending.diag_request_count;
            return Some(ControlMessage::DiagRequest);
        }
        if let Some(document) = &pending.diag_reply
            && pending.diag_reply_count != self.diag_reply_count
        {
            self.diag_reply_count = pending.diag_reply_count;
            return Some(ControlMessage::DiagReply(document.clone()));
        }
        if pending.lost != self.lost {
            self.lost.clone_from(&pending.lost);
            return Some(ControlMessage::Lost(pending.lost.clone()));
        }
        if let Some(reason) = &pending.bye {
            self.bye = true;
            return Some(ControlMessage::Bye(reason.clone()));
        }
        // A peer that causes many of these delays nothing else.
        if pending.receiving_count != self.receiving_count {
            self.receiving_count = pending.receiving_count;
            return Some(ControlMessage::Receiving);
        }
        None
    }
}

async fn send_pending(
    mut writer: ControlWriter,
    mut pending: watch::Receiver<PendingMessages>,
) -> io::Result<()> {
    let mut sent = SentMessages::default();
    loop {
        let next = sent.next(&pending.borrow_and_update());
        match next {
            Some(message) => writer.send(&message).await?,
            None if sent.bye => {
                let _peer_may_be_gone = writer.finish().await;
                return Ok(());
            }
            None => {
                if pending.changed().await.is_err() {
                    return Ok(());
                }
            }
        }
    }
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
        let (mut pending, mut sent) = (PendingMessages::default(), SentMessages::default());
        assert_eq!(sent.next(&pending), None);
        for suspect in [true, false] {
            pending.suspect = suspect;
            let message = ControlMessage::Suspect(suspect);
            assert_eq!(sent.next(&pending), Some(message));
            assert_eq!(sent.next(&pending), None);
        }
        (pending.renew, pending.renewed) = (Some(vec![7]), Some(reply()));
        for count in 1..=2 {
            (pending.renew_count, pending.renewed_count) = (count, count);
            let request = ControlMessage::Renew(vec![7]);
            assert_eq!(sent.next(&pending), Some(request));
            let answer = ControlMessage::Renewed(reply());
            assert_eq!(sent.next(&pending), Some(answer));
            assert_eq!(sent.next(&pending), None);
        }
    }

    #[test]
    fn reports_of_received_data_delay_nothing_else() {
        let (mut pending, mut sent) = (PendingMessages::default(), SentMessages::default());
        pending.receiving_count = 2;
        pending.suspect = true;
        for message in [ControlMessage::Suspect(true), ControlMessage::Receiving] {
            assert_eq!(sent.next(&pending), Some(message));
        }
        assert_eq!(sent.next(&pending), None);
        (pending.receiving_count, pending.bye) = (3, Some("done".into()));
        assert_eq!(
            sent.next(&pending),
            Some(ControlMessage::Bye("done".into()))
        );
        assert_eq!(sent.next(&pending), None);
    }

    #[test]
    fn nothing_follows_bye() {
        let pending = PendingMessages {
            bye: Some("done".into()),
            ..PendingMessages::default()
        };
        let mut sent = SentMessages::default();
        assert!(matches!(sent.next(&pending), Some(ControlMessage::Bye(_))));
        let late = PendingMessages {
            withdraw: true,
            suspect: true,
            ..pending
        };
        assert_eq!(sent.next(&late), None);
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
