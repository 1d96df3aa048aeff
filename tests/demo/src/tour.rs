//! The steps of the tour, in their order.

use std::time::Instant;

use anyhow::Result;
use tunnel_tests::netns::{EDGE_ADDRESS, NODES};
use tunnel_tests::process::Listener;

use super::demo_env::DemoEnv;
use super::folder::shell_line;
use super::output::{Tally, TourStep};
use super::promises;
use super::terminal::Terminal;

/// Steps with a common heading.
struct Section {
    heading: &'static str,
    steps: Vec<TourStep>,
}

/// Shows all steps and returns the number of failures.
pub(super) async fn show(terminal: &Terminal, demo_env: &mut DemoEnv) -> Result<usize> {
    let begin = Instant::now();
    let mut tally = Tally::default();
    for section in sections(demo_env) {
        terminal.heading(section.heading);
        for step in section.steps {
            step.show(terminal, &mut tally).await?;
        }
    }
    if demo_env.has_equal_addresses() {
        promises::block_udp(terminal, demo_env, &mut tally).await?;
    }
    promises::restart_server(terminal, demo_env, &mut tally).await?;
    let Tally { failures, shown } = tally;
    let (passed, seconds) = (shown - failures, begin.elapsed().as_secs());
    terminal.message(&format!(
        "\n{passed} of {shown} steps passed, in {seconds} s"
    ));
    if !demo_env.has_equal_addresses() {
        terminal.message(
            "NOT shown by this run: two edges with the same address, and a link without UDP (see the note at the \
             beginning)",
        );
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
        self.command(&demo_env.curl(&["-sS", &demo_env.console()]));
        self.message(
            "\nNext: docs/tutorials/standalone.md without namespaces, docs/how-to/packages.md for two machines, \
             docs/tutorials/cluster.md in a cluster",
        );
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
            "What the server says of itself: `doctor`, and the console for a browser",
            operating(demo_env),
        ),
        Section::new(
            "What is refused: an address that two nodes share, an unknown node, a port that is not \
             allowed",
            refusals(demo_env),
        ),
        Section::new(
            "A body that its target cuts is an error for the caller, and no clean end",
            [cut(demo_env)],
        ),
        Section::new(
            "An impostor with the join token of another node gets no certificate",
            impostor(demo_env),
        ),
    ];
    if demo_env.has_equal_addresses() {
        let url = format!("http://{EDGE_ADDRESS}:{port}/metrics");
        let line = demo_env.curl(&["-sS", "--connect-timeout", "1", &url]);
        let direct = TourStep::new(line, &[]).failing();
        sections.push(Section::new(
            "Without the tunnel the cloud does not reach the edges",
            [direct],
        ));
    }
    sections
}

fn operating(demo_env: &DemoEnv) -> Vec<TourStep> {
    let doctor = demo_env.server_verb(&["doctor", "--only", "D09"]);
    let url = format!("{}nodes", demo_env.console());
    let console = demo_env.curl(&["-sS", "-H", "Accept: application/json", &url]);
    vec![
        TourStep::new(doctor, &["errors: 0"]),
        TourStep::new(console, &NODES),
    ]
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

/// Returns the request for a body of 1000 bytes, of which the exporter sends 500.
fn cut(demo_env: &DemoEnv) -> TourStep {
    let [node, _] = NODES;
    let host = format!("{node}:{}", demo_env.exporter_port());
    let request = demo_env.over_http("-sS", &host, "/short");
    TourStep::new(format!("{request} -o /dev/null"), &["curl: ("]).failing()
}

fn impostor(demo_env: &DemoEnv) -> Vec<TourStep> {
    let [claimed, own] = NODES;
    let file = demo_env.file("impostor.token");
    let create = demo_env.server_verb(&["token", "create", "--node", own]);
    let run = demo_env.agent_with_token(claimed, &file);
    let refused = TourStep::new(run, &["wrong_node"]).failing();
    let create = format!("{create} >{}", shell_line([file]));
    vec![TourStep::new(create, &[]), refused]
}

impl DemoEnv {
    /// Returns the shell line of a request over the HTTP listener.
    pub(super) fn over_http(&self, flags: &str, host: &str, path: &str) -> String {
        let url = format!("http://{}{path}", self.listener_addr(Listener::Http));
        self.curl(&[flags, "-H", &format!("Host: {host}"), &url])
    }

    /// Returns the shell line of a request to the kubelet of `node` over the HTTPS listener.
    pub(super) fn over_https(&self, flags: &[&str], node: &str, path: &str) -> String {
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

/// Name of the file with the server's CA.
const CA_FILE: &str = "ca.crt";
