//! End-to-end scenarios, one module per topic.

/// Declares tests that run one scenario with different arguments.
macro_rules! tests_of {
    ($($(#[$attribute:meta])* fn $test:ident() = $scenario:ident($($argument:expr),*);)+) => {
        $($(#[$attribute])*
        #[tokio::test(flavor = "multi_thread")]
        async fn $test() -> Result<()> {
            $scenario($($argument),*).await
        })+
    };
}

mod abuse;
mod addresses;
mod answers;
mod audit;
mod binaries;
mod cloud;
mod cluster;
mod connect;
mod credentials;
mod cuts;
mod dns;
mod doctor_agent;
mod drain;
mod faults;
mod fuzz;
mod house;
mod http;
mod limits;
mod namespaces;
mod policy;
mod prometheus;
mod reload;
mod request;
mod security;
mod servers;
mod ship;
mod status_page;
mod transports;

use tunnel_tests::scripted;
