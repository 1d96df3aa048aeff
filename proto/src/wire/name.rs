//! Names from the wire or from users. Each type validates its value once, when the value is parsed.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// Maximum length of a DNS name in text form (RFC 1035, section 2.3.4, less the root label).
pub(super) const NAME_MAX: usize = 253;
/// Maximum length of a DNS label (RFC 1035, section 2.3.4).
const LABEL_MAX: usize = 63;

/// The reason why a text is not a node name.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
pub enum NameError {
    /// The text is empty or only a dot.
    #[error("name is empty")]
    Empty,
    /// The name has more than 253 characters.
    #[error("name is too long")]
    TooLong,
    /// The name is for DNS, and has a label of more than 63 characters. Kubernetes has no such limit.
    #[error("a label of the name has more than 63 characters, which DNS does not allow")]
    LongLabel,
    /// The name has a character outside a-z, 0-9, `-` and `.`, an empty label, or a label that
    /// begins or ends with `-`.
    #[error("name is not a DNS subdomain (letters, digits, '-' and '.'){}", as_proposal(.0))]
    Syntax(Option<NodeName>),
}

fn as_proposal(name: &Option<NodeName>) -> String {
    let name = name.as_ref();
    name.map_or_else(String::new, |name| format!("; {name} would do"))
}

/// The name of a node: a DNS subdomain (RFC 1123) as for the objects of Kubernetes, stored in lower
/// case without a trailing dot. An IPv4 address is such a name, too. As in Kubernetes, a label may
/// have more than the 63 characters of DNS.
///
/// Comparison ignores case, as in DNS, because parsing converts names to lower case. A clone shares
/// the text: each request clones the name of its node several times.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeName(Arc<str>);

impl NodeName {
    /// Returns the name in lower case without a trailing dot.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the name if DNS can carry it: no label has more than 63 characters (RFC 1035, section
    /// 2.3.4).
    ///
    /// # Errors
    /// When a label is longer.
    pub fn for_dns(self) -> Result<Self, NameError> {
        if self.has_long_label() {
            return Err(NameError::LongLabel);
        }
        Ok(self)
    }

    /// Returns whether DNS cannot carry the name, see [`NodeName::for_dns`].
    pub fn has_long_label(&self) -> bool {
        self.0.split('.').any(|label| label.len() > LABEL_MAX)
    }

    /// Returns whether DNS can have a host of this name.
    pub fn is_host_name(&self) -> bool {
        !self.has_long_label() && !self.ends_in_number()
    }

    /// Returns whether the last of several labels is a number. No host in DNS has such a name (RFC
    /// 1123, section 2.1), and resolvers take some of them for addresses.
    pub fn ends_in_number(&self) -> bool {
        let last = self.0.rsplit_once('.').map(|(_, last)| last);
        last.is_some_and(|last| last.bytes().all(|byte| byte.is_ascii_digit()))
    }
}

impl FromStr for NodeName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let text = text.strip_suffix('.').unwrap_or(text);
        if text.is_empty() {
            return Err(NameError::Empty);
        }
        if text.len() > NAME_MAX {
            return Err(NameError::TooLong);
        }
        for label in text.split('.') {
            let inner = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
            if label.is_empty()
                || label.starts_with('-')
                || label.ends_with('-')
                || !label.bytes().all(inner)
            {
                return Err(NameError::Syntax(similar_name(text)));
            }
        }
        let mut name: Arc<str> = text.into();
        // Nothing else has this name yet, so it is changed in place.
        if let Some(name) = Arc::get_mut(&mut name) {
            name.make_ascii_lowercase();
        }
        Ok(Self(name))
    }
}

/// Returns a valid name that is close to the text, if there is one.
fn similar_name(text: &str) -> Option<NodeName> {
    let replaced: String = text
        .chars()
        .map(|character| match character {
            '.' => '.',
            other if other.is_ascii_alphanumeric() => other,
            _ => '-',
        })
        .collect();
    let labels = replaced.split('.').map(|label| label.trim_matches('-'));
    let labels: Vec<_> = labels.filter(|label| !label.is_empty()).collect();
    // All labels are valid, so this does not call itself again.
    labels.join(".").parse().ok()
}

