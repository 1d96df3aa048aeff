//! A plain TCP relay without crypto. Two relays in a row have the least cost that a tunnel in user
//! space can have.

use std::net::SocketAddr;

use anyhow::Result;
use tokio::io::copy_bidirectional_with_sizes;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::listening;

/// Buffer size in bytes. A large buffer keeps the number of system calls for bulk low.
const BUFFER: usize = 256 * 1024;

/// Relays connections until the process is killed.
#[derive(Debug, clap::Args)]
pub(crate) struct Relay {
    /// Address to which connections are relayed.
    to: SocketAddr,
}

impl Relay {
    pub(crate) async fn run(self) -> Result<()> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        listening(listener.local_addr()?)?;
        let mut relaying = JoinSet::new();
        loop {
            let (socket, _) = listener.accept().await?;
            while relaying.try_join_next().is_some() {}
            relaying.spawn(async move {
                let _one_side_left = pass(socket, self.to).await;
            });
        }
    }
}

async fn pass(mut caller: TcpStream, to: SocketAddr) -> std::io::Result<()> {
    caller.set_nodelay(true)?;
    let mut target = TcpStream::connect(to).await?;
    target.set_nodelay(true)?;
    copy_bidirectional_with_sizes(&mut caller, &mut target, BUFFER, BUFFER).await?;
    Ok(())
}
