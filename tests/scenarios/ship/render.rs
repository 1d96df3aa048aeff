//! The programs that read rendered texts accept them, and yurt-tunnel's NAT rules are removed
//! exactly.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use tunnel_tests::guides::{blocks, page};
use tunnel_tests::netns::Namespace;
use tunnel_tests::process::{Program, ScratchDir};
use tunnel_tests::tools::{Tool, or_skip, require};

use super::examples::unit_problems;

#[tokio::test]
async fn promtool_accepts_the_rendered_scrape_configurations() -> Result<()> {
    let Some(promtool) = or_skip(Program::tool(Tool::Promtool)) else {
        return Ok(());
    };
    let scratch = ScratchDir::new()?;
    let file = scratch.path().join("prometheus.yml");
    for flags in [
        &["--method=http-sd", "--edge-only"][..],
        &["--method=relabel", "--job=a: 'b' # \"c\""],
        &[
            "--method=proxy-url",
            "--proxy-user=a:b@c",
            "--target=worker-1",
        ],
    ] {
        let written = render("prometheus", flags)?.arg("--force").arg("-f");
        written.arg(&file).run().await?.ok()?;
        let check = promtool.clone().args(["check", "config"]).arg(&file);
        check
            .run()
            .await?
            .ok()
            .with_context(|| format!("{flags:?}"))?;
    }
    Ok(())
}

#[tokio::test]
async fn systemd_analyze_verifies_the_rendered_unit() -> Result<()> {
    let Some(analyze) = or_skip(Program::tool(Tool::SystemdAnalyze)) else {
        return Ok(());
    };
    let scratch = ScratchDir::new()?;
    let flags = [
        "--node=worker-1",
        "--server=a.example:443",
        "--server=[2001:db8::1]:10262",
    ];
    let unit = render("agent", &flags)?.run().await?.ok()?;
    // The check needs any existing program, so the copy names one that is installed.
    let unit = unit.replace("/usr/local/bin/tunnel-agent", "/bin/true");
    let file = scratch.file("tunnel-agent.service", unit)?;
    let output = analyze.args(["verify", "--man=no"]).arg(file).run().await?;
    ensure!(unit_problems(&output.to_string()) == 0, "{output}");
    output.ok()?;
    Ok(())
}

#[tokio::test]
async fn check_compares_a_complete_pod() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let file = scratch.file("kube-apiserver.yaml", POD)?;
    let check = |flags: &[&str]| -> Result<Program> {
        Ok(render("apiserver", flags)?.arg("--check").arg(&file))
    };
    let flags = ["--dns-server=10.77.0.1", "--second-nameserver=192.0.2.53"];
    check(&flags)?.run().await?.ok()?;
    let other = check(&["--dns-server=10.77.0.1"])?.run().await?;
    other.ensure_failed(1, &["differs"])?;
    ensure!(
        other.out.contains("@ spec.dnsConfig.nameservers"),
        "{other}"
    );
    check(&["--egress-selector"])?
        .run()
        .await?
        .ensure_failed(1, &["differs"])
}

/// The rules are laid as yurt-tunnel lays them, next to those of others.
#[tokio::test]
async fn cleanup_of_the_migration_guide_leaves_the_table_as_it_was_without_yurt_tunnel()
-> Result<()> {
    let tools = require(&[Tool::Iptables, Tool::IptablesSave]);
    let namespace = tools.and_then(|()| Namespace::new("dnat", Path::new("/etc/hosts")));
    let namespace = namespace.and_then(|namespace| namespace.script(OTHERS).map(|_| namespace));
    let Some(namespace) = or_skip(namespace) else {
        return Ok(());
    };
    let before = saved(&namespace)?;
    namespace.script(YURT_TUNNEL)?;
    let with_rules = saved(&namespace)?;
    ensure!(with_rules.contains("TUNNEL-PORT-9100"), "{with_rules}");
    let blocks = blocks(&page("docs/how-to/migrate.md")?);
    let cleanup = blocks.iter().find(|block| block.runner() == Some("nat"));
    let cleanup = &cleanup.context("no commands in the guide")?.text;
    let script = format!("{SEARCH_PATH}conntrack() {{ echo \"$@\"; }}\n{cleanup}");
    // The script may run twice.
    for translations in [TRANSLATIONS, ""] {
        let printed = namespace.script(&script)?;
        ensure!(printed == translations, "{printed}");
        let after = saved(&namespace)?;
        ensure!(after == before, "{after}\nis not\n{before}");
    }
    // A chain that another program uses stays without rules, and the program's rule stays.
    namespace.script(YURT_TUNNEL)?;
    namespace.script(&format!("{SEARCH_PATH}iptables -t nat {THEIR_JUMP}"))?;
    let Err(refused) = namespace.script(&script) else {
        bail!("the chain of another program's rule is gone");
    };
    ensure!(refused.to_string().contains("TUNNEL-PORT"), "{refused}");
    let after = saved(&namespace)?;
    ensure!(after.contains(THEIR_JUMP), "{after}");
    let is_empty = !after.contains("-A TUNNEL-PORT ") && !after.contains("-A TUNNEL-PORT-");
    ensure!(is_empty, "{after}");
    Ok(())
}

