//! The identity of a request, and authorization by the roles in the store.

use serde_json::Value;

use super::kinds::{Address, Kind};
use super::status::Status;
use super::store::{Content, Key};
use crate::manifests::items;

/// The sender of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// User name; `system:serviceaccount:NAMESPACE:NAME` for a ServiceAccount.
    pub name: String,
    /// All groups, including `system:authenticated`.
    pub groups: Vec<String>,
}

impl User {
    /// Returns a user with all permissions.
    pub fn admin() -> Self {
        Self {
            name: "kubernetes-admin".into(),
            groups: vec![MASTERS.into(), "system:authenticated".into()],
        }
    }

    pub fn service_account(namespace: &str, name: &str) -> Self {
        let groups = [
            "system:serviceaccounts".into(),
            format!("system:serviceaccounts:{namespace}"),
            "system:authenticated".into(),
        ];
        Self {
            name: format!("system:serviceaccount:{namespace}:{name}"),
            groups: groups.to_vec(),
        }
    }

    fn is_master(&self) -> bool {
        self.groups.iter().any(|group| group == MASTERS)
    }

    fn is(&self, subject: &Value) -> bool {
        let name = subject["name"].as_str().unwrap_or_default();
        match subject["kind"].as_str() {
            Some("User") => name == self.name,
            Some("Group") => self.groups.iter().any(|group| group == name),
            Some("ServiceAccount") => {
                let namespace = subject["namespace"].as_str().unwrap_or_default();
                self.name == format!("system:serviceaccount:{namespace}:{name}")
            }
            _ => false,
        }
    }
}

/// The action that a request asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Action {
    pub(super) verb: String,
    pub(super) group: String,
    /// Resource with its subresource: `nodes/status`.
    pub(super) resource: String,
    pub(super) namespace: Option<String>,
    pub(super) name: Option<String>,
}

impl Action {
    /// Creates the action; `name` is that of the object, or the only one that a field selector
    /// leaves.
    pub(super) fn new(verb: &str, address: &Address, name: Option<&str>) -> Self {
        let resource = match &address.subresource {
            Some(sub) => format!("{}/{sub}", address.kind.plural),
            None => address.kind.plural.to_owned(),
        };
        Self {
            verb: verb.to_owned(),
            group: address.kind.group.to_owned(),
            resource,
            namespace: address.namespace.clone(),
            name: name.map(str::to_owned),
        }
    }

    fn forbidden(&self, user: &User) -> Status {
        let plural = self.resource.split('/').next().unwrap_or_default();
        let what =
            Kind::find(&self.group, plural).map_or_else(|| plural.to_owned(), Kind::qualified);
        let name = self
            .name
            .as_ref()
            .map(|name| format!(" {name:?}"))
            .unwrap_or_default();
        let scope = match &self.namespace {
            Some(namespace) => format!("in the namespace {namespace:?}"),
            None => "at the cluster scope".to_owned(),
        };
        let message = format!(
            "{what}{name} is forbidden: User {:?} cannot {} resource {:?} in API group {:?} {scope}",
            user.name, self.verb, self.resource, self.group
        );
        Status::new(403, "Forbidden", message)
    }

    fn allowed_by(&self, rule: &Value) -> bool {
        let mut names = items(&rule["resourceNames"]).peekable();
        // A subresource also matches `*/SUBRESOURCE`.
        let any_parent = self
            .resource
            .split_once('/')
            .map(|(_, sub)| format!("*/{sub}"));
        lists(&rule["verbs"], &self.verb)
            && lists(&rule["apiGroups"], &self.group)
            && (lists(&rule["resources"], &self.resource)
                || any_parent.is_some_and(|any| lists(&rule["resources"], &any)))
            && (names.peek().is_none()
                || names.any(|allowed| allowed.as_str() == self.name.as_deref()))
    }
}

fn lists(list: &Value, wanted: &str) -> bool {
    items(list).any(|item| item == wanted || item == "*")
}

/// Returns whether a rule allows a path that is no resource, such as `/version`.
fn allows_path(rule: &Value, verb: &str, path: &str) -> bool {
    let is_listed = |url: &Value| {
        let url = url.as_str().unwrap_or_default();
        url == path || (url.strip_suffix('*')).is_some_and(|prefix| path.starts_with(prefix))
    };
    lists(&rule["verbs"], verb) && items(&rule["nonResourceURLs"]).any(is_listed)
}

/// Checks that a role bound to `user` allows the action.
///
/// # Errors
/// Returns 403 with the message of the real API server.
pub(super) fn check(content: &Content, user: &User, action: &Action) -> Result<(), Status> {
    let namespace = action.namespace.as_deref();
    if user.is_master() || rules(content, user, namespace).any(|rule| action.allowed_by(rule)) {
        return Ok(());
    }
    Err(action.forbidden(user))
}

/// Returns the rules of the roles that are bound to the user in the cluster and in `namespace`.
fn rules<'a>(
    content: &'a Content,
    user: &'a User,
    namespace: Option<&'a str>,
) -> impl Iterator<Item = &'a Value> {
    let everywhere = content.collection("clusterrolebindings", None);
    let here = namespace
        .into_iter()
        .flat_map(move |namespace| content.collection("rolebindings", Some(namespace)));
    everywhere
        .chain(here)
        .map(|(_, binding)| binding)
        .filter(move |binding| items(&binding["subjects"]).any(|subject| user.is(subject)))
        .filter_map(move |binding| {
            let (storage, namespace) = match binding["roleRef"]["kind"].as_str() {
                Some("Role") => ("roles", namespace.unwrap_or_default()),
                _ => ("clusterroles", ""),
            };
            let name = binding["roleRef"]["name"].as_str().unwrap_or_default();
            content.get(&Key {
                storage,
                namespace: namespace.to_owned(),
                name: name.to_owned(),
            })
        })
        .flat_map(|role| items(&role["rules"]))
}

