//! Rows of nodes over the connections between servers, for the console: the accepting end sends its rows
//! to a server that shows them, first all and then each change. Nothing is decided by them.

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::future::pending;
use std::sync::Arc;
use std::time::SystemTime;

use tokio::sync::{Notify, mpsc, watch};
use tunnel_proto::wire::name::{NodeName, ReplicaId};
use tunnel_proto::wire::node_row::{FAILING_BYTES, NodeRow, NodeRows, ServerReport};
use tunnel_proto::wire::peer::{PEER_MESSAGE_MAX, PeerMessage};
use tunnel_tables::VersionedMap;

/// What this server shows others. A clone costs nothing.
#[derive(Debug, Clone, Default)]
pub(crate) struct OwnRows {
    pub(crate) rows: VersionedMap<NodeName, Arc<NodeRow>>,
    /// `None` until the console has made the first rows.
    pub(crate) report: Option<ServerReport>,
}

/// What another server has sent.
#[derive(Debug, Default)]
pub(super) struct ReplicaRows {
    rows: HashMap<NodeName, Arc<NodeRow>>,
    report: Option<ServerReport>,
    /// Time of the last message.
    received: Option<SystemTime>,
}

/// The rows of this server and of the others.
#[derive(Debug)]
pub(crate) struct RowExchange {
    /// Rows of one server that are stored (`limits.directoryNodes`).
    nodes_max: usize,
    own: watch::Sender<OwnRows>,
    /// This server shows rows.
    is_wanted: watch::Sender<bool>,
    others: parking_lot::Mutex<BTreeMap<ReplicaId, ReplicaRows>>,
}

impl RowExchange {
    pub(super) fn new(nodes_max: usize) -> Self {
        Self {
            nodes_max,
            own: watch::Sender::default(),
            is_wanted: watch::Sender::new(false),
            others: parking_lot::Mutex::default(),
        }
    }

    /// Asks the other servers for their rows, from now on.
    pub(crate) fn want(&self) {
        self.is_wanted.send_replace(true);
    }

    /// Changes what this server shows others.
    pub(crate) fn change(&self, change: impl FnOnce(&mut OwnRows)) {
        self.own.send_modify(change);
    }

    /// Returns what another server sent of a node, and when it sent something last.
    pub(crate) fn row(
        &self,
        replica: &ReplicaId,
        node: &NodeName,
    ) -> Option<(Arc<NodeRow>, SystemTime)> {
        let others = self.others.lock();
        let rows = others.get(replica)?;
        Some((rows.rows.get(node)?.clone(), rows.received?))
    }

    /// Returns what the other servers reported of themselves.
    pub(crate) fn reports(&self) -> BTreeMap<ReplicaId, ServerReport> {
        let others = self.others.lock();
        let reports = others.iter();
        reports
            .filter_map(|(replica, rows)| Some((replica.clone(), rows.report.clone()?)))
            .collect()
    }

    /// Applies what another server sent. Rows beyond `limits.directoryNodes` are left out.
    pub(super) fn apply(&self, replica: &ReplicaId, message: NodeRows) {
        let mut others = self.others.lock();
        let rows = others.entry(replica.clone()).or_default();
        if message.is_full {
            *rows = ReplicaRows::default();
        }
        rows.received = Some(SystemTime::now());
        for node in &message.removed {
            rows.rows.remove(node);
        }
        for row in message.rows {
            let has_room = rows.rows.len() < self.nodes_max;
            if has_room || rows.rows.contains_key(&row.node) {
                rows.rows.insert(row.node.clone(), Arc::new(row));
            }
        }
        if message.report.is_some() {
            rows.report = message.report;
        }
    }

    /// Drops what another server sent.
    pub(super) fn forget(&self, replica: &ReplicaId) {
        self.others.lock().remove(replica);
    }

    /// Asks the other end of a connection for rows when this server shows them.
    pub(super) async fn ask(&self, outbox: mpsc::Sender<PeerMessage>) -> Infallible {
        let mut is_wanted = self.is_wanted.subscribe();
        if is_wanted.wait_for(|is_wanted| *is_wanted).await.is_ok() {
            let request = NodeRows {
                is_wanted: true,
                ..NodeRows::default()
            };
            let _connection_is_gone = outbox.send(PeerMessage::NodeRows(request)).await;
        }
        pending().await
    }

    /// Sends rows over a connection once the other end has asked for them.
    pub(super) async fn send(
        &self,
        asked: Arc<Notify>,
        outbox: mpsc::Sender<PeerMessage>,
    ) -> Infallible {
        let mut own = self.own.subscribe();
        asked.notified().await;
        let mut sent: Option<OwnRows> = None;
        loop {
            let current = own.borrow_and_update().clone();
            if current.report.is_some() {
                for message in changes(sent.as_ref(), &current) {
                    if outbox.send(PeerMessage::NodeRows(message)).await.is_err() {
                        return pending().await;
                    }
                }
                sent = Some(current);
            }
            if own.changed().await.is_err() {
                return pending().await;
            }
        }
    }
}

