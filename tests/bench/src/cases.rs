//! The cases: the work that each system does in a round, and the targets for the figures.

use anyhow::Result;

use crate::bench::BenchRun;
use crate::target::Target;

mod bulk;
mod cloud;
mod growth;
mod latency;
mod memory;
mod pages;
mod requests;
mod restart;
mod servers;
mod stalled;
mod wan;

/// A case of the benchmark.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case {
    pub(crate) number: u8,
    pub(crate) title: &'static str,
    pub(crate) targets: &'static [Target],
    /// Maximum number of rounds. Further rounds add nothing: memory and sizes hardly vary, and
    /// restarts take long.
    pub(crate) rounds_most: u32,
    /// Whether the case needs more systems than the direct connection and the relays.
    pub(crate) of_culvert: bool,
    /// Whether the case takes so long that it runs only with `--full`, with `--agents`, or when
    /// `--case` names it.
    pub(crate) is_long: bool,
}

const fn case(number: u8, title: &'static str, targets: &'static [Target]) -> Case {
    Case {
        number,
        title,
        targets,
        rounds_most: u32::MAX,
        of_culvert: true,
        is_long: false,
    }
}

/// All cases in their order. Case 0 tests the benchmark itself and runs only when `--case` names
/// it.
pub(crate) const CASES: &[Case] = &[
    Case {
        of_culvert: false,
        ..case(0, "the relays alone", &[])
    },
    case(1, "one stream down and up, h2 over TLS", bulk::OVER_TCP),
    case(2, "one stream down and up, QUIC", bulk::OVER_QUIC),
    case(3, "64 streams through one agent", bulk::MANY_STREAMS),
    case(4, "64 kept-alive connections, 1 KiB", requests::KEEP_ALIVE),
    case(5, "a new connection for each request", requests::FRESH),
    case(6, "200 requests a second", latency::TARGETS),
    case(
        7,
        "scrapes of 1 MiB, and of 143 KB (1 MiB after gzip)",
        requests::SCRAPES,
    ),
    case(8, "readers that never read", stalled::TARGETS),
    Case {
        rounds_most: 1,
        ..case(9, "memory, and what many agents cost", memory::TARGETS)
    },
    Case {
        rounds_most: 5,
        ..case(10, "start and recovery", restart::TARGETS)
    },
    case(11, "50 ms and 200 Mbit/s, no loss", wan::CLEAN),
    case(12, "50 ms and 200 Mbit/s, 1 % loss each way", wan::LOSSY),
    Case {
        rounds_most: 1,
        ..case(13, "memory of several servers", servers::MEMORY)
    },
    Case {
        rounds_most: 1,
        is_long: true,
        ..case(14, "many agents at three servers", servers::HERD)
    },
    Case {
        rounds_most: 5,
        ..case(15, "pages of the meta port with many nodes", pages::TARGETS)
    },
    Case {
        rounds_most: 3,
        ..case(16, "edge to cloud", cloud::TARGETS)
    },
    case(17, "short transfers at a round trip of 100 ms", wan::SHORT),
];

impl Case {
    /// Runs one round of the case.
    ///
    /// # Errors
    /// The case cannot continue. Errors of single systems are recorded instead.
    pub(crate) async fn run(&self, bench: &mut BenchRun) -> Result<()> {
        match self.number {
            0 => bulk::relays(bench).await,
            1 => bulk::over_tcp(bench).await,
            2 => bulk::over_quic(bench).await,
            3 => bulk::many_streams(bench).await,
            4 => requests::keep_alive(bench).await,
            5 => requests::fresh(bench).await,
            6 => latency::open(bench).await,
            7 => requests::scrapes(bench).await,
            8 => stalled::run(bench).await,
            9 => memory::run(bench).await,
            10 => restart::run(bench).await,
            11 => wan::run(bench, 0.0).await,
            12 => wan::run(bench, 0.01).await,
            13 => servers::memory(bench).await,
            14 => servers::herd(bench).await,
            15 => pages::run(bench).await,
            16 => cloud::run(bench).await,
            17 => wan::short(bench).await,
            other => anyhow::bail!("no case {other}"),
        }
    }
}
