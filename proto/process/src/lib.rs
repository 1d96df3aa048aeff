//! What both binaries need and that is not about the tunnel: shutdown, the meta port, logs, files,
//! Unix sockets, settings, command lines, timers, questions in the terminal. The crate knows neither
//! the wire nor TLS.

#![warn(missing_docs)]

pub mod accept;
pub mod backoff;
pub mod command_line;
pub mod config_file;
pub mod config_report;
pub mod conn_limiter;
pub mod diag;
pub mod disk;
pub mod errors;
pub mod file_watch;
pub mod files;
pub mod followed;
pub mod host;
pub mod keyed_permits;
pub mod limits;
pub mod making;
pub mod meta;
pub mod metrics;
pub mod name_list;
pub mod notify;
pub mod output;
pub mod panics;
pub mod query;
pub mod runtime;
pub mod schema;
#[cfg(any(test, feature = "test-util"))]
pub mod scratch;
pub mod secrets;
pub mod serve_bounded;
pub mod settings;
pub mod shutdown;
pub mod telemetry;
pub mod terminal;
pub mod timers;
pub mod unix_socket;
pub mod wakeups;
pub mod yaml;

pub use tunnel_networks as networks;
pub use tunnel_networks::named;

/// Implements `Debug` for a type with these fields alone. The others have no `Debug`, are long, or are
/// secrets.
#[macro_export]
macro_rules! partial_debug {
    ($type:ident $(<$param:ident>)? $({ $($field:ident),+ })?) => {
        impl $(<$param>)? std::fmt::Debug for $type $(<$param>)? {
            fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter
                    .debug_struct(stringify!($type))
                    $($(.field(stringify!($field), &self.$field))+)?
                    .finish_non_exhaustive()
            }
        }
    };
}
