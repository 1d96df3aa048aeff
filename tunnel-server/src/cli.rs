//! The command line: commands, flags and their help.

use std::path::PathBuf;

use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::Shell;
use tunnel_process::output::OutputFormat;
use tunnel_proto::wire::name::NodeName;

use crate::admin::doctor::DoctorOptions;
use crate::admin::policy::PolicyRequest;
use crate::admin::render::RenderVerb;
use crate::admin::verbs::connect::ConnectArgs;
use crate::admin::verbs::{
    CaArgs, DataVerb, HealthcheckArgs, NodesArgs, PingArgs, ReloadArgs, TokenVerb,
};
use crate::config::RawConfig;

/// Culvert's cloud side: accepts agents and forwards requests for edge nodes to them
///
/// Agents connect to port 10262. Callers reach a node by its name: through the HTTP listener
/// (10264), the HTTPS listener (10263), extra ports bound with --proxy-port-listen, or TCP services
/// of the configuration file.
#[derive(Debug, Parser)]
#[command(name = "tunnel-server", version, after_long_help = AFTER_HELP, arg_required_else_help = true)]
pub struct Cli {
    #[command(subcommand)]
    pub verb: Verb,
}

/// The commands of the binary.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Run the server until SIGTERM or SIGINT; a second signal stops it at once
    ///
    /// Settings are taken from flags, then the environment, then the file of --config, then the
    /// defaults. Each flag is a key of the file (same words, camelCase): --http-listen is
    /// httpListen. Only the file has the sections `services:` and `limits:`.
    Run(Box<ConfigArgs>),
    /// Load the configuration and the files that it names as `run` would, try the addresses of the
    /// listeners, print all mistakes at once, and exit
    ///
    /// Exit code 64: settings or the content of a file are wrong; 1: files are absent or cannot be read
    /// as they are, or an address is in use at this moment. The addresses are not tried while a server
    /// runs with the data directory.
    CheckConfig(Box<CheckConfigArgs>),
    /// Have the running server read its files again, as SIGHUP does, and print what became of them
    ///
    /// A file with a mistake changes nothing. Some settings need a restart. Exit code 64: the file
    /// cannot be used; 1: no server runs.
    Reload(ReloadArgs),
    /// Create, list and revoke join tokens
    #[command(subcommand)]
    Token(TokenVerb),
    /// List known and connected nodes, revoke or forget a node
    Nodes(NodesArgs),
    /// Print the certificate of the CA that issues the listeners' serving certificates; export or
    /// import the CA
    Ca(CaArgs),
    /// Print or repair the store of a server that does not run
    #[command(subcommand)]
    Data(DataVerb),
    /// Connect standard input and output to a port of a node, as a ProxyCommand of ssh and ansible
    ///
    /// ssh -o ProxyCommand='tunnel-server connect %h %p' worker-1. On the server's host the
    /// connection goes through the running server; elsewhere --server names a server, with a client
    /// certificate. If the node or the port cannot be reached, or the connection is reset, the
    /// command exits with code 1 and a line on standard error.
    Connect(ConnectArgs),
    /// Ask the agent of a node whether it answers, and how fast; with a port also connect to it
    ///
    /// Prints for each session of the node the transport, the time of an answer and the round trip,
    /// and for a port the way to it, the time until it had accepted, and the agent's part of that.
    /// Exit code 1 if nothing answers.
    Ping(PingArgs),
    /// Ask a running server on this host whether it is ready: exit code 0 or 1
    ///
    /// Intended for images without a shell: HEALTHCHECK CMD ["/tunnel-server", "healthcheck"].
    Healthcheck(HealthcheckArgs),
    /// Collect facts about this host's server for a bug report, in a JSON file without secrets
    ///
    /// The file has the version, the settings, the conditions, the metrics, the last log lines, the
    /// nodes, and the names, sizes and modes of the files in the data directory. Names and addresses
    /// are not replaced: read the file before you pass it on. A fact that cannot be obtained is an
    /// error in its place. The command takes at most 30 s.
    Diag(Box<DiagArgs>),
    /// Look for what keeps requests from reaching nodes, and print how to fix it
    ///
    /// The command asks the running server, this host, and with --kubeconfig or in a Pod the API
    /// server. It changes nothing and prints no secrets. A check whose facts cannot be obtained is
    /// skipped, with the reason. Exit code 0: no faults; 1: warnings; 2: errors.
    Doctor(Box<DoctorArgs>),
    /// Print texts for other programs: kube-apiserver, CoreDNS, Prometheus, systemd; nothing is
    /// applied
    #[command(subcommand)]
    Render(RenderVerb),
    /// Print the rules that say who may do what, or what they decide about a request
    #[command(subcommand)]
    Policy(PolicyVerb),
    /// Print the completion script for a shell
    Completion {
        /// Shell to print the script for.
        shell: Shell,
    },
    /// Print the version and exit
    Version,
}

