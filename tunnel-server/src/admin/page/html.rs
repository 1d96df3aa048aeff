//! The console as HTML. The templates escape every value, and each text of a peer or a caller is a
//! [`VisibleText`].

use std::time::SystemTime;

use askama::Template;

use super::facts::{Document, NodeDocument, NodesDocument, OverviewDocument};
use super::plot::{HEIGHT, WIDTH};
use super::query::NodesQuery;
use super::text::grouped;
use super::visible::VisibleText;
use tunnel_store::data_dir::rfc3339;

mod cards;
mod conditions;
mod list;
mod node;
mod servers;

use cards::{Card, Segment, transports};
use conditions::ConditionRow;
use list::{ColumnHead, Filter, NodeRow, rows};
use node::{Fact, Outage, PortRow, QuarterCell, RequestRow, Step};
use servers::ServersView;

/// What every page shows.
#[derive(Debug)]
pub(super) struct PageHead {
    title: VisibleText,
    /// Name of this server.
    server: VisibleText,
    servers: usize,
    /// Number of conditions and of components that are not ready.
    conditions: usize,
    /// Version of the software.
    version: &'static str,
    /// Time at which the page was rendered.
    now: SystemTime,
    /// This time, RFC 3339.
    time: String,
    page: Page,
}

/// The pages that are linked from each page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Page {
    Overview,
    Nodes,
    Node,
    Servers,
    Conditions,
}

impl PageHead {
    /// Returns the head of a page of the server with this name.
    pub(super) fn new(server: &str, servers: usize, conditions: usize, now: SystemTime) -> Self {
        Self {
            title: VisibleText::default(),
            server: VisibleText::new(server),
            servers,
            conditions,
            version: env!("CARGO_PKG_VERSION"),
            now,
            time: rfc3339(now),
            page: Page::Overview,
        }
    }

    /// Returns the time of the day in UTC.
    fn clock(&self) -> &str {
        self.time.get(11..19).unwrap_or_default()
    }

    /// Returns the attribute of the link to the page that is shown.
    fn current(&self, page: Page) -> &'static str {
        let shown = if self.page == Page::Node {
            Page::Nodes
        } else {
            self.page
        };
        if shown == page { "page" } else { "false" }
    }
}

/// Renders a document with the template of its kind. `query` is that of a list of nodes.
///
/// # Errors
/// Returns an error if the template fails, which it does only without memory.
pub(super) fn render(
    document: &Document,
    query: &NodesQuery,
    mut head: PageHead,
) -> askama::Result<String> {
    let (page, title): (_, &str) = match document {
        Document::Overview(_) => (Page::Overview, "Overview"),
        Document::Nodes(_) => (Page::Nodes, "Nodes"),
        Document::Node(document) => (Page::Node, &document.node.status.node),
        Document::Servers(_) => (Page::Servers, "Servers"),
        Document::Conditions(_) => (Page::Conditions, "What needs you"),
    };
    head.page = page;
    head.title = VisibleText::new(title);
    match document {
        Document::Overview(document) => OverviewHtml::new(document, head).render(),
        Document::Nodes(document) => NodesHtml::new(document, query, head).render(),
        Document::Node(document) => NodeHtml::new(document, head).render(),
        Document::Servers(document) => {
            let servers = ServersView::new(document, head.now);
            ServersHtml { head, servers }.render()
        }
        Document::Conditions(document) => {
            let conditions = ConditionRow::current(document, head.now);
            let past = ConditionRow::past(document, head.now);
            let failing = ConditionRow::failing(document, head.now);
            ConditionsHtml {
                head,
                conditions,
                failing,
                past,
            }
            .render()
        }
    }
}

#[derive(Template)]
#[template(path = "overview.html")]
struct OverviewHtml<'a> {
    head: PageHead,
    reachable: String,
    nodes: String,
    /// The nodes that need no agent now, which these numbers do not have; empty without any.
    uncounted: String,
    segments: Vec<Segment>,
    transports: Vec<(VisibleText, String)>,
    cards: Vec<Card>,
    conditions: Vec<ConditionRow>,
    failing: Vec<ConditionRow>,
    servers: ServersView<'a>,
    filters: Vec<Filter>,
    query: NodesQuery,
    columns: Vec<ColumnHead>,
    rows: Vec<NodeRow>,
}

