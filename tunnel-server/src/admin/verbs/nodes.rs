//! The command `nodes`: lists the known nodes and the revocations, and revokes, unrevokes, reissues or
//! forgets nodes. Lists are printed page by page.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::{self, IsTerminal as _, Write};
use std::time::{Duration, SystemTime};

use tokio::time::{Instant, sleep};
use tunnel_process::name_list::NameList;
use tunnel_process::output::OutputFormat;
use tunnel_process::schema::Document;
use tunnel_process::terminal;
use tunnel_proto::wire::name::NodeName;

use super::inventory::{Inventory, ssh_entry};
use super::json_list::JsonList;
use super::table::{self, NodeTable, RevocationTable, TableStyle};
use super::{
    NodeNames, NodesArgs, NodesOutput, NodesVerb, VerbError, VerbOutput, json, load_names,
    require_standalone, running,
};
use crate::admin::failures::FailureStatus;
use crate::admin::pages::{NodesPage, PAGE_MAX, PageQuery, RevocationsPage, revocations_page};
use crate::admin::status::{ListedNode, NodeSources, NodeState, NodeStatus, NodeTotals};
use crate::admin::{
    AdminClient, AdminError, ApproveOutcome, ForgetOutcome, NodesOrder, OrderOutcome,
};
use tunnel_ca::revocation::{OrderAction, Revocations};
use tunnel_ca::tokens::TokenStore;
use tunnel_store::data_dir::DataDir;
use tunnel_store::known_nodes::KnownNodes;

