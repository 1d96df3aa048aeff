//! The formats in which commands print what they found.

/// The value of `--output`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum OutputFormat {
    /// For reading in a terminal.
    #[default]
    Table,
    /// JSON for scripts and programs.
    Json,
}
