//! The host of a process: UDP buffers, the disk of the data directory, memory for unread data.

use std::path::Path;
use std::time::Duration;

use tokio::task::spawn_blocking;
use tunnel_process::host::{Resources, kernel_number};
use tunnel_process::{disk, limits};

use super::{Fact, Fault, Found, Severity, within};

/// Facts about this host.
#[derive(Debug)]
pub struct HostFacts {
    /// The maximum sizes of UDP buffers.
    pub buffers: Vec<UdpBuffer>,
    /// Why the data directory cannot be written.
    pub disk: Fact<Option<String>>,
    /// What is wrong with the size of the buffer pool.
    pub buffer_pool: Option<String>,
}

/// The maximum size of a socket buffer.
#[derive(Debug)]
pub struct UdpBuffer {
    /// Name of the setting.
    pub setting: &'static str,
    /// The size in bytes.
    pub bytes: Fact<u64>,
}

impl HostFacts {
    /// Gathers the facts within `limit`. `buffer_pool` is in bytes.
    pub async fn gather(
        data_dir: &Path,
        buffer_pool: u64,
        resources: &Resources,
        limit: Duration,
    ) -> Self {
        let path = data_dir.to_owned();
        // A file system may not answer.
        let disk = within(limit, async {
            let checked = spawn_blocking(move || disk::check(&path)).await;
            checked.map_err(|error| error.to_string())
        });
        let buffers = BUFFERS.map(|setting| UdpBuffer {
            setting,
            bytes: kernel_number(setting).map_err(|error| error.to_string()),
        });
        Self {
            buffers: buffers.into(),
            disk: disk.await,
            buffer_pool: limits::buffer_pool_fault(buffer_pool, resources.memory),
        }
    }

    /// Returns the faults of UDP buffers with fewer than `min` bytes.
    pub fn small_buffers(&self, min: usize) -> Found {
        let mut found = Found::default();
        for UdpBuffer { setting, bytes } in &self.buffers {
            match bytes {
                Ok(bytes) if *bytes < min as u64 => found.faults.push(Fault {
                    severity: Severity::Warning,
                    place: (*setting).to_owned(),
                    what: format!("a UDP buffer has at most {bytes} bytes; QUIC asks for {min}"),
                    fix: format!("sysctl -w {setting}={min}; and in /etc/sysctl.d"),
                }),
                Ok(_enough) => {}
                Err(reason) => found.unknown.push(reason.clone()),
            }
        }
        found
    }

    /// Adds the faults of the buffer pool and of the disk with the data directory.
    pub fn add_storage(&self, data_dir: &Path, found: &mut Found) {
        found
            .faults
            .extend(self.buffer_pool.iter().map(|what| Fault {
                severity: Severity::Warning,
                place: "limits.bufferPool".to_owned(),
                what: what.clone(),
                fix: "leave limits.bufferPool out, or raise the memory limit".to_owned(),
            }));
        match &self.disk {
            Ok(Some(what)) => found.faults.push(Fault {
                severity: Severity::Error,
                place: data_dir.display().to_string(),
                what: what.clone(),
                fix: "free some space, or mount the file system writable".to_owned(),
            }),
            Ok(None) => {}
            Err(reason) => found.unknown.push(reason.clone()),
        }
    }
}

const BUFFERS: [&str; 2] = ["net.core.rmem_max", "net.core.wmem_max"];
