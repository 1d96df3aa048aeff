//! The table of all cases.

use std::time::Duration;

use super::loss::{COMPARED, Spoil};
use super::path::Shift;
use super::stopped::Who;
use super::{Carrier, Case, Run, Running, Weight};
use super::{flapping, ladder, loss, partition, path, size, stopped};
use crate::link::Way;
use Carrier::{Auto, H2, Quic};
use Weight::{Idles, Waits, Works};

/// Every case; the rows stand in `docs` of the fault matrix by their ids.
pub static CASES: &[Case] = &[
    case("F05", Quic, "partition of 1 s", 8, |run| {
        Box::pin(partition::brief(run))
    }),
    case("F05", H2, "partition of 1 s", 8, |run| {
        Box::pin(partition::brief(run))
    }),
    case("F06", Quic, "partition of 30 s, stream open", 50, |run| {
        Box::pin(partition::long(run, true))
    }),
    case("F06", Quic, "partition of 30 s, idle", 36, |run| {
        Box::pin(partition::long(run, false))
    }),
    case("F06", H2, "partition of 30 s, stream open", 50, |run| {
        Box::pin(partition::long(run, true))
    }),
    case("F06", H2, "partition of 30 s, idle", 36, |run| {
        Box::pin(partition::long(run, false))
    }),
    case("F08", Quic, "one way lost, to the server", 65, |run| {
        Box::pin(partition::one_way(run, Way::ALL.up()))
    }),
    case("F08", Quic, "one way lost, to the agent", 65, |run| {
        Box::pin(partition::one_way(run, Way::ALL.down()))
    }),
    case("F08", H2, "one way lost, to the server", 65, |run| {
        Box::pin(partition::one_way(run, Way::ALL.up()))
    }),
    case("F08", H2, "one way lost, to the agent", 65, |run| {
        Box::pin(partition::one_way(run, Way::ALL.down()))
    }),
    case("F09", H2, "half-open TCP, stream open", 65, |run| {
        Box::pin(partition::half_open(run, true))
    }),
    case("F09", H2, "half-open TCP, idle", 65, |run| {
        Box::pin(partition::half_open(run, false))
    }),
    case("F10", Auto, "UDP vanishes from the start", 8, |run| {
        Box::pin(ladder::blocked_from_start(run, false))
    }),
    case("F10", Auto, "UDP refused from the start", 8, |run| {
        Box::pin(ladder::blocked_from_start(run, true))
    }),
    case("F11", Auto, "UDP vanishes later, stream open", 75, |run| {
        Box::pin(ladder::blocked_later(run, true))
    }),
    case("F11", Auto, "UDP vanishes later, idle", 85, |run| {
        Box::pin(ladder::blocked_later(run, false))
    }),
    case(
        "F12",
        Auto,
        "all lost, UDP alone back; from QUIC",
        40,
        |run| Box::pin(ladder::only_udp_heals(run, false)),
    ),
    case(
        "F12",
        Auto,
        "all lost, UDP alone back; from h2",
        45,
        |run| Box::pin(ladder::only_udp_heals(run, true)),
    ),
    works(
        "F13",
        Quic,
        "payloads above 1300 lost from the start",
        35,
        |run| Box::pin(size::capped(run, 1300, true)),
    ),
    works(
        "F13",
        Quic,
        "payloads above 1300 lost, suddenly",
        30,
        |run| Box::pin(size::capped(run, 1300, false)),
    ),
    works(
        "F13",
        Quic,
        "payloads above 1200 lost from the start",
        35,
        |run| Box::pin(size::capped(run, 1200, true)),
    ),
    works(
        "F13",
        Quic,
        "payloads above 1200 lost, suddenly",
        30,
        |run| Box::pin(size::capped(run, 1200, false)),
    ),
    works("F14", Quic, "1 % lost", 8, |run| {
        Box::pin(loss::spoilt(run, Spoil::Lose(0.01)))
    }),
    works("F14", Quic, "5 % lost", 15, |run| {
        Box::pin(loss::spoilt(run, Spoil::Lose(COMPARED)))
    }),
    works("F14", Quic, "20 % lost", 15, |run| {
        Box::pin(loss::spoilt(run, Spoil::Lose(0.2)))
    }),
    works("F14", Quic, "25 % out of order", 8, |run| {
        Box::pin(loss::spoilt(run, Spoil::Reorder))
    }),
    works("F14", Quic, "10 % twice", 8, |run| {
        Box::pin(loss::spoilt(run, Spoil::Duplicate))
    }),
    works("F14", Quic, "1 % corrupt", 8, |run| {
        Box::pin(loss::spoilt(run, Spoil::Corrupt))
    }),
    works("F14", H2, "1 % lost", 8, |run| {
        Box::pin(loss::spoilt(run, Spoil::Lose(0.01)))
    }),
    works("F14", H2, "5 % lost", 10, |run| {
        Box::pin(loss::spoilt(run, Spoil::Lose(COMPARED)))
    }),
    works("F14", H2, "20 % lost", 10, |run| {
        Box::pin(loss::spoilt(run, Spoil::Lose(0.2)))
    }),
    case("F15", Quic, "NAT takes another port", 15, |run| {
        Box::pin(path::shifted(run, Shift::Port))
    }),
    case("F15", H2, "TCP connection reset", 5, |run| {
        Box::pin(path::shifted(run, Shift::Port))
    }),
    case("F16", Quic, "agent takes another address", 15, |run| {
        Box::pin(path::shifted(run, Shift::Address))
    }),
    case("F16", H2, "agent takes another address", 5, |run| {
        Box::pin(path::shifted(run, Shift::Address))
    }),
    idles("F32", Quic, "3 s up, 3 s down, for 10 min", 605, |run| {
        Box::pin(flapping::flapping(run))
    }),
    idles("F32", H2, "3 s up, 3 s down, for 10 min", 605, |run| {
        Box::pin(flapping::flapping(run))
    }),
    idles("F32", Auto, "3 s up, 3 s down, for 10 min", 605, |run| {
        Box::pin(flapping::flapping(run))
    }),
    case("F35", Quic, "agent stopped for 20 s", 35, |run| {
        Box::pin(stopped::stopped(run, Who::Agent))
    }),
    case("F35", Quic, "server stopped for 20 s", 35, |run| {
        Box::pin(stopped::stopped(run, Who::Server))
    }),
    case("F35", H2, "agent stopped for 20 s", 35, |run| {
        Box::pin(stopped::stopped(run, Who::Agent))
    }),
    case("F35", H2, "server stopped for 20 s", 35, |run| {
        Box::pin(stopped::stopped(run, Who::Server))
    }),
];

const fn case(
    id: &'static str,
    carrier: Carrier,
    what: &'static str,
    about_seconds: u64,
    run: fn(Run) -> Running,
) -> Case {
    Case {
        id,
        carrier,
        what,
        weight: Waits,
        about: Duration::from_secs(about_seconds),
        run,
    }
}

const fn works(
    id: &'static str,
    carrier: Carrier,
    what: &'static str,
    about_seconds: u64,
    run: fn(Run) -> Running,
) -> Case {
    Case {
        weight: Works,
        ..case(id, carrier, what, about_seconds, run)
    }
}

const fn idles(
    id: &'static str,
    carrier: Carrier,
    what: &'static str,
    about_seconds: u64,
    run: fn(Run) -> Running,
) -> Case {
    Case {
        weight: Idles,
        ..case(id, carrier, what, about_seconds, run)
    }
}
