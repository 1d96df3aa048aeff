//! The switch of the metrics that have a series for each node.

tunnel_process::named! {
    /// When metrics have a series for each node.
    #[derive(Default)]
    pub enum PerNodeMetrics: FromStr {
        /// While there are at most 2,000 nodes.
        #[default]
        Auto = "auto",
        On = "on",
        Off = "off",
    }
}

impl PerNodeMetrics {
    /// Returns whether a page may have the series of this many nodes.
    pub fn allows(self, nodes: usize) -> bool {
        match self {
            Self::Auto => nodes <= AUTO_MAX,
            Self::On => true,
            Self::Off => false,
        }
    }
}

/// Number of nodes up to which [`PerNodeMetrics::Auto`] has series. With three series for each node
/// a page is about 0.5 MB.
const AUTO_MAX: usize = 2_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_modes_are_parsed_and_others_refused() {
        for (text, mode) in [
            ("auto", PerNodeMetrics::Auto),
            ("on", PerNodeMetrics::On),
            ("off", PerNodeMetrics::Off),
        ] {
            assert_eq!(text.parse(), Ok(mode));
        }
        for text in ["", "true", "On"] {
            assert!(text.parse::<PerNodeMetrics>().is_err(), "{text}");
        }
    }
}
