//! Fuzzes the decoders of messages from unauthenticated peers and of files with mutated input. No
//! decoder panics or returns more than its input, and accepted values survive a round trip.

use bytes::BytesMut;
use rcgen::{CertificateParams, KeyPair};
use rustls_pki_types::CertificateDer;
use tunnel_proto::identity::{PeerIdentity, public_key, validity};
use tunnel_proto::tls::files;
use tunnel_proto::wire::code::{CloseCode, EnrollCode};
use tunnel_proto::wire::control::{ControlMessage, Hello, Welcome};
use tunnel_proto::wire::enroll::{
    EnrollReply, EnrollRequest, JoinToken, RenewalProof, TOKEN_SECRET_BYTES, hex,
};
use tunnel_proto::wire::frame::{self, CONTROL_MESSAGE_MAX, ENROLL_MESSAGE_MAX};
use tunnel_proto::wire::name::{InstanceId, SessionId};
use tunnel_server::ca::AgentCsr;
use tunnel_tests::ca::{Leaf, TestCa};
use tunnel_tests::mutation::fuzz;

/// Returns the content of a framed message.
fn content(framed: &BytesMut, limit: usize) -> Vec<u8> {
    let mut framed = framed.clone();
    let taken = frame::take(&mut framed, limit);
    taken.ok().flatten().unwrap_or_default().to_vec()
}

#[expect(clippy::unwrap_used, reason = "a literal of the test")]
fn controls() -> Vec<ControlMessage> {
    vec![
        ControlMessage::Hello(Hello {
            versions: (1, 2),
            capabilities: vec!["renew".into()],
            node_name: "worker-1".parse().unwrap(),
            instance: InstanceId::new([7; 16]),
            software: "0.1.0".into(),
            node_ip: "192.0.2.1".into(),
        }),
        ControlMessage::Welcome(Welcome {
            version: 1,
            session: SessionId(9),
            capabilities: vec!["renew".into()],
            streams_per_agent: 256,
            replicas: vec!["a:1".into(), "b:2".into()],
            target_dial_timeout: std::time::Duration::from_secs(5),
        }),
        ControlMessage::NotAdmitted(CloseCode::NameInUse, "live".into()),
        ControlMessage::Drain(std::time::Duration::from_secs(30)),
        ControlMessage::Withdraw,
        ControlMessage::Bye("stopping".into()),
        ControlMessage::Suspect(true),
        ControlMessage::Renew(vec![0x30; 64]),
        ControlMessage::Renewed(EnrollReply::Refused(EnrollCode::Revoked, "no".into())),
        ControlMessage::Renewed(EnrollReply::Issued {
            chain: vec![vec![1; 40], vec![2; 40]],
            roots: vec![vec![3; 40]],
        }),
    ]
}

#[test]
fn fuzz_frames() {
    let mut corpus: Vec<Vec<u8>> = controls()
        .iter()
        .map(|message| {
            let mut framed = BytesMut::new();
            message.encode(&mut framed).unwrap();
            framed.to_vec()
        })
        .collect();
    corpus.push(corpus.concat());
    corpus.push(vec![0xff; 12]);
    fuzz(&corpus, 1, 2048, |input| {
        // The input arrives in pieces, as from a network.
        let mut buffer = BytesMut::new();
        let mut taken = 0;
        for piece in input.chunks(1 + input.len() / 3) {
            buffer.extend_from_slice(piece);
            loop {
                match frame::take(&mut buffer, ENROLL_MESSAGE_MAX) {
                    Ok(Some(frame)) => {
                        assert!(frame.len() <= ENROLL_MESSAGE_MAX);
                        taken += frame.len();
                    }
                    Ok(None) => {
                        let missing = frame::bytes_needed(&buffer, ENROLL_MESSAGE_MAX).unwrap();
                        assert!((1..=ENROLL_MESSAGE_MAX + 5).contains(&missing));
                        break;
                    }
                    Err(_refused) => return,
                }
            }
        }
        assert!(taken + buffer.len() <= input.len());
        // An announced length reserves no memory.
        assert!(
            buffer.capacity() <= 2 * input.len() + 64,
            "{}",
            buffer.capacity()
        );
    });
}

#[test]
fn fuzz_control_messages() {
    let corpus: Vec<Vec<u8>> = controls()
        .iter()
        .map(|message| {
            let mut framed = BytesMut::new();
            message.encode(&mut framed).unwrap();
            content(&framed, CONTROL_MESSAGE_MAX)
        })
        .collect();
    fuzz(&corpus, 2, 4096, |input| {
        let Ok(message) = ControlMessage::decode(input) else {
            return;
        };
        let mut framed = BytesMut::new();
        message.encode(&mut framed).unwrap();
        let again = ControlMessage::decode(&content(&framed, CONTROL_MESSAGE_MAX)).unwrap();
        assert_eq!(again, message);
    });
}

