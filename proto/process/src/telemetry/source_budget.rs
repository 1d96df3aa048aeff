//! Budgets of log lines for each source, so that what one source causes does not hide the lines of
//! others, and does not fill the storage of the log.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::dropped::DROPPED;
use super::rate_limit::{Quota, Suppressed, Suppressing, Window, WindowState, list};

/// Quotas of a kind of lines.
#[derive(Debug, Clone, Copy)]
pub(super) struct Quotas {
    pub(super) source: Quota,
    /// Lines of all sources together. The first line of a source in its window is not counted here, so
    /// that many noisy sources do not hide a quiet one.
    pub(super) total: Quota,
}

/// A scraper with 50 targets that are away stays below its quota. All sources together write about
/// 300 KB a second.
const LINES: Quotas = Quotas {
    source: Quota {
        lines: 50,
        length: Duration::from_secs(1),
    },
    total: Quota {
        lines: 500,
        length: Duration::from_secs(1),
    },
};
/// Sources that have a budget of their own. Further ones share one.
const SOURCES_MAX: usize = 1024;
/// Codes whose advice a source has. There are fewer codes.
const CODES_MAX: usize = 32;
/// Sources that are named in one report.
const REPORTED_MAX: usize = 10;

/// A budget of log lines for each source of one kind of lines. `K` identifies a source. When a
/// source has exceeded its budget, one WARN line a second reports how many lines were suppressed, if
/// [`start`](super::start) was called.
pub struct SourceBudget<K> {
    kind: &'static str,
    sources: Mutex<SourceTable<K>>,
}

/// How much of an error's text a line has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LineForm {
    /// The cause, and the advice what to do.
    Full,
    /// The cause. The source has had the advice for this code.
    Brief,
}

#[derive(Debug)]
struct SourceTable<K> {
    quotas: Quotas,
    sources: BTreeMap<K, Source>,
    /// The sources that have no budget of their own.
    others: Source,
    total: Window,
    is_listed: bool,
}

#[derive(Debug)]
struct Source {
    window: Window,
    advised: Vec<&'static str>,
    last: Option<Instant>,
}

impl LineForm {
    /// Returns the part of an error's text that the line has. The advice follows the first
    /// semicolon.
    pub fn of_error(self, error: &str) -> &str {
        match self {
            Self::Full => error,
            Self::Brief => error.split("; ").next().unwrap_or_default(),
        }
    }
}

crate::partial_debug!(SourceBudget<K> { kind });

impl<K: Ord + Clone + Display + Send + 'static> SourceBudget<K> {
    /// Creates a budget. `kind` names the lines in the report of suppressed lines.
    pub const fn new(kind: &'static str) -> Self {
        Self::with_quotas(kind, LINES)
    }

    pub(super) const fn with_quotas(kind: &'static str, quotas: Quotas) -> Self {
        Self {
            kind,
            sources: Mutex::new(SourceTable::new(quotas)),
        }
    }

    /// Returns the form of a line about `source` with this code, or `None` if the line must not be
    /// written. The line is then counted.
    pub fn admit(&'static self, source: K, code: &'static str) -> Option<LineForm> {
        let (form, is_new) = {
            let mut sources = self.sources.lock();
            let (form, is_used_up) = sources.admit(source, code, Instant::now());
            let is_new = is_used_up && !std::mem::replace(&mut sources.is_listed, true);
            (form, is_new)
        };
        if is_new {
            list(self);
        }
        if form.is_none() {
            DROPPED.add_limited();
        }
        form
    }

    /// Returns whether a line about `source` may be written. Only [`Suppressing::take`] reports the others.
    pub(super) fn admit_unlisted(&self, source: K) -> bool {
        let (form, _is_used_up) = self.sources.lock().admit(source, "", Instant::now());
        form.is_some()
    }
}

impl<K: Ord + Clone + Display + Send + 'static> Suppressing for SourceBudget<K> {
    fn take(&self, now: Instant, is_last: bool) -> (Vec<Suppressed>, WindowState) {
        let (sources, state) = self.sources.lock().take(now, is_last);
        let suppressed = sources.into_iter().map(|(source, lines)| Suppressed {
            kind: self.kind,
            source: Some(source),
            lines,
        });
        (suppressed.collect(), state)
    }
}

impl<K: Ord + Clone + Display> SourceTable<K> {
    const fn new(quotas: Quotas) -> Self {
        Self {
            quotas,
            sources: BTreeMap::new(),
            others: Source::new(quotas.source),
            total: Window::new(quotas.total),
            is_listed: false,
        }
    }

    /// Returns the form of a line, and whether a budget is used up.
    fn admit(&mut self, key: K, code: &'static str, now: Instant) -> (Option<LineForm>, bool) {
        if self.sources.len() >= SOURCES_MAX && !self.sources.contains_key(&key) {
            self.remove_oldest(now);
        }
        let has_space = self.sources.len() < SOURCES_MAX || self.sources.contains_key(&key);
        let source = if has_space {
            let quota = self.quotas.source;
            let source = self.sources.entry(key);
            source.or_insert_with(|| Source::new(quota))
        } else {
            &mut self.others
        };
        source.last = Some(now);
        let is_first = source.window.is_over(now);
        let form = if !source.window.admit(now) {
            None
        } else if is_first || self.total.admit(now) {
            Some(source.form(code))
        } else {
            source.window.suppress(1);
            None
        };
        let is_used_up = source.window.is_used_up() || self.total.is_used_up();
        (form, is_used_up)
    }

