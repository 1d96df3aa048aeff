//! Case 6: latency at a request rate far below the capacity of all systems.

use anyhow::Result;
use tunnel_tests::stats::percentile;

use crate::bench::{BenchRun, micros, micros_each};
use crate::load;
use crate::machine::context_switches;
use crate::metric::{FAILED, KEPT_CPU, KEPT_P50, KEPT_P99, KEPT_SWITCHES, NEW_P50, NEW_P99};
use crate::systems::{
    DIRECT, DIRECT_TLS, FLOOR, H2, H2_HOP, H2_HTTP, QUIC, QUIC_HOP, QUIC_HTTP, RATHOLE, RELAY_H2,
    RELAY_QUIC,
};
use crate::target::Bound::AtMost;
use crate::target::Of::{Above, Itself, Ratio};
use crate::target::Target;

pub(super) const TARGETS: &[Target] = &[
    Target::new(H2, &KEPT_P50, Above(DIRECT), AtMost(230.0)),
    Target::new(H2, &KEPT_CPU, Ratio(RELAY_H2), AtMost(1.3)),
    Target::new(H2, &NEW_P50, Above(DIRECT), AtMost(425.0)),
    Target::new(QUIC, &KEPT_P50, Above(DIRECT), AtMost(230.0)),
    Target::new(QUIC, &KEPT_CPU, Ratio(RELAY_QUIC), AtMost(1.3)),
    Target::new(QUIC, &NEW_P50, Above(DIRECT), AtMost(425.0)),
    Target::new(H2_HOP, &KEPT_P50, Above(H2), AtMost(150.0)),
    Target::new(QUIC_HOP, &KEPT_P50, Above(QUIC), AtMost(150.0)),
    Target::new(H2_HTTP, &KEPT_P50, Ratio(H2), AtMost(1.15)),
    Target::new(H2_HTTP, &KEPT_CPU, Ratio(H2), AtMost(1.3)),
    Target::new(H2_HTTP, &KEPT_SWITCHES, Itself, AtMost(3.1)),
    Target::new(QUIC_HTTP, &KEPT_P50, Ratio(QUIC), AtMost(1.15)),
    Target::new(QUIC_HTTP, &KEPT_CPU, Ratio(QUIC), AtMost(1.3)),
    Target::new(QUIC_HTTP, &KEPT_SWITCHES, Itself, AtMost(3.1)),
];

const RATE: u32 = 200;

pub(super) async fn open(bench: &mut BenchRun) -> Result<()> {
    for system in bench.rotated_systems(&[
        DIRECT, DIRECT_TLS, FLOOR, RELAY_H2, RELAY_QUIC, H2, QUIC, H2_HOP, QUIC_HOP, H2_HTTP,
        QUIC_HTTP, RATHOLE,
    ]) {
        for keep in [true, false] {
            let length = bench.length(1.5);
            let asking = load::open(&system.plain, RATE, length, keep);
            let earlier_switches = system.server.map(context_switches);
            let (asked, usage) = bench.watch(&[], asking).await?;
            let switches = system.server.map(context_switches);
            let (half, slow) = if keep {
                (&KEPT_P50, &KEPT_P99)
            } else {
                (&NEW_P50, &NEW_P99)
            };
            bench.record(
                system.name,
                half,
                micros(percentile(&asked.times, 0.5)),
                usage.foreign,
            );
            bench.record(
                system.name,
                slow,
                micros(percentile(&asked.times, 0.99)),
                usage.foreign,
            );
            if keep && let Some((before, after)) = earlier_switches.zip(switches) {
                let count = asked.times.len();
                let each = micros_each(&usage, &system, count);
                bench.record(system.name, &KEPT_CPU, each, usage.foreign);
                #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
                let each = (after - before) / count.max(1) as f64;
                bench.record(system.name, &KEPT_SWITCHES, each, usage.foreign);
            }
            #[expect(clippy::cast_precision_loss, reason = "a count for people")]
            bench.record(system.name, &FAILED, asked.failed as f64, usage.foreign);
        }
    }
    Ok(())
}