#[test]
fn fuzz_enrollment_messages() {
    let request = |proof| EnrollRequest {
        token: "abcdef012345.a5.11".to_owned().into(),
        csr: vec![0x30; 120],
        node_name: "worker-1".parse().unwrap(),
        proof,
    };
    let proof = RenewalProof {
        chain: vec![vec![1; 60], vec![2; 60]],
        signature: vec![3; 70],
        scheme: 0x0403,
    };
    let mut corpus = Vec::new();
    for request in [request(None), request(Some(proof))] {
        let mut framed = BytesMut::new();
        request.encode(&mut framed).unwrap();
        corpus.push(content(&framed, ENROLL_MESSAGE_MAX));
    }
    for reply in [
        EnrollReply::Refused(EnrollCode::TokenUsed, "used".into()),
        EnrollReply::Issued {
            chain: vec![vec![1; 60]],
            roots: vec![vec![2; 60]],
        },
    ] {
        let mut framed = BytesMut::new();
        reply.encode(&mut framed).unwrap();
        corpus.push(content(&framed, ENROLL_MESSAGE_MAX));
    }
    fuzz(&corpus, 3, 4096, |input| {
        if let Ok(request) = EnrollRequest::decode(input) {
            let proof = request.proof.as_ref();
            let chain: usize = proof.map_or(0, |proof| proof.chain.iter().map(Vec::len).sum());
            assert!(request.token.len() + request.csr.len() + chain <= input.len());
            let mut framed = BytesMut::new();
            request.encode(&mut framed).unwrap();
            let again = EnrollRequest::decode(&content(&framed, ENROLL_MESSAGE_MAX)).unwrap();
            assert!(again == request);
        }
        if let Ok(reply) = EnrollReply::decode(input) {
            let mut framed = BytesMut::new();
            reply.encode(&mut framed).unwrap();
            let again = EnrollReply::decode(&content(&framed, ENROLL_MESSAGE_MAX)).unwrap();
            assert_eq!(again, reply);
        }
    });
}

#[test]
fn fuzz_tokens() {
    let secret = [0xa5; TOKEN_SECRET_BYTES];
    let long = JoinToken::new("abcdef012345", &secret, Some([0x11; 32])).unwrap();
    let short = JoinToken::new("000000000000", &secret, None).unwrap();
    let corpus = [long, short].map(|token| token.reveal().into_bytes());
    fuzz(&corpus, 4, 512, |input| {
        let text = String::from_utf8_lossy(input);
        match text.parse::<JoinToken>() {
            Ok(token) => {
                let again: JoinToken = token.reveal().parse().unwrap();
                assert!(again == token);
                assert_eq!(token.secret().len(), TOKEN_SECRET_BYTES);
                assert!(!format!("{token:?}").contains(&hex(token.secret())));
            }
            Err(error) => assert!(!error.to_string().contains("a5a5")),
        }
    });
}

#[test]
fn fuzz_pem_files() {
    let ca = TestCa::new("ca").unwrap();
    let issued = ca.issue(&Leaf::agent("worker-1")).unwrap();
    let corpus = [
        issued.certificate.clone().into_bytes(),
        issued.key.clone().into_bytes(),
        format!("{}{}", issued.certificate, issued.key).into_bytes(),
        b"-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n".to_vec(),
        b"-----BEGIN EC PRIVATE KEY-----\nMAA=\n-----END EC PRIVATE KEY-----\n".to_vec(),
        b"# text\r\n\r\n-----BEGIN CERTIFICATE-----\r\nMAA=\r\n-----END CERTIFICATE-----\r\n"
            .to_vec(),
    ];
    fuzz(&corpus, 5, 2048, |input| {
        if let Ok(chain) = files::chain(input) {
            assert!(!chain.is_empty() && chain.len() <= 256);
            let bytes: usize = chain.iter().map(|der| der.len()).sum();
            assert!(bytes <= input.len());
        }
        if let Ok(key) = files::private_key(input) {
            assert!(key.secret_der().len() <= input.len());
        }
    });
}

/// Fuzzes certificates and requests in DER. Each intact signature is verified.
#[test]
fn fuzz_certificates_and_requests() {
    let ca = TestCa::new("ca").unwrap();
    let issued = ca.issue(&Leaf::agent("worker-1")).unwrap();
    let key = KeyPair::generate().unwrap();
    let request = CertificateParams::default()
        .serialize_request(&key)
        .unwrap();
    let corpus = [issued.own.cert[0].to_vec(), request.der().to_vec()];
    fuzz(&corpus, 6, 2048, |input| {
        let der = CertificateDer::from(input);
        if let Ok(identity) = PeerIdentity::from_certificate(&der) {
            let (not_before, not_after) = validity(&der).unwrap();
            assert_eq!(
                (identity.not_before, identity.not_after),
                (not_before, not_after)
            );
            if let Some(node) = identity.node() {
                let uri = format!("culvert://agent/{node}");
                assert!(input.windows(uri.len()).any(|part| part == uri.as_bytes()));
            }
        }
        let _any = public_key(&der);
        let _any = AgentCsr::parse(input);
    });
}
