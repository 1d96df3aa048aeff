//! Cases 4, 5 and 7: requests per second in closed loops, and CPU time per request.

use anyhow::Result;
use tunnel_tests::stats::percentile;

use crate::bench::{BenchRun, micros, micros_each};
use crate::load::{self, LoadResult, SMALL};
use crate::machine::CpuUsage;
use crate::metric::{
    CONNECTION_CPU, CONNECTIONS, FAILED, GZIP_SCRAPE_CPU, GZIP_SCRAPE_P99, GZIP_SCRAPES, Metric,
    PLAIN_SCRAPE_CPU, PLAIN_SCRAPE_P99, PLAIN_SCRAPES, REQUEST_CPU, REQUEST_P50, REQUEST_P99,
    REQUESTS, TLS_CONNECTION_CPU, TLS_CONNECTIONS,
};
use crate::systems::{
    DIRECT, DIRECT_TLS, FLOOR, H2, H2_CONNECT, H2_HOP, H2_HTTP, H2_HTTPS, NGINX, QUIC, QUIC_HOP,
    QUIC_HTTP, RATHOLE, RELAY_H2, RELAY_QUIC, System,
};
use crate::target::Bound::{AtLeast, AtMost};
use crate::target::Of::Ratio;
use crate::target::Target;

pub(super) const KEEP_ALIVE: &[Target] = &[
    Target::new(H2, &REQUEST_CPU, Ratio(FLOOR), AtMost(1.3)),
    Target::new(QUIC, &REQUEST_CPU, Ratio(FLOOR), AtMost(1.4)),
    Target::new(H2_HTTP, &REQUESTS, Ratio(H2), AtLeast(0.7)),
    Target::new(H2_HTTP, &REQUESTS, Ratio(NGINX), AtLeast(1.0)),
    Target::new(QUIC_HTTP, &REQUESTS, Ratio(QUIC), AtLeast(0.7)),
    Target::new(H2_HOP, &REQUESTS, Ratio(H2), AtLeast(0.65)),
    Target::new(QUIC_HOP, &REQUESTS, Ratio(QUIC), AtLeast(0.65)),
];

pub(super) const FRESH: &[Target] = &[
    Target::new(H2, &CONNECTIONS, Ratio(DIRECT), AtLeast(0.33)),
    Target::new(H2, &TLS_CONNECTIONS, Ratio(DIRECT), AtLeast(0.65)),
    Target::new(QUIC, &CONNECTIONS, Ratio(DIRECT), AtLeast(0.33)),
    Target::new(QUIC, &TLS_CONNECTIONS, Ratio(DIRECT), AtLeast(0.65)),
    Target::new(H2_HTTPS, &CONNECTIONS, Ratio(DIRECT_TLS), AtLeast(0.5)),
    Target::new(H2_HOP, &CONNECTIONS, Ratio(H2), AtLeast(0.65)),
    Target::new(QUIC_HOP, &CONNECTIONS, Ratio(QUIC), AtLeast(0.65)),
];

pub(super) const SCRAPES: &[Target] = &[
    Target::new(H2, &PLAIN_SCRAPES, Ratio(DIRECT), AtLeast(0.28)),
    Target::new(H2, &PLAIN_SCRAPE_P99, Ratio(FLOOR), AtMost(1.3)),
    Target::new(H2, &GZIP_SCRAPES, Ratio(DIRECT), AtLeast(0.28)),
    Target::new(H2, &GZIP_SCRAPE_P99, Ratio(FLOOR), AtMost(1.3)),
    Target::new(QUIC, &PLAIN_SCRAPE_P99, Ratio(FLOOR), AtMost(1.6)),
    Target::new(QUIC, &GZIP_SCRAPES, Ratio(DIRECT), AtLeast(0.28)),
    Target::new(QUIC, &GZIP_SCRAPE_P99, Ratio(FLOOR), AtMost(1.6)),
];

