//! Writes the generated pages of the reference (`docs/reference/*.md`) from the code, or with
//! `--check` exits with 1 if one is stale.

use std::path::Path;
use std::process::ExitCode;

use tunnel_tests::reference::{PAGES, render};

fn main() -> anyhow::Result<ExitCode> {
    let check = std::env::args().any(|argument| argument == "--check");
    let mut stale = false;
    for page in PAGES {
        let text = render(page);
        let path = Path::new(page.path);
        if check {
            stale |= std::fs::read_to_string(path).ok().as_ref() != Some(&text);
        } else {
            std::fs::create_dir_all(path.parent().unwrap_or(path))?;
            std::fs::write(path, text)?;
        }
    }
    Ok(if stale {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}
