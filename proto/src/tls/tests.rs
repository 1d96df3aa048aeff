use std::time::Duration;

use rcgen::ExtendedKeyUsagePurpose::{Any, ClientAuth, CodeSigning, Other, ServerAuth};
use rustls::{CipherSuite, ClientConnection, ConnectionCommon, NamedGroup, ServerConnection};
use rustls_pki_types::{CertificateDer, UnixTime};

use super::test_ca::TestCa;
use super::*;
use crate::calibration::{processor_time, scaled};
use crate::identity::{Role, TrustDomain, spki_sha256};
use crate::wire::ALPN_SESSION;

/// Runs a handshake in memory. Returns the error of the first side that fails.
fn handshake(
    client: &Arc<ClientConfig>,
    server: &Arc<ServerConfig>,
) -> Result<(ClientConnection, ServerConnection), String> {
    let mut client = ClientConnection::new(client.clone(), "anything".try_into().unwrap()).unwrap();
    let mut server = ServerConnection::new(server.clone()).unwrap();
    for _ in 0..8 {
        transfer(&mut client, &mut server).map_err(|error| format!("server: {error}"))?;
        transfer(&mut server, &mut client).map_err(|error| format!("client: {error}"))?;
    }
    assert!(!client.is_handshaking() && !server.is_handshaking());
    Ok((client, server))
}

/// Passes what one side has to send to the other side.
fn transfer<A, B>(
    from: &mut ConnectionCommon<A>,
    to: &mut ConnectionCommon<B>,
) -> Result<(), Error> {
    let mut wire = Vec::new();
    while from.wants_write() {
        from.write_tls(&mut wire).unwrap();
    }
    let mut wire = &wire[..];
    while !wire.is_empty() {
        to.read_tls(&mut wire).unwrap();
    }
    to.process_new_packets().map(drop)
}

fn agent() -> Role {
    Role::Agent("worker-1".parse().unwrap())
}

fn peer() -> Role {
    Role::Peer("server-0".parse().unwrap())
}

#[test]
fn servers_admit_only_servers_of_the_same_ca_to_each_other() {
    let (ca, foreign) = (TestCa::new(), TestCa::new());
    let trust = PeerTrust::new(ca.roots()).unwrap();
    let connect = |dialing: Arc<CertifiedKey>, accepting: Arc<CertifiedKey>| {
        let own = Arc::new(SingleCertAndKey::from(dialing));
        let client = peer_client(own, trust.clone()).unwrap();
        let own = Arc::new(SingleCertAndKey::from(accepting));
        let server = peer_server(own, trust.clone()).unwrap();
        handshake(&client, &server).map(drop)
    };
    let key = || ca.key(&peer());
    assert_eq!(connect(key(), key()), Ok(()));
    for (what, wrong) in [
        ("foreign CA", foreign.key(&peer())),
        ("agent's role", ca.key(&agent())),
        ("server's role", ca.key(&Role::Server)),
        ("no role", ca.leaf_for("https://example.com", &[])),
    ] {
        let dialed = connect(wrong.clone(), key()).unwrap_err();
        assert!(dialed.starts_with("server:"), "{what} dialed: {dialed}");
        let accepted = connect(key(), wrong).unwrap_err();
        assert!(
            accepted.starts_with("client:"),
            "{what} accepted: {accepted}"
        );
    }
    trust.replace(foreign.roots()).unwrap();
    assert!(connect(key(), key()).is_err(), "its CA was taken away");
}

fn session_server_of(ca: &TestCa) -> Arc<ServerConfig> {
    session_server_of_roots(ca.resolver(&Role::Server), ca.roots(), ALPN_SESSION).unwrap()
}

fn session_client_of(ca: &TestCa, key: Arc<CertifiedKey>) -> Arc<ClientConfig> {
    session_client(key, Trust::Roots(ca.roots()), ALPN_SESSION).unwrap()
}

