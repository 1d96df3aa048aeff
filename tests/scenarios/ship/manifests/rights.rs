//! Compares the rights of the manifests, and the objects that they are for, with those of the code.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tunnel_server::cluster::objects::Right;
use tunnel_tests::cluster::{SERVICE_ACCOUNT, server_roles_of};
use tunnel_tests::manifests::{find, items};

use super::{overlays, workloads};

#[test]
fn rights_of_the_manifests_are_those_of_the_code_and_the_agent_has_none() -> Result<()> {
    for (overlay, objects) in overlays()? {
        let [(_, _, server), _] = workloads(&objects)?;
        let roles = server_roles_of(|right| is_needed(right, &server.args));
        let wanted: BTreeSet<_> = roles.iter().flat_map(rights).collect();
        let of_kind = |end: &str| {
            let is_of_kind = |object: &&Value| {
                let kind = object["kind"].as_str();
                kind.is_some_and(|kind| kind.ends_with(end))
            };
            objects.iter().filter(is_of_kind).collect::<Vec<_>>()
        };
        let found: BTreeSet<_> = of_kind("Role").into_iter().flat_map(rights).collect();
        let more: Vec<_> = found.difference(&wanted).collect();
        let less: Vec<_> = wanted.difference(&found).collect();
        ensure!(
            more.is_empty() && less.is_empty(),
            "{overlay}: too many {more:#?}, missing {less:#?}"
        );
        let (namespace, name) = SERVICE_ACCOUNT;
        let namespace = match overlay {
            "namespace" => "culvert",
            _ => namespace,
        };
        let subject = json!([{ "kind": "ServiceAccount", "name": name, "namespace": namespace }]);
        for binding in of_kind("RoleBinding") {
            ensure!(binding["subjects"] == subject, "{overlay}: {binding}");
        }
    }
    Ok(())
}

/// The server has no right to create the objects that it fills, so the manifests contain each of
/// them, without content. If a manifest contained a key, applying the manifest again would empty
/// that key or the others.
#[test]
fn objects_that_the_server_fills_are_shipped_without_content() -> Result<()> {
    for (overlay, objects) in overlays()? {
        let [(_, _, server), _] = workloads(&objects)?;
        let mut checked = 0;
        for role in server_roles_of(|right| is_needed(right, &server.args)) {
            for rule in items(&role["rules"]) {
                let is_for_tokens = role["metadata"]["name"] == "tunnel-server-tokens";
                let creates = items(&rule["verbs"]).any(|verb| verb == "create") && !is_for_tokens;
                let kind = match rule["resources"][0].as_str() {
                    Some("configmaps") => "ConfigMap",
                    Some("secrets") => "Secret",
                    Some("leases") => "Lease",
                    _ => continue,
                };
                ensure!(!creates, "{overlay}: {rule}");
                if !items(&rule["verbs"]).any(|verb| verb == "update") {
                    continue;
                }
                for name in items(&rule["resourceNames"]) {
                    let name = name.as_str().context("a name")?;
                    let object = find(&objects, kind, name).context(overlay)?;
                    for content in ["data", "binaryData", "stringData", "spec"] {
                        ensure!(object.get(content).is_none(), "{overlay}: {object}");
                    }
                    checked += 1;
                }
            }
        }
        ensure!(checked >= 5, "{overlay}: {checked}");
    }
    Ok(())
}

/// Returns whether a server with these arguments needs the right. Some rights belong to a flag.
fn is_needed(right: &Right, args: &[String]) -> bool {
    let has = |flag: &str| args.iter().any(|word| word.split('=').next() == Some(flag));
    match (right.resource, right.scope) {
        ("servicecidrs", _) => has("--connect-uds") || has("--connect-listen"),
        ("certificatesigningrequests", _) => has("--target-cert-signer"),
        ("endpointslices", _) => !has("--single-replica"),
        _ => true,
    }
}

/// Returns each right of a role separately: kind of role, group, resource, name, verb.
fn rights(role: &Value) -> Vec<[String; 5]> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut rights = Vec::new();
    for rule in items(&role["rules"]) {
        let any = json!(["any"]);
        let names = rule.get("resourceNames").unwrap_or(&any);
        for (group, resource) in items(&rule["apiGroups"])
            .flat_map(|group| items(&rule["resources"]).map(move |resource| (group, resource)))
        {
            for (name, verb) in
                items(names).flat_map(|name| items(&rule["verbs"]).map(move |verb| (name, verb)))
            {
                let is_for_tokens = text(&role["metadata"]["namespace"]).ends_with("-tokens");
                let of = if is_for_tokens { " of tokens" } else { "" };
                let kind = text(&role["kind"]) + of;
                rights.push([kind, text(group), text(resource), text(name), text(verb)]);
            }
        }
    }
    rights
}
