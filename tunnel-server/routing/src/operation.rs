//! What a caller wants to do at a target, read from method and path as the kubelet's router reads them.

use std::fmt;
use std::str::FromStr;

use http::{Method, Request};

use crate::decision::may_be_upgrade;

tunnel_networks::named! {
    /// What a caller wants to do at a target. The first segment of the path decides at a kubelet, as in
    /// the kubelet's own authorization (Kubernetes `pkg/kubelet/server/auth.go`); the method does
    /// elsewhere. The names are those of rules, logs and stream headers, in the order of the documentation.
    #[derive(PartialOrd, Ord)]
    pub enum Operation: ALL, label, Display, FromStr {
        /// `/metrics` and what is below it.
        Metrics = "metrics",
        /// `/stats`.
        Stats = "stats",
        /// `/healthz`.
        Healthz = "healthz",
        /// `/pods` and `/runningpods`, which have the specifications of pods.
        Pods = "pods",
        /// `/configz`.
        Configz = "configz",
        /// `/containerLogs`.
        ContainerLogs = "containerlogs",
        /// `/logs`: files of the node's `/var/log`.
        NodeLogs = "nodelogs",
        /// `/exec`.
        Exec = "exec",
        /// `/attach`.
        Attach = "attach",
        /// `/portForward`.
        PortForward = "portforward",
        /// `/run`.
        Run = "run",
        /// `/checkpoint`.
        Checkpoint = "checkpoint",
        /// `/statusz`.
        Statusz = "statusz",
        /// `/flagz`.
        Flagz = "flagz",
        /// `/debug`: profiles, and the log level.
        Debug = "debug",
        /// A path of the kubelet's port that the kubelet does not have.
        Unknown = "unknown",
        /// GET or HEAD without Upgrade, at a port that is not a kubelet's.
        Read = "read",
        /// Another method without Upgrade, at such a port.
        Write = "write",
        /// A request for another protocol, except for exec, attach and port-forward.
        Upgrade = "upgrade",
        /// Bytes that the server does not read: CONNECT and TCP services.
        Connect = "connect",
    }
}

/// A set of operations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OperationSet(u32);

/// What a listener knows of a request, from which its operation is read.
#[derive(Debug, Clone, Copy)]
pub enum RequestedOperation<'a> {
    /// Bytes that the server does not read.
    Connect,
    Http {
        method: &'a Method,
        /// The path as received, without its query.
        path: &'a str,
        /// Something behind the server may take the request for an upgrade.
        may_be_upgrade: bool,
    },
}

/// The path can be read in several ways, of which the target may choose another one than this server.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the path can be read in several ways at a kubelet: send it without empty segments, '.', '..' and needless \
     percent-encoding"
)]
pub struct UnclearPath;

impl<'a> RequestedOperation<'a> {
    /// Returns what is known of a request.
    pub fn of<B>(request: &'a Request<B>) -> Self {
        if *request.method() == Method::CONNECT {
            return Self::Connect;
        }
        Self::Http {
            method: request.method(),
            path: request.uri().path(),
            may_be_upgrade: may_be_upgrade(request.headers()),
        }
    }

    /// Returns the request without the upgrade for which it may ask.
    #[must_use]
    pub fn without_upgrade(self) -> Self {
        match self {
            Self::Http { method, path, .. } => Self::Http {
                method,
                path,
                may_be_upgrade: false,
            },
            Self::Connect => Self::Connect,
        }
    }

    /// Returns the operation at a port of a kubelet, or at another one.
    ///
    /// # Errors
    /// [`UnclearPath`] at a kubelet, if its router would redirect the request, or may read another path.
    pub fn at(self, is_kubelet: bool) -> Result<Operation, UnclearPath> {
        let Self::Http {
            method,
            path,
            may_be_upgrade,
        } = self
        else {
            return Ok(Operation::Connect);
        };
        if is_kubelet {
            let operation = at_kubelet(path)?;
            let is_stream = OperationSet::STREAMS.contains(operation);
            return Ok(if may_be_upgrade && !is_stream {
                Operation::Upgrade
            } else {
                operation
            });
        }
        Ok(if may_be_upgrade {
            Operation::Upgrade
        } else if *method == Method::GET || *method == Method::HEAD {
            Operation::Read
        } else {
            Operation::Write
        })
    }
}

/// Returns the operation of a path at a kubelet. Routers of Go before 1.22 match the decoded path, later
/// ones each decoded segment, and go-restful the decoded path again, so a path with an encoding that could
/// matter is refused.
fn at_kubelet(path: &str) -> Result<Operation, UnclearPath> {
    let path = path.strip_prefix('/').ok_or(UnclearPath)?;
    let mut segments = path.split('/').enumerate().peekable();
    let operation = of_segment(path.split('/').next().unwrap_or_default());
    while let Some((index, segment)) = segments.next() {
        let is_clear = match segment {
            // A slash at the end changes nothing for go-restful.
            "" => segments.peek().is_none(),
            // Names of files can need encoding. Nothing else at a kubelet does.
            _ if operation == Operation::NodeLogs && index > 0 => is_file_name(segment),
            _ => is_plain(segment),
        };
        if !is_clear {
            return Err(UnclearPath);
        }
    }
    Ok(operation)
}

fn of_segment(first: &str) -> Operation {
    match first {
        "metrics" => Operation::Metrics,
        "stats" => Operation::Stats,
        "healthz" => Operation::Healthz,
        "pods" | "runningpods" => Operation::Pods,
        "configz" => Operation::Configz,
        "containerLogs" => Operation::ContainerLogs,
        "logs" => Operation::NodeLogs,
        "exec" => Operation::Exec,
        "attach" => Operation::Attach,
        "portForward" => Operation::PortForward,
        "run" => Operation::Run,
        "checkpoint" => Operation::Checkpoint,
        "statusz" => Operation::Statusz,
        "flagz" => Operation::Flagz,
        "debug" => Operation::Debug,
        _ => Operation::Unknown,
    }
}

