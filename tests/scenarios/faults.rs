//! The fault matrix with short timers, on each transport of a row, with three seeds. `make faults`
//! runs the same cases with the timers of the contract.

mod fallback;
mod partition;

use tokio_util::sync::CancellationToken;
use tunnel_tests::faults::{CASES, Clocks, Plan, Table, run};

/// Number of parallel runs, each of one case and seed. Most of them wait, but the machine also runs
/// other tests.
const JOBS: usize = 8;

/// Runs all cases of a row.
async fn row(id: &str) {
    let clocks = Clocks::Short;
    let cases = CASES.iter().filter(|case| case.id == id);
    let plan = Plan {
        cases: cases.filter(|case| case.suits(clocks)).collect(),
        seeds: vec![1, 2, 3],
        clocks,
        jobs: JOBS,
    };
    let done = run(&plan, &CancellationToken::new(), |_| {}).await;
    assert!(
        plan.runs() > 0 && done.len() == plan.runs(),
        "runs are missing"
    );
    let table = Table::new(&plan, &done);
    let misses = table.misses().join("\n");
    assert!(misses.is_empty(), "{misses}\n\n{}", table.text());
}

#[tokio::test(flavor = "multi_thread")]
async fn f13_path_that_takes_small_datagrams_only_still_carries_half() {
    row("F13").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f14_bytes_are_right_whatever_the_path_does_to_packets() {
    row("F14").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f15_another_port_of_a_nat_is_a_short_stall() {
    row("F15").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f16_another_address_of_the_agent_is_followed() {
    row("F16").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f32_flapping_link_leaves_nothing_behind() {
    row("F32").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f35_process_that_stands_still_is_suspect_and_goes_on_without_a_double_delivery() {
    row("F35").await;
}