fn render(text: &str, flags: &[&str]) -> Result<Program> {
    let program = Program::ours("tunnel-server")?.args(["render", text]);
    Ok(program.args(flags.iter().copied()))
}

/// Returns table nat without the lines that contain the time.
fn saved(namespace: &Namespace) -> Result<String> {
    let saved = namespace.script(&format!("{SEARCH_PATH}iptables-save -t nat"))?;
    let lines = saved
        .lines()
        .filter(|line| !line.starts_with("# Completed"));
    let lines = lines.map(|line| line.split(" on ").next().unwrap_or_default());
    Ok(lines.collect::<Vec<_>>().join("\n"))
}

const SEARCH_PATH: &str = "PATH=$PATH:/usr/sbin:/sbin\n";

/// Rules of other programs, with similar names.
const OTHERS: &str = r#"
PATH=$PATH:/usr/sbin:/sbin
iptables -t nat -N TUNNEL-PORTS
iptables -t nat -A TUNNEL-PORTS -p tcp --dport 10250 -j RETURN
iptables -t nat -A OUTPUT -p tcp -m comment --comment "not TUNNEL-PORT" -j TUNNEL-PORTS
iptables -t nat -A POSTROUTING -s 10.0.0.0/8 -m comment --comment "it's \"\$(mine)\"" -j MASQUERADE
"#;

/// A rule of another program that leads to yurt-tunnel's chain.
const THEIR_JUMP: &str = "-A PREROUTING -p tcp -m comment --comment theirs -j TUNNEL-PORT";

/// The commands of yurt-tunnel 1.7 for 10250 and 9100, with one node in the cloud.
const YURT_TUNNEL: &str = r#"
PATH=$PATH:/usr/sbin:/sbin
iptables -t nat -N TUNNEL-PORT
iptables -t nat -I OUTPUT -p tcp -m comment --comment "yurttunnel server port" -j TUNNEL-PORT
for port in 10250 9100; do
  iptables -t nat -N TUNNEL-PORT-$port
  iptables -t nat -I TUNNEL-PORT -p tcp --dport $port -m comment --comment "jump to port $port" -j TUNNEL-PORT-$port
  for ip in 192.168.33.220 127.0.0.1; do
    iptables -t nat -I TUNNEL-PORT-$port -p tcp -m comment --comment "return request to access node directly" --dport $port -d $ip/32 -j RETURN
  done
  iptables -t nat -A TUNNEL-PORT-$port -p tcp -m comment --comment "dnat to tunnel for access node" --dport $port -j DNAT --to-destination 192.168.33.220:10263
done
"#;

/// What is removed from the connection tracking.
const TRANSLATIONS: &str = "\
-D -p tcp --orig-port-dst 10250 --reply-src 192.168.33.220 --reply-port-src 10263
-D -p tcp --orig-port-dst 9100 --reply-src 192.168.33.220 --reply-port-src 10263
";

/// The static pod of kube-apiserver, shortened.
const POD: &str = "\
apiVersion: v1
kind: Pod
metadata: { name: kube-apiserver, namespace: kube-system }
spec:
  hostNetwork: true
  priorityClassName: system-node-critical
  dnsPolicy: None
  dnsConfig:
    nameservers: [10.77.0.1, 192.0.2.53]
    options:
      - name: ndots
        value: \"0\"
      - name: timeout
        value: \"1\"
      - name: attempts
        value: \"2\"
  containers:
    - name: kube-apiserver
      command:
        - kube-apiserver
        - --advertise-address=192.168.33.220
        - --kubelet-preferred-address-types=Hostname,InternalIP,ExternalIP
        - --secure-port=6443
";
