//! What several tests use.

use std::fmt::Display;

use crate::destination::{AgentTarget, RequestedDestination, RequestedNode};
use crate::operation::RequestedOperation;
use crate::policy::{Access, AccessCaller, Denied, PortPolicy, Route, locate};

/// Returns the route of an access, if the ports allow one.
pub(crate) fn located<D>(ports: &PortPolicy, access: Access<'_, D>) -> Result<Route<D>, Denied> {
    let located = locate(ports, access)?;
    ports.check(&located.access)?;
    Ok(located.route)
}

/// Returns the target on a node, if the ports allow one.
pub(crate) fn located_node(
    ports: &PortPolicy,
    caller: AccessCaller<'_>,
    requested: RequestedNode,
) -> Result<AgentTarget, Denied> {
    let access = Access {
        caller,
        destination: RequestedDestination::<()>::Node(requested),
        operation: RequestedOperation::Connect,
    };
    match located(ports, access)? {
        Route::Agent(target) => Ok(target),
        Route::Direct(()) => unreachable!("a node has an agent"),
    }
}

/// Checks that `text` contains `part`.
#[track_caller]
pub(crate) fn assert_contains(text: &(impl Display + ?Sized), part: &str) {
    let text = text.to_string();
    assert!(text.contains(part), "{part:?} is not in {text:?}");
}
