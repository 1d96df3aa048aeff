//! Pure decision on a query: from the bytes of a message to an answer from the records, to silence,
//! or to a query that is forwarded.
//!
//! This module rejects hostile messages. A valid query has one question of class IN and no records
//! in the preceding sections.

use std::net::{IpAddr, SocketAddr};

use hickory_proto::op::{Edns, Header, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::SOA;
use hickory_proto::rr::{DNSClass, Name, RData, Record, RecordType};
use hickory_proto::serialize::binary::{BinDecodable, BinDecoder};

use super::names::{NameResolution, Names};
use super::{Addresses, RecordSet};

tunnel_process::label_values! {
    pub enum Transport {
        /// UDP. An answer that does not fit is truncated and marked (TC), and the client retries
        /// over TCP.
        Udp = "udp",
        /// TCP. Each message is preceded by its length.
        Tcp = "tcp",
    }
}

tunnel_process::label_values! {
    pub enum QueryOutcome {
        /// The server answered with the address of a node.
        Node = "node",
        /// The name is local but has no record of the requested type.
        NoData = "no_data",
        NoName = "no_name",
        /// The name may be that of a node, and the nodes are not known yet: SERVFAIL.
        Unknown = "unknown",
        /// Another resolver answered the query.
        Forwarded = "forwarded",
        /// No other resolver answered in time: SERVFAIL.
        UpstreamFailed = "upstream_failed",
        /// The limit of forwarded queries is reached: SERVFAIL.
        Busy = "busy",
        /// This server does not support the query, or no resolver is configured for the name.
        Refused = "refused",
        /// The message is not a valid query.
        Malformed = "malformed",
        /// The client exceeded its rate limit. The server does not answer.
        Limited = "limited",
        /// The query is a probe of this server that a resolver sent back.
        Loop = "loop",
    }
}

/// Inputs for answering a query.
#[derive(Debug, Clone, Copy)]
pub struct AnswerContext<'a> {
    /// The records, or `None` while it is unknown which nodes there are.
    pub records: Option<&'a RecordSet>,
    pub names: &'a Names,
}

/// The way in which the server handles a query.
#[derive(Debug)]
pub enum Decision<'a> {
    /// The server sends no answer.
    Ignore(QueryOutcome),
    /// The server sends this answer.
    Reply(Vec<u8>, QueryOutcome),
    Forward(Box<ClientQuery>, &'a [SocketAddr]),
}

/// A parsed query with everything that its answer needs.
#[derive(Debug, Clone)]
pub struct ClientQuery {
    /// Name, type and class. The name has the case that the client used.
    pub query: Query,
    id: u16,
    recursion_desired: bool,
    /// The client validates signatures itself (RFC 4035, section 3.2.2).
    checking_disabled: bool,
    /// EDNS of the client (RFC 6891): the largest datagram, and whether the client wants
    /// signatures.
    edns: Option<(u16, bool)>,
    transport: Transport,
    recursion_available: bool,
    /// Whether the name may be that of a node that is not known yet. Another resolver does not know
    /// the node either.
    may_be_node: bool,
}

pub fn decide<'a>(
    message: &[u8],
    transport: Transport,
    context: &AnswerContext<'a>,
) -> Decision<'a> {
    let recursion_available = context.names.is_forwarding();
    let client_query = match read(message, transport, recursion_available) {
        Ok(client_query) => client_query,
        Err(decision) => return decision,
    };
    if client_query.query.query_class != DNSClass::IN {
        return client_query.refuse(ResponseCode::Refused, QueryOutcome::Refused);
    }
    let kind = client_query.query.query_type;
    if matches!(kind, RecordType::AXFR | RecordType::IXFR) {
        return client_query.refuse(ResponseCode::Refused, QueryOutcome::Refused);
    }
    let name = plain_text(&client_query.query.name);
    match context.names.resolve(&name, context.records) {
        NameResolution::Local {
            addresses,
            authority,
        } => client_query.answer_local(addresses, authority),
        NameResolution::Absent { authority } => {
            client_query.negative(ResponseCode::NXDomain, authority)
        }
        // Only amplification attacks ask for all records of a name at once (RFC 8482).
        NameResolution::Upstream(resolvers) if resolvers.is_empty() || kind == RecordType::ANY => {
            client_query.refuse(ResponseCode::Refused, QueryOutcome::Refused)
        }
        NameResolution::Unknown => {
            client_query.refuse(ResponseCode::ServFail, QueryOutcome::Unknown)
        }
        NameResolution::Upstream(resolvers) => {
            let forwarded = ClientQuery {
                may_be_node: context.records.is_none() && context.names.may_be_node(&name),
                ..client_query
            };
            Decision::Forward(Box::new(forwarded), resolvers)
        }
    }
}