/// The name of a server among the servers of one installation, such as the name of its pod. Has the
/// syntax of a [`NodeName`].
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReplicaId(NodeName);

impl ReplicaId {
    /// Returns the name in lower case.
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }
}

impl FromStr for ReplicaId {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        text.parse().map(Self)
    }
}

impl fmt::Display for ReplicaId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

impl fmt::Display for NodeName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// The reason why a text is not the name of a zone.
#[derive(Debug, Clone, Copy, thiserror::Error, PartialEq, Eq)]
#[error(
    "zone is not a label value (1 to 63 of letters, digits, '-', '_' and '.', beginning and ending with \
     a letter or digit)"
)]
pub struct ZoneNameError;

/// The name of a zone: servers of one zone may fail together. A label value of Kubernetes, such as that
/// of `topology.kubernetes.io/zone`. Comparison does not ignore case. A clone shares the text.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ZoneName(Arc<str>);

impl ZoneName {
    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for ZoneName {
    type Err = ZoneNameError;

    fn from_str(text: &str) -> Result<Self, ZoneNameError> {
        let is_inner =
            |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        let is_outer = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
        let bytes = text.as_bytes();
        let has_label_syntax = bytes.len() <= LABEL_MAX
            && is_outer(bytes.first())
            && is_outer(bytes.last())
            && text.bytes().all(is_inner);
        if has_label_syntax {
            Ok(Self(text.into()))
        } else {
            Err(ZoneNameError)
        }
    }
}

impl fmt::Display for ZoneName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// The reason why a text is not the name of a cloud target.
#[derive(Debug, Clone, Copy, thiserror::Error, PartialEq, Eq)]
#[error(
    "name is not a DNS label (1 to 63 of a-z, 0-9 and '-', beginning and ending with a-z or 0-9)"
)]
pub struct CloudTargetError;

/// The name of a target of the cloud that agents may reach, such as `apiserver`: a DNS label in lower
/// case.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CloudTarget(Arc<str>);

impl CloudTarget {
    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for CloudTarget {
    type Err = CloudTargetError;

    fn from_str(text: &str) -> Result<Self, CloudTargetError> {
        let is_inner =
            |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        let has_label_syntax = (1..=LABEL_MAX).contains(&text.len())
            && !text.starts_with('-')
            && !text.ends_with('-')
            && text.bytes().all(is_inner);
        if has_label_syntax {
            Ok(Self(text.into()))
        } else {
            Err(CloudTargetError)
        }
    }
}

impl fmt::Display for CloudTarget {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// The id of one agent process. The id is random, so that two hosts with one identity can be
/// distinguished. The order has no meaning, but is the same everywhere.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct InstanceId([u8; 16]);

impl InstanceId {
    /// Creates an id from 16 random bytes.
    pub const fn new(random: [u8; 16]) -> Self {
        Self(random)
    }

    /// Returns the bytes of the id as sent on the wire.
    pub fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl fmt::Debug for InstanceId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..4]
            .iter()
            .try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}

/// The id of a session at one server process, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub u64);

impl fmt::Display for SessionId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

/// A TCP or UDP port, 1 to 65535.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Port(std::num::NonZeroU16);

impl Port {
    /// Returns the port, or `None` for 0.
    pub fn new(number: u16) -> Option<Self> {
        std::num::NonZeroU16::new(number).map(Self)
    }

    /// Returns the port number.
    pub fn get(self) -> u16 {
        self.0.get()
    }
}

impl fmt::Display for Port {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

impl FromStr for Port {
    type Err = PortError;

