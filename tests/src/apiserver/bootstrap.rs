//! The roles and bindings of every cluster that concern an authenticated client and a client of
//! kubelets (`plugin/pkg/auth/authorizer/rbac/bootstrappolicy` of kube-apiserver).

use serde_json::{Value, json};

/// Returns the roles and the bindings, each with the plural name of its kind.
pub(super) fn roles() -> Vec<(&'static str, Value)> {
    let role = |name: &str, rules: Value| {
        let object = json!({ "metadata": { "name": name }, "rules": rules });
        ("clusterroles", object)
    };
    let binding = |name: &str| {
        let group = "rbac.authorization.k8s.io";
        let subject = json!({ "apiGroup": group, "kind": "Group", "name": "system:authenticated" });
        let object = json!({
            "metadata": { "name": name }, "subjects": [subject],
            "roleRef": { "apiGroup": group, "kind": "ClusterRole", "name": name },
        });
        ("clusterrolebindings", object)
    };
    let reviews = ["selfsubjectaccessreviews", "selfsubjectrulesreviews"];
    let paths = [
        "/api",
        "/api/*",
        "/apis",
        "/apis/*",
        "/healthz",
        "/livez",
        "/openapi",
        "/openapi/*",
        "/readyz",
        "/version",
        "/version/",
    ];
    let kubelet = ["nodes/log", "nodes/metrics", "nodes/proxy", "nodes/stats"];
    vec![
        role(
            "system:basic-user",
            json!([
                { "apiGroups": ["authorization.k8s.io"], "resources": reviews, "verbs": ["create"] },
                { "apiGroups": ["authentication.k8s.io"], "resources": ["selfsubjectreviews"], "verbs": ["create"] },
            ]),
        ),
        binding("system:basic-user"),
        role(
            "system:discovery",
            json!([{ "nonResourceURLs": paths, "verbs": ["get"] }]),
        ),
        binding("system:discovery"),
        role(
            "system:kubelet-api-admin",
            json!([
                { "apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch"] },
                { "apiGroups": [""], "resources": ["nodes"], "verbs": ["proxy"] },
                { "apiGroups": [""], "resources": kubelet, "verbs": ["*"] },
            ]),
        ),
    ]
}
