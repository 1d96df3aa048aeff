//! A request for objects: its parameters, and the action of each verb.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use serde_json::{Value, json};

use super::access::{self, Action, User};
use super::defaulting::{born, complete, key, preserve_server_fields, set_address};
use super::kinds::Address;
use super::patch;
use super::protobuf;
use super::selector::Selector;
use super::status::Status;
use super::store::{Content, Key, Store};

/// A request for objects, with its body read.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) user: User,
    pub(super) verb: &'static str,
    pub(super) address: Address,
    pub(super) query: Query,
    pub(super) content_type: String,
    pub(super) body: Vec<u8>,
}

/// The parameters of a request.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Query(HashMap<String, String>);

impl Query {
    pub(super) fn parse(text: &str) -> Self {
        Self(
            form_urlencoded::parse(text.as_bytes())
                .into_owned()
                .collect(),
        )
    }

    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.0
            .get(name)
            .map(String::as_str)
            .filter(|value| !value.is_empty())
    }

    pub(super) fn is_true(&self, name: &str) -> bool {
        matches!(self.get(name), Some("true" | "1"))
    }

    /// Returns a revision; absent and 0 are `None`.
    pub(super) fn revision(&self) -> Result<Option<u64>, Status> {
        match self.get("resourceVersion") {
            None | Some("0") => Ok(None),
            Some(text) => match text.parse() {
                Ok(number) => Ok(Some(number)),
                Err(error) => Err(Status::bad_request(format!("revision {text:?}: {error}"))),
            },
        }
    }
}

/// The answer to a request.
#[derive(Debug)]
pub(super) enum Answer {
    Object(u16, Arc<Value>),
    /// A list: its objects and its metadata.
    List(Vec<Arc<Value>>, Value),
}

impl Request {
    /// Returns the selectors of the parameters.
    pub(super) fn selector(&self) -> Result<Selector, Status> {
        Selector::parse(
            self.query.get("labelSelector"),
            self.query.get("fieldSelector"),
        )
    }

    /// Checks that the user is authorized.
    ///
    /// # Errors
    /// Returns 403 if not.
    pub(super) fn authorize(&self, store: &Store) -> Result<(), Status> {
        let selector = self.selector()?;
        let name = self
            .address
            .name
            .as_deref()
            .or_else(|| selector.only_name());
        let action = Action::new(self.verb, &self.address, name);
        store.read(|content| access::check(content, &self.user, &action))
    }

    /// Executes the verb. Watches are not handled here.
    pub(super) fn serve(&self, store: &Store, families: &[IpAddr]) -> Result<Answer, Status> {
        match self.verb {
            "get" => store
                .read(|content| self.lookup(content).cloned())
                .map(|object| Answer::Object(200, object)),
            "list" => self.list(store),
            "create" => store.write(|content| self.create(content, families)),
            "update" => store.write(|content| self.update(content, families)),
            "patch" => store.write(|content| self.patch(content, families)),
            "delete" => store.write(|content| self.delete(content)),
            _ => Err(Status::method_not_allowed()),
        }
    }

    fn key(&self, name: &str) -> Key {
        key(self.address.kind, self.address.namespace.as_deref(), name)
    }

    fn name(&self) -> &str {
        self.address.name.as_deref().unwrap_or_default()
    }

