//! The state of a node in one word. Pure.

tunnel_process::named! {
    /// The state of a node, the worst one first.
    pub enum NodeState: ALL, label, FromStr {
        /// The agent does not respond.
        Suspect = "suspect",
        /// The node needs an agent and has none.
        Away = "away",
        /// The server that held the node last is gone, so that nobody knows.
        Unknown = "unknown",
        /// The node has enrolled and was never seen after that.
        Enrolled = "enrolled",
        Revoked = "revoked",
        /// The node has been named to this server, as by a token, and was never seen.
        Pending = "pending",
        /// Another server holds the node and has not said in which state.
        Connected = "connected",
        Live = "live",
        /// A node of the cluster that needs no agent.
        NotEdge = "not-edge",
    }
}

impl NodeState {
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
