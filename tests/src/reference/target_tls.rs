//! The page about TLS with targets: what the provider supports, and a table of targets. A scenario
//! starts each target of the table with OpenSSL.

use std::fmt::Debug;

use tunnel_proto::tls::provider;

use super::put;

/// An https target, and what becomes of requests for it.
#[derive(Debug, Clone, Copy)]
pub struct TargetCase {
    /// What is special about the target.
    pub target: &'static str,
    pub certificate: CertificateRecipe,
    /// Arguments of `openssl s_server`.
    pub server: &'static str,
    /// With `--target-tls tunnel`.
    pub tunnel: TargetVerdict,
    /// With `--target-tls verify`.
    pub verify: TargetVerdict,
}

/// How OpenSSL makes a certificate.
#[derive(Debug, Clone, Copy)]
pub struct CertificateRecipe {
    /// Arguments of `openssl genpkey`.
    pub key: &'static str,
    pub issuer: CertificateIssuer,
    /// Content of `-extfile`. Without one OpenSSL makes a certificate of version 1.
    pub extensions: &'static str,
    /// More arguments of `openssl x509 -req`.
    pub arguments: &'static str,
}

/// The signer of a target's certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CertificateIssuer {
    /// The CA of `--target-ca`.
    Trusted,
    Itself,
    AnotherCa,
    /// The last of this many CAs below the trusted one, which the target sends.
    Below(usize),
    /// The CA of `--target-ca`, of which the target sends this many copies.
    Repeated(usize),
}

/// What becomes of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TargetVerdict {
    Accepted,
    /// The answer is 502 `target_tls` with these words.
    Refused(&'static str),
}

const P256: &str = "-algorithm EC -pkeyopt ec_paramgen_curve:P-256";
const NAMED: &str = "subjectAltName=DNS:worker-1";
const LEAF: CertificateRecipe = CertificateRecipe {
    key: P256,
    issuer: CertificateIssuer::Trusted,
    extensions: NAMED,
    arguments: "-days 2",
};
const USUAL: TargetCase = TargetCase {
    target: "",
    certificate: LEAF,
    server: "",
    tunnel: TargetVerdict::Accepted,
    verify: TargetVerdict::Accepted,
};
const NOTHING_IN_COMMON: TargetVerdict =
    TargetVerdict::Refused("supports nothing of what was offered");
const NO_VERSION: TargetVerdict = TargetVerdict::Refused("no version of TLS that is supported");

/// Returns a target that is usual but for its key.
const fn key(target: &'static str, key: &'static str) -> TargetCase {
    TargetCase {
        target,
        certificate: CertificateRecipe { key, ..LEAF },
        ..USUAL
    }
}

/// Returns a target that is usual but for its settings of TLS.
const fn server(target: &'static str, server: &'static str) -> TargetCase {
    TargetCase {
        target,
        server,
        ..USUAL
    }
}

/// Returns a target whose certificate only `--target-tls verify` refuses.
const fn certificate(
    target: &'static str,
    certificate: CertificateRecipe,
    words: &'static str,
) -> TargetCase {
    TargetCase {
        target,
        certificate,
        verify: TargetVerdict::Refused(words),
        ..USUAL
    }
}

impl TargetCase {
    const fn refused(self, verdict: TargetVerdict) -> Self {
        Self {
            tunnel: verdict,
            verify: verdict,
            ..self
        }
    }

    const fn with_server(self, server: &'static str) -> Self {
        Self { server, ..self }
    }
}

const RSA_2048: &str = "-algorithm RSA -pkeyopt rsa_keygen_bits:2048";
const P521: &str = "-algorithm EC -pkeyopt ec_paramgen_curve:P-521";
/// Lets OpenSSL use what it considers too weak.
const WEAK: &str = "-cipher DEFAULT@SECLEVEL=0";

