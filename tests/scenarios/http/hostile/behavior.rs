//! One row of the table, and how rows are written.

use tunnel_tests::targets::HostileAction;

/// What a target does, and what its caller gets.
#[derive(Debug, Clone)]
pub(super) struct Behavior {
    pub(super) name: String,
    pub(super) method: &'static str,
    pub(super) actions: Vec<HostileAction>,
    pub(super) answer: Answer,
    /// Asked through the TLS door.
    pub(super) tls: bool,
    /// The steps are inside TLS.
    pub(super) speaks_tls: bool,
}

/// What a caller gets.
#[derive(Debug, Clone, Copy)]
pub(super) enum Answer {
    /// Nothing, for as long as it waits.
    None,
    /// The server's own answer: status and one of these codes.
    ServerError(u16, &'static [&'static str]),
    /// The target's answer, whole.
    Passed(u16, &'static str),
    /// The target's answer, ended by a reset; or 502 when nothing had been passed.
    Cut,
    /// One of both: the target's reset may overtake its answer.
    PassedOrCut(u16, &'static str),
}

/// 502 `target_bad_response`.
pub(super) const BAD: Answer = Answer::ServerError(502, &["target_bad_response"]);

impl Behavior {
    /// The answer to a GET is `bytes` and FIN.
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

    pub(super) fn to(self, method: &'static str) -> Self {
        Self { method, ..self }
    }

    /// Asked through the TLS door, where the target does not speak TLS.
    pub(super) fn without_tls(self) -> Self {
        Self { tls: true, ..self }
    }

    /// Asked through the TLS door, where the target speaks TLS.
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