/// Parses the only question of a message, or returns the decision for any other message.
fn read<'a>(
    message: &[u8],
    transport: Transport,
    recursion_available: bool,
) -> Result<ClientQuery, Decision<'a>> {
    let Ok(header) = Header::read(&mut BinDecoder::new(message)) else {
        return Err(Decision::Ignore(QueryOutcome::Malformed));
    };
    // Answering a response could create an endless loop.
    if header.metadata.message_type == MessageType::Response {
        return Err(Decision::Ignore(QueryOutcome::Malformed));
    }
    let refuse = |code, outcome| {
        let mut reply = Message::error_msg(header.metadata.id, header.metadata.op_code, code);
        reply.metadata.recursion_desired = header.metadata.recursion_desired;
        Err(reply.to_vec().map_or(Decision::Ignore(outcome), |bytes| {
            Decision::Reply(bytes, outcome)
        }))
    };
    if header.metadata.op_code != OpCode::Query {
        return refuse(ResponseCode::NotImp, QueryOutcome::Refused);
    }
    // The counts are checked before anything whose length depends on them.
    let counts = &header.counts;
    let is_plain = counts.queries == 1
        && counts.answers == 0
        && counts.authorities == 0
        && counts.additionals <= ADDITIONALS_MAX
        && message.len() <= QUERY_MAX;
    if !is_plain {
        return refuse(ResponseCode::FormErr, QueryOutcome::Malformed);
    }
    let Ok(mut message) = Message::from_vec(message) else {
        return refuse(ResponseCode::FormErr, QueryOutcome::Malformed);
    };
    let Some(query) = message.queries.pop() else {
        return refuse(ResponseCode::FormErr, QueryOutcome::Malformed);
    };
    let client_query = ClientQuery {
        query,
        id: message.metadata.id,
        recursion_desired: message.metadata.recursion_desired,
        checking_disabled: message.metadata.checking_disabled,
        edns: message
            .edns
            .as_ref()
            .map(|edns| (edns.max_payload(), edns.flags().dnssec_ok)),
        transport,
        recursion_available,
        may_be_node: false,
    };
    if message.edns.is_some_and(|edns| edns.version() > 0) {
        return Err(client_query.refuse(ResponseCode::BADVERS, QueryOutcome::Refused));
    }
    Ok(client_query)
}

impl ClientQuery {
    /// Returns the query to forward: the flags of the client, with an id and a datagram size of
    /// this server.
    pub fn forwarded(&self) -> Message {
        let mut message = Message::query();
        message.metadata.recursion_desired = true;
        message.metadata.checking_disabled = self.checking_disabled;
        message.add_query(self.query.clone());
        let mut edns = Edns::new();
        edns.set_max_payload(DATAGRAM_MAX);
        edns.set_dnssec_ok(
            self.edns
                .is_some_and(|(_, wants_signatures)| wants_signatures),
        );
        message.set_edns(edns);
        message
    }

    /// Returns the answer of another resolver in the form that the client receives. The absence of a
    /// name that may be that of a node is a failure, because clients store the absence.
    pub fn relayed(&self, answer: Message) -> Vec<u8> {
        if self.may_be_node && answer.metadata.response_code == ResponseCode::NXDomain {
            return self.failed(ResponseCode::ServFail);
        }
        let mut reply = self.reply(answer.metadata.response_code);
        reply.metadata.authentic_data = answer.metadata.authentic_data;
        reply.metadata.truncation = answer.metadata.truncation;
        reply.answers = answer.answers;
        reply.authorities = answer.authorities;
        reply.additionals = answer.additionals;
        self.encode(reply)
    }

    /// Returns an answer without records.
    pub fn failed(&self, code: ResponseCode) -> Vec<u8> {
        let reply = self.reply(code);
        self.encode(reply)
    }

    pub fn transport(&self) -> Transport {
        self.transport
    }

    fn refuse<'a>(&self, code: ResponseCode, outcome: QueryOutcome) -> Decision<'a> {
        Decision::Reply(self.failed(code), outcome)
    }

