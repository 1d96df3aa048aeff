//! The steps of the tour: shell lines and their expected answers.

use std::process::{Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::process::Command;
use tokio::time::timeout;
use tunnel_tests::netns::{EDGE_ADDRESS, NODES};
use tunnel_tests::process::Listener;

use super::demo_env::DemoEnv;
use super::folder::shell_line;
use super::terminal::Terminal;

/// Steps with a common heading.
struct Section {
    heading: &'static str,
    steps: Vec<TourStep>,
}

/// One shell line, shown and run.
struct TourStep {
    /// The shell line, exactly as run.
    line: String,
    /// Texts that the answer must contain.
    expected: Vec<String>,
    /// Whether the line must fail.
    fails: bool,
}

/// Shows all steps and returns the number of failures.
pub(super) async fn show(terminal: &Terminal, demo_env: &DemoEnv) -> Result<usize> {
    let (mut failures, mut shown) = (0, 0);
    for section in sections(demo_env) {
        terminal.heading(section.heading);
        for step in section.steps {
            terminal.command(&step.line);
            let output = run(&step.line).await?;
            terminal.output(&printed(&output));
            let verdict = step.check(&output);
            terminal.verdict(&verdict);
            failures += usize::from(verdict.is_err());
            shown += 1;
        }
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
        let [first, second] = NODES;
        self.command(&demo_env.through_extra_port(first));
        let host = format!("{second}:{}", demo_env.exporter_port());
        self.command(&demo_env.over_http("-sN", &host, "/follow?interval_ms=500"));
        self.command(&demo_env.server_verb(&["nodes", "-o", "json"]));
        self.command(&demo_env.server_verb(&["token", "list"]));
    }
}

fn sections(demo_env: &DemoEnv) -> Vec<Section> {
    let [first, second] = NODES;
    let port = demo_env.exporter_port();
    let over_http = NODES.map(|node| {
        let line = demo_env.over_http("-sS", &format!("{node}:{port}"), "/metrics");
        TourStep::metrics(node, line)
    });
    let ca_file = shell_line([demo_env.file(CA_FILE)]);
    let ca = format!("{} >{ca_file}", demo_env.server_verb(&["ca"]));
    let mut over_https = vec![TourStep::new(ca, &[])];
    over_https.extend(NODES.map(|node| {
        let line = demo_env.over_https(&["-sS"], node, "/metrics");
        TourStep::metrics(node, line)
    }));
    let extra_port = TourStep::metrics(second, demo_env.through_extra_port(second));
    let nodes = demo_env.server_verb(&["nodes"]);
    let nodes = TourStep::new(nodes, &[first, second, &EDGE_ADDRESS.to_string()]);
    let mut sections = vec![
        Section::new("Requests by node name, over the HTTP listener", over_http),
        Section::new(
            "The same requests over the HTTPS listener, with the server's CA",
            over_https,
        ),
        Section::new(
            "Through an extra port: no header, no proxy setting",
            [extra_port],
        ),
        Section::new(
            "By the embedded DNS: no hosts file, no CoreDNS",
            by_name(demo_env),
        ),
        Section::new(
            "A stream that is followed, as in `kubectl logs -f`",
            [logs(demo_env)],
        ),
        Section::new(
            "An upgraded connection, as in `kubectl exec`",
            [exec(demo_env)],
        ),
        Section::new("The nodes, and that they share an address", [nodes]),
        Section::new(
            "What is refused: an address that two nodes share, an unknown node, a port that is not \
             allowed",
            refusals(demo_env),
        ),
    ];
    if demo_env.has_equal_addresses() {
        let url = format!("http://{EDGE_ADDRESS}:{port}/metrics");
        let line = demo_env.curl(&["-sS", "--connect-timeout", "1", &url]);
        let direct = TourStep {
            fails: true,
            ..TourStep::new(line, &[])
        };
        sections.push(Section::new(
            "Without the tunnel the cloud does not reach the edges",
            [direct],
        ));
    }
    sections
}

/// Returns the steps in which the server resolves the nodes' names itself.
fn by_name(demo_env: &DemoEnv) -> Vec<TourStep> {
    let [first, second] = NODES;
    let answer = demo_env.dns.ip().to_string();
    let mut steps = vec![TourStep::new(demo_env.dig(first), &[first, &answer])];
    let url = format!("http://{second}:{}/metrics", demo_env.exporter_port());
    if let Some([resolv_conf, request]) = demo_env.by_resolver(&url) {
        let server = format!("nameserver {answer}");
        steps.push(TourStep::new(resolv_conf, &[&server]));
        steps.push(TourStep::metrics(second, request));
    }
    steps
}

fn logs(demo_env: &DemoEnv) -> TourStep {
    let [node, _] = NODES;
    let path = "/containerLogs/default/pod/app?follow=true";
    let follow = demo_env.over_https(&["-sN"], node, path);
    let expected = [format!("{node}: log of pod/app"), format!("{node}: line ")];
    TourStep::new(
        format!("{follow} | head -n 4"),
        &expected.each_ref().map(String::as_str),
    )
}

/// Returns the step that sends endless lines to an echo behind a 101. `Expect` and
/// `Transfer-Encoding` are removed, so that curl sends the lines as they are and at once.
fn exec(demo_env: &DemoEnv) -> TourStep {
    let [node, _] = NODES;
    let headers = [
        "Connection: Upgrade",
        "Upgrade: SPDY/3.1",
        "Expect:",
        "Transfer-Encoding:",
    ];
    let headers = headers.map(|header| ["-H", header]);
    let flags = ["-siN", "-X", "POST", "-T", "-"];
    let flags = [&flags[..], headers.as_flattened()].concat();
    let upgrade = demo_env.over_https(&flags, node, "/exec/default/pod/app");
    TourStep::new(
        format!("yes 'typed into the edge' | {upgrade} | head -n 6"),
        &["101 Switching Protocols", "typed into the edge"],
    )
}

fn refusals(demo_env: &DemoEnv) -> Vec<TourStep> {
    let [first, second] = NODES;
    let exporter_port = demo_env.exporter_port();
    let tunnel_port = demo_env.listener_addr(Listener::Http).port();
    let refused = |host: &str, port: u16, expected: &[&str]| {
        let line = demo_env.over_http("-isS", &format!("{host}:{port}"), "/metrics");
        TourStep::new(line, expected)
    };
    let policy = ["403", "refused_by_policy", "the tunnel's own port"];
    vec![
        refused(
            &EDGE_ADDRESS.to_string(),
            exporter_port,
            &["400", "ambiguous_address", first, second],
        ),
        refused("worker-9", exporter_port, &["400", "unknown_node"]),
        refused(first, 22, &["403", "refused_by_policy"]),
        refused(first, tunnel_port, &policy),
    ]
}

impl DemoEnv {
    /// Returns the shell line of a request over the HTTP listener.
    fn over_http(&self, flags: &str, host: &str, path: &str) -> String {
        let url = format!("http://{}{path}", self.listener_addr(Listener::Http));
        self.curl(&[flags, "-H", &format!("Host: {host}"), &url])
    }

    /// Returns the shell line of a request to the kubelet of `node` over the HTTPS listener.
    fn over_https(&self, flags: &[&str], node: &str, path: &str) -> String {
        let ca = self.file(CA_FILE);
        let to_listener = format!("::{}", self.listener_addr(Listener::Https));
        let url = format!("https://{node}:{}{path}", self.kubelet_port());
        let request = ["--cacert", &ca, "--connect-to", &to_listener, &url];
        self.curl(&[flags, &request].concat())
    }

    /// Returns the shell line of a request to the exporter of `node` through the extra port.
    fn through_extra_port(&self, node: &str) -> String {
        let host = format!("{node}:{}", self.exporter_port());
        let url = format!("http://{host}/metrics");
        if self.has_equal_addresses() {
            return self.curl(&["-sS", &url]);
        }
        // No resolver maps the node's name to the server here.
        self.curl(&["-sS", "--resolve", &format!("{host}:127.0.0.1"), &url])
    }
}

impl Section {
    fn new(heading: &'static str, steps: impl Into<Vec<TourStep>>) -> Self {
        let steps = steps.into();
        Self { heading, steps }
    }
}

impl TourStep {
    fn new(line: String, expected: &[&str]) -> Self {
        let expected = expected.iter().map(|text| (*text).to_owned()).collect();
        Self {
            line,
            expected,
            fails: false,
        }
    }

    /// Creates a step whose answer is the metrics of `node`.
    fn metrics(node: &str, line: String) -> Self {
        Self::new(line, &[&format!("node=\"{node}\"")])
    }

    fn check(&self, output: &Output) -> Result<(), String> {
        if output.status.success() == self.fails {
            return Err(format!("ended with {}", output.status));
        }
        let text = printed(output);
        let mut expected = self.expected.iter();
        match expected.find(|part| !text.contains(part.as_str())) {
            Some(missing) => Err(format!("no {missing:?} in the answer")),
            None => Ok(()),
        }
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

/// Name of the file with the server's CA.
const CA_FILE: &str = "ca.crt";

/// Each step takes well under a second. The tunnel itself gives up on a target sooner than this.
const STEP_TIMEOUT: Duration = Duration::from_secs(20);
