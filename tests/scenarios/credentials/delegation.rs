//! P9, S11: delegation of the server's client certificate to the allowed callers, and to no others.

use anyhow::{Context, Result, ensure};
use rustls::RootCertStore;
use tunnel_agent::config::TransportChoice;
use tunnel_tests::ca::{Issued, Leaf, TestCa, replace};
use tunnel_tests::client::{
    ClientTls, Endpoint, Exchange, KeepAliveClient, RawRequest, UpgradeClient, Upgraded, request,
};
use tunnel_tests::env::{Agent, TestEnv, WAIT_TIMEOUT};
use tunnel_tests::process::ScratchDir;
use tunnel_tests::targets::{Access, FakeKubelet, TargetTls, sha256_hex};

use super::{metric, metric_is_zero, metric_reaches};

const TRANSPORTS: [TransportChoice; 2] = [TransportChoice::Quic, TransportChoice::H2];
/// The server's name in the client certificate that kubelets accept.
const OWN: &str = "culvert-tunnel-server";
const APISERVER: &str = "kube-apiserver-kubelet-client";
const SCRAPER: &str = "token-of-prometheus-37c1";

/// The certificate authorities around a server, and the server's files with their certificates.
pub(super) struct Authorities {
    scratch: ScratchDir,
    /// CA of callers' certificates.
    pub(super) callers: TestCa,
    /// CA of the certificates of the kubelets' clients.
    pub(super) clients: TestCa,
    /// CA of the kubelets' serving certificates.
    pub(super) kubelets: TestCa,
}

impl Authorities {
    pub(super) fn new() -> Result<Self> {
        Ok(Self {
            scratch: ScratchDir::new()?,
            callers: TestCa::new("callers")?,
            clients: TestCa::new("clients of kubelets")?,
            kubelets: TestCa::new("kubelets")?,
        })
    }

    /// Writes all files that the server reads, and returns the server's client certificate.
    pub(super) fn write(&self, to: &Self) -> Result<Issued> {
        let own = self.clients.issue(&Leaf::caller(OWN))?;
        own.write(to.scratch.path(), "own")?;
        replace(&to.path("callers.pem"), self.callers.pem().as_bytes())?;
        replace(&to.path("kubelets.pem"), self.kubelets.pem().as_bytes())?;
        Ok(own)
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.scratch.path().join(name)
    }

    /// Starts a server with client-certificate delegation that treats all ports above 1023 as https
    /// targets. With `verifies` the server verifies the targets.
    pub(super) async fn env(&self, verifies: bool) -> Result<TestEnv> {
        self.env_with(verifies, |_| {}).await
    }

    pub(super) async fn env_with(
        &self,
        verifies: bool,
        change: impl FnOnce(&mut tunnel_server::config::RawConfig),
    ) -> Result<TestEnv> {
        let text = |name| Some(self.path(name).to_string_lossy().into_owned());
        TestEnv::start_with(|settings| {
            settings.client_ca = text("callers.pem");
            settings.target_cert_file = text("own.crt");
            settings.target_key_file = text("own.key");
            if verifies {
                settings.target_tls = Some("verify".into());
                settings.target_ca = text("kubelets.pem");
            }
            settings.https_proxy_ports = Some("1024-65535".into());
            settings.http_proxy_ports = None;
            settings.limits = TestEnv::limits("reloadEvery: 20ms");
            change(settings);
        })
        .await
    }

    /// Starts a kubelet that authenticates the server by certificate and Prometheus by token.
    async fn kubelet(&self) -> Result<FakeKubelet> {
        let scraper = "system:serviceaccount:monitoring:prometheus-k8s";
        let access = Access::new(self.clients.root(), &[OWN])?.with_scraper(SCRAPER, scraper);
        let tls = self.kubelets.issue(&Leaf::target("worker-1"))?.serving()?;
        FakeKubelet::guarded("worker-1", tls, access).await
    }
}

