//! End-to-end scenarios, one module per topic.

mod abuse;
mod answers;
mod binaries;
mod cluster;
mod connect;
mod credentials;
mod cuts;
mod dns;
mod drain;
mod faults;
mod fuzz;
mod house;
mod http;
mod identity;
mod limits;
mod namespaces;
mod prometheus;
mod request;
mod scripted;
mod security;
mod ship;
mod transports;