/// Returns the messages that lead from the rows that were sent to the current ones. The last one has the
/// report.
fn changes(sent: Option<&OwnRows>, current: &OwnRows) -> Vec<NodeRows> {
    let mut messages = vec![NodeRows {
        is_full: sent.is_none(),
        ..NodeRows::default()
    }];
    let mut bytes = 0;
    let mut add = |node: &NodeName| {
        let row = current.rows.get(node);
        let size = row.map_or(node.as_str().len() + 4, |row| row.size_max());
        if bytes + size > MESSAGE_BYTES {
            messages.push(NodeRows::default());
            bytes = 0;
        }
        bytes += size;
        if let Some(message) = messages.last_mut() {
            match row {
                Some(row) => message.rows.push(NodeRow::clone(row)),
                None => message.removed.push(node.clone()),
            }
        }
    };
    match sent {
        None => current.rows.iter().for_each(|(node, _)| add(node)),
        Some(sent) => current
            .rows
            .changed_from(&sent.rows)
            .into_iter()
            .for_each(add),
    }
    if let Some(last) = messages.last_mut() {
        last.report.clone_from(&current.report);
    }
    messages
}

/// Upper bound for the bytes of the entries in one message. The report has the names of 64 servers and
/// failing requests.
const MESSAGE_BYTES: usize = PEER_MESSAGE_MAX - 64 * 256 - FAILING_BYTES - 256;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bytes::BytesMut;
    use tunnel_proto::wire::control::Message as _;

    use super::*;

    fn row(number: u32, streams: u32) -> (NodeName, Arc<NodeRow>) {
        let labels = ["x".repeat(63), "y".repeat(63)].join(".");
        let node: NodeName = format!("edge-{number:05}.{labels}").parse().unwrap();
        let row = NodeRow {
            node: node.clone(),
            is_suspect: false,
            transport: "quic".into(),
            rtt_millis: 4,
            streams,
            bytes: [1, 2],
            bytes_per_second: [3, 4],
            errors_last_hour: 5,
            version: "culvert/0.1.0".into(),
            address: None,
            since: SystemTime::UNIX_EPOCH,
            certificate_not_after: SystemTime::UNIX_EPOCH + Duration::from_secs(1),
            trend: vec![1; 48],
            silent_seconds: 0,
        };
        (node, Arc::new(row))
    }

    #[test]
    fn rows_are_a_list_in_messages_that_fit_and_then_only_what_changed() {
        let mut own = OwnRows {
            report: Some(ServerReport {
                sessions: 3000,
                linked: (0..64)
                    .map(|number| format!("server-{number}").parse().unwrap())
                    .collect(),
                ..ServerReport::default()
            }),
            ..OwnRows::default()
        };
        for number in 0..3000 {
            let (node, row) = row(number, 0);
            own.rows.insert(node, row);
        }
        let other: ReplicaId = "server-2".parse().unwrap();
        let limited = RowExchange::new(1000);
        let apply = |messages: Vec<NodeRows>| {
            for message in messages {
                let encoded = PeerMessage::NodeRows(message.clone());
                encoded.encode(&mut BytesMut::new()).unwrap();
                limited.apply(&other, message);
            }
        };
        let list = changes(None, &own);
        assert!(list[0].is_full && list.iter().skip(1).all(|message| !message.is_full));
        assert!(
            list.iter()
                .rev()
                .skip(1)
                .all(|message| message.report.is_none())
        );
        apply(list);
        // The limit of nodes holds for rows, too.
        let shown = limited.others.lock().get(&other).unwrap().rows.len();
        assert_eq!(shown, 1000);

        let sent = own.clone();
        let (changed, newer) = row(7, 9);
        own.rows.insert(changed.clone(), newer);
        let (removed, _) = row(8, 0);
        own.rows.remove(&removed);
        let change = changes(Some(&sent), &own);
        assert_eq!(
            (change.len(), change[0].rows.len(), change[0].removed.len()),
            (1, 1, 1)
        );
        apply(change);
        let streams = |node: &NodeName| limited.row(&other, node).map(|(row, _)| row.streams);
        assert_eq!((streams(&changed), streams(&removed)), (Some(9), None));
        assert_eq!(limited.reports()[&other].sessions, 3000);
        limited.forget(&other);
        assert!(limited.reports().is_empty() && streams(&changed).is_none());
    }

    #[tokio::test]
    async fn rows_are_sent_to_a_server_that_asks_for_them() {
        let (near, far) = (RowExchange::new(1), RowExchange::new(1));
        let (asks, mut asked) = mpsc::channel(4);
        let (answers, mut answered) = mpsc::channel(4);
        let due = Arc::new(Notify::new());
        let exchange = async {
            tokio::select! {
                never = near.ask(asks) => match never {},
                never = far.send(due.clone(), answers) => match never {},
            }
        };
        let story = async {
            far.change(|own| {
                let (node, row) = row(1, 1);
                own.rows.insert(node, row);
                own.report = Some(ServerReport::default());
            });
            assert!(asked.try_recv().is_err() && answered.try_recv().is_err());
            near.want();
            let Some(PeerMessage::NodeRows(request)) = asked.recv().await else {
                panic!("no request");
            };
            assert!(request.is_wanted);
            due.notify_one();
            let Some(PeerMessage::NodeRows(list)) = answered.recv().await else {
                panic!("no rows");
            };
            assert!(list.is_full && list.rows.len() == 1 && list.report.is_some());
        };
        tokio::select! {
            () = story => {}
            () = exchange => {}
        }
    }
}
