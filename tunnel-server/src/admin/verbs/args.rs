//! The arguments of the commands `token`, `nodes`, `ca`, `data` and `healthcheck`.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tunnel_process::config_file::{ConfigFile, ConfigFileError, config_path};
use tunnel_process::output::OutputFormat;
use tunnel_proto::identity::sha256;
use tunnel_proto::wire::label::parse_label;
use tunnel_proto::wire::name::NodeName;

use super::selector::LabelSelector;
use crate::admin::TokenNodes;
use crate::admin::status::{ListOrder, NodeSort};
use crate::config::{DATA_DIR, FILE_NAME, LoadError, RawConfig};
use tunnel_ca::client::CallerName;

/// The arguments that name the data directory, by which a command reaches the running server.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct DataDirArg {
    /// Directory with the CA, keys, tokens and known nodes [default: dataDir of --config, else
    /// /var/lib/tunnel-server]
    #[arg(
        long,
        value_name = "DIR",
        env = "TUNNEL_SERVER_DATA_DIR",
        global = true
    )]
    pub data_dir: Option<PathBuf>,
    /// Configuration file of the server, or off [default: /etc/culvert/tunnel-server.yaml, or
    /// ./tunnel-server.yaml, if it exists]
    #[arg(long, value_name = "FILE", env = "TUNNEL_SERVER_CONFIG", global = true)]
    pub config: Option<PathBuf>,
}

impl DataDirArg {
    /// Returns the data directory. Blocks the thread.
    ///
    /// # Errors
    /// Returns a [`LoadError`] if the file that is to name it cannot be read.
    pub fn path(&self) -> Result<PathBuf, LoadError> {
        if let Some(data_dir) = &self.data_dir {
            return Ok(data_dir.clone());
        }
        let settings = file_settings(self.config.as_deref())?;
        Ok(settings
            .data_dir
            .map_or_else(|| DATA_DIR.into(), PathBuf::from))
    }
}

/// Returns the settings of the file, with mistakes or without: a command needs only one of them. A
/// default file that this user may not read has none.
///
/// # Errors
/// Returns a [`LoadError`] if a file that was named cannot be read.
pub(super) fn file_settings(config: Option<&Path>) -> Result<RawConfig, LoadError> {
    let Some(path) = config_path(config, FILE_NAME) else {
        return Ok(RawConfig::default());
    };
    match ConfigFile::read(&path, RawConfig::default(), sha256) {
        Ok((_, settings)) => Ok(settings),
        Err(ConfigFileError::Unreadable(_)) if config.is_none() => Ok(RawConfig::default()),
        Err(error) => Err(error.into()),
    }
}

/// The output format of the list of nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum NodesOutput {
    /// Table for reading in a terminal.
    Table,
    /// Table with all columns.
    Wide,
    /// JSON for scripts and programs.
    Json,
    /// One name in each line.
    Name,
    /// Entries for ~/.ssh/config, which connect over this server.
    SshConfig,
    /// Inventory for ansible in YAML, with a group for each label.
    Ansible,
}

/// Join tokens, by which agents get their first certificate.
#[derive(Debug, Clone, clap::Subcommand)]
pub enum TokenVerb {
    /// Create a token; prints only the token on standard output, and the full agent command on
    /// standard error
    Create {
        /// Node that the token is for, or a pattern as 'cam-*' for new nodes; * is a part of a label
        #[arg(long, value_name = "NAME")]
        node: TokenNodes,
        /// How many new nodes may use a token for a pattern
        #[arg(long, value_name = "NUMBER")]
        uses: Option<u32>,
        /// Admit a node that uses a token for a pattern only after nodes approve NAME
        #[arg(long)]
        approve: bool,
        /// Time for which the token can be used, as in 30m, 1h or 7d
        #[arg(long, visible_alias = "expires", value_name = "TIME", default_value = "1h", value_parser = humantime::parse_duration)]
        ttl: Duration,
        /// Address by which requests may name the node; repeatable
        #[arg(long = "ip", value_name = "IP")]
        ips: Vec<IpAddr>,
        /// Label of the node, by which nodes --selector and rules select, or of each node that a token
        /// for a pattern enrolls; repeatable. Replaces the labels of an earlier token. In a cluster
        /// rules read the Node object instead
        #[arg(long = "label", value_name = "KEY=VALUE", value_parser = parse_label)]
        labels: Vec<(Box<str>, Box<str>)>,
        /// Without a running server, create the CA if the data directory has none
        #[arg(long)]
        offline: bool,
        /// Output format; JSON has the token and the command in one document on standard output
        #[arg(short, long, value_enum, default_value = "table")]
        output: OutputFormat,
        /// Data directory of the server.
        #[command(flatten)]
        data_dir: DataDirArg,
    },
    /// List the tokens and who used them
    List {
        /// Output format of the list
        #[arg(short, long, value_enum, default_value = "table")]
        output: OutputFormat,
        /// Data directory of the server.
        #[command(flatten)]
        data_dir: DataDirArg,
    },
    /// Revoke a token; certificates issued with it stay valid
    Revoke {
        /// First part of the token, as shown in the list
        id: String,
        /// Output format of the result
        #[arg(short, long, value_enum, default_value = "table")]
        output: OutputFormat,
        /// Data directory of the server.
        #[command(flatten)]
        data_dir: DataDirArg,
    },
}

