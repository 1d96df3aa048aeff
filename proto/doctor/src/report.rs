//! Findings of the checks, their output, and the exit code.
//!
//! Texts of peers and of the cluster are printed with visible characters only, and without what
//! looks like a secret.

use std::fmt;
use std::io::{self, Write};
use std::time::Duration;

use serde::Serialize;
use tokio::time::{Instant, sleep};

use tunnel_process::diag::redact::{redact, redacted};
use tunnel_process::name_list::NameList;
use tunnel_process::output::OutputFormat;
use tunnel_process::schema::Document;
use tunnel_process::telemetry::{self, LogFormat, visible};

/// Exit code of a report with warnings and no errors.
const EXIT_WARNINGS: u8 = 1;
/// Exit code of a report with errors.
const EXIT_ERRORS: u8 = 2;
/// Pause between two repetitions of the checks.
const PAUSE: Duration = Duration::from_secs(2);

/// How serious a finding is. The most serious severity is the least.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Requests fail, or the process cannot work.
    Error,
    /// Requests may fail, or fail soon.
    Warning,
    /// A fact to know; needs no action.
    Info,
}

impl fmt::Display for Severity {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Error => "error",
            Self::Warning => "warning",
            Self::Info => "info",
        })
    }
}

/// A fault that a check found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Id of the check, as in `D09`.
    pub id: &'static str,
    /// How serious the finding is.
    pub severity: Severity,
    /// The fault, in one line.
    pub what: String,
    /// The object that has the fault: a node, a file, an object of the cluster, an address; or the
    /// number of objects that have it.
    pub place: String,
    /// The objects that have the fault: their number, and the names of the first ten.
    #[serde(flatten)]
    pub objects: NameList,
    /// What happens if the fault is not fixed.
    pub consequence: &'static str,
    /// The command or the change that fixes the fault, in one line.
    pub fix: String,
    /// The page of the documentation.
    pub link: &'static str,
}

/// A check that could not be done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Skipped {
    /// Id of the check.
    pub id: &'static str,
    /// Why the facts of the check could not be obtained.
    pub reason: String,
}

/// A check without a fault.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Passed {
    /// Id of the check.
    pub id: &'static str,
    /// The values that were measured. `None` if the check found no fault and measured nothing, also where
    /// it does not apply.
    pub value: Option<String>,
}

/// The result of all checks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// What the process can carry with the resources of this host, in one line. Empty if it is not
    /// known.
    pub capacity: String,
    /// Faults, in the order in which they are printed.
    pub findings: Vec<Finding>,
    /// Checks without a fault, by id.
    pub passed: Vec<Passed>,
    /// Checks that could not be done.
    pub skipped: Vec<Skipped>,
}

impl Report {
    /// Adds the reason why a check could not be done.
    pub(crate) fn skip(&mut self, id: &'static str, reason: impl Into<String>) {
        let reason = reason.into();
        self.skipped.push(Skipped { id, reason });
    }

    /// Adds a check that has neither an error nor a warning and was done, once.
    pub(crate) fn pass(&mut self, check: &Explanation, values: Vec<String>) {
        let id = check.id;
        let mut findings = self.findings.iter();
        let has_fault =
            findings.any(|finding| finding.id == id && finding.severity != Severity::Info);
        let is_skipped = self.skipped.iter().any(|skipped| skipped.id == id);
        if has_fault || is_skipped || self.passed.iter().any(|passed| passed.id == id) {
            return;
        }
        let value = (!values.is_empty()).then(|| values.join("; "));
        self.passed.push(Passed { id, value });
    }

    /// Keeps the results of the checks with these ids. Without ids all results stay.
    pub fn retain(&mut self, ids: &[String]) {
        let is_selected =
            |id: &str| ids.is_empty() || ids.iter().any(|only| only.eq_ignore_ascii_case(id));
        self.findings.retain(|finding| is_selected(finding.id));
        self.passed.retain(|passed| is_selected(passed.id));
        self.skipped.retain(|skipped| is_selected(skipped.id));
    }

