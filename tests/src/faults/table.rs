//! The result as one table: a row for each measure of a case, with a column for each seed.

use std::fmt::Write as _;

use super::findings::{Measure, Verdict};
use super::runner::{FinishedRun, Plan};
use super::{CASES, Case};

/// All measures of the completed runs, in the order of the matrix.
#[derive(Debug)]
pub struct Table {
    head: Vec<String>,
    rows: Vec<Row>,
    misses: Vec<String>,
    hashed: u64,
    bounded: usize,
    stretched: usize,
    missed: usize,
}

#[derive(Debug)]
struct Row {
    cells: Vec<String>,
    begins_case: bool,
}

impl Table {
    /// Creates the table of the completed runs of a plan.
    #[must_use]
    pub fn new(plan: &Plan, done: &[FinishedRun]) -> Self {
        let head = ["id", "over", "fault", "measured", "bound", "here"];
        let seeds = plan.seeds.iter().map(|seed| format!("seed {seed}"));
        let mut table = Self {
            head: head.iter().map(ToString::to_string).chain(seeds).collect(),
            rows: Vec::new(),
            misses: Vec::new(),
            hashed: 0,
            bounded: 0,
            stretched: 0,
            missed: 0,
        };
        table
            .head
            .extend(["verdict".to_owned(), "hashed".to_owned()]);
        for case in CASES {
            let of_case = |done: &&FinishedRun| std::ptr::eq(done.case, case);
            let runs: Vec<Option<&FinishedRun>> = plan
                .seeds
                .iter()
                .map(|seed| done.iter().filter(of_case).find(|done| done.seed == *seed))
                .collect();
            if runs.iter().any(Option::is_some) {
                table.add(case, &runs);
            }
        }
        table
    }

    fn add(&mut self, case: &Case, runs: &[Option<&FinishedRun>]) {
        let mut hashed = 0;
        let mut names: Vec<&str> = Vec::new();
        let mut failures = Vec::new();
        for done in runs.iter().flatten() {
            match &done.findings {
                Ok(findings) => {
                    hashed += findings.hashed;
                    for measure in &findings.measures {
                        if !names.contains(&measure.what.as_str()) {
                            names.push(&measure.what);
                        }
                    }
                }
                Err(why) => failures.push((done.seed, why)),
            }
        }
        self.hashed += hashed;
        let mut first = Some(hashed);
        if !failures.is_empty() {
            let cells = runs.iter().map(|run| match run {
                Some(done) if done.findings.is_err() => "failed".to_owned(),
                Some(_) => "done".to_owned(),
                None => String::new(),
            });
            self.push(
                case,
                ["the run itself", "yes", ""],
                cells.collect(),
                Verdict::Miss,
                &mut first,
            );
            self.bounded += runs.iter().flatten().count();
            for (seed, why) in failures {
                self.missed += 1;
                self.misses
                    .push(format!("{} seed {seed}: not measured: {why}", title(case)));
            }
        }
        for name in names {
            let measures: Vec<Option<&Measure>> = runs
                .iter()
                .map(|run| {
                    let findings = run.as_ref()?.findings.as_ref().ok()?;
                    findings
                        .measures
                        .iter()
                        .find(|measure| measure.what == name)
                })
                .collect();
            self.add_measure(case, runs, &measures, &mut first);
        }
    }

    fn add_measure(
        &mut self,
        case: &Case,
        runs: &[Option<&FinishedRun>],
        measures: &[Option<&Measure>],
        first: &mut Option<u64>,
    ) {
        let Some(any) = measures.iter().flatten().next() else {
            return;
        };
        let cell = |measure: &Option<&Measure>| {
            measure.map_or_else(String::new, |measure| measure.value.to_string())
        };
        let cells = measures.iter().map(cell).collect();
        let verdicts = measures.iter().flatten().map(|measure| measure.verdict());
        let verdict = verdicts.max().unwrap_or(Verdict::Info);
        for (run, measure) in runs.iter().zip(measures) {
            let (Some(run), Some(measure)) = (run, measure) else {
                continue;
            };
            match measure.verdict() {
                Verdict::Info => {}
                Verdict::Pass => self.bounded += 1,
                Verdict::Stretched => {
                    self.bounded += 1;
                    self.stretched += 1;
                }
                Verdict::Miss => {
                    self.bounded += 1;
                    self.missed += 1;
                    self.misses.push(miss(case, run.seed, measure));
                }
            }
        }
        let (bound, here) = (any.bound.to_string(), any.bound.scaled_text());
        self.push(case, [&any.what, &bound, &here], cells, verdict, first);
    }