/// Returns the HTTPS listener at `address` for a caller with this certificate.
pub(super) fn endpoint(
    env: &TestEnv,
    address: std::net::SocketAddr,
    certificate: Option<&Issued>,
) -> Result<Endpoint> {
    let presented = certificate.map(Issued::presented).transpose()?;
    let roots = RootCertStore::clone(&*env.roots()?);
    let tls = ClientTls::verifying("worker-1", roots, presented)?;
    Ok(Endpoint::tls(address, tls))
}

struct Site {
    authorities: Authorities,
    own: Issued,
    env: TestEnv,
    kubelet: FakeKubelet,
    host: String,
    _agent: Agent,
}

impl Site {
    async fn start(transport: TransportChoice, verifies: bool) -> Result<Self> {
        let authorities = Authorities::new()?;
        let own = authorities.write(&authorities)?;
        let env = authorities.env(verifies).await?;
        let kubelet = authorities.kubelet().await?;
        let agent = env.agent_with("worker-1", |config| config.transport = transport);
        Ok(Self {
            _agent: agent.await?,
            host: format!("worker-1:{}", kubelet.addr().port()),
            authorities,
            own,
            env,
            kubelet,
        })
    }

    fn endpoint(&self, certificate: Option<&Issued>) -> Result<Endpoint> {
        let address = self.env.bound().https.context("no HTTPS listener")?;
        endpoint(&self.env, address, certificate)
    }

    fn caller(&self, name: &str) -> Result<Issued> {
        self.authorities.callers.issue(&Leaf::caller(name))
    }

    /// Returns the statuses of a page, of metrics and of a command.
    async fn tried(&self, certificate: Option<&Issued>, token: Option<&str>) -> Result<[u16; 3]> {
        let with_token = |head: RawRequest| match token {
            Some(token) => head.header("Authorization", &format!("Bearer {token}")),
            None => head,
        };
        let get = async |path| {
            let head = with_token(RawRequest::get(&self.host, path));
            anyhow::Ok(request(self.endpoint(certificate)?, &head).await?.status)
        };
        let command = with_token(
            RawRequest::new("POST", "/exec/default/web-0/app?script=echo", &self.host)
                .header("Connection", "Upgrade")
                .header("Upgrade", "SPDY/3.1"),
        );
        let exec = UpgradeClient::asking_for_spdy(command);
        let exec = match exec.connect(self.endpoint(certificate)?).await? {
            Upgraded::Switched { mut stream, .. } => {
                stream.send(b"ls\n").await?;
                ensure!(stream.receive(3).await? == b"ls\n");
                101
            }
            Upgraded::Refused(reply) => reply.status,
        };
        Ok([get("/pods").await?, get("/metrics").await?, exec])
    }

    /// Returns the certificate that the kubelet receives.
    async fn shown(&self, certificate: Option<&Issued>) -> Result<String> {
        let head = RawRequest::get(&self.host, "/client-certificate");
        let reply = request(self.endpoint(certificate)?, &head).await?;
        Ok(reply.text().trim().to_owned())
    }
}

async fn table(transport: TransportChoice, verifies: bool) -> Result<()> {
    let site = Site::start(transport, verifies).await?;
    let (apiserver, other) = (site.caller(APISERVER)?, site.caller("prometheus")?);
    let foreign = TestCa::new("another")?.issue(&Leaf::caller(APISERVER))?;
    let agents = Leaf::caller(APISERVER);
    // A certificate of the kubelets' client CA does not authenticate a caller of the server.
    let client_cert = site.authorities.clients.issue(&agents)?;
    let scraper = Some(SCRAPER);
    for (who, certificate, token, expected) in [
        ("nobody", None, None, [401, 401, 401]),
        ("a guess", None, Some("guess"), [401, 401, 401]),
        ("a scraper", None, scraper, [403, 200, 403]),
        ("the API server", Some(&apiserver), None, [200, 200, 101]),
        ("both", Some(&apiserver), scraper, [200, 200, 101]),
        ("another caller", Some(&other), None, [401, 401, 401]),
        ("another scraper", Some(&other), scraper, [403, 200, 403]),
    ] {
        let got = site.tried(certificate, token).await;
        let got = got.with_context(|| who.to_owned())?;
        assert_eq!(got, expected, "{who} over {transport:?}");
    }
    for other_cert in [&foreign, &client_cert, &site.own] {
        let head = RawRequest::get(&site.host, "/metrics");
        let refused = request(site.endpoint(Some(other_cert))?, &head).await;
        assert!(refused.is_err(), "{refused:?}");
    }
    Ok(())
}

