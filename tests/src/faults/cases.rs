//! The table of all cases.

use std::time::Duration;

use super::stopped::Who;
use super::{Case, Cost, TransportMode};
use super::{flapping, stopped};

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
    F32 Quic Idle 605 "3 s up, 3 s down, for 10 min" => flapping::flapping();
    F32 H2   Idle 605 "3 s up, 3 s down, for 10 min" => flapping::flapping();
    F32 Auto Idle 605 "3 s up, 3 s down, for 10 min" => flapping::flapping();

    F35 Quic Timed  45 "agent stopped for 20 s" => stopped::stopped(Who::Agent);
    F35 Quic Timed  45 "server stopped for 20 s" => stopped::stopped(Who::Server);
    F35 H2   Timed  30 "agent stopped for 20 s" => stopped::stopped(Who::Agent);
    F35 H2   Timed  30 "server stopped for 20 s" => stopped::stopped(Who::Server);
};
