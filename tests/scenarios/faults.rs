//! The fault matrix: the tunnel's behavior on a bad network, measured against fixed bounds.
//!
//! Each test is one row, on each transport of the row, with short timers and one seed. In the full
//! gear (`make faults`, `make test-all`) the same tests have three seeds and the default timers of
//! both binaries, for which the bounds are defined. Rows that name several servers run three of them.

mod balanced;
mod drained;
mod fallback;
mod flapping;
mod herd;
mod killed;
mod loss;
mod minimum;
mod partition;
mod path;
mod size;
mod slow;
mod soak;
mod stopped;
mod watches;