/// What the data directory has: known nodes, join tokens, orders about nodes, and snapshots.
#[derive(Debug, Clone, clap::Subcommand)]
pub enum DataVerb {
    /// Print the store of a server that does not run, as JSON; without secrets
    Dump {
        /// Data directory of the server.
        #[command(flatten)]
        data_dir: DataDirArg,
    },
    /// Set aside what is damaged and keeps a server from its start, and print what to do again
    ///
    /// A store that is damaged as a whole is renamed, with .damaged at the end of its name. A damaged
    /// order about a node stays in the store, where dump prints it.
    Repair {
        /// Data directory of the server.
        #[command(flatten)]
        data_dir: DataDirArg,
    },
}

/// List the known nodes and whether they are connected.
#[derive(Debug, Clone, clap::Args)]
pub struct NodesArgs {
    /// Action on one node, instead of the list.
    #[command(subcommand)]
    pub verb: Option<NodesVerb>,
    /// Nodes to list; exit code 1 if one of them is not known [default: all]
    #[arg(value_name = "NAME")]
    pub names: Vec<NodeName>,
    /// File with more names, one a line, with comments after #; - is standard input
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Output format of the list
    #[arg(short, long, value_enum, default_value = "table")]
    pub output: NodesOutput,
    /// List only nodes without a connected agent; of a cluster only edge nodes
    #[arg(long)]
    pub away: bool,
    /// Instead of the nodes, list what failed at agents: handshakes, enrollments and admissions, and
    /// sessions that ended within 30 s, as this server remembers them, with what to do
    #[arg(long, conflicts_with_all = ["away", "selector", "watch"])]
    pub failed: bool,
    /// List only nodes with these labels, as in zone=north,edge,!test or "zone in (north, south)":
    /// those of token create --label, of Node objects those of --node-label of the server, and those of
    /// the agent's --label, which the others override
    #[arg(short = 'l', long)]
    pub selector: Option<LabelSelector>,
    /// Order of the list: state, name, transport, rtt, streams, seen, server or version, the other way
    /// around after a -; printed when all of it is read [default: name, as it is read]
    #[arg(long, value_name = "ORDER", allow_hyphen_values = true, value_parser = list_order)]
    pub sort: Option<ListOrder>,
    /// Print rows alone, without headers and totals
    #[arg(long)]
    pub no_headers: bool,
    /// Continue: print a table again in place on a terminal, else the nodes that changed; streams,
    /// bytes and times alone are no change
    #[arg(short, long)]
    pub watch: bool,
    /// Data directory of the server.
    #[command(flatten)]
    pub data_dir: DataDirArg,
}

/// Parses the order of a list that has no traffic.
fn list_order(text: &str) -> Result<ListOrder, &'static str> {
    let order = ListOrder::parse(text);
    let order = order.filter(|order| !matches!(order.sort, NodeSort::Traffic | NodeSort::Errors));
    order.ok_or("use state, name, transport, rtt, streams, seen, server or version, or one of them after a -")
}

/// The nodes that an action is for.
#[derive(Debug, Clone, clap::Args)]
pub struct NodeNames {
    /// Names of the nodes
    #[arg(value_name = "NAME", required_unless_present = "file")]
    pub names: Vec<NodeName>,
    /// File with more names, one a line, with comments after #; - is standard input
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Output format of the result
    #[arg(short, long, value_enum, default_value = "table")]
    pub output: OutputFormat,
}

