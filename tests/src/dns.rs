//! DNS for tests: a client that sends arbitrary queries, a scripted resolver, and the rules for
//! every answer.

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
