use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use rcgen::{CertificateParams, KeyPair};
use rustls::{ClientConfig, ClientConnection, ServerConfig, ServerConnection};
use rustls_pki_types::ServerName;
use tunnel_process::files;
use tunnel_proto::identity::{PeerIdentity, spki_sha256};
use tunnel_proto::tls;
use tunnel_proto::tls::Trust;
use tunnel_store::testing::Scratch;

use super::*;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

fn ca(scratch: &Scratch) -> Arc<LocalCa> {
    Arc::new(LocalCa::load_or_create(&scratch.0).unwrap())
}

fn new_ca() -> (Scratch, Arc<LocalCa>) {
    let scratch = Scratch::new();
    let ca = ca(&scratch);
    (scratch, ca)
}

fn knows_worker_1() -> IsKnown {
    Arc::new(|node| node.as_str() == "worker-1")
}

fn listener(ca: &Arc<LocalCa>) -> cert_resolver::ServingCertResolver {
    let names = vec!["localhost".into(), "tunnel.example".into(), "ümlaut".into()];
    let ips = vec!["127.0.0.1".parse().unwrap(), "0.0.0.0".parse().unwrap()];
    let names = ServingNames::new(names, ips);
    cert_resolver::ServingCertResolver::new(ca.clone(), knows_worker_1(), names)
}

/// Performs a TLS handshake in memory. Returns the client's error, or the certificates that the
/// client received.
fn handshake(
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    name: &str,
) -> Result<Vec<CertificateDer<'static>>, rustls::Error> {
    let name = ServerName::try_from(name.to_owned()).unwrap();
    let mut client = ClientConnection::new(client, name)?;
    let mut server = ServerConnection::new(server)?;
    while client.is_handshaking() || server.is_handshaking() {
        let mut wire = Vec::new();
        client.write_tls(&mut wire).unwrap();
        server.read_tls(&mut &wire[..]).unwrap();
        server.process_new_packets()?;
        wire.clear();
        server.write_tls(&mut wire).unwrap();
        client.read_tls(&mut &wire[..]).unwrap();
        client.process_new_packets()?;
    }
    Ok(client.peer_certificates().unwrap().to_vec())
}