    /// Returns the address of the requested family. A name that has only an address of the other
    /// family still exists: the answer is NOERROR without records, because clients ask for both
    /// families.
    fn answer_local<'a>(&self, addresses: Addresses, authority: &str) -> Decision<'a> {
        let kind = self.query.query_type;
        let fitting = addresses.iter().filter_map(|address| match address {
            IpAddr::V4(address) if kind == RecordType::A => Some(RData::A(address.into())),
            IpAddr::V6(address) if kind == RecordType::AAAA => Some(RData::AAAA(address.into())),
            IpAddr::V4(_) | IpAddr::V6(_) => None,
        });
        let owner = &self.query.name;
        let records: Vec<_> = fitting
            .map(|data| Record::from_rdata(owner.clone(), TTL_SECONDS, data))
            .collect();
        if records.is_empty() {
            return self.negative(ResponseCode::NoError, authority);
        }
        let mut reply = self.reply(ResponseCode::NoError);
        reply.metadata.authoritative = true;
        reply.add_answers(records);
        Decision::Reply(self.encode(reply), QueryOutcome::Node)
    }

    /// Returns an answer for a name that does not exist or has no record of the requested type. The
    /// SOA record sets how long caches store this answer (RFC 2308, section 3).
    fn negative<'a>(&self, code: ResponseCode, authority: &str) -> Decision<'a> {
        let mut reply = self.reply(code);
        reply.metadata.authoritative = true;
        let owner = Name::from_ascii(format!("{authority}.")).unwrap_or_else(|_| Name::root());
        let soa = SOA::new(
            owner.clone(),
            Name::root(),
            1,
            SOA_INTERVAL,
            SOA_INTERVAL,
            SOA_INTERVAL,
            NEGATIVE_TTL_SECONDS,
        );
        reply.add_authority(Record::from_rdata(
            owner,
            NEGATIVE_TTL_SECONDS,
            RData::SOA(soa),
        ));
        let outcome = if code == ResponseCode::NoError {
            QueryOutcome::NoData
        } else {
            QueryOutcome::NoName
        };
        Decision::Reply(self.encode(reply), outcome)
    }

    fn reply(&self, code: ResponseCode) -> Message {
        let mut reply = Message::error_msg(self.id, OpCode::Query, code);
        reply.metadata.recursion_desired = self.recursion_desired;
        reply.metadata.recursion_available = self.recursion_available;
        reply.metadata.checking_disabled = self.checking_disabled;
        reply.add_query(self.query.clone());
        if self.edns.is_some() {
            let mut edns = Edns::new();
            edns.set_max_payload(DATAGRAM_MAX);
            reply.set_edns(edns);
        }
        reply
    }

    /// Encodes the reply. A reply that does not fit is truncated to the question.
    fn encode(&self, reply: Message) -> Vec<u8> {
        let limit = match (self.transport, self.edns) {
            (Transport::Tcp, _) => usize::from(u16::MAX),
            (Transport::Udp, None) => PLAIN_DATAGRAM_MAX,
            (Transport::Udp, Some((size, _))) => {
                usize::from(size.min(DATAGRAM_MAX)).max(PLAIN_DATAGRAM_MAX)
            }
        };
        match reply.to_vec() {
            Ok(bytes) if bytes.len() <= limit => return bytes,
            Ok(_too_long) if self.transport == Transport::Udp => {}
            // The answer of another resolver cannot be encoded again.
            Ok(_) | Err(_) => {
                let failed = self.reply(ResponseCode::ServFail);
                return failed.to_vec().unwrap_or_default();
            }
        }
        reply.truncate().to_vec().unwrap_or_default()
    }
}

/// Returns the name in lower case, with dots between labels and without a trailing dot. A byte that
/// is not valid in a node name becomes `?`, which preserves the number of labels.
fn plain_text(name: &Name) -> String {
    let mut text = String::with_capacity(name.len());
    for (number, label) in name.iter().enumerate() {
        if number > 0 {
            text.push('.');
        }
        text.extend(label.iter().map(|byte| match byte {
            b'.' => '?',
            byte if byte.is_ascii_graphic() => char::from(byte.to_ascii_lowercase()),
            _ => '?',
        }));
    }
    text
}

/// Time that clients may cache an answer.
const TTL_SECONDS: u32 = 5;
/// Time that clients may cache "no such name". A short time makes a new node visible at once.
const NEGATIVE_TTL_SECONDS: u32 = 1;
/// Zone transfers are not supported, so these SOA values only have to be plausible.
const SOA_INTERVAL: i32 = 3600;
/// Largest datagram that never needs fragmentation (DNS flag day 2020; RFC 9715).
const DATAGRAM_MAX: u16 = 1232;
/// Largest datagram for clients without EDNS (RFC 1035, section 4.2.1).
const PLAIN_DATAGRAM_MAX: usize = 512;
/// Largest accepted query. One name of 255 bytes and some EDNS options fit many times.
const QUERY_MAX: usize = 4096;
/// Room for OPT, TSIG and a few more records.
const ADDITIONALS_MAX: u16 = 4;

#[cfg(test)]
mod tests;
