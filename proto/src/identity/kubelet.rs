//! Client certificates of kubelets (Kubernetes, signer
//! `kubernetes.io/kube-apiserver-client-kubelet`): subject `CN=system:node:NAME, O=system:nodes`,
//! and client usage.

use x509_parser::prelude::{AttributeTypeAndValue, X509Certificate};

use crate::wire::name::NodeName;

pub(super) const NODE_USER_PREFIX: &str = "system:node:";
pub(super) const NODES_GROUP: &str = "system:nodes";

/// Returns the node of a kubelet's client certificate. Returns `None` if the subject has another
/// name or group, or more than one of either, or if the certificate lacks client usage. TLS alone
/// would also accept a certificate without any extended usage.
pub(super) fn node(certificate: &X509Certificate<'_>) -> Option<NodeName> {
    let subject = certificate.subject();
    let user = single_value(subject.iter_common_name())?;
    let group = single_value(subject.iter_organization())?;
    let name = user.strip_prefix(NODE_USER_PREFIX)?;
    let node: NodeName = name.parse().ok()?;
    let usage = certificate.extended_key_usage().ok()??;
    // Accept only the canonical form, so that a certificate has exactly one interpretation.
    (node.as_str() == name && group == NODES_GROUP && usage.value.client_auth).then_some(node)
}

pub(super) fn single_value<'a>(
    mut values: impl Iterator<Item = &'a AttributeTypeAndValue<'a>>,
) -> Option<&'a str> {
    let (Some(value), None) = (values.next(), values.next()) else {
        return None;
    };
    value.as_str().ok()
}

#[cfg(test)]
mod tests {
    use rcgen::string::Ia5String;
    use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, KeyPair, SanType};
    use rustls_pki_types::CertificateDer;

    use super::super::{IdentityError, PeerIdentity, TrustDomain};

    const CLIENT: &[ExtendedKeyUsagePurpose] = &[ExtendedKeyUsagePurpose::ClientAuth];

    fn certificate(
        subject: &[(DnType, &str)],
        usages: &[ExtendedKeyUsagePurpose],
        uri: Option<&str>,
    ) -> CertificateDer<'static> {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        for (kind, value) in subject {
            params.distinguished_name.push(kind.clone(), *value);
        }
        params.extended_key_usages = usages.to_vec();
        let uri = uri.map(|uri| SanType::URI(Ia5String::try_from(uri).unwrap()));
        params.subject_alt_names = uri.into_iter().collect();
        let key = KeyPair::generate().unwrap();
        params.self_signed(&key).unwrap().der().clone()
    }

    fn subject<'a>(user: &'a str, group: &'a str) -> [(DnType, &'a str); 2] {
        [
            (DnType::OrganizationName, group),
            (DnType::CommonName, user),
        ]
    }

    #[test]
    fn kubelets_certificate_names_its_node_in_the_domain_of_the_cluster() {
        let der = certificate(
            &subject("system:node:worker-1.site.example", "system:nodes"),
            CLIENT,
            None,
        );
        let peer = PeerIdentity::from_agent_certificate(&der).unwrap();
        assert_eq!(peer.node().unwrap().as_str(), "worker-1.site.example");
        assert_eq!(peer.domain, TrustDomain::Cluster);
        // The certificate has no `culvert` role, whichever CA signed it.
        let tunnel = PeerIdentity::from_certificate(&der);
        assert_eq!(tunnel, Err(IdentityError::NoRole));
    }

    #[test]
    fn whatever_differs_from_a_kubelets_certificate_names_nobody() {
        let good = subject("system:node:worker-1", "system:nodes");
        let server: &[_] = &[ExtendedKeyUsagePurpose::ServerAuth];
        let any: &[_] = &[ExtendedKeyUsagePurpose::Any];
        let pod = (DnType::CommonName, "system:node:worker-1");
        for (subject, usages) in [
            (subject("worker-1", "system:nodes").to_vec(), CLIENT),
            (subject("system:node:", "system:nodes").to_vec(), CLIENT),
            (subject("system:node:A", "system:nodes").to_vec(), CLIENT),
            (subject("system:node:a.", "system:nodes").to_vec(), CLIENT),
            (subject("system:node:a_b", "system:nodes").to_vec(), CLIENT),
            (
                subject("system:node:10.0.0.1", "system:nodes").to_vec(),
                CLIENT,
            ),
            (subject("system:nodes:a", "system:nodes").to_vec(), CLIENT),
            (subject("system:node:a", "system:masters").to_vec(), CLIENT),
            (subject("system:node:a", "system:node").to_vec(), CLIENT),
            (vec![pod.clone()], CLIENT),
            (vec![(DnType::OrganizationName, "system:nodes")], CLIENT),
            (good.to_vec(), server),
            (good.to_vec(), any),
            (good.to_vec(), &[]),
        ] {
            let der = certificate(&subject, usages, None);
            let peer = PeerIdentity::from_agent_certificate(&der);
            let none = Err(IdentityError::NoRole);
            assert_eq!(peer, none, "{subject:?} {usages:?}");
        }
    }

    #[test]
    fn a_role_of_ours_decides_the_domain_whatever_the_subject_says() {
        let good = subject("system:node:worker-1", "system:nodes");
        let der = certificate(&good, CLIENT, Some("culvert://agent/worker-2"));
        let peer = PeerIdentity::from_agent_certificate(&der).unwrap();
        assert_eq!(peer.domain, TrustDomain::Tunnel);
        assert_eq!(peer.node().unwrap().as_str(), "worker-2");
        let damaged = certificate(&good, CLIENT, Some("culvert://agent/"));
        let peer = PeerIdentity::from_agent_certificate(&damaged);
        assert_eq!(peer, Err(IdentityError::NoRole));
    }
}