impl<'a> OverviewHtml<'a> {
    fn new(document: &'a OverviewDocument, head: PageHead) -> Self {
        let query = NodesQuery::default();
        let counts = &document.counts;
        let mut failing = ConditionRow::failing_by_code(&document.conditions, head.now);
        failing.truncate(FAILING_SHOWN);
        let (live, of) = counts.reachable();
        Self {
            reachable: grouped(live),
            nodes: grouped(of),
            uncounted: counts.uncounted(),
            segments: Segment::of(counts),
            transports: transports(counts),
            cards: Card::of_history(&document.history),
            conditions: ConditionRow::glance(&document.conditions, head.now),
            failing,
            servers: ServersView::new(&document.servers, head.now),
            filters: Filter::of_states(counts, &query),
            columns: ColumnHead::all(&query),
            rows: rows(&document.nodes, head.now),
            query,
            head,
        }
    }
}

#[derive(Template)]
#[template(path = "nodes.html")]
struct NodesHtml<'a> {
    head: PageHead,
    document: &'a NodesDocument,
    search: VisibleText,
    query: &'a NodesQuery,
    matching: String,
    filters: Vec<Filter>,
    columns: Vec<ColumnHead>,
    rows: Vec<NodeRow>,
    /// Links to the pages around this one; empty where there is none.
    previous: String,
    next: String,
}

impl<'a> NodesHtml<'a> {
    fn new(document: &'a NodesDocument, query: &'a NodesQuery, head: PageHead) -> Self {
        let (page, pages) = (document.page, document.pages);
        let link = |page: usize| {
            let is_page = (1..=pages).contains(&page);
            let link = is_page.then(|| query.link(|query| query.page = page));
            link.unwrap_or_default()
        };
        let labels = query.label.as_ref().map(|labels| labels.text.as_str());
        Self {
            document,
            search: VisibleText::new(labels.unwrap_or(&query.search)),
            query,
            matching: grouped(document.matching as u64),
            filters: Filter::all(&document.counts, query),
            columns: ColumnHead::all(query),
            rows: rows(&document.nodes, head.now),
            previous: link(page.saturating_sub(1)),
            next: link(page + 1),
            head,
        }
    }
}

#[derive(Template)]
#[template(path = "node.html")]
struct NodeHtml<'a> {
    head: PageHead,
    row: NodeRow,
    facts: Vec<Fact>,
    cards: Vec<Card>,
    quarters: Vec<QuarterCell>,
    legend: Vec<(&'static str, &'static str)>,
    outages: Vec<Outage>,
    no_outage: String,
    steps: Vec<Step>,
    ports: Vec<PortRow>,
    /// Name of the server that has the requests and the history, if it is another one.
    elsewhere: Option<VisibleText>,
    requests: Vec<RequestRow<'a>>,
}

impl<'a> NodeHtml<'a> {
    fn new(document: &'a NodeDocument, head: PageHead) -> Self {
        let status = &document.node.status;
        let has_other = |replica: &&String| **replica != head.server.as_str();
        let requests = document.requests.iter();
        let ports = PortRow::all(&document.requests, head.now);
        Self {
            row: NodeRow::new(&document.node, head.now),
            facts: Fact::all(status, head.now),
            cards: Card::of_node(document),
            quarters: QuarterCell::all(document),
            legend: QuarterCell::legend(document),
            outages: Outage::all(document, head.now),
            no_outage: Outage::none(document),
            steps: Step::all(status, &ports, head.now),
            ports,
            elsewhere: status
                .replica
                .as_ref()
                .filter(has_other)
                .map(VisibleText::new),
            requests: requests
                .map(|request| RequestRow::new(request, head.now))
                .collect(),
            head,
        }
    }
}

#[derive(Template)]
#[template(path = "servers.html")]
struct ServersHtml<'a> {
    head: PageHead,
    servers: ServersView<'a>,
}

#[derive(Template)]
#[template(path = "conditions.html")]
struct ConditionsHtml {
    head: PageHead,
    conditions: Vec<ConditionRow>,
    failing: Vec<ConditionRow>,
    /// Failures that need nobody.
    past: Vec<ConditionRow>,
}

/// Entries of requests that fail on the overview.
const FAILING_SHOWN: usize = 3;
