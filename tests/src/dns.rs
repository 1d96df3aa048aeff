//! DNS as tests need it: a client that sends what it is told, a resolver that does what it is told, and the rules that
//! every answer keeps, whatever was asked.

mod client;
mod load;
mod resolver;
mod rules;

pub use client::{DnsClient, addresses, query};
pub use hickory_proto::op::{Message, ResponseCode};
pub use hickory_proto::rr::RecordType;
pub use load::{Load, LoadReport, LoadedServer};
pub use resolver::{Behavior, FakeResolver};
pub use rules::{corpus, keeps_the_rules};