    /// Sorts the findings: the most serious ones first, then by id and place.
    pub(crate) fn sort(&mut self) {
        self.findings.sort_by(|left, right| {
            let key = |finding: &Finding| (finding.severity, finding.id);
            key(left)
                .cmp(&key(right))
                .then_with(|| left.place.cmp(&right.place))
        });
        self.skipped.sort_by_key(|skipped| skipped.id);
    }

    /// Returns whether a finding is an error.
    pub fn has_errors(&self) -> bool {
        self.count(Severity::Error) > 0
    }

    /// Returns the exit code: 2 with errors, else 1 with warnings, else 0.
    pub fn exit_code(&self) -> u8 {
        if self.has_errors() {
            EXIT_ERRORS
        } else if self.count(Severity::Warning) > 0 {
            EXIT_WARNINGS
        } else {
            0
        }
    }

    /// Does the checks with `examine` until there is no error, or for the time `wait`, and prints the
    /// last report to standard output. Returns its exit code.
    ///
    /// # Errors
    /// When standard output cannot be written.
    pub async fn print_when_done(
        wait: Duration,
        format: OutputFormat,
        mut examine: impl AsyncFnMut() -> Self,
    ) -> io::Result<u8> {
        let end = Instant::now() + wait;
        let report = loop {
            let report = examine().await;
            if !report.has_errors() || Instant::now() + PAUSE > end {
                break report;
            }
            sleep(PAUSE).await;
        };
        let mut text = Vec::new();
        report.print(format, &mut text)?;
        telemetry::print(&text)?;
        Ok(report.exit_code())
    }

    /// Writes the report as a JSON document or as text.
    ///
    /// # Errors
    /// When `out` cannot be written.
    pub fn print(&self, format: OutputFormat, out: &mut impl Write) -> io::Result<()> {
        if format == OutputFormat::Json {
            return print_json(&Document::new(self), out);
        }
        if !self.capacity.is_empty() {
            writeln!(out, "capacity: {}", line(&self.capacity))?;
        }
        for finding in &self.findings {
            let Finding {
                id, severity, link, ..
            } = finding;
            let (what, place) = (line(&finding.what), line(&finding.place));
            writeln!(out, "{severity} {id} {place}: {what}")?;
            writeln!(out, "  consequence: {}", finding.consequence)?;
            writeln!(out, "  fix: {}", line(&finding.fix))?;
            writeln!(out, "  see: {link}")?;
        }
        for Passed { id, value } in &self.passed {
            if let Some(value) = value {
                writeln!(out, "\u{2713} {id} {}", line(value))?;
            }
        }
        let without_value = self.passed.iter().filter(|passed| passed.value.is_none());
        let ids: Vec<&str> = without_value.map(|passed| passed.id).collect();
        if !ids.is_empty() {
            writeln!(out, "no fault found: {}", ids.join(", "))?;
        }
        for (reason, ids) in self.skipped_by_reason() {
            writeln!(out, "skipped {}: {}", ids.join(", "), line(reason))?;
        }
        writeln!(
            out,
            "errors: {}; warnings: {}; infos: {}; passed: {}; checks skipped: {}",
            self.count(Severity::Error),
            self.count(Severity::Warning),
            self.count(Severity::Info),
            self.passed.len(),
            self.skipped.len()
        )
    }

    /// Returns each reason with the ids of the checks that could not be done.
    fn skipped_by_reason(&self) -> Vec<(&str, Vec<&str>)> {
        let mut reasons: Vec<(&str, Vec<&str>)> = Vec::new();
        for Skipped { id, reason } in &self.skipped {
            match reasons
                .iter_mut()
                .find(|(found, _)| *found == reason.as_str())
            {
                Some((_, ids)) if ids.last() == Some(id) => {}
                Some((_, ids)) => ids.push(id),
                None => reasons.push((reason.as_str(), vec![*id])),
            }
        }
        reasons
    }

