//! Revocations at three servers of a cluster, whose paths to each other and to the API server fail in
//! turn, and kills of the server that orders.

use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::Value;
use tokio::time::Instant;
use tunnel_server::config::ObjectNames;
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::link::{Impairment, Link, TrafficClass};
use tunnel_tests::metrics::meta_page;
use tunnel_tests::process::{Finished, Listener, Server, ServerSetup, next_loopback};

use super::authority::kill;
use super::replicas::{SLICES, endpoint_slice};
use super::restarts::own_path;
use super::{ClusterEnv, FIRST};

/// Three servers, each with its own path to the API server, and one to it from the other servers.
pub(super) struct Three {
    pub(super) cluster_env: ClusterEnv,
    paths: Vec<Link>,
    links: Vec<Link>,
    pub(super) servers: Vec<Server>,
}

impl Three {
    /// Starts the servers, which do not know each other.
    async fn start(has_peers: bool) -> Result<Self> {
        Self::start_with(has_peers, &[]).await
    }

    /// Starts them with further arguments of `run`.
    pub(super) async fn start_with(has_peers: bool, arguments: &[&str]) -> Result<Self> {
        let cluster_env = ClusterEnv::fake().await?;
        let (mut paths, mut links, mut servers) = (Vec::new(), Vec::new(), Vec::new());
        for number in 0..3 {
            let name = name(number);
            let (path, kubeconfig) = own_path(&cluster_env, &name)?;
            let folder = cluster_env.scratch.path().join(&name);
            let peer = Listener::Peers.on(next_loopback());
            let listen = if has_peers {
                peer.to_string()
            } else {
                "off".to_owned()
            };
            let setup = ServerSetup::in_cluster(&folder, &kubeconfig)
                .args(&["--namespace", "kube-system", "--replica-name", &name])
                .args(&["--peer-listen", &listen])
                .args(arguments);
            paths.push(path);
            links.push(Link::start(peer, 0)?);
            servers.push(setup.start().await?);
        }
        Ok(Self {
            cluster_env,
            paths,
            links,
            servers,
        })
    }

    /// Lets the servers find each other at their addresses, or `others` at an address where nobody
    /// listens.
    pub(super) async fn introduce(&self, is_reached: impl Fn(usize) -> bool) -> Result<()> {
        for (number, link) in self.links.iter().enumerate() {
            let nobody = Listener::Peers.on(next_loopback());
            let address = if is_reached(number) {
                link.addr()
            } else {
                nobody
            };
            let slice = endpoint_slice(&name(number), address);
            self.cluster_env.admin().create(SLICES, &slice).await?;
        }
        let reached = (0..3).filter(|number| is_reached(*number));
        let reached: Vec<_> = reached.collect();
        for number in &reached {
            let server = &self.servers[*number];
            eventually("the servers' connections", FIRST, async || {
                let connected = "tunnel_server_peers{state=\"connected\"}";
                let connected = server.metric(connected).await?;
                ensure!(connected == reached.len() as u64 - 1, "{connected}");
                anyhow::Ok(())
            })
            .await;
        }
        Ok(())
    }

    /// Cuts the path of a server to the API server: its connections end, and no new one begins.
    fn refuse_api(&self, number: usize) {
        self.paths[number].lead_to(None);
        self.paths[number].reset_tcp();
    }

    /// Loses all packets between a server and the API server.
    pub(super) fn silence_api(&self, number: usize) {
        self.paths[number].set(TrafficClass::ALL, Impairment::black_hole());
    }

    /// Loses all packets between the servers.
    pub(super) fn silence_links(&self) {
        for link in &self.links {
            link.set(TrafficClass::ALL, Impairment::black_hole());
        }
    }

    /// Repairs all paths that lose packets.
    pub(super) fn heal(&self) {
        self.links.iter().chain(&self.paths).for_each(Link::heal);
    }

    /// Orders the end of a node at a server.
    async fn revoke(&self, number: usize, node: &str) -> Result<Finished> {
        let verb = self.servers[number].verb(&["nodes", "revoke", node])?;
        let said = verb.run().await?;
        ensure!(said.out.contains("revoked"), "{said}");
        Ok(said)
    }

    async fn refuses(&self, number: usize, node: &str) -> Result<bool> {
        let verb = self.servers[number].verb(&["nodes", "revocations"])?;
        Ok(verb.run().await?.ok()?.contains(node))
    }

