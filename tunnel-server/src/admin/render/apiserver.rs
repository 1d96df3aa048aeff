//! The entries of kube-apiserver's static pod, for an egress selector or for the server's DNS.

use std::net::IpAddr;

use super::OutputArgs;
use super::values::yaml;

/// The flags of `render apiserver`.
#[derive(Debug, Clone, clap::Args)]
pub struct ApiserverArgs {
    /// Address of the server's DNS on port 53, which kube-apiserver asks first
    #[arg(long, value_name = "IP", required_unless_present = "egress_selector")]
    pub dns_server: Option<IpAddr>,
    /// Resolver that kube-apiserver asks when the server's DNS does not answer; twice at most
    #[arg(long, value_name = "IP", requires = "dns_server")]
    pub second_nameserver: Vec<IpAddr>,
    /// Use the egress selector configuration in this file, instead of DNS [default:
    /// /etc/kubernetes/egress-selector.yaml]
    #[arg(
        long,
        value_name = "FILE",
        num_args = 0..=1,
        default_missing_value = "/etc/kubernetes/egress-selector.yaml",
        conflicts_with = "dns_server"
    )]
    pub egress_selector: Option<String>,
    /// With --egress-selector, the directory of the server's socket, or of the certificates for a
    /// server on another host
    #[arg(long, value_name = "DIR", default_value = "/run/culvert")]
    pub mount_dir: String,
    /// Where the text goes.
    #[command(flatten)]
    pub output: OutputArgs,
}

impl ApiserverArgs {
    pub(super) fn text(&self) -> String {
        match &self.egress_selector {
            Some(file) => egress_selector(file, &self.mount_dir),
            None => {
                let nameservers = self.dns_server.iter().chain(&self.second_nameserver);
                // The kubelet passes three nameservers at most.
                let nameservers: Vec<_> = nameservers
                    .take(3)
                    .map(|address| yaml(&address.to_string()))
                    .collect();
                dns(&nameservers.join(", "))
            }
        }
    }
}

fn egress_selector(file: &str, mount_dir: &str) -> String {
    let flag = yaml(&format!("--egress-selector-config-file={file}"));
    let (file, directory) = (yaml(file), yaml(mount_dir));
    format!(
        "\
spec:
  containers:
    - command:
        - kube-apiserver
        - {flag}
      volumeMounts:
        - {{ name: egress-selector, mountPath: {file}, readOnly: true }}
        - {{ name: culvert, mountPath: {directory} }}
  volumes:
    - {{ name: egress-selector, hostPath: {{ path: {file}, type: File }} }}
    - {{ name: culvert, hostPath: {{ path: {directory}, type: DirectoryOrCreate }} }}
"
    )
}

fn dns(nameservers: &str) -> String {
    format!(
        "\
spec:
  hostNetwork: true
  dnsPolicy: None
  dnsConfig:
    nameservers: [{nameservers}]
    options: [{{ name: ndots, value: \"0\" }}, {{ name: timeout, value: \"1\" }}, {{ name: attempts, value: \"2\" }}]
  containers:
    - command:
        - kube-apiserver
        - --kubelet-preferred-address-types=Hostname,InternalIP,ExternalIP
"
    )
}
