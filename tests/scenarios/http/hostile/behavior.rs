//! A row of the table of hostile targets, and its constructors.

use tunnel_tests::targets::HostileAction;

/// The actions of a target, and the answer that its caller gets.
#[derive(Debug, Clone)]
pub(super) struct Behavior {
    pub(super) name: String,
    pub(super) method: &'static str,
    pub(super) actions: Vec<HostileAction>,
    pub(super) answer: Answer,
    /// Whether the request goes through the HTTPS listener.
    pub(super) tls: bool,
    /// Whether the actions happen inside TLS.
    pub(super) speaks_tls: bool,
}

/// The answer that a caller gets.
#[derive(Debug, Clone, Copy)]
pub(super) enum Answer {
    /// No answer, for as long as the caller waits.
    None,
    /// An answer by the server itself: this status and one of these codes.
    ServerError(u16, &'static [&'static str]),
    /// The complete answer of the target.
    Passed(u16, &'static str),
    /// The answer of the target, ended by a reset, or 502 if no part of it had been forwarded.
    Cut,
    /// Either `Passed` or `Cut`, because the target's reset may overtake its answer.
    PassedOrCut(u16, &'static str),
}

pub(super) const BAD: Answer = Answer::ServerError(502, &["target_bad_response"]);

impl Behavior {
    /// Creates a row whose target answers a GET with `bytes` and FIN.
    pub(super) fn sends(name: &str, bytes: impl AsRef<[u8]>, answer: Answer) -> Self {
        Self::actions(name, vec![HostileAction::ReadHead, send(bytes)], answer)
    }

    pub(super) fn actions(name: &str, actions: Vec<HostileAction>, answer: Answer) -> Self {
        Self {
            name: name.into(),
            method: "GET",
            actions,
            answer,
            tls: false,
            speaks_tls: false,
        }
    }

    /// Creates a row whose target answers a GET with `bytes`, one by one.
    pub(super) fn drips(name: &str, bytes: impl AsRef<[u8]>, answer: Answer) -> Self {
        let drip = HostileAction::Drip(bytes.as_ref().to_vec());
        Self::actions(name, vec![HostileAction::ReadHead, drip], answer)
    }

    /// Creates two rows whose targets end the connection behind `bytes`, by FIN and by a reset.
    pub(super) fn ends(at: &str, bytes: impl AsRef<[u8]>, answer: Answer) -> [Self; 2] {
        let row = |end: &str| Self::sends(&format!("{end} {at}"), &bytes, answer);
        [row("end"), row("reset").then(HostileAction::Reset)]
    }

    /// Adds an action.
    pub(super) fn then(mut self, action: HostileAction) -> Self {
        self.actions.push(action);
        self
    }

    pub(super) fn to(self, method: &'static str) -> Self {
        Self { method, ..self }
    }

    /// Sends the request through the HTTPS listener. The target does not speak TLS.
    pub(super) fn without_tls(self) -> Self {
        Self { tls: true, ..self }
    }

    /// Sends the request through the HTTPS listener. The target speaks TLS.
    pub(super) fn inside_tls(self) -> Self {
        Self {
            tls: true,
            speaks_tls: true,
            ..self
        }
    }
}

pub(super) fn send(bytes: impl AsRef<[u8]>) -> HostileAction {
    HostileAction::Send(bytes.as_ref().to_vec())
}