fn is_plain(segment: &str) -> bool {
    !matches!(segment, "" | "." | "..") && !segment.contains(['%', '\\'])
}

/// Returns whether a segment is one file name before and after decoding, and hides no letter.
fn is_file_name(segment: &str) -> bool {
    let mut parts = segment.split('%');
    let is_first_plain = parts.next().is_some_and(|first| !first.contains('\\'));
    let is_needed = |part: &str| {
        let byte = part.get(..2).filter(|_| !part.contains('\\'));
        let byte = byte.filter(|hex| hex.bytes().all(|digit| digit.is_ascii_hexdigit()));
        let byte = byte.and_then(|hex| u8::from_str_radix(hex, 16).ok());
        byte.is_some_and(|byte| {
            !byte.is_ascii_alphanumeric()
                && !byte.is_ascii_control()
                && !matches!(byte, b'/' | b'\\' | b'.' | b'%' | b'-' | b'_' | b'~')
        })
    };
    !matches!(segment, "" | "." | "..") && is_first_plain && parts.all(is_needed)
}

impl Operation {
    /// Returns the subresources of Node that the kubelet's authorization asks for, in its order: one of them
    /// must be allowed (KEP-2862). Of ports that are no kubelet's there is none.
    pub fn subresources(self) -> &'static [&'static str] {
        match self {
            Self::Metrics => &["metrics"],
            Self::Stats => &["stats"],
            Self::Healthz => &["healthz", "proxy"],
            Self::Pods => &["pods", "proxy"],
            Self::Configz => &["configz", "proxy"],
            Self::NodeLogs => &["log"],
            Self::Checkpoint => &["checkpoint"],
            Self::Statusz => &["statusz"],
            Self::Flagz => &["configz"],
            Self::ContainerLogs
            | Self::Exec
            | Self::Attach
            | Self::PortForward
            | Self::Run
            | Self::Debug
            | Self::Unknown => &["proxy"],
            Self::Read | Self::Write | Self::Upgrade | Self::Connect => &[],
        }
    }

    /// Returns the verb that the kubelet's authorization asks for. What opens a shell or a port of a pod is
    /// `create` with every method: a WebSocket begins with GET (kubernetes#136550).
    pub fn verb(self, method: &Method) -> Option<&'static str> {
        if OperationSet::SHELL.contains(self) {
            return Some("create");
        }
        match method.as_str() {
            "GET" => Some("get"),
            "POST" => Some("create"),
            "PUT" => Some("update"),
            "PATCH" => Some("patch"),
            "DELETE" => Some("delete"),
            _ => None,
        }
    }
}

/// A name is neither an operation nor a group.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("is no operation; there are shell, observe, {}", names(&Operation::ALL))]
pub struct UnknownOperation;

impl FromStr for OperationSet {
    type Err = UnknownOperation;

    /// Parses the name of an operation or of a group.
    fn from_str(name: &str) -> Result<Self, UnknownOperation> {
        match name {
            "shell" => Ok(Self::SHELL),
            "observe" => Ok(Self::OBSERVE),
            _ => name
                .parse::<Operation>()
                .map(|operation| Self::of(&[operation]))
                .map_err(|_no_operation| UnknownOperation),
        }
    }
}

impl OperationSet {
    /// What opens a shell, or a port of a pod.
    pub const SHELL: Self = Self::of(&[
        Operation::Exec,
        Operation::Attach,
        Operation::Run,
        Operation::PortForward,
    ]);
    /// What monitoring reads.
    pub const OBSERVE: Self = Self::of(&[Operation::Metrics, Operation::Stats, Operation::Healthz]);
    /// Bytes alone.
    pub const BYTES: Self = Self::of(&[Operation::Connect]);
    /// What only ports of other programs than a kubelet have.
    pub const GENERIC: Self = Self::of(&[Operation::Read, Operation::Write, Operation::Upgrade]);
    /// What can become another protocol at a kubelet.
    const STREAMS: Self = Self::of(&[Operation::Exec, Operation::Attach, Operation::PortForward]);

    pub const fn of(operations: &[Operation]) -> Self {
        let (mut bits, mut index) = (0, 0);
        while index < operations.len() {
            bits |= 1 << operations[index] as u32;
            index += 1;
        }
        Self(bits)
    }

    pub const fn contains(self, operation: Operation) -> bool {
        self.0 & (1 << operation as u32) != 0
    }

    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns whether bytes to a kubelet, or to another port, may be one of the operations.
    pub fn may_be_bytes(self, is_kubelet: bool) -> bool {
        let of_kubelet = Self(!Self::GENERIC.union(Self::of(&[Operation::Connect])).0);
        let possible = if is_kubelet {
            of_kubelet.union(Self::of(&[Operation::Upgrade]))
        } else {
            Self::GENERIC
        };
        self.contains(Operation::Connect) || self.0 & possible.0 != 0
    }
}

impl fmt::Display for OperationSet {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = Operation::ALL.into_iter();
        let contained: Vec<_> = all.filter(|operation| self.contains(*operation)).collect();
        formatter.write_str(&names(&contained))
    }
}

fn names(operations: &[Operation]) -> String {
    let names: Vec<_> = operations
        .iter()
        .map(|operation| operation.label())
        .collect();
    names.join(", ")
}

#[cfg(test)]
mod tests;
