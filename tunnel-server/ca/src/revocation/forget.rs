//! What a server does as time goes by: it renews revocations and forgets orders that are over.

use tokio::time::Instant;
use tunnel_process::name_list::NameList;
use tunnel_proto::wire::name::NodeName;
use tunnel_proto::wire::order::Order;
use tunnel_store::state_store::{RowChange, Table};

use super::State;
use super::action::seconds;
use super::ends::{CLOCK_MIN_SECONDS, DAY_SECONDS, KnownTime, ORDER_SECONDS, renewed};

impl State {
    /// Returns the orders that are not over.
    pub(super) fn current(&self) -> impl Iterator<Item = (&NodeName, &Order)> {
        let orders = self.orders.iter();
        orders.filter(|(_, order)| !self.ends.is_over(**order))
    }

    /// Renews revocations and forgets orders. Returns whether that changes what others learn.
    pub(super) fn observe_time(&mut self, time: KnownTime, now: Instant) -> bool {
        let changes = self.changes;
        let before = self.current().count();
        let may_forget = self.ends.observe(time, now);
        if self.current().count() != before {
            self.changes += 1;
        }
        self.renew(time);
        if may_forget {
            self.forget();
        }
        self.changes != changes
    }

    fn renew(&mut self, time: KnownTime) {
        let (now, is_alone) = match time {
            KnownTime::Unknown => return,
            KnownTime::Alone(time) => (seconds(time), true),
            KnownTime::Confirmed(time) => (seconds(time), false),
        };
        // The end of an order that is renewed by such a clock would be in the past.
        if now < CLOCK_MIN_SECONDS {
            return;
        }
        let due = self.orders.iter().filter(|(node, order)| {
            let is_known = is_alone || !self.ends.is_over(**order) || self.own.contains_key(*node);
            order.is_revoked && is_known && order.ends_at < now.saturating_add(ORDER_SECONDS / 2)
        });
        let due: Vec<_> = due.map(|(node, _)| node.clone()).collect();
        for node in &due {
            self.insert(node.clone(), self.order(node).with_end(renewed(now)));
        }
        if !due.is_empty() {
            self.save(&due);
        }
    }

    fn forget(&mut self) {
        let until = self.ends.as_of.saturating_sub(DAY_SECONDS);
        let over = self.orders.iter().filter(|(node, order)| {
            let is_pending = self.own.contains_key(*node) || self.unreadable.contains_key(*node);
            !order.is_revoked && !is_pending && order.is_over(until)
        });
        let over: Vec<_> = over.map(|(node, _)| node.clone()).collect();
        for node in &over {
            self.orders.remove(node);
            self.changes += 1;
        }
        if !over.is_empty() {
            let rows = over.iter().map(|node| RowChange::remove(node.as_str()));
            self.rows.change(Table::Orders, rows.collect());
        }
    }

    /// Returns the condition about revocations that nobody has renewed.
    pub(super) fn unconfirmed_revocations(&self) -> Option<String> {
        let orders = self.orders.iter();
        let over = orders.filter(|(_, order)| order.is_revoked && self.ends.is_over(**order));
        let nodes: NameList = over.map(|(node, _)| node).collect();
        (!nodes.is_empty()).then(|| {
            format!(
                "this server refuses nodes that no other server has confirmed to be revoked for more than a year: {nodes}; \
                 decide again with 'tunnel-server nodes revoke' or 'unrevoke'"
            )
        })
    }
}
