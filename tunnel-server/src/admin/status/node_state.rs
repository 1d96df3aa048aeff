//! The state of a node in one word. Pure.

/// The state of a node, the worst one first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeState {
    /// The agent does not respond.
    Suspect,
    /// The node needs an agent and has none.
    Away,
    /// The server that held the node last is gone, so that nobody knows.
    Unknown,
    /// The node has enrolled and was never seen after that.
    Enrolled,
    Revoked,
    /// The node has been named to this server, as by a token, and was never seen.
    Pending,
    /// Another server holds the node and has not said in which state.
    Connected,
    Live,
    /// A node of the cluster that needs no agent.
    NotEdge,
}

impl NodeState {
    /// Every state, the worst one first.
    pub const ALL: [Self; 9] = [
        Self::Suspect,
        Self::Away,
        Self::Unknown,
        Self::Enrolled,
        Self::Revoked,
        Self::Pending,
        Self::Connected,
        Self::Live,
        Self::NotEdge,
    ];

    /// Returns the word for the state.
    pub fn label(self) -> &'static str {
        match self {
            Self::Suspect => "suspect",
            Self::Away => "away",
            Self::Unknown => "unknown",
            Self::Enrolled => "enrolled",
            Self::Revoked => "revoked",
            Self::Pending => "pending",
            Self::Connected => "connected",
            Self::Live => "live",
            Self::NotEdge => "not-edge",
        }
    }

    /// Returns whether requests to the node fail.
    pub fn is_not_live(self) -> bool {
        match self {
            Self::Suspect | Self::Away | Self::Unknown | Self::Enrolled | Self::Revoked => true,
            Self::Pending | Self::Connected | Self::Live | Self::NotEdge => false,
        }
    }

    /// Returns whether the state is a fault, for `doctor` and the console. States that an operator has
    /// planned are none: a node that is revoked, or that was named and has not joined.
    pub fn needs_operator(self) -> bool {
        self.is_not_live() && self != Self::Revoked
    }
}
