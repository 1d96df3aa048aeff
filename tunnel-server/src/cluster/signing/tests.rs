use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, CertifiedIssuer, IsCa,
    KeyPair,
};
use serde_json::{Value, json};
use tunnel_proto::identity::common_name;
use tunnel_proto::process::meta::Readiness;
use tunnel_proto::transport::BufferPool;

use super::*;
use crate::cluster::metrics::ClusterMetrics;
use crate::cluster::testing::{ApiServer, api_server};
use crate::store::data_dir::testing::Scratch;
use crate::testing::POOL;

const PATH: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";

struct Bench {
    scratch: Scratch,
    server: ApiServer,
    targets: Arc<Targets>,
    problems: Problems,
    signing: tokio_util::task::AbortOnDropHandle<()>,
}

fn bench(scratch: Scratch) -> Bench {
    let (client, server) = api_server();
    let mut counters = prometheus_client::registry::Registry::default();
    let problems = Problems::new(Readiness::default(), ClusterMetrics::new(&mut counters));
    let targets = Targets::new(None).unwrap();
    let signing = Signing {
        api: Api::all(client),
        signer: Signer {
            name: "kubernetes.io/kube-apiserver-client".into(),
            targets: targets.clone(),
        },
        data: scratch.0.clone(),
        problems: problems.clone(),
        metrics: Metrics::new(&mut counters, BufferPool::new(POOL)),
    };
    let tasks = tokio_util::task::TaskTracker::new();
    let signing = tokio_util::task::AbortOnDropHandle::new(tasks.spawn(signing.run()));
    Bench {
        scratch,
        server,
        targets,
        problems,
        signing,
    }
}

impl Bench {
    fn lends(&self) -> bool {
        let leg = self.targets.leg(true);
        leg.tls.client_auth_cert_resolver.has_certs()
    }

    fn told(&self) -> String {
        self.problems.of(Part::KubeletCertificate).join("\n")
    }

    /// Lets the server find nothing, and takes the request that it then makes.
    async fn asked(&mut self) -> Value {
        let looked = self.server.call().await;
        assert!(
            looked.what.starts_with(&format!("GET {PATH}/culvert-")),
            "{}",
            looked.what
        );
        looked.refuse(404, "NotFound");
        let made = self.server.call().await;
        assert!(
            made.what.starts_with(&format!("POST {PATH}?")),
            "{}",
            made.what
        );
        let object = made.body.clone();
        made.answer(&object);
        object
    }

    /// Answers the next look with this status.
    async fn finds(&mut self, object: &Value, status: Value) {
        let mut object = object.clone();
        object["status"] = status;
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        let looked = self.server.call().await;
        assert_eq!(looked.what, format!("GET {PATH}/{name}"));
        looked.answer(&object);
    }
}

fn base64(bytes: &[u8]) -> Value {
    serde_json::to_value(k8s_openapi::ByteString(bytes.to_vec())).unwrap()
}

/// Signs what was asked for, for a time around now: from so long ago, for so long.
fn signed(object: &Value, ago: Duration, life: Duration) -> (String, Value) {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let pem: k8s_openapi::ByteString =
        serde_json::from_value(object["spec"]["request"].clone()).unwrap();
    let mut asked =
        CertificateSigningRequestParams::from_pem(std::str::from_utf8(&pem.0).unwrap()).unwrap();
    let from = SystemTime::now() - ago;
    asked.params.not_before = from.into();
    asked.params.not_after = (from + life).into();
    let certificate = asked.signed_by(&ca).unwrap();
    let name = common_name(certificate.der()).unwrap();
    (name, base64(certificate.pem().as_bytes()))
}

const HOUR: Duration = Duration::from_secs(3600);

