//! The end of the path of a request: bytes between a caller and its target, and the entry in the
//! access log.

use tokio::io::{AsyncRead, AsyncWrite};
use tracing::debug;
use tunnel_proto::relay::RelayEnd;

use super::access_log::ExchangeGuard;
use super::caller_stream::discard_input;
use super::error::ProxyError;
use super::outcome::Outcome;
use super::tunnel::Tunnel;

/// Relays bytes in both directions once the caller has the response that grants the tunnel.
pub(super) async fn relay_granted<C, E>(
    caller: impl Future<Output = Result<C, E>>,
    tunnel: Tunnel,
    exchange_guard: ExchangeGuard,
) where
    C: AsyncRead + AsyncWrite + Send + Unpin,
    E: std::fmt::Display,
{
    match caller.await {
        Ok(caller) => relay_tunnel(caller, tunnel, exchange_guard).await,
        Err(error) => debug!(%error, "caller disconnected before the tunnel was open"),
    }
}

/// Relays bytes in both directions until both have ended or one is reset, and records the outcome.
/// Half-closes are forwarded. A reset of one side resets the other.
pub(super) async fn relay_tunnel<C>(
    mut caller: C,
    mut tunnel: Tunnel,
    exchange_guard: ExchangeGuard,
) where
    C: AsyncRead + AsyncWrite + Send + Unpin,
{
    // Dropped before the caller's connection, so that an aborted relay ends in a reset.
    let mut exchange_guard = exchange_guard;
    match tunnel.relay(&mut caller).await {
        RelayEnd::Clean => {
            tunnel.finish();
            exchange_guard.finish();
        }
        RelayEnd::ReaderClosed(side) => {
            debug!(?side, "{} ended with unread bytes", tunnel.name());
            exchange_guard.access_log.set_outcome(Outcome::Cut);
            tunnel.finish();
            discard_input(&mut caller).await;
            exchange_guard.response_guard.finish();
        }
        RelayEnd::Cut(side, error) => {
            debug!(?side, %error, "{} was reset", tunnel.name());
            let access_log = &mut exchange_guard.access_log;
            match &tunnel {
                Tunnel::Agent(_) | Tunnel::Direct(_) | Tunnel::Upgraded(_) => {
                    access_log.set_outcome(Outcome::Cut);
                }
                // The error can be the agent's refusal.
                Tunnel::Pending { target_label, .. } => {
                    access_log.fail(&ProxyError::from_stream(&error, target_label, Outcome::Cut))
                }
            }
        }
    }
}
