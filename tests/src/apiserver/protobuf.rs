//! Decodes protobuf bodies, which typed clients send from Kubernetes 1.32 on, into JSON: those of
//! `kubectl create` and `kubectl certificate approve`. The messages are those of Kubernetes' `generated.proto`, as far as the tables
//! here contain them.

use std::time::{Duration, UNIX_EPOCH};

use base64::prelude::{BASE64_STANDARD, Engine as _};
use humantime::format_rfc3339_seconds;
use serde_json::{Map, Value};

use super::status::Status;

/// Media type of a protobuf body.
pub(super) const MEDIA_TYPE: &str = "application/vnd.kubernetes.protobuf";

/// Decodes an object.
///
/// # Errors
/// Returns 400 for malformed bodies, and 415 for kinds and fields outside the tables, so that no
/// sent data is lost silently.
pub(super) fn read(body: &[u8]) -> Result<Value, Status> {
    let wrapped = body.strip_prefix(MAGIC).ok_or_else(malformed)?;
    let (mut kind, mut raw) = (Map::new(), &[][..]);
    for (number, content) in fields(wrapped).ok_or_else(malformed)? {
        match (number, content) {
            (1, Content::Bytes(bytes)) => kind = decode(TYPE_META, bytes)?,
            (2, Content::Bytes(bytes)) => raw = bytes,
            _ => {}
        }
    }
    let name = kind.get("kind").and_then(Value::as_str);
    let message = name.and_then(message).ok_or_else(unsupported)?;
    kind.append(&mut decode(message, raw)?);
    Ok(Value::Object(kind))
}

/// The content of a field on the wire.
#[derive(Debug, Clone, Copy)]
enum Content<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

impl Content<'_> {
    /// Returns whether this is Go's zero value, which is written for each field that is no pointer.
    fn is_zero(self) -> bool {
        matches!(self, Self::Number(0) | Self::Bytes([]))
    }
}

/// The JSON form of a field.
#[derive(Debug, Clone, Copy)]
enum Form {
    Text,
    Texts,
    Number,
    TextMap,
    BytesMap,
    Bytes,
    Time,
    One(Message),
    Many(Message),
    /// The status, which only the API writes.
    Status,
}

/// The fields of a message with their numbers and names.
type Message = &'static [(u64, &'static str, Form)];

fn decode(message: Message, bytes: &[u8]) -> Result<Map<String, Value>, Status> {
    let mut object = Map::new();
    for (number, content) in fields(bytes).ok_or_else(malformed)? {
        let field = message.iter().find(|(known, ..)| *known == number);
        let Some((_, name, form)) = field else {
            if content.is_zero() {
                continue;
            }
            return Err(unsupported());
        };
        match (form, content) {
            (Form::Status, _)
            | (Form::Text | Form::Time | Form::Bytes, Content::Bytes([]))
            | (Form::Number, Content::Number(0)) => {}
            (Form::Text, Content::Bytes(text)) => *entry(&mut object, name) = string(text)?,
            (Form::Number, Content::Number(number)) => *entry(&mut object, name) = number.into(),
            (Form::Texts, Content::Bytes(text)) => push(entry(&mut object, name), string(text)?),
            (Form::TextMap, Content::Bytes(pair)) => {
                let (key, text) = pair_of(pair)?;
                entry(&mut object, name)[key] = string(text)?;
            }
            (Form::BytesMap, Content::Bytes(pair)) => {
                let (key, bytes) = pair_of(pair)?;
                entry(&mut object, name)[key] = BASE64_STANDARD.encode(bytes).into();
            }
            (Form::Bytes, Content::Bytes(bytes)) => {
                *entry(&mut object, name) = BASE64_STANDARD.encode(bytes).into();
            }
            (Form::Time, Content::Bytes(bytes)) => {
                let seconds = decode(TIME, bytes)?.remove("seconds");
                let seconds = seconds.and_then(|seconds| seconds.as_u64());
                let time = UNIX_EPOCH + Duration::from_secs(seconds.ok_or_else(malformed)?);
                *entry(&mut object, name) = format_rfc3339_seconds(time).to_string().into();
            }
            (Form::One(message), Content::Bytes(bytes)) => {
                let inner = decode(message, bytes)?;
                if !inner.is_empty() {
                    *entry(&mut object, name) = inner.into();
                }
            }
            (Form::Many(message), Content::Bytes(bytes)) => {
                push(entry(&mut object, name), decode(message, bytes)?.into());
            }
            _ => return Err(malformed()),
        }
    }
    Ok(object)
}

fn entry<'a>(object: &'a mut Map<String, Value>, name: &str) -> &'a mut Value {
    object.entry(name).or_insert(Value::Null)
}

fn push(list: &mut Value, item: Value) {
    match list {
        Value::Array(items) => items.push(item),
        other => *other = vec![item].into(),
    }
}

/// Decodes the key and the value of a map entry.
fn pair_of(bytes: &[u8]) -> Result<(String, &[u8]), Status> {
    let (mut key, mut value) = (String::new(), &[][..]);
    for (number, content) in fields(bytes).ok_or_else(malformed)? {
        match (number, content) {
            (1, Content::Bytes(bytes)) => key = utf8(bytes)?.to_owned(),
            (2, Content::Bytes(bytes)) => value = bytes,
            _ => return Err(malformed()),
        }
    }
    Ok((key, value))
}

fn string(bytes: &[u8]) -> Result<Value, Status> {
    utf8(bytes).map(Value::from)
}

fn utf8(bytes: &[u8]) -> Result<&str, Status> {
    std::str::from_utf8(bytes).map_err(|_not_utf8| malformed())
}

