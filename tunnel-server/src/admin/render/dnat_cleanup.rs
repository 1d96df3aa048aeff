//! Shell commands that remove yurt-tunnel's NAT rules.

use std::fmt::Write as _;
use std::io::{self, IsTerminal as _, Read as _};

use tunnel_proto::process::telemetry;

use super::netfilter::{self, Jump, NatTable, Program, TunnelChain};
use super::values::shell;
use super::{RenderError, WriteArgs};

/// The flags of `render dnat-cleanup`.
#[derive(Debug, Clone, clap::Args)]
pub struct DnatCleanupArgs {
    /// Where the text goes.
    #[command(flatten)]
    pub write: WriteArgs,
}

/// Reads rules from standard input and returns the commands.
///
/// # Errors
/// Returns a [`RenderError`] if the rules cannot be read or cannot be removed.
pub(super) fn from_stdin() -> Result<String, RenderError> {
    let stdin = io::stdin();
    if stdin.is_terminal() {
        return Err(RenderError::Usage(
            "the rules are read from standard input: iptables-save -t nat | tunnel-server render dnat-cleanup",
        ));
    }
    let mut rules = Vec::new();
    stdin
        .lock()
        .take(RULES_MAX_BYTES + 1)
        .read_to_end(&mut rules)?;
    if rules.len() as u64 > RULES_MAX_BYTES {
        return Err(RenderError::Usage("standard input is larger than 256 MiB"));
    }
    let commands = commands(&String::from_utf8_lossy(&rules))?;
    if commands.is_empty() {
        telemetry::print_error("nothing to do: the input has no chains of yurt-tunnel");
    }
    Ok(commands)
}

/// Returns a script that removes yurt-tunnel's rules, or no text if there are none. Each command
/// checks first whether its rule or chain exists, so that the script may run twice.
fn commands(rules: &str) -> Result<String, RenderError> {
    let tables = netfilter::parse(rules)?;
    if tables.is_empty() {
        return Ok(String::new());
    }
    let mut script =
        "# Removes yurt-tunnel's chains and rules from table nat. Run as root.\nset -eu\n"
            .to_owned();
    for table in &tables {
        match table.program {
            Program::Iptables => add_iptables(&mut script, "iptables", table),
            Program::Ip6tables => add_iptables(&mut script, "ip6tables", table),
            Program::NftIp => add_nft(&mut script, "ip", table),
            Program::NftIp6 => add_nft(&mut script, "ip6", table),
        }
    }
    add_conntrack(&mut script, &tables);
    Ok(script)
}

fn add_iptables(script: &mut String, program: &str, table: &NatTable) {
    let base = format!("{program} -w -t nat");
    // Without the rights to read the table, every check below would find nothing.
    add(script, format_args!("{base} -S OUTPUT >/dev/null"));
    for jump in &table.jumps {
        // A table that was saved has no handles.
        let Jump::Options(options) = jump else {
            continue;
        };
        let options: Vec<_> = options.iter().map(|word| shell(word)).collect();
        let rule = format!("OUTPUT {}", options.join(" "));
        add(
            script,
            format_args!("if {base} -C {rule} 2>/dev/null; then {base} -D {rule}; fi"),
        );
    }
    let exists = |chain: &TunnelChain| format!("{base} -S {chain} >/dev/null 2>&1");
    for chain in &table.chains {
        let exists = exists(chain);
        add(
            script,
            format_args!(
                "if {exists}; then {base} -F {chain}; else echo '{program} has no chain {chain}' >&2; fi"
            ),
        );
    }
    for chain in &table.chains {
        let exists = exists(chain);
        add(
            script,
            format_args!("if {exists}; then {base} -X {chain}; fi"),
        );
    }
}

