//! The lines of a Corefile by which pods resolve names of nodes.

use tunnel_proto::wire::name::NodeName;

use super::OutputArgs;
use super::values::{CorefilePath, ResolverAddress, UpstreamResolver};

/// The flags of `render coredns`.
#[derive(Debug, Clone, clap::Args)]
pub struct CorednsArgs {
    /// Address of the server's DNS, its --dns-listen or a Service that leads there
    #[arg(long, value_name = "IP[:PORT]", required_unless_present = "hosts")]
    pub dns_server: Option<ResolverAddress>,
    /// Resolver for all names when the server's DNS does not answer
    #[arg(long, value_name = "IP[:PORT]", default_value = "/etc/resolv.conf")]
    pub upstream: UpstreamResolver,
    /// Ask the server's DNS only for names below its --dns-zone: prints a server block of its own
    #[arg(long, value_name = "ZONE", requires = "dns_server")]
    pub zone: Option<NodeName>,
    /// Read the records from this file, in which ConfigMap yurt-tunnel-nodes is mounted, instead
    /// of asking the server's DNS [default: /etc/edge/tunnel-nodes]
    #[arg(
        long,
        value_name = "FILE",
        num_args = 0..=1,
        default_missing_value = "/etc/edge/tunnel-nodes",
        conflicts_with = "dns_server"
    )]
    pub hosts: Option<CorefilePath>,
    /// Where the text goes.
    #[command(flatten)]
    pub output: OutputArgs,
}

impl CorednsArgs {
    pub(super) fn text(&self) -> String {
        match (&self.hosts, &self.dns_server, &self.zone) {
            (Some(file), _, _) => hosts(file),
            (None, Some(server), Some(zone)) => {
                format!("{zone}:53 {{\n    errors\n    cache 5\n    forward . {server}\n}}\n")
            }
            (None, Some(server), None) => format!(
                "forward . {server} {} {{\n    policy sequential\n}}\n",
                self.upstream
            ),
            // The command line requires one of both.
            (None, None, _) => String::new(),
        }
    }
}

fn hosts(file: &CorefilePath) -> String {
    format!(
        "\
hosts {file} {{
    ttl 5
    reload 300ms
    no_reverse
    fallthrough
}}
"
    )
}
