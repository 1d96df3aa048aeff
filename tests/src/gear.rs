//! How thorough a run of the tests is.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gear {
    /// Minutes for all tests: `make check` and `make test`.
    Quick,
    /// Hours, with the timers of both binaries: `make test-all`.
    Full,
}

impl Gear {
    /// Returns the gear that the environment variable `CULVERT_TEST_GEAR` selects, `quick` by
    /// default.
    ///
    /// # Panics
    /// Panics if the variable is neither `quick` nor `full`.
    #[expect(
        clippy::panic,
        reason = "a mistyped variable must not pass for a full run"
    )]
    pub fn current() -> Self {
        match std::env::var(VARIABLE).as_deref() {
            Ok("full") => Self::Full,
            Ok("quick") | Err(_) => Self::Quick,
            Ok(other) => panic!("{VARIABLE}={other}: expected quick or full"),
        }
    }

    /// Returns one of two values.
    pub fn pick<T>(self, quick: T, full: T) -> T {
        match self {
            Self::Quick => quick,
            Self::Full => full,
        }
    }
}

/// Returns how often a test repeats an event that must lose nothing at any moment.
pub fn rounds() -> usize {
    Gear::current().pick(10, 100)
}

const VARIABLE: &str = "CULVERT_TEST_GEAR";
