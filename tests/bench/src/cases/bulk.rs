//! Cases 1 to 3: bytes per second, and CPU time per GiB.

use std::time::Duration;

use anyhow::Result;

use crate::bench::{BenchRun, GIB};
use crate::load;
use crate::machine::CpuUsage;
use crate::metric::{
    DOWN, DOWN_CPU, DOWN_CPU_AGENT, DOWN_CPU_SERVER, MANY, MANY_CPU, MANY_CPU_OF_ONE, MANY_SLOWEST,
    Metric, UP, UP_CPU,
};
use crate::systems::{
    DIRECT, DIRECT_TLS, FLOOR, H2, H2_HOP, H2_HTTP, QUIC, QUIC_HOP, QUIC_HTTP, RATHOLE, RELAY_H2,
    RELAY_QUIC, System,
};
use crate::target::Bound::{AtLeast, AtMost};
use crate::target::Of::{Above, Itself, Ratio};
use crate::target::Target;

pub(super) const OVER_TCP: &[Target] = &[
    Target::new(H2, &DOWN_CPU, Ratio(FLOOR), AtMost(1.9)),
    Target::new(H2, &UP, Ratio(DIRECT), AtLeast(0.23)),
    Target::new(H2_HTTP, &DOWN, Ratio(H2), AtLeast(0.85)),
    Target::new(H2_HOP, &DOWN, Ratio(H2), AtLeast(0.6)),
    Target::new(H2_HOP, &DOWN_CPU, Above(H2), AtMost(1.7)),
    Target::new(H2_HOP, &UP, Ratio(H2), AtLeast(0.6)),
    Target::new(H2_HOP, &UP_CPU, Above(H2), AtMost(1.7)),
];

pub(super) const OVER_QUIC: &[Target] = &[
    Target::new(QUIC, &DOWN_CPU, Ratio(FLOOR), AtMost(2.9)),
    Target::new(QUIC, &UP, Ratio(DIRECT), AtLeast(0.15)),
    Target::new(QUIC_HTTP, &DOWN, Ratio(QUIC), AtLeast(0.85)),
    Target::new(QUIC_HOP, &DOWN, Ratio(QUIC), AtLeast(0.6)),
    Target::new(QUIC_HOP, &DOWN_CPU, Above(QUIC), AtMost(1.7)),
    Target::new(QUIC_HOP, &UP, Ratio(QUIC), AtLeast(0.6)),
    Target::new(QUIC_HOP, &UP_CPU, Above(QUIC), AtMost(1.7)),
];

pub(super) const MANY_STREAMS: &[Target] = &[
    Target::new(H2, &MANY_CPU_OF_ONE, Itself, AtMost(1.2)),
    Target::new(H2, &MANY_SLOWEST, Itself, AtLeast(0.7)),
    Target::new(QUIC, &MANY_SLOWEST, Itself, AtLeast(0.7)),
];

const MIB: u64 = 1 << 20;
const STREAMS: usize = 64;

/// Returns how many bytes a measurement transfers. Systems without crypto are several times as
/// fast, so they need more bytes for a measurement of the same duration.
fn size(system: &str) -> u64 {
    match system {
        DIRECT => 1536 * MIB,
        FLOOR | DIRECT_TLS => 768 * MIB,
        _ => 512 * MIB,
    }
}

pub(super) async fn relays(bench: &mut BenchRun) -> Result<()> {
    one_stream(bench, &[DIRECT, FLOOR, RELAY_H2]).await
}

pub(super) async fn over_tcp(bench: &mut BenchRun) -> Result<()> {
    let names = [
        DIRECT, DIRECT_TLS, FLOOR, RELAY_H2, H2, H2_HOP, H2_HTTP, RATHOLE,
    ];
    one_stream(bench, &names).await
}

pub(super) async fn over_quic(bench: &mut BenchRun) -> Result<()> {
    let names = [DIRECT, FLOOR, RELAY_QUIC, QUIC, QUIC_HOP, QUIC_HTTP];
    one_stream(bench, &names).await
}

async fn one_stream(bench: &mut BenchRun, names: &[&str]) -> Result<()> {
    for system in bench.rotated_systems(names) {
        let bytes = bench.bytes(size(system.name));
        match bench.watch(&[], load::down(&system.plain, bytes)).await {
            Ok((took, usage)) => {
                rate(bench, system.name, &DOWN, bytes, took, &usage);
                cpu(
                    bench,
                    &system,
                    [&DOWN_CPU, &DOWN_CPU_SERVER, &DOWN_CPU_AGENT],
                    bytes,
                    &usage,
                );
            }
            Err(error) => bench.record_error(system.name, &error),
        }
        match bench.watch(&[], load::up(&system.plain, bytes)).await {
            Ok((took, usage)) => {
                rate(bench, system.name, &UP, bytes, took, &usage);
                cpu(bench, &system, [&UP_CPU], bytes, &usage);
            }
            Err(error) => bench.record_error(system.name, &error),
        }
    }
    Ok(())
}

pub(super) async fn many_streams(bench: &mut BenchRun) -> Result<()> {
    for system in bench.rotated_systems(&[DIRECT, DIRECT_TLS, FLOOR, H2, QUIC, RATHOLE]) {
        let each = bench.bytes(size(system.name)) / STREAMS as u64;
        let bytes = each * STREAMS as u64;
        match bench
            .watch(&[], load::many(&system.plain, STREAMS, each))
            .await
        {
            Ok((times, usage)) => {
                let wall = Duration::from_secs_f64(usage.wall);
                rate(bench, system.name, &MANY, bytes, wall, &usage);
                cpu(bench, &system, [&MANY_CPU], bytes, &usage);
                let figure = |metric| bench.last_figure(system.name, metric);
                if let (Some(many), Some(one)) = (figure(&MANY_CPU), figure(&DOWN_CPU)) {
                    bench.record(system.name, &MANY_CPU_OF_ONE, many / one, usage.foreign);
                }
                let rates: Vec<f64> = times.iter().map(|time| 1.0 / time.as_secs_f64()).collect();
                #[expect(clippy::cast_precision_loss, reason = "64")]
                let mean = rates.iter().sum::<f64>() / rates.len() as f64;
                let slowest = rates.iter().copied().fold(f64::INFINITY, f64::min);
                bench.record(system.name, &MANY_SLOWEST, slowest / mean, usage.foreign);
            }
            Err(error) => bench.record_error(system.name, &error),
        }
    }
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "a rate for people")]
fn rate(
    bench: &mut BenchRun,
    system: &str,
    metric: &'static Metric,
    bytes: u64,
    took: Duration,
    usage: &CpuUsage,
) {
    bench.record(
        system,
        metric,
        bytes as f64 / took.as_secs_f64() / 1e6,
        usage.foreign,
    );
}

/// Records CPU seconds per GiB: the first metric is the sum of servers and agent, the second the
/// servers alone, the third the agent alone.
#[expect(clippy::cast_precision_loss, reason = "a figure for people")]
fn cpu<const N: usize>(
    bench: &mut BenchRun,
    system: &System,
    metrics: [&'static Metric; N],
    bytes: u64,
    usage: &CpuUsage,
) {
    if system.server.is_none() {
        return;
    }
    let server = usage.cpu(system.server) + usage.cpu(system.hop);
    let agent = usage.cpu(system.agent);
    let each = |seconds: f64| seconds * GIB / bytes as f64;
    for (metric, seconds) in metrics.into_iter().zip([server + agent, server, agent]) {
        bench.record(system.name, metric, each(seconds), usage.foreign);
    }
}
