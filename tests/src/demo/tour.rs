//! The steps of the tour: commands and their expected answers.

use std::process::{Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::process::Command;
use tokio::time::timeout;

use super::demo_env::DemoEnv;
use super::folder::quote;
use super::terminal::Terminal;
use crate::netns::{EDGE_ADDRESS, NODES};
use crate::process::Listener;
use crate::tools::Tool;

/// One command, shown and run.
struct DemoCommand {
    /// Heading of the command. Consecutive steps with equal headings share it.
    heading: &'static str,
    /// The shell line, exactly as run.
    line: String,
    /// Texts that the answer must contain.
    expected: Vec<String>,
    /// Whether the command must fail.
    fails: bool,
}

/// Shows all steps and returns the number of failures.
pub(super) async fn show(terminal: &Terminal, demo_env: &DemoEnv) -> Result<usize> {
    let mut heading = "";
    let (mut failures, mut shown) = (0, 0);
    for demo_command in commands(demo_env) {
        if demo_command.heading != heading {
            heading = demo_command.heading;
            terminal.heading(heading);
        }
        terminal.command(&demo_command.line);
        let output = run(&demo_command.line).await?;
        terminal.output(&printed(&output));
        let verdict = demo_command.check(&output);
        terminal.verdict(&verdict);
        failures += usize::from(verdict.is_err());
        shown += 1;
    }
    terminal.message(&format!("\n{} of {shown} steps passed", shown - failures));
    if !demo_env.has_equal_addresses() {
        terminal.message("NOT shown by this run: two edges with the same address (see the note at the beginning)");
    }
    Ok(failures)
}

impl Terminal {
    /// Prints what the reader can try while everything stays up.
    pub(super) fn invite(&self, demo_env: &DemoEnv) {
        self.heading("Everything stays up until Ctrl-C. In another terminal, from this folder, try for example");
        let caller = Caller::new(demo_env);
        let [first, second] = NODES;
        self.command(&caller.extra_port(first, "/metrics").line(demo_env));
        let follow = caller
            .exporter(second, "/follow?interval_ms=500")
            .without_end();
        self.command(&follow.line(demo_env));
        self.command(&demo_env.server_verb(&["nodes", "-o", "json"]));
        self.command(&demo_env.server_verb(&["token", "list"]));
    }
}

fn commands(demo_env: &DemoEnv) -> Vec<DemoCommand> {
    let caller = Caller::new(demo_env);
    let [first, second] = NODES;
    let names = |node: &str| format!("node=\"{node}\"");
    let mut commands = Vec::new();
    for node in NODES {
        let request = caller.exporter(node, "/metrics");
        commands.push(request.demo_command(
            demo_env,
            "Requests by node name, over the HTTP listener",
            &[&names(node)],
        ));
    }
    let ca = format!("{} >{}", demo_env.server_verb(&["ca"]), quote(&caller.ca));
    commands.push(DemoCommand::new(
        "The same requests over the HTTPS listener, with the server's CA",
        ca,
        &[],
    ));
    for node in NODES {
        let request = caller.kubelet(node, "/metrics");
        commands.push(request.demo_command(
            demo_env,
            "The same requests over the HTTPS listener, with the server's CA",
            &[&names(node)],
        ));
    }
    let request = caller.extra_port(second, "/metrics");
    commands.push(request.demo_command(
        demo_env,
        "Through an extra port: no header, no proxy setting",
        &[&names(second)],
    ));
    commands.extend(by_name(demo_env, &caller));
    let request = caller
        .kubelet(first, "/containerLogs/default/pod/app?follow=true")
        .first_lines(4);
    let lines = [
        format!("{first}: log of pod/app"),
        format!("{first}: line "),
    ];
    let lines = lines.each_ref().map(String::as_str);
    commands.push(request.demo_command(
        demo_env,
        "A stream that is followed, as in `kubectl logs -f`",
        &lines,
    ));
    let tls = demo_env.listener_addr(Listener::Https).to_string();
    let host = format!("{first}:{}", demo_env.kubelet_port());
    let exec = [
        "exec",
        &tls,
        &host,
        "/exec/default/pod/app",
        "typed into the edge",
        "--ca",
        &caller.ca,
    ];
    commands.push(DemoCommand::new(
        "An upgraded connection, as in `kubectl exec`",
        demo_env.in_cloud(&demo_env.net_probe(&exec)),
        &["101 Switching Protocols", "typed into the edge"],
    ));
    let address = EDGE_ADDRESS.to_string();
    let nodes = demo_env.server_verb(&["nodes"]);
    commands.push(DemoCommand::new(
        "The nodes, and that they share an address",
        nodes,
        &[first, second, &address],
    ));
    commands.extend(refusals(demo_env, &caller));
    commands
}

/// Returns the steps in which the server resolves the nodes' names itself.
fn by_name(demo_env: &DemoEnv, caller: &Caller) -> Vec<DemoCommand> {
    const HEADING: &str = "By the embedded DNS: no hosts file, no CoreDNS";
    let [first, second] = NODES;
    let dns = demo_env.dns();
    let answer = dns.ip().to_string();
    // A dig that was only unpacked needs more than its name to run.
    let has_dig = Tool::Dig
        .command()
        .is_ok_and(|dig| dig.get_envs().next().is_none());
    let ask = if has_dig {
        format!("dig +noall +answer -p {} @{} {first}", dns.port(), dns.ip())
    } else {
        demo_env.net_probe(&["dns", &dns.to_string(), first])
    };
    let mut commands = vec![DemoCommand::new(
        HEADING,
        demo_env.in_cloud(&ask),
        &[first, &answer],
    )];
    if caller.curl {
        let url = format!("http://{second}:{}/metrics", demo_env.exporter_port());
        let names = format!("node=\"{second}\"");
        let lines = ["cat /etc/resolv.conf".to_owned(), format!("curl -sS {url}")];
        let expected = [format!("nameserver {answer}"), names];
        let shown = lines.iter().zip(&expected).filter_map(|(line, expected)| {
            let line = demo_env.by_resolver(line)?;
            Some(DemoCommand::new(HEADING, line, &[expected]))
        });
        commands.extend(shown);
    }
    commands
}

fn refusals(demo_env: &DemoEnv, caller: &Caller) -> Vec<DemoCommand> {
    let mut commands = Vec::new();
    let [first, second] = NODES;
    let ambiguous = ["400", "ambiguous_address", first, second];
    let address = EDGE_ADDRESS.to_string();
    let tunnel_port = demo_env.listener_addr(Listener::Http).port();
    for (host, port, expected) in [
        (address.as_str(), demo_env.exporter_port(), &ambiguous[..]),
        (
            "worker-9",
            demo_env.exporter_port(),
            &["400", "unknown_node"],
        ),
        (first, 22, &["403", "refused_by_policy"]),
        (
            first,
            tunnel_port,
            &["403", "refused_by_policy", "the tunnel's own port"],
        ),
    ] {
        let request = caller
            .plain(&format!("{host}:{port}"), "/metrics")
            .with_head();
        commands.push(request.demo_command(demo_env, "What is refused: an address that two nodes share, an unknown node, a port that is not allowed", expected));
    }
    if demo_env.has_equal_addresses() {
        let line = demo_env.net_probe(&[
            "dial",
            &format!("{EDGE_ADDRESS}:{}", demo_env.exporter_port()),
        ]);
        let demo_command = DemoCommand::new(
            "Without the tunnel the cloud does not reach the edges",
            demo_env.in_cloud(&line),
            &[],
        );
        commands.push(DemoCommand {
            fails: true,
            ..demo_command
        });
    }
    commands
}

impl DemoCommand {
    fn new(heading: &'static str, line: String, expected: &[&str]) -> Self {
        let expected = expected.iter().map(|text| (*text).to_owned()).collect();
        Self {
            heading,
            line,
            expected,
            fails: false,
        }
    }

    fn check(&self, output: &Output) -> Result<(), String> {
        let text = printed(output);
        if output.status.success() == self.fails {
            return Err(format!("ended with {}", output.status));
        }
        match self
            .expected
            .iter()
            .find(|expected| !text.contains(expected.as_str()))
        {
            Some(missing) => Err(format!("no {missing:?} in the answer")),
            None => Ok(()),
        }
    }
}

/// The client of requests: curl if installed, else the built-in client.
struct Caller {
    curl: bool,
    ca: String,
    http: String,
    https: String,
    loopback: Option<String>,
    exporter_port: u16,
    kubelet_port: u16,
}

/// One request as a shell line.
struct Request {
    args: Vec<String>,
    curl: bool,
    lines: Option<usize>,
}

impl Caller {
    fn new(demo_env: &DemoEnv) -> Self {
        Self {
            curl: Tool::Curl.find().is_some(),
            ca: demo_env.file("ca.crt"),
            http: demo_env.listener_addr(Listener::Http).to_string(),
            https: demo_env.listener_addr(Listener::Https).to_string(),
            loopback: (!demo_env.has_equal_addresses()).then(|| "127.0.0.1".to_owned()),
            exporter_port: demo_env.exporter_port(),
            kubelet_port: demo_env.kubelet_port(),
        }
    }

    fn exporter(&self, node: &str, path: &str) -> Request {
        self.plain(&format!("{node}:{}", self.exporter_port), path)
    }

    fn plain(&self, host: &str, path: &str) -> Request {
        if self.curl {
            Request::curl(&[
                "-H",
                &format!("Host: {host}"),
                &format!("http://{}{path}", self.http),
            ])
        } else {
            Request::net_probe(&[&self.http, host, path])
        }
    }

    fn kubelet(&self, node: &str, path: &str) -> Request {
        let host = format!("{node}:{}", self.kubelet_port);
        if self.curl {
            let to_listener = format!("::{}", self.https);
            let url = format!("https://{host}{path}");
            Request::curl(&["--cacert", &self.ca, "--connect-to", &to_listener, &url])
        } else {
            Request::net_probe(&[&self.https, &host, path, "--ca", &self.ca])
        }
    }

    fn extra_port(&self, node: &str, path: &str) -> Request {
        let port = self.exporter_port;
        let url = format!("http://{node}:{port}{path}");
        match (&self.loopback, self.curl) {
            (None, true) => Request::curl(&[&url]),
            // No resolver maps the node's name to the server here.
            (Some(ip), true) => Request::curl(&["--resolve", &format!("{node}:{port}:{ip}"), &url]),
            (ip, false) => {
                let ip = ip.as_deref().unwrap_or("127.0.0.1");
                Request::net_probe(&[&format!("{ip}:{port}"), &format!("{node}:{port}"), path])
            }
        }
    }
}

impl Request {
    fn curl(args: &[&str]) -> Self {
        Self::new(true, &["curl", "-sS"], args)
    }

    fn net_probe(args: &[&str]) -> Self {
        Self::new(false, &["get"], args)
    }

    fn new(curl: bool, first: &[&str], rest: &[&str]) -> Self {
        let args = first
            .iter()
            .chain(rest)
            .map(|arg| (*arg).to_owned())
            .collect();
        Self {
            args,
            curl,
            lines: None,
        }
    }

    fn with_head(mut self) -> Self {
        self.args
            .insert(1, if self.curl { "-i" } else { "--head" }.to_owned());
        self
    }

    /// Allows an endless answer: it is printed as it arrives, and closing the pipe is not an error.
    fn without_end(mut self) -> Self {
        if self.curl
            && let Some(flags) = self.args.get_mut(1)
        {
            *flags = "-sN".to_owned();
        }
        self
    }

    fn first_lines(self, lines: usize) -> Self {
        Self {
            lines: Some(lines),
            ..self.without_end()
        }
    }

    fn line(&self, demo_env: &DemoEnv) -> String {
        let line = if self.curl {
            self.args
                .iter()
                .map(|arg| quote(arg))
                .collect::<Vec<_>>()
                .join(" ")
        } else {
            demo_env.net_probe(&self.args.iter().map(String::as_str).collect::<Vec<_>>())
        };
        let line = demo_env.in_cloud(&line);
        match self.lines {
            Some(lines) => format!("{line} | head -n {lines}"),
            None => line,
        }
    }

    fn demo_command(
        &self,
        demo_env: &DemoEnv,
        heading: &'static str,
        expected: &[&str],
    ) -> DemoCommand {
        DemoCommand::new(heading, self.line(demo_env), expected)
    }
}

async fn run(line: &str) -> Result<Output> {
    let mut shell = Command::new("sh");
    shell
        .args(["-c", line])
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let output = timeout(STEP_TIMEOUT, shell.output()).await;
    output
        .with_context(|| format!("no end of {line}"))?
        .context("run sh")
}

fn printed(output: &Output) -> String {
    let both =
        [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    both.concat().replace('\r', "")
}

/// Each step takes well under a second. The tunnel itself gives up on a target sooner than this.
const STEP_TIMEOUT: Duration = Duration::from_secs(20);