const CALLERS: usize = 64;
const CONNECTING: usize = 16;
const PAGE: u64 = 1 << 20;
/// Size of a metrics page of 1 MiB after compression with gzip.
const PAGE_GZIPPED: u64 = 143_000;

pub(super) async fn keep_alive(bench: &mut BenchRun) -> Result<()> {
    for system in bench.rotated_systems(&[
        DIRECT, DIRECT_TLS, FLOOR, RELAY_H2, RELAY_QUIC, H2, QUIC, H2_HOP, QUIC_HOP, H2_HTTP,
        QUIC_HTTP, H2_HTTPS, H2_CONNECT, NGINX, RATHOLE,
    ]) {
        let length = bench.length(1.5);
        let asking = async { Ok(load::closed(&system.plain, CALLERS, SMALL, length).await) };
        let (asked, usage) = bench.watch(&[], asking).await?;
        note(bench, &system, &asked, &usage, (&REQUESTS, &REQUEST_CPU));
        bench.record(
            system.name,
            &REQUEST_P50,
            micros(percentile(&asked.times, 0.5)),
            usage.foreign,
        );
        bench.record(
            system.name,
            &REQUEST_P99,
            micros(percentile(&asked.times, 0.99)),
            usage.foreign,
        );
    }
    Ok(())
}

pub(super) async fn fresh(bench: &mut BenchRun) -> Result<()> {
    for system in bench.rotated_systems(&[
        DIRECT, DIRECT_TLS, FLOOR, H2, QUIC, H2_HOP, QUIC_HOP, H2_HTTPS, H2_CONNECT, RATHOLE,
    ]) {
        let length = bench.length(1.2);
        let endpoints = [
            (Some(&system.plain), &CONNECTIONS, &CONNECTION_CPU),
            (
                system.secure.as_ref(),
                &TLS_CONNECTIONS,
                &TLS_CONNECTION_CPU,
            ),
        ];
        for (endpoint, rate, cpu) in endpoints {
            let Some(endpoint) = endpoint else { continue };
            let asking = async { Ok(load::churn(endpoint, CONNECTING, SMALL, length).await) };
            let (asked, usage) = bench.watch(&[], asking).await?;
            note(bench, &system, &asked, &usage, (rate, cpu));
        }
    }
    Ok(())
}

pub(super) async fn scrapes(bench: &mut BenchRun) -> Result<()> {
    for system in bench.rotated_systems(&[
        DIRECT, DIRECT_TLS, FLOOR, H2, QUIC, H2_HTTP, QUIC_HTTP, RATHOLE,
    ]) {
        let length = bench.length(0.8);
        let pages = [
            (PAGE, &PLAIN_SCRAPES, &PLAIN_SCRAPE_CPU, &PLAIN_SCRAPE_P99),
            (
                PAGE_GZIPPED,
                &GZIP_SCRAPES,
                &GZIP_SCRAPE_CPU,
                &GZIP_SCRAPE_P99,
            ),
        ];
        for (size, rate, cpu, slow) in pages {
            let asking = async { Ok(load::closed(&system.plain, 1, size, length).await) };
            let (asked, usage) = bench.watch(&[], asking).await?;
            note(bench, &system, &asked, &usage, (rate, cpu));
            bench.record(
                system.name,
                slow,
                micros(percentile(&asked.times, 0.99)),
                usage.foreign,
            );
        }
    }
    Ok(())
}

fn note(
    bench: &mut BenchRun,
    system: &System,
    asked: &LoadResult,
    usage: &CpuUsage,
    (rate, cpu): (&'static Metric, &'static Metric),
) {
    bench.record(system.name, rate, asked.rate(), usage.foreign);
    #[expect(clippy::cast_precision_loss, reason = "a count for people")]
    bench.record(system.name, &FAILED, asked.failed as f64, usage.foreign);
    let each = micros_each(usage, system, asked.times.len());
    // The CPU time is zero for a direct connection, which has no processes.
    if each > 0.0 {
        bench.record(system.name, cpu, each, usage.foreign);
    }
}
