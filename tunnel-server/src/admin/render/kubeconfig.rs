//! A kubeconfig for an API server on a node, through a CONNECT listener of the server.

use tunnel_proto::wire::name::{NodeName, Port};

use super::OutputArgs;
use super::values::{ServerAddress, proxy_url, yaml};

/// The flags of `render kubeconfig`.
#[derive(Debug, Clone, clap::Args)]
pub struct KubeconfigArgs {
    /// Node on which the API server runs
    #[arg(value_name = "NODE")]
    pub node: NodeName,
    /// Port of the API server on the node
    #[arg(long, value_name = "PORT", default_value = "6443")]
    pub port: Port,
    /// Address of the server's CONNECT listener, its --connect-listen
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8131")]
    pub proxy: ServerAddress,
    /// Name of the server's --connect-auth; replace PASSWORD in the text
    #[arg(long, value_name = "NAME")]
    pub proxy_user: Option<String>,
    /// Name in the API server's certificate
    #[arg(long, value_name = "NAME", default_value = "kubernetes.default.svc")]
    pub tls_server_name: NodeName,
    /// File with the CA of the API server, relative to the kubeconfig [default: NODE-ca.crt]
    #[arg(long, value_name = "FILE")]
    pub ca_file: Option<String>,
    /// File with the user's client certificate; without it or a token the text has no user, and
    /// another file of KUBECONFIG has the user NODE
    #[arg(long, value_name = "FILE", requires = "key_file")]
    pub cert_file: Option<String>,
    /// File with the private key of --cert-file
    #[arg(long, value_name = "FILE", requires = "cert_file")]
    pub key_file: Option<String>,
    /// File with the user's token, instead of a certificate
    #[arg(long, value_name = "FILE", conflicts_with = "cert_file")]
    pub token_file: Option<String>,
    /// Where the text goes.
    #[command(flatten)]
    pub output: OutputArgs,
}

impl KubeconfigArgs {
    pub(super) fn text(&self) -> String {
        let name = yaml(self.node.as_str());
        let server = yaml(&format!("https://{}:{}", self.node, self.port));
        let tls_name = yaml(self.tls_server_name.as_str());
        let ca_file = match &self.ca_file {
            Some(file) => yaml(file),
            None => yaml(&format!("{}-ca.crt", self.node)),
        };
        let proxy = proxy_url(&self.proxy, self.proxy_user.as_deref());
        let user = match (&self.cert_file, &self.key_file, &self.token_file) {
            (Some(cert), Some(key), _) => format!(
                "      client-certificate: {}\n      client-key: {}\n",
                yaml(cert),
                yaml(key)
            ),
            (_, _, Some(file)) => format!("      tokenFile: {}\n", yaml(file)),
            // The command line requires both files of a certificate.
            (_, _, None) => String::new(),
        };
        let users = if user.is_empty() {
            user
        } else {
            format!("users:\n  - name: {name}\n    user:\n{user}")
        };
        format!(
            "\
apiVersion: v1
kind: Config
clusters:
  - name: {name}
    cluster:
      server: {server}
      tls-server-name: {tls_name}
      certificate-authority: {ca_file}
      proxy-url: {proxy}
{users}contexts:
  - name: {name}
    context: {{ cluster: {name}, user: {name} }}
current-context: {name}
"
        )
    }
}