/// Answers a SubjectAccessReview, or a SelfSubjectAccessReview of `user`.
pub(super) fn review(content: &Content, user: &User, kind: &Kind, review: &Value) -> Value {
    let spec = &review["spec"];
    let user = match kind.kind {
        "SubjectAccessReview" => User {
            name: text(&spec["user"]).unwrap_or_default(),
            groups: items(&spec["groups"]).filter_map(text).collect(),
        },
        _ => user.clone(),
    };
    let outcome = match text(&spec["nonResourceAttributes"]["path"]) {
        Some(path) => {
            let verb = text(&spec["nonResourceAttributes"]["verb"]).unwrap_or_default();
            check_path(content, &user, &verb, &path)
        }
        None => check(content, &user, &asked(&spec["resourceAttributes"])),
    };
    let mut answer = review.clone();
    answer["kind"] = kind.kind.into();
    answer["apiVersion"] = kind.api_version().into();
    answer["status"] = match outcome {
        Ok(()) => serde_json::json!({ "allowed": true }),
        Err(status) => serde_json::json!({ "allowed": false, "reason": status.message }),
    };
    answer
}

/// Paths that are no resources have no namespace, so only bindings of the cluster allow them.
fn check_path(content: &Content, user: &User, verb: &str, path: &str) -> Result<(), Status> {
    if user.is_master() || rules(content, user, None).any(|rule| allows_path(rule, verb, path)) {
        return Ok(());
    }
    let message = format!("User {:?} cannot {verb} path {path:?}", user.name);
    Err(Status::new(403, "Forbidden", message))
}

/// Returns the action of a review's `resourceAttributes`.
fn asked(attributes: &Value) -> Action {
    let resource = text(&attributes["resource"]).unwrap_or_default();
    Action {
        verb: text(&attributes["verb"]).unwrap_or_default(),
        group: text(&attributes["group"]).unwrap_or_default(),
        resource: text(&attributes["subresource"])
            .map_or_else(|| resource.clone(), |sub| format!("{resource}/{sub}")),
        namespace: text(&attributes["namespace"]),
        name: text(&attributes["name"]),
    }
}

/// Returns a text that is not empty.
fn text(value: &Value) -> Option<String> {
    value
        .as_str()
        .filter(|text| !text.is_empty())
        .map(str::to_owned)
}

const MASTERS: &str = "system:masters";

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::store::Store;
    use super::*;

    #[test]
    fn role_of_a_namespace_allows_what_it_names_there_and_the_refusal_says_what() {
        let store = Store::new();
        let put = |storage: &'static str, object: Value| {
            let name = object["metadata"]["name"].as_str().unwrap().to_owned();
            let namespace = "ns".into();
            store.write(|content| {
                content.put(
                    Key {
                        storage,
                        namespace,
                        name,
                    },
                    object,
                )
            });
        };
        let rules = json!([{
            "apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["mine"], "verbs": ["get"],
        }]);
        put(
            "roles",
            json!({ "metadata": { "name": "r" }, "rules": rules }),
        );
        let subjects = json!([{ "kind": "ServiceAccount", "namespace": "ns", "name": "sa" }]);
        put(
            "rolebindings",
            json!({
                "metadata": { "name": "b" }, "roleRef": { "kind": "Role", "name": "r" }, "subjects": subjects,
            }),
        );
        let user = User::service_account("ns", "sa");
        let get = |namespace: &str, name: &str| {
            let action = Action {
                verb: "get".into(),
                group: String::new(),
                resource: "configmaps".into(),
                namespace: Some(namespace.into()),
                name: Some(name.into()),
            };
            store.read(|content| check(content, &user, &action))
        };
        assert!(get("ns", "mine").is_ok());
        assert!(get("other", "mine").is_err());
        assert_eq!(
            get("ns", "yours").unwrap_err().message,
            "configmaps \"yours\" is forbidden: User \"system:serviceaccount:ns:sa\" cannot get \
             resource \"configmaps\" in API group \"\" in the namespace \"ns\""
        );
    }

    #[test]
    fn rules_match_subresources_and_paths_with_wildcards() {
        let action = |resource: &str| Action {
            verb: "get".into(),
            group: String::new(),
            resource: resource.into(),
            namespace: None,
            name: None,
        };
        let rule = json!({ "apiGroups": [""], "resources": ["*/log", "nodes"], "verbs": ["*"] });
        assert!(action("nodes/log").allowed_by(&rule));
        assert!(action("nodes").allowed_by(&rule));
        assert!(!action("nodes/proxy").allowed_by(&rule));
        let rule = json!({ "nonResourceURLs": ["/api", "/apis/*"], "verbs": ["get"] });
        assert!(allows_path(&rule, "get", "/api"));
        assert!(allows_path(&rule, "get", "/apis/apps/v1"));
        assert!(!allows_path(&rule, "get", "/api/v1"));
        assert!(!allows_path(&rule, "post", "/api"));
    }
}
