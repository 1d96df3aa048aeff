//! Settings of TLS to https targets: verification, the server's own client certificate, and
//! client-certificate delegation.

use std::path::PathBuf;

use tunnel_process::settings::ConfigErrors;
use tunnel_proto::tls::files::KeyPairFiles;

use super::RawConfig;

/// Common name that kubeadm and most installers use for kube-apiserver's client certificate for
/// kubelets.
pub const APISERVER_NAME: &str = "kube-apiserver-kubelet-client";

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TargetSettings {
    /// CA to which certificates of targets must chain; without it they are not verified.
    pub ca: Option<PathBuf>,
    /// Certificate chain and key of the server's own client certificate.
    pub identity: Option<KeyPairFiles>,
    /// `signerName` of the cluster's signer that issues the client certificate, instead of files.
    pub signer: Option<String>,
    /// Common names of callers that the delegation policy allows.
    pub delegation_callers: Vec<String>,
}

impl TargetSettings {
    /// Checks the settings. `verifies_callers` says whether callers' certificates are verified, and
    /// `has_cluster` whether there is a cluster that can sign a certificate.
    pub(super) fn check(
        raw: &RawConfig,
        verifies_callers: bool,
        has_cluster: bool,
        errors: &mut ConfigErrors,
    ) -> Self {
        let ca = ca(raw, errors);
        let identity = identity(raw, errors);
        let signer = raw.target_cert_signer.clone();
        let identity_setting = match (&identity, &signer) {
            (None, None) => None,
            (Some(_), None) => Some("--target-cert-file"),
            (None, Some(_)) => Some("--target-cert-signer"),
            (Some(_), Some(_)) => {
                errors.add(
                    "--target-cert-signer",
                    "there is a certificate already: --target-cert-file",
                );
                None
            }
        };
        if let Some(name) = &signer {
            check_signer(name, has_cluster, errors);
        }
        if let Some(setting) = identity_setting.filter(|_| !verifies_callers) {
            errors.add(
                setting,
                "client-certificate delegation needs callers' certificates; set --client-ca",
            );
        }
        let can_delegate = identity.is_some() || signer.is_some();
        Self {
            ca,
            identity,
            signer,
            delegation_callers: delegation_callers(raw, can_delegate, errors),
        }
    }
}

fn ca(raw: &RawConfig, errors: &mut ConfigErrors) -> Option<PathBuf> {
    let ca = raw.target_ca.as_ref().map(PathBuf::from);
    let verifies = errors.one_of(
        "--target-tls",
        raw.target_tls.as_deref().unwrap_or("tunnel"),
        &[("tunnel", false), ("verify", true)],
    )?;
    match (verifies, ca) {
        (false, None) => None,
        (false, Some(_)) => {
            errors.add(
                "--target-ca",
                "is of no use without --target-tls verify: certificates of targets are accepted as they are",
            );
            None
        }
        (true, None) => {
            errors.add("--target-tls", "verify needs --target-ca");
            None
        }
        (true, ca) => ca,
    }
}

fn identity(raw: &RawConfig, errors: &mut ConfigErrors) -> Option<KeyPairFiles> {
    match (&raw.target_cert_file, &raw.target_key_file) {
        (Some(certificate), key) => Some(KeyPairFiles {
            certificate: certificate.into(),
            key: key.as_ref().unwrap_or(certificate).into(),
        }),
        (None, None) => None,
        (None, Some(_)) => {
            errors.add("--target-key-file", "needs --target-cert-file too");
            None
        }
    }
}

fn check_signer(name: &str, has_cluster: bool, errors: &mut ConfigErrors) {
    if !is_signer_name(name) {
        errors.add(
            "--target-cert-signer",
            format!("{name:?} is no signer, as kubernetes.io/kube-apiserver-client is"),
        );
    }
    if !has_cluster {
        errors.add("--target-cert-signer", "there is no cluster to ask");
    }
}

fn delegation_callers(
    raw: &RawConfig,
    can_delegate: bool,
    errors: &mut ConfigErrors,
) -> Vec<String> {
    let named = &raw.delegation_allowed_callers;
    if !can_delegate && !named.is_empty() {
        errors.add(
            "--delegation-allowed-callers",
            "has no effect without --target-cert-file or --target-cert-signer",
        );
    }
    if named.iter().any(|name| name.trim().is_empty()) {
        errors.add("--delegation-allowed-callers", "a common name is empty");
    }
    if named.is_empty() {
        vec![APISERVER_NAME.to_owned()]
    } else {
        named.iter().map(|name| name.trim().to_owned()).collect()
    }
}

/// Returns whether `name` has the form `DOMAIN/PATH` of Kubernetes signer names.
fn is_signer_name(name: &str) -> bool {
    let is_part = |part: &str| {
        !part.is_empty()
            && part
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte))
    };
    let parts = name.split_once('/');
    name.len() <= 571 && parts.is_some_and(|(domain, path)| is_part(domain) && is_part(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(yaml: &str, verifies_callers: bool) -> Result<TargetSettings, String> {
        let raw: RawConfig = tunnel_process::yaml::parse(yaml).unwrap().unwrap();
        let mut errors = ConfigErrors::default();
        let settings = TargetSettings::check(&raw, verifies_callers, true, &mut errors);
        errors.finish(settings).map_err(|error| error.to_string())
    }

    #[test]
    fn nothing_is_verified_or_delegated_unless_configured() {
        let settings = checked("{}", true).unwrap();
        assert_eq!((settings.ca, settings.identity), (None, None));
        assert_eq!(settings.delegation_callers, [APISERVER_NAME]);
    }

    #[test]
    fn identity_in_one_file_or_two_for_the_named_callers() {
        let yaml = "{ targetTls: verify, targetCa: /ca, targetCertFile: /own, delegationAllowedCallers: [a, ' b'] }";
        let settings = checked(yaml, true).unwrap();
        let own = settings.identity.unwrap();
        assert_eq!((own.certificate, own.key), ("/own".into(), "/own".into()));
        assert_eq!(settings.delegation_callers, ["a", "b"]);
        let settings = checked("{ targetCertFile: /own, targetKeyFile: /key }", true).unwrap();
        assert_eq!(settings.identity.unwrap().key, PathBuf::from("/key"));
    }

    #[test]
    fn settings_without_effect_are_errors() {
        let two_identities = "{ targetCertFile: /own, targetCertSigner: a/b }";
        let no_name = "{ targetCertFile: /own, delegationAllowedCallers: [a, ''] }";
        let callers = "--delegation-allowed-callers";
        for (yaml, asks, setting) in [
            ("targetTls: strict", true, "--target-tls"),
            ("targetTls: verify", true, "--target-tls"),
            ("targetCa: /ca", true, "--target-ca"),
            ("targetKeyFile: /key", true, "--target-key-file"),
            ("targetCertFile: /own", false, "--target-cert-file"),
            ("targetCertSigner: a/b", false, "--target-cert-signer"),
            ("targetCertSigner: client", true, "--target-cert-signer"),
            (two_identities, true, "--target-cert-signer"),
            ("delegationAllowedCallers: [a]", true, callers),
            (no_name, true, callers),
        ] {
            let error = checked(yaml, asks).unwrap_err();
            assert!(error.contains("1 error(s)"), "{yaml}: {error}");
            assert!(error.contains(setting), "{yaml}: {error}");
        }
    }
}
