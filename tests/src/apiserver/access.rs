//! The identity of a request, and authorization by the roles in the store.

use serde_json::Value;

use super::kinds::{Address, Kind, VERSION};
use super::status::Status;
use super::store::Content;
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
        let lists =
            |list: &str, wanted: &str| items(&rule[list]).any(|item| item == wanted || item == "*");
        let mut names = items(&rule["resourceNames"]).peekable();
        lists("verbs", &self.verb)
            && lists("apiGroups", &self.group)
            && lists("resources", &self.resource)
            && (names.peek().is_none()
                || names.any(|allowed| allowed.as_str() == self.name.as_deref()))
    }
}

/// Checks that a role bound to `user` allows the action.
///
/// # Errors
/// Returns 403 with the message of the real API server.
pub(super) fn check(content: &Content, user: &User, action: &Action) -> Result<(), Status> {
    if user.groups.iter().any(|group| group == MASTERS) || is_for_everybody(action) {
        return Ok(());
    }
    let everywhere = content
        .collection("clusterrolebindings", None)
        .map(|(_, binding)| binding);
    let inside = action.namespace.as_deref();
    let here = inside
        .into_iter()
        .flat_map(|namespace| content.collection("rolebindings", Some(namespace)))
        .map(|(_, binding)| binding);
    let bound = everywhere
        .chain(here)
        .filter(|binding| items(&binding["subjects"]).any(|subject| user.is(subject)));
    for binding in bound {
        let (storage, namespace) = match binding["roleRef"]["kind"].as_str() {
            Some("Role") => ("roles", inside.unwrap_or_default()),
            _ => ("clusterroles", ""),
        };
        let name = binding["roleRef"]["name"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let role = content.get(&super::store::Key {
            storage,
            namespace: namespace.to_owned(),
            name,
        });
        let mut rules = role.into_iter().flat_map(|role| items(&role["rules"]));
        if rules.any(|rule| action.allowed_by(rule)) {
            return Ok(());
        }
    }
    Err(action.forbidden(user))
}

/// Returns whether everyone may do this: self-reviews are bound to `system:authenticated` in every
/// cluster.
fn is_for_everybody(action: &Action) -> bool {
    action.verb == "create" && action.resource == "selfsubjectaccessreviews"
}

pub(super) fn review(content: &Content, user: &User, review: &Value) -> Value {
    let asked = &review["spec"]["resourceAttributes"];
    let text = |field: &str| {
        asked[field]
            .as_str()
            .map(str::to_owned)
            .filter(|text| !text.is_empty())
    };
    let resource = text("resource").unwrap_or_default();
    let action = Action {
        verb: text("verb").unwrap_or_default(),
        group: text("group").unwrap_or_default(),
        resource: text("subresource")
            .map_or_else(|| resource.clone(), |sub| format!("{resource}/{sub}")),
        namespace: text("namespace"),
        name: text("name"),
    };
    let mut answer = review.clone();
    answer["kind"] = "SelfSubjectAccessReview".into();
    answer["apiVersion"] = format!("authorization.k8s.io/{VERSION}").into();
    answer["status"] = match check(content, user, &action) {
        Ok(()) => serde_json::json!({ "allowed": true }),
        Err(status) => serde_json::json!({ "allowed": false, "reason": status.message }),
    };
    answer
}

const MASTERS: &str = "system:masters";

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::store::{Key, Store};
    use super::*;

    fn put(store: &Store, storage: &'static str, namespace: &str, object: Value) {
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        store.write(|content| {
            content.put(
                Key {
                    storage,
                    namespace: namespace.into(),
                    name,
                },
                object,
            )
        });
    }

    #[test]
    fn roles_allow_what_they_name_and_nothing_else() {
        let store = Store::new();
        let rules = json!([
            { "apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["mine"], "verbs": ["get", "patch"] },
            { "apiGroups": [""], "resources": ["configmaps"], "verbs": ["create"] },
        ]);
        put(
            &store,
            "roles",
            "ns",
            json!({ "metadata": { "name": "r" }, "rules": rules }),
        );
        let subjects = json!([{ "kind": "ServiceAccount", "namespace": "ns", "name": "sa" }]);
        put(
            &store,
            "rolebindings",
            "ns",
            json!({
                "metadata": { "name": "b" }, "roleRef": { "kind": "Role", "name": "r" }, "subjects": subjects,
            }),
        );
        let user = User::service_account("ns", "sa");
        let allowed = |verb: &str, namespace: &str, name: Option<&str>| {
            let action = Action {
                verb: verb.into(),
                group: String::new(),
                resource: "configmaps".into(),
                namespace: Some(namespace.into()),
                name: name.map(str::to_owned),
            };
            store.read(|content| check(content, &user, &action))
        };
        assert!(allowed("get", "ns", Some("mine")).is_ok());
        assert!(allowed("create", "ns", None).is_ok());
        assert!(allowed("get", "other", Some("mine")).is_err());
        assert!(allowed("list", "ns", Some("mine")).is_err());
        let refused = allowed("get", "ns", Some("yours")).unwrap_err();
        assert_eq!(
            refused.message,
            "configmaps \"yours\" is forbidden: User \"system:serviceaccount:ns:sa\" cannot get resource \"configmaps\" in API group \"\" in the namespace \"ns\""
        );
    }
}