fn fields(mut input: &[u8]) -> Option<Vec<(u64, Content<'_>)>> {
    let mut fields = Vec::new();
    while !input.is_empty() {
        let key = varint(&mut input)?;
        let content = match key & 7 {
            0 => Content::Number(varint(&mut input)?),
            2 => {
                let length = usize::try_from(varint(&mut input)?).ok()?;
                let (content, rest) = input.split_at_checked(length)?;
                input = rest;
                Content::Bytes(content)
            }
            _ => return None,
        };
        fields.push((key >> 3, content));
    }
    Some(fields)
}

fn varint(input: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = input.split_first()?;
        *input = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if *byte < 0x80 {
            return Some(value);
        }
    }
    None
}

fn malformed() -> Status {
    Status::bad_request("the body of the request is no object in protobuf")
}

fn unsupported() -> Status {
    let message = "the body of the request was in an unknown format - accepted media types include: application/json; in \
                   protobuf this API has a few kinds, with the fields that kubectl create sets";
    Status::new(415, "UnsupportedMediaType", message)
}

fn message(kind: &str) -> Option<Message> {
    Some(match kind {
        "ConfigMap" => CONFIG_MAP,
        "Secret" => SECRET,
        "Namespace" | "ServiceAccount" => BARE,
        "Role" | "ClusterRole" => ROLE,
        "RoleBinding" | "ClusterRoleBinding" => BINDING,
        "Deployment" => DEPLOYMENT,
        "CertificateSigningRequest" => SIGNING_REQUEST,
        _ => return None,
    })
}

const MAGIC: &[u8] = b"k8s\0";

const TYPE_META: Message = &[(1, "apiVersion", Form::Text), (2, "kind", Form::Text)];

const METADATA: Message = &[
    (1, "name", Form::Text),
    (2, "generateName", Form::Text),
    (3, "namespace", Form::Text),
    (5, "uid", Form::Text),
    (6, "resourceVersion", Form::Text),
    (7, "generation", Form::Number),
    (8, "creationTimestamp", Form::Time),
    (11, "labels", Form::TextMap),
    (12, "annotations", Form::TextMap),
    (14, "finalizers", Form::Texts),
];

const TIME: Message = &[(1, "seconds", Form::Number), (2, "nanos", Form::Number)];

const SIGNING_REQUEST: Message = &[
    (1, "metadata", Form::One(METADATA)),
    (2, "spec", Form::One(SIGNING_REQUEST_SPEC)),
    (3, "status", Form::One(SIGNING_REQUEST_STATUS)),
];

const SIGNING_REQUEST_SPEC: Message = &[
    (1, "request", Form::Bytes),
    (2, "username", Form::Text),
    (3, "uid", Form::Text),
    (4, "groups", Form::Texts),
    (5, "usages", Form::Texts),
    (7, "signerName", Form::Text),
    (8, "expirationSeconds", Form::Number),
];

const SIGNING_REQUEST_STATUS: Message = &[
    (1, "conditions", Form::Many(CONDITION)),
    (2, "certificate", Form::Bytes),
];

const CONDITION: Message = &[
    (1, "type", Form::Text),
    (2, "reason", Form::Text),
    (3, "message", Form::Text),
    (4, "lastUpdateTime", Form::Time),
    (5, "lastTransitionTime", Form::Time),
    (6, "status", Form::Text),
];

const BARE: Message = &[
    (1, "metadata", Form::One(METADATA)),
    (3, "status", Form::Status),
];

const CONFIG_MAP: Message = &[
    (1, "metadata", Form::One(METADATA)),
    (2, "data", Form::TextMap),
    (3, "binaryData", Form::BytesMap),
];

const SECRET: Message = &[
    (1, "metadata", Form::One(METADATA)),
    (2, "data", Form::BytesMap),
    (3, "type", Form::Text),
    (4, "stringData", Form::TextMap),
];

const ROLE: Message = &[
    (1, "metadata", Form::One(METADATA)),
    (2, "rules", Form::Many(RULE)),
];

const RULE: Message = &[
    (1, "verbs", Form::Texts),
    (2, "apiGroups", Form::Texts),
    (3, "resources", Form::Texts),
    (4, "resourceNames", Form::Texts),
    (5, "nonResourceURLs", Form::Texts),
];

const BINDING: Message = &[
    (1, "metadata", Form::One(METADATA)),
    (2, "subjects", Form::Many(SUBJECT)),
    (3, "roleRef", Form::One(ROLE_REF)),
];

const SUBJECT: Message = &[
    (1, "kind", Form::Text),
    (2, "apiGroup", Form::Text),
    (3, "name", Form::Text),
    (4, "namespace", Form::Text),
];

const ROLE_REF: Message = &[
    (1, "apiGroup", Form::Text),
    (2, "kind", Form::Text),
    (3, "name", Form::Text),
];

const DEPLOYMENT: Message = &[
    (1, "metadata", Form::One(METADATA)),
    (2, "spec", Form::One(DEPLOYMENT_SPEC)),
    (3, "status", Form::Status),
];

const DEPLOYMENT_SPEC: Message = &[
    (1, "replicas", Form::Number),
    (
        2,
        "selector",
        Form::One(&[(1, "matchLabels", Form::TextMap)]),
    ),
    (3, "template", Form::One(TEMPLATE)),
    (4, "strategy", Form::One(&[(1, "type", Form::Text)])),
];

const TEMPLATE: Message = &[
    (1, "metadata", Form::One(METADATA)),
    (
        2,
        "spec",
        Form::One(&[(2, "containers", Form::Many(CONTAINER))]),
    ),
];

const CONTAINER: Message = &[
    (1, "name", Form::Text),
    (2, "image", Form::Text),
    (3, "command", Form::Texts),
    (4, "args", Form::Texts),
];