    fn push(
        &mut self,
        case: &Case,
        [what, bound, here]: [&str; 3],
        values: Vec<String>,
        verdict: Verdict,
        first: &mut Option<u64>,
    ) {
        let begins = first.take();
        let of_case = |text: &str| begins.map_or_else(String::new, |_| text.to_owned());
        let mut cells = vec![
            of_case(case.id),
            of_case(&case.transport_mode.to_string()),
            of_case(case.what),
            what.to_owned(),
            bound.to_owned(),
            here.to_owned(),
        ];
        cells.extend(values);
        cells.push(verdict_label(verdict).to_owned());
        cells.push(begins.map_or_else(String::new, bytes));
        self.rows.push(Row {
            cells,
            begins_case: begins.is_some(),
        });
    }

    /// Formats the table for a terminal.
    #[must_use]
    pub fn text(&self) -> String {
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.cells.get(column));
            let cells = cells.chain(self.head.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.head.len()).map(width).collect();
        let line = |cells: &[String]| {
            let mut text = String::new();
            for (cell, width) in cells.iter().zip(&widths) {
                // Writing to a String cannot fail.
                let _ = write!(text, "{cell:<width$}  ");
            }
            format!("{}\n", text.trim_end())
        };
        let mut text = line(&self.head);
        let rule = widths.iter().map(|width| width + 2).sum::<usize>();
        for row in &self.rows {
            if row.begins_case {
                text.push_str(&"-".repeat(rule.saturating_sub(2)));
                text.push('\n');
            }
            text.push_str(&line(&row.cells));
        }
        text
    }

    /// Formats the table as Markdown.
    #[must_use]
    pub fn markdown(&self) -> String {
        let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
        let rule: Vec<String> = self.head.iter().map(|_| "---".to_owned()).collect();
        let mut text = line(&self.head) + &line(&rule);
        for row in &self.rows {
            text.push_str(&line(&row.cells));
        }
        text
    }

    /// Returns one line for each miss, with its details.
    #[must_use]
    pub fn misses(&self) -> &[String] {
        &self.misses
    }

    /// Returns the totals.
    #[must_use]
    pub fn summary(&self) -> String {
        let Self {
            bounded,
            stretched,
            missed,
            ..
        } = self;
        format!(
            "{bounded} figures with a bound: {} pass ({stretched} of them only as scaled), {missed} MISS; {} hashed at both \
             ends",
            bounded - missed,
            bytes(self.hashed)
        )
    }
}

fn miss(case: &Case, seed: u64, measure: &Measure) -> String {
    let Measure { what, bound, value } = measure;
    let here = match bound.scaled_text() {
        text if text.is_empty() => text,
        text => format!(", here {text}"),
    };
    let why = match value {
        super::Value::No(why) => why.clone(),
        other => other.to_string(),
    };
    format!(
        "{} seed {seed}: {what}: {why} (bound {bound}{here})",
        title(case)
    )
}

fn title(case: &Case) -> String {
    format!("{} {} ({})", case.id, case.transport_mode, case.what)
}

/// Returns the label of a verdict.
pub(super) fn verdict_label(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Info => "-",
        Verdict::Pass => "pass",
        Verdict::Stretched => "pass, scaled",
        Verdict::Miss => "MISS",
    }
}

fn bytes(bytes: u64) -> String {
    #[expect(clippy::cast_precision_loss, reason = "for people")]
    let mib = bytes as f64 / f64::from(1 << 20);
    format!("{mib:.2} MiB")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::{Clocks, Findings};
    use super::*;

    fn done(seed: u64, findings: Result<Findings, String>) -> FinishedRun {
        FinishedRun {
            case: &CASES[0],
            seed,
            took: Duration::ZERO,
            findings,
        }
    }

    #[test]
    fn seeds_stand_side_by_side_and_misses_are_explained() {
        let second = Duration::from_secs(1);
        let mut good = Findings::default();
        good.within("stall", second, Ok(second / 2));
        good.hashed = 1 << 20;
        let mut bad = Findings::default();
        bad.within("stall", second, Err(second * 100));
        bad.holds("same session", false, || "1, then 2".into());
        let plan = Plan {
            cases: vec![&CASES[0]],
            seeds: vec![1, 2, 3],
            clocks: Clocks::Full,
            jobs: 1,
        };
        let runs = [
            done(1, Ok(good)),
            done(2, Ok(bad)),
            done(3, Err("lost".into())),
        ];
        let table = Table::new(&plan, &runs);
        let text = table.text();
        let stall = text.lines().find(|line| line.contains("stall")).unwrap();
        let at = |word: &str| stall.find(word).unwrap();
        assert!(
            at("0.50 s") < at("not in 100.00 s") && at("MISS") > 0,
            "{text}"
        );
        assert_eq!(table.misses().len(), 3);
        assert!(table.misses()[0].ends_with("not measured: lost"));
        assert!(
            table.misses()[2].contains("1, then 2"),
            "{:?}",
            table.misses()
        );
        assert!(table.markdown().starts_with("| id | over |"));
    }
}
