//! A dry run of rules: what they would decide, next to the rules in force. Pure.

use std::fmt;
use std::sync::Arc;

use super::caller::{CallerIdentity, UnreadToken};
use super::rules::{Decision, Facts, RuleTable, Verdict};
use crate::routes::RouteTable;

/// The rules in force, and those of a dry run.
#[derive(Debug, Clone, Default)]
pub struct Rules {
    pub in_force: RuleTable,
    pub dry_run: Option<RuleTable>,
}

impl Rules {
    /// Returns whether a rule depends on this ServiceAccount.
    pub fn names_account(&self, account: &str) -> bool {
        let tables = std::iter::once(&self.in_force).chain(&self.dry_run);
        tables.into_iter().any(|table| table.names_account(account))
    }
}

impl From<RuleTable> for Rules {
    fn from(in_force: RuleTable) -> Self {
        Self {
            in_force,
            dry_run: None,
        }
    }
}

/// What the rules in force and those of a dry run decide about one access, where that differs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    pub in_force: Decided,
    pub dry_run: Decided,
}

/// A decision with the name of its rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decided {
    pub verdict: Verdict,
    pub rule: Option<Arc<str>>,
}

impl Difference {
    /// Decides about an access by both tables. `claimed` is the caller that an unreviewed token claims to
    /// be: a dry run has no token reviewed, and believes the claim. Returns `None` if both decide the same.
    pub fn find(
        in_force: &RuleTable,
        dry_run: &RuleTable,
        facts: &Facts,
        claimed: Option<&CallerIdentity>,
        routes: &RouteTable,
    ) -> Option<Self> {
        let mut seen = facts.clone();
        match (&facts.identity, claimed) {
            (CallerIdentity::ServiceAccount(account), _) if !dry_run.names_account(account) => {
                (seen.identity, seen.token) = (CallerIdentity::Anonymous, UnreadToken::OfOther);
            }
            (CallerIdentity::Anonymous, Some(claimed)) => {
                (seen.identity, seen.token) = (claimed.clone(), UnreadToken::None);
            }
            _ => {}
        }
        dry_run.describe(&mut seen, routes);
        let (now, then) = (in_force.decide(facts), dry_run.decide(&seen));
        (now.verdict != then.verdict).then(|| Self {
            in_force: now.into(),
            dry_run: then.into(),
        })
    }
}

impl From<Decision<'_>> for Decided {
    fn from(decision: Decision<'_>) -> Self {
        Self {
            verdict: decision.verdict,
            rule: decision.rule.map(|rule| rule.name.clone()),
        }
    }
}

impl fmt::Display for Decided {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = match self.verdict {
            Verdict::Allow => "allow",
            Verdict::Deny => "deny",
            Verdict::AskCluster => "ask the cluster",
        };
        match &self.rule {
            Some(rule) => write!(formatter, "{verdict} by rule {rule}"),
            None => write!(formatter, "{verdict}, no rule allows it"),
        }
    }
}

#[cfg(test)]
mod tests {
    use tunnel_proto::wire::name::Port;

    use super::super::listener::Listener;
    use super::super::rules::{CallerMatch, DestinationKind, Effect, NamedCaller, Rule, RuleLabel};
    use super::*;
    use crate::operation::Operation;
    use crate::routes::{RouteNode, RouteSource};

    fn table(callers: &[(&str, &str)], rules: Vec<Rule>) -> RuleTable {
        let callers = callers.iter().map(|(name, account)| NamedCaller {
            name: (*name).into(),
            who: CallerMatch::ServiceAccount((*account).into()),
        });
        RuleTable {
            callers: callers.collect(),
            rules,
            ..RuleTable::default()
        }
    }

    fn facts(identity: CallerIdentity, has_token: bool) -> Facts {
        let token = match has_token {
            true => UnreadToken::OfAny,
            false => UnreadToken::None,
        };
        Facts {
            listener: Listener::Https,
            identity,
            has_delegation: false,
            token,
            source: None,
            kind: DestinationKind::Node,
            node: Some("edge-1".parse().unwrap()),
            described: None,
            port: Port::new(10250),
            is_kubelet: true,
            operation: Operation::Metrics,
            without_upgrade: Operation::Metrics,
        }
    }

    fn difference(
        in_force: &RuleTable,
        dry_run: &RuleTable,
        facts: &Facts,
        claimed: Option<&CallerIdentity>,
    ) -> String {
        let edge = RouteNode {
            labels: [("tier".into(), "pay".into())].into(),
            ..RouteNode::edge("edge-1".parse().unwrap(), Vec::new())
        };
        let mut routes = RouteTable::default();
        routes.replace(RouteSource::Known, &edge.name.clone(), Some(edge));
        let found = Difference::find(in_force, dry_run, facts, claimed, &routes);
        found.map_or_else(String::new, |difference| {
            format!("{} -> {}", difference.in_force, difference.dry_run)
        })
    }

    #[test]
    fn decisions_differ_by_their_verdict_and_not_by_their_rule() {
        let all = table(&[], vec![Rule::new("all", Effect::Allow)]);
        let other = table(&[], vec![Rule::new("other", Effect::Allow)]);
        let none = table(&[], Vec::new());
        let labeled = Rule {
            labels: vec![RuleLabel {
                key: "tier".into(),
                value: "pay".into(),
            }],
            ..Rule::new("pay", Effect::Deny)
        };
        let labeled = table(&[], vec![labeled, Rule::new("all", Effect::Allow)]);
        let anonymous = facts(CallerIdentity::Anonymous, false);
        let between = |one, two| difference(one, two, &anonymous, None);
        assert_eq!(between(&all, &other), "");
        assert_eq!(
            between(&all, &none),
            "allow by rule all -> deny, no rule allows it"
        );
        assert_eq!(
            between(&none, &all),
            "deny, no rule allows it -> allow by rule all"
        );
        assert_eq!(
            between(&all, &labeled),
            "allow by rule all -> deny by rule pay"
        );
    }

    #[test]
    fn dry_run_believes_the_account_of_a_token_that_its_callers_name_and_knows_no_other() {
        let scrape = |table: &RuleTable| Rule {
            callers: table.caller("scrape"),
            ..Rule::new("scrape", Effect::Allow)
        };
        let none = table(&[], Vec::new());
        let mut named = table(&[("scrape", "m/scrape")], Vec::new());
        named.rules.push(scrape(&named));
        let account = CallerIdentity::ServiceAccount("m/scrape".into());
        let token = facts(CallerIdentity::Anonymous, true);
        assert_eq!(difference(&none, &named, &token, None), "");
        assert_eq!(
            difference(&none, &named, &token, Some(&account)),
            "deny, no rule allows it -> allow by rule scrape"
        );
        let tokens = Rule {
            callers: none.caller("token"),
            ..Rule::new("tokens", Effect::Deny)
        };
        // A token whose claim is believed is no unread one.
        named.rules.push(tokens.clone());
        assert_eq!(
            difference(&none, &named, &token, Some(&account)),
            "deny, no rule allows it -> allow by rule scrape"
        );
        let reviewed = facts(account, false);
        let tokens = table(&[("other", "m/other")], vec![tokens]);
        assert_eq!(
            difference(&named, &tokens, &reviewed, None),
            "allow by rule scrape -> deny by rule tokens"
        );
    }
}
