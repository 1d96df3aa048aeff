//! Rules for the answer to any bytes, and a corpus of initial bytes. Used by the fuzz target and by
//! its equivalent test on a stable compiler.

use std::net::SocketAddr;
use std::sync::LazyLock;

use anyhow::{Result, ensure};
use hickory_proto::op::{Edns, Message, MessageType, OpCode};
use hickory_proto::rr::{DNSClass, RecordType};
use tunnel_dns::{
    Addresses, AnswerContext, ClusterDomain, Decision, Names, RecordSet, Transport, decide,
};

use super::query;

/// Runs the server's pure decision on `message` and checks the rules of the answer.
///
/// # Errors
/// Returns an error if the answer breaks a rule.
pub fn keeps_the_rules(message: &[u8]) -> Result<()> {
    let (records, names) = &*DNS_STATE;
    for transport in [Transport::Udp, Transport::Tcp] {
        let context = AnswerContext {
            records: Some(records),
            names,
        };
        match decide(message, transport, &context) {
            Decision::Ignore(_) => {}
            Decision::Reply(reply, _) => answer_is_sound(message, &reply, transport)?,
            Decision::Forward(client_query, resolvers) => {
                ensure!(!resolvers.is_empty(), "forwarded to no resolver");
                let labels = client_query.query.name.iter().count();
                ensure!(
                    labels != 1,
                    "a single label leaves: {}",
                    client_query.query.name
                );
                let forwarded = client_query.forwarded();
                let read = Message::from_vec(&forwarded.to_vec()?)?;
                ensure!(
                    read.queries == [client_query.query.clone()],
                    "another question is forwarded"
                );
                // The other resolver may also be hostile.
                if let Ok(answer) = Message::from_vec(message) {
                    answer_is_sound(message, &client_query.relayed(answer), transport)?;
                }
            }
        }
    }
    Ok(())
}

fn answer_is_sound(query: &[u8], reply: &[u8], transport: Transport) -> Result<()> {
    let read = Message::from_vec(reply)?;
    ensure!(
        read.metadata.message_type == MessageType::Response,
        "no response"
    );
    ensure!(query.get(..2) == reply.get(..2), "another id");
    ensure!(read.queries.len() <= 1, "more than one question");
    let limit = match transport {
        Transport::Udp => 1232,
        Transport::Tcp => usize::from(u16::MAX),
    };
    ensure!(reply.len() <= limit, "{} bytes", reply.len());
    Ok(())
}

/// Returns queries of every kind that is handled separately, and damaged ones.
pub fn corpus() -> Result<Vec<Vec<u8>>> {
    let mut corpus = Vec::new();
    for name in [
        "worker-1",
        "WORKER-1",
        "worker-9",
        "worker-1.nodes.tunnel.internal",
        "worker-1.svc.cluster.local",
        "worker-1.kube-system.svc.cluster.local",
        "example.com",
        "1.0.0.10.in-addr.arpa",
        "localhost",
        ".",
    ] {
        for kind in [
            RecordType::A,
            RecordType::AAAA,
            RecordType::PTR,
            RecordType::ANY,
            RecordType::AXFR,
            RecordType::HINFO,
        ] {
            let plain = query(name, kind)?;
            corpus.push(plain.to_vec()?);
            let mut extended = plain.clone();
            let mut edns = Edns::new();
            edns.set_max_payload(4096).set_dnssec_ok(true);
            extended.set_edns(edns);
            corpus.push(extended.to_vec()?);
            let mut chaos = plain.clone();
            chaos
                .queries
                .iter_mut()
                .for_each(|query| query.query_class = DNSClass::CH);
            corpus.push(chaos.to_vec()?);
            let mut update = plain;
            update.metadata.op_code = OpCode::Update;
            corpus.push(update.to_vec()?);
        }
    }
    let header = |counts: [u8; 8]| [&[7, 7, 1, 0][..], &counts].concat();
    let one = [0, 1, 0, 0, 0, 0, 0, 0];
    corpus.extend([
        Vec::new(),
        header(one),
        header([0xff; 8]),
        header([0, 0, 0, 0, 0, 0, 0, 0]),
        // Names with pointers to themselves, to each other, and beyond the end.
        [&header(one)[..], &[0xc0, 12, 0, 1, 0, 1]].concat(),
        [&header(one)[..], &[0xc0, 14, 0xc0, 12, 0, 1, 0, 1]].concat(),
        [&header(one)[..], &[0xc3, 0xff, 0, 1, 0, 1]].concat(),
        [&header(one)[..], &[63; 300]].concat(),
    ]);
    Ok(corpus)
}

static DNS_STATE: LazyLock<(RecordSet, Names)> = LazyLock::new(|| {
    let tunnel = Addresses::first_of([[10, 106, 217, 16].into()]);
    let nodes = ["worker-1", "ip-10-0-0-1.ec2.internal", "localhost"];
    let records = nodes
        .iter()
        .filter_map(|name| Some((name.parse().ok()?, tunnel)));
    let cluster = "cluster.local".parse().ok().map(|domain| ClusterDomain {
        domain,
        resolvers: Vec::new(),
    });
    let names = Names {
        zone: "nodes.tunnel.internal".parse().ok(),
        clusters: cluster.into_iter().collect(),
        default_resolvers: vec![SocketAddr::from(([192, 0, 2, 53], 53))],
    };
    (RecordSet::of(records), names)
});