fn add_nft(script: &mut String, family: &str, table: &NatTable) {
    add(
        script,
        format_args!("nft list table {family} nat >/dev/null"),
    );
    for jump in &table.jumps {
        // A table that was listed has handles.
        let Jump::Handle(handle, target) = jump else {
            continue;
        };
        // After a restart another rule may have the handle.
        let exists = format!(
            "nft -a list chain {family} nat OUTPUT 2>/dev/null | grep -Eq '(jump|goto) {target}( .*)?# handle {handle}$'"
        );
        add(
            script,
            format_args!(
                "if {exists}; then nft delete rule {family} nat OUTPUT handle {handle}; fi"
            ),
        );
    }
    for command in ["flush", "delete"] {
        for chain in &table.chains {
            add(
                script,
                format_args!(
                    "if nft list chain {family} nat {chain} >/dev/null 2>&1; then nft {command} chain {family} nat {chain}; fi"
                ),
            );
        }
    }
}

/// Removes the entries of translated connections: their packets go to yurt-tunnel's server even
/// without the rules. conntrack fails if there are none.
fn add_conntrack(script: &mut String, tables: &[NatTable]) {
    let mut translations: Vec<_> = tables
        .iter()
        .flat_map(|table| &table.translations)
        .collect();
    translations.sort_unstable();
    translations.dedup();
    if translations.is_empty() {
        return;
    }
    script.push_str("if command -v conntrack >/dev/null; then\n");
    for translation in translations {
        let family = if translation.to.is_ipv6() {
            " -f ipv6"
        } else {
            ""
        };
        add(
            script,
            format_args!(
                "  conntrack -D{family} -p tcp --orig-port-dst {} --reply-src {} --reply-port-src {} >/dev/null || true",
                translation.port,
                translation.to.ip(),
                translation.to.port()
            ),
        );
    }
    script.push_str(
        "else\n  echo 'conntrack is not installed: open connections stay translated' >&2\nfi\n",
    );
}

fn add(script: &mut String, line: std::fmt::Arguments<'_>) {
    let _infallible = writeln!(script, "{line}");
}

