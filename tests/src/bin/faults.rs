//! `make faults`: runs the fault matrix with the default timers of both binaries.

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use tunnel_tests::faults::command::{Arguments, main as faults};

#[tokio::main]
async fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(told) => {
            // Errors are lost if the terminal is closed.
            let _ = told.print();
            return if told.use_stderr() {
                ExitCode::from(64)
            } else {
                ExitCode::SUCCESS
            };
        }
    };
    match faults(arguments).await {
        Ok(code) => code,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "faults: {error:#}");
            ExitCode::FAILURE
        }
    }
}
