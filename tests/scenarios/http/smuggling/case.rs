//! One row of the table, and how rows are written.

/// A request as it goes over the wire, and what must become of it.
#[derive(Debug, Clone)]
pub(super) struct Case {
    pub(super) name: String,
    bytes: Vec<u8>,
    pub(super) expect: Expect,
}

/// What must become of a case.
#[derive(Debug, Clone)]
pub(super) enum Expect {
    /// One answer with this status, then the end; no byte reaches a target.
    Refused(u16),
    /// It is never complete, and then the client leaves: no answer of a target, and no whole request there.
    Gone,
    /// The body turns out wrong behind a head that was passed on: no answer of a target, and no whole request there.
    Cut,
    /// This answer to what one target got, and nothing else.
    Bad(u16),
    /// These requests reach their targets, and nothing else does.
    Routed(Vec<Want>),
    /// This request reaches its target; the one behind it is answered with 400, and nothing else arrives.
    RoutedThenRefused(Want),
}

/// A request as its target must get it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Want {
    /// The target that the case is for, in contrast to the other one.
    pub(super) own: bool,
    pub(super) method: String,
    pub(super) target: String,
    pub(super) body: String,
}

impl Want {
    pub(super) fn own(method: &str, target: &str, body: &str) -> Self {
        Self {
            own: true,
            method: method.into(),
            target: target.into(),
            body: body.into(),
        }
    }

    pub(super) fn other(method: &str, target: &str, body: &str) -> Self {
        Self {
            own: false,
            ..Self::own(method, target, body)
        }
    }
}

impl Want {
    pub(super) fn filled(&self, ports: Ports) -> Self {
        Self {
            body: String::from_utf8_lossy(&ports.fill(self.body.as_bytes())).into_owned(),
            ..self.clone()
        }
    }
}

impl Case {
    /// In `bytes`, [`OWN`] and [`OTHER`] stand for the two nodes with the ports of their targets.
    pub(super) fn new(name: &str, bytes: impl AsRef<[u8]>, expect: Expect) -> Self {
        Self {
            name: name.into(),
            bytes: bytes.as_ref().to_vec(),
            expect,
        }
    }

    /// A case that is refused with 400.
    pub(super) fn refused(name: &str, bytes: impl AsRef<[u8]>) -> Self {
        Self::new(name, bytes, Expect::Refused(400))
    }

    /// The bytes for these ports.
    pub(super) fn bytes(&self, ports: Ports) -> Vec<u8> {
        ports.fill(&self.bytes)
    }
}

/// The ports of the two targets.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ports {
    pub(super) own: u16,
    pub(super) other: u16,
}

impl Ports {
    /// Puts the ports into a text; its length stays, as ephemeral ports have five digits.
    pub(super) fn fill(self, bytes: &[u8]) -> Vec<u8> {
        let (own, other) = (
            format!("worker-1:{}", self.own),
            format!("worker-2:{}", self.other),
        );
        assert!(
            own.len() == OWN.len() && other.len() == OTHER.len(),
            "{self:?}"
        );
        let once = replace(bytes, OWN.as_bytes(), own.as_bytes());
        let twice = replace(&once, OTHER.as_bytes(), other.as_bytes());
        // Other spellings of the own node.
        replace(&twice, b"@port", self.own.to_string().as_bytes())
    }
}

/// The node that cases are for.
pub(super) const OWN: &str = "worker-1:@port";
/// The node that nothing may reach unless a case says so.
pub(super) const OTHER: &str = "worker-2:@port";

fn replace(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut rest = bytes;
    while let Some(at) = rest.windows(from.len()).position(|window| window == from) {
        out.extend_from_slice(&rest[..at]);
        out.extend_from_slice(to);
        rest = &rest[at + from.len()..];
    }
    out.extend_from_slice(rest);
    out
}

/// The request that is hidden in others: for another node, and visible there by its path.
pub(super) const HIDDEN: &str =
    "GET /hidden HTTP/1.1\r\nHost: worker-2:@port\r\nConnection: close\r\n\r\n";

/// `POST /p` with these field lines (each with its end) and what follows the head.
pub(super) fn post(fields: &str, rest: &str) -> String {
    format!("POST /p HTTP/1.1\r\nHost: worker-1:@port\r\n{fields}\r\n{rest}")
}

/// `GET /g` with these field lines, each with its end.
pub(super) fn get(fields: impl AsRef<[u8]>) -> Vec<u8> {
    [
        b"GET /g HTTP/1.1\r\nHost: worker-1:@port\r\n",
        fields.as_ref(),
        b"Connection: close\r\n\r\n",
    ]
    .concat()
}
