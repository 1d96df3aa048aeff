//! An agent that opens streams to a target of the cloud as fast as the server lets it.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Result;
use tunnel_proto::transport::TransportKind;
use tunnel_tests::scripted::StreamFlood;

use super::listening;
use super::transport_relay::Kind;

/// Opens streams until the process is killed. Those that the server accepts stay open.
#[derive(Debug, clap::Args)]
pub(crate) struct HostileAgent {
    kind: Kind,
    /// Data directory of the server, for its CA.
    data: PathBuf,
    /// Address of the server's listener for agents.
    server: SocketAddr,
    /// Name of the target.
    target: String,
}

impl HostileAgent {
    pub(crate) async fn run(self) -> Result<()> {
        let transport = match self.kind {
            Kind::Quic => TransportKind::Quic,
            Kind::H2 => TransportKind::H2,
        };
        let mut flood = StreamFlood::connect(self.server, &self.data, NODE, transport).await?;
        flood.open(&self.target, FIRST).await?;
        // The parent process waits for this line. This process does not listen.
        listening(self.server)?;
        loop {
            flood.open(&self.target, STREAMS).await?;
        }
    }
}

/// Name of the node, which is not that of the measured agent.
const NODE: &str = "hostile-1";
/// More streams than the server accepts at once.
const FIRST: usize = 300;
const STREAMS: usize = 10_000;
