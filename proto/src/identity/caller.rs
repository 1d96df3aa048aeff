//! Certificates of callers. A caller's certificate has one name and is never a kubelet's or a
//! server's certificate.

use rustls_pki_types::CertificateDer;
use x509_parser::prelude::{AttributeTypeAndValue, FromDer, X509Certificate};

use super::kubelet::{NODE_USER_PREFIX, NODES_GROUP, single_value};
use super::{Role, role_of};

/// The reason why a verified certificate does not identify a caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CallerError {
    /// The certificate does not parse.
    #[error("the client certificate is malformed")]
    Malformed,
    /// The subject has no common name, several, an empty one, or one that is not text.
    #[error(
        "the client certificate does not have exactly one common name; use a certificate whose subject names the caller"
    )]
    NoSingleName,
    /// The subject has the organization `system:nodes`, or a node's common name.
    #[error(
        "the client certificate belongs to a kubelet, and kubelets cannot be callers; use another certificate"
    )]
    Kubelet,
    /// The certificate has the role of an agent: one edge node must not reach the others.
    #[error(
        "the client certificate belongs to an agent of the tunnel, which cannot be a caller; use another certificate"
    )]
    Agent,
    /// The certificate has the role of a server towards other servers, or roles that do not parse.
    #[error(
        "the client certificate belongs to a server of the tunnel, which cannot be a caller; use another certificate"
    )]
    Peer,
}

/// Returns the name of the caller with this certificate. The certificate must have been verified
/// before.
///
/// A cluster's CA also signs kubelet certificates, and one edge node must not reach the others. The
/// function rejects every subject that has a node's organization or common name, in any case and
/// encoding, and whatever else the subject contains. kube-apiserver compares exactly, but a subject
/// that only resembles a kubelet's is rejected, too.
///
/// # Errors
/// [`CallerError`].
pub fn caller_name(der: &CertificateDer<'_>) -> Result<String, CallerError> {
    let (_, certificate) =
        X509Certificate::from_der(der).map_err(|_parse| CallerError::Malformed)?;
    let subject = certificate.subject();
    let is_node = |name: &AttributeTypeAndValue<'_>| {
        normalized(name).starts_with(NODE_USER_PREFIX.as_bytes())
    };
    let is_node_group =
        |group: &AttributeTypeAndValue<'_>| normalized(group) == NODES_GROUP.as_bytes();
    if subject.iter_common_name().any(is_node) || subject.iter_organization().any(is_node_group) {
        return Err(CallerError::Kubelet);
    }
    match role_of(&certificate) {
        Ok(None | Some((Role::Server, _))) => {}
        Ok(Some((Role::Agent(_), _))) => return Err(CallerError::Agent),
        Ok(Some((Role::Peer(_), _))) | Err(_) => return Err(CallerError::Peer),
    }
    let name = single_value(subject.iter_common_name()).filter(|name| !name.is_empty());
    name.map(str::to_owned).ok_or(CallerError::NoSingleName)
}

/// Returns a value's ASCII text in lower case, without surrounding blanks. NUL bytes are removed,
/// so that BMPString and UniversalString read like UTF8String.
fn normalized(value: &AttributeTypeAndValue<'_>) -> Vec<u8> {
    let bytes = value.as_slice().iter().filter(|byte| **byte != 0);
    let lower: Vec<u8> = bytes.map(u8::to_ascii_lowercase).collect();
    lower.trim_ascii().to_vec()
}

#[cfg(test)]
mod tests {
    use rcgen::string::{BmpString, TeletexString};
    use rcgen::{DnType, DnValue};

    use super::super::tests::certificate;
    use super::*;

    fn name(subject: Vec<(DnType, DnValue)>) -> Result<String, CallerError> {
        caller_name(&certificate(subject, &[], &[]))
    }

    fn text(value: &str) -> DnValue {
        value.into()
    }

    /// Returns a subject with another common name.
    fn two_names(second: DnValue) -> Vec<(DnType, DnValue)> {
        // A second type for common names, because rcgen accepts each type only once.
        let kind = DnType::CustomDnType(vec![2, 5, 4, 3]);
        let first = (DnType::CommonName, text("prometheus"));
        vec![first, (kind, second)]
    }

    #[test]
    fn callers_are_named_by_their_one_common_name() {
        for (caller, groups) in [
            ("kube-apiserver-kubelet-client", "system:masters"),
            ("prometheus", "monitoring"),
            ("system:nodes", "system:node"),
            ("system:kube-controller-manager", "system:nodes2"),
            ("a system:node:b", "x system:nodes"),
        ] {
            let subject = vec![
                (DnType::OrganizationName, text(groups)),
                (DnType::CommonName, text(caller)),
            ];
            assert_eq!(name(subject), Ok(caller.to_owned()));
        }
    }

    #[test]
    fn what_has_a_kubelets_name_or_group_is_no_caller_in_any_form() {
        let bmp = |text: &str| DnValue::BmpString(BmpString::try_from(text).unwrap());
        let teletex = |text: &str| DnValue::TeletexString(TeletexString::try_from(text).unwrap());
        for kubelet in [
            text("system:node:edge-1"),
            text("System:Node:edge-1"),
            text("SYSTEM:NODE:"),
            text(" system:node:edge-1"),
            bmp("system:node:edge-1"),
            teletex("system:node:edge-1"),
        ] {
            let alone = vec![(DnType::CommonName, kubelet.clone())];
            let second = two_names(kubelet.clone());
            for subject in [alone, second] {
                assert_eq!(name(subject), Err(CallerError::Kubelet), "{kubelet:?}");
            }
        }
        for group in [
            text("system:nodes"),
            text("System:Nodes"),
            text("system:nodes "),
            bmp("system:nodes"),
            teletex("system:nodes"),
        ] {
            for caller in [Some("prometheus"), None] {
                let mut subject = vec![(DnType::OrganizationName, group.clone())];
                subject.extend(caller.map(|caller| (DnType::CommonName, text(caller))));
                let result = name(subject);
                assert_eq!(result, Err(CallerError::Kubelet), "{group:?} {caller:?}");
            }
        }
    }

    #[test]
    fn servers_role_towards_other_servers_is_no_caller() {
        for uris in [
            &["culvert://peer/server-1"][..],
            &["culvert://agent/worker-1", "culvert://peer/server-1"],
        ] {
            let subject = vec![(DnType::CommonName, text("prometheus"))];
            let result = caller_name(&certificate(subject, &[], uris));
            assert_eq!(result, Err(CallerError::Peer), "{uris:?}");
        }
    }

    /// Where callers and agents have one CA.
    #[test]
    fn agent_is_no_caller_whatever_its_node_is_called() {
        for node in ["worker-1", "kube-apiserver-kubelet-client"] {
            let (subject, uri) = (
                vec![(DnType::CommonName, text(node))],
                format!("culvert://agent/{node}"),
            );
            let result = caller_name(&certificate(subject, &[], &[uri.as_str()]));
            assert_eq!(result, Err(CallerError::Agent), "{node}");
        }
    }

    #[test]
    fn a_subject_without_exactly_one_name_is_no_caller() {
        for subject in [
            vec![],
            vec![(DnType::CommonName, text(""))],
            vec![(DnType::OrganizationName, text("system:masters"))],
            two_names(text("prometheus")),
        ] {
            let result = name(subject.clone());
            assert_eq!(result, Err(CallerError::NoSingleName), "{subject:?}");
        }
        let junk = CertificateDer::from(vec![1, 2, 3]);
        assert_eq!(caller_name(&junk), Err(CallerError::Malformed));
    }
}
