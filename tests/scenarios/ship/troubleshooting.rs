//! Every code that users may see has a row in `docs/reference/codes.md`, and every row describes an
//! existing code.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use tunnel_proto::wire::code::{CloseCode, EnrollCode, RefusalCode, ResetCode};
use tunnel_server::outcome::Outcome;
use tunnel_tests::guides::page;

/// Range that contains all codes. A number without a code has the label `unknown`.
const NUMBERS: std::ops::Range<u32> = 0..256;

fn labels(label: impl Fn(u32) -> &'static str) -> BTreeSet<String> {
    let known = NUMBERS.map(label).filter(|label| *label != "unknown");
    known.map(str::to_owned).collect()
}

/// Returns the codes in the first column of the table below a heading.
fn rows(page: &str, heading: &str) -> Result<BTreeSet<String>> {
    let (_, below) = page
        .split_once(&format!("\n## {heading}\n"))
        .with_context(|| format!("no heading {heading:?}"))?;
    let section = below.split("\n## ").next().unwrap_or_default();
    let cells = section.lines().filter_map(|line| line.strip_prefix("| `"));
    let codes = cells.filter_map(|cell| cell.split_once('`'));
    Ok(codes.map(|(code, _)| code.to_owned()).collect())
}

#[test]
fn every_code_has_a_row_and_every_row_a_code() -> Result<()> {
    let page = page("docs/reference/codes.md")?;
    let answers = Outcome::ALL
        .iter()
        .filter(|outcome| **outcome != Outcome::Ok);
    let answers = answers.map(|outcome| outcome.label().to_owned()).collect();
    for (heading, codes) in [
        ("Responses of the listeners", answers),
        (
            "Streams that an agent refuses",
            labels(|number| RefusalCode::from_number(number).label()),
        ),
        (
            "Streams that are cut",
            labels(|number| ResetCode::from_number(number).label()),
        ),
        (
            "Sessions that are closed",
            labels(|number| CloseCode::from_number(number).label()),
        ),
        (
            "Refused enrollments and renewals",
            labels(|number| EnrollCode::from_number(number).label()),
        ),
    ] {
        let found = rows(&page, heading)?;
        ensure!(found == codes, "{heading}: {found:?} instead of {codes:?}");
    }
    Ok(())
}

#[test]
fn answers_are_listed_with_their_status() -> Result<()> {
    let page = page("docs/reference/codes.md")?;
    for outcome in Outcome::ALL {
        let status = match outcome {
            Outcome::Ok => continue,
            Outcome::Cut | Outcome::CallerGone => "none".to_owned(),
            other => other.status().as_u16().to_string(),
        };
        let row = format!("| `{}` | {status} |", outcome.label());
        ensure!(page.contains(&row), "no {row}");
    }
    Ok(())
}
