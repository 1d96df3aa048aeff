//! Orders of operators about nodes: which nodes are refused, and which generations of certificates.
//! Every handshake checks them.
//!
//! An order is in force as soon as it is made or received, and is written afterwards, until that
//! succeeds: to the store of the data directory, and in a cluster to a Secret, too. Orders from the
//! store, the cluster and other servers are merged ([`Order::merge`]), so that none is lost on the way.
//! Orders that concern nothing any more are forgotten ([`ends`]).

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Bound;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{info, warn};
use tunnel_process::meta::Readiness;
use tunnel_process::name_list::NameList;
use tunnel_process::shutdown::Shutdown;
use tunnel_process::telemetry::LogRateLimit;
use tunnel_process::timers::sleep_coalesced;
use tunnel_proto::identity::{PeerIdentity, TrustDomain};
use tunnel_proto::tls::{RevocationCheck, Revoked};
use tunnel_proto::wire::name::{NodeName, ReplicaId};
use tunnel_proto::wire::order::{NodeOrder, Order};
use tunnel_store::data_dir::{DataDir, rfc3339};
use tunnel_store::document::SharedDocument;
use tunnel_store::state_store::{OnDamage, RowChange, StateStore, Table, UnreadableValue};

mod action;
pub mod ends;
mod forget;
mod own;

pub use action::OrderAction;
use action::{seconds, time};
use ends::{Ends, KnownTime};
use own::{AnnouncedOrders, OrdersDigest, OwnOrder, PeerCheck};

/// The orders about nodes of a data directory or of a cluster.
#[derive(Debug)]
pub struct Revocations {
    /// The document that the servers of a cluster share, which has all orders.
    shared: Option<SharedOrders>,
    /// Has all orders, too.
    rows: StateStore,
    state: Mutex<State>,
    version: watch::Sender<u64>,
    /// Whether certificates have a generation.
    is_local_ca: bool,
    peers: OnceLock<PeerCheck>,
    announced: OnceLock<AnnouncedOrders>,
}

#[derive(Debug)]
struct State {
    /// The rows, which follow the orders.
    rows: StateStore,
    orders: BTreeMap<NodeName, Order>,
    /// Orders of this server that nobody has confirmed.
    own: BTreeMap<NodeName, OwnOrder>,
    /// Rows that a later version wrote. They stay as they are, and this server refuses the nodes,
    /// until an operator orders something about them.
    unreadable: BTreeMap<NodeName, UnreadableValue>,
    /// Number of changes of `orders`, and of what of them is announced.
    changes: u64,
    ends: Ends,
    received: BTreeMap<ReplicaId, ReceivedOrders>,
    /// Size of the orders about names that are not nodes here, when it was last counted.
    foreign_bytes: usize,
}

/// Numbers of orders of another server since the start.
#[derive(Debug, Default)]
struct ReceivedOrders {
    accepted: usize,
    refused: usize,
    /// What the server announced when orders of it were last refused.
    refused_digest: Option<OrdersDigest>,
}

#[derive(Debug)]
struct SharedOrders {
    document: SharedDocument,
    progress: Mutex<Progress>,
}

#[derive(Debug, Default)]
struct Progress {
    /// Version of the document that was last read or written.
    last_version: Option<u64>,
    pending: Pending,
    /// The reason why the last write failed.
    problem: Option<String>,
    /// The reason why the document cannot be read.
    damage: Option<String>,
}

