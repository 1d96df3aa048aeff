//! How the version of an agent differs from the version of the server. Pure.

use std::cmp::Ordering;

use serde::{Deserialize, Serialize};

tunnel_process::named! {
    /// The difference between the minor release of an agent and that of the server. A server works with
    /// agents of the minor release before and after its own.
    #[derive(Serialize, Deserialize)]
    #[serde(rename_all = "camelCase")]
    pub enum VersionSkew: label {
        /// The agent is one minor release older.
        Older = "older",
        /// The agent is one minor release newer.
        Newer = "newer",
        /// The releases differ by more, and are not meant to work together.
        Unsupported = "unsupported",
    }
}

impl VersionSkew {
    /// Returns the difference between an agent's version and the version of this server. `None`
    /// without a difference, and for a version that cannot be parsed.
    pub(super) fn of_agent(software: &str) -> Option<Self> {
        Self::between(env!("CARGO_PKG_VERSION"), software)
    }

    fn between(server: &str, agent: &str) -> Option<Self> {
        let (server, agent) = (MinorRelease::parse(server)?, MinorRelease::parse(agent)?);
        if server.major != agent.major || server.minor.abs_diff(agent.minor) > 1 {
            return Some(Self::Unsupported);
        }
        match agent.minor.cmp(&server.minor) {
            Ordering::Less => Some(Self::Older),
            Ordering::Equal => None,
            Ordering::Greater => Some(Self::Newer),
        }
    }
}

/// The first two numbers of a version.
struct MinorRelease {
    major: u64,
    minor: u64,
}

impl MinorRelease {
    fn parse(version: &str) -> Option<Self> {
        let mut numbers = version.splitn(3, '.');
        Some(Self {
            major: numbers.next()?.parse().ok()?,
            minor: numbers.next()?.parse().ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minor_releases_are_compared_and_other_texts_are_not() {
        use VersionSkew::{Newer, Older, Unsupported};
        for (server, agent, skew) in [
            ("0.5.1", "0.5.9", None),
            ("0.5.1", "0.5.0-rc.1", None),
            ("0.5.1", "0.4.7", Some(Older)),
            ("0.5.1", "0.6.0", Some(Newer)),
            ("0.5.1", "0.3.0", Some(Unsupported)),
            ("0.5.1", "0.7.0", Some(Unsupported)),
            ("1.0.0", "0.9.0", Some(Unsupported)),
            ("0.5.1", "1.5.1", Some(Unsupported)),
            ("0.5.1", "", None),
            ("0.5.1", "played", None),
            ("0.5.1", "99999999999999999999.1", None),
        ] {
            assert_eq!(VersionSkew::between(server, agent), skew, "{agent}");
        }
    }

    #[test]
    fn version_of_this_build_has_no_skew() {
        assert_eq!(VersionSkew::of_agent(env!("CARGO_PKG_VERSION")), None);
    }
}
