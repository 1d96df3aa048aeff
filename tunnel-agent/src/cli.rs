//! The command line: verbs, flags and their help.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;

use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::Shell;
use tunnel_process::output::OutputFormat;

use crate::config::{RawConfig, is_local};
use crate::doctor::DoctorOptions;
use crate::render::EdgeApiserverArgs;

/// Edge side of Culvert: dials out to tunnel-server and connects its requests to this node's own
/// ports
///
/// The agent opens no listening port towards the network. It keeps outgoing sessions to
/// tunnel-server, one per server; requests for this node arrive on them and are dialed here,
/// within the dial policy that the flags of `run` set.
#[derive(Debug, Parser)]
#[command(name = "tunnel-agent", version, after_long_help = AFTER_HELP, arg_required_else_help = true)]
pub struct Cli {
    /// The verb to run.
    #[command(subcommand)]
    pub subcommand: Command,
}

/// The verbs of the binary.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the agent until SIGTERM or SIGINT; a second signal stops at once
    ///
    /// Settings are taken from flags, then the environment, then the file of --config, then the
    /// defaults. Each flag is a key of the file (same words, camelCase): --node-name is nodeName.
    /// The section `limits:` exists in the file only.
    Run(Box<ConfigArgs>),
    /// Load the configuration as `run` would, with the certificate or the token and the addresses of
    /// the listeners, print all mistakes at once, and exit
    ///
    /// Exit code 64: settings or the content of a file are wrong; 1: what is needed is absent or in use
    /// at this moment.
    CheckConfig(Box<CheckConfigArgs>),
    /// Join this host to a server: write configuration, join token and systemd unit, start the
    /// service, and wait for its session
    ///
    /// The files are /etc/culvert/tunnel-agent.yaml and /etc/culvert/tunnel-agent.token, and the unit
    /// with its user if no package has installed it. Other keys of an existing configuration stay.
    /// Another run with the same values changes nothing. A value that differs is replaced after a
    /// question, or with --yes. Without a session after a minute the command prints the reason, and
    /// the files and the service are as before. On a host without systemd the command prints how to
    /// run the agent.
    Join(JoinArgs),
    /// Ask a running agent on this host whether it is ready: exit code 0 when it has a session, or
    /// waits for another agent of its node on this host, else 1
    ///
    /// Meant for images without a shell: HEALTHCHECK CMD ["/tunnel-agent", "healthcheck"].
    Healthcheck(HealthcheckArgs),
    /// Have the running agent read its files again, as SIGHUP does, and print what became of them
    ///
    /// A file with a mistake changes nothing. Some settings need a restart. Exit code 64: the file
    /// cannot be used; 1: no agent runs. The command uses the Unix socket of the agent, so it needs the
    /// agent's user or root.
    Reload(ReloadArgs),
    /// Show the sessions of the agent on this host: server, transport, since when, or why not and when
    /// the next dial is; exit code 0 when one is live, else 1
    Status(StatusArgs),
    /// Collect facts about this host's agent for a bug report, in a JSON file without secrets
    ///
    /// The file has the version, the settings, the conditions, the metrics, and the names, sizes and
    /// modes of the files in the data directory. Names and addresses are not replaced: read the file
    /// before you pass it on. A fact that cannot be obtained is an error in its place. The command
    /// takes at most 30 s.
    Diag(Box<DiagArgs>),
    /// Look for what keeps this node from being reached, and print how to fix it
    ///
    /// The command dials the servers with the settings, the certificate and the proxy of `run`, over
    /// TCP and UDP, asks the running agent, and looks at this host. It enrolls with no server, changes
    /// nothing and prints no secrets. A check whose facts cannot be obtained is skipped, with the
    /// reason. Exit code 0: no faults; 1: warnings; 2: errors.
    Doctor(Box<DoctorArgs>),
    /// Print files that lead clients on this node through the agent
    Render {
        /// The clients that the files are for.
        #[command(subcommand)]
        object: RenderObject,
    },
    /// Give an interface of this host a local address for --cloud-listen, or remove it
    Address {
        /// The change, with the address.
        #[command(subcommand)]
        change: AddressChange,
    },
    /// Print a shell completion script
    Completion {
        /// The shell to print the script for.
        shell: Shell,
    },
    /// Print the version and exit
    Version,
}

