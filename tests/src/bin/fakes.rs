//! Fake servers that scenarios and the demo run inside namespaces.

use std::io::{self, Write};
use std::process::ExitCode;

#[tokio::main]
async fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match tunnel_tests::fakes::run(&arguments).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Errors are lost if standard error is closed.
            let _ = writeln!(io::stderr(), "fakes: {error:#}");
            ExitCode::FAILURE
        }
    }
}
