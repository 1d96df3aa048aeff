//! Decides again about accesses in progress, after a change of the rules, and asks the cluster where a rule does.

use std::collections::HashMap;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream;
use http::Method;
use tokio::time::{Instant, sleep, timeout_at};
use tunnel_proto::wire::header::one_line;
use tunnel_proto::wire::name::NodeName;

use super::context::IngressContext;
use crate::routing::access_review::ReviewError;
use crate::running::{Refused, RunningAccess};
use tunnel_routing::operation::Operation;
use tunnel_routing::policy::{Denied, Granted, authorize};

/// Time within which the cluster has to allow what a rule asks it about.
const REVIEW_TIME: Duration = Duration::from_secs(6);
/// Questions at once, of the 16 that the server asks.
const REVIEWS_AT_ONCE: usize = 8;
/// The reason for what the cluster has not allowed in time.
const LATE: &str = "no answer in time";
/// Time until the cluster is asked again about a caller with too many questions.
const REVIEW_PAUSE: Duration = Duration::from_secs(1);

impl IngressContext {
    /// Decides about all accesses in progress by the policy in force, and ends those that it refuses. Returns
    /// their number. The cluster is asked, since a remembered answer may be older than the change for which
    /// an operator wants this.
    pub async fn end_refused(&self) -> usize {
        if let Some(reviewer) = &self.reviewer {
            reviewer.forget_rights();
        }
        let (mut ended, mut questions) = (0, HashMap::<_, Vec<_>>::new());
        for (number, access) in self.running.all() {
            match self.decide(&access) {
                Ok(granted) if granted.asks_cluster => {
                    let right = Right::of(&access);
                    questions
                        .entry(right)
                        .or_default()
                        .push((number, access, granted));
                }
                Ok(_) => {}
                Err(refused) => ended += usize::from(self.running.end(number, refused)),
            }
        }
        let deadline = Instant::now() + REVIEW_TIME;
        let asked = stream::iter(questions.into_values()).map(|alike| async move {
            let answer = match alike.first() {
                Some((_, access, _)) => timeout_at(deadline, self.ask_patiently(access)).await,
                None => Ok(Ok(())),
            };
            let answer = answer.unwrap_or_else(|_elapsed| Err(LATE.to_owned()));
            let Err(reason) = answer else {
                return 0;
            };
            let ends = alike.iter().filter(|(number, access, granted)| {
                let denied = denied(access, granted, reason.clone());
                let refused = Refused::new(&denied, denied.rule());
                self.running.end(*number, refused)
            });
            ends.count()
        });
        let asked = asked.buffer_unordered(REVIEWS_AT_ONCE);
        ended + asked.fold(0, |sum, count| async move { sum + count }).await
    }

    /// Decides about an access by the policy in force.
    pub(super) async fn decide_again(&self, access: &RunningAccess) -> Result<(), Refused> {
        let granted = self.decide(access)?;
        if !granted.asks_cluster {
            return Ok(());
        }
        let asked = ask_cluster(self, access, &granted).await;
        asked.map_err(|denied| Refused::new(&denied, denied.rule()))
    }

    /// Asks the cluster, again if a caller has too many questions at once.
    async fn ask_patiently(&self, access: &RunningAccess) -> Result<(), String> {
        loop {
            match review(self, access).await {
                Answer::Allowed => return Ok(()),
                Answer::Denied(reason) => return Err(reason),
                Answer::Failed(ReviewError::TooMany) => sleep(REVIEW_PAUSE).await,
                Answer::Failed(error) => return Err(error.to_string()),
            }
        }
    }

    fn decide(&self, access: &RunningAccess) -> Result<Granted, Refused> {
        if let Some(Err(reason)) = access.offered.as_ref().map(|offered| offered()) {
            return Err(Refused::new(reason, None));
        }
        let (policy, mut target) = (self.policy.load(), access.access.clone());
        let admitted = policy.admit(&mut target, &self.routes.load());
        let granted = admitted.and_then(|()| authorize(&policy.rules.in_force, &target.facts));
        granted.map_err(|denied| Refused::new(&denied, denied.rule()))
    }
}

/// What the cluster is asked about an access: accesses with the same have one question.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Right {
    user: Option<String>,
    node: Option<NodeName>,
    operation: Operation,
    method: Option<Method>,
}

impl Right {
    fn of(access: &RunningAccess) -> Self {
        Self {
            user: access.cluster_user.as_ref().map(|user| format!("{user:?}")),
            node: access.access.facts.node.clone(),
            operation: access.access.facts.operation,
            method: access.method.clone(),
        }
    }
}

/// The answer of the cluster.
enum Answer {
    Allowed,
    Denied(String),
    Failed(ReviewError),
}

