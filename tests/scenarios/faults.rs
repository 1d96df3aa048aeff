//! The fault matrix: the tunnel's behavior on a bad network, measured against fixed bounds.
//!
//! Each test is one row, on each transport of the row, with short timers and one seed.
//! `make faults` runs the same tests with three seeds and with the default timers of both binaries,
//! for which the bounds are defined.

mod fallback;
mod flapping;
mod loss;
mod partition;
mod path;
mod size;
mod stopped;
