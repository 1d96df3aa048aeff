//! Decides again about accesses in progress, after a change of the rules, and asks the cluster where a rule does.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};
use tunnel_proto::wire::header::one_line;

use super::context::IngressContext;
use crate::routing::access_review::ReviewError;
use crate::running::RunningAccess;
use tunnel_routing::policy::rules::DestinationKind;
use tunnel_routing::policy::{Denied, Granted, authorize};

/// Time within which the cluster has to allow what a rule asks it about.
const REVIEW_TIME: Duration = Duration::from_secs(6);
/// Time until the cluster is asked again about a caller with too many questions.
const REVIEW_PAUSE: Duration = Duration::from_secs(1);

impl IngressContext {
    /// Decides about all accesses in progress by the policy in force, and ends those that it refuses. Returns
    /// their number.
    pub async fn end_refused(&self) -> usize {
        let (mut ended, mut questions) = (0, Vec::new());
        for (number, access) in self.running.all() {
            match self.decide(&access) {
                Ok(granted) if granted.asks_cluster => questions.push((number, access, granted)),
                Ok(_) => {}
                Err(denied) => ended += usize::from(self.running.end(number, denied)),
            }
        }
        let deadline = Instant::now() + REVIEW_TIME;
        for (number, access, granted) in questions {
            let asked = timeout_at(deadline, self.ask_patiently(&access, &granted)).await;
            let refused = match asked {
                Ok(answered) => answered.err().map(|denied| denied.to_string()),
                Err(_elapsed) => Some(format!(
                    "rule {}: the cluster has not answered",
                    granted.rule
                )),
            };
            ended += usize::from(refused.is_some_and(|why| self.running.end(number, why)));
        }
        ended
    }

    /// Asks the cluster, again if a caller has too many questions at once.
    async fn ask_patiently(&self, access: &RunningAccess, granted: &Granted) -> Result<(), Denied> {
        loop {
            match ask_cluster(self, access, granted).await {
                Err(Denied::Cluster { reason, .. })
                    if reason == ReviewError::TooMany.to_string() =>
                {
                    sleep(REVIEW_PAUSE).await;
                }
                answered => return answered,
            }
        }
    }

    /// Decides about an access by the policy in force.
    pub(super) async fn decide_again(&self, access: &RunningAccess) -> Result<(), Denied> {
        match self.decide(access)? {
            granted if granted.asks_cluster => ask_cluster(self, access, &granted).await,
            _ => Ok(()),
        }
    }

    fn decide(&self, access: &RunningAccess) -> Result<Granted, Denied> {
        let mut facts = access.facts.clone();
        let policy = self.policy.load();
        facts.has_delegation &= policy.delegation.still_admits(&facts.identity);
        if let (DestinationKind::Node, false, Some(node), Some(port)) =
            (facts.kind, facts.is_kubelet, &facts.node, facts.port)
        {
            let open = policy.ports.target(port, facts.listener);
            open.map_err(|refusal| Denied::Port(node.clone(), port, refusal))?;
        }
        let rules = &policy.rules;
        rules.in_force.describe(&mut facts, &self.routes.load());
        authorize(&rules.in_force, &facts)
    }
}

/// Asks the authorization of the cluster about an access.
pub(super) async fn ask_cluster(
    ingress: &IngressContext,
    access: &RunningAccess,
    granted: &Granted,
) -> Result<(), Denied> {
    let operation = access.facts.operation;
    let denied = |reason: String| Denied::Cluster {
        rule: granted.rule.clone(),
        operation,
        reason,
    };
    let (Some(method), Some(node)) = (&access.method, &access.facts.node) else {
        let text = "it has rights for requests at nodes alone";
        return Err(denied(text.to_owned()));
    };
    let (Some(reviewer), Some(user)) = (&ingress.reviewer, &access.cluster_user) else {
        let text = "it knows callers with a certificate of its client CA, and reviewed ServiceAccount tokens that \
                    callers names";
        return Err(denied(text.to_owned()));
    };
    match reviewer.allows(user, node, operation, method).await {
        Ok(true) => Ok(()),
        Ok(false) => {
            let verb = operation.verb(method).unwrap_or("no verb");
            let subresources = operation.subresources().join(" nor nodes/");
            let name = one_line(&user.name);
            Err(denied(format!(
                "{name} may not {verb} nodes/{subresources} of {node}"
            )))
        }
        Err(error) => Err(denied(error.to_string())),
    }
}