    fn count(&self, severity: Severity) -> usize {
        let of_severity = |finding: &&Finding| finding.severity == severity;
        self.findings.iter().filter(of_severity).count()
    }
}

/// What `--explain` prints about a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Explanation {
    /// Id of the check.
    pub id: &'static str,
    /// What the check looks at.
    pub checks: &'static str,
    /// What happens if a fault is not fixed.
    pub consequence: &'static str,
    /// The commands or the patch that fix a fault.
    pub fix: &'static str,
    /// The page of the documentation.
    pub link: &'static str,
}

impl Explanation {
    /// Returns the explanation of a check. The case of the id does not matter.
    pub fn find<'a>(table: &'a [Self], id: &str) -> Option<&'a Self> {
        let mut table = table.iter();
        table.find(|explanation| explanation.id.eq_ignore_ascii_case(id))
    }

    /// Parses the id of a check in the table.
    ///
    /// # Errors
    /// Returns a text with all ids.
    pub fn parse_id(table: &[Self], text: &str) -> Result<String, String> {
        match Self::find(table, text) {
            Some(explanation) => Ok(explanation.id.to_owned()),
            None => {
                let ids: Vec<&str> = table.iter().map(|known| known.id).collect();
                Err(format!(
                    "no check has this id; there are {}",
                    ids.join(", ")
                ))
            }
        }
    }

    /// Prints the explanation of a check in the table to standard output.
    ///
    /// # Errors
    /// When standard output cannot be written.
    pub fn print_from(table: &[Self], id: &str, format: OutputFormat) -> io::Result<()> {
        let mut text = Vec::new();
        if let Some(explanation) = Self::find(table, id) {
            explanation.print(format, &mut text)?;
        }
        telemetry::print(&text)
    }

    /// Writes the explanation as a JSON document or as text.
    ///
    /// # Errors
    /// When `out` cannot be written.
    pub fn print(&self, format: OutputFormat, out: &mut impl Write) -> io::Result<()> {
        if format == OutputFormat::Json {
            return print_json(&Document::new(self), out);
        }
        writeln!(out, "{}: {}", self.id, self.checks)?;
        writeln!(out, "consequence: {}", self.consequence)?;
        writeln!(out, "fix:")?;
        for command in self.fix.lines() {
            writeln!(out, "  {command}")?;
        }
        writeln!(out, "see: {}", self.link)
    }
}

/// Returns text of others as one line of visible characters without secrets.
fn line(text: &str) -> String {
    let redacted = redact(text.trim_end());
    visible(&redacted, LogFormat::Text).into_owned()
}