/// Returns a client configuration for a caller of the HTTPS listener that has the CA's certificate.
#[expect(
    clippy::disallowed_methods,
    reason = "a caller as curl is one; ours have no use for it"
)]
fn caller(ca: &LocalCa) -> Arc<ClientConfig> {
    let config = ClientConfig::builder_with_provider(tls::provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(tls::roots([ca.root().clone()]).unwrap())
        .with_no_client_auth();
    Arc::new(config)
}

fn csr() -> Vec<u8> {
    let key = KeyPair::generate().unwrap();
    let request = CertificateParams::default().serialize_request(&key);
    request.unwrap().der().to_vec()
}

#[test]
fn ca_is_made_once_and_its_files_are_private() {
    let scratch = Scratch::new();
    let first = ca(&scratch);
    let second = ca(&scratch);
    assert_eq!(first.root(), second.root());
    assert_eq!(first.spki_sha256(), spki_sha256(&first.root()).unwrap());
    let stored = fs::read_to_string(scratch.0.ca_certificate());
    assert_eq!(stored.unwrap(), first.root_pem());
    let key = fs::metadata(scratch.0.ca_key()).unwrap();
    assert_eq!(key.mode() & 0o777, 0o600);
    assert!(!format!("{first:?}").contains("PRIVATE"));
}

#[test]
fn crash_between_the_two_files_keeps_the_key() {
    let scratch = Scratch::new();
    let before = ca(&scratch).spki_sha256();
    fs::remove_file(scratch.0.ca_certificate()).unwrap();
    assert_eq!(ca(&scratch).spki_sha256(), before);
}

#[test]
fn odd_files_are_refused_by_name() {
    let scratch = Scratch::new();
    ca(&scratch);
    let message = || LocalCa::load_or_create(&scratch.0).unwrap_err().to_string();
    let key = scratch.0.ca_key();
    let good = fs::read(&key).unwrap();

    fs::set_permissions(&key, fs::Permissions::from_mode(0o666)).unwrap();
    assert!(message().contains("ca.key can be written by others"));
    files::replace(&key, b"nonsense").unwrap();
    assert!(message().contains("ca.key holds no usable private key"));
    let other = KeyPair::generate().unwrap().serialize_pem();
    files::replace(&key, other.as_bytes()).unwrap();
    assert!(message().contains("do not belong together"));
    fs::remove_file(&key).unwrap();
    assert!(message().contains("ca.key is missing"));
    let elsewhere = scratch.0.path().join("elsewhere");
    files::replace(&elsewhere, &good).unwrap();
    symlink(&elsewhere, &key).unwrap();
    assert!(message().contains("regular file"));
    fs::remove_file(&key).unwrap();
    files::replace(&key, &good).unwrap();
    files::replace(&scratch.0.ca_certificate(), b"nonsense").unwrap();
    assert!(message().contains("ca.crt holds no usable certificate"));
}

#[test]
fn agent_certificate_names_its_node_for_30_days() {
    let (_scratch, ca) = new_ca();
    let node: NodeName = "worker-1".parse().unwrap();
    let issued = ca.issue_agent(&csr(), &node).unwrap();
    let identity = PeerIdentity::from_certificate(&issued.chain[0]).unwrap();
    assert_eq!(identity.role, Role::Agent(node));
    assert_eq!(identity.not_after, issued.not_after);
    let left = issued.not_after.duration_since(SystemTime::now()).unwrap();
    assert!(left > DAY * 30 - Duration::from_secs(60) && left <= DAY * 30);
    let long: NodeName = ["x".repeat(60).as_str(); 4].join(".").parse().unwrap();
    let issued = ca.issue_agent(&csr(), &long).unwrap();
    let identity = PeerIdentity::from_certificate(&issued.chain[0]).unwrap();
    assert_eq!(identity.node(), Some(&long));
}

#[test]
fn serial_numbers_differ_for_one_key() {
    let (_scratch, ca) = new_ca();
    let (csr, node) = (csr(), "worker-1".parse().unwrap());
    let first = ca.issue_agent(&csr, &node).unwrap();
    let second = ca.issue_agent(&csr, &node).unwrap();
    assert_ne!(first.chain, second.chain);
}

#[test]
fn agent_that_pins_the_ca_or_has_it_accepts_the_server() {
    let (_scratch, ca) = new_ca();
    let server = tls::enroll_server(ca.server_resolver(Box::new(|_| {}))).unwrap();
    for trust in [
        Trust::Pin(ca.spki_sha256()),
        Trust::Roots(tls::roots([ca.root().clone()]).unwrap()),
    ] {
        let client = tls::enroll_client(trust).unwrap();
        let seen = handshake(client, server.clone(), "any.example").unwrap();
        assert_eq!(seen[1], ca.root());
    }
    let other = Scratch::new();
    let foreign = Trust::Pin(self::ca(&other).spki_sha256());
    let client = tls::enroll_client(foreign).unwrap();
    assert!(handshake(client, server, "any.example").is_err());
}

#[test]
fn serving_certificates_never_act_as_the_tunnel_server() {
    let (_scratch, ca) = new_ca();
    let names = ServingNames::new(vec!["culvert.example".into()], vec![]);
    let listener = ca.serving_resolver(knows_worker_1(), names);
    let server = tls::enroll_server(listener).unwrap();
    let expected = rustls::CertificateError::ApplicationVerificationFailure;
    let expected = rustls::Error::InvalidCertificate(expected);
    for name in "worker-1 culvert.example unknown.example 127.0.0.1".split(' ') {
        let client = tls::enroll_client(Trust::Pin(ca.spki_sha256())).unwrap();
        let error = handshake(client, server.clone(), name).unwrap_err();
        assert_eq!(error, expected, "{name}");
    }
}

#[test]
fn listener_is_verified_by_node_name_own_name_and_own_address() {
    let (_scratch, ca) = new_ca();
    let server = tls::https_server(Arc::new(listener(&ca)), None).unwrap();
    for (name, is_good) in [
        ("worker-1", true),
        ("WORKER-1", true),
        ("localhost", true),
        ("tunnel.example", true),
        ("127.0.0.1", true),
        ("worker-2", false),
        ("127.0.0.2", false),
    ] {
        let result = handshake(caller(&ca), server.clone(), name);
        assert_eq!(result.is_ok(), is_good, "{name}: {result:?}");
    }
}

#[test]
fn certificates_are_kept_and_renewed_at_half_life() {
    let (_scratch, ca) = new_ca();
    let now = SystemTime::now();
    let server = RoleCertResolver::new(ca.clone(), None, Box::new(|_| {}));
    let peer = ca.peer_resolver("server-1".parse().unwrap());
    let listener = listener(&ca);
    let at = |time| {
        [
            server.credential(time).unwrap(),
            peer.credential(time).unwrap(),
            listener.certificate(Some("worker-1"), time).unwrap(),
            listener.certificate(None, time).unwrap(),
        ]
    };
    let first = at(now);
    let later = at(now + DAY * 14);
    let renewed = at(now + DAY * 15);
    let clock_set_back = at(now);
    for index in 0..first.len() {
        assert!(Arc::ptr_eq(&first[index], &later[index]));
        assert!(!Arc::ptr_eq(&first[index], &renewed[index]));
        assert!(!Arc::ptr_eq(&clock_set_back[index], &renewed[index]));
    }
}

#[test]
fn certificates_cached_for_the_listener_are_bounded() {
    let (_scratch, ca) = new_ca();
    let names = ServingNames::new(vec![], vec![]);
    let listener = cert_resolver::ServingCertResolver::new(ca, Arc::new(|_| true), names);
    let now = SystemTime::now();
    let first = listener.certificate(Some("node-0"), now).unwrap();
    for number in 1..=cert_resolver::CACHED_CERTS_MAX {
        let name = format!("node-{number}");
        listener.certificate(Some(&name), now).unwrap();
    }
    assert_eq!(listener.cached_nodes(), cert_resolver::CACHED_CERTS_MAX);
    let again = listener.certificate(Some("node-0"), now).unwrap();
    assert!(!Arc::ptr_eq(&first, &again), "the oldest was dropped");
}

#[test]
fn another_ca_or_name_makes_new_serving_certificates_at_once() {
    let (_scratch, ca) = new_ca();
    let names = ServingNames::new(vec!["localhost".into()], vec![]);
    let listener =
        cert_resolver::ServingCertResolver::new(ca.clone(), knows_worker_1(), names.clone());
    let now = SystemTime::now();
    let leaf = |sni: &str| listener.certificate(Some(sni), now).unwrap().cert[0].clone();
    let (own, node) = (leaf("localhost"), leaf("worker-1"));
    assert_eq!(leaf("localhost"), own);
    assert_eq!(leaf("worker-1"), node);

    let further = std::collections::BTreeSet::from(["edge.ns.svc".to_owned()]);
    assert!(names.set_additional(&further, &Default::default()));
    assert!(!names.set_additional(&further, &Default::default()));
    let renamed = leaf("edge.ns.svc");
    assert_ne!(renamed, own);
    assert!(String::from_utf8_lossy(&renamed).contains("edge.ns.svc"));
    assert_eq!(leaf("worker-1"), node, "a node's own is not touched");

    let old = ca.root();
    let next = Arc::new(CaMaterial::generate(now).unwrap());
    assert!(ca.replace(next.clone()));
    assert!(!ca.replace(next));
    for sni in ["localhost", "worker-1"] {
        let chain = listener.certificate(Some(sni), now).unwrap().cert.clone();
        assert_eq!(chain[1], ca.root());
    }
    assert_ne!(ca.root(), old);
}
