//! A virtual address in a namespace, whose connections nft spreads over servers as kube-proxy does.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::{CLOUD_ADDRESS, Namespace};
use crate::gear::Gear;
use crate::process::{Process, Program};
use crate::tools::{Skip, Tool, or_skip, require};

/// A port of the virtual address. A new connection, or a new source port of UDP, goes to the next
/// backend or a random one. The connection keeps its backend, also when the backend is removed here.
#[derive(Debug, Clone)]
pub struct Route {
    pub protocol: IpProtocol,
    pub port: u16,
    /// IPv4 addresses of this namespace.
    pub backends: Vec<SocketAddr>,
}

/// A protocol with ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IpProtocol {
    Tcp,
    Udp,
}

impl IpProtocol {
    fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

/// Returns the virtual address with this port.
pub fn service_address(port: u16) -> SocketAddr {
    SocketAddr::new(SERVICE_ADDRESS.into(), port)
}

/// Replaces the routes of this namespace for new connections.
pub async fn publish_routes(routes: &[Route]) -> Result<()> {
    let nft = Program::tool(Tool::Nft)?.args(["-f", "-"]);
    nft.run_with(rules(routes).as_bytes()).await?.ok().map(drop)
}

/// Runs a test inside a namespace that has the network of [`CLOUD_ADDRESS`] on its loopback
/// interface, and where [`publish_routes`] works. To get there, this program runs `test` once more,
/// by its full name. The test is skipped where namespaces or nft are not allowed. The namespace
/// ends with the test.
pub async fn in_service_namespace(
    test: &str,
    limit: Duration,
    scenario: impl AsyncFnOnce() -> Result<()>,
) -> Result<()> {
    if std::env::var_os(VARIABLE).is_some() {
        return Box::pin(scenario()).await;
    }
    let Some(namespace) = or_skip(namespace()) else {
        return Ok(());
    };
    let program = std::env::current_exe().context("the program of the test")?;
    let mut process = Program::at(&program)
        .args([test, "--exact", "--nocapture", "--include-ignored"])
        .env(VARIABLE, "1")
        .inside(Some(&namespace))
        .start()?;
    let status = process.end(limit).await?;
    let is_passed = status.success() && process.log().contains("1 passed");
    ensure!(is_passed, "{status}; {process}");
    show(&process);
    Ok(())
}

#[expect(
    clippy::print_stderr,
    reason = "its figures are part of the test's output"
)]
fn show(process: &Process) {
    eprintln!("{}", process.log());
}

/// Creates the namespace, and checks that nft allows the rules.
fn namespace() -> Result<Namespace, Skip> {
    require(&[Tool::Ip, Tool::Nft])?;
    let namespace = Namespace::new("service", Path::new("/etc/hosts"))?;
    let probe = Route {
        protocol: IpProtocol::Udp,
        port: 1,
        backends: vec![SocketAddr::new(CLOUD_ADDRESS.into(), 1)],
    };
    // A caller reuses the port of a connection that was reset at once. Its packets must not follow
    // that connection to a backend that has ended.
    namespace.script(&format!(
        "$IP address add {CLOUD_ADDRESS}/24 dev lo
$IP route replace default dev lo src {CLOUD_ADDRESS}
echo 0 > /proc/sys/net/netfilter/nf_conntrack_tcp_timeout_close
$NFT -f - <<'RULES'
{}RULES",
        rules(&[probe])
    ))?;
    Ok(namespace)
}

/// Returns a script that replaces all rules at once. The chain stays, because nft translates the
/// packets of established connections only while there is one.
///
/// New connections go to a random server in the full gear, and to the servers in turn in the quick
/// one: by chance, an agent's search for another server can take minutes.
fn rules(routes: &[Route]) -> String {
    let mut rules = "add table ip service
add chain ip service output { type nat hook output priority -100; }
flush chain ip service output
"
    .to_owned();
    let numbers = Gear::current().pick("inc", "random");
    for route in routes.iter().filter(|route| !route.backends.is_empty()) {
        let backends: Vec<_> = (route.backends.iter().enumerate())
            .map(|(number, backend)| format!("{number} : {} . {}", backend.ip(), backend.port()))
            .collect();
        rules.push_str(&format!(
            "add rule ip service output ip daddr {SERVICE_ADDRESS} {} dport {} dnat to numgen {numbers} mod {} map {{ {} }}\n",
            route.protocol.name(),
            route.port,
            backends.len(),
            backends.join(", "),
        ));
    }
    rules
}

const SERVICE_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 96, 77, 1);

/// Set in the program that runs inside the namespace.
const VARIABLE: &str = "CULVERT_TEST_INSIDE";
