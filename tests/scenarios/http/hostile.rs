//! Hostile targets (T12): the caller of each gets the answer that the contract specifies, the
//! server stays healthy, and no byte of a hostile target appears in another answer.

use std::io::{self, ErrorKind};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use tokio::time::timeout;
use tunnel_agent::config::TransportChoice;
use tunnel_tests::client::{
    BodyEnd, ByteStream, Endpoint, HttpReply, KeepAliveClient, RawRequest, request,
};
use tunnel_tests::env::{TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::targets::{HostileTarget, RecordingTarget};

use super::table::{TwoNodes, run_cases};
use behavior::{Answer, Behavior};

mod behavior;
mod bodies;
mod heads;

tests_of! {
    fn t12_each_hostile_behavior_has_its_answer_over_quic() = all_behaviors(TransportChoice::Quic);
    fn t12_each_hostile_behavior_has_its_answer_over_h2() = all_behaviors(TransportChoice::H2);
}

async fn all_behaviors(transport: TransportChoice) -> Result<()> {
    let site = Site::start(transport).await?;
    let behaviors = [heads::behaviors(), bodies::behaviors()].concat();
    assert!(behaviors.len() >= 60, "{} behaviors", behaviors.len());
    run_cases(
        &behaviors,
        |behavior| &behavior.name,
        async |behavior| site.run_case(behavior).await,
    )
    .await;
    let registry = site.nodes.env.registry();
    let session = registry.of_node(&"worker-1".parse()?).remove(0);
    eventually("no stream is left", WAIT_TIMEOUT, async || {
        let streams = session.session.stats().streams;
        (streams == 0).then_some(()).ok_or(streams)
    })
    .await;
    Ok(())
}

struct Site {
    nodes: TwoNodes,
    healthy: RecordingTarget,
}

impl Site {
    async fn start(transport: TransportChoice) -> Result<Self> {
        let nodes = TwoNodes::start_with(transport, |settings| {
            settings.limits = TestEnv::limits("{handshakeTimeout: 500ms, openTimeout: 2s}");
        });
        Ok(Self {
            nodes: nodes.await?,
            healthy: RecordingTarget::start("healthy").await?,
        })
    }

    /// Runs one hostile target. A caller requests it and then another node on the same connection,
    /// while another caller requests the other node. Afterwards no connection to the target is
    /// left.
    async fn run_case(&self, behavior: &Behavior) -> Result<()> {
        let target = behavior.start().await?;
        let endpoint = if behavior.tls {
            self.nodes.env.https("worker-1")?
        } else {
            self.nodes.env.http()
        };
        let host = format!("worker-1:{}", target.addr().port());
        let patience = scaled(WAIT_TIMEOUT + Duration::from_secs(5));
        let met = timeout(patience, self.meet(behavior, &target, endpoint, &host));
        let (met, second) = tokio::join!(met, self.healthy_answer(None));
        met.context("no end in time")??;
        second.context("another caller at the same time")?;
        let gone = async || (target.traffic().open() == 0).then_some(());
        let gone = eventually("the target's connections are gone", WAIT_TIMEOUT, gone);
        gone.await;
        Ok(())
    }

    async fn meet(
        &self,
        behavior: &Behavior,
        target: &HostileTarget,
        endpoint: Endpoint,
        host: &str,
    ) -> Result<()> {
        let asked = RawRequest::new(behavior.method, "/", host);
        if let Answer::None = behavior.answer {
            let mut stream = ByteStream::connect(endpoint).await?;
            let head = format!("{} / HTTP/1.1\r\nHost: {host}\r\n\r\n", behavior.method);
            stream.send(head.as_bytes()).await?;
            eventually("the target is reached", WAIT_TIMEOUT, async || {
                (target.traffic().requests() == 1).then_some(())
            })
            .await;
            // The caller leaves without an answer. The server closes the target's side at once.
            drop(stream);
            return Ok(());
        }
        let mut caller = KeepAliveClient::connect(endpoint.clone()).await?;
        let reply = caller.request(&asked).await;
        behavior.answer.check(&reply)?;
        // Bytes that the target sent after its answer belong to no other answer, neither on this
        // connection nor on another one.
        if reply.is_ok_and(|reply| reply.header("connection") != Some("close")) && !behavior.tls {
            match self.healthy_answer(Some(&mut caller)).await {
                Ok(()) => {}
                // The server may close the connection, but it must not send a wrong answer.
                Err(error) => ensure!(is_end(&error), "the next answer: {error:#}"),
            }
        }
        let again = request(endpoint, &asked).await;
        behavior.answer.check(&again).context("asked again")
    }

    /// Requests the healthy target of the other node, on a new connection or on `caller`'s.
    async fn healthy_answer(&self, caller: Option<&mut KeepAliveClient>) -> Result<()> {
        let host = format!("worker-2:{}", self.healthy.addr().port());
        let get = RawRequest::new("GET", "/good", &host);
        let reply = match caller {
            Some(caller) => caller.request(&get).await?,
            None => {
                let mut own = KeepAliveClient::connect(self.nodes.env.http()).await?;
                own.request(&get).await?
            }
        };
        ensure!(
            reply.status == 200 && reply.text() == "GET /good by healthy\n",
            "{} {:?}",
            reply.status,
            reply.text()
        );
        Ok(())
    }
}

impl Behavior {
    async fn start(&self) -> Result<HostileTarget> {
        if self.tls && self.speaks_tls {
            HostileTarget::start_tls(self.actions.clone()).await
        } else {
            HostileTarget::start(self.actions.clone()).await
        }
    }
}

impl Answer {
    fn check(&self, reply: &Result<HttpReply>) -> Result<()> {
        let answer = || reply.as_ref().map_err(|error| anyhow!("{error:#}"));
        let check_error = |status: u16, codes: &[&str]| -> Result<()> {
            let reply = answer()?;
            let code = reply.header("x-tunnel-error").unwrap_or("none");
            ensure!(
                reply.status == status && codes.contains(&code),
                "{} {code} {}",
                reply.status,
                reply.text()
            );
            let text = reply.text();
            ensure!(
                text.contains("worker-1") && text.lines().count() == 1,
                "{text:?}"
            );
            Ok(())
        };
        match self {
            Self::None => Ok(()),
            Self::ServerError(status, codes) => check_error(*status, codes),
            Self::Passed(status, body) => {
                let reply = answer()?;
                ensure!(
                    reply.status == *status && reply.text() == *body && reply.ended.is_clean(),
                    "{} {:?} {:?}",
                    reply.status,
                    reply.text(),
                    reply.ended
                );
                ensure!(
                    reply.header("x-tunnel-error").is_none(),
                    "a forged field was passed"
                );
                Ok(())
            }
            Self::Cut => match reply {
                Ok(reply) if reply.status == 200 => {
                    let ended = &reply.ended;
                    ensure!(matches!(ended, BodyEnd::Reset(_)), "{ended:?}");
                    Ok(())
                }
                // The server had not forwarded any part of the answer yet.
                Ok(_) => check_error(502, &["target_bad_response"]),
                Err(error) => {
                    ensure!(is_end(error), "{error:#}");
                    Ok(())
                }
            },
            Self::PassedOrCut(status, body) => match reply {
                Ok(reply) if reply.ended.is_clean() && reply.status == *status => {
                    Self::Passed(*status, body).check(&Ok(reply.clone()))
                }
                Ok(_) | Err(_) => Self::Cut.check(reply),
            },
        }
    }
}

/// Returns whether the connection ended or was reset, in contrast to any other failure.
fn is_end(error: &anyhow::Error) -> bool {
    let ends = [
        ErrorKind::ConnectionReset,
        ErrorKind::UnexpectedEof,
        ErrorKind::BrokenPipe,
    ];
    let mut causes = error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>());
    let text = error.to_string();
    causes.any(|cause| ends.contains(&cause.kind()))
        || text.contains("an earlier answer ended this connection")
}
