//! Processes whose wall clock is wrong, by a library that is loaded before the C library. Their
//! monotonic clock is right.

use std::fs;
use std::path::{Path, PathBuf};

use super::{AgentSetup, ServerSetup};
use crate::tools::{Skip, Tool};

/// The library. It is compiled for one test.
#[derive(Debug)]
pub struct ShiftedClock(PathBuf);

impl ShiftedClock {
    /// Compiles the library into a directory.
    ///
    /// # Errors
    /// Returns [`Skip`] without a C compiler, or if it fails.
    pub fn build(folder: &Path) -> Result<Self, Skip> {
        let (source, library) = (folder.join("shift.c"), folder.join("shift.so"));
        let failed = |error: std::io::Error| Skip::because(format!("cannot compile: {error}"));
        fs::write(&source, SOURCE).map_err(failed)?;
        let mut compiler = Tool::Cc.command()?;
        let compiler = compiler.args(["-shared", "-fPIC", "-O1", "-o"]);
        let compiled = compiler.arg(&library).arg(&source).output();
        let compiled = compiled.map_err(failed)?;
        if !compiled.status.success() {
            let errors = String::from_utf8_lossy(&compiled.stderr).into_owned();
            return Err(Skip::because(format!("cannot compile: {errors}")));
        }
        Ok(Self(library))
    }

    /// Returns the setup of a server whose clock is ahead by this many seconds.
    pub fn server(&self, setup: ServerSetup, ahead: i64) -> ServerSetup {
        setup
            .env("LD_PRELOAD", &self.0.to_string_lossy())
            .env(SECONDS, &ahead.to_string())
    }

    /// Returns the setup of an agent whose clock is ahead by this many seconds.
    pub fn agent(&self, setup: AgentSetup, ahead: i64) -> AgentSetup {
        setup
            .env("LD_PRELOAD", &self.0.to_string_lossy())
            .env(SECONDS, &ahead.to_string())
    }
}

const SECONDS: &str = "SHIFTED_CLOCK_SECONDS";
const SOURCE: &str = r#"
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *now) {
  long failed = syscall(SYS_clock_gettime, clock, now);
  const char *seconds = getenv("SHIFTED_CLOCK_SECONDS");
  if (failed == 0 && clock == CLOCK_REALTIME && seconds) now->tv_sec += atoll(seconds);
  return (int)failed;
}
"#;