/// The sources of settings.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct ConfigArgs {
    /// Configuration file in YAML format, or off [default: /etc/culvert/tunnel-agent.yaml, or
    /// ./tunnel-agent.yaml, if it exists]
    #[arg(long, env = "TUNNEL_AGENT_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Settings from flags and environment variables.
    #[command(flatten)]
    pub settings: RawConfig,
}

/// The sources of `check-config`.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct CheckConfigArgs {
    /// Check the settings alone, and neither credentials nor addresses: for the configuration of
    /// another host
    #[arg(long)]
    pub settings_only: bool,
    /// Sources of the settings.
    #[command(flatten)]
    pub source: ConfigArgs,
}

/// The objects of `render`.
#[derive(Debug, Subcommand)]
pub enum RenderObject {
    /// Print what leads the kubelet, kubeconfigs, pods or Yurthub on this node to the API server
    ///
    /// The agent needs --cloud-listen apiserver=ADDR:PORT with the same addresses, and the server a
    /// target of this name. Nothing is changed on this host.
    EdgeApiserver(EdgeApiserverArgs),
}

/// The output and the sources of `diag`.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct DiagArgs {
    /// File to create, with mode 0600, or - for standard output; an existing file is not overwritten
    /// [default: tunnel-agent-diag-TIME.json in the current directory]
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Settings of the agent, as `run` has them.
    #[command(flatten)]
    pub source: ConfigArgs,
}

/// The changes of `address`.
#[derive(Debug, Subcommand)]
pub enum AddressChange {
    /// Add the address, unless the interface has it; needs the capability NET_ADMIN
    Add(AddressArgs),
    /// Remove the address, if the interface has it; needs the capability NET_ADMIN
    Remove(AddressArgs),
}

/// The address and its interface.
#[derive(Debug, Clone, clap::Args)]
pub struct AddressArgs {
    /// Loopback or link-local address, as in 169.254.2.1, without a prefix length
    #[arg(value_name = "ADDR", value_parser = local_address)]
    pub address: IpAddr,
    /// Interface of this host
    #[arg(long, value_name = "NAME", default_value = "lo")]
    pub interface: String,
}

/// The values of `join`, and what it may do.
#[derive(Debug, Clone, clap::Args)]
pub struct JoinArgs {
    /// Address where tunnel-server accepts agents; repeat it for several addresses
    #[arg(long, value_name = "HOST:PORT", value_delimiter = ',', required = true)]
    pub server: Vec<String>,
    /// Name of this node, as in `tunnel-server token create --node` [default: as in the
    /// configuration, else the host name]
    #[arg(long, value_name = "NAME")]
    pub node_name: Option<String>,
    /// File that contains the join token, or - for standard input [default: standard input, unless
    /// that is a terminal]
    ///
    /// No flag takes the token itself, because a command line can be read by every user of the host.
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Write the files below this directory, as for an image, and start nothing
    #[arg(long, value_name = "DIR")]
    pub root: Option<PathBuf>,
    /// Write the files, and neither enable nor start the service
    #[arg(long)]
    pub no_start: bool,
    /// Print what would be done, and change nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Replace values that differ without asking
    #[arg(long)]
    pub yes: bool,
}

/// The checks and the sources of `doctor`.
#[derive(Debug, Clone, clap::Args)]
pub struct DoctorArgs {
    /// Selection of the checks and form of the report.
    #[command(flatten)]
    pub options: DoctorOptions,
    /// Settings of the agent, as `run` has them.
    #[command(flatten)]
    pub source: ConfigArgs,
}

/// The address of a running agent's meta port.
#[derive(Debug, clap::Args)]
pub struct MetaArgs {
    /// Configuration file in YAML format, of which metaSocket, metaListen and dataDir are used, or off
    /// [default: /etc/culvert/tunnel-agent.yaml, or ./tunnel-agent.yaml, if it exists]
    #[arg(long, env = "TUNNEL_AGENT_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Data directory of the agent, whose socket is asked if the meta port is off [default:
    /// /var/lib/tunnel-agent]
    #[arg(long, env = "TUNNEL_AGENT_DATA_DIR", value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// Address of the agent's meta port, or off [default: 127.0.0.1:10266]
    #[arg(long, env = "TUNNEL_AGENT_META_LISTEN", value_name = "ADDR|off")]
    pub meta_listen: Option<String>,
    /// Unix socket of the agent, in place of its meta port
    #[arg(long, env = "TUNNEL_AGENT_META_SOCKET", value_name = "FILE")]
    pub meta_socket: Option<PathBuf>,
}

