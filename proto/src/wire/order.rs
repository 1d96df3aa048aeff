//! Orders of operators about nodes. Servers merge the orders that they know by a rule in which no
//! clock counts, so that the order and the number of merges do not matter.
//!
//! An order ends when it concerns no certificate and no token any more. Ended orders are forgotten, so
//! that their number is bounded. The numbers of an order are at least the day on which it was made, so
//! that an order which was forgotten never counts against a later one. A revocation does not end, but
//! servers renew it as long as they are connected: one that nobody has renewed was taken back and
//! forgotten elsewhere.

use super::name::NodeName;

/// What operators ordered about a node. The default is a node without orders.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Order {
    /// Number of revocations of the node and of their ends.
    pub counter: u64,
    /// Whether the node is refused, with any certificate and any token.
    pub is_revoked: bool,
    /// Time of the last revocation or of its end, in seconds since 1970. For people only.
    pub at: u64,
    /// Number of times that the certificates of the node were ended. Certificates of an earlier
    /// generation are refused.
    pub generation: u64,
    /// Time at which the generation began, in seconds since 1970. Credentials of another issuer have
    /// no generation: those that were issued until then are refused.
    pub reissued_at: u64,
    /// Time until which servers know the order, in seconds since 1970; 0 if that is not known.
    pub ends_at: u64,
}

/// The order about a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeOrder {
    /// The node that the agent serves.
    pub node: NodeName,
    /// What operators ordered about it.
    pub order: Order,
}

impl NodeOrder {
    /// Creates the order about a node.
    pub fn new(node: &NodeName, order: Order) -> Self {
        Self {
            node: node.clone(),
            order,
        }
    }
}

impl Order {
    /// Merges what two servers know: of two revocations or their ends the one with the higher number
    /// counts, a revocation if the numbers are equal, and of two generations the higher one.
    pub fn merge(self, other: Self) -> Self {
        let revocation = |order: &Self| (order.counter, order.is_revoked, order.at);
        let (counter, is_revoked, at) = revocation(&self).max(revocation(&other));
        let reissue = |order: &Self| (order.generation, order.reissued_at);
        let (generation, reissued_at) = reissue(&self).max(reissue(&other));
        Self {
            counter,
            is_revoked,
            at,
            generation,
            reissued_at,
            ends_at: self.ends_at.max(other.ends_at),
        }
    }

    /// Returns the order after a revocation, or after its end.
    pub fn with_revoked(self, is_revoked: bool, now: u64) -> Self {
        Self {
            counter: next_number(self.counter, now),
            is_revoked,
            at: now,
            ..self
        }
    }

    /// Returns the order after the certificates of the node were ended.
    pub fn reissued(self, now: u64) -> Self {
        Self {
            generation: next_number(self.generation, now),
            reissued_at: now,
            ..self
        }
    }

    /// Returns the order with this end, unless it has a later one.
    pub fn with_end(self, ends_at: u64) -> Self {
        Self {
            ends_at: self.ends_at.max(ends_at),
            ..self
        }
    }

    /// Returns whether the order has ended at this time, or, for a revocation, whether nobody has
    /// renewed it.
    pub fn is_over(self, now: u64) -> bool {
        (1..=now).contains(&self.ends_at)
    }

    /// Returns the order with the revocation of another order, or its end. The order ends after both
    /// if its generation is newer.
    pub fn with_revocation_of(self, other: Self) -> Self {
        let is_newer = (self.generation, self.reissued_at) > (other.generation, other.reissued_at);
        let ends_at = if is_newer { self.ends_at } else { 0 };
        Self {
            generation: self.generation,
            reissued_at: self.reissued_at,
            ends_at: other.ends_at.max(ends_at),
            ..other
        }
    }

    /// Returns the order with at least this generation, which a certificate or a token proves.
    pub fn with_generation(self, proved: u64) -> Self {
        Self {
            generation: self.generation.max(proved),
            ..self
        }
    }

    /// Returns whether a token that was created under this order is void under `current`.
    pub fn is_before(self, current: Self) -> bool {
        self.counter < current.counter || self.generation < current.generation
    }

    /// Returns whether its numbers leave room for the next orders. No server makes one that does not.
    pub fn has_next(self) -> bool {
        self.counter <= NUMBER_MAX && self.generation <= NUMBER_MAX
    }

    /// Returns whether another server may announce this order to one that knows `known`. Numbers far
    /// ahead would leave none for the next orders.
    pub fn is_plausible_after(self, known: Self) -> bool {
        self.counter <= known.counter.saturating_add(LEAD_MAX)
            && self.generation <= known.generation.saturating_add(LEAD_MAX)
    }
}

/// Returns the number that follows `known` at this time.
fn next_number(known: u64, now: u64) -> u64 {
    let day = (now / DAY_SECONDS).min(DAYS_MAX);
    known.max(day).saturating_add(1)
}

const DAY_SECONDS: u64 = 24 * 60 * 60;
/// Largest number that a clock gives an order: 1,400 years. Numbers of clocks that are far ahead must
/// stay plausible.
const DAYS_MAX: u64 = 1 << 19;
/// Orders about one node that a server may have missed.
const LEAD_MAX: u64 = 1 << 20;
/// Largest number that counts. With [`LEAD_MAX`] orders a second, servers reach it in 270,000 years.
const NUMBER_MAX: u64 = u64::MAX / 2;

