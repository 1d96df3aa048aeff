//! The decoders of bytes that come from peers, callers, resolvers, cluster objects, proxies and
//! files, each with first inputs and a check that holds for any input.
//!
//! `tests/scenarios/fuzz.rs` runs each check on mutations of the first inputs, and cargo-fuzz runs
//! it without end (`tests/fuzz`).

mod chunked;
mod credentials;
mod messages;
mod requests;
mod settings;

use std::path::Path;

use anyhow::{Context, Result};

use crate::dns;
use crate::mutation::fuzz;

/// A decoder, or a few that read the same bytes.
#[derive(Debug)]
pub struct FuzzTarget {
    /// Name of the target, and of its binary for cargo-fuzz.
    pub name: &'static str,
    /// Length of the longest input, in bytes.
    longest: usize,
    corpus: fn() -> Result<Vec<Vec<u8>>>,
    check: fn(&[u8]) -> Result<()>,
}

/// All targets, each with a test in `tests/scenarios/fuzz.rs`.
pub const TARGETS: &[FuzzTarget] = &[
    target("frames", 2048, messages::framed, messages::check_frames),
    target(
        "control_messages",
        4096,
        messages::controls,
        messages::check_control,
    ),
    target("peer_messages", 4096, messages::peers, messages::check_peer),
    target(
        "enrollment_messages",
        4096,
        messages::enrollments,
        messages::check_enrollment,
    ),
    target(
        "stream_messages",
        2048,
        messages::streams,
        messages::check_stream,
    ),
    target(
        "cut_announcements",
        128,
        messages::cuts,
        messages::check_cut,
    ),
    target("tokens", 512, credentials::tokens, credentials::check_token),
    target(
        "pem_files",
        2048,
        credentials::pem_files,
        credentials::check_pem,
    ),
    target(
        "certificates_and_requests",
        2048,
        credentials::certificates,
        credentials::check_certificate,
    ),
    target("dns_messages", 1024, dns::corpus, dns::keeps_the_rules),
    target("requests", 2048, requests::heads, requests::check_head),
    target("chunked_bodies", 1024, chunked::bodies, chunked::check_body),
    target(
        "proxy_answers",
        1024,
        requests::answers,
        requests::check_answer,
    ),
    target(
        "cluster_nodes",
        4096,
        requests::cluster_nodes,
        requests::check_cluster_nodes,
    ),
    target("names", 512, settings::names, settings::check_name),
    target(
        "configurations",
        2048,
        settings::configurations,
        settings::check_configuration,
    ),
    target(
        "persisted_files",
        2048,
        settings::persisted,
        settings::check_persisted,
    ),
];

const fn target(
    name: &'static str,
    longest: usize,
    corpus: fn() -> Result<Vec<Vec<u8>>>,
    check: fn(&[u8]) -> Result<()>,
) -> FuzzTarget {
    FuzzTarget {
        name,
        longest,
        corpus,
        check,
    }
}

impl FuzzTarget {
    pub fn of_name(name: &str) -> Result<&'static Self> {
        let target = TARGETS.iter().find(|target| target.name == name);
        target.with_context(|| format!("no fuzz target is named {name}"))
    }

    /// Checks one input.
    ///
    /// # Errors
    /// Returns an error if a decoder breaks a rule.
    pub fn check(&self, input: &[u8]) -> Result<()> {
        (self.check)(input)
    }

    /// Checks the first inputs, and as many mutations of them as the run's gear has.
    ///
    /// # Errors
    /// Returns an error with the input for which a decoder breaks a rule.
    pub fn run(&self) -> Result<()> {
        fuzz(&(self.corpus)()?, SEED, self.longest, self.check)
    }

    /// Writes the first inputs into a folder, as cargo-fuzz reads them.
    pub fn write_corpus(&self, folder: &Path) -> Result<()> {
        std::fs::create_dir_all(folder)?;
        for (number, input) in (self.corpus)()?.iter().enumerate() {
            std::fs::write(folder.join(format!("first-{number}")), input)?;
        }
        Ok(())
    }
}

const SEED: u64 = 1;