    fn lookup<'a>(&self, content: &'a Content) -> Result<&'a Arc<Value>, Status> {
        content
            .get(&self.key(self.name()))
            .ok_or_else(|| Status::not_found(self.address.kind, self.name()))
    }

    fn list(&self, store: &Store) -> Result<Answer, Status> {
        let selector = self.selector()?;
        let limit: usize = self
            .query
            .get("limit")
            .and_then(|limit| limit.parse().ok())
            .unwrap_or(0);
        let resume = self.query.get("continue").map(|token| {
            let mut parts = token.splitn(3, ':');
            let revision = parts
                .next()
                .and_then(|revision| revision.parse::<u64>().ok());
            let after = (
                parts.next().unwrap_or_default().to_owned(),
                parts.next().unwrap_or_default().to_owned(),
            );
            revision
                .map(|revision| (revision, after))
                .ok_or_else(|| Status::bad_request("continue key is not valid"))
        });
        let resume = resume.transpose()?;
        store.read(|content| {
            let revision = match &resume {
                Some((revision, _)) => *revision,
                None => content.revision(),
            };
            let after = resume.map(|(_, after)| after);
            let objects = content.collection_at(
                self.address.kind.storage(),
                self.address.namespace.as_deref(),
                revision,
            );
            let mut rest = objects
                .into_iter()
                .filter(|(key, _)| {
                    after.as_ref().is_none_or(|(namespace, name)| {
                        (&key.namespace, &key.name) > (namespace, name)
                    })
                })
                .filter(|(_, object)| selector.fits(object));
            let mut page = Vec::new();
            let mut last = None;
            for (key, object) in rest.by_ref() {
                page.push(object);
                if limit > 0 && page.len() == limit {
                    last = Some(key);
                    break;
                }
            }
            let left = rest.count();
            let mut metadata = json!({ "resourceVersion": revision.to_string() });
            if let (Some(last), 1..) = (last, left) {
                metadata["continue"] =
                    format!("{revision}:{}:{}", last.namespace, last.name).into();
                if selector.is_empty() {
                    metadata["remainingItemCount"] = left.into();
                }
            }
            Ok(Answer::List(page, metadata))
        })
    }

    /// Returns the object in the body.
    pub(super) fn sent(&self) -> Result<Value, Status> {
        if self.content_type.starts_with(protobuf::MEDIA_TYPE) {
            return protobuf::read(&self.body);
        }
        serde_json::from_slice(&self.body).map_err(|error| Status::bad_request(error.to_string()))
    }

    fn may_create(&self, content: &Content) -> Result<(), Status> {
        access::check(
            content,
            &self.user,
            &Action::new("create", &self.address, self.address.name.as_deref()),
        )
    }

    fn create(&self, content: &mut Content, families: &[IpAddr]) -> Result<Answer, Status> {
        let mut object = self.sent()?;
        set_address(&self.address, &mut object);
        self.insert(content, object, families)
    }

    fn insert(
        &self,
        content: &mut Content,
        mut object: Value,
        families: &[IpAddr],
    ) -> Result<Answer, Status> {
        let kind = self.address.kind;
        let name = object["metadata"]["name"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        if let Some(namespace) = &self.address.namespace
            && content
                .get(&Key {
                    storage: "namespaces",
                    namespace: String::new(),
                    name: namespace.clone(),
                })
                .is_none()
        {
            return Err(Status::new(
                404,
                "NotFound",
                format!("namespaces {namespace:?} not found"),
            ));
        }
        if content.get(&self.key(&name)).is_some() {
            return Err(Status::already_exists(kind, &name));
        }
        born(kind, &mut object);
        complete(kind, &mut object, None, content, families);
        let stored = self.keep(content, &name, object);
        Ok(Answer::Object(201, stored))
    }

    /// Stores the object, unless the request is a dry run.
    fn keep(&self, content: &mut Content, name: &str, object: Value) -> Arc<Value> {
        if self.query.get("dryRun").is_some() {
            return Arc::new(object);
        }
        content.put(self.key(name), object)
    }

    fn update(&self, content: &mut Content, families: &[IpAddr]) -> Result<Answer, Status> {
        let mut object = self.sent()?;
        set_address(&self.address, &mut object);
        let old = self.lookup(content)?.clone();
        self.replace(content, &old, object, families)
    }

    fn patch(&self, content: &mut Content, families: &[IpAddr]) -> Result<Answer, Status> {
        let patch = if self.content_type.starts_with(APPLY) {
            // JSON is YAML, and all clients here send JSON or simple YAML.
            serde_saphyr::from_slice::<Value>(&self.body)
                .map_err(|error| Status::bad_request(format!("error decoding YAML: {error}")))?
        } else {
            self.sent()?
        };
        let old = self.lookup(content).cloned();
        if self.content_type.starts_with(APPLY) && old.is_err() {
            self.may_create(content)?;
            let mut new = patch;
            set_address(&self.address, &mut new);
            return self.insert(content, new, families);
        }
        let old = old?;
        let mut new = Value::clone(&old);
        match self
            .content_type
            .split(';')
            .next()
            .unwrap_or_default()
            .trim()
        {
            "application/merge-patch+json" | APPLY => json_patch::merge(&mut new, &patch),
            "application/strategic-merge-patch+json" => patch::strategic(&mut new, &patch),
            "application/json-patch+json" => {
                let operations: json_patch::Patch = serde_json::from_value(patch)
                    .map_err(|error| Status::bad_request(error.to_string()))?;
                json_patch::patch(&mut new, &operations)
                    .map_err(|error| Status::new(422, "Invalid", error.to_string()))?;
            }
            other => return Err(Status::bad_request(format!("a patch of type {other}"))),
        }
        set_address(&self.address, &mut new);
        self.replace(content, &old, new, families)
    }

    fn replace(
        &self,
        content: &mut Content,
        old: &Arc<Value>,
        mut new: Value,
        families: &[IpAddr],
    ) -> Result<Answer, Status> {
        let kind = self.address.kind;
        for precondition in ["resourceVersion", "uid"] {
            let sent = new["metadata"][precondition]
                .as_str()
                .filter(|sent| !sent.is_empty());
            if sent.is_some_and(|sent| old["metadata"][precondition] != sent) {
                return Err(Status::conflict(kind, self.name()));
            }
        }
        preserve_server_fields(kind, old, &mut new, self.address.subresource.as_deref());
        complete(kind, &mut new, Some(old), content, families);
        // As in the real API server, a write that changes nothing keeps the revision.
        if **old == new {
            return Ok(Answer::Object(200, Arc::clone(old)));
        }
        let stored = self.keep(content, self.name(), new);
        Ok(Answer::Object(200, stored))
    }

    fn delete(&self, content: &mut Content) -> Result<Answer, Status> {
        let kind = self.address.kind;
        let old = self.lookup(content)?.clone();
        let options: Value = if self.body.is_empty() {
            Value::Null
        } else {
            self.sent()?
        };
        for precondition in ["resourceVersion", "uid"] {
            let wanted = &options["preconditions"][precondition];
            if !wanted.is_null() && *wanted != old["metadata"][precondition] {
                return Err(Status::conflict(kind, self.name()));
            }
        }
        let details =
            json!({ "name": self.name(), "kind": kind.plural, "uid": old["metadata"]["uid"] });
        let done = json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details });
        self.remove(content, &self.key(self.name()));
        Ok(Answer::Object(200, Arc::new(done)))
    }

    /// Removes an object. A Service's Endpoints are removed with it, as in the real API server
    /// (`pkg/registry/core/service/storage`, `afterDelete`).
    fn remove(&self, content: &mut Content, key: &Key) {
        content.remove(key);
        if self.address.kind.kind == "Service" {
            content.remove(&Key {
                storage: "endpoints",
                ..key.clone()
            });
        }
    }
}

/// Content type of server-side apply.
const APPLY: &str = "application/apply-patch+yaml";
