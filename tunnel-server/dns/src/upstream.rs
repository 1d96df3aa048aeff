//! Forwarding to other resolvers: in order, starting the next one while a slow one is still
//! pending, until one of them answers.

use std::net::SocketAddr;
use std::time::Duration;

use hickory_net::runtime::TokioRuntimeProvider;
use hickory_net::tcp::TcpClientStream;
use hickory_net::udp::UdpClientStream;
use hickory_net::xfer::{DnsExchange, DnsRequestSender as _, FirstAnswer as _};
use hickory_net::{DnsHandle as _, DnsMultiplexer, NetError};
use hickory_proto::op::{DnsRequest, DnsRequestOptions, DnsResponse, Message, ResponseCode};
use tokio::time::timeout;
use tracing::debug;
use tunnel_proto::dial::staggered;

use super::answer::Transport;

/// Returns the first good answer of `resolvers` within `budget`. If there is none, returns a bad
/// answer if any resolver sent one.
///
/// Cancel-safe: dropping the future stops all work.
pub(super) async fn resolve(
    resolvers: &[SocketAddr],
    message: &Message,
    transport: Transport,
    budget: Duration,
) -> Option<Message> {
    let attempts = resolvers.iter().map(async |resolver| {
        let answer = query_resolver(*resolver, message.clone(), transport, budget).await;
        match answer {
            Some(answer) if is_good(&answer) => Ok(answer),
            bad => Err(bad),
        }
    });
    match timeout(budget, staggered(attempts, HEAD_START)).await {
        Ok(Ok(answer)) => Some(answer),
        Ok(Err(bad)) => bad.into_iter().flatten().next_back(),
        Err(_elapsed) => None,
    }
}

/// Another resolver may have a better answer than SERVFAIL or REFUSED.
fn is_good(answer: &Message) -> bool {
    let code = answer.metadata.response_code;
    !matches!(code, ResponseCode::ServFail | ResponseCode::Refused)
}

async fn query_resolver(
    resolver: SocketAddr,
    message: Message,
    transport: Transport,
    budget: Duration,
) -> Option<Message> {
    let mut options = DnsRequestOptions::default();
    options.retry_interval = RETRY;
    let request = DnsRequest::new(message, options);
    let answer = match transport {
        Transport::Udp => query_udp(resolver, request, budget).await,
        Transport::Tcp => query_tcp(resolver, request, budget).await,
    };
    match answer {
        Ok(answer) => Some(answer.into_message()),
        Err(error) => {
            debug!(%resolver, %error, "resolver did not answer");
            None
        }
    }
}

/// Each attempt uses its own source port, so that answers are hard to forge.
async fn query_udp(
    resolver: SocketAddr,
    request: DnsRequest,
    budget: Duration,
) -> Result<DnsResponse, NetError> {
    let retry = u64::try_from(RETRY.as_millis()).unwrap_or(u64::MAX);
    UdpClientStream::builder(resolver, TokioRuntimeProvider::default())
        .with_timeout(Some(budget))
        .with_max_retries(TRIES)
        .with_retry_interval_floor(retry)
        .build()
        .send_message(request)
        .first_answer()
        .await
}

async fn query_tcp(
    resolver: SocketAddr,
    request: DnsRequest,
    budget: Duration,
) -> Result<DnsResponse, NetError> {
    let provider = TokioRuntimeProvider::default();
    let (connecting, sender) = TcpClientStream::new(resolver, None, Some(budget), provider);
    let multiplexer = DnsMultiplexer::new(connecting.await?, sender).with_timeout(budget);
    let (exchange, connection) = DnsExchange::<TokioRuntimeProvider>::from_stream(multiplexer);
    let answer = exchange.send(request).first_answer();
    tokio::pin!(answer);
    tokio::select! {
        biased;
        answer = &mut answer => answer,
        () = connection => answer.await,
    }
}

/// Time before the next resolver is asked as well. Most resolvers answer sooner, and a dead one
/// leaves most of the budget to the next one.
const HEAD_START: Duration = Duration::from_millis(150);
/// A lost datagram is sent again well within the budget.
const RETRY: Duration = Duration::from_millis(120);
const TRIES: u8 = 3;
