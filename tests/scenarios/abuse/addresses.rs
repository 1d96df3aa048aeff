//! T05, S08: addresses that are not reachable through the tunnel, at either end. Each stream is
//! authorized separately.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result, ensure};
use tokio::net::{TcpListener, lookup_host};
use tokio::time::timeout;
use tunnel_agent::config::RawConfig as AgentRawConfig;
use tunnel_agent::policy::{DialPolicy, TargetClass, check};
use tunnel_server::config::RawTcpService;
use tunnel_tests::checks::{ensure_refused, ensure_status};
use tunnel_tests::client::{ByteStream, Endpoint, KeepAliveClient, RawRequest, request};
use tunnel_tests::env::{Agent, TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::scaled;
use tunnel_tests::targets::Exporter;

/// Addresses that no setting of an agent allows, in many spellings. Spaces separate them.
const NEVER: [&str; 6] = [
    // Cloud metadata services.
    "169.254.169.254 169.254.170.2 169.254.169.253 169.254.169.123 100.100.100.200 192.0.0.192 \
     168.63.129.16 fd00:ec2::254 fd00:ec2::23 fd20:ce::254",
    // Metadata services inside IPv6: mapped, compatible, NAT64, local NAT64, 6to4.
    "::ffff:169.254.169.254 ::ffff:a9fe:a9fe 0:0:0:0:0:ffff:169.254.169.254 ::169.254.169.254 \
     ::a9fe:a9fe 64:ff9b::169.254.169.254 64:ff9b::a9fe:a9fe 64:ff9b:1::169.254.169.254 \
     64:ff9b:1:2:3:4:a9fe:a9fe 2002:a9fe:a9fe:: 2002:a9fe:a9fe::1 ::ffff:100.100.100.200 \
     64:ff9b::100.100.100.200 2002:6464:64c8:: ::ffff:192.0.0.192 ::ffff:168.63.129.16 \
     64:ff9b::168.63.129.16",
    // Link-local.
    "169.254.0.0 169.254.0.1 169.254.1.1 169.254.255.254 169.254.255.255 fe80::1 fe80::a9fe:a9fe \
     fe80:0:0:1::1 fea0::1 febf:ffff:ffff:ffff:ffff:ffff:ffff:ffff ::ffff:169.254.1.1 \
     2002:a9fe:101::",
    // Loopback. A target on another host never has such an address.
    "127.0.0.1 127.0.0.2 127.1.2.3 127.255.255.254 ::1 0:0:0:0:0:0:0:1 ::ffff:127.0.0.1 \
     ::ffff:7f00:1 ::ffff:127.255.0.9 ::127.0.0.1 ::7f00:1 64:ff9b::127.0.0.1 64:ff9b:1::7f00:1 \
     2002:7f00:1::",
    // "This host", which Linux treats as loopback.
    "0.0.0.0 0.0.0.1 0.255.255.255 :: ::ffff:0.0.0.0 ::ffff:0:0 64:ff9b:: 2002::",
    // Multicast and broadcast.
    "224.0.0.1 239.255.255.255 232.1.1.1 255.255.255.255 ff02::1 ff05::2 ff0e::101 \
     ::ffff:224.0.0.1 64:ff9b::255.255.255.255",
];

/// Values of Host with which a caller may try to reach something other than a known node.
const HOSTS: &str = "\
    169.254.169.254 [fd00:ec2::254] 100.100.100.200 127.0.0.1 127.1.2.3 [::1] [::ffff:127.0.0.1] \
    [::ffff:169.254.169.254] [64:ff9b::169.254.169.254] [::] 0.0.0.0 0 00 127.1 127.0.1 \
    2130706433 017700000001 0177.0.0.1 0x7f000001 0x7f.0.0.1 0x7F.1 2852039166 0xa9fea9fe \
    0251.0376.0251.0376 169.254.43518 localhost localhost. LOCALHOST localhost.localdomain \
    ip6-localhost metadata metadata.google.internal metadata.google.internal. instance-data \
    kubernetes.default.svc kubernetes.default.svc.cluster.local 127.0.0.1.nip.io localtest.me \
    worker-1.evil.example evil-worker-1 worker-1evil [fe80::1%25eth0] [fe80::1%eth0] [::1%lo] \
    127.0.0.1. 127.0.0.01 １２７.0.0.1 worker-1@127.0.0.1 127.0.0.1#worker-1 worker-1/127.0.0.1 \
    worker-1\\127.0.0.1 worker-1%00.evil.example ..";

/// Names for which the resolver of the agent's host may return loopback or another forbidden
/// address.
const NAMES: &str = "\
    localhost localhost. 127.0.0.1 127.1 2130706433 0x7f000001 0x7f.1 0177.0.0.1 017700000001 \
    ::1 ::ffff:127.0.0.1 0";

/// Names that the configuration of a server accepts as a target.
const CONFIGURED: [&str; 5] = [
    "localhost",
    "127.0.0.1",
    "0x7f000001",
    "[::1]",
    "[::ffff:127.0.0.1]",
];

/// The widest value of `allowTargets`.
const EVERYTHING: &str = "0.0.0.0/0:1-65535, [::/0]:1-65535";

fn wide() -> Result<DialPolicy> {
    Ok(DialPolicy {
        localhost_ports: "1-65535".parse().map_err(anyhow::Error::msg)?,
        allow_targets: EVERYTHING.parse().map_err(anyhow::Error::msg)?,
        ..DialPolicy::default()
    })
}

/// Gives an agent the widest dial policy that its operator can set, and expects the agent to refuse
/// every address of [`NEVER`].
#[test]
fn t05_no_setting_opens_these_addresses_at_the_agent() -> Result<()> {
    let dial_policy = wide()?;
    for text in NEVER.iter().flat_map(|group| group.split_whitespace()) {
        let ip: IpAddr = text.parse().with_context(|| text.to_owned())?;
        for port in [1, 80, 443, 2379, 10250, 65535] {
            let decision = check(TargetClass::Host, SocketAddr::new(ip, port), &dial_policy);
            ensure!(decision.is_err(), "{text} port {port} would be dialed");
        }
    }
    let public: SocketAddr = "203.0.113.9:80".parse()?;
    ensure!(check(TargetClass::Host, public, &dial_policy).is_ok());
    Ok(())
}

/// Resolves the names with the host's resolver and expects the agent to refuse each resolved
/// address. C libraries accept numbers in odd bases, so the agent must check the address and not
/// the name.
#[tokio::test]
async fn t05_spellings_are_checked_by_what_they_resolve_to() -> Result<()> {
    let dial_policy = wide()?;
    let mut resolved = 0;
    for name in NAMES.split_whitespace() {
        let Ok(found) = lookup_host((name, 80)).await else {
            continue;
        };
        for address in found {
            resolved += 1;
            let decision = check(TargetClass::Host, address, &dial_policy);
            ensure!(decision.is_err(), "{name} is {address}: dialed");
        }
    }
    ensure!(resolved >= 8, "only {resolved} were resolved");
    Ok(())
}

/// A listener on loopback that must not receive a connection.
struct Canary(TcpListener);

impl Canary {
    async fn start() -> Result<Self> {
        Ok(Self(TcpListener::bind("127.0.0.1:0").await?))
    }

    fn port(&self) -> Result<u16> {
        Ok(self.0.local_addr()?.port())
    }

    /// Checks that the listener has not received a connection. A connection made by the test comes
    /// first out of the queue only if there was no earlier one.
    async fn stays_untouched(self) -> Result<()> {
        let own = tokio::net::TcpStream::connect(self.0.local_addr()?).await?;
        let (_socket, first) = self.0.accept().await?;
        ensure!(first == own.local_addr()?, "{first} has connected");
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn t05_hosts_that_are_no_nodes_are_400_and_nothing_is_dialed() -> Result<()> {
    let env = TestEnv::start().await?;
    let canary = Canary::start().await?;
    let _agent = env.agent("worker-1").await?;
    let port = canary.port()?;
    for host in HOSTS.split_whitespace().chain(["worker-1 127.0.0.1"]) {
        for host in [host.to_owned(), format!("{host}:{port}")] {
            let by_host = RawRequest::get(&host, "/");
            let selected = RawRequest::get("192.0.2.7", "/").header("X-Tunnel-Proxy-Dest", &host);
            for (field, asked) in [("Host", by_host), ("Dest", selected)] {
                let reply = request(env.http(), &asked).await?;
                ensure!(reply.status == 400, "{field} {host}: {}", reply.status);
            }
        }
    }
    canary.stays_untouched().await
}

/// Configures a server with services on the agent's own loopback, as a compromised server could.
/// The agent's dial policy refuses all of them, for names and for addresses.
#[tokio::test(flavor = "multi_thread")]
async fn t05_agent_refuses_what_its_server_configures() -> Result<()> {
    let canary = Canary::start().await?;
    let port = canary.port()?;
    let env = TestEnv::start_with(|settings| {
        let names = CONFIGURED.iter().enumerate();
        let services = names.map(|(index, name)| RawTcpService {
            name: format!("s{index}"),
            listen: "127.0.0.1:0".into(),
            node: "worker-1".into(),
            target: format!("{name}:{port}"),
            protocol: None,
        });
        settings.services = services.collect();
    })
    .await?;
    let open = |settings: &mut AgentRawConfig| settings.allow_targets = Some(EVERYTHING.into());
    let _agent = Agent::start(env.agent_config_with("worker-1", open)?).await?;
    env.connected("worker-1").await;
    let services = &env.bound().services;
    ensure!(services.len() == CONFIGURED.len());
    for (name, address) in services {
        // The reset may arrive before the caller's connect has finished.
        let Ok(mut caller) = ByteStream::connect(Endpoint::plain(*address)).await else {
            continue;
        };
        let reading = timeout(scaled(WAIT_TIMEOUT), caller.read_to_end()).await;
        let reading = reading.with_context(|| format!("{name}: it was dialed"))?;
        ensure!(reading.bytes.is_empty(), "{name}: bytes came");
        ensure!(!reading.ended.is_clean(), "{name}: {:?}", reading.ended);
    }
    canary.stays_untouched().await
}

/// S08: sends an allowed request and then a forbidden one on the same connection. The allowed
/// stream gives the second one no rights, neither at the server nor at the agent.
#[tokio::test(flavor = "multi_thread")]
async fn s08_each_stream_is_authorized_by_itself_at_both_ends() -> Result<()> {
    let exporter = Exporter::start("worker-1").await?;
    let (by_server, by_agent) = (Canary::start().await?, Canary::start().await?);
    let own = exporter.addr().port();
    let (not_listed, denied) = (by_server.port()?, by_agent.port()?);
    let env = TestEnv::start_with(|settings| {
        settings.http_proxy_ports = Some(format!("{own}, {denied}"));
    })
    .await?;
    let deny = |settings: &mut AgentRawConfig| settings.deny_ports = Some(denied.to_string());
    let _agent = Agent::start(env.agent_config_with("worker-1", deny)?).await?;
    env.connected("worker-1").await;
    let get = |port: u16| RawRequest::new("GET", "/metrics", &format!("worker-1:{port}"));
    let mut caller = KeepAliveClient::connect(env.http()).await?;
    for (port, who) in [(not_listed, "server"), (denied, "agent")] {
        ensure_status(&caller.request(&get(own)).await?, 200)?;
        // A canary does not answer, so a request that reaches one runs into the timeout.
        let refused = timeout(scaled(WAIT_TIMEOUT), caller.request(&get(port))).await;
        let refused = refused.with_context(|| format!("{who}: it was dialed"))??;
        ensure_refused(&refused, 403, "refused_by_policy").context(who)?;
        let text = refused.text();
        let by_agent = text.contains("--deny-ports");
        ensure!(by_agent == (who == "agent"), "{who}: {text}");
    }
    by_server.stays_untouched().await?;
    by_agent.stays_untouched().await
}
