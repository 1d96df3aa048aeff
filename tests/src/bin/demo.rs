//! `make demo`: two edges with the same address behind NAT, reached by their names.

use std::io::Write;
use std::process::ExitCode;

#[tokio::main]
async fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match tunnel_tests::demo::run(&arguments).await {
        Ok(code) => code,
        Err(error) => {
            // Errors are lost if standard error is closed.
            let _ = writeln!(std::io::stderr(), "demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}
