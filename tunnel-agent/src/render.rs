//! The verb `render`: prints the files that lead clients on an edge node to the API server, over a
//! listener for targets of the cloud.
//!
//! Addresses are of type `IpAddr`, so that no file needs quotes.

use std::net::{IpAddr, SocketAddr};

pub(crate) mod nft_table;

use nft_table::{NFT_FILE, TABLE, family};

/// The file to print, and its addresses.
#[derive(Debug, Clone, clap::Args)]
pub struct EdgeApiserverArgs {
    /// The file to print [default: all files, with comments]
    #[arg(long = "way", value_enum, value_name = "WAY")]
    pub file: Option<EdgeApiserverFile>,
    /// Address of the Service kubernetes in the namespace default; nft needs it
    #[arg(long, value_name = "IP")]
    pub service_ip: Option<IpAddr>,
    /// Listener of the agent for programs on the host
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:10268")]
    pub listen: SocketAddr,
    /// Listener of the agent for pods
    #[arg(long, value_name = "ADDR:PORT", default_value = "169.254.2.1:10268")]
    pub pod_listen: SocketAddr,
}

/// The files of `render edge-apiserver`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum EdgeApiserverFile {
    /// Cluster of a kubeconfig.
    Kubeconfig,
    /// Table of nft that redirects the Service kubernetes.
    Nft,
    /// systemd unit that loads and removes the table, with the address of the listener.
    Unit,
    /// Variables of a pod template.
    Env,
    /// Argument that sets Yurthub's server.
    Yurthub,
}

/// The reason why the files cannot be rendered.
#[derive(Debug, thiserror::Error)]
pub enum RenderError {
    #[error("--service-ip is missing; give the address of the Service kubernetes")]
    NoServiceIp,
    #[error(
        "--service-ip {0} and --pod-listen {1} are of different families; give an address of the same family"
    )]
    Families(IpAddr, SocketAddr),
    #[error(
        "--pod-listen {0} is a loopback address, which connections of pods do not reach; give a link-local address"
    )]
    Loopback(SocketAddr),
    #[error(
        "--listen {0} has a port of Yurthub; give another port here and in --cloud-listen, as in 127.0.0.1:10270"
    )]
    YurthubPort(SocketAddr),
}

/// Returns the requested file, or all files with a comment before each.
///
/// # Errors
/// Returns [`RenderError`] if the addresses do not fit the file.
pub fn edge_apiserver(arguments: &EdgeApiserverArgs) -> Result<String, RenderError> {
    if let Some(file) = arguments.file {
        return render(file, arguments);
    }
    let (listen, pod_listen) = (arguments.listen, arguments.pod_listen);
    let mut text = format!(
        "# The agent needs --cloud-listen apiserver={listen} --cloud-listen apiserver={pod_listen}\n"
    );
    for (title, file) in [
        ("1. kubelet and kubeconfigs", EdgeApiserverFile::Kubeconfig),
        ("2. pods, unchanged: rules", EdgeApiserverFile::Nft),
        ("2. pods, unchanged: unit", EdgeApiserverFile::Unit),
        ("3. pods, by two variables", EdgeApiserverFile::Env),
        ("4. Yurthub", EdgeApiserverFile::Yurthub),
    ] {
        let body = match render(file, arguments) {
            Err(error @ (RenderError::NoServiceIp | RenderError::YurthubPort(_))) => {
                format!("# {error}\n")
            }
            rendered => rendered?,
        };
        text.push_str(&format!("\n# ---- {title} ----\n{body}"));
    }
    Ok(text)
}

fn render(file: EdgeApiserverFile, arguments: &EdgeApiserverArgs) -> Result<String, RenderError> {
    let (listen, pod_listen) = (arguments.listen, arguments.pod_listen);
    Ok(match file {
        EdgeApiserverFile::Kubeconfig => kubeconfig(listen),
        EdgeApiserverFile::Nft => {
            let service_ip = arguments.service_ip.ok_or(RenderError::NoServiceIp)?;
            if service_ip.is_ipv4() != pod_listen.is_ipv4() {
                return Err(RenderError::Families(service_ip, pod_listen));
            }
            check_pod_listen(pod_listen)?;
            nft(service_ip, pod_listen)
        }
        EdgeApiserverFile::Unit => {
            check_pod_listen(pod_listen)?;
            unit(pod_listen.ip())
        }
        EdgeApiserverFile::Env => env(pod_listen),
        EdgeApiserverFile::Yurthub if YURTHUB_PORTS.contains(&listen.port()) => {
            return Err(RenderError::YurthubPort(listen));
        }
        EdgeApiserverFile::Yurthub => yurthub(listen),
    })
}

/// The kernel drops connections that are redirected from another interface to loopback.
fn check_pod_listen(pod_listen: SocketAddr) -> Result<(), RenderError> {
    if pod_listen.ip().is_loopback() {
        return Err(RenderError::Loopback(pod_listen));
    }
    Ok(())
}

fn kubeconfig(listen: SocketAddr) -> String {
    format!(
        "\
# Set these two fields in the cluster of the kubeconfig. The CA and the user stay as they are: the
# certificate of the API server is verified, by its usual name.
clusters:
- name: kubernetes
  cluster:
    server: https://{listen}
    tls-server-name: kubernetes.default.svc
"
    )
}

