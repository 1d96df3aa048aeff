//! A hostile agent that opens streams to a target of the cloud as fast as the server lets it.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::io::AsyncWriteExt;
use tokio::task::{JoinError, JoinSet};
use tunnel_proto::transport::{Stream, TransportKind, find_cause};
use tunnel_proto::wire::code::RefusalCode;
use tunnel_proto::wire::header::{Refusal, StreamHeader, StreamKind};

use super::ScriptedAgent;

/// The hostile agent, with one session. The streams that the server accepts stay open until
/// [`StreamFlood::release`].
#[derive(Debug)]
pub struct StreamFlood {
    agent: ScriptedAgent,
    accepted: Vec<Stream>,
    refused: usize,
}

/// The server's answer to a stream, which is dropped if the server refused it.
type Answer = Result<Stream, std::io::Error>;

impl StreamFlood {
    /// Connects the agent by the CA in the server's data directory.
    pub async fn connect(
        server: SocketAddr,
        data_dir: &Path,
        node: &str,
        transport: TransportKind,
    ) -> Result<Self> {
        Ok(Self {
            agent: ScriptedAgent::connect_to(server, data_dir, node, transport).await?,
            accepted: Vec::new(),
            refused: 0,
        })
    }

    /// Opens streams, sends one byte on each, and waits until the server has answered all of them.
    ///
    /// # Errors
    /// Returns an error if the session ends, or if an answer is neither an acceptance nor
    /// `too_many_streams`.
    pub async fn open(&mut self, target: &str, count: usize) -> Result<()> {
        let header = StreamHeader::new(StreamKind::Cloud(target.parse()?));
        let mut answers: JoinSet<Answer> = JoinSet::new();
        for _ in 0..count {
            let mut stream = self.agent.session.open(&header, REPLY_TIMEOUT).await?;
            answers.spawn(async move {
                // The server may have refused the stream before the byte is sent.
                let _refused = stream.write_all(&[0]).await;
                stream.accepted().await.map(|_dialed| ())?;
                Ok(stream)
            });
            while let Some(answer) = answers.try_join_next() {
                self.count(answer)?;
            }
        }
        while let Some(answer) = answers.join_next().await {
            self.count(answer)?;
        }
        Ok(())
    }

    fn count(&mut self, answer: Result<Answer, JoinError>) -> Result<()> {
        match answer.context("the task of a stream")? {
            Ok(stream) => self.accepted.push(stream),
            Err(error) => {
                let refusal = find_cause::<Refusal>(&error);
                let is_expected =
                    refusal.is_some_and(|refusal| refusal.code == RefusalCode::TooManyStreams);
                ensure!(is_expected, "{error}");
                self.refused += 1;
            }
        }
        Ok(())
    }

    /// Resets the streams that are open.
    pub fn release(&mut self) {
        self.accepted.clear();
    }

    /// Returns the number of streams that are open.
    pub fn accepted(&self) -> usize {
        self.accepted.len()
    }

    /// Returns the number of streams that the server refused with `too_many_streams`.
    pub fn refused(&self) -> usize {
        self.refused
    }
}

/// Longer than the server's limits on dials.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);