    /// Removes the source that has been silent for the longest time, if it has nothing to report.
    fn remove_oldest(&mut self, now: Instant) {
        let sources = self.sources.iter();
        let oldest = sources.min_by_key(|(_, source)| source.last);
        let removable = oldest.filter(|(_, source)| source.window.is_over(now));
        if let Some(source) = removable
            .map(|(key, _)| key.clone())
            .and_then(|key| self.sources.remove(&key))
        {
            self.others.window.suppress(source.window.suppressed());
        }
    }

    /// Returns the sources with their numbers of suppressed lines, the largest first.
    fn take(&mut self, now: Instant, is_last: bool) -> (Vec<(String, u64)>, WindowState) {
        let mut suppressed = Vec::new();
        let mut is_open = self.total.is_used_up() && !self.total.is_over(now);
        for (key, source) in &mut self.sources {
            match source.window.take(now, is_last) {
                Some(0) => {}
                Some(lines) => suppressed.push((key.to_string(), lines)),
                None => is_open |= source.window.is_used_up() || source.window.suppressed() > 0,
            }
        }
        suppressed.sort_by_key(|(_, lines)| std::cmp::Reverse(*lines));
        let unnamed = suppressed.split_off(suppressed.len().min(REPORTED_MAX));
        let unnamed: u64 = unnamed.iter().map(|(_, lines)| *lines).sum();
        match self.others.window.take(now, is_last) {
            Some(lines) if lines + unnamed > 0 => {
                suppressed.push((OTHERS.to_owned(), lines + unnamed));
            }
            Some(_) => {}
            None => {
                self.others.window.suppress(unnamed);
                is_open = true;
            }
        }
        let is_open = is_open && !is_last;
        self.is_listed = is_open;
        let state = if is_open {
            WindowState::Open
        } else {
            WindowState::Over
        };
        (suppressed, state)
    }
}

/// The name of the sources that are not named.
const OTHERS: &str = "others";

impl Source {
    const fn new(quota: Quota) -> Self {
        Self {
            window: Window::new(quota),
            advised: Vec::new(),
            last: None,
        }
    }

    fn form(&mut self, code: &'static str) -> LineForm {
        if self.advised.contains(&code) {
            return LineForm::Brief;
        }
        if self.advised.len() < CODES_MAX {
            self.advised.push(code);
        }
        LineForm::Full
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends lines from each of `sources` at once, and returns the number that are written.
    fn written(table: &mut SourceTable<u32>, sources: &[(u32, usize)], now: Instant) -> usize {
        let lines = sources
            .iter()
            .flat_map(|(source, lines)| std::iter::repeat_n(*source, *lines));
        let forms = lines.map(|source| table.admit(source, "refused", now).0);
        forms.flatten().count()
    }

    #[test]
    fn source_has_fifty_lines_a_second_and_the_others_have_theirs() {
        let (mut table, start) = (SourceTable::new(LINES), Instant::now());
        let at = |millis| start + Duration::from_millis(millis);
        assert_eq!(written(&mut table, &[(1, 10_000), (2, 1)], at(0)), 51);
        let nothing = (Vec::new(), WindowState::Open);
        assert_eq!(
            table.take(at(900), false),
            nothing,
            "the second is not over"
        );
        let reported = (vec![("1".to_owned(), 9_950)], WindowState::Over);
        assert_eq!(table.take(at(1000), false), reported);
        assert_eq!(table.take(at(1000), false), (Vec::new(), WindowState::Over));
        assert_eq!(written(&mut table, &[(1, 100), (2, 2)], at(1000)), 52);
        let reported = (vec![("1".to_owned(), 50)], WindowState::Over);
        assert_eq!(table.take(at(1001), true), reported, "the process ends");
    }

    #[test]
    fn advice_is_written_once_for_each_code_of_a_source() {
        let (mut table, now) = (SourceTable::new(LINES), Instant::now());
        let mut form = |source, code| table.admit(source, code, now).0.unwrap();
        for (source, code) in [(1, "a"), (1, "b"), (2, "a")] {
            assert_eq!(form(source, code), LineForm::Full);
            assert_eq!(form(source, code), LineForm::Brief);
        }
        let error = "port 1 is not allowed; list it";
        assert_eq!(LineForm::Full.of_error(error), error);
        assert_eq!(LineForm::Brief.of_error(error), "port 1 is not allowed");
        assert_eq!(LineForm::Brief.of_error(""), "");
    }

    #[test]
    fn any_number_of_sources_has_a_bounded_number_of_lines_and_of_entries() {
        let (mut table, now) = (SourceTable::new(LINES), Instant::now());
        let noisy: Vec<_> = (0..20).map(|source| (source, 1_000)).collect();
        let of_noisy = written(&mut table, &noisy, now);
        assert_eq!(of_noisy, 500 + 20, "the first line of each is not counted");
        assert_eq!(written(&mut table, &[(20, 1)], now), 1, "a quiet one");
        let crowd: Vec<_> = (100..100_000).map(|source| (source, 2)).collect();
        let of_crowd = written(&mut table, &crowd, now);
        assert!(of_crowd <= SOURCES_MAX + 1, "{of_crowd}");
        assert_eq!(table.sources.len(), SOURCES_MAX);
        let later = now + Duration::from_secs(1);
        let (reported, _) = table.take(later, false);
        assert_eq!(reported.len(), REPORTED_MAX + 1);
        let suppressed: u64 = reported.iter().map(|(_, lines)| *lines).sum();
        let sent = 20 * 1_000 + 1 + 2 * crowd.len();
        let lines = of_noisy + 1 + of_crowd;
        assert_eq!(suppressed, (sent - lines) as u64, "each line is counted");
        assert_eq!(written(&mut table, &[(7_000_000, 1)], later), 1);
        assert_eq!(table.sources.len(), SOURCES_MAX, "the oldest one is gone");
    }
}