    /// Waits until the servers refuse the node. Returns the time that took.
    async fn wait_until_refused(&self, numbers: &[usize], node: &str) -> Duration {
        let since = Instant::now();
        for number in numbers {
            let what = format!("{node} to be refused at {}", name(*number));
            eventually(&what, FIRST * 3, async || {
                ensure!(self.refuses(*number, node).await?, "it is not");
                anyhow::Ok(())
            })
            .await;
        }
        since.elapsed()
    }

    async fn restart(&mut self, number: usize) -> Result<()> {
        let server = self.servers.remove(number);
        let server = kill(server).await?.start().await?;
        self.servers.insert(number, server);
        Ok(())
    }

    async fn is_saved(&self, node: &str) -> Result<bool> {
        let secret = ObjectNames::default().revocations_secret;
        let secret = self.cluster_env.objects().secret(&secret).await?;
        let Some(text) = secret.get("revoked.json") else {
            return Ok(false);
        };
        let orders: Value = serde_json::from_str(text)?;
        Ok(orders["nodes"][node]["revoked"] == true)
    }

    async fn wait_until_saved(&self, node: &str) {
        eventually("the order in the Secret", FIRST * 3, async || {
            ensure!(self.is_saved(node).await?, "it is not there");
            anyhow::Ok(())
        })
        .await;
    }
}

/// Every path to the API server is faulty in a way of its own.
#[tokio::test(flavor = "multi_thread")]
async fn revocation_reaches_three_servers_by_their_connections_alone_and_survives_kills()
-> Result<()> {
    let mut three = Three::start(true).await?;
    three.introduce(|_| true).await?;
    three.silence_api(0);
    three.refuse_api(1);
    three.silence_api(2);
    let said = three.revoke(0, "worker-1").await?;
    for server in ["server-1", "server-2"] {
        ensure!(said.out.contains(server), "{said}");
    }
    ensure!(
        said.err.contains("pending") && said.err.contains("Secret"),
        "{said}"
    );
    let took = three.wait_until_refused(&[0, 1, 2], "worker-1").await;
    ensure!(took <= scaled(WITHIN), "{took:?}");
    // Killed before the Secret has the order.
    three.restart(0).await?;
    ensure!(three.refuses(0, "worker-1").await?);
    // Killed as soon as the order is made, and started again without the API server.
    three.revoke(0, "worker-2").await?;
    three.restart(0).await?;
    let numbers = [0, 1, 2];
    three.wait_until_refused(&numbers, "worker-2").await;
    ensure!(!three.is_saved("worker-1").await?, "there is no path");
    // The path of another server is enough to save what the first one ordered.
    three.paths[1].lead_to(Some(three.cluster_env.api_address()?));
    three.wait_until_saved("worker-1").await;
    three.wait_until_saved("worker-2").await;
    // Killed after that, and all of them.
    for number in numbers {
        three.paths[number].heal();
        three.paths[number].lead_to(Some(three.cluster_env.api_address()?));
        three.restart(number).await?;
    }
    three.wait_until_refused(&numbers, "worker-1").await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn revocation_reaches_three_servers_by_the_api_server_alone() -> Result<()> {
    let mut three = Three::start(false).await?;
    three.revoke(0, "worker-1").await?;
    let took = three.wait_until_refused(&[0, 1, 2], "worker-1").await;
    ensure!(took <= scaled(WITHIN), "{took:?}");
    three.restart(0).await?;
    ensure!(three.refuses(0, "worker-1").await?);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn revocation_that_one_of_three_servers_cannot_learn_is_pending_there_and_said() -> Result<()>
{
    let mut three = Three::start(true).await?;
    three.refuse_api(2);
    three.introduce(|number| number != 2).await?;
    let said = three.revoke(0, "worker-1").await?;
    ensure!(said.out.contains("server-1"), "{said}");
    ensure!(
        said.err.contains("pending") && said.err.contains("server server-2"),
        "{said}"
    );
    let took = three.wait_until_refused(&[0, 1], "worker-1").await;
    ensure!(took <= scaled(WITHIN), "{took:?}");
    ensure!(!three.refuses(2, "worker-1").await?, "by which way?");
    three.restart(0).await?;
    ensure!(three.refuses(0, "worker-1").await?);
    let meta = three.servers[0].address(Listener::Meta);
    eventually("the condition", FIRST * 5, async || {
        let page = meta_page(meta, "/readyz?verbose").await?;
        ensure!(page.contains("none to server-2"), "{page}");
        anyhow::Ok(())
    })
    .await;
    three.paths[2].lead_to(Some(three.cluster_env.api_address()?));
    three.wait_until_refused(&[2], "worker-1").await;
    Ok(())
}

fn name(number: usize) -> String {
    format!("server-{number}")
}

/// Bound of the promise.
const WITHIN: Duration = Duration::from_secs(2);