/// Returns the table. Priority -101 is before the rules of kube-proxy. It is a number in both chains,
/// since some versions of nft know the name dstnat in prerouting only. The first two lines make the
/// file replace its table.
fn nft(service_ip: IpAddr, pod_listen: SocketAddr) -> String {
    let family = family(service_ip);
    let rule = format!("{family} daddr {service_ip} tcp dport 443 dnat to {pod_listen}");
    format!(
        "\
table {family} {TABLE}
delete table {family} {TABLE}
table {family} {TABLE} {{
  chain prerouting {{
    type nat hook prerouting priority -101; policy accept;
    {rule}
  }}
  chain output {{
    type nat hook output priority -101; policy accept;
    {rule}
  }}
}}
"
    )
}

fn unit(ip: IpAddr) -> String {
    let family = family(ip);
    format!(
        "\
[Unit]
Description=Culvert: connections of this node to the Service kubernetes go to tunnel-agent
Before=kubelet.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/bin/env tunnel-agent address add {ip}
ExecStart=/usr/bin/env nft -f {NFT_FILE}
ExecStop=/usr/bin/env nft delete table {family} {TABLE}
ExecStop=/usr/bin/env tunnel-agent address remove {ip}

[Install]
WantedBy=multi-user.target
"
    )
}

fn env(pod_listen: SocketAddr) -> String {
    let (ip, port) = (pod_listen.ip(), pod_listen.port());
    format!(
        "\
# For the containers of a pod template. The certificate of the API server needs the SAN {ip}.
env:
- name: KUBERNETES_SERVICE_HOST
  value: \"{ip}\"
- name: KUBERNETES_SERVICE_PORT
  value: \"{port}\"
"
    )
}

fn yurthub(listen: SocketAddr) -> String {
    let ip = listen.ip();
    format!(
        "\
# Argument of yurthub. The certificate of the API server needs the SAN {ip}.
--server-addr=https://{listen}
"
    )
}

/// Ports of Yurthub's own listeners.
const YURTHUB_PORTS: [u16; 3] = [10261, 10267, 10268];

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command, RenderObject};

    fn arguments(flags: &str) -> Result<EdgeApiserverArgs, clap::Error> {
        let words = "tunnel-agent render edge-apiserver".split(' ');
        let parsed = Cli::try_parse_from(words.chain(flags.split_whitespace()))?;
        match parsed.subcommand {
            Command::Render {
                object: RenderObject::EdgeApiserver(arguments),
            } => Ok(arguments),
            other => panic!("{other:?}"),
        }
    }

    fn rendered(flags: &str) -> Result<String, RenderError> {
        edge_apiserver(&arguments(flags).unwrap())
    }

    #[test]
    fn nft_table_replaces_itself_and_has_the_rule_in_both_chains() {
        let text = rendered("--way nft --service-ip 10.96.0.1").unwrap();
        let rule = "    ip daddr 10.96.0.1 tcp dport 443 dnat to 169.254.2.1:10268\n";
        assert_eq!(text.matches(rule).count(), 2, "{text}");
        assert_eq!(text.matches(" priority -101;").count(), 2, "{text}");
        let first = "table ip culvert_edge_apiserver\ndelete table ip culvert_edge_apiserver\n";
        assert!(text.starts_with(first), "{text}");
        let v6 = rendered("--way nft --service-ip fd00::1 --pod-listen [fe80::1]:1").unwrap();
        let rule = "ip6 daddr fd00::1 tcp dport 443 dnat to [fe80::1]:1\n";
        assert!(v6.contains(rule), "{v6}");
    }

    #[test]
    fn unit_removes_what_it_adds() {
        let text = rendered("--way unit").unwrap();
        for line in [
            "ExecStart=/usr/bin/env tunnel-agent address add 169.254.2.1",
            "ExecStart=/usr/bin/env nft -f /etc/culvert/edge-apiserver.nft",
            "ExecStop=/usr/bin/env nft delete table ip culvert_edge_apiserver",
            "ExecStop=/usr/bin/env tunnel-agent address remove 169.254.2.1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}:\n{text}");
        }
    }

    #[test]
    fn other_clients_get_the_address_of_their_listener() {
        for (flags, expected) in [
            ("--way kubeconfig", "    server: https://127.0.0.1:10268\n"),
            ("--way env", "  value: \"169.254.2.1\"\n"),
            (
                "--way yurthub --listen [::1]:10270",
                "\n--server-addr=https://[::1]:10270\n",
            ),
        ] {
            let text = rendered(flags).unwrap();
            assert!(text.contains(expected), "{flags}: {text}");
        }
        let all = rendered("--service-ip 10.96.0.1").unwrap();
        for file in [
            "tls-server-name",
            "daddr",
            "[Unit]",
            "_PORT",
            "# --listen 127",
        ] {
            assert!(all.contains(file), "{file}: {all}");
        }
        assert!(rendered("").unwrap().contains("# --service-ip is"));
    }

    #[test]
    fn addresses_that_do_not_fit_are_errors() {
        assert!(arguments("--service-ip 10.96.0.1;reboot").is_err());
        for (flags, hint) in [
            ("--way nft", "--service-ip is missing"),
            ("--way nft --service-ip fd00::1", "different families"),
            ("--way unit --pod-listen 127.0.0.1:1", "loopback"),
            ("--way yurthub", "port of Yurthub"),
        ] {
            let error = rendered(flags).unwrap_err().to_string();
            assert!(error.contains(hint), "{flags}: {error}");
        }
    }
}