impl NodesArgs {
    /// Runs the command and prints the result. A reader that closes the pipe early is not an error.
    ///
    /// # Errors
    /// Returns a [`VerbError`].
    pub async fn run(self) -> Result<(), VerbError> {
        let mut out = io::stdout();
        let done = if self.watch && self.verb.is_none() {
            self.print_changes(&mut out).await.map(|()| None)
        } else {
            self.execute(&mut out).await.map(Some)
        };
        match done {
            Ok(None) => Ok(()),
            Ok(Some(output)) => output.print(),
            Err(VerbError::File(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Prints the list of the running server, and later the nodes that changed, until the output is
    /// closed or no server runs.
    async fn print_changes(self, out: &mut impl Write) -> Result<(), VerbError> {
        let dir = DataDir::open_existing(&self.data_dir.path()?)?;
        let names = load_names(&self.names, self.file.as_deref())?;
        if io::stdout().is_terminal() && self.has_table() {
            return self.print_in_place(&dir, &names, out).await;
        }
        let mut watch = NodesWatch::default();
        let mut is_first = true;
        loop {
            let began = Instant::now();
            let source = ListSource::Server(running(&dir).await?);
            let mut printer = self.printer();
            let totals = self
                .for_each_page(&source, &names, |mut page| {
                    page.nodes.retain(|node| watch.observe(node));
                    printer.page(out, &page)
                })
                .await?;
            watch.end_pass();
            if printer.has_nodes || std::mem::take(&mut is_first) {
                printer.finish(out, &totals, self.none_text())?;
            }
            // The server makes the list again each time.
            sleep(WATCH_INTERVAL.max(WATCH_PAUSE_FACTOR * began.elapsed())).await;
        }
    }

    /// Prints the table of the running server in place of the one before, as far as the terminal has
    /// room for it.
    async fn print_in_place(
        &self,
        dir: &DataDir,
        names: &[NodeName],
        out: &mut impl Write,
    ) -> Result<(), VerbError> {
        loop {
            let began = Instant::now();
            let source = ListSource::Server(running(dir).await?);
            let mut table = Vec::new();
            self.print_list(&source, names, &mut table).await?;
            let rows = terminal::rows().unwrap_or(TERMINAL_ROWS);
            out.write_all(screen(&String::from_utf8_lossy(&table), rows).as_bytes())?;
            out.flush()?;
            sleep(WATCH_INTERVAL.max(WATCH_PAUSE_FACTOR * began.elapsed())).await;
        }
    }

    fn has_table(&self) -> bool {
        match self.output {
            NodesOutput::Table | NodesOutput::Wide => true,
            NodesOutput::Json
            | NodesOutput::Name
            | NodesOutput::SshConfig
            | NodesOutput::Ansible => false,
        }
    }

    fn printer(&self) -> NodePrinter {
        let style = TableStyle {
            is_wide: self.output == NodesOutput::Wide,
            has_header: !self.no_headers,
            has_color: terminal::has_color(),
        };
        NodePrinter::new(self.output, style, SystemTime::now())
    }

    /// Runs the command. A list is written to `out`, anything else is returned.
    pub(super) async fn execute(self, out: &mut impl Write) -> Result<VerbOutput, VerbError> {
        let dir = DataDir::open_existing(&self.data_dir.path()?)?;
        let server = AdminClient::connect(&dir).await?;
        let load = |names: &NodeNames| load_names(&names.names, names.file.as_deref());
        let (action, names) = match &self.verb {
            None => return self.list(&dir, server, out).await,
            Some(NodesVerb::Revocations { output }) => {
                return revocations(&dir, server, *output, out).await;
            }
            Some(NodesVerb::Approve { names }) => {
                return approve(&dir, server, &load(names)?, names.output).await;
            }
            Some(NodesVerb::Forget { names }) => {
                return forget(&dir, server, &load(names)?, names.output).await;
            }
            Some(NodesVerb::Revoke { names }) => (OrderAction::Revoke, names),
            Some(NodesVerb::Unrevoke { names }) => (OrderAction::Unrevoke, names),
            Some(NodesVerb::Reissue { names }) => (OrderAction::Reissue, names),
        };
        order(&dir, server, action, &load(names)?, names.output).await
    }

    async fn list(
        &self,
        dir: &DataDir,
        server: Option<AdminClient>,
        out: &mut impl Write,
    ) -> Result<VerbOutput, VerbError> {
        let names = load_names(&self.names, self.file.as_deref())?;
        let mut output = VerbOutput::out(String::new());
        if self.failed {
            let server = server.ok_or_else(|| VerbError::NotRunning(dir.path().to_owned()))?;
            self.print_failures(&server.failures().await?, &names, out)?;
            return Ok(output);
        }
        let source = match server {
            Some(server) => ListSource::Server(server),
            None => {
                output.failure = Some(VerbError::NotRunning(dir.path().to_owned()));
                let (nodes, orders) = (KnownNodes::open(dir)?, Revocations::open(dir, true)?);
                ListSource::Files(NodeSources::of_files(nodes, orders))
            }
        };
        self.print_list(&source, &names, out).await?;
        Ok(output)
    }

    fn print_failures(
        &self,
        failures: &[FailureStatus],
        names: &[NodeName],
        out: &mut impl Write,
    ) -> Result<(), VerbError> {
        let is_named = |node: &str| names.iter().any(|name| name.as_str() == node);
        let selected = failures.iter().filter(|failure| {
            let mut nodes = failure.node.iter().chain(&failure.nodes_from_address);
            names.is_empty() || nodes.any(|node| is_named(node))
        });
        match self.output {
            NodesOutput::Table | NodesOutput::Wide => {
                let selected: Vec<_> = selected.collect();
                out.write_all(table::failures(&selected, SystemTime::now()).as_bytes())?;
            }
            NodesOutput::Json => {
                let mut document = JsonList::new("failures");
                for failure in selected {
                    document.entry(out, failure)?;
                }
                document.finish(out, None::<(&'static str, &())>)?;
            }
            NodesOutput::Name | NodesOutput::SshConfig | NodesOutput::Ansible => {
                let nodes: BTreeSet<_> = selected
                    .filter_map(|failure| failure.node.as_ref())
                    .collect();
                for node in nodes {
                    writeln!(out, "{}", table::clean(node))?;
                }
            }
        }
        Ok(out.flush()?)
    }

    async fn print_list(
        &self,
        source: &ListSource,
        names: &[NodeName],
        out: &mut impl Write,
    ) -> Result<(), VerbError> {
        let mut printer = self.printer();
        printer.has_histories = !names.is_empty();
        let totals = match self.sort {
            None => {
                let print = |page| printer.page(out, &page);
                self.for_each_page(source, names, print).await?
            }
            Some(order) => {
                let mut all = NodesPage::default();
                let add = |page: NodesPage| {
                    all.has_replicas |= page.has_replicas;
                    all.nodes.extend(page.nodes);
                    Ok(())
                };
                let totals = self.for_each_page(source, names, add).await?;
                let keyed = all
                    .nodes
                    .into_iter()
                    .map(|node| (order.sort.key(&node.summary(), None).to_owned(), node));
                let mut keyed: Vec<_> = keyed.collect();
                keyed.sort_by(|(one, _), (other, _)| order.compare(one, other));
                all.nodes = keyed.into_iter().map(|(_, node)| node).collect();
                printer.page(out, &all)?;
                totals
            }
        };
        Ok(printer.finish(out, &totals, self.none_text())?)
    }

    /// Reads the nodes that the arguments select, page by page, and returns their totals. If a name
    /// is not known, nothing is read.
    async fn for_each_page(
        &self,
        source: &ListSource,
        names: &[NodeName],
        mut each: impl FnMut(NodesPage) -> io::Result<()>,
    ) -> Result<NodeTotals, VerbError> {
        if let (Some(selector), ListSource::Server(server)) = (&self.selector, source) {
            selector.check(&server.node_labels().await?)?;
        }
        if !names.is_empty() {
            let mut unknown: BTreeSet<&str> = names.iter().map(NodeName::as_str).collect();
            let mut pages = NodePages::new(source, names);
            while let Some(page) = pages.next().await? {
                for node in page.nodes {
                    unknown.remove(node.node.as_str());
                }
            }
            if !unknown.is_empty() {
                return Err(VerbError::UnknownNodes(unknown.into_iter().collect()));
            }
        }
        let mut totals = NodeTotals::default();
        let mut pages = NodePages::new(source, names);
        while let Some(mut page) = pages.next().await? {
            page.nodes.retain(|node| {
                let selector = self.selector.as_ref();
                (!self.away || node.is_away())
                    && selector.is_none_or(|selector| selector.matches(&node.selectable_labels()))
            });
            for node in &page.nodes {
                totals.add(NodeState::of(node));
            }
            each(page)?;
        }
        Ok(totals)
    }

    /// Returns the text of a table without nodes.
    fn none_text(&self) -> &'static str {
        match &self.selector {
            Some(_) => NONE_SELECTED,
            None if self.away => NONE_AWAY,
            None => NONE_KNOWN,
        }
    }
}

/// Where lists come from.
enum ListSource {
    Server(AdminClient),
    /// The files of a data directory with which no server runs.
    Files(NodeSources),
}

/// Returns the text that replaces what the terminal shows by a table, of which the last line stays if
/// it has more lines than the terminal.
fn screen(table: &str, rows: usize) -> String {
    let lines: Vec<&str> = table.lines().collect();
    let (shown, last) = match lines.split_last() {
        Some((last, others)) if lines.len() >= rows => {
            let shown = others.get(..rows.saturating_sub(2)).unwrap_or(others);
            (shown, Some(*last))
        }
        Some(_) | None => (&lines[..], None),
    };
    let lines = shown.iter().copied().chain(last);
    let lines: String = lines.map(|line| format!("{line}\x1b[K\n")).collect();
    format!("\x1b[H{lines}\x1b[J")
}

/// The pages of all nodes, or of some.
struct NodePages<'a> {
    source: &'a ListSource,
    query: PageQuery,
    /// The names that have not been looked up, if only some nodes are read.
    names: Option<&'a [NodeName]>,
    is_done: bool,
}

impl<'a> NodePages<'a> {
    /// Creates the pages of the nodes with these names, or without names of all.
    fn new(source: &'a ListSource, names: &'a [NodeName]) -> Self {
        Self {
            source,
            query: PageQuery::default(),
            names: (!names.is_empty()).then_some(names),
            is_done: false,
        }
    }

    /// Returns the next page, or `None` at the end.
    async fn next(&mut self) -> Result<Option<NodesPage>, VerbError> {
        if self.is_done {
            return Ok(None);
        }
        let page = if let Some(names) = self.names {
            let (asked, later) = names.split_at(names.len().min(PAGE_MAX));
            let page = match self.source {
                ListSource::Server(server) => server.named_nodes(asked).await?,
                ListSource::Files(files) => files.page_of(asked, PAGE_MAX),
            };
            let last = page.r#continue.as_deref();
            let answered = asked.iter().position(|name| Some(name.as_str()) == last);
            let left = answered.map_or(later, |index| names.split_at(index + 1).1);
            self.names = Some(left);
            self.is_done = left.is_empty();
            page
        } else {
            let page = match self.source {
                ListSource::Server(server) => server.nodes(&self.query).await?,
                ListSource::Files(files) => files.page(&self.query),
            };
            let next = self.query.advance(page.r#continue.as_deref());
            self.is_done = !next.map_err(AdminError::from)?;
            page
        };
        Ok(Some(page))
    }
}

/// Prints nodes page by page.
struct NodePrinter {
    output: NodesOutput,
    has_totals: bool,
    now: SystemTime,
    table: NodeTable,
    document: JsonList,
    inventory: Inventory,
    has_nodes: bool,
    /// Whether each page of the table has the histories of its nodes below.
    has_histories: bool,
}

impl NodePrinter {
    fn new(output: NodesOutput, style: TableStyle, now: SystemTime) -> Self {
        Self {
            output,
            has_totals: style.has_header,
            now,
            table: NodeTable::new(style),
            document: JsonList::new("nodes"),
            inventory: Inventory::default(),
            has_nodes: false,
            has_histories: false,
        }
    }

    fn page(&mut self, out: &mut impl Write, page: &NodesPage) -> io::Result<()> {
        if page.nodes.is_empty() {
            return Ok(());
        }
        self.has_nodes = true;
        match self.output {
            NodesOutput::Table | NodesOutput::Wide => {
                out.write_all(self.table.rows(page, self.now).as_bytes())?;
                for node in page.nodes.iter().filter(|_| self.has_histories) {
                    out.write_all(table::history(node).as_bytes())?;
                }
            }
            NodesOutput::Json => {
                for node in &page.nodes {
                    self.document.entry(out, node)?;
                }
            }
            NodesOutput::Name => {
                for node in &page.nodes {
                    writeln!(out, "{}", node.node)?;
                }
            }
            NodesOutput::SshConfig => {
                for node in &page.nodes {
                    out.write_all(ssh_entry(node).as_bytes())?;
                }
            }
            NodesOutput::Ansible => {
                for node in &page.nodes {
                    self.inventory.add(node);
                }
            }
        }
        out.flush()
    }

    /// Prints the totals. Without nodes a table is the text `none`.
    fn finish(self, out: &mut impl Write, totals: &NodeTotals, none: &str) -> io::Result<()> {
        match self.output {
            NodesOutput::Table | NodesOutput::Wide if !self.has_totals => {}
            NodesOutput::Table | NodesOutput::Wide if !self.has_nodes => {
                out.write_all(none.as_bytes())?;
            }
            NodesOutput::Table | NodesOutput::Wide => {
                writeln!(out, "{}{totals}", self.table.conflicts())?;
            }
            NodesOutput::Json => self.document.finish(out, Some(("totals", totals)))?,
            NodesOutput::Name | NodesOutput::SshConfig => {}
            NodesOutput::Ansible => out.write_all(self.inventory.document().as_bytes())?,
        }
        out.flush()
    }
}

/// The nodes as they were last observed, without what changes all the time: a hash of each.
#[derive(Debug, Default)]
struct NodesWatch {
    observed: BTreeMap<String, u64>,
    /// The nodes of the pass so far.
    pass: BTreeMap<String, u64>,
}

impl NodesWatch {
    /// Returns whether a node is new or has changed since the last pass.
    fn observe(&mut self, node: &NodeStatus) -> bool {
        let lasting = NodeStatus {
            last_seen: None,
            history: None,
            rtt_millis: None,
            streams: 0,
            bytes_in: 0,
            bytes_out: 0,
            ..node.clone()
        };
        let mut hasher = DefaultHasher::new();
        format!("{lasting:?}").hash(&mut hasher);
        let hash = hasher.finish();
        self.pass.insert(node.node.clone(), hash);
        self.observed.get(&node.node) != Some(&hash)
    }

    /// Forgets the nodes that the pass did not have.
    fn end_pass(&mut self) {
        self.observed = std::mem::take(&mut self.pass);
    }
}

/// Orders something about nodes, and says where that is in force and saved.
async fn order(
    dir: &DataDir,
    server: Option<AdminClient>,
    action: OrderAction,
    names: &[NodeName],
    output: OutputFormat,
) -> Result<VerbOutput, VerbError> {
    let is_running = server.is_some();
    let mut unchecked = None;
    let outcome = if let Some(server) = server {
        let mut outcome = OrderOutcome::default();
        for names in names.chunks(PAGE_MAX) {
            let nodes = names.iter().map(NodeName::to_string).collect();
            let more = server.order(&NodesOrder { action, nodes }).await?;
            outcome.changed.extend(more.changed);
            outcome.unknown.extend(more.unknown);
            // The server answers for all of its orders.
            (outcome.in_force, outcome.pending) = (more.in_force, more.pending);
        }
        outcome
    } else {
        // Only the running server needs to know whether the CA is local.
        let revocations = Revocations::open(require_standalone(dir)?, true)?;
        let changed = revocations.order(action, names, SystemTime::now());
        revocations.flush()?;
        // The order is in force, whatever becomes of this check.
        let known = KnownNodes::open(dir).map_err(|error| unchecked = Some(error));
        let is_unknown = |node: &&NodeName| known.as_ref().is_ok_and(|known| !known.knows(node));
        let unknown = changed.iter().filter(is_unknown);
        OrderOutcome {
            unknown: unknown.map(NodeName::to_string).collect(),
            changed: changed.iter().map(NodeName::to_string).collect(),
            ..OrderOutcome::default()
        }
    };
    let changed: BTreeSet<&str> = outcome.changed.iter().map(String::as_str).collect();
    let unchanged = names.iter().filter(|name| !changed.contains(name.as_str()));
    let unchanged: Vec<_> = unchanged.collect();
    let is_refused = changed.is_empty() && !unchanged.is_empty();
    let refusal = VerbError::NotRevoked(unchanged.iter().copied().collect());
    if output == OutputFormat::Json {
        let document = OrderDocument {
            action,
            unchanged: unchanged.into_iter().map(NodeName::to_string).collect(),
            outcome,
        };
        return Ok(VerbOutput {
            failure: is_refused.then_some(refusal),
            ..VerbOutput::out(json(&Document::new(document))?)
        });
    }
    if is_refused {
        return Err(refusal);
    }
    let (mut out, mut err) = (String::new(), String::new());
    for name in &outcome.changed {
        out.push_str(&match action {
            OrderAction::Revoke => format!("node {name} revoked\n"),
            OrderAction::Unrevoke => format!(
                "node {name} is no longer revoked; an agent that runs connects within about half a minute\n"
            ),
            OrderAction::Reissue => format!(
                "certificates of node {name} revoked; a new token admits it: tunnel-server token create --node {name}\n"
            ),
        });
    }
    out.push_str(match action {
        OrderAction::Revoke => REVOKED_UNTIL,
        OrderAction::Reissue => REISSUED_SINCE,
        OrderAction::Unrevoke => "",
    });
    if !unchanged.is_empty() {
        err.push_str(&format!("note: {refusal}\n"));
    }
    if action != OrderAction::Unrevoke && !outcome.unknown.is_empty() {
        let unknown = NameList::of(&outcome.unknown);
        let hint = format!("note: no node of this name is known: {unknown}; check the spelling\n");
        err.push_str(&hint);
    }
    if let Some(error) = unchecked {
        err.push_str(&format!(
            "note: whether the names are known was not checked: {error}\n"
        ));
    }
    out.push_str(&if is_running {
        format!("in force at {}\n", outcome.in_force.join(", "))
    } else {
        "no tunnel-server runs with this data directory\n".to_owned()
    });
    if !outcome.pending.is_empty() {
        let pending = outcome.pending.join("; ");
        err.push_str(&format!(
            "pending, and tried until it succeeds: {pending}\n"
        ));
    }
    Ok(VerbOutput {
        err,
        ..VerbOutput::out(out)
    })
}

/// The document of an order.
#[derive(serde::Serialize)]
struct OrderDocument {
    action: OrderAction,
    /// Nodes that were as ordered before.
    unchanged: Vec<String>,
    #[serde(flatten)]
    outcome: OrderOutcome,
}

/// What a revocation means, also for pods that are made later.
const REVOKED_UNTIL: &str = "until 'tunnel-server nodes unrevoke NAME' no certificate and no token admits the node, whenever it was issued\n";
const REISSUED_SINCE: &str = "credentials that are issued from now on admit the node, also the next ServiceAccount token of a pod\n";

/// Lists the revocations in force.
async fn revocations(
    dir: &DataDir,
    server: Option<AdminClient>,
    output: OutputFormat,
    out: &mut impl Write,
) -> Result<VerbOutput, VerbError> {
    let files = match &server {
        Some(_) => None,
        None => Some(Revocations::open(require_standalone(dir)?, true)?),
    };
    let (mut table, mut document) = (RevocationTable::default(), JsonList::new("revocations"));
    let (mut query, mut is_empty) = (PageQuery::default(), true);
    loop {
        let page = match (&server, &files) {
            (Some(server), _) => server.revocations(&query).await?,
            (None, Some(files)) => revocations_page(files, &query),
            (None, None) => RevocationsPage::default(),
        };
        is_empty &= page.revocations.is_empty();
        match output {
            OutputFormat::Table if is_empty => {}
            OutputFormat::Table => out.write_all(table.rows(&page.revocations).as_bytes())?,
            OutputFormat::Json => {
                for revocation in &page.revocations {
                    document.entry(out, revocation)?;
                }
            }
        }
        let next = query.advance(page.r#continue.as_deref());
        if !next.map_err(AdminError::from)? {
            break;
        }
    }
    let text = match output {
        OutputFormat::Table if is_empty => "no node is revoked\n".to_owned(),
        OutputFormat::Table => String::new(),
        OutputFormat::Json => {
            document.finish(out, None::<(&str, &())>)?;
            String::new()
        }
    };
    Ok(VerbOutput {
        failure: files.map(|_| VerbError::NotRunning(dir.path().to_owned())),
        ..VerbOutput::out(text)
    })
}

/// Admits nodes that wait for it. Without a running server its store is changed, outside a cluster.
async fn approve(
    dir: &DataDir,
    server: Option<AdminClient>,
    names: &[NodeName],
    output: OutputFormat,
) -> Result<VerbOutput, VerbError> {
    let mut outcome = ApproveOutcome::default();
    if let Some(server) = server {
        for names in names.chunks(PAGE_MAX) {
            let more = server.approve_nodes(names).await?;
            outcome.approved.extend(more.approved);
            outcome.others.extend(more.others);
        }
    } else {
        let tokens = TokenStore::open(require_standalone(dir)?)?;
        outcome = ApproveOutcome::of(names, &tokens.approve(names)?);
    }
    let mut refusals = Vec::new();
    if !outcome.others.is_empty() {
        refusals.push(VerbError::NotPending(NameList::of(&outcome.others)));
    }
    match output {
        OutputFormat::Table => ended(&outcome.approved, "approved", refusals),
        OutputFormat::Json => document(&outcome, outcome.approved.is_empty(), refusals),
    }
}

/// Forgets the nodes that are known and not connected, and names the others.
async fn forget(
    dir: &DataDir,
    server: Option<AdminClient>,
    names: &[NodeName],
    output: OutputFormat,
) -> Result<VerbOutput, VerbError> {
    let mut outcome = ForgetOutcome::default();
    if let Some(server) = server {
        for names in names.chunks(PAGE_MAX) {
            let more = server.forget_nodes(names).await?;
            outcome.forgotten.extend(more.forgotten);
            outcome.unknown.extend(more.unknown);
            outcome.connected.extend(more.connected);
        }
    } else {
        let nodes = KnownNodes::open(dir)?;
        let (forgotten, unknown): (Vec<_>, Vec<_>) =
            names.iter().partition(|name| nodes.forget(name));
        nodes.save()?;
        outcome.forgotten = forgotten.into_iter().map(NodeName::to_string).collect();
        outcome.unknown = unknown.into_iter().map(NodeName::to_string).collect();
    }
    let mut refusals = Vec::new();
    if !outcome.connected.is_empty() {
        refusals.push(VerbError::ConnectedNodes(NameList::of(&outcome.connected)));
    }
    if !outcome.unknown.is_empty() {
        refusals.push(VerbError::UnknownNodes(NameList::of(&outcome.unknown)));
    }
    match output {
        OutputFormat::Table => ended(&outcome.forgotten, "forgotten", refusals),
        OutputFormat::Json => document(&outcome, outcome.forgotten.is_empty(), refusals),
    }
}

/// Returns the text of a command about nodes: what became of some, and why not of others. It fails if
/// nothing became of any.
fn ended(
    nodes: &[String],
    what: &str,
    mut refusals: Vec<VerbError>,
) -> Result<VerbOutput, VerbError> {
    if nodes.is_empty()
        && let Some(refusal) = refusals.pop()
    {
        return Err(refusal);
    }
    let ended = nodes.iter().map(|name| format!("node {name} {what}\n"));
    let notes = refusals.iter();
    Ok(VerbOutput {
        err: notes.map(|refusal| format!("note: {refusal}\n")).collect(),
        ..VerbOutput::out(ended.collect())
    })
}

/// Returns the document of a command about nodes, which names those that were refused, too.
fn document(
    outcome: &impl serde::Serialize,
    is_refused: bool,
    mut refusals: Vec<VerbError>,
) -> Result<VerbOutput, VerbError> {
    Ok(VerbOutput {
        failure: refusals.pop().filter(|_| is_refused),
        ..VerbOutput::out(json(&Document::new(outcome))?)
    })
}

const NONE_KNOWN: &str = "no node is known; 'tunnel-server token create --node NAME' makes one\n";
const NONE_SELECTED: &str = "no such node has these labels\n";
const NONE_AWAY: &str = "no node is away\n";
/// Shortest pause of `--watch` between two lists.
const WATCH_INTERVAL: Duration = Duration::from_secs(2);
/// Rows of a terminal that does not say how many it has.
const TERMINAL_ROWS: usize = 24;
/// The pause is this many times as long as the list took, so that the list of a large fleet costs at
/// most a fifth of one processor.
const WATCH_PAUSE_FACTOR: u32 = 4;

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::routing::routes::{RouteNode, RouteSource};
    use crate::testing::{assert_contains, node_sources};
    use tunnel_store::data_dir::rfc3339;

    #[derive(Parser, Debug)]
    struct Cli {
        #[command(flatten)]
        nodes: NodesArgs,
    }

    fn args(arguments: &str) -> NodesArgs {
        let words = ["nodes"].into_iter().chain(arguments.split_whitespace());
        Cli::try_parse_from(words).unwrap().nodes
    }

    /// A writer that fails like a closed pipe after some bytes.
    struct ClosedPipe(usize);

    impl Write for ClosedPipe {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 = self
                .0
                .checked_sub(bytes.len())
                .ok_or(io::ErrorKind::BrokenPipe)?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Prints the list of `worker-1` and `worker-2`, which another server holds, and `worker-3`,
    /// which is away; the first and the last one are revoked.
    async fn listed(arguments: &str) -> Result<String, VerbError> {
        let held = ["worker-1", "worker-2"];
        let (sources, _scratch) = node_sources(&["worker-3"], &["worker-1", "worker-2"], &held);
        let revoked = ["worker-1", "worker-3"].map(|name| name.parse().unwrap());
        let at = SystemTime::UNIX_EPOCH;
        sources.revocations.order(OrderAction::Revoke, &revoked, at);
        let routes = sources.routes.load();
        let labeled = routes.of(RouteSource::Cluster).map(|node| RouteNode {
            labels: [("zone".into(), node.name.as_str().into())].into(),
            ..RouteNode::clone(node)
        });
        sources.routes.set(RouteSource::Cluster, labeled.collect());
        let (args, mut out) = (args(arguments), Vec::new());
        let names = load_names(&args.names, None)?;
        let source = ListSource::Files(sources);
        args.print_list(&source, &names, &mut out).await?;
        Ok(String::from_utf8(out).unwrap())
    }

    #[tokio::test]
    async fn names_and_state_select_nodes() {
        for (arguments, expected) in [
            ("-o name", "worker-1\nworker-2\nworker-3\n"),
            ("-o name --away", "worker-3\n"),
            ("-o name worker-2 worker-1", "worker-1\nworker-2\n"),
            ("-o name Worker-2", "worker-2\n"),
            ("-o name --away worker-1", ""),
            ("--away worker-1", "no node is away\n"),
            ("-o name --selector zone!=worker-2", "worker-1\nworker-3\n"),
            ("-o name -l zone!=worker-2 --away", "worker-3\n"),
            ("-l zone=a", "no such node has these labels\n"),
            ("-o name --sort state", "worker-3\nworker-1\nworker-2\n"),
            ("-o name --sort -name --away", "worker-3\n"),
            (
                "--no-headers --away",
                "worker-3  revoked  -  -  -  -  -  -\n",
            ),
            ("--no-headers -l zone=a", ""),
        ] {
            assert_eq!(listed(arguments).await.unwrap(), expected, "{arguments}");
        }
    }

    #[tokio::test]
    async fn unknown_name_fails_and_prints_no_other_node() {
        for output in ["table", "wide", "json", "name"] {
            let error = listed(&format!("-o {output} worker-1 worker-9")).await;
            let error = error.unwrap_err();
            let VerbError::UnknownNodes(names) = &error else {
                panic!("{error}");
            };
            assert_eq!(names.shown(), ["worker-9"]);
            assert_eq!(error.exit_code(), 1);
        }
        let many: Vec<String> = (10..1400).map(|number| format!("x{number}")).collect();
        let error = listed(&many.join(" ")).await.unwrap_err();
        assert_contains(&error, "x1006, x1007 and 1380 more; 'tunnel-server nodes'");
    }

    #[tokio::test]
    async fn tables_end_in_the_totals_of_what_they_list() {
        let all = "total: 3; connected: 2 (suspect: 0); away: 1 (revoked: 1); pending: 0";
        for (arguments, totals) in [
            ("", all),
            ("-o wide", all),
            (
                "--away",
                "total: 1; connected: 0 (suspect: 0); away: 1 (revoked: 1); pending: 0",
            ),
        ] {
            let text = listed(arguments).await.unwrap();
            assert_eq!(text.lines().last(), Some(totals), "{text}");
        }
    }

    #[tokio::test]
    async fn hundred_thousand_nodes_are_printed_while_they_are_read() {
        let scratch = tunnel_store::data_dir::testing::Scratch::new();
        let nodes = KnownNodes::open(&scratch.0).unwrap();
        for number in 0..100_000 {
            nodes.record(&format!("edge-{number:06}").parse().unwrap(), &[]);
        }
        let revocations = Revocations::open(&scratch.0, true).unwrap();
        let source = ListSource::Files(NodeSources::of_files(nodes, revocations));
        let (args, mut printed) = (args("-o json"), Vec::new());
        args.print_list(&source, &[], &mut printed).await.unwrap();
        let document: serde_json::Value = serde_json::from_slice(&printed).unwrap();
        assert_eq!(document["totals"]["nodes"], 100_000);
        assert_eq!(document["nodes"][99_999]["node"], "edge-099999");
        // What a page prints is written before the next one is read.
        let closed = args.print_list(&source, &[], &mut ClosedPipe(2000)).await;
        let Err(VerbError::File(error)) = closed else {
            panic!("{closed:?}");
        };
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn table_in_place_fits_the_terminal_and_ends_in_its_totals() {
        let table = "NODE\na\nb\nc\ntotal: 3\n";
        assert_eq!(
            screen(table, 24),
            "\x1b[HNODE\x1b[K\na\x1b[K\nb\x1b[K\nc\x1b[K\ntotal: 3\x1b[K\n\x1b[J"
        );
        assert_eq!(
            screen(table, 4),
            "\x1b[HNODE\x1b[K\na\x1b[K\ntotal: 3\x1b[K\n\x1b[J"
        );
        assert_eq!(screen("", 4), "\x1b[H\x1b[J");
    }

    #[test]
    fn watch_shows_changes_of_state_and_no_traffic() {
        let status = |name: &str, connected, streams| NodeStatus {
            node: name.to_owned(),
            connected,
            streams,
            ..NodeStatus::default()
        };
        let mut watch = NodesWatch::default();
        let mut names = |nodes: Vec<NodeStatus>| -> Vec<String> {
            let changed = nodes.into_iter().filter(|node| watch.observe(node));
            let changed = changed.map(|node| node.node).collect();
            watch.end_pass();
            changed
        };
        let both = |streams| vec![status("a", true, streams), status("b", true, streams)];
        assert_eq!(names(both(0)), ["a", "b"]);
        assert!(names(both(7)).is_empty());
        assert_eq!(
            names(vec![status("a", false, 0), status("b", true, 0)]),
            ["a"]
        );
        // A node that was not selected for a while is new.
        assert!(names(vec![status("b", true, 0)]).is_empty());
        assert_eq!(
            names(vec![status("a", false, 0), status("b", true, 0)]),
            ["a"]
        );
    }

    #[tokio::test]
    async fn document_has_a_version_and_totals() {
        let document = listed("-o json --away").await.unwrap();
        let document: serde_json::Value = serde_json::from_str(&document).unwrap();
        assert_eq!(document["schemaVersion"], 1);
        assert_eq!(document["totals"]["nodes"], 1);
        assert_eq!(document["totals"]["away"], 1);
        assert_eq!(document["totals"]["revoked"], 1);
        assert_eq!(document["nodes"][0]["node"], "worker-3");
        assert_eq!(
            document["nodes"][0]["revokedAt"],
            rfc3339(SystemTime::UNIX_EPOCH)
        );
        assert_eq!(document["nodes"][0]["lastClose"], serde_json::Value::Null);
    }
}
