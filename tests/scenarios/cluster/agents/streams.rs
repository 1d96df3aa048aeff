//! DNS-12, DNS-13: requests by node name through the listeners, with agents of both kinds, in the
//! form that kube-apiserver sends.

use anyhow::{Result, ensure};
use tunnel_tests::client::{BodyEnd, Endpoint, RawRequest, request};
use tunnel_tests::cluster::edge;
use tunnel_tests::env::Agent;
use tunnel_tests::targets::{Exporter, FakeKubelet};

use super::Site;
use super::accounts::claims;
use crate::http::kubelet::{self as asked, Caller};

/// A Node of the cluster with an agent, a kubelet and an exporter.
pub(super) struct Edge {
    pub(super) node: &'static str,
    pub(super) kubelet: FakeKubelet,
    exporter: Exporter,
    _agent: Agent,
}

impl Edge {
    pub(super) async fn of_kubelet(
        site: &Site,
        node: &'static str,
        transport: &str,
    ) -> Result<Self> {
        let pki = site.kubelet(node)?;
        let transport = |settings: &mut tunnel_agent::config::RawConfig| {
            settings.transport = Some(transport.into());
        };
        let agent = site.agent_of_kubelet(node, &pki, transport).await?;
        Self::with(site, node, agent).await
    }

    pub(super) async fn of_account(
        site: &Site,
        node: &'static str,
        transport: &str,
    ) -> Result<Self> {
        let uid = site.pod(&format!("agent-{node}"), node)?;
        let token = site.api()?.sign(&claims(&format!("agent-{node}"), &uid));
        let mut config = site.agent_with_token(node, &token)?;
        config.transport = transport.parse().map_err(anyhow::Error::msg)?;
        let agent = Agent::start(config).await?;
        site.env.connected(node).await;
        Self::with(site, node, agent).await
    }

    async fn with(site: &Site, node: &'static str, agent: Agent) -> Result<Self> {
        let kubelet = FakeKubelet::start(node).await?;
        let exporter = Exporter::start(node).await?;
        let port = kubelet.addr().port();
        let object = edge(node).with_kubelet_port(port);
        site.cluster.objects().add(&object).await?;
        Ok(Self {
            node,
            kubelet,
            exporter,
            _agent: agent,
        })
    }

    pub(super) fn caller<'a>(&'a self, site: &'a Site) -> Caller<'a> {
        Caller {
            env: &site.env,
            kubelet: &self.kubelet,
            node: self.node,
            host: format!("{}:{}", self.node, self.kubelet.addr().port()),
            listener: None,
        }
    }

    /// Checks that the exporter's page through the HTTP listener equals a direct fetch, except for
    /// the count of fetches.
    async fn serves_metrics(&self, site: &Site) -> Result<()> {
        let host = format!("{}:{}", self.node, self.exporter.addr().port());
        let head = RawRequest::get(&host, "/metrics");
        let through = request(site.env.http(), &head).await?;
        let local = request(Endpoint::plain(self.exporter.addr()), &head).await?;
        ensure!((through.status, local.status) == (200, 200));
        ensure!(through.ended == BodyEnd::CleanLength || through.ended == BodyEnd::CleanChunked);
        let page = |text: String| {
            let counted = |line: &&str| !line.starts_with("culvert_demo_requests_total");
            text.lines()
                .filter(counted)
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        let (through, local) = (page(through.text()), page(local.text()));
        ensure!(
            through == local && !local.is_empty(),
            "{through:?} is not {local:?}"
        );
        Ok(())
    }
}

async fn both_kinds(transport: &str) -> Result<()> {
    let site = Site::start().await?;
    let edges = [
        Edge::of_kubelet(&site, "worker-1", transport).await?,
        Edge::of_account(&site, "worker-2", transport).await?,
    ];
    for edge in &edges {
        edge.serves_metrics(&site).await?;
        let caller = edge.caller(&site);
        asked::pages(&caller).await?;
        asked::followed_logs(&caller).await?;
        asked::commands_over_spdy(&caller).await?;
        asked::terminal_over_spdy(&caller).await?;
        asked::port_forward_over_spdy(&caller).await?;
        asked::terminal_over_websocket(&caller, 0).await?;
    }
    Ok(())
}

tests_of! {
    fn dns_12_dns_13_agents_of_a_cluster_carry_all_streams_over_quic() = both_kinds("quic");
    fn dns_12_dns_13_agents_of_a_cluster_carry_all_streams_over_h2() = both_kinds("h2");
}