#[cfg(test)]
mod tests {
    use super::*;

    fn orders() -> Vec<Order> {
        let numbers =
            (0..3).flat_map(|counter| (0..3).map(move |generation| (counter, generation)));
        let times = [0, 5, u64::MAX];
        let orders = numbers.flat_map(|(counter, generation)| {
            [false, true].into_iter().flat_map(move |is_revoked| {
                times.map(move |time| Order {
                    counter,
                    is_revoked,
                    at: time,
                    generation,
                    reissued_at: u64::MAX - time,
                    ends_at: time / 2,
                })
            })
        });
        orders.collect()
    }

    #[test]
    fn merges_depend_on_neither_order_nor_number() {
        let orders = orders();
        for &one in &orders {
            assert_eq!(one.merge(one), one);
            assert_eq!(one.merge(Order::default()), one);
            for &other in &orders {
                let merged = one.merge(other);
                assert_eq!(merged, other.merge(one));
                assert_eq!(merged.merge(one), merged);
                for &third in &orders {
                    assert_eq!(merged.merge(third), one.merge(other.merge(third)));
                }
            }
        }
    }

    #[test]
    fn reissue_without_its_revocation_has_an_end_of_its_own() {
        let reissue = Order {
            generation: 7,
            reissued_at: 70,
            ends_at: 900,
            ..Order::default()
        };
        let known = Order::default().with_revoked(false, 1).with_end(500);
        for (other, end) in [
            (Order::default(), 900),
            (known, 900),
            (known.merge(reissue), 900),
        ] {
            let order = reissue.with_revocation_of(other);
            assert_eq!((order.generation, order.ends_at), (7, end));
        }
        // Without a newer generation nothing is added.
        assert_eq!(known.with_revocation_of(Order::default()), Order::default());
    }

    #[test]
    fn numbers_decide_and_times_do_not() {
        let far = u64::MAX;
        let none = Order::default();
        let revoked = none.with_revoked(true, far);
        let lifted = revoked.with_revoked(false, 1);
        let again = lifted.with_revoked(true, 0);
        for (one, other, is_revoked) in [
            (none, revoked, true),
            (revoked, lifted, false),
            (lifted, again, true),
            (revoked, again, true),
            // Two servers without a connection: the revocation counts.
            (lifted, revoked.with_revoked(true, 0), true),
            // A reissue takes no revocation back, and a revocation no reissue.
            (revoked, none.reissued(far).reissued(far), true),
        ] {
            assert_eq!(one.merge(other).is_revoked, is_revoked, "{one:?} {other:?}");
        }
        assert_eq!(revoked.merge(none.reissued(3)).generation, 1);
        assert_eq!(
            none.reissued(far)
                .reissued(3)
                .merge(none.reissued(far))
                .reissued_at,
            3
        );
    }

    #[test]
    fn token_is_void_after_any_order_that_its_server_did_not_know() {
        let none = Order::default();
        let known = none.with_revoked(true, 1).with_revoked(false, 2);
        assert!(none.is_before(known) && none.is_before(none.reissued(1)));
        assert!(!known.is_before(known) && !known.is_before(none));
        assert!(known.is_before(known.reissued(1)));
    }

    #[test]
    fn numbers_begin_with_the_day_and_never_go_back() {
        let day = |days: u64| days * DAY_SECONDS;
        let forgotten = Order::default()
            .with_revoked(true, day(20_000))
            .with_revoked(false, day(20_000))
            .reissued(day(20_000))
            .reissued(day(20_000));
        assert_eq!((forgotten.counter, forgotten.generation), (20_002, 20_002));
        let later = Order::default()
            .with_revoked(true, day(20_500))
            .reissued(day(20_500));
        assert_eq!(forgotten.merge(later), later);
        // A clock that is behind, or far ahead.
        assert_eq!(later.reissued(0).generation, 20_502);
        let ahead = Order::default().with_revoked(true, u64::MAX);
        assert!(ahead.is_plausible_after(Order::default()));
        assert!(ahead.counter < ahead.with_revoked(false, 0).counter);
    }

    #[test]
    fn order_is_over_at_its_end_if_it_has_one() {
        let ends = |ends_at| Order::default().with_end(ends_at);
        assert!(ends(5).is_over(5) && !ends(5).is_over(4));
        assert!(!ends(0).is_over(u64::MAX) && !ends(5).is_over(0));
        assert_eq!(ends(5).with_end(4), ends(5));
        assert_eq!(ends(5).merge(ends(7)), ends(7));
    }

    #[test]
    fn numbers_far_ahead_are_not_plausible() {
        let none = Order::default();
        let with = |counter, generation| Order {
            counter,
            generation,
            ..none
        };
        assert!(with(LEAD_MAX, LEAD_MAX).is_plausible_after(none));
        assert!(!with(LEAD_MAX + 1, 0).is_plausible_after(none));
        assert!(!with(0, u64::MAX).is_plausible_after(none));
        assert!(with(LEAD_MAX + 1, 0).is_plausible_after(with(1, 0)));
    }
}
