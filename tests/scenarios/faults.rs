//! The fault matrix with short timers, on each transport of a row, with three seeds. `make faults`
//! runs the same cases with the timers of the contract.

mod fallback;
mod loss;
mod partition;
mod path;
mod size;

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
async fn f32_flapping_link_leaves_nothing_behind() {
    row("F32").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f35_process_that_stands_still_is_suspect_and_goes_on_without_a_double_delivery() {
    row("F35").await;
}
