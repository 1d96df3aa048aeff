//! The start of a service of systemd with `Type=notify`, which is complete once the process says so
//! (sd_notify(3)).

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use tracing::warn;

/// Variable with the address of systemd's socket. Absent outside of such a service.
const SOCKET: &str = "NOTIFY_SOCKET";

/// Reports that this process has started, if it is a service that is waited for. A failure is logged,
/// and systemd then ends the start after its time limit.
pub fn started() {
    let sent = std::env::var_os(SOCKET).map(|address| send(&address, b"READY=1"));
    if let Some(Err(error)) = sent {
        warn!(%error, "cannot report the start to systemd ({SOCKET})");
    }
}

fn send(address: &OsStr, message: &[u8]) -> io::Result<()> {
    let address = match address.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(address)?,
    };
    UnixDatagram::unbound()?
        .send_to_addr(message, &address)
        .map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::ScratchDir;

    #[test]
    fn message_arrives_at_a_path_and_at_an_abstract_name() {
        let scratch = ScratchDir::new().unwrap();
        let path = scratch.path().join("notify");
        let name = format!("culvert-notify-{}", std::process::id());
        let abstract_name = SocketAddr::from_abstract_name(&name).unwrap();
        for (socket, address) in [
            (UnixDatagram::bind(&path), path.clone().into_os_string()),
            (
                UnixDatagram::bind_addr(&abstract_name),
                format!("@{name}").into(),
            ),
        ] {
            send(&address, b"READY=1").unwrap();
            let mut message = [0; 16];
            let length = socket.unwrap().recv(&mut message).unwrap();
            assert_eq!(&message[..length], b"READY=1");
        }
        std::fs::remove_file(&path).unwrap();
        assert!(send(path.as_os_str(), b"READY=1").is_err());
    }
}
