//! Where a request goes and whether it may: routes, decision, policy, dial policy and the directory of
//! other servers. Pure functions over values: no socket, no clock and no task, and errors of the domain
//! that know no HTTP response. The server has the listeners, the sessions and what changes in use.

pub mod decision;
pub mod destination;
pub mod dial_policy;
pub mod directory;
pub mod operation;
pub mod pod;
pub mod policy;
pub mod routes;

#[cfg(test)]
mod testing;
