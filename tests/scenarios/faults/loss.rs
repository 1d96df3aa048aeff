//! F14: packets are lost, reordered, duplicated or corrupted.

use std::time::Duration;

use anyhow::{Result, ensure};
use tunnel_tests::eventually::scaled;
use tunnel_tests::faults::{Clocks, Load, Loads, Run, Runs, Site, TransportMode, plain};
use tunnel_tests::link::{Impairment, TrafficClass};

#[tokio::test(flavor = "multi_thread")]
async fn f14_bytes_are_right_whatever_the_path_does_to_packets() -> Result<()> {
    let mut runs = Runs::throughput(Clocks::of_gear())?;
    for (transport_mode, case, spoil) in [
        (TransportMode::Quic, "1 % lost", Spoil::Lose(0.01)),
        (TransportMode::Quic, "5 % lost", Spoil::Lose(COMPARED)),
        (TransportMode::Quic, "20 % lost", Spoil::Lose(0.2)),
        (
            TransportMode::Quic,
            "20 % lost, suddenly",
            Spoil::LoseSuddenly(0.2),
        ),
        (TransportMode::Quic, "25 % out of order", Spoil::Reorder),
        (TransportMode::Quic, "10 % twice", Spoil::Duplicate),
        (TransportMode::Quic, "1 % corrupt", Spoil::Corrupt),
        (TransportMode::H2, "1 % lost", Spoil::Lose(0.01)),
        (TransportMode::H2, "5 % lost", Spoil::Lose(COMPARED)),
        (TransportMode::H2, "20 % lost", Spoil::Lose(0.2)),
    ] {
        runs.start(transport_mode, case, |run| spoilt(run, spoil));
    }
    runs.start(
        TransportMode::Quic,
        "5 % lost, compared",
        compared_with_plain_quinn,
    );
    runs.finish().await
}

/// The effect of the path on packets.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Spoil {
    /// Loses this share in each direction.
    Lose(f64),
    /// Loses this share, starting during a session that began on a clean path.
    LoseSuddenly(f64),
    /// Delays a quarter of the packets.
    Reorder,
    /// Sends a tenth of the packets twice.
    Duplicate,
    /// Flips a bit in a hundredth of the packets.
    Corrupt,
}

/// Runs transfers of equal size in both directions at once.
async fn spoilt(run: Run, spoil: Spoil) -> Result<()> {
    let amount = run.clocks.pick(AMOUNT_FULL, AMOUNT_SHORT);
    let path = spoil.path();
    let begins_with = match spoil {
        Spoil::LoseSuddenly(_) => path.clone().with_loss(0.0),
        Spoil::Lose(_) | Spoil::Reorder | Spoil::Duplicate | Spoil::Corrupt => path.clone(),
    };
    let site = Site::up_over(run, begins_with).await?;
    site.link.set(TrafficClass::ALL, path.clone());
    let before = site.ids();
    let pipe = site
        .node_client
        .pipe(Loads::both(Load::Exactly(amount)))
        .await?;
    let ends = pipe.finish(scaled(FINISH)).await;
    run.equal_or_reset("bytes equal, or the cut reported", &ends)?;
    let after = site.ids();
    ensure!(before == after, "sessions {before:?}, then {after:?}");
    site.node_client.requester.served().await?;
    site.node_client.ensure_equal(run)?;
    drop(site);
    let [to_edge, to_cloud] = &ends;
    ensure!(
        to_edge.hashed() == amount && to_cloud.hashed() == amount,
        "the transfer is not complete: {to_edge}; {to_cloud}"
    );
    let took = ends.map(|end| end.took);
    run.observed("transfer took", Ok(took[0].max(took[1])));
    Ok(())
}

/// Compares the goodput with that of plain quinn: pairs of transfers that run at the same time, so
/// that the load of the machine slows both, and the median, because one pair's share of lost
/// packets decides its result.
async fn compared_with_plain_quinn(run: Run) -> Result<()> {
    let amount = run.clocks.pick(AMOUNT_FULL, AMOUNT_SHORT);
    let path = Spoil::Lose(COMPARED).path();
    let mut shares = Vec::new();
    for pair in 0..PAIRS {
        let site = Site::up_over(run, path.clone()).await?;
        let pipe = site
            .node_client
            .pipe(Loads::both(Load::Exactly(amount)))
            .await?;
        let seed = run.seed.wrapping_add(pair);
        let (ours, plain) = tokio::join!(
            pipe.finish(scaled(FINISH)),
            plain::transfer(path.clone(), seed, amount, scaled(FINISH)),
        );
        let plain = plain?;
        run.equal("bytes equal", &ours)?;
        run.equal("plain quinn's bytes equal", &plain)?;
        let [ours, plain] = [ours, plain].map(|ends| ends.map(|end| end.took.as_secs_f64()));
        shares.extend([plain[0] / ours[0], plain[1] / ours[1]]);
    }
    shares.sort_by(f64::total_cmp);
    let median = shares[shares.len() / 2];
    run.report(format_args!(
        "goodput, of plain quinn's: {median:.2} (bound {LEAST}), all: {shares:.2?}"
    ));
    ensure!(median >= LEAST, "goodput is {median:.2} of plain quinn's");
    Ok(())
}

impl Spoil {
    fn path(self) -> Impairment {
        let path = Impairment::limited(RATE).with_delay(DELAY);
        match self {
            Self::Lose(share) | Self::LoseSuddenly(share) => path.with_loss(share),
            Self::Reorder => path.with_reorder(0.25, OVERTAKEN_BY),
            Self::Duplicate => path.with_duplicate(0.1),
            Self::Corrupt => path.with_corrupt(0.01),
        }
    }
}

/// Loss at which the goodput is compared with that of plain quinn.
const COMPARED: f64 = 0.05;
/// Minimum share of plain quinn's goodput.
const LEAST: f64 = 0.6;
const PAIRS: u64 = 5;
/// Slow enough that the machine does not affect the result.
const RATE: u64 = 4_000_000;
const DELAY: Duration = Duration::from_millis(10);
/// Longer than the gap between packets of a busy sender, shorter than the timeout of its loss
/// detection.
const OVERTAKEN_BY: Duration = Duration::from_millis(10);
const AMOUNT_FULL: u64 = 16 << 20;
const AMOUNT_SHORT: u64 = 2 << 20;
/// Enough for a hundredth of the rate.
const FINISH: Duration = Duration::from_secs(120);
