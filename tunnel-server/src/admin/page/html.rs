//! The status page as HTML. The templates escape every value, and each text of a peer or a caller
//! is a [`VisibleText`].

use std::fmt::Write as _;

use askama::Template;
use tunnel_proto::wire::name::NodeName;

use super::facts::{
    ConditionsDocument, Document, NodeDocument, NodeFacts, NodesDocument, RequestFacts,
    ServersDocument, TotalFacts,
};
use super::visible::VisibleText;
use crate::admin::status::NodeStatus;

/// What every page shows.
#[derive(Debug)]
pub(super) struct PageHead {
    title: VisibleText,
    server: VisibleText,
    /// Version of the software.
    version: &'static str,
    /// Time at which the page was rendered, RFC 3339.
    time: String,
}

impl PageHead {
    /// Returns the head of a page of the server with this name.
    pub(super) fn new(server: &str, time: String) -> Self {
        Self {
            title: VisibleText::default(),
            server: VisibleText::new(server),
            version: env!("CARGO_PKG_VERSION"),
            time,
        }
    }
}

/// Renders a document with the template of its kind.
///
/// # Errors
/// Returns an error if the template fails, which it does only without memory.
pub(super) fn render(document: &Document, mut head: PageHead) -> askama::Result<String> {
    let title: &str = match document {
        Document::Nodes(_) => "Nodes",
        Document::Node(document) => &document.node.status.node,
        Document::Servers(_) => "Servers",
        Document::Conditions(_) => "Conditions",
    };
    head.title = VisibleText::new(title);
    match document {
        Document::Nodes(document) => NodesHtml::new(document, head).render(),
        Document::Node(document) => NodeHtml::new(document, head).render(),
        Document::Servers(document) => ServersHtml { head, document }.render(),
        Document::Conditions(document) => ConditionsHtml { head, document }.render(),
    }
}

#[derive(Template)]
#[template(path = "nodes.html")]
struct NodesHtml<'a> {
    head: PageHead,
    document: &'a NodesDocument,
    search: VisibleText,
    totals: String,
    rows: Vec<NodeRow>,
    /// Links to the pages around this one; empty where there is none.
    previous: String,
    next: String,
}

impl<'a> NodesHtml<'a> {
    fn new(document: &'a NodesDocument, head: PageHead) -> Self {
        let link = |page: usize| {
            let mut query = form_urlencoded::Serializer::new(String::new());
            query.append_pair("search", &document.search);
            query.append_pair("page", &page.to_string());
            format!("/?{}", query.finish())
        };
        let (page, pages) = (document.page, document.pages);
        Self {
            head,
            search: VisibleText::new(document.search.as_str()),
            totals: totals(&document.totals),
            rows: document.nodes.iter().map(NodeRow::new).collect(),
            previous: if page > 1 {
                link(page - 1)
            } else {
                String::new()
            },
            next: if page < pages {
                link(page + 1)
            } else {
                String::new()
            },
            document,
        }
    }
}

#[derive(Template)]
#[template(path = "node.html")]
struct NodeHtml<'a> {
    head: PageHead,
    row: NodeRow,
    replica: VisibleText,
    version: VisibleText,
    address: VisibleText,
    requests: &'a [RequestFacts],
}

impl<'a> NodeHtml<'a> {
    fn new(document: &'a NodeDocument, head: PageHead) -> Self {
        let status = &document.node.status;
        Self {
            head,
            row: NodeRow::new(&document.node),
            replica: VisibleText::or_dash(status.replica.as_deref()),
            version: VisibleText::or_dash(status.version.as_deref()),
            address: VisibleText::or_dash(status.address.as_deref()),
            requests: &document.requests,
        }
    }
}

#[derive(Template)]
#[template(path = "servers.html")]
struct ServersHtml<'a> {
    head: PageHead,
    document: &'a ServersDocument,
}

#[derive(Template)]
#[template(path = "conditions.html")]
struct ConditionsHtml<'a> {
    head: PageHead,
    document: &'a ConditionsDocument,
}

/// A node as its row in the list shows it.
#[derive(Debug)]
struct NodeRow {
    name: VisibleText,
    /// Name for the link to the node's page; empty if the name is not that of a node.
    link: String,
    state: &'static str,
    transport: VisibleText,
    rtt: String,
    streams: u64,
    rate_in: String,
    rate_out: String,
    errors: String,
    last_seen: VisibleText,
    last_close: VisibleText,
    certificate_until: VisibleText,
}

impl NodeRow {
    fn new(facts: &NodeFacts) -> Self {
        let status = &facts.status;
        let name = status.node.parse::<NodeName>();
        let rtt = status.rtt_millis;
        let close = status.last_close.as_ref().map(|close| {
            let (at, by, code) = (&close.at, &close.by, &close.code);
            format!("{at}, by {by}: {code}: {}", close.reason)
        });
        let throughput = facts.throughput.as_ref();
        Self {
            name: VisibleText::new(status.node.as_str()),
            link: name.map(|name| name.to_string()).unwrap_or_default(),
            state: state(status),
            transport: VisibleText::or_dash(status.transport.as_deref()),
            rtt: rtt.map_or_else(dash, |millis| format!("{millis} ms")),
            streams: status.streams,
            rate_in: throughput.map_or_else(dash, |bytes| rate(bytes.bytes_in_per_second)),
            rate_out: throughput.map_or_else(dash, |bytes| rate(bytes.bytes_out_per_second)),
            errors: errors(facts),
            last_seen: VisibleText::or_dash(status.last_seen.as_deref()),
            last_close: VisibleText::or_dash(close.as_deref()),
            certificate_until: VisibleText::or_dash(status.certificate_not_after.as_deref()),
        }
    }
}

/// Returns the state of a node in one word. `connected` is a node that another server carries.
fn state(status: &NodeStatus) -> &'static str {
    match status.state.as_deref() {
        Some("suspect") => "suspect",
        Some(_) => "live",
        None if status.connected => "connected",
        None if status.is_revoked() => "revoked",
        None if status.is_edge => "away",
        None => "not-edge",
    }
}

/// Returns the totals of all nodes in one line.
fn totals(totals: &TotalFacts) -> String {
    let throughput = totals.throughput;
    format!(
        "{}; streams: {}; last minute: in {}, out {}",
        totals.nodes,
        totals.streams,
        rate(throughput.bytes_in_per_second),
        rate(throughput.bytes_out_per_second)
    )
}

/// Returns the failed requests by code, as in `no_agent 3, cut 1`.
fn errors(facts: &NodeFacts) -> String {
    let mut text = String::new();
    for (code, count) in &facts.errors {
        let separator = if text.is_empty() { "" } else { ", " };
        let _infallible = write!(text, "{separator}{code} {count}");
    }
    if text.is_empty() { dash() } else { text }
}

/// Returns a throughput in the largest unit that has an integer part.
fn rate(bytes_per_second: u64) -> String {
    match bytes_per_second {
        0..1_000 => format!("{bytes_per_second} B/s"),
        1_000..1_000_000 => format!("{} kB/s", bytes_per_second / 1_000),
        _ => format!("{} MB/s", bytes_per_second / 1_000_000),
    }
}

fn dash() -> String {
    "-".to_owned()
}
