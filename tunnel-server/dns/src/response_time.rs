//! The time that other resolvers take to answer, for `doctor`.

use std::net::SocketAddr;
use std::time::Duration;

use futures_util::future::join_all;
use hickory_proto::rr::Name;
use tokio::time::Instant;

use super::answer::Transport;
use super::host_resolvers::HostResolvers;
use super::loop_detection::question;
use super::{DnsSettings, Resolvers, upstream};

/// Asks the resolvers to which queries are forwarded for the root, all at the same time. Returns
/// the time until the answer of each, or `None` if there was no answer in 2 s.
///
/// # Errors
/// Returns the reason why this host names no resolver other than the server.
pub async fn response_times(
    settings: &DnsSettings,
) -> Result<Vec<(SocketAddr, Option<Duration>)>, String> {
    let mut resolvers = match &settings.default_resolvers {
        Resolvers::Host => {
            let host = HostResolvers::of_host(settings.listen);
            if let Some(condition) = host.condition() {
                return Err(condition.clone());
            }
            host.used().to_vec()
        }
        Resolvers::These(resolvers) => resolvers.clone(),
    };
    resolvers.truncate(RESOLVERS_MAX);
    let asking = resolvers.into_iter().map(async |resolver| {
        let (started, message) = (Instant::now(), question(Name::root()));
        let answer = upstream::resolve(&[resolver], &message, Transport::Udp, LIMIT).await;
        (resolver, answer.map(|_message| started.elapsed()))
    });
    Ok(join_all(asking).await)
}

/// Maximum number of resolvers that are asked. A host has at most three.
const RESOLVERS_MAX: usize = 8;
/// Clients ask again, or elsewhere, after a few seconds.
const LIMIT: Duration = Duration::from_secs(2);