#[tokio::test(start_paused = true)]
async fn request_is_made_waited_for_and_its_certificate_is_lent_and_kept() {
    let mut bench = bench(Scratch::new());
    let object = bench.asked().await;
    let name = object["metadata"]["name"].as_str().unwrap().to_owned();
    assert_eq!(
        object["spec"]["signerName"],
        "kubernetes.io/kube-apiserver-client"
    );
    assert_eq!(
        object["spec"]["usages"],
        json!(["digital signature", "client auth"])
    );
    bench.finds(&object, json!({})).await;
    let approve = format!("kubectl certificate approve {name}");
    let looked = bench.server.call().await;
    assert!(bench.told().ends_with(&approve), "{}", bench.told());
    assert!(!bench.lends());
    let approved = json!([{ "type": "Approved", "status": "True" }]);
    let mut shown = object.clone();
    shown["status"] = json!({ "conditions": approved });
    looked.answer(&shown);
    let (subject, certificate) = signed(&object, HOUR, 24 * HOUR);
    assert_eq!(subject, "culvert-tunnel-server");
    let status = json!({ "conditions": approved, "certificate": certificate });
    bench.finds(&object, status).await;
    bench.server.is_quiet_for(HOUR / 2).await;
    assert!(bench.lends());
    assert_eq!(bench.told(), "");
    // The next process has it at once, and asks for nothing.
    let Bench {
        scratch, signing, ..
    } = bench;
    drop(signing);
    let mut next = self::bench(scratch);
    next.server.is_quiet_for(HOUR / 2).await;
    assert!(next.lends());
}

#[tokio::test(start_paused = true)]
async fn certificate_is_renewed_under_another_name_while_the_old_one_is_lent() {
    let mut bench = bench(Scratch::new());
    let object = bench.asked().await;
    // 95 % of its life is over.
    let (_, certificate) = signed(&object, 19 * HOUR, 20 * HOUR);
    bench
        .finds(&object, json!({ "certificate": certificate }))
        .await;
    let next = bench.asked().await;
    assert!(bench.lends());
    assert_ne!(next["metadata"]["name"], object["metadata"]["name"]);
    bench.finds(&next, json!({})).await;
    let (_, certificate) = signed(&next, HOUR, 24 * HOUR);
    bench
        .finds(&next, json!({ "certificate": certificate }))
        .await;
    bench.server.is_quiet_for(HOUR / 2).await;
    assert_eq!(bench.told(), "");
}

#[tokio::test(start_paused = true)]
async fn refusals_are_told_and_asked_again_when_the_request_is_gone() {
    let mut bench = bench(Scratch::new());
    let object = bench.asked().await;
    let denied =
        json!([{ "type": "Denied", "status": "True", "reason": "Policy", "message": "not here" }]);
    bench.finds(&object, json!({ "conditions": denied })).await;
    let failed = json!([{ "type": "Failed", "status": "True", "message": "no such signer" }]);
    bench.server.is_quiet_for(REFUSED_LOOK_EVERY / 2).await;
    assert!(
        bench.told().contains("was denied: Policy, not here"),
        "{}",
        bench.told()
    );
    bench.finds(&object, json!({ "conditions": failed })).await;
    // A certificate of another key is of no use.
    let stranger = KeyPair::generate().unwrap();
    let other = CertificateParams::default().self_signed(&stranger).unwrap();
    bench.server.is_quiet_for(REFUSED_LOOK_EVERY / 2).await;
    assert!(
        bench.told().contains("has failed: no such signer"),
        "{}",
        bench.told()
    );
    bench
        .finds(
            &object,
            json!({ "certificate": base64(other.pem().as_bytes()) }),
        )
        .await;
    bench.server.is_quiet_for(REFUSED_LOOK_EVERY / 2).await;
    assert!(bench.told().contains("is of no use"), "{}", bench.told());
    assert!(!bench.lends());
    let again = bench.asked().await;
    assert_eq!(again["metadata"]["name"], object["metadata"]["name"]);
}

#[tokio::test(start_paused = true)]
async fn right_that_is_missing_is_told() {
    let mut bench = bench(Scratch::new());
    bench.server.call().await.refuse(403, "Forbidden");
    let looked = bench.server.call().await;
    assert!(
        bench.told().contains("cannot ask for a certificate"),
        "{}",
        bench.told()
    );
    looked.refuse(404, "NotFound");
}
