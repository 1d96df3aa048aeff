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
    use rcgen::ExtendedKeyUsagePurpose::{self, Any, ClientAuth, ServerAuth};
    use rcgen::{DnType, DnValue};

    use super::super::tests::certificate;
    use super::super::{IdentityError, PeerIdentity, TrustDomain};

    fn subject(user: &str, group: &str) -> Vec<(DnType, DnValue)> {
        vec![
            (DnType::OrganizationName, group.into()),
            (DnType::CommonName, user.into()),
        ]
    }

    fn identity(
        subject: &[(DnType, DnValue)],
        usages: &[ExtendedKeyUsagePurpose],
        uris: &[&str],
    ) -> Result<PeerIdentity, IdentityError> {
        let der = certificate(subject.to_vec(), usages, uris);
        PeerIdentity::from_agent_certificate(&der)
    }

    #[test]
    fn kubelets_certificate_names_its_node_in_the_domain_of_the_cluster() {
        let numbers = subject("system:node:10.0.0.1", "system:nodes");
        let peer = identity(&numbers, &[ClientAuth], &[]).unwrap();
        assert_eq!(peer.node().unwrap().as_str(), "10.0.0.1");
        let subject = subject("system:node:worker-1.site.example", "system:nodes");
        let peer = identity(&subject, &[ClientAuth], &[]).unwrap();
        assert_eq!(peer.node().unwrap().as_str(), "worker-1.site.example");
        assert_eq!(peer.domain, TrustDomain::Cluster);
        // The certificate has no `culvert` role, whichever CA signed it.
        let tunnel = PeerIdentity::from_certificate(&certificate(subject, &[ClientAuth], &[]));
        assert_eq!(tunnel, Err(IdentityError::NoRole));
    }

    #[test]
    fn whatever_differs_from_a_kubelets_certificate_names_nobody() {
        let good = subject("system:node:worker-1", "system:nodes");
        let nodes = "system:nodes";
        let [group, user] = [&good[..1], &good[1..]].map(<[_]>::to_vec);
        for (subject, usages) in [
            (subject("worker-1", nodes), &[ClientAuth][..]),
            (subject("system:node:", nodes), &[ClientAuth]),
            (subject("system:node:A", nodes), &[ClientAuth]),
            (subject("system:node:a.", nodes), &[ClientAuth]),
            (subject("system:node:a_b", nodes), &[ClientAuth]),
            (subject("system:nodes:a", nodes), &[ClientAuth]),
            (subject("system:node:a", "system:masters"), &[ClientAuth]),
            (subject("system:node:a", "system:node"), &[ClientAuth]),
            (user, &[ClientAuth]),
            (group, &[ClientAuth]),
            (good.clone(), &[ServerAuth]),
            (good.clone(), &[Any]),
            (good, &[]),
        ] {
            let peer = identity(&subject, usages, &[]);
            let none = Err(IdentityError::NoRole);
            assert_eq!(peer, none, "{subject:?} {usages:?}");
        }
    }

    #[test]
    fn a_role_of_ours_decides_the_domain_whatever_the_subject_says() {
        let good = subject("system:node:worker-1", "system:nodes");
        let peer = identity(&good, &[ClientAuth], &["culvert://agent/worker-2"]).unwrap();
        assert_eq!(peer.domain, TrustDomain::Tunnel);
        assert_eq!(peer.node().unwrap().as_str(), "worker-2");
        let damaged = identity(&good, &[ClientAuth], &["culvert://agent/"]);
        assert_eq!(damaged, Err(IdentityError::NoRole));
    }
}