/// The table of targets.
pub const TARGETS: &[TargetCase] = &[
    server("TLS 1.3 only", "-tls1_3"),
    server("TLS 1.2 only", "-tls1_2"),
    server("TLS 1.1 only", "-tls1_1 -cipher DEFAULT@SECLEVEL=0").refused(NO_VERSION),
    server(
        "TLS 1.2 with ECDHE and AES-GCM only",
        "-tls1_2 -cipher ECDHE-ECDSA-AES128-GCM-SHA256",
    ),
    server(
        "TLS 1.2 with ECDHE and ChaCha20-Poly1305 only",
        "-tls1_2 -cipher ECDHE-ECDSA-CHACHA20-POLY1305",
    ),
    server(
        "TLS 1.2 with CBC only",
        "-tls1_2 -cipher ECDHE-ECDSA-AES128-SHA256",
    )
    .refused(NOTHING_IN_COMMON),
    key("TLS 1.2 with an RSA key exchange only", RSA_2048)
        .with_server("-tls1_2 -cipher AES128-GCM-SHA256")
        .refused(NOTHING_IN_COMMON),
    key("TLS 1.2 with DHE only", RSA_2048)
        .with_server("-tls1_2 -cipher DHE-RSA-AES128-GCM-SHA256")
        .refused(NOTHING_IN_COMMON),
    server("key exchange on P-384 only", "-groups P-384"),
    server("key exchange on P-521 only", "-groups P-521").refused(NOTHING_IN_COMMON),
    key(
        "ECDSA key on P-384",
        "-algorithm EC -pkeyopt ec_paramgen_curve:P-384",
    ),
    key(
        "ECDSA key on P-384, TLS 1.2 only",
        "-algorithm EC -pkeyopt ec_paramgen_curve:P-384",
    )
    .with_server("-tls1_2"),
    key("ECDSA key on P-521", P521),
    key("ECDSA key on P-521, TLS 1.2 only", P521)
        .with_server("-tls1_2")
        .refused(NOTHING_IN_COMMON),
    key("Ed25519 key", "-algorithm ED25519"),
    key("Ed25519 key, TLS 1.2 only", "-algorithm ED25519").with_server("-tls1_2"),
    key("Ed448 key", "-algorithm ED448").refused(NOTHING_IN_COMMON),
    key(
        "RSA key of 1024 bits",
        "-algorithm RSA -pkeyopt rsa_keygen_bits:1024",
    )
    .with_server(WEAK)
    .refused(TargetVerdict::Refused("an RSA key of 1024 bits")),
    key(
        "RSA key of 1024 bits, TLS 1.2 only",
        "-algorithm RSA -pkeyopt rsa_keygen_bits:1024",
    )
    .with_server("-tls1_2 -cipher DEFAULT@SECLEVEL=0")
    .refused(TargetVerdict::Refused("an RSA key of 1024 bits")),
    key("RSA key of 2048 bits", RSA_2048),
    key("RSA key of 2048 bits, TLS 1.2 only", RSA_2048).with_server("-tls1_2"),
    // Four primes are found much sooner than two.
    key(
        "RSA key of 8192 bits",
        "-algorithm RSA -pkeyopt rsa_keygen_bits:8192 -pkeyopt rsa_keygen_primes:4",
    ),
    key(
        "RSASSA-PSS key",
        "-algorithm RSA-PSS -pkeyopt rsa_keygen_bits:2048",
    )
    .refused(NOTHING_IN_COMMON),
    certificate(
        "certificate of X.509 version 1",
        CertificateRecipe {
            extensions: "",
            ..LEAF
        },
        "is of X.509 version 1",
    ),
    certificate(
        "certificate of X.509 version 1, TLS 1.2 only",
        CertificateRecipe {
            extensions: "",
            ..LEAF
        },
        "is of X.509 version 1",
    )
    .with_server("-tls1_2"),
    certificate(
        "certificate with an unknown critical extension",
        CertificateRecipe {
            extensions: "subjectAltName=DNS:worker-1\n1.2.3.4=critical,DER:0500",
            ..LEAF
        },
        "unknown critical extension",
    ),
    certificate(
        "certificate with an unknown critical extension, RSA key, TLS 1.2 only",
        CertificateRecipe {
            key: RSA_2048,
            extensions: "subjectAltName=DNS:worker-1\n1.2.3.4=critical,DER:0500",
            ..LEAF
        },
        "unknown critical extension",
    )
    .with_server("-tls1_2"),
    certificate(
        "expired certificate",
        CertificateRecipe {
            arguments: "-days -1",
            ..LEAF
        },
        "Expired",
    ),
    certificate(
        "self-signed certificate",
        CertificateRecipe {
            issuer: CertificateIssuer::Itself,
            ..LEAF
        },
        "UnknownIssuer",
    ),
    certificate(
        "certificate of another CA",
        CertificateRecipe {
            issuer: CertificateIssuer::AnotherCa,
            ..LEAF
        },
        "UnknownIssuer",
    ),
    certificate(
        "certificate for another name",
        CertificateRecipe {
            extensions: "subjectAltName=DNS:worker-2",
            ..LEAF
        },
        "not valid for name",
    ),
    certificate(
        "certificate with the name in its common name only",
        CertificateRecipe {
            extensions: "basicConstraints=CA:FALSE",
            ..LEAF
        },
        "not valid for name",
    ),
    certificate(
        "certificate for clients only",
        CertificateRecipe {
            extensions: "subjectAltName=DNS:worker-1\nextendedKeyUsage=clientAuth",
            ..LEAF
        },
        "extended key usage",
    ),
    certificate(
        "certificate of a CA",
        CertificateRecipe {
            extensions: "subjectAltName=DNS:worker-1\nbasicConstraints=critical,CA:TRUE",
            ..LEAF
        },
        "is that of a CA",
    ),
    certificate(
        "certificate signed with SHA-1",
        CertificateRecipe {
            arguments: "-days 2 -sha1",
            ..LEAF
        },
        "signed by an algorithm that is not supported",
    )
    .with_server(WEAK),
    TargetCase {
        target: "chain through five intermediate CAs",
        certificate: CertificateRecipe {
            issuer: CertificateIssuer::Below(5),
            ..LEAF
        },
        ..USUAL
    },
    certificate(
        "chain through eight intermediate CAs",
        CertificateRecipe {
            issuer: CertificateIssuer::Below(8),
            ..LEAF
        },
        "is too long",
    ),
    TargetCase {
        target: "certificate chain of more than 64 KiB",
        certificate: CertificateRecipe {
            issuer: CertificateIssuer::Repeated(200),
            ..LEAF
        },
        ..USUAL
    }
    .refused(TargetVerdict::Refused("more than 64 KiB")),
];

