//! Debian's nginx with kept-alive upstream connections in front of a TCP service of Culvert, to
//! compare with the HTTP listener.

use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use tunnel_tests::process::{Process, Program, ScratchDir};

use crate::load;
use crate::systems::{Culvert, free_address, plain};

const PROGRAM: &str = "/usr/sbin/nginx";
const START: Duration = Duration::from_secs(15);

#[derive(Debug)]
pub(crate) struct Nginx {
    pub(crate) process: Process,
    pub(crate) address: SocketAddr,
    pub(crate) stack: Culvert,
    _scratch: ScratchDir,
}

impl Nginx {
    /// Returns whether nginx is installed, after a notice if it is not.
    pub(crate) fn is_installed() -> Result<bool> {
        let is_installed = Path::new(PROGRAM).is_file();
        if !is_installed {
            let notice = "is not installed; the report has no rows of nginx";
            writeln!(std::io::stderr(), "{PROGRAM} {notice}")?;
        }
        Ok(is_installed)
    }

    /// Starts nginx in front of the plain service of `stack`.
    pub(crate) async fn start(stack: Culvert) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let address = free_address()?;
        let file = scratch.file("nginx.conf", config(scratch.path(), address, stack.service))?;
        let process = Program::at(Path::new(PROGRAM))
            .args(["-e", "stderr", "-c"])
            .arg(file)
            .start()?;
        let answered = load::probe(&plain(address), START).await;
        answered.with_context(|| format!("nginx:{}", process.log()))?;
        Ok(Self {
            process,
            address,
            stack,
            _scratch: scratch,
        })
    }
}

/// Returns a configuration with one process, whose CPU time the benchmark knows, and with an access
/// log as the HTTP listener has one.
fn config(folder: &Path, address: SocketAddr, service: SocketAddr) -> String {
    let folder = folder.display();
    let paths = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|kind| format!("{kind}_temp_path {folder}/{kind};"));
    let paths = paths.join("\n  ");
    format!(
        r#"daemon off;
master_process off;
pid {folder}/pid;
events {{ worker_connections 1024; }}
http {{
  {paths}
  access_log {folder}/access.log;
  keepalive_requests 1000000000;
  upstream service {{
    server {service};
    keepalive 64;
    keepalive_requests 1000000000;
  }}
  server {{
    listen {address};
    location / {{
      proxy_pass http://service;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
    }}
  }}
}}
"#
    )
}
