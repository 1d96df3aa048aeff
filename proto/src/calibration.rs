//! The speed of this machine, by which bounds of tests are scaled.

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Converts `patience` for the reference machine to this machine.
pub fn scaled(patience: Duration) -> Duration {
    patience.mul_f64(calibration())
}

/// Returns how much slower this machine is than the reference machine: 1 to 10.
///
/// The factor is measured at the first call, in some 20 ms of one core, and printed to stderr. The
/// environment variable `CULVERT_TEST_PATIENCE` (a positive number) replaces the measurement.
pub fn calibration() -> f64 {
    match FACTOR.load(Ordering::Relaxed) {
        0 => recalibrate(),
        bits => f64::from_bits(bits),
    }
}

/// Measures again, and returns the largest factor that was measured in this process.
pub fn recalibrate() -> f64 {
    let wish = std::env::var(TIMEOUT_SCALE_VARIABLE).ok();
    let (factor, origin) = match wish.as_deref().and_then(parse_factor) {
        Some(factor) => (factor, TIMEOUT_SCALE_VARIABLE),
        None => (factor_for(measure()), "measured"),
    };
    // Positive numbers have the order of their bits.
    let before = FACTOR.fetch_max(factor.to_bits(), Ordering::Relaxed);
    if factor.to_bits() > before {
        announce(factor, origin);
    }
    factor.max(f64::from_bits(before))
}

/// Returns the processor time of this thread so far, which other processes do not change.
///
/// # Panics
/// Panics on a kernel without it.
#[expect(clippy::expect_used, reason = "a bound of no time would hold always")]
pub fn processor_time() -> Duration {
    let times = std::fs::read_to_string("/proc/thread-self/schedstat").expect("proc(5)");
    let nanoseconds = times.split(' ').next().and_then(|time| time.parse().ok());
    Duration::from_nanos(nanoseconds.expect("a number of nanoseconds"))
}

fn parse_factor(text: &str) -> Option<f64> {
    let factor = text.trim().parse::<f64>().ok()?;
    (factor > 0.0 && factor <= LARGEST_WISH).then_some(factor)
}

fn factor_for(measured: Duration) -> f64 {
    (measured.as_secs_f64() / REFERENCE.as_secs_f64()).clamp(1.0, 10.0)
}

/// Measures the wall-clock time of the loop, so that a busy machine counts as a slow one.
fn measure() -> Duration {
    let start = Instant::now();
    let mut state = 1_u64;
    for round in 0..ROUNDS {
        state = black_box(state.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29) ^ round);
    }
    black_box(state);
    start.elapsed()
}

#[expect(
    clippy::print_stderr,
    reason = "a test run prints its factor once, since it explains its durations"
)]
fn announce(factor: f64, origin: &str) {
    // Cargo sets the variable for tests. The demo also waits, but does not print the factor.
    if std::env::var_os("CARGO_MANIFEST_DIR").is_none() {
        return;
    }
    eprintln!("test patience factor {factor:.2} ({origin})");
}

const TIMEOUT_SCALE_VARIABLE: &str = "CULVERT_TEST_PATIENCE";

/// A larger value is a mistake. The bound also prevents overflow in duration arithmetic.
const LARGEST_WISH: f64 = 1000.0;

/// Long enough for a good measurement on a fast machine, and short enough for the start of every
/// test process.
const ROUNDS: u64 = if cfg!(debug_assertions) {
    2_000_000
} else {
    13_000_000
};

/// Somewhat more than the loop takes on an idle server core of about 3 GHz (20 to 27 ms, with or
/// without optimization), so that only a machine that is really slower counts as slower.
const REFERENCE: Duration = Duration::from_millis(30);

/// The bits of the factor, zero before the first measurement.
static FACTOR: AtomicU64 = AtomicU64::new(0);
