//! The memory of a directory with the nodes of another server.

use std::io::Write;
use std::time::SystemTime;

use anyhow::{Result, ensure};
use tunnel_proto::wire::name::{InstanceId, ReplicaId};
use tunnel_proto::wire::peer::HeldNode;
use tunnel_routing::directory::Directory;
use tunnel_tests::process::Peering;

use super::agents::node_name;
use crate::machine::anonymous_kib;

/// Nodes that are announced at once, about as many as one message has.
const ANNOUNCED: usize = 500;

/// Fills a directory as another server announces its nodes, and prints the bytes of each entry.
#[derive(Debug, clap::Args)]
pub(crate) struct FillDirectory {
    nodes: usize,
}

impl FillDirectory {
    pub(crate) fn run(&self) -> Result<()> {
        let replica: ReplicaId = Peering::name(1).parse()?;
        let mut directory = Directory::new(self.nodes);
        let before = anonymous_kib(std::process::id());
        for first in (0..self.nodes).step_by(ANNOUNCED) {
            let mut announced = Vec::with_capacity(ANNOUNCED);
            for number in first..self.nodes.min(first + ANNOUNCED) {
                announced.push(HeldNode {
                    node: node_name(number).parse()?,
                    instance: InstanceId::new(rand::random()),
                    since: SystemTime::now(),
                });
            }
            directory.apply(&replica, announced, &[]);
        }
        let grown = anonymous_kib(std::process::id()) - before;
        ensure!(directory.nodes() == self.nodes, "nodes were ignored");
        #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
        let each = grown * 1024.0 / self.nodes as f64;
        writeln!(std::io::stdout(), "{each}")?;
        Ok(())
    }
}
