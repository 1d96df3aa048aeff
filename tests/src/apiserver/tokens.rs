//! Signing of ServiceAccount tokens, and answers to TokenReviews.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use aws_lc_rs::hmac;
use base64::prelude::{BASE64_URL_SAFE_NO_PAD, Engine as _};
use serde_json::{Map, Value, json};

use super::access::User;
use super::defaulting::key;
use super::kinds::Kind;
use super::store::Content;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenClaims {
    /// Namespace and name of the ServiceAccount.
    pub account: (String, String),
    /// Audiences; empty for a token of a Secret, as created by clusters before 1.24.
    pub audiences: Vec<String>,
    /// Name and UID of the bound Pod.
    pub pod: Option<(String, String)>,
    pub issued: SystemTime,
    /// Expiry; `None` for a token of a Secret, which never expires.
    pub ends: Option<SystemTime>,
}

impl TokenClaims {
    /// Returns the claims that a TokenRequest for `account` asks for.
    pub(super) fn requested(account: (String, String), request: &Value) -> Self {
        let spec = &request["spec"];
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let audiences = spec["audiences"].as_array().into_iter().flatten();
        let audiences: Vec<_> = audiences.filter_map(text).collect();
        let bound = &spec["boundObjectRef"];
        let issued = SystemTime::now();
        let seconds = spec["expirationSeconds"].as_u64().unwrap_or(3600);
        Self {
            account,
            audiences: if audiences.is_empty() {
                vec![ISSUER.to_owned()]
            } else {
                audiences
            },
            pod: text(&bound["name"])
                .zip(text(&bound["uid"]))
                .filter(|_| bound["kind"] == "Pod"),
            issued,
            ends: Some(issued + Duration::from_secs(seconds)),
        }
    }
}

/// The behavior of TokenReviews.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reviewing {
    /// From 1.30 on: the Pod must exist, and the answer contains its node.
    WithNodes,
    /// Before 1.30: the Pod must exist.
    WithPods,
    /// Like an answer from a cache: the Pod is not checked.
    Cached,
    /// Before 1.12, or with a custom authenticator: audiences are not checked and not returned.
    WithoutAudiences,
}

#[derive(Debug)]
pub(super) struct Signer {
    key: hmac::Key,
    reviewing: Mutex<Reviewing>,
}

impl Signer {
    pub(super) fn new() -> Self {
        let secret: [u8; 32] = rand::random();
        Self {
            key: hmac::Key::new(hmac::HMAC_SHA256, &secret),
            reviewing: Mutex::new(Reviewing::WithNodes),
        }
    }

    pub(super) fn set(&self, reviewing: Reviewing) {
        *self
            .reviewing
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = reviewing;
    }

    pub(super) fn sign(&self, claims: &TokenClaims) -> String {
        let (namespace, account) = &claims.account;
        let mut kubernetes =
            json!({ "namespace": namespace, "serviceaccount": { "name": account, "uid": "sa" } });
        if let Some((name, uid)) = &claims.pod {
            kubernetes["pod"] = json!({ "name": name, "uid": uid });
        }
        let mut payload = json!({
            "iss": ISSUER, "sub": format!("system:serviceaccount:{namespace}:{account}"),
            "kubernetes.io": kubernetes,
        });
        // Tokens of Secrets have neither times nor audiences.
        if !claims.audiences.is_empty() {
            payload["aud"] = json!(claims.audiences);
            payload["iat"] = seconds(claims.issued).into();
            payload["nbf"] = payload["iat"].clone();
        }
        if let Some(ends) = claims.ends {
            payload["exp"] = seconds(ends).into();
        }
        let head = json!({ "alg": "HS256", "kid": "stand-in" });
        let signed = format!("{}.{}", encode_segment(&head), encode_segment(&payload));
        let signature = hmac::sign(&self.key, signed.as_bytes());
        format!("{signed}.{}", BASE64_URL_SAFE_NO_PAD.encode(signature))
    }

