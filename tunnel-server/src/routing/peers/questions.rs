//! Questions to another server about an agent that it holds.

use std::collections::HashMap;

use tokio::sync::oneshot;
use tunnel_proto::wire::peer::{Alive, Ask, PeerMessage};

use super::link::Question;

/// Questions without an answer.
#[derive(Debug, Default)]
pub(super) struct Questions {
    last_id: u64,
    pending: HashMap<u64, oneshot::Sender<bool>>,
}

impl Questions {
    /// Stores a question and returns its message.
    pub(super) fn add(&mut self, question: Question, answer: oneshot::Sender<bool>) -> PeerMessage {
        // Admissions wait for an answer for 1.5 s at most.
        self.pending.retain(|_, answer| !answer.is_closed());
        self.last_id += 1;
        self.pending.insert(self.last_id, answer);
        let Question {
            node,
            instance,
            is_admitted,
        } = question;
        PeerMessage::Ask(Ask {
            id: self.last_id,
            node,
            instance,
            is_admitted,
        })
    }

    pub(super) fn answer(&mut self, alive: &Alive) {
        if let Some(answer) = self.pending.remove(&alive.id) {
            let _too_late = answer.send(alive.is_alive);
        }
    }
}
