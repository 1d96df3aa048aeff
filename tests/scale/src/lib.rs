//! A simulation of an installation: many agents, several servers, virtual time. Nothing is dialed.
//!
//! The decisions are those of the product: the directory of the servers, the assignment of replicas
//! to agents, their backoff, their search and the spread of a drain, and the messages between
//! servers, which are encoded. A model replaces the network and the handshakes, see `model.rs`.
//! `bench scale` prints the reports.

use anyhow::{Result, ensure};
use tunnel_proto::wire::REPLICAS_MAX;

mod agent;
mod measures;
mod model;
mod server;
mod simulation;

pub use measures::ScaleReport;
pub use model::{ScaleCase, ScaleOptions};
use simulation::Simulation;

/// Runs one case. The report is the same for the same options.
///
/// # Errors
/// Returns an error if the options make no installation, or if a message cannot be encoded.
pub fn simulate(options: &ScaleOptions) -> Result<ScaleReport> {
    ensure!(options.nodes > 0, "no nodes");
    ensure!(
        (2..=REPLICAS_MAX).contains(&options.replicas),
        "replicas: expected 2 to {REPLICAS_MAX}"
    );
    ensure!(options.k > 0, "no sessions");
    ensure!(options.handshakes_per_second > 0, "no handshakes");
    let mut simulation = Simulation::new(options)?;
    simulation.start_agents();
    simulation.run()?;
    if !matches!(
        options.case,
        ScaleCase::ColdStart | ScaleCase::RandomPlacement
    ) {
        simulation.begin_case();
        simulation.run()?;
    }
    Ok(simulation.report())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use clap::ValueEnum as _;

    use super::*;

    fn options(case: ScaleCase) -> ScaleOptions {
        ScaleOptions {
            case,
            nodes: 1000,
            replicas: 5,
            k: 2,
            handshakes_per_second: 500,
            seed: 1,
        }
    }

    #[test]
    fn nodes_with_two_sessions_stay_reachable_when_a_replica_is_killed() {
        let report = simulate(&options(ScaleCase::ReplicaKilled)).unwrap();
        assert_eq!(report.unreachable_nodes, 0, "{report:?}");
        assert_eq!(report.api_writes, 0);
        assert_eq!(report.incomplete_nodes, 0, "{report:?}");
        let complete_after = report.complete_after.unwrap();
        assert!(complete_after <= Duration::from_secs(60), "{report:?}");
    }

    #[test]
    fn no_node_is_without_a_session_when_a_zone_is_lost() {
        for (k, replicas) in [(2, 3), (2, 9), (3, 9)] {
            let options = ScaleOptions {
                k,
                replicas,
                ..options(ScaleCase::ZoneLost)
            };
            let report = simulate(&options).unwrap();
            assert_eq!(report.lost_nodes, 0, "{report:?}");
            assert_eq!(report.incomplete_nodes, 0, "{report:?}");
            let complete_after = report.complete_after.unwrap();
            assert!(complete_after <= Duration::from_secs(60), "{report:?}");
        }
        let unknown = ScaleOptions {
            replicas: 9,
            ..options(ScaleCase::UnknownZoneLost)
        };
        let unknown = simulate(&unknown).unwrap();
        assert!(unknown.lost_nodes > 0, "{unknown:?}");
    }

    #[test]
    fn every_case_ends_with_all_nodes_reachable() {
        for case in ScaleCase::value_variants() {
            let report = simulate(&options(*case)).unwrap();
            assert!(report.reachable_after.is_some(), "{report:?}");
            assert!(report.sessions_min > 0, "{report:?}");
            assert!(report.bytes_peak > 0, "{report:?}");
        }
    }

    #[test]
    fn one_seed_gives_one_report() {
        let mut options = options(ScaleCase::ZoneLost);
        options.nodes = 100;
        let report = simulate(&options).unwrap();
        assert_eq!(simulate(&options).unwrap(), report);
    }
}
