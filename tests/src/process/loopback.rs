//! Loopback addresses of processes under test, and what their data directories have.

use std::io;
use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use tunnel_process::disk::FileActivity;
use tunnel_process::scratch::ScratchDir;
use tunnel_store::state_store::{OnDamage, StateStore, Table};

/// Returns a loopback address of this process, in 127.64.0.0/10. A server that must return to its
/// port listens here, so that connections from 127.0.0.1 in the meantime do not take the port.
pub fn own_loopback() -> Ipv4Addr {
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, 64 | (high & 63), middle, low)
}

/// Returns another loopback address at each call, in 127.128.0.0/9. A server listens there on fixed
/// ports below those that the system assigns, so it can return to them after a restart.
pub fn next_loopback() -> Ipv4Addr {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // Processes that run at the same time seldom have IDs with the same low 11 bits. The benchmark
    // starts more than a hundred servers.
    let process = (std::process::id() & 0x7ff) << 12;
    let number = NEXT.fetch_add(1, Ordering::Relaxed) & 0xfff;
    Ipv4Addr::from(0x7f80_0000 | process | number)
}

/// Returns what a server that is killed now would find in the store of its data directory, as text in
/// which values are whole. The server may use the store meanwhile, whose file also has what is not
/// committed.
///
/// # Errors
/// Returns an error if there is no store, or if it is just being written.
pub fn stored_text(data_dir: &Path) -> io::Result<String> {
    let scratch = ScratchDir::new()?;
    let copy = scratch.path().join("state.redb");
    std::fs::copy(data_dir.join("state.redb"), &copy)?;
    let store = StateStore::open(&copy, &FileActivity::default(), OnDamage::Stop)?;
    let mut text = String::new();
    for table in Table::ALL {
        for (key, value) in store.rows(table)? {
            text.push_str(&key);
            text.push(' ');
            text.push_str(&String::from_utf8_lossy(&value));
            text.push('\n');
        }
    }
    Ok(text)
}
