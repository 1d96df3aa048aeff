//! kube-apiserver's egress selector configuration.

use super::OutputArgs;
use super::values::{ServerAddress, yaml};

/// The flags of `render egress-selector`.
#[derive(Debug, Clone, clap::Args)]
pub struct EgressSelectorArgs {
    /// Unix socket of the server on kube-apiserver's host, its --connect-uds
    #[arg(
        long,
        value_name = "PATH",
        default_value = "/run/culvert/connect.sock",
        conflicts_with = "server"
    )]
    pub uds: String,
    /// Address of a server on another host, its --connect-listen, instead of the socket
    #[arg(long, value_name = "HOST:PORT")]
    pub server: Option<ServerAddress>,
    /// With --server, the file on kube-apiserver's host with the CA that `tunnel-server ca` prints
    #[arg(
        long,
        value_name = "FILE",
        default_value = "/etc/kubernetes/culvert/ca.crt"
    )]
    pub ca_file: String,
    /// With --server, kube-apiserver's client certificate, of the server's --client-ca
    #[arg(
        long,
        value_name = "FILE",
        default_value = "/etc/kubernetes/culvert/client.crt"
    )]
    pub cert_file: String,
    /// With --server, the private key of --cert-file
    #[arg(
        long,
        value_name = "FILE",
        default_value = "/etc/kubernetes/culvert/client.key"
    )]
    pub key_file: String,
    /// Where the text goes.
    #[command(flatten)]
    pub output: OutputArgs,
}

impl EgressSelectorArgs {
    pub(super) fn text(&self) -> String {
        let transport = match &self.server {
            None => format!("        uds:\n          udsName: {}\n", yaml(&self.uds)),
            Some(server) => format!(
                "        tcp:
          url: {}
          tlsConfig:
            caBundle: {}
            clientCert: {}
            clientKey: {}
",
                yaml(&format!("https://{server}")),
                yaml(&self.ca_file),
                yaml(&self.cert_file),
                yaml(&self.key_file)
            ),
        };
        format!("{HEAD}{transport}")
    }
}

const HEAD: &str = "\
apiVersion: apiserver.k8s.io/v1beta1
kind: EgressSelectorConfiguration
egressSelections:
  - name: cluster
    connection:
      proxyProtocol: HTTPConnect
      transport:
";
