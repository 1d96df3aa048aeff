//! Standalone servers that are peers, as processes or in this process: they share a CA, and know
//! each other's addresses.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use tunnel_server::config::RawConfig;

use super::culvert::CONNECT;
use super::{Listener, Server, ServerSetup, next_loopback};
use crate::env::TestEnv;
use crate::eventually::eventually;
use crate::metrics::metric;

/// The names, directories and addresses of servers that are connected to each other.
#[derive(Debug)]
pub struct Peering {
    folder: PathBuf,
    addresses: Vec<Ipv4Addr>,
}

impl Peering {
    /// Plans `count` servers of this process.
    pub fn in_process(count: usize) -> Self {
        Self::new(count, Path::new(""))
    }

    /// Plans `count` servers with their data below `folder`.
    pub fn new(count: usize, folder: &Path) -> Self {
        Self {
            folder: folder.to_owned(),
            addresses: (0..count).map(|_| next_loopback()).collect(),
        }
    }

    /// Starts the servers in this process and waits until each is connected to all others.
    pub async fn start_in_process(
        &self,
        change: impl Fn(usize, &mut RawConfig),
    ) -> Result<Vec<TestEnv>> {
        let count = self.addresses.len();
        let mut servers: Vec<TestEnv> = Vec::new();
        for number in 0..count {
            let first = servers.first().map(|first| first.path().join("server"));
            let mut copied = Ok(());
            let server = TestEnv::start_with(|settings| {
                if count > 1 {
                    settings.replica_name = Some(Self::name(number));
                    settings.peer_listen = Some(self.address(number, Listener::Peers).to_string());
                    settings.peers = (0..count).map(|other| self.peer(other)).collect();
                }
                if let Some(first) = first {
                    let own = settings.data_dir.as_deref().unwrap_or_default();
                    copied = copy_ca(&first, own.as_ref());
                }
                change(number, settings);
            });
            servers.push(server.await?);
            copied?;
        }
        wait_for_links(servers.iter().map(|server| server.meta())).await;
        Ok(servers)
    }

    /// Returns the name of a server: `s0`, `s1` and so on.
    pub fn name(number: usize) -> String {
        format!("s{number}")
    }

    /// Returns the address of a listener of a server, also before the server has started.
    pub fn address(&self, number: usize, listener: Listener) -> SocketAddr {
        listener.on(self.addresses[number])
    }

    /// Returns the setup of a server. The first one creates the CA, so it must have started before
    /// the setup of another one is made.
    pub fn setup(&self, number: usize) -> Result<ServerSetup> {
        let (data, name) = (self.data_dir(number), Self::name(number));
        let setup = ServerSetup::on_address(&data, self.addresses[number]);
        if self.addresses.len() == 1 {
            return Ok(setup);
        }
        if number > 0 {
            copy_ca(&self.data_dir(0), &data)?;
        }
        let listen = self.address(number, Listener::Peers).to_string();
        let setup = setup.args(&["--replica-name", &name, "--peer-listen", &listen]);
        Ok((0..self.addresses.len()).fold(setup, |setup, other| {
            setup.args(&["--peer", &self.peer(other)])
        }))
    }

    fn peer(&self, number: usize) -> String {
        let address = self.address(number, Listener::Peers);
        format!("{}={address}", Self::name(number))
    }

    fn data_dir(&self, number: usize) -> PathBuf {
        self.folder.join(Self::name(number))
    }

    /// Waits until each of the servers is connected to all others.
    pub async fn wait_until_connected(servers: &[Server]) {
        wait_for_links(servers.iter().map(|server| server.address(Listener::Meta))).await;
    }
}

/// Waits until each of the servers with these meta ports is connected to all others.
async fn wait_for_links(metas: impl ExactSizeIterator<Item = SocketAddr>) {
    let others = metas.len() as u64 - 1;
    for meta in metas {
        eventually("the servers' connections", CONNECT, async || {
            let connected = metric(meta, "tunnel_server_peers{state=\"connected\"}").await?;
            ensure!(connected == others, "{meta}: {connected} of {others}");
            Ok(())
        })
        .await;
    }
}

/// Copies the CA of a data directory to one that no server has used.
pub fn copy_ca(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir(to)?;
    fs::set_permissions(to, fs::Permissions::from_mode(0o700))?;
    for file in ["ca.crt", "ca.key"] {
        fs::copy(from.join(file), to.join(file))?;
    }
    Ok(())
}