/// The output of `reload`, and the socket to ask.
#[derive(Debug, clap::Args)]
pub struct ReloadArgs {
    /// Format of the output
    #[arg(short, long, value_enum, default_value = "table")]
    pub output: OutputFormat,
    /// Configuration file in YAML format, of which metaSocket and dataDir are used, or off
    /// [default: /etc/culvert/tunnel-agent.yaml, or ./tunnel-agent.yaml, if it exists]
    #[arg(long, env = "TUNNEL_AGENT_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Data directory of the agent [default: /var/lib/tunnel-agent]
    #[arg(long, env = "TUNNEL_AGENT_DATA_DIR", value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// Unix socket of the agent [default: admin.sock in the data directory]
    #[arg(long, env = "TUNNEL_AGENT_META_SOCKET", value_name = "FILE")]
    pub meta_socket: Option<PathBuf>,
}

/// What `healthcheck` asks, and where.
#[derive(Debug, clap::Args)]
pub struct HealthcheckArgs {
    /// Ask only whether the agent runs
    #[arg(long)]
    pub live: bool,
    /// Address of the meta port.
    #[command(flatten)]
    pub meta: MetaArgs,
}

/// The output of `status`, and the address to ask.
#[derive(Debug, clap::Args)]
pub struct StatusArgs {
    /// Format of the output
    #[arg(short, long, value_enum, default_value = "table")]
    pub output: OutputFormat,
    /// Address of the meta port.
    #[command(flatten)]
    pub meta: MetaArgs,
}

/// Parses an address that `--cloud-listen` accepts.
fn local_address(text: &str) -> Result<IpAddr, String> {
    let ip: IpAddr = text
        .parse()
        .map_err(|_syntax| "not an IP address".to_owned())?;
    let ip = ip.to_canonical();
    if [
        IpAddr::from(Ipv4Addr::LOCALHOST),
        Ipv6Addr::LOCALHOST.into(),
    ]
    .contains(&ip)
    {
        Err("every host has this address; use another one, such as 169.254.2.1".to_owned())
    } else if is_local(ip) {
        Ok(ip)
    } else {
        Err("neither a loopback nor a link-local address".to_owned())
    }
}

/// Returns the command with all its flags, for completion and the generated reference.
pub fn command() -> clap::Command {
    Cli::command()
}

const AFTER_HELP: &str = "\
First start of a node (the token comes from `tunnel-server token create --node worker-1`):
  tunnel-agent join --server cloud.example.com:10262 --node-name worker-1 --token-file ./token
The same without systemd:
  tunnel-agent run --server cloud.example.com:10262 --node-name worker-1 --token-file ./token

Exit codes: 0 fine; 64 usage or configuration; 1 failed to start or broke. doctor: 1 warnings, 2 errors.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_is_consistent_and_every_flag_of_run_is_explained_and_has_its_variable() {
        command().debug_assert();
        let run = command();
        let run = run.find_subcommand("run").unwrap();
        for flag in run.get_arguments() {
            assert!(flag.get_help().is_some(), "{}", flag.get_id());
            let variable = flag.get_env().unwrap().to_string_lossy().into_owned();
            let expected = flag.get_id().as_str().to_uppercase();
            assert_eq!(variable, format!("TUNNEL_AGENT_{expected}"));
        }
        let mut flags = run.get_arguments();
        assert!(flags.any(|flag| flag.get_id() == "server"));
    }

    #[test]
    fn only_local_addresses_can_be_added() {
        for (text, expected) in [
            ("169.254.2.1", true),
            ("127.0.0.9", true),
            ("fe80::1", true),
            ("127.0.0.1", false),
            ("::1", false),
            ("::ffff:169.254.2.1", true),
            ("0.0.0.0", false),
            ("10.0.0.1", false),
            ("169.254.2.1/32", false),
            ("fe80::1%lo", false),
            ("localhost", false),
            ("2001:db8::1", false),
        ] {
            let parsed = Cli::try_parse_from(["tunnel-agent", "address", "add", text]);
            assert_eq!(parsed.is_ok(), expected, "{text}");
        }
    }

    #[test]
    fn subcommand_keeps_its_own_description() {
        let command = command();
        for (subcommand, begin) in [("run", "Run the agent"), ("check-config", "Load the")] {
            let about = command.find_subcommand(subcommand).unwrap().get_about();
            assert!(about.unwrap().to_string().starts_with(begin), "{about:?}");
        }
    }
}
