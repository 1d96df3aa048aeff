//! The command `render`: prints texts for other programs, with the values of its flags. Nothing is
//! applied.

mod agent;
mod apiserver;
mod check;
mod coredns;
mod egress_selector;
mod kubeconfig;
mod node_local_dns;
mod output;
mod prometheus;
mod values;

pub use agent::AgentArgs;
pub use apiserver::ApiserverArgs;
pub use coredns::CorednsArgs;
pub use egress_selector::EgressSelectorArgs;
pub use kubeconfig::KubeconfigArgs;
pub use node_local_dns::{NodeLocalDnsArgs, NodeLocalDnsPart, ProxyMode};
pub use output::{OutputArgs, RenderError};
pub use prometheus::{PrometheusArgs, ScrapeMethod, ScrapeObject};
pub use values::{
    CorefilePath, CorefilePathError, ResolverAddress, ResolverAddressError, ServerAddress,
    ServerAddressError, UpstreamResolver,
};

pub(in crate::admin) use values::shell;

use check::Format;
use output::finish;

/// Print texts for other programs.
#[derive(Debug, Clone, clap::Subcommand)]
pub enum RenderVerb {
    /// kube-apiserver's egress selector configuration, for a CONNECT listener of the server
    EgressSelector(EgressSelectorArgs),
    /// The entries of kube-apiserver's static pod: its flag and volumes for an egress selector, or
    /// its flag and dnsConfig for the server's DNS
    Apiserver(ApiserverArgs),
    /// The lines of CoreDNS' Corefile by which pods resolve names of nodes
    Coredns(CorednsArgs),
    /// NodeLocal DNSCache for edge nodes, which asks the cluster's DNS through the tunnel and answers
    /// known names while the link is down
    NodeLocalDns(NodeLocalDnsArgs),
    /// A kubeconfig for an API server on a node, through a CONNECT listener of the server
    Kubeconfig(KubeconfigArgs),
    /// A scrape configuration, or an object of the Prometheus operator, for targets on nodes
    Prometheus(Box<PrometheusArgs>),
    /// The systemd unit of an agent, with the commands for its join token
    Agent(AgentArgs),
}

impl RenderVerb {
    /// Prints or writes the text, or compares a file with it.
    ///
    /// # Errors
    /// Returns a [`RenderError`], also if a compared file differs.
    pub fn run(self) -> Result<(), RenderError> {
        match self {
            Self::EgressSelector(arguments) => {
                finish(&arguments.text(), Format::Yaml, &arguments.output)
            }
            Self::Apiserver(arguments) => {
                finish(&arguments.text(), Format::Yaml, &arguments.output)
            }
            Self::Coredns(arguments) => finish(&arguments.text(), Format::Lines, &arguments.output),
            Self::NodeLocalDns(arguments) => {
                let text = arguments.text().map_err(RenderError::Usage)?;
                finish(&text, arguments.format(), &arguments.output)
            }
            Self::Kubeconfig(arguments) => {
                finish(&arguments.text(), Format::Yaml, &arguments.output)
            }
            Self::Prometheus(arguments) => {
                finish(&arguments.text()?, Format::Yaml, &arguments.output)
            }
            Self::Agent(arguments) => finish(&arguments.text(), Format::Lines, &arguments.output),
        }
    }
}

#[cfg(test)]
mod tests;
