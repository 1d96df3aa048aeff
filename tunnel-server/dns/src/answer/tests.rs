use hickory_proto::rr::rdata::A;

use super::*;
use crate::ClusterDomain;

fn names(forwarding: bool) -> Names {
    Names {
        zone: Some("nodes.tunnel.internal".parse().unwrap()),
        clusters: vec![ClusterDomain {
            domain: "cluster.local".parse().unwrap(),
            resolvers: Vec::new(),
        }],
        default_resolvers: forwarding
            .then(|| "192.0.2.53:53".parse().unwrap())
            .into_iter()
            .collect(),
    }
}

fn records() -> RecordSet {
    let of = |addresses: &[&str]| {
        Addresses::first_of(addresses.iter().map(|text| text.parse().unwrap()))
    };
    RecordSet::of([
        ("worker-1".parse().unwrap(), of(&["10.106.217.16"])),
        ("six".parse().unwrap(), of(&["fd00::6"])),
        ("both".parse().unwrap(), of(&["10.0.0.1", "fd00::1"])),
    ])
}

fn query(name: &str, kind: RecordType) -> Message {
    let mut message = Message::query();
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(Name::from_ascii(name).unwrap(), kind));
    message
}

/// Returns the reply and its outcome, or `None` if the server does not answer.
fn ask_with(message: &[u8], names: &Names) -> Option<(Message, QueryOutcome)> {
    let records = records();
    let context = AnswerContext {
        records: Some(&records),
        names,
    };
    match decide(message, Transport::Udp, &context) {
        Decision::Ignore(_) => None,
        Decision::Reply(bytes, outcome) => Some((Message::from_vec(&bytes).unwrap(), outcome)),
        Decision::Forward(client_query, resolvers) => {
            assert_eq!(resolvers, names.default_resolvers);
            Some((client_query.forwarded(), QueryOutcome::Forwarded))
        }
    }
}

fn ask(name: &str, kind: RecordType) -> (Message, QueryOutcome) {
    ask_with(&query(name, kind).to_vec().unwrap(), &names(true)).unwrap()
}

#[test]
fn a_node_has_its_address_for_five_seconds() {
    let (reply, outcome) = ask("Worker-1.", RecordType::A);
    assert_eq!(outcome, QueryOutcome::Node);
    let [answer] = reply.answers.as_slice() else {
        panic!("{reply}");
    };
    assert_eq!(answer.data, RData::A(A::new(10, 106, 217, 16)));
    assert_eq!(answer.ttl, 5);
    // The client's own spelling.
    assert_eq!(answer.name.to_ascii(), "Worker-1.");
    let flags = reply.metadata;
    assert!(flags.authoritative && flags.recursion_available && flags.recursion_desired);
    assert_eq!(flags.response_code, ResponseCode::NoError);
}

#[test]
fn the_missing_family_and_other_types_are_no_error_without_answers() {
    for (name, kind) in [
        ("worker-1.", RecordType::AAAA),
        ("six.", RecordType::A),
        ("worker-1.", RecordType::TXT),
        ("worker-1.", RecordType::PTR),
        ("worker-1.", RecordType::ANY),
        ("worker-1.nodes.tunnel.internal.", RecordType::MX),
        ("nodes.tunnel.internal.", RecordType::A),
    ] {
        let (reply, outcome) = ask(name, kind);
        assert_eq!(outcome, QueryOutcome::NoData, "{name} {kind}");
        assert_eq!(reply.metadata.response_code, ResponseCode::NoError);
        assert!(reply.answers.is_empty());
    }
    let (reply, _) = ask("both.", RecordType::AAAA);
    assert_eq!(reply.answers.len(), 1);
}

