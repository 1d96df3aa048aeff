//! A row of the table of smuggling cases, and its constructors.

/// The bytes of a request, and the result that the case expects.
#[derive(Debug, Clone)]
pub(super) struct Case {
    pub(super) name: String,
    bytes: Vec<u8>,
    pub(super) expect: Expect,
}

/// The result that a case expects.
#[derive(Debug, Clone)]
pub(super) enum Expect {
    /// One answer with this status, then the end of the connection. No byte reaches a target.
    Refused(u16),
    /// The request is never complete, and the client leaves. No target answers, and no target
    /// receives a complete request.
    Gone,
    /// The body turns out to be malformed after the server has forwarded the head. No target
    /// answers, and no target receives a complete request.
    Cut,
    /// These requests reach their targets, and no others do.
    Routed(Vec<Want>),
    /// This request reaches its target. The server answers the following one with 400, and nothing
    /// else arrives.
    RoutedThenRefused(Want),
}

/// A request as its target must receive it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Want {
    /// Whether the request is for the target of the case, in contrast to the other target.
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
    /// Creates a case. In `bytes`, [`OWN`] and [`OTHER`] stand for the two nodes with the ports of
    /// their targets.
    pub(super) fn new(name: &str, bytes: impl AsRef<[u8]>, expect: Expect) -> Self {
        Self {
            name: name.into(),
            bytes: bytes.as_ref().to_vec(),
            expect,
        }
    }

    /// Creates a case that the server refuses with 400.
    pub(super) fn refused(name: &str, bytes: impl AsRef<[u8]>) -> Self {
        Self::new(name, bytes, Expect::Refused(400))
    }

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
    /// Replaces the placeholders by the ports. The length stays equal, because ephemeral ports have
    /// five digits.
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
        // Some cases spell the node differently. The port is replaced there, too.
        replace(&twice, b"@port", self.own.to_string().as_bytes())
    }
}

/// The node of the cases' requests.
pub(super) const OWN: &str = "worker-1:@port";
/// The node that no request may reach, unless the case expects it.
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

/// A request that is hidden inside another one. The hidden request is for the other node and
/// visible there by its path.
pub(super) const HIDDEN: &str =
    "GET /hidden HTTP/1.1\r\nHost: worker-2:@port\r\nConnection: close\r\n\r\n";

/// Returns `POST /p` with these field lines, each with its line end, followed by `rest`.
pub(super) fn post(fields: &str, rest: &str) -> String {
    format!("POST /p HTTP/1.1\r\nHost: worker-1:@port\r\n{fields}\r\n{rest}")
}

/// Returns `GET /g` with these field lines, each with its line end.
pub(super) fn get(fields: impl AsRef<[u8]>) -> Vec<u8> {
    [
        b"GET /g HTTP/1.1\r\nHost: worker-1:@port\r\n",
        fields.as_ref(),
        b"Connection: close\r\n\r\n",
    ]
    .concat()
}