tests_of! {
    fn p9_only_the_api_servers_certificate_is_delegated_over_quic() =
        table(TransportChoice::Quic, false);
    fn p9_only_the_api_servers_certificate_is_delegated_over_h2() =
        table(TransportChoice::H2, false);
    fn p9_verified_kubelets_authorize_callers_alike() = table(TransportChoice::Quic, true);
}

#[tokio::test(flavor = "multi_thread")]
async fn p9_server_without_a_client_certificate_delegates_nothing() -> Result<()> {
    let authorities = Authorities::new()?;
    authorities.write(&authorities)?;
    let env = authorities
        .env_with(false, |settings| {
            settings.target_cert_file = None;
            settings.target_key_file = None;
        })
        .await?;
    let tls = TargetTls::self_signed(&["worker-1"])?;
    let kubelet = FakeKubelet::start_on("127.0.0.1:0".parse()?, "worker-1", Some(tls)).await?;
    let _agent = env.agent("worker-1").await?;
    let apiserver = authorities.callers.issue(&Leaf::caller(APISERVER))?;
    let host = format!("worker-1:{}", kubelet.addr().port());
    let endpoint = endpoint(&env, env.bound().https.unwrap(), Some(&apiserver))?;
    let reply = request(endpoint, &RawRequest::get(&host, "/client-certificate")).await?;
    assert_eq!(reply.text(), "none\n");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn s11_nothing_but_the_certificate_is_added_to_what_callers_send() -> Result<()> {
    for transport in TRANSPORTS {
        let site = Site::start(transport, true).await?;
        let apiserver = site.caller(APISERVER)?;
        let shown = site.shown(Some(&apiserver)).await?;
        assert_eq!(shown, sha256_hex(&site.own.own.cert[0]));
        let sent = async |fields: &[(&str, &str)]| -> Result<Vec<String>> {
            let head = RawRequest::get(&site.host, "/headers");
            let head = fields
                .iter()
                .fold(head, |head, (name, value)| head.header(name, value));
            let reply = request(site.endpoint(Some(&apiserver))?, &head).await?;
            let text = reply.text().to_lowercase();
            assert_eq!(reply.status, 200, "{text}");
            let lines = text.lines().skip(1).map(|line| line.trim().to_owned());
            let mut lines: Vec<_> = lines.collect();
            lines.retain(|line| !line.is_empty() && !line.starts_with("connection:"));
            lines.sort();
            Ok(lines)
        };
        let host = format!("host: {}", site.host);
        assert_eq!(sent(&[]).await?, [host.as_str()]);
        let fields = [("Authorization", "Bearer of-its-own"), ("Cookie", "a=b")];
        let expected = ["authorization: bearer of-its-own", "cookie: a=b", &host];
        assert_eq!(sent(&fields).await?, expected);
    }
    Ok(())
}

async fn reloaded(env: &TestEnv, files: &str) {
    let name =
        format!("tunnel_server_credential_reloads_total{{files=\"{files}\",result=\"changed\"}}");
    metric_reaches(env, &name, 1.0, WAIT_TIMEOUT).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_connections_belong_to_the_certificate_they_were_opened_with() -> Result<()> {
    let site = Site::start(TransportChoice::Quic, false).await?;
    let apiserver = site.caller(APISERVER)?;
    let mut caller = KeepAliveClient::connect(site.endpoint(Some(&apiserver))?).await?;
    let head = RawRequest::new("GET", "/client-certificate", &site.host);
    let first = sha256_hex(&site.own.own.cert[0]);
    assert_eq!(caller.request(&head).await?.text().trim(), first);
    let name = "tunnel_server_credential_not_after_timestamp_seconds{files=\"target_certificate\"}";
    let ends = metric(&site.env, name).await?;
    assert!(ends > 1.7e9, "{ends}");
    let next = site.authorities.write(&site.authorities)?;
    reloaded(&site.env, "target_certificate").await;
    // The next request follows at once, so the first connection would still be in the pool.
    let second = caller.request(&head).await?.text();
    assert_eq!(second.trim(), sha256_hex(&next.own.cert[0]));
    Ok(())
}

async fn swapped(transport: TransportChoice) -> Result<()> {
    let site = Site::start(transport, true).await?;
    let apiserver = site.caller(APISERVER)?;
    let exec = UpgradeClient::spdy(&site.host, "/exec/default/web-0/app?script=echo");
    let exec = exec.connect(site.endpoint(Some(&apiserver))?).await?;
    let mut exec = exec.switched()?;
    let follow = RawRequest::get(&site.host, "/containerLogs/default/web-0/app?follow=true");
    let mut follow = Exchange::start(site.endpoint(Some(&apiserver))?, &follow).await?;
    ensure!(follow.line().await.is_some(), "no log");
    // The test replaces all files with those of other authorities.
    let next = Authorities::new()?;
    let own = next.write(&site.authorities)?;
    for files in ["client_ca", "target_ca", "target_certificate"] {
        reloaded(&site.env, files).await;
    }
    let new_kubelet = next.kubelet().await?;
    let new_host = format!("worker-1:{}", new_kubelet.addr().port());
    let new_caller = next.callers.issue(&Leaf::caller(APISERVER))?;
    let get = async |host: &str, caller: &Issued| {
        let head = RawRequest::get(host, "/client-certificate");
        request(site.endpoint(Some(caller))?, &head).await
    };
    let reply = get(&new_host, &new_caller).await?;
    assert_eq!(reply.text().trim(), sha256_hex(&own.own.cert[0]));
    let old_kubelet = get(&site.host, &new_caller).await?;
    assert_eq!(old_kubelet.status, 502, "{}", old_kubelet.text());
    assert_eq!(old_kubelet.header("x-tunnel-error"), Some("target_tls"));
    assert!(get(&new_host, &apiserver).await.is_err());
    // Streams that were opened before go on.
    exec.send(b"still here").await?;
    assert_eq!(exec.receive(10).await?, b"still here");
    assert_eq!(site.kubelet.emit("and on"), 1);
    assert_eq!(follow.line().await.as_deref(), Some("and on"));
    exec.finish().await?;
    let rest = exec.read_to_end().await;
    ensure!(rest.ended.is_clean(), "{rest:?}");
    assert_eq!(site.kubelet.end_follows(), 1);
    assert_eq!(follow.line().await, None);
    ensure!(follow.ended().is_some_and(|end| end.is_clean()));
    Ok(())
}

tests_of! {
    fn swap_of_all_authorities_under_a_running_exec_over_quic_cuts_nothing() =
        swapped(TransportChoice::Quic);
    fn swap_of_all_authorities_under_a_running_exec_over_h2_cuts_nothing() =
        swapped(TransportChoice::H2);
}

#[tokio::test(flavor = "multi_thread")]
async fn unusable_files_of_targets_and_callers_keep_the_last_good_ones() -> Result<()> {
    let site = Site::start(TransportChoice::Quic, true).await?;
    let apiserver = site.caller(APISERVER)?;
    let first = sha256_hex(&site.own.own.cert[0]);
    for (files, name) in [
        ("client_ca", "callers.pem"),
        ("target_ca", "kubelets.pem"),
        ("target_certificate", "own.crt"),
    ] {
        let unusable = format!("tunnel_server_credential_files_unusable{{files=\"{files}\"}}");
        let path = site.authorities.path(name);
        let good = std::fs::read(&path)?;
        replace(&path, b"no certificate")?;
        metric_reaches(&site.env, &unusable, 1.0, WAIT_TIMEOUT).await;
        assert_eq!(site.shown(Some(&apiserver)).await?, first, "{files}");
        replace(&path, &good)?;
        metric_is_zero(&site.env, &unusable, WAIT_TIMEOUT).await;
    }
    Ok(())
}