/// What the document lacks.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Pending {
    #[default]
    Nothing,
    /// Orders that this server received, and that others write, too.
    Received,
    /// Orders that were made here.
    Own,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RevocationInForce {
    pub node: NodeName,
    pub at: SystemTime,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct OrdersDocument {
    nodes: BTreeMap<String, OrderEntry>,
}

/// An order in the store.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct OrderRow {
    #[serde(deserialize_with = "order_with_next")]
    order: OrderEntry,
    /// Own orders that nobody has confirmed.
    #[serde(default, skip_serializing_if = "is_default")]
    unconfirmed: OwnOrder,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", remote = "Order")]
struct OrderFields {
    #[serde(default, skip_serializing_if = "is_default")]
    counter: u64,
    #[serde(default, rename = "revoked", skip_serializing_if = "is_default")]
    is_revoked: bool,
    #[serde(default, skip_serializing_if = "is_default")]
    at: u64,
    #[serde(default, skip_serializing_if = "is_default")]
    generation: u64,
    #[serde(default, skip_serializing_if = "is_default")]
    reissued_at: u64,
    #[serde(default, skip_serializing_if = "is_default")]
    ends_at: u64,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct OrderEntry(#[serde(with = "OrderFields")] Order);

impl Revocations {
    /// Opens the orders of a data directory. `is_local_ca` means that the local CA issues the agents'
    /// certificates, with generations.
    ///
    /// # Errors
    /// Returns an error with the path if the store cannot be read, or an order in it is damaged.
    pub fn open(dir: &DataDir, is_local_ca: bool) -> io::Result<Self> {
        Self::with_stores(dir.store(OnDamage::Stop)?, None, is_local_ca)
    }

    /// Opens the orders of a data directory and of a document that other servers share; `is_local_ca`
    /// as for [`Revocations::open`].
    ///
    /// # Errors
    /// Returns an error with the name of the file or document that cannot be read or is damaged.
    pub fn open_shared(
        dir: &DataDir,
        shared: SharedDocument,
        is_local_ca: bool,
    ) -> io::Result<Self> {
        Self::with_stores(dir.store(OnDamage::SetAside)?, Some(shared), is_local_ca)
    }

    fn with_stores(
        rows: StateStore,
        shared: Option<SharedDocument>,
        is_local_ca: bool,
    ) -> io::Result<Self> {
        let state = State::load(&rows, shared.is_some())?;
        let has_rows = !state.orders.is_empty();
        let revocations = Self {
            shared: shared.map(|document| SharedOrders {
                document,
                progress: Mutex::default(),
            }),
            rows,
            state: Mutex::new(state),
            version: watch::Sender::new(0),
            is_local_ca,
            peers: OnceLock::new(),
            announced: OnceLock::new(),
        };
        // With its rows the server starts without the document that it shares.
        match revocations.refresh(&mut revocations.state.lock()) {
            Err(error) if has_rows => {
                warn!(%error, "cannot read the orders about nodes that servers share; those of the data directory are in force");
            }
            refreshed => refreshed?,
        }
        Ok(revocations)
    }

    /// Renews the revocations and forgets the orders that are over, as far as the time is known. Call
    /// this when that changes, and from time to time.
    pub fn observe_time(&self, time: KnownTime, now: Instant) {
        let mut state = self.state.lock();
        self.reload(&mut state);
        if state.observe_time(time, now) {
            self.mark(Pending::Received);
            self.notify();
        }
    }

    /// Moves orders that cannot be read aside. Returns their names. Blocks the thread.
    ///
    /// # Errors
    /// Returns an error with the path if the store cannot be read or written.
    pub fn set_aside_damaged(rows: &StateStore) -> io::Result<Vec<String>> {
        let loaded = rows.load::<OrderRow>(Table::Orders, "")?;
        let names = loaded.damaged.iter().map(|damaged| damaged.key.clone());
        let names = names.collect();
        rows.set_aside(Table::Orders, loaded.damaged);
        rows.flush(Table::Damaged)?;
        rows.flush(Table::Orders)?;
        Ok(names)
    }

    /// Puts an order about nodes in force, and returns the nodes that it changed: all, or those that
    /// were revoked. [`Revocations::enforce`] writes the order, or [`Revocations::flush`].
    pub fn order(&self, action: OrderAction, nodes: &[NodeName], now: SystemTime) -> Vec<NodeName> {
        let at = seconds(now);
        // A number on top of all that another server knows is not undone.
        let is_known = self.is_held_by_peer(&self.all());
        let mut state = self.state.lock();
        self.reload(&mut state);
        let mut changed = Vec::new();
        for node in nodes {
            let unreadable = state.unreadable.get(node);
            // Certificates that a reissue ended stay ended.
            let generation = unreadable.and_then(|row| row.number("/order/generation"));
            let known = state.order(node).with_generation(generation.unwrap_or(0));
            let order = match action {
                OrderAction::Revoke => known.with_revoked(true, at),
                OrderAction::Unrevoke if !state.order_in_force(node).is_revoked => continue,
                OrderAction::Unrevoke => known.with_revoked(false, at),
                OrderAction::Reissue => known.reissued(at),
            };
            let order = order.with_end(ends::of(action, at));
            state.insert(node.clone(), order);
            if !is_known || action == OrderAction::Unrevoke {
                let own = state.own.entry(node.clone()).or_default();
                match action {
                    OrderAction::Revoke => own.revoke(true),
                    OrderAction::Unrevoke => own.revoke(false),
                    OrderAction::Reissue => own.reissue(),
                }
            }
            // The operator decides again.
            if let Some(row) = state.unreadable.remove(node) {
                self.rows.copy_aside(Table::Orders, &[row]);
            }
            changed.push(node.clone());
        }
        state.own.retain(|_, own| !is_default(&*own));
        if !changed.is_empty() {
            state.save(&changed);
            self.mark(Pending::Own);
            self.notify();
        }
        changed
    }

    /// Returns the revocations that are in force, ordered by node.
    pub fn in_force(&self) -> Vec<RevocationInForce> {
        self.in_force_after(Bound::Unbounded, usize::MAX)
    }

    /// Returns the first `limit` revocations in force of nodes after `after`, ordered by node.
    pub fn in_force_after(&self, after: Bound<&NodeName>, limit: usize) -> Vec<RevocationInForce> {
        let mut state = self.state.lock();
        self.reload(&mut state);
        let nodes = (after, Bound::Unbounded);
        let orders = state.orders.range(nodes);
        let revoked = orders.filter(|(_, order)| order.is_revoked).take(limit);
        let unreadable = state.unreadable.range(nodes).take(limit);
        let names: BTreeSet<_> = revoked
            .map(|(node, _)| node)
            .chain(unreadable.map(|(node, _)| node))
            .collect();
        let in_force = names.into_iter().take(limit);
        in_force
            .map(|node| RevocationInForce {
                node: node.clone(),
                at: time(state.order(node).at),
            })
            .collect()
    }

    /// Merges orders of another server. `is_node` returns whether this server knows a node of a name:
    /// orders about other names are bounded (256 KiB), so that no server fills the
    /// document. Orders that are over say nothing. Implausible numbers are refused, and where servers
    /// share a document only that ends a revocation. What is new is in force at once, and
    /// [`Revocations::enforce`] writes it unless another server has.
    pub fn merge(
        &self,
        replica: &ReplicaId,
        orders: Vec<NodeOrder>,
        is_node: &dyn Fn(&NodeName) -> bool,
    ) {
        let has_shared = self.shared.is_some();
        let mut state = self.state.lock();
        self.reload(&mut state);
        let mut logged = Vec::new();
        let mut foreign_bytes = None;
        let (mut accepted, mut refused, mut changed) = (0, 0, Pending::Nothing);
        for NodeOrder { node, order } in orders {
            if state.ends.is_over(order) {
                continue;
            }
            let known = state.orders.get(&node).copied();
            let has_room = known.is_some() || is_node(&node) || {
                let used = foreign_bytes.get_or_insert_with(|| state.foreign_bytes(is_node));
                let with_this = *used + entry_bytes(&node);
                let has_room = with_this <= FOREIGN_BYTES_MAX;
                *used = if has_room { with_this } else { *used };
                has_room
            };
            let known = known.unwrap_or_default();
            let order = if has_shared && !order.is_revoked {
                order.with_revocation_of(known)
            } else {
                order
            };
            if !has_room || !order.is_plausible_after(known) {
                refused += 1;
            } else if known.merge(order) != known || state.own.contains_key(&node) {
                let merged = state.merge(&node, order);
                accepted += usize::from(merged > Pending::Nothing);
                if merged > Pending::Nothing && logged.len() < LOGGED_MAX {
                    logged.push(format!("{} {node}", change(known, state.order(&node))));
                }
                changed = changed.max(merged);
            }
        }
        state.foreign_bytes = foreign_bytes.unwrap_or(state.foreign_bytes);
        let announced = self.announced_by(replica);
        let received = state.received.entry(replica.clone()).or_default();
        received.record(accepted, refused, announced);
        if accepted > 0 {
            info!(
                peer = %replica,
                count = accepted,
                total = received.accepted,
                detail = logged.join(", "),
                "orders of another server about nodes are in force"
            );
            self.mark(changed);
            self.notify();
        }
    }

    /// Sets the function that returns whether another server has announced exactly the given orders.
    pub fn confirm_with(&self, is_held: impl Fn(&[NodeOrder]) -> bool + Send + Sync + 'static) {
        let _only_set_once = self.peers.set(PeerCheck(Box::new(is_held)));
    }

    /// Sets the function that returns the digest of the orders that another server announced last, or
    /// `None` while it is not connected. Orders that were refused are a condition until it changes.
    pub fn announced_with(
        &self,
        announced: impl Fn(&ReplicaId) -> Option<OrdersDigest> + Send + Sync + 'static,
    ) {
        let _only_set_once = self.announced.set(AnnouncedOrders(Box::new(announced)));
    }

    fn announced_by(&self, replica: &ReplicaId) -> Option<OrdersDigest> {
        let AnnouncedOrders(announced) = self.announced.get()?;
        announced(replica)
    }

    fn is_held_by_peer(&self, orders: &[NodeOrder]) -> bool {
        let peers = self.peers.get();
        peers.is_some_and(|PeerCheck(is_held)| is_held(orders))
    }

    /// Confirms own orders if another server has announced all orders of this one. Returns whether
    /// some are not confirmed.
    pub fn confirm_by_peers(&self) -> bool {
        let (changes, orders) = {
            let state = self.state.lock();
            if state.own.is_empty() {
                return false;
            }
            (state.changes, state.all())
        };
        let is_held = self.is_held_by_peer(&orders);
        let mut state = self.state.lock();
        if is_held && state.changes == changes {
            self.confirm(&mut state, |_, _| true);
        }
        !state.own.is_empty()
    }

    /// Removes own orders that are confirmed, by node and order.
    fn confirm(&self, state: &mut State, is_confirmed: impl Fn(&NodeName, Order) -> bool) {
        let own = state.own.keys().cloned();
        let confirmed: Vec<_> = own
            .filter(|node| is_confirmed(node, state.order(node)))
            .collect();
        if confirmed.is_empty() {
            return;
        }
        for node in &confirmed {
            state.own.remove(node);
        }
        state.save(&confirmed);
        self.notify();
    }

    /// Returns a receiver that is notified when an order changes or is written, and, once
    /// [`Revocations::enforce`] runs, when a document changes.
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// Returns all orders and the number of changes so far, or `None` if that number is still
    /// `changes`. The first call passes 0.
    pub fn changed_since(&self, changes: u64) -> Option<(u64, Vec<NodeOrder>)> {
        let mut state = self.state.lock();
        self.reload(&mut state);
        (state.changes != changes).then(|| (state.changes, state.all()))
    }

    /// Returns all orders, ordered by node.
    pub fn all(&self) -> Vec<NodeOrder> {
        let mut state = self.state.lock();
        self.reload(&mut state);
        state.all()
    }

    /// Returns the names of the stores that do not have all orders yet, with the problem if a write
    /// failed.
    pub fn unwritten(&self) -> Vec<String> {
        let shared = self.shared.as_ref().and_then(|shared| {
            let progress = shared.progress.lock();
            (progress.pending > Pending::Nothing).then(|| match &progress.problem {
                Some(problem) => problem.clone(),
                None => shared.document.name().to_owned(),
            })
        });
        shared
            .into_iter()
            .chain(self.rows.unsaved(Table::Orders))
            .collect()
    }

    /// Writes the orders that are not persisted yet. Blocks the thread.
    ///
    /// # Errors
    /// Returns an error if the orders cannot be persisted. They stay in force until the process ends.
    pub fn flush(&self) -> io::Result<()> {
        self.write()?;
        self.rows.flush(Table::Orders)
    }

    /// Writes the orders to the document unless it has all of them. Blocks the thread.
    fn write(&self) -> io::Result<()> {
        let Some(shared) = &self.shared else {
            return Ok(());
        };
        if shared.progress.lock().pending == Pending::Nothing {
            return Ok(());
        }
        let mut changes = 0;
        let written = shared.document.change(|theirs: Option<OrdersDocument>| {
            let mut state = self.state.lock();
            if let Some(theirs) = theirs {
                self.merge_document(&mut state, shared, theirs)?;
            }
            changes = state.changes;
            Ok(OrdersDocument::of(&state))
        });
        let mut state = self.state.lock();
        if written.is_ok() && state.changes == changes {
            self.confirm(&mut state, |_, _| true);
        }
        let mut progress = shared.progress.lock();
        match written {
            Ok(version) => {
                progress.last_version = Some(version);
                (progress.problem, progress.damage) = (None, None);
                // What was merged during the write is written next.
                if state.changes == changes {
                    progress.pending = Pending::Nothing;
                    self.notify();
                }
                Ok(())
            }
            Err(error) => {
                progress.problem = Some(error.to_string());
                Err(error)
            }
        }
    }

    /// Returns the order about a node.
    pub fn of_node(&self, node: &NodeName) -> Order {
        let mut state = self.state.lock();
        self.reload(&mut state);
        state.order_in_force(node)
    }

    /// Returns the time at which a node was revoked, or `None` if it is not.
    pub fn revoked_at(&self, node: &NodeName) -> Option<SystemTime> {
        let order = self.of_node(node);
        order.is_revoked.then(|| time(order.at))
    }

    /// Returns whether the node of a certificate is revoked, or the certificate.
    pub fn is_revoked(&self, peer: &PeerIdentity) -> bool {
        let order = peer.node().map(|node| self.of_node(node));
        order.is_some_and(|order| self.refuses(order, peer))
    }

    /// Records the generation of a certificate that was verified. A certificate of the local CA proves
    /// its generation, also to a server that lost the order: the next reissue has a higher one.
    pub fn record_generation(&self, peer: &PeerIdentity) {
        let Some(node) = peer.node().filter(|_| self.has_generation(peer)) else {
            return;
        };
        let mut state = self.state.lock();
        self.reload(&mut state);
        let known = state.order(node);
        if peer.generation > known.generation {
            let proved = Order::default()
                .with_generation(peer.generation)
                .with_end(ends::of_certificate(peer.not_after));
            let changed = state.merge(node, proved);
            self.mark(changed);
            self.notify();
        }
    }

    /// Returns whether the generation of a certificate counts.
    fn has_generation(&self, peer: &PeerIdentity) -> bool {
        self.is_local_ca && peer.domain == TrustDomain::Tunnel
    }

    /// Returns whether an order refuses a certificate.
    pub fn refuses(&self, order: Order, peer: &PeerIdentity) -> bool {
        let is_ended = if self.has_generation(peer) {
            peer.generation < order.generation
        } else {
            is_issued_before(order, peer.not_before)
        };
        order.is_revoked || is_ended
    }

    pub fn revocation_check(self: &Arc<Self>) -> RevocationCheck {
        let revocations = self.clone();
        Arc::new(move |peer| {
            if revocations.is_revoked(peer) {
                Err(Revoked)
            } else {
                Ok(())
            }
        })
    }

    /// Calls `close_revoked`, which closes live sessions whose certificate is revoked, as soon as this
    /// process has made or observed an order, whether it is written or not, and every 5 s. Writes the
    /// orders until that succeeds, and reports a condition meanwhile.
    pub fn enforce(
        self: &Arc<Self>,
        readiness: &Readiness,
        shutdown: &Shutdown,
        close_revoked: impl Fn() + Send + 'static,
    ) {
        if let Some(shared) = &self.shared {
            self.follow_document(shared, shutdown);
            shutdown.spawn_service(self.clone().write_pending());
        }
        let (revocations, readiness) = (self.clone(), readiness.clone());
        let mut changed = self.version.subscribe();
        shutdown.spawn_service(async move {
            loop {
                tokio::select! {
                    _ = changed.changed() => {}
                    () = sleep_coalesced(CHECK_INTERVAL) => {}
                }
                readiness.set_conditions(CONDITION, revocations.conditions());
                close_revoked();
            }
        });
    }

    /// Returns what an operator should fix.
    fn conditions(&self) -> Vec<String> {
        let failed = self.shared.iter().filter_map(|shared| {
            let progress = shared.progress.lock();
            if let Some(damage) = &progress.damage {
                return Some(format!(
                    "{damage}; the orders about nodes that this server knows stay in force"
                ));
            }
            let problem = progress.problem.clone();
            problem
                .filter(|_| progress.pending > Pending::Nothing)
                .map(unsaved)
        });
        let failed = failed.chain(self.rows.problem(Table::Orders).map(unsaved));
        let mut lines: Vec<_> = failed.collect();
        let state = self.state.lock();
        if !state.unreadable.is_empty() {
            let nodes: NameList = state.unreadable.keys().collect();
            lines.push(format!(
                "a later version wrote orders that this one cannot read, so this server refuses the nodes: {nodes}; run that \
                 version, or decide again with 'tunnel-server nodes unrevoke', 'revoke' or 'reissue'"
            ));
        }
        lines.extend(state.unconfirmed_revocations());
        let refused = state.received.iter().filter(|(replica, received)| {
            received.refused > 0 && self.announced_by(replica) == received.refused_digest
        });
        lines.extend(refused.map(|(replica, received)| {
            format!(
                "server {replica} announced {} orders about nodes that this server refuses ({} accepted): orders about names \
                 that are not nodes here have {} of {FOREIGN_BYTES_MAX} bytes, and numbers do not jump; check that server",
                received.refused, received.accepted, state.foreign_bytes
            )
        }));
        lines
    }

    /// Notifies of each observed change of the document.
    fn follow_document(self: &Arc<Self>, shared: &SharedOrders, shutdown: &Shutdown) {
        let (revocations, mut observed) = (self.clone(), shared.document.changed());
        shutdown.spawn_service(async move {
            while observed.changed().await.is_ok() {
                revocations.notify();
            }
        });
    }

    /// Writes to the document what it lacks, until that succeeds: own orders at once, and those of other
    /// servers after a pause, if they have not written them by then.
    async fn write_pending(self: Arc<Self>) {
        let mut changed = self.version.subscribe();
        let mut has_failed = false;
        loop {
            // A document that is gone is pending.
            self.reload(&mut self.state.lock());
            let shared = self.shared.as_ref();
            let pending = shared.map(|shared| shared.progress.lock().pending);
            let pause = match pending {
                Some(Pending::Own) if !has_failed => Duration::ZERO,
                Some(Pending::Received) if !has_failed => {
                    RECEIVED_PAUSE.mul_f64(1.0 + rand::random::<f64>())
                }
                _ => CHECK_INTERVAL,
            };
            tokio::select! {
                biased;
                () = tokio::time::sleep(pause) => {}
                _ = changed.changed() => {
                    has_failed = false;
                    continue;
                }
            }
            if pending.is_none_or(|pending| pending == Pending::Nothing) {
                continue;
            }
            // A write blocks.
            let writing = self.clone();
            let written = tokio::task::spawn_blocking(move || writing.write());
            has_failed = matches!(written.await, Ok(Err(_)) | Err(_));
            static UNSAVED: LogRateLimit = LogRateLimit::new("orders that cannot be saved");
            if has_failed && UNSAVED.admit() {
                warn!("cannot save orders about nodes; they are in force, trying again");
            }
        }
    }

    fn notify(&self) {
        self.version.send_modify(|version| *version += 1);
    }

    /// Records that the document lacks orders.
    fn mark(&self, pending: Pending) {
        if let Some(shared) = &self.shared {
            let mut progress = shared.progress.lock();
            progress.pending = progress.pending.max(pending);
        }
    }

    /// Loads orders that other processes wrote, and logs an error.
    fn reload(&self, state: &mut State) {
        if let Err(error) = self.refresh(state) {
            static UNREAD: LogRateLimit = LogRateLimit::new("orders that cannot be reloaded");
            if UNREAD.admit() {
                warn!(%error, "cannot reload the orders about nodes; the known ones stay in force");
            }
        }
    }

    /// Loads orders that other servers wrote to the document. A missing document undoes none, and is
    /// written.
    fn refresh(&self, state: &mut State) -> io::Result<()> {
        let Some(shared) = &self.shared else {
            return Ok(());
        };
        let version = shared.document.version();
        {
            let mut progress = shared.progress.lock();
            if shared.document.is_lost() && !state.orders.is_empty() {
                progress.pending = progress.pending.max(Pending::Received);
            }
            if version.is_none() || version == progress.last_version {
                return Ok(());
            }
            // Damaged content is parsed once.
            progress.last_version = version;
        }
        let content = shared.document.read::<OrdersDocument>();
        let merged = content.and_then(|content| match content {
            Some(content) => self.merge_document(state, shared, content),
            None => Ok(()),
        });
        shared.progress.lock().damage = merged.as_ref().err().map(io::Error::to_string);
        merged
    }

    /// Merges the orders of the document. An invalid name is reported as an error after all other
    /// entries are merged.
    fn merge_document(
        &self,
        state: &mut State,
        shared: &SharedOrders,
        content: OrdersDocument,
    ) -> io::Result<()> {
        let (mut damaged, mut changed) = (None, Pending::Nothing);
        for (name, OrderEntry(theirs)) in &content.nodes {
            match name.parse() {
                Ok(node) => {
                    let is_forgotten = !state.orders.contains_key(&node);
                    let known = state.order(&node);
                    let theirs = if theirs.has_next() {
                        state.ends.in_document(*theirs)
                    } else {
                        damaged = Some(shared.document.damaged(&format!("{name:?}: {NO_NEXT}")));
                        if !theirs.is_revoked || known.is_revoked {
                            continue;
                        }
                        // Whatever its number, somebody wanted the node refused.
                        known.with_revoked(true, seconds(SystemTime::now()))
                    };
                    if !(is_forgotten && state.ends.is_over(theirs)) {
                        changed = changed.max(state.merge(&node, theirs));
                    }
                }
                Err(error) => {
                    damaged = Some(shared.document.damaged(&format!("{name:?}: {error}")));
                }
            }
        }
        self.confirm(state, |node, order| {
            content.nodes.get(node.as_str()) == Some(&OrderEntry(order))
        });
        // What is over here, and is not for a server with another clock, causes no write.
        let mut ours = OrdersDocument::of(state).nodes.into_iter();
        let lacks = ours.any(|(name, order)| content.nodes.get(&name) != Some(&order));
        let mut progress = shared.progress.lock();
        progress.pending = match progress.pending {
            _ if !lacks => Pending::Nothing,
            pending => pending.max(changed).max(Pending::Received),
        };
        damaged.map_or(Ok(()), Err)
    }
}

impl ReceivedOrders {
    /// Counts the orders of one answer of a server that has announced this digest.
    fn record(&mut self, accepted: usize, refused: usize, announced: Option<OrdersDigest>) {
        self.accepted += accepted;
        if refused > 0 {
            if announced != self.refused_digest {
                self.refused = 0;
            }
            self.refused += refused;
            self.refused_digest = announced;
        }
    }
}

impl State {
    /// Loads the orders of a store. A damaged one stops the start, unless servers share a document
    /// that has it.
    fn load(rows: &StateStore, is_shared: bool) -> io::Result<Self> {
        let loaded = rows.load::<OrderRow>(Table::Orders, "")?;
        if let Some(damaged) = loaded.damaged.first().filter(|_| !is_shared) {
            return Err(rows.damaged(Table::Orders, damaged));
        }
        rows.set_aside(Table::Orders, loaded.damaged);
        // The names were names when they were written.
        let later = loaded.later.into_iter();
        let later = later.filter_map(|row| Some((row.key.parse().ok()?, row)));
        let mut state = Self {
            rows: rows.clone(),
            orders: BTreeMap::new(),
            own: BTreeMap::new(),
            unreadable: later.collect(),
            changes: 0,
            ends: Ends::default(),
            received: BTreeMap::new(),
            foreign_bytes: 0,
        };
        for (name, row) in loaded.values {
            let Ok(node) = name.parse::<NodeName>() else {
                continue;
            };
            let OrderRow {
                order: OrderEntry(order),
                unconfirmed,
            } = row;
            if !is_default(&unconfirmed) {
                state.own.insert(node.clone(), unconfirmed);
            }
            state.insert(node, order);
        }
        Ok(state)
    }

    /// Makes the rows of nodes follow, unless a later version wrote them. Does not wait for the disk.
    fn save(&self, nodes: &[NodeName]) {
        let own = nodes
            .iter()
            .filter(|node| !self.unreadable.contains_key(*node));
        let rows = own.map(|node| {
            let row = OrderRow {
                order: OrderEntry(self.order(node)),
                unconfirmed: self.own.get(node).copied().unwrap_or_default(),
            };
            RowChange::upsert(node.as_str(), &row)
        });
        self.rows.change(Table::Orders, rows.collect());
    }

    fn insert(&mut self, node: NodeName, order: Order) {
        self.orders.insert(node, order);
        self.changes += 1;
    }

    fn order(&self, node: &NodeName) -> Order {
        self.orders.get(node).copied().unwrap_or_default()
    }

    /// Returns the order about a node. What cannot be read refuses it.
    fn order_in_force(&self, node: &NodeName) -> Order {
        let order = self.order(node);
        let is_revoked = order.is_revoked || self.unreadable.contains_key(node);
        Order {
            is_revoked,
            ..order
        }
    }

    /// Returns the size of the orders about names that are not nodes.
    fn foreign_bytes(&self, is_node: &dyn Fn(&NodeName) -> bool) -> usize {
        let names = self.orders.keys().filter(|name| !is_node(name));
        names.map(entry_bytes).sum()
    }

    /// Merges an order that a document or another server has. Returns whether that changes an order,
    /// and whether own orders are repeated.
    fn merge(&mut self, node: &NodeName, theirs: Order) -> Pending {
        let known = self.orders.get(node).copied();
        let ours = known.unwrap_or_default();
        let mut own = self.own.get(node).copied().unwrap_or_default();
        let now = seconds(SystemTime::now());
        let before = own;
        let mut merged = own.merge(ours, theirs, now);
        if is_default(&own) {
            self.own.remove(node);
        } else {
            self.own.insert(node.clone(), own);
        }
        let is_repeated = merged != ours.merge(theirs);
        if is_repeated {
            merged = merged.with_end(ends::of(OrderAction::Reissue, now));
            warn!(
                %node,
                "an order of this server was given without what others knew, who undo it; it is ordered again"
            );
        }
        if known == Some(merged) {
            if own != before {
                self.save(std::slice::from_ref(node));
            }
            return Pending::Nothing;
        }
        self.insert(node.clone(), merged);
        self.save(std::slice::from_ref(node));
        if is_repeated {
            Pending::Own
        } else {
            Pending::Received
        }
    }

    /// Returns the orders that others learn.
    fn all(&self) -> Vec<NodeOrder> {
        let orders = self.current();
        orders
            .map(|(node, order)| NodeOrder::new(node, *order))
            .collect()
    }
}

impl OrdersDocument {
    /// Returns what the document should have.
    fn of(state: &State) -> Self {
        let entry = |(node, order): (&NodeName, &Order)| (node.to_string(), OrderEntry(*order));
        Self {
            nodes: state.current().map(entry).collect(),
        }
    }
}

/// Reads an order whose numbers have a next one.
fn order_with_next<'de, D: Deserializer<'de>>(deserializer: D) -> Result<OrderEntry, D::Error> {
    let entry = OrderEntry::deserialize(deserializer)?;
    if entry.0.has_next() {
        Ok(entry)
    } else {
        Err(D::Error::custom(NO_NEXT))
    }
}

fn unsaved(problem: String) -> String {
    format!("orders about nodes are in force here but not saved: {problem}; the server tries again")
}

/// Returns whether an order refuses a credential of another issuer, which has no generation, by its
/// time of issue.
pub fn is_issued_before(order: Order, issued: SystemTime) -> bool {
    order.generation > 0 && seconds(issued) <= order.reissued_at
}

/// Returns the message for the agent of a node whose certificate or token an order refuses.
pub fn revoked_message(order: Order) -> String {
    if order.is_revoked {
        let at = rfc3339(time(order.at));
        format!("the node was revoked at {at}; 'tunnel-server nodes unrevoke' admits it again")
    } else {
        let at = rfc3339(time(order.reissued_at));
        format!(
            "the node's certificates were revoked at {at}; remove agent.key and agent.crt on the node and enroll with a new token"
        )
    }
}

/// Returns the largest usual size of an entry about this node in a document.
fn entry_bytes(node: &NodeName) -> usize {
    ENTRY_BYTES + node.as_str().len()
}

/// Returns what an order changed about a node, for the log.
fn change(before: Order, after: Order) -> &'static str {
    match (before.is_revoked, after.is_revoked) {
        (false, true) => "revoked",
        (true, false) => "unrevoked",
        _ if before.generation < after.generation => "reissued",
        _ => "renumbered",
    }
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Maximum size of the orders about names that are not nodes here, if other servers announce them: a
/// quarter of the largest Secret. That has room for 2,064 names of 20 characters, or for 728 of 253.
/// Operators may order more.
const FOREIGN_BYTES_MAX: usize = 256 * 1024;
/// Size of an entry of a document without its name, with a revocation and a reissue.
const ENTRY_BYTES: usize = 115;
/// Nodes that the log names of those about which another server announced orders.
const LOGGED_MAX: usize = 10;
/// Why an order with a number near the end is damaged.
const NO_NEXT: &str = "its counter or generation leaves no number for the next order";
/// Name of the condition in `/readyz?verbose`.
const CONDITION: &str = "unsaved orders";
/// Interval at which a failed write is tried again, and sessions are checked that were registered
/// while their certificate was revoked.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Minimum time for which a server waits for others to write the orders that it received.
const RECEIVED_PAUSE: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests;