/// Asks the authorization of the cluster about an access.
pub(super) async fn ask_cluster(
    ingress: &IngressContext,
    access: &RunningAccess,
    granted: &Granted,
) -> Result<(), Denied> {
    match review(ingress, access).await {
        Answer::Allowed => Ok(()),
        Answer::Denied(reason) => Err(denied(access, granted, reason)),
        Answer::Failed(error) => Err(denied(access, granted, error.to_string())),
    }
}

fn denied(access: &RunningAccess, granted: &Granted, reason: String) -> Denied {
    Denied::Cluster {
        rule: granted.rule.clone(),
        operation: access.access.facts.operation,
        reason,
    }
}

async fn review(ingress: &IngressContext, access: &RunningAccess) -> Answer {
    let facts = &access.access.facts;
    let operation = facts.operation;
    let (Some(method), Some(node)) = (&access.method, &facts.node) else {
        return Answer::Denied("it has rights for requests at nodes alone".to_owned());
    };
    let (Some(reviewer), Some(user)) = (&ingress.reviewer, &access.cluster_user) else {
        let text = "it knows callers with a certificate of its client CA, and reviewed ServiceAccount tokens that \
                    callers names";
        return Answer::Denied(text.to_owned());
    };
    match reviewer.allows(user, node, operation, method).await {
        Ok(true) => Answer::Allowed,
        Ok(false) => {
            let verb = operation.verb(method).unwrap_or("no verb");
            let subresources = operation.subresources().join(" nor nodes/");
            let name = one_line(&user.name);
            let text = format!("{name} may not {verb} nodes/{subresources} of {node}");
            Answer::Denied(text)
        }
        Err(error) => Answer::Failed(error),
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::Arc;

    use parking_lot::Mutex;
    use tokio::sync::Notify;
    use tokio::task::JoinSet;
    use tunnel_proto::wire::header::Target;
    use tunnel_proto::wire::name::Port;
    use tunnel_routing::destination::Destination;
    use tunnel_routing::operation::RequestedOperation;
    use tunnel_routing::policy::rules::{DestinationKind, Effect, Facts, Rule, RuleTable};
    use tunnel_routing::policy::{
        AccessCaller, CallerIdentity, Listener, OpenedBy, Policy, TargetAccess, UnreadToken,
    };

    use super::*;
    use crate::ingress::caller_addr::CallerAddr;
    use crate::ingress::dispatch::{IngressRequest, IngressTarget, grant_route};
    use crate::ingress::http::tests::fixture::Fixture;
    use crate::ingress::request_record::RequestRecord;
    use crate::outcome::Outcome;
    use crate::routing::access_review::{AccessReviewer, ClusterUser, ReviewRequest};
    use crate::testing::node;

    type RightAnswer = Result<bool, ReviewError>;

    /// Returns the context of a cluster that gives this answer to each question, which can change.
    fn context(answer: RightAnswer) -> (IngressContext, Arc<Mutex<RightAnswer>>, JoinSet<()>) {
        let mut ingress = IngressContext::clone(&Fixture::new().ingress);
        let (reviewer, mut queues) = AccessReviewer::new(None);
        ingress.reviewer = Some(reviewer);
        let rules = RuleTable {
            rules: vec![Rule::new("rbac", Effect::AskCluster)],
            ..RuleTable::default()
        };
        ingress.policy.replace(&Policy {
            rules: rules.into(),
            ..Policy::default()
        });
        let (answer, mut answering) = (Arc::new(Mutex::new(answer)), JoinSet::new());
        let of_cluster = answer.clone();
        answering.spawn(async move {
            while let Some(ReviewRequest::Access { answer, .. }) = queues.rights.recv().await {
                let _gone = answer.send(of_cluster.lock().clone());
            }
        });
        (ingress, answer, answering)
    }

    /// Returns the access of a user to the metrics of a kubelet.
    fn access(user: Option<&str>) -> RunningAccess {
        let facts = Facts {
            listener: Listener::Https,
            identity: CallerIdentity::Certificate("ops".into()),
            has_delegation: false,
            token: UnreadToken::None,
            source: None,
            kind: DestinationKind::Node,
            node: Some(node()),
            described: None,
            port: Port::new(10250),
            is_kubelet: true,
            operation: Operation::Metrics,
            without_upgrade: Operation::Metrics,
        };
        let opened_by = OpenedBy::Other;
        let target = TargetAccess { facts, opened_by };
        let mut access = RunningAccess::new(target, Arc::default());
        access.method = Some(Method::GET);
        access.cluster_user = user.map(|name| {
            Arc::new(ClusterUser {
                name: name.to_owned(),
                ..ClusterUser::default()
            })
        });
        access
    }

    fn granted() -> Granted {
        Granted {
            rule: "rbac".into(),
            asks_cluster: true,
        }
    }

    #[tokio::test]
    async fn only_the_answer_that_a_user_has_the_right_lets_a_caller_in() {
        let gone = ReviewError::Unavailable("gone".to_owned());
        for (answer, user, expected) in [
            (Ok(true), Some("ops"), None),
            (
                Ok(false),
                Some("ops"),
                Some("ops may not get nodes/metrics of "),
            ),
            (
                Err(gone),
                Some("ops"),
                Some("the API server cannot be asked: gone"),
            ),
            (Ok(true), None, Some("it knows callers with a certificate")),
        ] {
            let (ingress, _answer, _answering) = context(answer.clone());
            let asked = ask_cluster(&ingress, &access(user), &granted()).await;
            match (asked, expected) {
                (Ok(()), None) => {}
                (Err(Denied::Cluster { reason, .. }), Some(expected)) => {
                    assert!(reason.starts_with(expected), "{reason}");
                }
                (asked, _) => panic!("{answer:?} {user:?}: {asked:?}"),
            }
        }
        let (mut ingress, _answer, _answering) = context(Ok(true));
        ingress.reviewer = None;
        let asked = ask_cluster(&ingress, &access(Some("ops")), &granted()).await;
        assert!(asked.is_err(), "nobody can be asked");
    }

    #[tokio::test]
    async fn access_in_progress_ends_with_the_right_whatever_is_remembered_of_it() {
        let (ingress, answer, _answering) = context(Ok(true));
        let running = ingress.running.begin(access(Some("ops")));
        let asked = ask_cluster(&ingress, running.access(), &granted()).await;
        assert_eq!(asked, Ok(()), "remembered from here on");
        assert_eq!(ingress.end_refused().await, 0);
        *answer.lock() = Ok(false);
        assert_eq!(ingress.end_refused().await, 1);
        let reason = &running.refused().unwrap().reason;
        assert!(reason.contains("ops may not get nodes/metrics"), "{reason}");
    }

    #[tokio::test(start_paused = true)]
    async fn caller_with_too_many_questions_is_asked_about_again_and_ends_without_an_answer() {
        for (later, expected) in [
            (Ok(true), None),
            (Ok(false), Some("ops may not get nodes/metrics")),
            (Err(ReviewError::TooMany), Some(LATE)),
        ] {
            let (ingress, answer, _answering) = context(Err(ReviewError::TooMany));
            let running = ingress.running.begin(access(Some("ops")));
            let changing = async {
                sleep(REVIEW_PAUSE / 2).await;
                *answer.lock() = later;
            };
            let (ended, ()) = tokio::join!(ingress.end_refused(), changing);
            assert_eq!(ended, usize::from(expected.is_some()));
            let reason = running.refused().map_or("", |refused| &*refused.reason);
            assert!(reason.contains(expected.unwrap_or_default()), "{reason}");
        }
    }

    #[tokio::test]
    async fn access_in_progress_ends_when_the_cloud_has_its_target_no_more() {
        let (ingress, _answer, _answering) = context(Ok(true));
        let begin = |offered: Result<(), String>| {
            let mut access = access(Some("ops"));
            access.offered = Some(Box::new(move || offered.clone()));
            ingress.running.begin(access)
        };
        let offered = begin(Ok(()));
        let withdrawn = begin(Err("cloud has no such target".to_owned()));
        assert_eq!(ingress.end_refused().await, 1);
        assert!(offered.refused().is_none());
        let reason = &withdrawn.refused().unwrap().reason;
        assert!(reason.starts_with("cloud has no such target"), "{reason}");
    }

    #[tokio::test]
    async fn request_that_was_decided_by_the_previous_rules_is_decided_again() {
        let ingress = &Fixture::new().ingress;
        let service = Destination {
            node: node(),
            target: Target::Node(Port::new(22).unwrap()),
        };
        let policy = |services: Vec<Destination>| Policy {
            rules: RuleTable::yurt_tunnel().into(),
            services,
            ..Policy::default()
        };
        ingress.policy.replace(&policy(vec![service.clone()]));
        let began_with = ingress.policy.load();
        let addr = CallerAddr::Tcp((Ipv4Addr::LOCALHOST, 1).into());
        let mut record = RequestRecord::start("service", addr, "ssh", &ingress.metrics);
        let end_signal = Arc::new(Notify::new());
        let mut ask = async || {
            let request = IngressRequest {
                policy: &began_with,
                caller: AccessCaller {
                    listener: Listener::Service,
                    ..AccessCaller::ANONYMOUS
                },
                target: IngressTarget::TcpService(&service),
                operation: RequestedOperation::Connect,
                cluster_user: None,
                claimed: None,
                end_signal: &end_signal,
            };
            grant_route(ingress, request, &mut record).await
        };
        assert!(ask().await.is_ok());
        ingress.policy.replace(&policy(Vec::new()));
        let refused = ask().await.unwrap_err();
        assert_eq!(refused.outcome, Outcome::RefusedByPolicy);
    }
}