/// Writes a document with visible characters and without secrets.
fn print_json(document: &impl Serialize, out: &mut impl Write) -> io::Result<()> {
    let document = redacted(serde_json::to_value(document)?);
    let text = serde_json::to_string_pretty(&document)?;
    for line in text.lines() {
        writeln!(out, "{}", visible(line, LogFormat::Json))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use OutputFormat::{Json, Table};
    use serde_json::Value;

    use super::*;

    fn finding(id: &'static str, severity: Severity, place: &str) -> Finding {
        Finding {
            id,
            severity,
            what: "no agent is connected".to_owned(),
            place: place.to_owned(),
            objects: NameList::of(&[place]),
            consequence: "requests for the node fail",
            fix: "systemctl restart tunnel-agent".to_owned(),
            link: "docs/how-to/doctor.md",
        }
    }

    fn printed(report: &Report, format: OutputFormat) -> String {
        let mut out = Vec::new();
        report.print(format, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn exit_code_is_that_of_the_most_serious_finding() {
        for (severities, expected) in [
            (vec![], 0),
            (vec![Severity::Info], 0),
            (vec![Severity::Info, Severity::Warning], 1),
            (vec![Severity::Error, Severity::Warning], 2),
        ] {
            let findings = severities.iter();
            let mut report = Report {
                findings: findings
                    .map(|severity| finding("D09", *severity, "a"))
                    .collect(),
                ..Report::default()
            };
            report.skip("D04", "no API server");
            assert_eq!(report.exit_code(), expected, "{severities:?}");
        }
    }

    #[test]
    fn findings_are_sorted_by_severity_and_selected_by_id() {
        let mut report = Report {
            findings: vec![
                finding("D18", Severity::Warning, "host"),
                finding("D09", Severity::Error, "b"),
                finding("D09", Severity::Error, "a"),
            ],
            ..Report::default()
        };
        report.skip("D04", "no API server");
        report.sort();
        report.retain(&[]);
        let places = report.findings.iter().map(|finding| finding.place.as_str());
        assert_eq!(places.collect::<Vec<_>>(), ["a", "b", "host"]);
        report.retain(&["d18".to_owned()]);
        assert_eq!(report.findings.len(), 1);
        assert!(report.skipped.is_empty());
    }

    #[test]
    fn checks_that_were_skipped_for_one_reason_are_one_line() {
        let mut report = Report::default();
        for id in ["D04", "D06", "D06", "D10"] {
            report.skip(id, "no API server");
        }
        report.skip("D18", "no rights");
        let text = printed(&report, Table);
        let expected = "skipped D04, D06, D10: no API server\nskipped D18: no rights\n";
        assert!(text.starts_with(expected), "{text}");
    }

    #[test]
    fn capacity_is_the_first_line_and_a_field() {
        let report = Report {
            capacity: "memory limit 1GiB".to_owned(),
            ..Report::default()
        };
        let text = printed(&report, Table);
        assert!(
            text.starts_with("capacity: memory limit 1GiB\nerrors: 0"),
            "{text}"
        );
        let document: Value = serde_json::from_str(&printed(&report, Json)).unwrap();
        assert_eq!(document["capacity"], "memory limit 1GiB");
        assert!(printed(&Report::default(), Table).starts_with("errors: 0"));
    }

    #[test]
    fn hostile_texts_are_visible_and_secrets_are_not() {
        let token = format!("abcdef.{}", "0123456789abcdef".repeat(4));
        let mut report = Report {
            findings: vec![finding("D09", Severity::Error, "a\u{202e}\n\x1b[31m")],
            ..Report::default()
        };
        report.skip("D04", format!("https://user:canary@host {token}"));
        for format in [Table, Json] {
            let text = printed(&report, format);
            for hidden in ["\u{202e}", "\x1b", "canary", token.as_str()] {
                assert!(!text.contains(hidden), "{text}");
            }
        }
        let text = printed(&report, Table);
        assert!(text.starts_with("error D09 a\\u{202e}\\u{a}\\u{1b}[31m: no agent"));
        assert_eq!(text.lines().count(), 6, "{text}");
        let document: Value = serde_json::from_str(&printed(&report, Json)).unwrap();
        assert_eq!(document["schemaVersion"], 1);
        assert_eq!(document["findings"][0]["severity"], "error");
        assert_eq!(document["findings"][0]["place"], "a\u{202e}\n\x1b[31m");
        assert_eq!(document["findings"][0]["count"], 1);
        assert_eq!(document["findings"][0]["names"][0], "a\u{202e}\n\x1b[31m");
        assert_eq!(document["skipped"][0]["id"], "D04");
    }

    #[test]
    fn explanation_is_found_in_either_case() {
        let table = [Explanation {
            id: "D09",
            checks: "agents",
            consequence: "requests fail",
            fix: "one\ntwo",
            link: "docs/how-to/doctor.md",
        }];
        assert!(Explanation::find(&table, "D99").is_none());
        let explanation = Explanation::find(&table, "d09").unwrap();
        let mut out = Vec::new();
        explanation.print(Table, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("fix:\n  one\n  two\n"), "{text}");
        let mut out = Vec::new();
        explanation.print(Json, &mut out).unwrap();
        let document: Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(
            (&document["id"], &document["schemaVersion"]),
            (&"D09".into(), &1.into())
        );
    }
}
