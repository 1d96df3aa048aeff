//! The relays and the peer that Culvert is compared with.

use std::net::SocketAddr;
use std::path::Path;

use anyhow::{Context, Result};
use tunnel_tests::process::{Process, Program, ScratchDir};

use super::{Edge, START, free_address, plain, to_args};
use crate::components;

/// Two relays in a row: the cloud end, which accepts callers, and the edge end, which dials the
/// plain edge service.
#[derive(Debug)]
pub(super) struct RelayPair {
    pub(super) name: &'static str,
    pub(super) server: Process,
    pub(super) agent: Process,
    pub(super) address: SocketAddr,
}

impl RelayPair {
    /// Starts both ends. The arguments of an end are `verb`, the address that the end dials, and
    /// those in `more` for the agent's end and for the server's end.
    pub(super) async fn start(
        name: &'static str,
        verb: &[&str],
        target: SocketAddr,
        more: [&[&str]; 2],
    ) -> Result<Self> {
        let start = async |to: SocketAddr, more: &[&str]| {
            let to = to.to_string();
            components::start(&to_args(&[verb, &[to.as_str()], more].concat())).await
        };
        let (agent, at_agent) = start(target, more[0]).await?;
        let (server, address) = start(at_agent, more[1]).await?;
        Ok(Self {
            name,
            server,
            agent,
            address,
        })
    }
}

/// rathole with its Noise transport, which needs no certificates, and one service that leads to the
/// plain edge service.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) server: Process,
    pub(super) agent: Process,
    pub(super) endpoint: SocketAddr,
    _scratch: ScratchDir,
}

impl Peer {
    pub(super) async fn start(binary: &Path, edge: &Edge) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let (control, endpoint) = (free_address()?, free_address()?);
        let keys = Program::at(binary).arg("--genkey").run().await?.ok()?;
        let key = |label: &str| {
            let mut lines = keys.lines().skip_while(|line| !line.starts_with(label));
            lines
                .nth(1)
                .map(str::trim)
                .context("rathole prints no keys")
        };
        let (private, public) = (key("Private")?, key("Public")?);
        let server = format!(
            "[server]\nbind_addr = \"{control}\"\ndefault_token = \"bench\"\n[server.transport]\ntype = \"noise\"\n\
             [server.transport.noise]\nlocal_private_key = \"{private}\"\n[server.services.edge]\nbind_addr = \"{endpoint}\"\n"
        );
        let agent = format!(
            "[client]\nremote_addr = \"{control}\"\ndefault_token = \"bench\"\n[client.transport]\ntype = \"noise\"\n\
             [client.transport.noise]\nremote_public_key = \"{public}\"\n[client.services.edge]\nlocal_addr = \"{}\"\n",
            edge.plain_address
        );
        let run = |role: &str, text: String| -> Result<Process> {
            let file = scratch.file(&format!("{role}.toml"), text)?;
            Program::at(binary)
                .arg(format!("--{role}"))
                .arg(file)
                .start()
        };
        let (server, agent) = (run("server", server)?, run("client", agent)?);
        crate::load::probe(&plain(endpoint), START)
            .await
            .context("rathole")?;
        Ok(Self {
            server,
            agent,
            endpoint,
            _scratch: scratch,
        })
    }
}
