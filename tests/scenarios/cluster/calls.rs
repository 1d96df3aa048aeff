//! Callers that send about 100 requests a second to the servers of an [`Installation`], on new and
//! on reused connections.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tunnel_tests::client::{HttpReply, KeepAliveClient, RawRequest, request};
use tunnel_tests::eventually::scaled;

use super::replicas::{Backend, Installation};

/// Callers that send requests in a row, half of them on new connections. Each caller asks all nodes
/// in turn.
pub(super) struct Calling {
    stop: CancellationToken,
    callers: JoinSet<Calls>,
}

/// The requests of a caller.
#[derive(Default)]
pub(super) struct Calls {
    answered: usize,
    failures: Vec<String>,
}

impl Calling {
    pub(super) fn start(site: &Installation) -> Self {
        let (stop, mut callers) = (CancellationToken::new(), JoinSet::new());
        let port = site.kubelet.addr().port();
        let hosts = site.nodes.iter().map(|node| format!("{node}:{port}"));
        let hosts: Vec<_> = hosts.collect();
        for number in 0..CALLERS {
            let caller = Caller {
                backends: site.backends.subscribe(),
                hosts: hosts.clone(),
                sent: number,
            };
            let is_new = number.is_multiple_of(2);
            callers.spawn(caller.run(is_new, stop.clone()));
        }
        Self { stop, callers }
    }

    pub(super) async fn end(self) -> Result<Calls> {
        self.stop.cancel();
        let mut all = Calls::default();
        for calls in self.callers.join_all().await {
            all.answered += calls.answered;
            all.failures.extend(calls.failures);
        }
        Ok(all)
    }
}

impl Calls {
    /// Fails unless all requests were answered with the right bytes.
    pub(super) fn check(&self) -> Result<()> {
        let (count, first) = (self.failures.len(), self.failures.first());
        ensure!(
            count == 0,
            "{count} failed and {} succeeded; the first: {first:?}",
            self.answered
        );
        ensure!(self.answered > 100, "{} requests", self.answered);
        Ok(())
    }
}

struct Caller {
    backends: watch::Receiver<Vec<Backend>>,
    hosts: Vec<String>,
    /// Number of requests so far, from a different start for each caller.
    sent: usize,
}

impl Caller {
    async fn run(mut self, is_new: bool, stop: CancellationToken) -> Calls {
        let mut calls = Calls::default();
        let mut connection = None;
        while !stop.is_cancelled() {
            let asked = async {
                if is_new {
                    self.ask_once().await
                } else {
                    self.ask_on(&mut connection).await
                }
            };
            let answer = timeout(scaled(CALL_TIMEOUT), asked).await;
            match answer.context("no answer").flatten().and_then(check) {
                Ok(()) => calls.answered += 1,
                Err(error) => calls.failures.push(format!("{error:#}")),
            }
            sleep(CALL_PAUSE).await;
        }
        calls
    }

    /// Sends a request on a new connection to the next server.
    async fn ask_once(&mut self) -> Result<HttpReply> {
        let (endpoint, page) = self.next_request()?;
        request(endpoint, &page.header("Connection", "close")).await
    }

    /// Sends a request on the connection, or on a new one if the last answer asked to close it.
    async fn ask_on(&mut self, connection: &mut Option<KeepAliveClient>) -> Result<HttpReply> {
        let (endpoint, page) = self.next_request()?;
        let mut client = match connection.take() {
            Some(client) => client,
            None => KeepAliveClient::connect(endpoint).await?,
        };
        let reply = client.request(&page).await?;
        let is_closing =
            (reply.header("connection")).is_some_and(|value| value.eq_ignore_ascii_case("close"));
        if !is_closing {
            *connection = Some(client);
        }
        Ok(reply)
    }

    /// Returns the next request and the address of a server.
    fn next_request(&mut self) -> Result<(SocketAddr, RawRequest)> {
        self.sent += 1;
        let endpoint = {
            let backends = self.backends.borrow();
            let next = backends.get(self.sent % backends.len().max(1));
            next.map(|backend| backend.http)
        };
        let host = self.hosts.get(self.sent % self.hosts.len().max(1));
        let path = format!("/size/2000?seed={}", self.sent);
        let page = RawRequest::new("GET", &path, host.context("no node")?);
        Ok((endpoint.context("no server")?, page))
    }
}

/// Fails unless the answer is a whole page.
fn check(reply: HttpReply) -> Result<()> {
    ensure!(reply.status == 200, "{}: {}", reply.status, reply.text());
    let expected = reply.header("x-sha256");
    ensure!(expected == Some(reply.sha256().as_str()), "wrong bytes");
    Ok(())
}

/// With a pause of 80 ms, these send about 100 requests a second.
const CALLERS: usize = 8;
const CALL_PAUSE: Duration = Duration::from_millis(80);
/// Time after which a call counts as failed.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