#[test]
fn a_missing_name_is_missing_for_one_second() {
    for (name, authority) in [
        ("worker-9.", "."),
        ("worker-9.nodes.tunnel.internal.", "nodes.tunnel.internal."),
        ("worker-1.kube-system.svc.cluster.local.", "cluster.local."),
    ] {
        let (reply, outcome) = ask(name, RecordType::A);
        assert_eq!(outcome, QueryOutcome::NoName, "{name}");
        assert_eq!(reply.metadata.response_code, ResponseCode::NXDomain);
        let soa = &reply.authorities[0];
        assert_eq!((soa.name.to_ascii().as_str(), soa.ttl), (authority, 1));
        let RData::SOA(data) = &soa.data else {
            panic!("{soa}");
        };
        assert_eq!(data.minimum, 1);
    }
}

#[test]
fn recursion_is_available_exactly_when_there_is_somebody_to_ask() {
    let (question, outcome) = ask("example.com.", RecordType::A);
    assert_eq!(outcome, QueryOutcome::Forwarded);
    assert!(question.metadata.recursion_desired && question.edns.is_some());
    for (name, expected, code) in [
        ("example.com.", QueryOutcome::Refused, ResponseCode::Refused),
        ("worker-1.", QueryOutcome::Node, ResponseCode::NoError),
    ] {
        let message = query(name, RecordType::A).to_vec().unwrap();
        let (reply, outcome) = ask_with(&message, &names(false)).unwrap();
        assert_eq!(outcome, expected, "{name}");
        assert_eq!(reply.metadata.response_code, code, "{name}");
        assert!(!reply.metadata.recursion_available, "{name}");
    }
}

#[test]
fn no_single_label_is_ever_forwarded() {
    let odd = [&[0xff_u8, b'.', 0][..], b"a b", b"*", b"_x", b"com", b"0"];
    for label in odd {
        let mut message = query("x.", RecordType::A);
        message.queries[0].name = Name::from_labels([label]).unwrap();
        let (_, outcome) = ask_with(&message.to_vec().unwrap(), &names(true)).unwrap();
        assert_eq!(outcome, QueryOutcome::NoName, "{label:?}");
    }
}

#[test]
fn hostile_messages_are_answered_shortly_or_not_at_all() {
    let names = names(true);
    let plain = query("worker-1.", RecordType::A).to_vec().unwrap();
    let code =
        |message: &[u8]| ask_with(message, &names).map(|(reply, _)| reply.metadata.response_code);
    let with = |at: usize, byte: u8| {
        let mut message = plain.clone();
        message[at] = byte;
        message
    };
    assert_eq!(code(&[]), None);
    assert_eq!(code(&plain[..11]), None, "not even a header");
    assert_eq!(code(&with(2, 0x81)), None, "a response");
    let last = plain.len() - 1;
    for (message, expected, case) in [
        (plain[..12].to_vec(), ResponseCode::FormErr, "cut short"),
        (plain[..last].to_vec(), ResponseCode::FormErr, "short"),
        (with(2, 0x28), ResponseCode::NotImp, "UPDATE"),
        (with(2, 0x20), ResponseCode::NotImp, "NOTIFY"),
        (with(5, 0), ResponseCode::FormErr, "no question"),
        (with(5, 2), ResponseCode::FormErr, "two"),
        (with(4, 0xff), ResponseCode::FormErr, "65,281"),
        (with(6, 1), ResponseCode::FormErr, "answers"),
        (with(10, 1), ResponseCode::FormErr, "additionals"),
        (with(last, 3), ResponseCode::Refused, "CHAOS"),
        (with(last, 255), ResponseCode::Refused, "class ANY"),
    ] {
        assert_eq!(code(&message), Some(expected), "{case}");
    }
    let looping = [&plain[..12], &[0xc0, 12, 0, 1, 0, 1]].concat();
    assert_eq!(code(&looping), Some(ResponseCode::FormErr), "a loop");
    let long = [&plain[..], &[0; 5000]].concat();
    assert_eq!(code(&long), Some(ResponseCode::FormErr), "oversize");
    for kind in [RecordType::AXFR, RecordType::IXFR] {
        for name in [".", "worker-1.", "nodes.tunnel.internal."] {
            let (reply, _) = ask(name, kind);
            assert_eq!(reply.metadata.response_code, ResponseCode::Refused);
            assert!(reply.answers.is_empty());
        }
    }
    let (reply, _) = ask("example.com.", RecordType::ANY);
    assert_eq!(reply.metadata.response_code, ResponseCode::Refused);
}

