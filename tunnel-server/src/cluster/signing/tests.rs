use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, CertifiedIssuer, IsCa,
    KeyPair,
};
use serde_json::{Value, json};
use tunnel_process::meta::Readiness;
use tunnel_proto::identity::common_name;
use tunnel_proto::transport::BufferPool;

use super::*;
use crate::cluster::testing::{ApiServer, api_server};
use crate::testing::{POOL, assert_contains};
use tunnel_store::data_dir::testing::Scratch;

const PATH: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";

struct Fixture {
    scratch: Scratch,
    server: ApiServer,
    targets: Arc<TargetTls>,
    conditions: Conditions,
    signing: tokio_util::task::AbortOnDropHandle<()>,
}

fn fixture(scratch: Scratch) -> Fixture {
    let (client, server) = api_server();
    let mut counters = prometheus_client::registry::Registry::default();
    let conditions = Conditions::new(Readiness::default());
    let targets = TargetTls::new(None).unwrap();
    let signing = KubeletClientCertificateTask {
        api: Api::all(client),
        signer: SignerConfig {
            name: "kubernetes.io/kube-apiserver-client".into(),
            targets: targets.clone(),
        },
        data: scratch.0.clone(),
        conditions: conditions.clone(),
        metrics: Metrics::new(&mut counters, BufferPool::new(POOL)),
    };
    let tasks = tokio_util::task::TaskTracker::new();
    let signing = tokio_util::task::AbortOnDropHandle::new(tasks.spawn(signing.run()));
    Fixture {
        scratch,
        server,
        targets,
        conditions,
        signing,
    }
}

impl Fixture {
    fn is_delegating(&self) -> bool {
        let tls_profile = self.targets.tls_profile(true);
        tls_profile.network.client_auth_cert_resolver.has_certs()
    }

    /// Waits for half of the interval of polls, and checks the condition.
    async fn shows(&mut self, part: &str) {
        self.server.is_quiet_for(REFUSED_POLL_INTERVAL / 2).await;
        assert_contains(&self.condition(), part);
    }

    fn condition(&self) -> String {
        self.conditions
            .of(Condition::KubeletClientCertificate)
            .join("\n")
    }

    /// Answers that no request exists, and returns the request that the server then creates.
    async fn asked(&mut self) -> Value {
        let poll = self.server.call().await;
        assert_contains(&poll.what, &format!("GET {PATH}/culvert-"));
        poll.refuse(404, "NotFound");
        let made = self.server.call().await;
        assert_contains(&made.what, &format!("POST {PATH}?"));
        let object = made.body.clone();
        made.accept();
        object
    }

    /// Answers the next poll with this status.
    async fn finds(&mut self, object: &Value, status: Value) {
        let mut object = object.clone();
        object["status"] = status;
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        let poll = self.server.call().await;
        assert_eq!(poll.what, format!("GET {PATH}/{name}"));
        poll.answer(&object);
    }
}

fn base64(bytes: &[u8]) -> Value {
    serde_json::to_value(ByteString(bytes.to_vec())).unwrap()
}

/// Signs the request with a certificate that began `ago` before the current time and lasts for
/// `life`.
fn signed(object: &Value, ago: Duration, life: Duration) -> (String, Value) {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let pem = serde_json::from_value(object["spec"]["request"].clone());
    let ByteString(pem) = pem.unwrap();
    let pem = String::from_utf8(pem).unwrap();
    let mut asked = CertificateSigningRequestParams::from_pem(&pem).unwrap();
    let from = SystemTime::now() - ago;
    asked.params.not_before = from.into();
    asked.params.not_after = (from + life).into();
    let certificate = asked.signed_by(&ca).unwrap();
    let name = common_name(certificate.der()).unwrap();
    (name, base64(certificate.pem().as_bytes()))
}

const HOUR: Duration = Duration::from_secs(3600);

