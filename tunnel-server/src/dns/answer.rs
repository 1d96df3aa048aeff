//! Pure: the bytes of a query → an answer from the records, silence, or what is to be asked elsewhere.
//!
//! Hostile messages end here: one question of class IN, in a message without records before it, is all that is taken.

use std::net::{IpAddr, SocketAddr};

use hickory_proto::op::{Edns, Header, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::SOA;
use hickory_proto::rr::{DNSClass, Name, RData, Record, RecordType};
use hickory_proto::serialize::binary::{BinDecodable, BinDecoder};

use super::metrics::QueryOutcome;
use super::names::{NameResolution, Names};
use super::{Addresses, RecordSet};

/// What a query came over, and what its answer goes back over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Transport {
    /// Datagrams; an answer that does not fit is cut and marked (TC), and the client comes back over TCP.
    Udp,
    /// A stream of messages with their length before them.
    Tcp,
}

/// What answers are made from.
#[derive(Debug, Clone, Copy)]
pub struct AnswerContext<'a> {
    /// The records of this moment.
    pub records: &'a RecordSet,
    /// Which names are ours.
    pub names: &'a Names,
}

/// What becomes of a query.
#[derive(Debug)]
pub enum Decision<'a> {
    /// Nothing is answered.
    Ignore(QueryOutcome),
    /// This is the answer.
    Reply(Vec<u8>, QueryOutcome),
    /// One of the resolvers knows.
    Forward(Box<ClientQuery>, &'a [SocketAddr]),
}

/// One question, with all that its answer needs.
#[derive(Debug, Clone)]
pub struct ClientQuery {
    /// Name, type and class, the name as the client wrote it.
    pub query: Query,
    id: u16,
    recursion_desired: bool,
    /// The client checks signatures itself (RFC 4035, section 3.2.2).
    checking_disabled: bool,
    /// What the client says of itself in EDNS (RFC 6891): the largest datagram, and whether it wants signatures.
    edns: Option<(u16, bool)>,
    transport: Transport,
    recursion_available: bool,
}

/// Decides on one message.
#[must_use]
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
        // All records of a name at once are asked for by nobody but amplifiers (RFC 8482).
        NameResolution::Upstream(resolvers) if resolvers.is_empty() || kind == RecordType::ANY => {
            client_query.refuse(ResponseCode::Refused, QueryOutcome::Refused)
        }
        NameResolution::Upstream(resolvers) => Decision::Forward(Box::new(client_query), resolvers),
    }
}

/// The one question of a message, or what is answered to anything else.
fn read<'a>(
    message: &[u8],
    transport: Transport,
    recursion_available: bool,
) -> Result<ClientQuery, Decision<'a>> {
    let Ok(header) = Header::read(&mut BinDecoder::new(message)) else {
        return Err(Decision::Ignore(QueryOutcome::Malformed));
    };
    // An answer to an answer could go round for ever.
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
    // The counts come before everything that is as long as they say.
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
    };
    if message.edns.is_some_and(|edns| edns.version() > 0) {
        return Err(client_query.refuse(ResponseCode::BADVERS, QueryOutcome::Refused));
    }
    Ok(client_query)
}

impl ClientQuery {
    /// The question as it is asked elsewhere: the client's flags, our own id and size.
    #[must_use]
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

    /// What another resolver answered, as the client gets it.
    #[must_use]
    pub fn relayed(&self, answer: Message) -> Vec<u8> {
        let mut reply = self.reply(answer.metadata.response_code);
        reply.metadata.authentic_data = answer.metadata.authentic_data;
        reply.metadata.truncation = answer.metadata.truncation;
        reply.answers = answer.answers;
        reply.authorities = answer.authorities;
        reply.additionals = answer.additionals;
        self.encode(reply)
    }

    /// An answer without records.
    #[must_use]
    pub fn failed(&self, code: ResponseCode) -> Vec<u8> {
        let reply = self.reply(code);
        self.encode(reply)
    }

    /// What it came over.
    #[must_use]
    pub fn transport(&self) -> Transport {
        self.transport
    }

    fn refuse<'a>(&self, code: ResponseCode, outcome: QueryOutcome) -> Decision<'a> {
        Decision::Reply(self.failed(code), outcome)
    }

    /// The address of the family that was asked for. A name that has only the other one exists all the same: NOERROR
    /// without an answer, since clients ask for both.
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

    /// No such name, or nothing of that type, with the SOA record that tells caches for how long (RFC 2308, section 3).
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

    /// The bytes, cut to the question where they do not fit.
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
            // What another resolver said cannot be said again.
            Ok(_) | Err(_) => {
                let failed = self.reply(ResponseCode::ServFail);
                return failed.to_vec().unwrap_or_default();
            }
        }
        reply.truncate().to_vec().unwrap_or_default()
    }
}

/// The name in lower case with dots between its labels and none behind. Bytes that no name of ours has become `?`, which
/// keeps the number of labels.
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

/// What clients may keep an answer for.
const TTL_SECONDS: u32 = 5;
/// What clients may keep "no such name" for: a node that joins is found at once.
const NEGATIVE_TTL_SECONDS: u32 = 1;
/// Nobody transfers our zones; the numbers only have to be plausible.
const SOA_INTERVAL: i32 = 3600;
/// Largest datagram that never needs fragments (DNS flag day 2020; RFC 9715).
const DATAGRAM_MAX: u16 = 1232;
/// Largest datagram for clients without EDNS (RFC 1035, section 4.2.1).
const PLAIN_DATAGRAM_MAX: usize = 512;
/// Largest query that is read: one name of 255 bytes and some EDNS options fit many times.
const QUERY_MAX: usize = 4096;
/// OPT, TSIG and some to spare.
const ADDITIONALS_MAX: u16 = 4;

#[cfg(test)]
mod tests;
