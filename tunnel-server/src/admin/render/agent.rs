//! The systemd unit of one agent, with the commands for its join token.

use std::fmt::Write as _;

use tunnel_proto::wire::name::NodeName;

use super::OutputArgs;
use super::values::ServerAddress;

/// The flags of `render agent`.
#[derive(Debug, Clone, clap::Args)]
pub struct AgentArgs {
    /// Node that the agent serves
    #[arg(long, value_name = "NAME")]
    pub node: NodeName,
    /// Address of a server that the agent dials; repeatable
    #[arg(long, value_name = "HOST:PORT", required = true)]
    pub server: Vec<ServerAddress>,
    /// Where the text goes.
    #[command(flatten)]
    pub output: OutputArgs,
}

impl AgentArgs {
    /// Returns the unit of `deploy/systemd` with the flags of this agent in place of its
    /// configuration file. Names and addresses have no character that systemd or a shell expands.
    pub(super) fn text(&self) -> String {
        let node = &self.node;
        let mut command = "ExecStart=/usr/local/bin/tunnel-agent run".to_owned();
        for server in &self.server {
            let _infallible = write!(command, " --server {server}");
        }
        let _infallible = write!(command, " --node-name {node} --token-file {TOKEN}");
        let mut text = format!(
            "\
# /etc/systemd/system/tunnel-agent.service on {node}
#
# On the server, create the join token:
#   tunnel-server token create --node {node}
# On {node}, as root, with the token on standard input:
#   echo 'u tunnel-agent -' | systemd-sysusers -
#   install -D -m 0600 -o tunnel-agent /dev/stdin {TOKEN}
#   systemctl daemon-reload && systemctl enable --now tunnel-agent
"
        );
        let lines = UNIT.lines().skip_while(|line| line.starts_with('#'));
        // There is no configuration file.
        for line in lines.filter(|line| !line.starts_with("ConditionPathExists=")) {
            let is_command = line.starts_with("ExecStart=");
            text.push_str(if is_command { &command } else { line });
            text.push('\n');
        }
        text
    }
}

/// The file that `tunnel-agent join` uses, too.
const TOKEN: &str = "/etc/culvert/tunnel-agent.token";
const UNIT: &str = include_str!("../../../../deploy/systemd/tunnel-agent.service");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unit_has_the_flags_of_the_agent_and_the_settings_of_the_shipped_unit() {
        let arguments = AgentArgs {
            node: "worker-1".parse().unwrap(),
            server: vec![
                "a.example:443".parse().unwrap(),
                "[2001:db8::1]:10262".parse().unwrap(),
            ],
            output: OutputArgs::default(),
        };
        let text = arguments.text();
        let commands: Vec<_> = text
            .lines()
            .filter(|line| line.starts_with("ExecStart="))
            .collect();
        assert_eq!(
            commands,
            [
                "ExecStart=/usr/local/bin/tunnel-agent run --server a.example:443 \
                 --server [2001:db8::1]:10262 --node-name worker-1 --token-file /etc/culvert/tunnel-agent.token"
            ]
        );
        assert!(text.contains("#   tunnel-server token create --node worker-1\n"));
        assert!(!text.contains("tunnel-agent.yaml"));
        let rest = |unit: &str| {
            let lines = unit.lines().map(str::to_owned);
            lines
                .skip_while(|line| line.starts_with('#'))
                .filter(|line| !line.starts_with("ExecStart="))
                .filter(|line| !line.starts_with("ConditionPathExists="))
                .collect::<Vec<_>>()
        };
        assert_eq!(rest(&text), rest(UNIT));
    }
}