/// Actions on one node or several.
#[derive(Debug, Clone, clap::Subcommand)]
pub enum NodesVerb {
    /// Refuse nodes until unrevoke, and close their sessions: for a stolen or compromised edge
    ///
    /// No certificate and no token admits the nodes. The order is in force at once, and reaches the
    /// other servers over their connections and in a cluster through the API server.
    Revoke {
        /// Nodes of the order.
        #[command(flatten)]
        names: NodeNames,
    },
    /// Accept the certificates of revoked nodes again; join tokens of before stay void
    Unrevoke {
        /// Nodes of the order.
        #[command(flatten)]
        names: NodeNames,
    },
    /// Refuse the certificates and tokens that nodes have; new tokens admit them again
    Reissue {
        /// Nodes of the order.
        #[command(flatten)]
        names: NodeNames,
    },
    /// Admit nodes that used a token created with --approve; token list shows which wait
    Approve {
        /// Nodes to admit.
        #[command(flatten)]
        names: NodeNames,
    },
    /// List the revoked nodes, and since when
    Revocations {
        /// Output format of the list
        #[arg(short, long, value_enum, default_value = "table")]
        output: OutputFormat,
    },
    /// Forget nodes that will not come back; their certificates stay valid unless they are revoked, and
    /// rules see their labels if they do
    Forget {
        /// Nodes that are gone for good.
        #[command(flatten)]
        names: NodeNames,
    },
}

/// Print the CA's certificate; callers of the HTTPS listener need it.
#[derive(Debug, Clone, clap::Args)]
pub struct CaArgs {
    /// Action on the CA, instead of the certificate.
    #[command(subcommand)]
    pub verb: Option<CaVerb>,
    /// Without a running server, create the CA if the data directory has none
    #[arg(long)]
    pub offline: bool,
    /// Data directory of the server.
    #[command(flatten)]
    pub data_dir: DataDirArg,
}

/// Actions on the CA.
#[derive(Debug, Clone, clap::Subcommand)]
pub enum CaVerb {
    /// Write the CA with its private key, for another standalone server
    ///
    /// Who has the private key can issue certificates for every node and server. The file is
    /// readable by its owner only, and an existing file is not overwritten.
    Export {
        /// File to create; without it the CA is printed
        #[arg(value_name = "FILE")]
        file: Option<PathBuf>,
    },
    /// Use the CA of another standalone server; the server of this data directory must be stopped
    ///
    /// Agents and join tokens of a CA that is replaced are refused from then on.
    Import {
        /// File that `ca export` wrote
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// Replace another CA without asking
        #[arg(long)]
        force: bool,
    },
    /// Replace the CA in stages, through the running server, without a failed request
    ///
    /// Not in a cluster, whose servers share the CA in a Secret.
    ///
    /// Without a flag this creates the new CA and announces it to the agents. With the first
    /// --next the new CA signs, and with the second one the old CA is no longer trusted. Each
    /// stage waits until the agents have renewed their certificates.
    Rotate {
        /// Print the stage, and what the next one waits for
        #[arg(long, group = "action")]
        status: bool,
        /// Enter the next stage
        #[arg(long, group = "action")]
        next: bool,
        /// Return to the old CA
        #[arg(long, group = "action")]
        abort: bool,
        /// Enter the next stage even if agents need a new token then
        #[arg(long, requires = "next")]
        force: bool,
        /// Output format of the stage
        #[arg(short, long, value_enum, default_value = "table")]
        output: OutputFormat,
    },
    /// Make a certificate for a caller: a user of `connect`, Prometheus, kube-apiserver
    ///
    /// Creates NAME.key, NAME.crt and server-ca.crt, by which the caller verifies the server.
    /// Callers' certificates are of a CA of their own, client-ca.crt in the data directory, which
    /// the server accepts with --client-ca.
    Client {
        /// Name of the caller, as the access log shows it
        #[arg(value_name = "NAME")]
        name: CallerName,
        /// Days for which the certificate is valid
        #[arg(long, value_name = "N", default_value_t = 365, value_parser = clap::value_parser!(u16).range(1..=3650))]
        days: u16,
        /// Directory for the files
        #[arg(short, long, value_name = "DIR", default_value = ".")]
        dir: PathBuf,
    },
}

/// Ask the running server whether it is ready.
#[derive(Debug, Clone, clap::Args)]
pub struct HealthcheckArgs {
    /// Meta address of the server [default: metaListen of --config, else 127.0.0.1:10265]
    #[arg(long, value_name = "ADDR", env = "TUNNEL_SERVER_META_LISTEN")]
    pub meta_listen: Option<String>,
    /// Configuration file of the server, or off [default: /etc/culvert/tunnel-server.yaml, or
    /// ./tunnel-server.yaml, if it exists]
    #[arg(long, value_name = "FILE", env = "TUNNEL_SERVER_CONFIG")]
    pub config: Option<PathBuf>,
}

/// Have the running server read its files again.
#[derive(Debug, Clone, clap::Args)]
pub struct ReloadArgs {
    /// After that, end requests and streams in progress that the rules in force refuse. Without this
    /// flag they go on
    #[arg(long)]
    pub end_running: bool,
    /// Output format of the result
    #[arg(short, long, value_enum, default_value = "table")]
    pub output: OutputFormat,
    /// Data directory of the server.
    #[command(flatten)]
    pub data_dir: DataDirArg,
}
