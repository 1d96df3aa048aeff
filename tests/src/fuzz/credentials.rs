//! Join tokens, PEM files, certificates and certificate requests.

use anyhow::{Result, ensure};
use rcgen::{CertificateParams, KeyPair};
use rustls_pki_types::CertificateDer;
use tunnel_ca::AgentCsr;
use tunnel_proto::identity::{PeerIdentity, caller_name, public_key, validity};
use tunnel_proto::tls::{self, files};
use tunnel_proto::wire::enroll::{JoinToken, TOKEN_SECRET_BYTES, hex};

use crate::ca::{Leaf, TestCa};

pub(super) fn tokens() -> Result<Vec<Vec<u8>>> {
    let secret = [0xa5; TOKEN_SECRET_BYTES];
    let long = JoinToken::new("abcdef012345", &secret, Some([0x11; 32]))?;
    let short = JoinToken::new("000000000000", &secret, None)?;
    Ok([long, short]
        .map(|token| token.reveal().into_bytes())
        .into())
}

/// Neither the token's `Debug` nor an error contains its secret.
pub(super) fn check_token(input: &[u8]) -> Result<()> {
    match String::from_utf8_lossy(input).parse::<JoinToken>() {
        Ok(token) => {
            let again: JoinToken = token.reveal().parse()?;
            ensure!(again == token, "another token");
            ensure!(token.secret().len() == TOKEN_SECRET_BYTES, "a short secret");
            let shown = format!("{token:?}");
            ensure!(!shown.contains(&hex(token.secret())), "{shown}");
        }
        Err(error) => ensure!(!error.to_string().contains("a5a5"), "{error}"),
    }
    Ok(())
}

pub(super) fn pem_files() -> Result<Vec<Vec<u8>>> {
    let issued = TestCa::new("ca")?.issue(&Leaf::agent("worker-1"))?;
    Ok(vec![
        issued.certificate.clone().into_bytes(),
        issued.key.clone().into_bytes(),
        format!("{}{}", issued.certificate, issued.key).into_bytes(),
        b"-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n".to_vec(),
        b"-----BEGIN EC PRIVATE KEY-----\nMAA=\n-----END EC PRIVATE KEY-----\n".to_vec(),
        b"# text\r\n\r\n-----BEGIN CERTIFICATE-----\r\nMAA=\r\n-----END CERTIFICATE-----\r\n"
            .to_vec(),
    ])
}

pub(super) fn check_pem(input: &[u8]) -> Result<()> {
    if let Ok(chain) = files::chain(input) {
        let count = chain.len();
        ensure!((1..=256).contains(&count), "{count} certificates");
        let bytes: usize = chain.iter().map(|der| der.len()).sum();
        ensure!(bytes <= input.len(), "{bytes} bytes");
    }
    if let Ok(key) = files::private_key(input) {
        ensure!(key.secret_der().len() <= input.len(), "a longer key");
    }
    Ok(())
}

pub(super) fn certificates() -> Result<Vec<Vec<u8>>> {
    let ca = TestCa::new("ca")?;
    let mut corpus = Vec::new();
    for leaf in [
        Leaf::agent("worker-1"),
        Leaf::kubelet("worker-1"),
        Leaf::caller("prometheus"),
    ] {
        let issued = ca.issue(&leaf)?;
        corpus.extend(issued.own.cert.first().map(|der| der.to_vec()));
    }
    let request = CertificateParams::default().serialize_request(&KeyPair::generate()?)?;
    corpus.push(request.der().to_vec());
    Ok(corpus)
}

/// A node's name is in the certificate. Each intact signature of a request is verified.
pub(super) fn check_certificate(input: &[u8]) -> Result<()> {
    let der = CertificateDer::from(input);
    if let Ok(identity) = PeerIdentity::from_certificate(&der) {
        let own = (identity.not_before, identity.not_after);
        ensure!(own == validity(&der)?, "another validity");
        if let Some(node) = identity.node() {
            let uri = format!("culvert://agent/{node}");
            let mut runs = input.windows(uri.len());
            ensure!(
                runs.any(|run| run == uri.as_bytes()),
                "{node} is not in the certificate"
            );
        }
    }
    let _any = PeerIdentity::from_agent_certificate(&der);
    // No parser of certificates but our own reads the key.
    let _any = (
        tls::is_signed_by(&der, &der),
        tls::is_ca_signed_by(&der, &der),
    );
    let _any = (caller_name(&der), public_key(&der), AgentCsr::parse(input));
    Ok(())
}
