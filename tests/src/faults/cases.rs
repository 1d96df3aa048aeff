//! The table of all cases.

use std::time::Duration;

use super::loss::{COMPARED, Spoil};
use super::path::Shift;
use super::size::{Since, Towards};
use super::stopped::Who;
use super::{Case, Cost, TransportMode};
use super::{flapping, loss, path, size, stopped};

/// Declares one case per line: row, transport, required machine resources, seconds with full
/// timers, description, and function.
macro_rules! cases {
    ($($id:ident $transport_mode:ident $cost:ident $seconds:literal
       $what:literal => $module:ident::$function:ident($($argument:expr),*);)+) => {
        &[$(Case {
            id: stringify!($id),
            transport_mode: TransportMode::$transport_mode,
            cost: Cost::$cost,
            about: Duration::from_secs($seconds),
            what: $what,
            run: |run| Box::pin($module::$function(run, $($argument),*)),
        },)+]
    };
}

/// Every case, in the order of the matrix.
pub static CASES: &[Case] = cases! {
    F13 Quic Throughput  32 "above 1300 lost from the start, to the edge" => size::capped(1300, Since::Start, Towards::Edge);
    F13 Quic Throughput  32 "above 1300 lost from the start, to the cloud" => size::capped(1300, Since::Start, Towards::Cloud);
    F13 Quic Throughput  22 "above 1300 lost, suddenly, to the edge" => size::capped(1300, Since::Middle, Towards::Edge);
    F13 Quic Throughput  22 "above 1300 lost, suddenly, to the cloud" => size::capped(1300, Since::Middle, Towards::Cloud);
    F13 Quic SlowThroughput  40 "above 1300 lost, suddenly, both ways" => size::capped(1300, Since::Middle, Towards::Both);
    F13 Quic Throughput  32 "above 1200 lost from the start, to the edge" => size::capped(1200, Since::Start, Towards::Edge);
    F13 Quic Throughput  32 "above 1200 lost from the start, to the cloud" => size::capped(1200, Since::Start, Towards::Cloud);
    F13 Quic Throughput  22 "above 1200 lost, suddenly, to the edge" => size::capped(1200, Since::Middle, Towards::Edge);
    F13 Quic Throughput  22 "above 1200 lost, suddenly, to the cloud" => size::capped(1200, Since::Middle, Towards::Cloud);
    F13 Quic SlowThroughput  40 "above 1200 lost, suddenly, both ways" => size::capped(1200, Since::Middle, Towards::Both);

    F14 Quic Throughput   7 "1 % lost" => loss::spoilt(Spoil::Lose(0.01));
    F14 Quic Throughput  14 "5 % lost" => loss::spoilt(Spoil::Lose(COMPARED));
    F14 Quic Throughput   8 "20 % lost" => loss::spoilt(Spoil::Lose(0.2));
    F14 Quic Throughput   8 "20 % lost, suddenly" => loss::spoilt(Spoil::LoseSuddenly(0.2));
    F14 Quic Throughput  12 "25 % out of order" => loss::spoilt(Spoil::Reorder);
    F14 Quic Throughput   7 "10 % twice" => loss::spoilt(Spoil::Duplicate);
    F14 Quic Throughput   7 "1 % corrupt" => loss::spoilt(Spoil::Corrupt);
    F14 H2   Throughput  12 "1 % lost" => loss::spoilt(Spoil::Lose(0.01));
    F14 H2   Throughput  14 "5 % lost" => loss::spoilt(Spoil::Lose(COMPARED));
    F14 H2   Throughput  14 "20 % lost" => loss::spoilt(Spoil::Lose(0.2));

    F15 Quic Timed   8 "NAT takes another port" => path::shifted(Shift::Port);
    F15 H2   Timed   2 "TCP connection reset" => path::shifted(Shift::Port);

    F16 Quic Timed   8 "agent takes another address" => path::shifted(Shift::Address);
    F16 H2   Timed   2 "agent takes another address" => path::shifted(Shift::Address);

    F32 Quic Idle 605 "3 s up, 3 s down, for 10 min" => flapping::flapping();
    F32 H2   Idle 605 "3 s up, 3 s down, for 10 min" => flapping::flapping();
    F32 Auto Idle 605 "3 s up, 3 s down, for 10 min" => flapping::flapping();

    F35 Quic Timed  45 "agent stopped for 20 s" => stopped::stopped(Who::Agent);
    F35 Quic Timed  45 "server stopped for 20 s" => stopped::stopped(Who::Server);
    F35 H2   Timed  30 "agent stopped for 20 s" => stopped::stopped(Who::Agent);
    F35 H2   Timed  30 "server stopped for 20 s" => stopped::stopped(Who::Server);
};