#[test]
fn each_ca_authenticates_its_own_trust_domain_only() {
    let (ours, cluster, foreign) = (TestCa::new(), TestCa::new(), TestCa::new());
    let trust = AgentTrust::new(ours.roots(), Arc::new(|_peer| Ok(()))).unwrap();
    let verify = |key: &CertifiedKey| trust.verify(&key.cert, UnixTime::now());
    let kubelet = cluster.kubelet("worker-1");
    assert!(verify(&kubelet).is_err(), "no cluster is trusted yet");
    trust.replace_cluster(cluster.roots()).unwrap();
    let peer = verify(&kubelet).unwrap();
    assert_eq!((peer.domain, peer.role), (TrustDomain::Cluster, agent()));
    let peer = verify(&ours.key(&agent())).unwrap();
    assert_eq!((peer.domain, peer.role), (TrustDomain::Tunnel, agent()));
    for (what, wrong) in [
        ("cluster's CA, our role", cluster.key(&agent())),
        ("our CA, kubelet's subject", ours.kubelet("worker-1")),
        ("foreign CA, kubelet's subject", foreign.kubelet("worker-1")),
        ("foreign CA, our role", foreign.key(&agent())),
    ] {
        assert!(verify(&wrong).is_err(), "{what}");
    }
    trust.replace_cluster(foreign.roots()).unwrap();
    assert!(verify(&kubelet).is_err(), "its CA was taken away");
}

#[test]
fn chains_of_agents_are_bounded_and_only_what_leads_to_a_root_is_stored() {
    let ca = TestCa::new();
    let trust = AgentTrust::new(ca.roots(), Arc::new(|_peer| Ok(()))).unwrap();
    let key = ca.key(&agent());
    let (leaf, root) = (key.cert[0].clone(), key.cert[1].clone());
    let junk = || CertificateDer::from(vec![0x30; 100]);
    let verify = |chain: &[CertificateDer<'_>]| {
        let verified = trust.verify(chain, UnixTime::now());
        verified.map_err(|error| error.to_string())
    };
    let four = [leaf.clone(), root.clone(), junk(), junk()];
    assert_eq!(verify(&four).map(|peer| peer.role), Ok(agent()));
    let five = [&four[..], &[junk()]].concat();
    let refused = verify(&five).unwrap_err();
    assert!(refused.contains("certificates: 5"), "{refused}");
    let fill = (8 << 10) - leaf.len() - root.len();
    let with_junk = |bytes| {
        let junk = CertificateDer::from(vec![0x30; bytes]);
        verify(&[leaf.clone(), root.clone(), junk])
    };
    assert!(with_junk(fill).is_ok(), "8 KiB");
    assert!(with_junk(fill + 1).is_err(), "one byte more");
    assert_eq!(issuer_path(&four), [leaf, root]);
}

#[test]
fn only_agents_of_our_ca_get_a_session() {
    let (ca, foreign) = (TestCa::new(), TestCa::new());
    let server = session_server_of(&ca);
    let connect = |key| handshake(&session_client_of(&ca, key), &server);
    assert!(connect(ca.key(&agent())).is_ok());
    for (what, key) in [
        ("foreign CA", foreign.key(&agent())),
        ("server's role", ca.key(&Role::Server)),
        (
            "agent's URI without the usage",
            ca.leaf("culvert://agent/worker-1", ServerAuth),
        ),
        (
            "server's URI with the agent's usage",
            ca.leaf("culvert://server", ClientAuth),
        ),
        ("peer's role", ca.key(&peer())),
        ("no role", ca.leaf("https://example.com", ClientAuth)),
    ] {
        let error = connect(key).err().unwrap_or_default();
        assert!(error.starts_with("server:"), "{what} got in: {error}");
    }
    let trust = Trust::Roots(ca.roots());
    let mut without = ClientConfig::clone(&enroll_client(trust).unwrap());
    without.alpn_protocols = vec![ALPN_SESSION.to_vec()];
    let entered = handshake(&Arc::new(without), &server);
    assert!(entered.is_err(), "no certificate got in");
}

/// An operator's CA may list no usage, which means any (RFC 5280, section 4.2.1.12). A list must
/// contain client usage.
#[test]
fn listed_usages_of_an_agents_certificate_have_the_clients() {
    let ca = TestCa::new();
    let trust = AgentTrust::new(ca.roots(), Arc::new(|_peer| Ok(()))).unwrap();
    for (usages, is_agent) in [
        (vec![], true),
        (vec![ClientAuth], true),
        (vec![ServerAuth, ClientAuth], true),
        (vec![CodeSigning, ClientAuth, Any], true),
        (vec![ServerAuth], false),
        (vec![Any], false),
        (vec![CodeSigning, ServerAuth], false),
        (vec![Other(vec![1, 3, 6, 1, 5, 5, 7, 3, 2, 1])], false),
    ] {
        let chain = &ca.leaf_for("culvert://agent/worker-1", &usages).cert;
        let result = trust.verify(chain, UnixTime::now());
        assert_eq!(result.is_ok(), is_agent, "{usages:?}: {result:?}");
    }
}

