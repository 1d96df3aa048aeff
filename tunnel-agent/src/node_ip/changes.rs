//! Changes of the addresses and routes of this host, as the kernel reports them over netlink.

use std::io;
use std::time::Duration;

use futures_util::FutureExt as _;
use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{AsyncSocket as _, AsyncSocketExt as _, SocketAddr, TokioSocket};
use tokio::time::sleep;
use tracing::debug;

/// Calls `changed` after each change, at most once in [`PAUSE`], until the future is dropped. Where
/// the kernel does not report changes, it returns.
pub(super) async fn follow(changed: impl Fn()) {
    if let Err(error) = watch(changed).await {
        debug!(%error, "changes of the host's addresses are not reported");
    }
}

async fn watch(changed: impl Fn()) -> io::Result<()> {
    let mut socket = TokioSocket::new(NETLINK_ROUTE)?;
    socket.socket_mut().bind(&SocketAddr::new(0, GROUPS))?;
    loop {
        recv(&socket).await?;
        while let Some(received) = recv(&socket).now_or_never() {
            received?;
        }
        changed();
        sleep(PAUSE).await;
    }
}

/// Receives one message. Its content does not matter, since `changed` looks at the addresses.
async fn recv(socket: &TokioSocket) -> io::Result<()> {
    let mut message = [0; 64];
    match socket.recv(&mut message.as_mut_slice()).await {
        // There were more changes than the socket can hold.
        Err(error) if error.raw_os_error() == Some(NO_BUFFERS) => Ok(()),
        received => received,
    }
}

/// Addresses and routes of both families (rtnetlink(7): `RTMGRP_IPV4_IFADDR`, `RTMGRP_IPV4_ROUTE`,
/// `RTMGRP_IPV6_IFADDR`, `RTMGRP_IPV6_ROUTE`).
const GROUPS: u32 = 0x10 | 0x40 | 0x100 | 0x400;
/// `ENOBUFS`, as Linux numbers it.
const NO_BUFFERS: i32 = 105;
/// Hosts with dynamic routing or many Pods change all the time.
const PAUSE: Duration = Duration::from_millis(100);