/// Maximum size of the input. A host with 10,000 Services has about 30 MiB of rules.
const RULES_MAX_BYTES: u64 = 256 * 1024 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_remove_the_jump_then_the_chains_then_the_connections() {
        let script = commands(SAVED).unwrap();
        let expected = "\
# Removes yurt-tunnel's chains and rules from table nat. Run as root.
set -eu
iptables -w -t nat -S OUTPUT >/dev/null
if iptables -w -t nat -C OUTPUT -p tcp -m comment --comment 'yurttunnel server port' -j TUNNEL-PORT 2>/dev/null; then iptables -w -t nat -D OUTPUT -p tcp -m comment --comment 'yurttunnel server port' -j TUNNEL-PORT; fi
if iptables -w -t nat -S TUNNEL-PORT >/dev/null 2>&1; then iptables -w -t nat -F TUNNEL-PORT; else echo 'iptables has no chain TUNNEL-PORT' >&2; fi
if iptables -w -t nat -S TUNNEL-PORT-10250 >/dev/null 2>&1; then iptables -w -t nat -F TUNNEL-PORT-10250; else echo 'iptables has no chain TUNNEL-PORT-10250' >&2; fi
if iptables -w -t nat -S TUNNEL-PORT >/dev/null 2>&1; then iptables -w -t nat -X TUNNEL-PORT; fi
if iptables -w -t nat -S TUNNEL-PORT-10250 >/dev/null 2>&1; then iptables -w -t nat -X TUNNEL-PORT-10250; fi
if command -v conntrack >/dev/null; then
  conntrack -D -p tcp --orig-port-dst 10250 --reply-src 192.168.33.220 --reply-port-src 10263 >/dev/null || true
else
  echo 'conntrack is not installed: open connections stay translated' >&2
fi
";
        assert_eq!(script, expected);
    }

    #[test]
    fn nft_rules_are_removed_by_handle() {
        let script = commands(LISTED).unwrap();
        let delete = "then nft delete rule ip nat OUTPUT handle 5; fi";
        assert!(script.contains(delete), "{script}");
        assert!(
            script.contains("nft flush chain ip nat TUNNEL-PORT;"),
            "{script}"
        );
        assert!(
            script.contains("nft delete chain ip nat TUNNEL-PORT-10250;"),
            "{script}"
        );
        assert!(
            script.contains("--reply-src 192.168.33.220 --reply-port-src 10263"),
            "{script}"
        );
        let without = LISTED.replace(" # handle 5", "");
        assert!(matches!(commands(&without), Err(RenderError::NoHandle)));
    }

    #[test]
    fn input_without_the_chains_gives_no_commands() {
        let saved = "*nat\n:OUTPUT ACCEPT [0:0]\n-A OUTPUT -j DOCKER\nCOMMIT\n";
        for rules in ["", saved, "table ip nat {\n\tchain OUTPUT {\n\t}\n}\n"] {
            assert_eq!(commands(rules).unwrap(), "");
        }
    }

    #[test]
    fn ip6tables_and_counters_are_understood() {
        let saved = SAVED
            .replace("iptables-save", "ip6tables-save")
            .replace("-A OUTPUT", "[7:420] -A OUTPUT")
            .replace("192.168.33.220:10263", "[fd00::1]:10263");
        let script = commands(&saved).unwrap();
        assert!(
            script.contains("then ip6tables -w -t nat -D OUTPUT -p tcp"),
            "{script}"
        );
        let conntrack = "conntrack -D -f ipv6 -p tcp --orig-port-dst 10250 --reply-src fd00::1 ";
        assert!(script.contains(conntrack), "{script}");
        assert!(!script.contains(" iptables "), "{script}");
    }

    /// What iptables-save 1.8.9 printed of the rules of yurt-tunnel 1.7.
    const SAVED: &str = r#"# Generated by iptables-save v1.8.9 (nf_tables) on Mon Nov 23 16:24:43 2026
*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:TUNNEL-PORT - [0:0]
:TUNNEL-PORT-10250 - [0:0]
-A OUTPUT -p tcp -m comment --comment "yurttunnel server port" -j TUNNEL-PORT
-A POSTROUTING -s 10.0.0.0/8 -j MASQUERADE
-A TUNNEL-PORT -p tcp -m tcp --dport 10250 -m comment --comment "jump to port 10250" -j TUNNEL-PORT-10250
-A TUNNEL-PORT-10250 -d 127.0.0.1/32 -p tcp -m comment --comment "return request to access node directly" -m tcp --dport 10250 -j RETURN
-A TUNNEL-PORT-10250 -p tcp -m comment --comment "dnat to tunnel for access node" -m tcp --dport 10250 -j DNAT --to-destination 192.168.33.220:10263
COMMIT
"#;

    /// What nft 1.0.6 printed of the same rules.
    const LISTED: &str = r#"table ip nat { # handle 1
	chain POSTROUTING { # handle 1
		type nat hook postrouting priority srcnat; policy accept;
		ip saddr 10.0.0.0/8 counter packets 0 bytes 0 masquerade # handle 2
	}

	chain TUNNEL-PORT { # handle 3
		tcp dport 10250  counter packets 0 bytes 0 jump TUNNEL-PORT-10250 # handle 7
	}

	chain OUTPUT { # handle 4
		type nat hook output priority -100; policy accept;
		meta l4proto tcp  counter packets 0 bytes 0 jump TUNNEL-PORT # handle 5
	}

	chain TUNNEL-PORT-10250 { # handle 6
		meta l4proto tcp ip daddr 127.0.0.1  tcp dport 10250 counter packets 0 bytes 0 return # handle 8
		meta l4proto tcp  tcp dport 10250 counter packets 0 bytes 0 dnat to 192.168.33.220:10263 # handle 9
	}
}
"#;
}