#[test]
fn agent_talks_only_to_a_server_of_its_ca() {
    let (ca, foreign) = (TestCa::new(), TestCa::new());
    let pin = Trust::Pin(spki_sha256(&ca.root()).unwrap());
    for trust in [Trust::Roots(ca.roots()), pin] {
        let client = enroll_client(trust).unwrap();
        assert!(handshake(&client, &enroll_server(ca.resolver(&Role::Server)).unwrap()).is_ok());
        let https_leaf = ca.leaf("https://worker-1", ServerAuth);
        for (what, key) in [
            ("foreign CA", foreign.key(&Role::Server)),
            ("agent's role", ca.key(&agent())),
            ("serving certificate of an HTTPS listener", https_leaf),
        ] {
            let server = enroll_server(Arc::new(SingleCertAndKey::from(key))).unwrap();
            let error = handshake(&client, &server).err().unwrap_or_default();
            assert!(error.starts_with("client:"), "{what} was believed: {error}");
        }
    }
}

#[test]
fn other_protocol_ids_fail_in_the_handshake() {
    let ca = TestCa::new();
    let client = enroll_client(Trust::Roots(ca.roots())).unwrap();
    assert!(handshake(&client, &session_server_of(&ca)).is_err());
}

#[test]
fn sessions_are_never_resumed() {
    let ca = TestCa::new();
    let https = https_server(ca.resolver(&Role::Server), Some((ca.roots(), true))).unwrap();
    for (server, alpn) in [
        (session_server_of(&ca), ALPN_SESSION),
        (https, b"http/1.1".as_slice()),
    ] {
        // A client that would resume if the server sent a ticket.
        let mut eager = ClientConfig::clone(&session_client_of(&ca, ca.key(&agent())));
        eager.resumption = Resumption::in_memory_sessions(8);
        eager.alpn_protocols = vec![alpn.to_vec()];
        let eager = Arc::new(eager);
        for _ in 0..2 {
            let (client, server) = handshake(&eager, &server).unwrap();
            assert_eq!(client.handshake_kind(), Some(rustls::HandshakeKind::Full));
            assert!(server.peer_certificates().is_some());
            assert_eq!(client.tls13_tickets_received(), 0);
        }
    }
}

#[test]
fn key_exchange_is_hybrid_post_quantum() {
    let ca = TestCa::new();
    let client = session_client_of(&ca, ca.key(&agent()));
    let (client, _server) = handshake(&client, &session_server_of(&ca)).unwrap();
    let group = client.negotiated_key_exchange_group().unwrap().name();
    assert_eq!(group, NamedGroup::X25519MLKEM768);
}

/// What is cheap comes first on a loopback, and a target that supports nothing of it is still reached.
#[test]
fn target_on_a_loopback_is_offered_what_is_cheap_first() {
    let ca = TestCa::new();
    let key = || Arc::new(SingleCertAndKey::from(ca.key(&Role::Server)));
    let strict = ServerConfig::builder_with_provider(Arc::new(CryptoProvider {
        kx_groups: vec![rustls::crypto::aws_lc_rs::kx_group::X25519MLKEM768],
        cipher_suites: vec![rustls::crypto::aws_lc_rs::cipher_suite::TLS13_AES_256_GCM_SHA384],
        ..(*provider()).clone()
    }));
    let strict = strict
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_cert_resolver(key());
    let usual = https_server(key(), None).unwrap();
    let (cheap, hybrid) = (
        (NamedGroup::X25519, CipherSuite::TLS13_AES_128_GCM_SHA256),
        (
            NamedGroup::X25519MLKEM768,
            CipherSuite::TLS13_AES_256_GCM_SHA384,
        ),
    );
    let loopback = loopback_target_client(None, None).unwrap();
    let network = target_client(None, None).unwrap();
    for (client, server, expected) in [
        (&loopback, &usual, cheap),
        (&loopback, &Arc::new(strict), hybrid),
        (&network, &usual, hybrid),
    ] {
        let (client, _server) = handshake(client, server).unwrap();
        let group = client.negotiated_key_exchange_group().unwrap().name();
        let suite = client.negotiated_cipher_suite().unwrap().suite();
        assert_eq!((group, suite), expected);
    }
}

/// By default AWS-LC first gathers noise for some 30 ms of processor time (see
/// `.cargo/config.toml`).
#[test]
fn first_random_number_of_a_process_is_there_at_once() {
    let before = processor_time();
    provider().secure_random.fill(&mut [0; 32]).unwrap();
    let took = processor_time() - before;
    assert!(took < scaled(Duration::from_millis(10)), "{took:?}");
}