/// The sources of the settings.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct ConfigArgs {
    /// Configuration file in YAML format, or off [default: /etc/culvert/tunnel-server.yaml, or
    /// ./tunnel-server.yaml, if it exists]
    #[arg(long, env = "TUNNEL_SERVER_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Settings given as flags or environment variables.
    #[command(flatten)]
    pub settings: RawConfig,
}

/// The sources of `check-config`.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct CheckConfigArgs {
    /// Check the settings alone, and neither the files that they name nor addresses: for the
    /// configuration of another host
    #[arg(long)]
    pub settings_only: bool,
    /// Sources of the settings.
    #[command(flatten)]
    pub source: ConfigArgs,
}

/// The output and the sources of `diag`.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct DiagArgs {
    /// File to create, with mode 0600, or - for standard output; an existing file is not overwritten
    /// [default: tunnel-server-diag-TIME.json or NAME-diag-TIME.json in the current directory]
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Instead of this server: a node, its failures, and what its agent says of itself over the
    /// session: version, settings without secrets, sessions, conditions, last log lines
    #[arg(long, value_name = "NAME")]
    pub node: Option<NodeName>,
    /// Settings of the server, as `run` has them.
    #[command(flatten)]
    pub source: ConfigArgs,
}

/// The checks and the sources of `doctor`.
#[derive(Debug, Clone, clap::Args)]
pub struct DoctorArgs {
    /// Selection of the checks and form of the report.
    #[command(flatten)]
    pub options: DoctorOptions,
    /// Settings of the server, as `run` has them.
    #[command(flatten)]
    pub source: ConfigArgs,
}

/// The commands about rules.
#[derive(Debug, Clone, Subcommand)]
pub enum PolicyVerb {
    /// Print the rules that a server with this configuration uses, those that hold without a file, and
    /// what the dry run of the running server has found
    Show(Box<ConfigArgs>),
    /// Print what the rules of this configuration decide about a request, without sending it
    ///
    /// The request is described as its listener sees it. With dryRun, a second line has what its rules
    /// decide. Exit code 0: allowed, or the cluster decides; 1: refused.
    Test(Box<PolicyTestArgs>),
}

/// The request of `policy test`, and the sources of the settings.
#[derive(Debug, Clone, clap::Args)]
pub struct PolicyTestArgs {
    /// The request to decide about.
    #[command(flatten)]
    pub request: PolicyRequest,
    /// Format of the decision
    #[arg(short, long, value_enum, default_value = "table")]
    pub output: OutputFormat,
    /// Settings of the server, as `run` has them.
    #[command(flatten)]
    pub source: ConfigArgs,
}

/// Returns the command with all its flags, for completion and the generated reference.
pub fn command() -> clap::Command {
    Cli::command()
}

const AFTER_HELP: &str = "\
A first node:
  tunnel-server run --http-proxy-ports 9100
  tunnel-server token create --node worker-1        # prints the command to run on the node
  curl -H 'Host: worker-1:9100' http://127.0.0.1:10264/metrics

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
            assert_eq!(
                variable,
                format!("TUNNEL_SERVER_{}", flag.get_id().as_str().to_uppercase())
            );
        }
    }

    #[test]
    fn flags_of_run_are_grouped() {
        let run = command();
        let run = run.find_subcommand("run").unwrap();
        for flag in run.get_arguments().filter(|flag| flag.get_id() != "config") {
            assert!(flag.get_help_heading().is_some(), "{}", flag.get_id());
        }
        let help = run.clone().render_long_help().to_string();
        for heading in ["Listeners:", "Kubernetes:", "DNS:", "Process:"] {
            let lines = help.lines().filter(|line| *line == heading);
            assert_eq!(lines.count(), 1, "{heading}");
        }
    }

    #[test]
    fn verbs_keep_their_own_description() {
        let command = command();
        for (verb, begin) in [
            ("run", "Run the server"),
            ("check-config", "Load the"),
            ("nodes", "List known"),
        ] {
            let about = command.find_subcommand(verb).unwrap().get_about();
            assert!(about.unwrap().to_string().starts_with(begin), "{about:?}");
        }
    }
}
