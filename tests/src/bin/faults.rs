//! `make faults`: the fault matrix with the clocks of the contract.

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use tunnel_tests::faults::command::{Arguments, main as faults};

#[tokio::main]
async fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(told) => {
            // Without a terminal there is nobody to tell.
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
