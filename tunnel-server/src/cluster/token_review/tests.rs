use k8s_openapi::ByteString;
use serde_json::{Value, json};

use super::super::testing::api_server;
use super::*;
use tunnel_ca::attestation::Attestor;

const ACCOUNT: &str = "system:serviceaccount:kube-system:tunnel-agent";

fn settings() -> AgentTokens {
    AgentTokens {
        audience: "tunnel-server".into(),
        accounts: vec![ACCOUNT.into()],
    }
}

/// Returns a token with these claims. These tests do not check the signature.
fn token(claims: &Value) -> ServiceAccountToken {
    let encoded = json!(ByteString(claims.to_string().into_bytes()));
    let payload = encoded.as_str().unwrap().trim_end_matches('=').to_owned();
    let payload = payload.replace('+', "-").replace('/', "_");
    ServiceAccountToken::new(&format!("eyJhbGciOiJSUzI1NiJ9.{payload}.c2lnbmF0dXJl\n"))
}

fn check(status: Value) -> Result<TokenBinding, AttestError> {
    check_review(&serde_json::from_value(status).unwrap(), &settings())
}

fn accepted(user: &str, extra: &Value) -> Value {
    json!({
        "authenticated": true, "audiences": ["tunnel-server"],
        "user": { "username": user, "groups": ["system:serviceaccounts"], "extra": extra },
    })
}

#[test]
fn node_of_the_token_is_taken_from_what_the_api_server_says() {
    let extra = json!({ NODE_NAME: ["worker-1"], POD_NAME: ["p"], POD_UID: ["u"] });
    let older = json!({ POD_NAME: ["p"], POD_UID: ["u"] });
    let node = BoundObject::Node("worker-1".parse().unwrap());
    for (extra, expected) in [(extra, node), (older, BoundObject::Pod(pod()))] {
        let token_binding = check(accepted(ACCOUNT, &extra)).unwrap();
        assert_eq!(token_binding.bound, expected);
    }
}

fn pod() -> BoundPod {
    BoundPod {
        namespace: "kube-system".into(),
        name: "p".into(),
        uid: "u".into(),
    }
}

#[test]
fn reviews_that_prove_no_node_are_refused() {
    let bound = json!({ NODE_NAME: ["worker-1"] });
    let other = "system:serviceaccount:default:tunnel-agent";
    let not_accepted = AttestError::NotAccepted("tunnel-server".into());
    let but = |field: &str, value: Value| {
        let mut status = accepted(ACCOUNT, &bound);
        status[field] = value;
        status
    };
    for status in [
        json!({}),
        json!({ "error": "no" }),
        but("authenticated", false.into()),
        but("audiences", json!([])),
        but("audiences", Value::Null),
        but("audiences", json!(["https://kubernetes.default.svc"])),
    ] {
        let refused = check(status.clone());
        assert_eq!(refused.as_ref(), Err(&not_accepted), "{status}");
    }
    for user in [other, "worker-1"] {
        let refused = AttestError::OtherAccount(user.into());
        assert_eq!(check(accepted(user, &bound)), Err(refused));
    }
    for (extra, expected) in [
        (json!({}), AttestError::NotBound),
        (json!({ POD_NAME: ["p"] }), AttestError::NotBound),
        (json!({ POD_UID: ["u"] }), AttestError::NotBound),
        (json!({ NODE_NAME: ["a", "b"] }), AttestError::NotBound),
        (json!({ NODE_NAME: ["A_b"] }), AttestError::NotScheduled),
        (json!({ NODE_NAME: [""] }), AttestError::NotScheduled),
    ] {
        let refused = check(accepted(ACCOUNT, &extra));
        assert_eq!(refused, Err(expected), "{extra}");
    }
}

#[test]
fn pod_counts_only_when_it_is_the_very_one_and_runs_somewhere() {
    let bound = pod();
    let pod = |uid: &str, spec: Value| -> Pod {
        serde_json::from_value(json!({ "metadata": { "uid": uid }, "spec": spec })).unwrap()
    };
    let spec = |node: &str| json!({ "containers": [], "nodeName": node });
    let gone = AttestError::PodGone("kube-system/p".into());
    let found = node_of(&bound, Some(&pod("u", spec("worker-1"))));
    assert_eq!(found, Ok("worker-1".parse().unwrap()));
    assert_eq!(node_of(&bound, None), Err(gone.clone()));
    let other = pod("v", spec("worker-1"));
    assert_eq!(node_of(&bound, Some(&other)), Err(gone));
    for nowhere in [json!({ "containers": [] }), Value::Null, spec("")] {
        let found = node_of(&bound, Some(&pod("u", nowhere)));
        assert_eq!(found, Err(AttestError::NotScheduled));
    }
}

#[tokio::test]
async fn review_asks_for_the_audience_and_an_older_server_for_the_pod() {
    let (client, mut server) = api_server();
    let (attestor, requests) = Attestor::new();
    let responder = answer(client, requests, settings());
    let token = token(&json!({ "iat": 1_700_000_000 }));
    let sent = token.reveal().to_owned();
    let asked = async move {
        let now = SystemTime::now();
        attestor.node_of(token, now).await
    };
    let api = async {
        let reviews = "POST /apis/authentication.k8s.io/v1/tokenreviews?";
        let call = server.expect(reviews).await;
        let spec = &call.body["spec"];
        assert_eq!(spec["audiences"], json!(["tunnel-server"]));
        assert_eq!(spec["token"], sent);
        let older = json!({ POD_NAME: ["agent-x"], POD_UID: ["u"] });
        call.answer(&json!({ "metadata": {}, "spec": {}, "status": accepted(ACCOUNT, &older) }));
        let pod = "GET /api/v1/namespaces/kube-system/pods/agent-x";
        let call = server.expect(pod).await;
        call.answer(&json!({
            "metadata": { "name": "agent-x", "uid": "u" },
            "spec": { "containers": [], "nodeName": "worker-1" },
        }));
    };
    let (attested, (), ()) = tokio::join!(asked, api, responder);
    let attested = attested.unwrap();
    assert_eq!(attested.node.as_str(), "worker-1");
    assert_eq!(attested.issued, from_unix_seconds(1_700_000_000));
}

#[tokio::test]
async fn expired_token_has_its_own_error_and_malformed_token_is_not_sent() {
    let (client, mut server) = api_server();
    let refused = json!({ "metadata": {}, "spec": {}, "status": { "error": "token has expired" } });
    let ended = token(&json!({ "iat": 1, "exp": 2 }));
    let settings = settings();
    let api = async {
        server.call().await.answer(&refused);
    };
    let (attested, ()) = tokio::join!(attest(&client, &ended, &settings), api);
    assert_eq!(attested, Err(AttestError::Expired));
    for garbage in ["", "eyJ", "eyJ.e30.x", "eyJ.e30", "a.b.c.d", "eyJ.!!!.x"] {
        // If the client sent the token, the test would wait forever for an answer.
        let attested = attest(&client, &ServiceAccountToken::new(garbage), &settings).await;
        let expected = AttestError::NotAccepted("tunnel-server".into());
        assert_eq!(attested, Err(expected), "{garbage:?}");
    }
}
