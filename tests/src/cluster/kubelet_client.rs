//! The client certificate for kubelets from `deploy/kubelet-certificate.sh`: the signer that the
//! script waits for, and the rights of the certificate's user.

use std::convert::Infallible;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::{ApiBackend, Cluster};
use crate::apiserver::{REQUESTS, sign};
use crate::ca::TestCa;
use crate::eventually::eventually;
use crate::process::Program;
use crate::tools::Tool;

impl Cluster {
    /// Signs the request of the script once it is approved. Never returns, so that the program that
    /// waits for the certificate ends a `select!`.
    pub async fn sign_for_kubelets(&self) -> Infallible {
        let mut interval = tokio::time::interval(Duration::from_millis(100));
        loop {
            interval.tick().await;
            if self.sign_request("culvert-kubelet-client").await.is_ok() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// A real cluster has no kube-controller-manager, and another CA signs.
    async fn sign_request(&self, name: &str) -> Result<()> {
        match &self.server {
            ApiBackend::FakeApiServer(fake_api) => fake_api.sign_request(name).map(drop),
            ApiBackend::Real(_) => {
                let path = format!("{REQUESTS}/{name}");
                let mut object = self.admin.get(&path).await?.context("no request")?;
                sign(&mut object, TestCa::new("kubernetes")?.issuer())?;
                let status = format!("{path}/status");
                self.admin.replace(&status, &object).await.map(drop)
            }
        }
    }

    /// Checks that the certificate in the Secret of the manifests names one user and no group, and
    /// that this user has the rights of a client of kubelets and no others.
    pub async fn check_kubelet_client(&self) -> Result<()> {
        let secret = self.objects().secret("tunnel-kubelet-client").await?;
        let certificate = secret.get("tls.crt").context("no certificate")?;
        let subject = Program::tool(Tool::Openssl)?
            .args(["x509", "-noout", "-subject", "-nameopt", "RFC2253"])
            .run_with(certificate.as_bytes())
            .await?
            .ok()?;
        let user = subject.trim().strip_prefix("subject=CN=");
        let user = user.context("no common name")?;
        ensure!(user == "culvert-tunnel-server", "{subject}");
        // The authorizer of a real API server sees a new binding some time later.
        eventually("the rights of the user", WATCHED, async || {
            for row in RIGHTS.trim().lines() {
                let mut words = row.split_whitespace();
                let is_expected = words.next() == Some("yes");
                let is_allowed = self.is_allowed(user, words).await?;
                ensure!(is_allowed == is_expected, "allowed: {is_allowed}: {row}");
            }
            Ok(())
        })
        .await;
        Ok(())
    }

    /// Returns the answer to a SubjectAccessReview for a row's verb, group, resource and namespace.
    async fn is_allowed<'a>(
        &self,
        user: &str,
        mut words: impl Iterator<Item = &'a str>,
    ) -> Result<bool> {
        let mut next = || words.next().filter(|word| *word != "-").unwrap_or_default();
        let (verb, group, resource, namespace) = (next(), next(), next(), next());
        let mut spec = json!({ "user": user, "groups": ["system:authenticated"] });
        if resource.starts_with('/') {
            spec["nonResourceAttributes"] = json!({ "verb": verb, "path": resource });
        } else {
            let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
            spec["resourceAttributes"] = json!({
                "verb": verb, "group": group, "resource": resource, "subresource": subresource,
                "namespace": namespace,
            });
        }
        let review = json!({
            "apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec,
        });
        let answer = self.admin.create(REVIEWS, &review).await?;
        answer["status"]["allowed"].as_bool().context("no answer")
    }
}

/// Whether the user may do this, verb, group (`-` for the core), resource or path, and namespace.
/// What is allowed is calls of kubelets, reading Nodes, and what every authenticated user may do.
/// Subresources of `nodes` that only some versions of the ClusterRole have are left out.
const RIGHTS: &str = "
yes get - nodes/proxy
yes create - nodes/proxy
yes get - nodes/log
yes get - nodes/metrics
yes get - nodes/stats
yes proxy - nodes
yes get - nodes
yes list - nodes
yes watch - nodes
yes create authorization.k8s.io selfsubjectaccessreviews
yes get - /version
yes get - /apis/apps/v1
no create - nodes
no update - nodes
no delete - nodes
no patch - nodes/status
no get - secrets kube-system
no list - secrets
no get - configmaps kube-system
no update - configmaps kube-system
no list - pods
no create - pods kube-system
no create - pods/exec kube-system
no get - pods/log kube-system
no create - pods/portforward kube-system
no patch - services kube-system
no get - services/proxy kube-system
no create - serviceaccounts/token kube-system
no impersonate - users
no impersonate - groups
no create apps daemonsets kube-system
no update coordination.k8s.io leases kube-system
no create certificates.k8s.io certificatesigningrequests
no update certificates.k8s.io certificatesigningrequests/approval
no approve certificates.k8s.io signers
no create rbac.authorization.k8s.io clusterrolebindings
no bind rbac.authorization.k8s.io clusterroles
no escalate rbac.authorization.k8s.io clusterroles
no create authentication.k8s.io tokenreviews
no create authorization.k8s.io subjectaccessreviews
no get - /metrics
no get - /logs/
";

const REVIEWS: &str = "/apis/authorization.k8s.io/v1/subjectaccessreviews";

/// Time for the watches of a real API server's authorizer.
const WATCHED: Duration = Duration::from_secs(10);