#[tokio::test(start_paused = true)]
async fn request_is_approved_and_its_certificate_is_used_and_persisted() {
    let mut fixture = fixture(Scratch::new());
    let object = fixture.asked().await;
    let name = object["metadata"]["name"].as_str().unwrap().to_owned();
    let spec = &object["spec"];
    assert_eq!(spec["signerName"], "kubernetes.io/kube-apiserver-client");
    assert_eq!(spec["usages"], json!(["digital signature", "client auth"]));
    fixture.finds(&object, json!({})).await;
    let approve = format!("kubectl certificate approve {name}");
    let poll = fixture.server.call().await;
    let condition = fixture.condition();
    assert!(condition.ends_with(&approve), "{condition}");
    assert!(!fixture.is_delegating());
    let approved = json!([{ "type": "Approved", "status": "True" }]);
    let mut shown = object.clone();
    shown["status"] = json!({ "conditions": approved });
    poll.answer(&shown);
    let (subject, certificate) = signed(&object, HOUR, 24 * HOUR);
    assert_eq!(subject, "culvert-tunnel-server");
    let status = json!({ "conditions": approved, "certificate": certificate });
    fixture.finds(&object, status).await;
    fixture.server.is_quiet_for(HOUR / 2).await;
    assert!(fixture.is_delegating());
    assert_eq!(fixture.condition(), "");
    // The next process uses the certificate at once and sends no request.
    let Fixture {
        scratch, signing, ..
    } = fixture;
    drop(signing);
    let mut next = self::fixture(scratch);
    next.server.is_quiet_for(HOUR / 2).await;
    assert!(next.is_delegating());
}

#[tokio::test(start_paused = true)]
async fn certificate_is_renewed_under_another_name_while_the_old_one_is_in_use() {
    let mut fixture = fixture(Scratch::new());
    let object = fixture.asked().await;
    // 95 % of the lifetime is over.
    let (_, certificate) = signed(&object, 19 * HOUR, 20 * HOUR);
    let status = json!({ "certificate": certificate });
    fixture.finds(&object, status).await;
    let next = fixture.asked().await;
    assert!(fixture.is_delegating());
    assert_ne!(next["metadata"]["name"], object["metadata"]["name"]);
    fixture.finds(&next, json!({})).await;
    let (_, certificate) = signed(&next, HOUR, 24 * HOUR);
    let status = json!({ "certificate": certificate });
    fixture.finds(&next, status).await;
    fixture.server.is_quiet_for(HOUR / 2).await;
    assert_eq!(fixture.condition(), "");
}

#[tokio::test(start_paused = true)]
async fn refused_request_is_a_condition_and_is_recreated_after_its_deletion() {
    let mut fixture = fixture(Scratch::new());
    let object = fixture.asked().await;
    // A certificate for another key is not usable.
    let other_key = KeyPair::generate().unwrap();
    let other = CertificateParams::default().self_signed(&other_key);
    let other = base64(other.unwrap().pem().as_bytes());
    let denied = json!({ "type": "Denied", "status": "True", "reason": "Policy", "message": "no" });
    let failed = json!({ "type": "Failed", "status": "True", "message": "no such signer" });
    for (status, condition) in [
        (json!({ "conditions": [denied] }), "was denied: Policy, no"),
        (json!({ "conditions": [failed] }), "failed: no such signer"),
        (
            json!({ "certificate": other }),
            "cannot use the certificate",
        ),
    ] {
        fixture.finds(&object, status).await;
        fixture.shows(condition).await;
    }
    assert!(!fixture.is_delegating());
    let again = fixture.asked().await;
    assert_eq!(again["metadata"]["name"], object["metadata"]["name"]);
}

#[tokio::test(start_paused = true)]
async fn missing_right_is_a_condition() {
    let mut fixture = fixture(Scratch::new());
    fixture.server.call().await.refuse(403, "Forbidden");
    let poll = fixture.server.call().await;
    let condition = fixture.condition();
    assert_contains(&condition, "cannot request a client certificate");
    poll.refuse(404, "NotFound");
}
