//! Standalone servers that are peers: they share a CA, and know each other's addresses.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};

use super::culvert::CONNECT;
use super::{Listener, Server, ServerSetup, next_loopback};
use crate::eventually::eventually;

/// The names, directories and addresses of servers that are connected to each other.
#[derive(Debug)]
pub struct Peering {
    folder: PathBuf,
    addresses: Vec<Ipv4Addr>,
}

impl Peering {
    /// Plans `count` servers with their data below `folder`.
    pub fn new(count: usize, folder: &Path) -> Self {
        Self {
            folder: folder.to_owned(),
            addresses: (0..count).map(|_| next_loopback()).collect(),
        }
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
            let address = self.address(other, Listener::Peers);
            setup.args(&["--peer", &format!("{}={address}", Self::name(other))])
        }))
    }

    fn data_dir(&self, number: usize) -> PathBuf {
        self.folder.join(Self::name(number))
    }

    /// Waits until each of the servers is connected to all others.
    pub async fn wait_until_connected(servers: &[Server]) {
        let others = servers.len() as u64 - 1;
        for server in servers {
            eventually("the servers' connections", CONNECT, async || {
                let series = "tunnel_server_peers{state=\"connected\"}";
                let connected = server.metric(series).await?;
                ensure!(
                    connected == others,
                    "{connected} of {others}; {}",
                    server.log()
                );
                Ok(())
            })
            .await;
        }
    }
}

/// Copies the CA of a data directory to one that no server has used.
///
/// # Errors
/// When a file cannot be copied.
pub fn copy_ca(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir(to)?;
    fs::set_permissions(to, fs::Permissions::from_mode(0o700))?;
    for file in ["ca.crt", "ca.key"] {
        fs::copy(from.join(file), to.join(file))?;
    }
    Ok(())
}
