//! The report of a dry run: what the rules of `dryRun` decide otherwise than those in force. Each difference
//! is counted, the first of its kind is logged, and operators get the list.

use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tracing::info;
use tunnel_process::telemetry::non_empty;
use tunnel_proto::audit::ANONYMOUS;
use tunnel_proto::wire::header::one_line;
use tunnel_proto::wire::name::{NodeName, Port};

use crate::metrics::Metrics;
use tunnel_routing::policy::rules::Facts;
use tunnel_routing::policy::{CallerIdentity, Difference, Rules};
use tunnel_routing::routes::RouteTable;
use tunnel_store::data_dir::time_text;

/// The differences since the rules have changed last. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct DryRunReport(Arc<Mutex<Option<DryRunStatus>>>);

/// What a dry run has found so far.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DryRunStatus {
    #[serde(with = "time_text")]
    pub since: SystemTime,
    /// Decisions that were made by both tables.
    pub decisions: u64,
    pub differences: Vec<DifferenceStatus>,
    /// Differences of further kinds, which the list has no room for.
    pub others: u64,
}

/// Differences of one kind: operation, listener, and the decisions with their rules.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DifferenceStatus {
    pub what: String,
    pub count: u64,
    #[serde(with = "time_text")]
    pub last: SystemTime,
    /// Caller and destination of the last one.
    pub example: String,
}

impl DryRunReport {
    /// Creates the report of a server, whose settings may have a dry run.
    pub fn new(has_dry_run: bool) -> Self {
        let report = Self::default();
        report.restart(has_dry_run);
        report
    }

    /// Begins again, because the rules have changed.
    pub fn restart(&self, has_dry_run: bool) {
        *self.0.lock() = has_dry_run.then(|| DryRunStatus {
            since: SystemTime::now(),
            decisions: 0,
            differences: Vec::new(),
            others: 0,
        });
    }

    /// Returns what was found so far, or `None` without a dry run.
    pub fn status(&self) -> Option<DryRunStatus> {
        self.0.lock().clone()
    }

    /// Decides about an access by both tables, and records the difference. Returns what the dry run decides,
    /// if that is different. `claimed` is the caller that an unreviewed token claims to be.
    pub fn compare(
        &self,
        rules: &Rules,
        facts: &Facts,
        claimed: Option<&CallerIdentity>,
        routes: &RouteTable,
        metrics: &Metrics,
    ) -> Option<Box<str>> {
        let (in_force, tried) = (&rules.in_force, rules.dry_run.as_ref()?);
        let difference = Difference::find(in_force, tried, facts, claimed, routes);
        let mut report = self.0.lock();
        let status = report.as_mut()?;
        status.decisions += 1;
        let Difference { in_force, dry_run } = difference?;
        metrics.dry_run_difference(dry_run.verdict);
        let (operation, listener) = (facts.operation.label(), facts.listener);
        let what = format!("{operation} over {listener}: {in_force}, dry run {dry_run}");
        if status.add(&what, facts) {
            drop(report);
            info!(
                caller = caller(facts),
                node = facts.node.as_ref().map(NodeName::as_str),
                port = facts.port.map(Port::get),
                difference = what,
                "the dry run of rules decides otherwise; policy show counts further ones"
            );
        }
        Some(dry_run.to_string().into())
    }
}

impl DryRunStatus {
    /// Counts a difference. Returns whether it is the first of its kind.
    fn add(&mut self, what: &str, facts: &Facts) -> bool {
        let mut known = self.differences.iter();
        let known = known.position(|known| known.what == what);
        if known.is_none() && self.differences.len() >= DIFFERENCES_MAX {
            self.others += 1;
            return false;
        }
        let (last, example) = (
            SystemTime::now(),
            format!("{} at {}", caller(facts), facts.at()),
        );
        match known.and_then(|index| self.differences.get_mut(index)) {
            Some(known) => {
                known.count += 1;
                (known.last, known.example) = (last, example);
            }
            None => self.differences.push(DifferenceStatus {
                what: what.to_owned(),
                count: 1,
                last,
                example,
            }),
        }
        known.is_none()
    }
}

fn caller(facts: &Facts) -> String {
    let caller = one_line(facts.identity.to_string());
    non_empty(&caller).unwrap_or(ANONYMOUS).to_owned()
}

/// Kinds of differences in the list. Operations, listeners and pairs of rules could make more.
const DIFFERENCES_MAX: usize = 100;

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;
    use tunnel_proto::transport::BufferPool;
    use tunnel_routing::policy::access_of_agent;
    use tunnel_routing::policy::rules::{Effect, Rule, RuleTable};

    use super::*;

    fn table(name: &str, effect: Effect) -> RuleTable {
        RuleTable {
            rules: vec![Rule::new(name, effect)],
            ..RuleTable::default()
        }
    }

    #[test]
    fn differences_are_counted_by_kind_up_to_a_limit_until_the_rules_change() {
        let metrics = Metrics::new(&mut Registry::default(), BufferPool::new(1 << 20));
        let report = DryRunReport::new(true);
        let facts = access_of_agent(&"gw-1".parse().unwrap(), &[]).facts;
        let decide = |in_force: &str, effect| {
            let rules = Rules {
                in_force: table(in_force, Effect::Allow),
                dry_run: Some(table("tried", effect)),
            };
            report.compare(&rules, &facts, None, &RouteTable::default(), &metrics)
        };
        assert_eq!(decide("all", Effect::Allow), None);
        for number in 0..=DIFFERENCES_MAX {
            let text = decide(&format!("rule-{number}"), Effect::Deny);
            assert_eq!(text.as_deref(), Some("deny by rule tried"));
        }
        decide("rule-0", Effect::Deny);
        let status = report.status().unwrap();
        let counts = (status.decisions, status.others, status.differences.len());
        assert_eq!(counts, (DIFFERENCES_MAX as u64 + 3, 1, DIFFERENCES_MAX));
        let first = &status.differences[0];
        assert_eq!(first.count, 2);
        assert_eq!(
            first.what,
            "connect over agent: allow by rule rule-0, dry run deny by rule tried"
        );
        assert_eq!(first.example, "agent:gw-1 at a target of the cloud");
        report.restart(true);
        assert_eq!(report.status().unwrap().differences, []);
        report.restart(false);
        assert_eq!((report.status(), decide("all", Effect::Deny)), (None, None));
    }
}