    /// Returns the status of a review of `token` for `asked` audiences.
    pub(super) fn review(&self, content: &Content, token: &str, asked: &[&str]) -> Value {
        match self.verify(content, token, asked) {
            Ok(status) => status,
            Err(error) => {
                json!({ "user": {}, "error": format!("[invalid bearer token, {error}]") })
            }
        }
    }

    fn verify(&self, content: &Content, token: &str, asked: &[&str]) -> Result<Value, String> {
        let (signed, signature) = token.rsplit_once('.').ok_or("not a JWS")?;
        let own = hmac::sign(&self.key, signed.as_bytes());
        if BASE64_URL_SAFE_NO_PAD.encode(own) != signature {
            return Err("square/go-jose: error in cryptographic primitive".into());
        }
        let (_, payload) = signed.split_once('.').ok_or("not a JWS")?;
        let claims: Value = decode_segment(payload).ok_or("no claims")?;
        let reviewing = *self
            .reviewing
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let now = seconds(SystemTime::now());
        if claims["exp"].as_u64().is_some_and(|end| end <= now) {
            return Err("service account token has expired".into());
        }
        // A review without audiences is for those of the API server itself.
        let asked = if asked.is_empty() {
            &[ISSUER][..]
        } else {
            asked
        };
        let own = claims["aud"].as_array();
        let own: Vec<&str> = own
            .map(|own| own.iter().filter_map(Value::as_str).collect())
            .unwrap_or_else(|| vec![ISSUER]);
        let common: Vec<_> = asked.iter().filter(|asked| own.contains(asked)).collect();
        if common.is_empty() && reviewing != Reviewing::WithoutAudiences {
            return Err(format!(
                "token audiences {own:?} is invalid for the target audiences {asked:?}"
            ));
        }
        let namespace = claims["kubernetes.io"]["namespace"]
            .as_str()
            .unwrap_or_default();
        let account = claims["kubernetes.io"]["serviceaccount"]["name"]
            .as_str()
            .unwrap_or_default();
        let user = User::service_account(namespace, account);
        let mut extra = Map::new();
        let pod = &claims["kubernetes.io"]["pod"];
        if let (Some(name), Some(uid)) = (pod["name"].as_str(), pod["uid"].as_str()) {
            let kind = Kind::find("", "pods").ok_or("no pods here")?;
            let found = content.get(&key(kind, Some(namespace), name));
            let is_it = found.is_some_and(|found| found["metadata"]["uid"] == uid);
            if !is_it && reviewing != Reviewing::Cached {
                return Err("service account token has been invalidated".into());
            }
            extra.insert(format!("{EXTRA}pod-name"), json!([name]));
            extra.insert(format!("{EXTRA}pod-uid"), json!([uid]));
            let node = found.and_then(|found| found["spec"]["nodeName"].as_str());
            if let (Some(node), Reviewing::WithNodes) = (node, reviewing) {
                extra.insert(format!("{EXTRA}node-name"), json!([node]));
            }
        }
        let mut status = json!({
            "authenticated": true, "audiences": common,
            "user": { "username": user.name, "uid": "sa", "groups": user.groups, "extra": extra },
        });
        if reviewing == Reviewing::WithoutAudiences {
            status["audiences"] = Value::Null;
        }
        Ok(status)
    }
}

fn seconds(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH);
    since.unwrap_or(Duration::ZERO).as_secs()
}

fn encode_segment(value: &Value) -> String {
    BASE64_URL_SAFE_NO_PAD.encode(value.to_string())
}

fn decode_segment(text: &str) -> Option<Value> {
    let bytes = BASE64_URL_SAFE_NO_PAD.decode(text).ok()?;
    serde_json::from_slice(&bytes).ok()
}

const ISSUER: &str = "https://kubernetes.default.svc.cluster.local";
const EXTRA: &str = "authentication.kubernetes.io/";
