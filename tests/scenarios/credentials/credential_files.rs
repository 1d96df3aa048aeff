//! F19: certificates that the operator provides are replaced under load.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustls::RootCertStore;
use tunnel_agent::config::{Config as AgentConfig, RawConfig as AgentRawConfig};
use tunnel_tests::ca::{Issued, Leaf, TestCa, replace};
use tunnel_tests::client::{ClientTls, Endpoint, RawRequest, UpgradeClient, request};
use tunnel_tests::env::{Agent, TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::load::Load;
use tunnel_tests::process::ScratchDir;
use tunnel_tests::targets::{Exporter, FakeKubelet};

use super::{metric, metric_is_zero, metric_reaches};

/// Credential files of a server and its agents, all issued by one CA of the test.
pub(super) struct Files {
    pub(super) scratch: ScratchDir,
    pub(super) ca: TestCa,
}

impl Files {
    pub(super) fn new() -> Result<Self> {
        let files = Self {
            scratch: ScratchDir::new()?,
            ca: TestCa::new("ours")?,
        };
        files.issue(&Leaf::server(), "server")?;
        replace(&files.path("server-ca.pem"), files.ca.pem().as_bytes())?;
        Ok(files)
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_string_lossy().into_owned()
    }

    pub(super) async fn env(&self) -> Result<TestEnv> {
        TestEnv::start_with(|settings| {
            settings.agent_ca = Some(self.text("server-ca.pem"));
            settings.agent_cert_file = Some(self.text("server.crt"));
            settings.agent_key_file = Some(self.text("server.key"));
            settings.limits = TestEnv::limits("reloadEvery: 50ms");
        })
        .await
    }

    /// Issues a certificate and writes it with its key to the files of this name.
    fn issue(&self, leaf: &Leaf, name: &str) -> Result<()> {
        self.ca.issue(leaf)?.write(self.scratch.path(), name)?;
        Ok(())
    }

    /// Returns the configuration of an agent of `node` that reads its roots from a separate bundle.
    fn config(
        &self,
        env: &TestEnv,
        node: &str,
        change: impl FnOnce(&mut AgentRawConfig),
    ) -> Result<AgentConfig> {
        self.issue(&Leaf::agent(node), node)?;
        let bundle = format!("{node}-ca.pem");
        replace(&self.path(&bundle), self.ca.pem().as_bytes())?;
        env.agent_config_with(node, |settings| {
            settings.cert_file = Some(self.path(&format!("{node}.crt")));
            settings.key_file = Some(self.path(&format!("{node}.key")));
            settings.ca_file = Some(self.path(&bundle));
            settings.limits = TestEnv::agent_limits("reloadEvery: 50ms");
            change(settings);
        })
    }

    /// Starts an agent of `node` and waits for its session.
    pub(super) async fn agent(&self, env: &TestEnv, node: &str) -> Result<Agent> {
        self.agent_over(env, node, "auto").await
    }

    pub(super) async fn agent_over(
        &self,
        env: &TestEnv,
        node: &str,
        transport: &str,
    ) -> Result<Agent> {
        let config = self.config(env, node, |settings| {
            settings.transport = Some(transport.into());
        })?;
        let agent = Agent::start(config).await?;
        env.connected(node).await;
        Ok(agent)
    }
}

/// Returns the end of the certificate with which a node's newest session was opened.
fn certificate_of(env: &TestEnv, node: &str) -> Result<Option<std::time::SystemTime>> {
    let sessions = env.registry().of_node(&node.parse()?);
    let newest = sessions.first();
    Ok(newest.map(|session| session.session.peer().not_after))
}

async fn fifty_rotations(transport: &str) -> Result<()> {
    let files = Files::new()?;
    let env = files.env().await?;
    let exporter = Exporter::start("worker-1").await?;
    let agent = files.agent_over(&env, "worker-1", transport).await?;
    let hosts = [format!("worker-1:{}", exporter.addr().port())];
    let load = Load::start(env.http(), &hosts, 2).await?;
    for round in 1..=50u64 {
        let mut leaf = Leaf::agent("worker-1");
        leaf.until += Duration::from_secs(round);
        let issued = files.ca.issue(&leaf)?;
        let (_, expected) = tunnel_proto::identity::validity(&issued.own.cert[0])?;
        issued.write(files.scratch.path(), "worker-1")?;
        // In every fifth round the test also replaces the server's certificate.
        if round % 5 == 0 {
            files.issue(&Leaf::server(), "server")?;
        }
        let moved = async || {
            let used = certificate_of(&env, "worker-1")?;
            ensure!(used == Some(expected), "{used:?} is not {expected:?}");
            Ok(())
        };
        eventually(&format!("rotation {round} is in use"), WAIT_TIMEOUT, moved).await;
    }
    let outcome = load.end().await?;
    outcome.check()?;
    ensure!(outcome.open_streams == 1);
    agent.stop().await?;
    Ok(())
}

tests_of! {
    fn f19_fifty_rotations_of_leaves_under_load_over_quic_fail_nothing() = fifty_rotations("quic");
    fn f19_fifty_rotations_of_leaves_under_load_over_h2_fail_nothing() = fifty_rotations("h2");
}

#[tokio::test(flavor = "multi_thread")]
async fn f20_unusable_files_keep_the_last_good_ones_and_alarm() -> Result<()> {
    let files = Files::new()?;
    let env = files.env().await?;
    let exporter = Exporter::start("worker-1").await?;
    let agent = files.agent(&env, "worker-1").await?;
    let host = format!("worker-1:{}", exporter.addr().port());
    let works = async || -> Result<()> {
        let reply = request(env.http(), &RawRequest::get(&host, "/metrics")).await?;
        ensure!(reply.status == 200, "{}", reply.text());
        Ok(())
    };
    let good_ca = std::fs::read(files.path("server-ca.pem"))?;
    let good_cert = std::fs::read(files.path("server.crt"))?;
    let other = TestCa::new("other")?.issue(&Leaf::server())?;
    let other = other.certificate.as_str();
    for (what, file, bad, good) in [
        ("agent_ca", "server-ca.pem", "no certificate", &good_ca),
        ("agent_ca", "server-ca.pem", "", &good_ca),
        ("agent_certificate", "server.crt", other, &good_cert),
    ] {
        let unusable = format!("tunnel_server_credential_files_unusable{{files=\"{what}\"}}");
        replace(&files.path(file), bad.as_bytes())?;
        metric_reaches(&env, &unusable, 1.0, WAIT_TIMEOUT).await;
        works().await?;
        // New sessions are admitted, too.
        drop(files.agent(&env, "worker-2").await?);
        replace(&files.path(file), good)?;
        metric_is_zero(&env, &unusable, WAIT_TIMEOUT).await;
        works().await?;
    }
    // A missing key file.
    let unusable = "tunnel_server_credential_files_unusable{files=\"agent_certificate\"}";
    std::fs::remove_file(files.path("server.key"))?;
    metric_reaches(&env, unusable, 1.0, WAIT_TIMEOUT).await;
    works().await?;
    agent.stop().await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn operators_own_server_certificate_is_verified_by_name() -> Result<()> {
    let files = Files::new()?;
    let named = Leaf {
        uri: None,
        dns: Some("tunnel.example".into()),
        ..Leaf::server()
    };
    files.issue(&named, "server")?;
    let env = files.env().await?;
    let start = async |name: Option<&str>| -> Result<Agent> {
        let config = files.config(&env, "worker-1", |settings| {
            settings.server_name = name.map(str::to_owned);
        })?;
        Agent::start(config).await
    };
    // Without `--server-name` the agent requires the server's role in the certificate. A
    // certificate for another name fails, too.
    for wrong in [None, Some("other.example")] {
        let agent = start(wrong).await?;
        let failed = "tunnel_server_handshakes_total{result=\"handshake_failed\"}";
        let before = metric(&env, failed).await?;
        metric_reaches(&env, failed, before + 1.0, WAIT_TIMEOUT).await;
        ensure!(env.registry().all().is_empty());
        drop(agent);
    }
    let _agent = start(Some("tunnel.example")).await?;
    env.connected("worker-1").await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn server_with_the_operators_ca_issues_nothing_and_reports_it() -> Result<()> {
    let files = Files::new()?;
    let env = files.env().await?;
    let ended = Agent::start(env.agent_config("worker-1")?).await?.ended();
    let ended = tokio::time::timeout(scaled(WAIT_TIMEOUT), ended).await?;
    let text = format!("{:#}", ended.unwrap_err());
    ensure!(
        text.contains("not_offered") && text.contains("--cert-file"),
        "{text}"
    );
    Ok(())
}

/// Starts a server whose HTTPS listener has the certificate `tls.crt` of this folder.
async fn https_env(folder: &Path) -> Result<TestEnv> {
    let text = |name| Some(folder.join(name).to_string_lossy().into_owned());
    TestEnv::start_with(|settings| {
        settings.https_cert_file = text("tls.crt");
        settings.https_key_file = text("tls.key");
        settings.limits = TestEnv::limits("reloadEvery: 20ms");
        settings.https_proxy_ports = Some("1024-65535".into());
        settings.http_proxy_ports = None;
    })
    .await
}

/// Returns the HTTPS listener for a caller that trusts this CA alone.
fn endpoint(env: &TestEnv, ca: &TestCa) -> Result<Endpoint> {
    let mut roots = RootCertStore::empty();
    roots.add(ca.root().clone())?;
    let tls = ClientTls::verifying("worker-1", roots, None)?;
    let https = env.bound().https.context("the HTTPS listener")?;
    Ok(Endpoint::tls(https, tls))
}

#[tokio::test(flavor = "multi_thread")]
async fn f19_certificate_of_the_https_listener_is_replaced_under_load() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let ca = TestCa::new("https")?;
    let leaf = Leaf {
        uri: None,
        dns: Some("worker-1".into()),
        ..Leaf::server()
    };
    ca.issue(&leaf)?.write(scratch.path(), "tls")?;
    let env = https_env(scratch.path()).await?;
    let kubelet = FakeKubelet::start("worker-1").await?;
    let _agent = env.agent("worker-1").await?;
    let endpoint = endpoint(&env, &ca)?;
    let host = format!("worker-1:{}", kubelet.addr().port());
    let changed =
        "tunnel_server_credential_reloads_total{files=\"https_certificate\",result=\"changed\"}";
    let mut answered = 0;
    for round in 1..=10 {
        ca.issue(&leaf)?.write(scratch.path(), "tls")?;
        let replaced = metric_reaches(&env, changed, f64::from(round), WAIT_TIMEOUT);
        let asked = async {
            loop {
                let reply = request(endpoint.clone(), &RawRequest::get(&host, "/metrics")).await?;
                ensure!(reply.status == 200, "{}", reply.text());
                answered += 1;
            }
            #[expect(unreachable_code, reason = "declares the error type")]
            anyhow::Ok(())
        };
        tokio::select! {
            failed = asked => failed?,
            () = replaced => {}
        }
    }
    ensure!(answered > 0);
    Ok(())
}

/// Installs a certificate like the kubelet does in a mounted Secret: writes a new folder and
/// replaces the link to it.
fn mount(volume: &Path, revision: u32, issued: &Issued) -> Result<()> {
    let name = format!("..revision-{revision}");
    let folder = volume.join(&name);
    std::fs::create_dir(&folder)?;
    std::fs::write(folder.join("tls.crt"), &issued.certificate)?;
    std::fs::write(folder.join("tls.key"), &issued.key)?;
    let (data, fresh) = (volume.join("..data"), volume.join("..data_tmp"));
    let before = std::fs::read_link(&data).ok();
    symlink(&name, &fresh)?;
    std::fs::rename(&fresh, &data)?;
    match before {
        Some(before) => std::fs::remove_dir_all(volume.join(before))?,
        None => {
            for file in ["tls.crt", "tls.key"] {
                symlink(Path::new("..data").join(file), volume.join(file))?;
            }
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn f20_mounted_certificate_of_the_https_listener_is_swapped_under_an_exec_that_goes_on()
-> Result<()> {
    let scratch = ScratchDir::new()?;
    let leaf = Leaf::target("worker-1");
    // Each certificate has a separate CA. A caller that trusts only one CA detects which
    // certificate the server presents.
    let authorities = ["first", "second", "third"].map(TestCa::new);
    let mut authorities = authorities.into_iter().collect::<Result<Vec<_>>>()?;
    let rest = authorities.split_off(1);
    mount(scratch.path(), 0, &authorities[0].issue(&leaf)?)?;
    let env = https_env(scratch.path()).await?;
    let kubelet = FakeKubelet::start("worker-1").await?;
    let _agent = env.agent("worker-1").await?;
    let host = format!("worker-1:{}", kubelet.addr().port());
    let exec = async |ca: &TestCa| -> Result<_> {
        let client = UpgradeClient::spdy(&host, "/exec/default/web-0/app?command=sh");
        client.connect(endpoint(&env, ca)?).await?.switched()
    };
    let mut running = vec![exec(&authorities[0]).await?];
    for (revision, ca) in (1..).zip(&rest) {
        mount(scratch.path(), revision, &ca.issue(&leaf)?)?;
        let opened = eventually("the new certificate", WAIT_TIMEOUT, async || exec(ca).await).await;
        running.push(opened);
        let head = RawRequest::get(&host, "/healthz");
        let old = request(endpoint(&env, &authorities[0])?, &head).await;
        ensure!(old.is_err(), "the first certificate is still shown");
        for stream in &mut running {
            stream.send(b"still here").await?;
            ensure!(stream.receive(10).await? == b"still here");
        }
    }
    for mut stream in running {
        stream.finish().await?;
        let rest = stream.read_to_end().await;
        ensure!(rest.ended.is_clean() && rest.bytes.is_empty(), "{rest:?}");
    }
    Ok(())
}