pub(super) fn page() -> String {
    let provider = provider();
    let suites = |version| {
        let suites = provider.cipher_suites.iter();
        let suites = suites.filter(move |suite| suite.version().version == version);
        list(suites.map(|suite| suite.suite()))
    };
    let algorithms = &provider.signature_verification_algorithms;
    let mut page = HEAD.to_owned();
    for (what, supported) in [
        ("versions", "TLS 1.3, TLS 1.2".to_owned()),
        (
            "cipher suites of TLS 1.3",
            suites(rustls::ProtocolVersion::TLSv1_3),
        ),
        (
            "cipher suites of TLS 1.2",
            suites(rustls::ProtocolVersion::TLSv1_2),
        ),
        (
            "key exchange",
            list(provider.kx_groups.iter().map(|group| group.name())),
        ),
        (
            "signatures of a handshake",
            list(algorithms.supported_schemes()),
        ),
    ] {
        put(&mut page, format_args!("| {what} | {supported} |\n"));
    }
    page.push_str(TABLE);
    for case in TARGETS {
        let [tunnel, verify] = [case.tunnel, case.verify].map(|verdict| match verdict {
            TargetVerdict::Accepted => "accepted".to_owned(),
            TargetVerdict::Refused(words) => format!("refused: \"{words}\""),
        });
        put(
            &mut page,
            format_args!("| {} | {tunnel} | {verify} |\n", case.target),
        );
    }
    page
}

fn list(names: impl IntoIterator<Item = impl Debug>) -> String {
    let names = names.into_iter().map(|name| format!("`{name:?}`"));
    names.collect::<Vec<_>>().join(", ")
}

const HEAD: &str = "# TLS with targets

Generated from the code by `make docs`; do not edit.

The HTTPS listener and the https proxy ports open a TLS connection to the target on the node. `--target-tls` selects what they
check ([how to choose](../how-to/kubelet-certificate.md#verify-targets-over-tls)):

- `tunnel`: that the target has the key of the certificate that it presents, by the signature of the handshake. Nothing else in the
  certificate counts.
- `verify`: additionally that the certificate chains to `--target-ca` and is for the node's name.

A target with which TLS fails is answered with 502 `target_tls`. The answer and the access log name what is not supported and what
to do. TLS that ends in the caller (CONNECT listeners, TCP services, virtual addresses) is not affected: the server passes its bytes.

## Supported by the server

| | |
|---|---|
";
const TABLE: &str = "
Keys: RSA of 2048 to 8192 bits, ECDSA on P-256 and P-384, on P-521 with TLS 1.3, Ed25519.

A target on the loopback of its node is offered `X25519` and AES-128 before the others. Its bytes pass a session, which has the hybrid
key exchange, and no other network.

## Targets

Each row was tried against OpenSSL. Where a row does not say otherwise, the target has TLS 1.3 and 1.2, an ECDSA key on P-256, and
a certificate of version 3 of the CA in `--target-ca` for the node's name.

| target | `tunnel` | `verify` |
|---|---|---|
";