#[test]
fn edns_is_answered_with_edns_and_unknown_versions_are_refused() {
    let mut message = query("worker-1.", RecordType::A);
    let mut edns = Edns::new();
    edns.set_max_payload(4096);
    message.set_edns(edns.clone());
    let (reply, _) = ask_with(&message.to_vec().unwrap(), &names(true)).unwrap();
    assert_eq!(reply.edns.unwrap().max_payload(), 1232);
    edns.set_version(1);
    message.set_edns(edns);
    let (reply, _) = ask_with(&message.to_vec().unwrap(), &names(true)).unwrap();
    // Code 16 is BADSIG in TSIG.
    assert_eq!(u16::from(reply.metadata.response_code), 16);
}

#[test]
fn names_of_nodes_fail_while_the_nodes_are_unknown_whatever_other_resolvers_say() {
    let names = names(true);
    let context = AnswerContext {
        records: None,
        names: &names,
    };
    let message = query("worker-1.", RecordType::A).to_vec().unwrap();
    let Decision::Reply(bytes, outcome) = decide(&message, Transport::Udp, &context) else {
        panic!("no reply");
    };
    assert_eq!(outcome, QueryOutcome::Unknown);
    let code = |bytes: &[u8]| Message::from_vec(bytes).unwrap().metadata.response_code;
    assert_eq!(code(&bytes), ResponseCode::ServFail);
    for (name, absent) in [
        ("ip-10.ec2.internal.", ResponseCode::ServFail),
        ("_sip._udp.example.com.", ResponseCode::NXDomain),
        ("1.0.0.10.in-addr.arpa.", ResponseCode::NXDomain),
    ] {
        let message = query(name, RecordType::A).to_vec().unwrap();
        let decision = decide(&message, Transport::Udp, &context);
        let Decision::Forward(client_query, _) = decision else {
            panic!("{decision:?}");
        };
        for (answered, relayed) in [
            (ResponseCode::NoError, ResponseCode::NoError),
            (ResponseCode::NXDomain, absent),
        ] {
            let mut answer = client_query.forwarded();
            answer.metadata.response_code = answered;
            assert_eq!(code(&client_query.relayed(answer)), relayed, "{name}");
        }
    }
}

#[test]
fn what_does_not_fit_a_datagram_is_cut_and_marked() {
    let answer_to = |transport, payload: Option<u16>| {
        let mut message = query("example.com.", RecordType::TXT);
        if let Some(payload) = payload {
            let mut edns = Edns::new();
            edns.set_max_payload(payload);
            message.set_edns(edns);
        }
        let (records, names) = (records(), names(true));
        let context = AnswerContext {
            records: Some(&records),
            names: &names,
        };
        let decision = decide(&message.to_vec().unwrap(), transport, &context);
        let Decision::Forward(client_query, _) = decision else {
            panic!("{decision:?}");
        };
        let mut answer = client_query.forwarded();
        for number in 0..100 {
            let name = Name::from_ascii(format!("n{number}.example.com.")).unwrap();
            let address = RData::A(A::new(10, 0, 0, number));
            answer.add_answer(Record::from_rdata(name, 60, address));
        }
        let bytes = client_query.relayed(answer);
        let reply = Message::from_vec(&bytes).unwrap();
        (bytes.len(), reply.answers.len(), reply.metadata.truncation)
    };
    for payload in [None, Some(100), Some(1232), Some(65_000)] {
        let (length, answers, is_cut) = answer_to(Transport::Udp, payload);
        assert!(is_cut && answers == 0, "{payload:?}: {answers}");
        assert!(length <= 512, "{payload:?}: {length}");
    }
    let (length, answers, is_cut) = answer_to(Transport::Tcp, None);
    assert!(length > 1232 && answers == 100 && !is_cut, "{length}");
}