    fn from_str(text: &str) -> Result<Self, PortError> {
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let number = if digits {
            text.parse::<u16>().ok()
        } else {
            None
        };
        number.and_then(Self::new).ok_or(PortError)
    }
}

/// The error for a text that is not a port.
#[derive(Debug, Clone, Copy, thiserror::Error, PartialEq, Eq)]
#[error("port is not a number from 1 to 65535")]
pub struct PortError;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_names_are_lowered_and_lose_a_trailing_dot() {
        for text in ["worker-1", "Worker-1", "WORKER-1."] {
            assert_eq!(text.parse::<NodeName>().unwrap().as_str(), "worker-1");
        }
        let name = "a.b-c.example".parse::<NodeName>().unwrap();
        assert_eq!(name.as_str(), "a.b-c.example");
    }

    /// Clouds name nodes after their addresses, and people by `--hostname-override`.
    #[test]
    fn names_of_nodes_are_those_of_kubernetes() {
        for text in [
            "1",
            "1.2",
            "172.31.42.71",
            "cn-region.192.168.33.221",
            "ip-10-0-0-1.region.compute.internal",
            "0x7f.1",
            "node-1.example.7",
            "a.b.c.d",
            "9-a",
            &"x".repeat(63),
            &"x".repeat(253),
            &format!("{}.example", "x".repeat(64)),
        ] {
            let name = text.parse::<NodeName>().unwrap();
            assert_eq!(name.as_str(), text);
            let is_long = text.len() > 63;
            assert_eq!(name.has_long_label(), is_long);
            assert_eq!(name.clone().for_dns().is_err(), is_long, "{text}");
            assert_eq!(name.is_host_name(), !is_long && !name.ends_in_number());
        }
        for (text, is_number) in [("1", false), ("a.1", true), ("127.1", true), ("1.a", false)] {
            let name: NodeName = text.parse().unwrap();
            assert_eq!(name.ends_in_number(), is_number, "{text}");
        }
    }

    #[test]
    fn name_that_would_do_is_proposed() {
        for (text, similar) in [
            ("edge_gw_01", "edge-gw-01"),
            ("Edge GW 01", "edge-gw-01"),
            ("b\u{fc}ro-1", "b-ro-1"),
            ("_node_.site..x", "node.site.x"),
            ("-a-", "a"),
            ("fe80::1", "fe80--1"),
        ] {
            let error = text.parse::<NodeName>().unwrap_err();
            let expected = format!("; {similar} would do");
            assert!(error.to_string().ends_with(&expected), "{text}: {error}");
        }
        let long = format!("_{}", "x".repeat(64));
        let error = long.parse::<NodeName>().unwrap_err().to_string();
        assert!(error.ends_with(&format!("; {} would do", &long[1..])));
        for text in ["*", "_._", "\u{fc}", "..", &format!("_{}", "x".repeat(254))] {
            let error = text.parse::<NodeName>().unwrap_err().to_string();
            assert!(!error.contains("would do"), "{text}: {error}");
        }
    }

    #[test]
    fn hostile_names_are_refused() {
        let too_long = "x".repeat(254);
        let long_name = ["x".repeat(60).as_str(); 5].join(".");
        for text in [
            "", ".", "..", "a..b", "-a", "a-", "a b", "a\tb", "a\nb", "a#b", "a\0b", "ä", "a_b",
            "*.x", "a/b", &too_long, &long_name,
        ] {
            assert!(text.parse::<NodeName>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn zones_are_label_values() {
        for text in ["a", "1", "eu-central-1a", "A_b.c", &"z".repeat(63)] {
            assert_eq!(text.parse::<ZoneName>().unwrap().as_str(), text);
        }
        let too_long = "z".repeat(64);
        for text in [
            "", "-a", "a-", "a.", "_", "a b", "a\n", "\u{e4}", "a/b", &too_long,
        ] {
            assert!(text.parse::<ZoneName>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn ports_are_plain_decimal_from_1_to_65535() {
        assert_eq!("9100".parse::<Port>().unwrap().get(), 9100);
        for text in ["", "0", "65536", "+80", "-1", "0x50", " 80", "80 ", "8a"] {
            assert!(text.parse::<Port>().is_err(), "{text:?}");
        }
    }
}
