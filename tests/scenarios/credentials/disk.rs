//! F24: a disk that is full or read-only. T21: no key appears in output or in files.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::env::{Agent, TestEnv};
use tunnel_tests::eventually::eventually;
use tunnel_tests::process::ScratchDir;
use tunnel_tests::targets::Exporter;
use tunnel_tests::tools::{Skip, or_skip};

use super::{ends, metric, metric_reaches, short_lives, wait_until_after};

/// A small tmpfs, unmounted on drop. Mounting needs root.
pub(crate) struct SmallDisk(PathBuf);

impl SmallDisk {
    pub(crate) fn new(at: &Path, kib: u32) -> Result<Self, Skip> {
        let options = format!("size={kib}k,mode=0700");
        let mounted = std::fs::create_dir_all(at).is_ok()
            && mount(&["-t", "tmpfs", "-o", &options, "tmpfs"], at);
        if !mounted {
            return Err(Skip::because("mounting a tmpfs needs root"));
        }
        Ok(Self(at.to_owned()))
    }

    pub(crate) fn read_only(&self, read_only: bool) {
        let how = if read_only { "ro" } else { "rw" };
        assert!(mount(&["-o", &format!("remount,{how}")], &self.0));
    }

    /// Fills the file system. Returns the file that occupies the space.
    pub(crate) fn fill(&self) -> PathBuf {
        let file = self.0.join("filler");
        let _no_room = std::fs::write(&file, vec![0; 1 << 20]);
        file
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _best_effort = Command::new("umount").arg("-l").arg(&self.0).output();
    }
}

fn mount(arguments: &[&str], at: &Path) -> bool {
    let mounted = Command::new("mount").args(arguments).arg(at).output();
    mounted.is_ok_and(|output| output.status.success())
}

#[tokio::test(flavor = "multi_thread")]
async fn f24_full_and_read_only_disks_are_survived_and_reported() -> Result<()> {
    let env = short_lives(6).await?;
    let exporter = Exporter::start("worker-1").await?;
    let dir = env.path().join("agent-worker-1");
    let Some(disk) = or_skip(SmallDisk::new(&dir, 64)) else {
        return Ok(());
    };
    let mut config = env.agent_config_with("worker-1", |settings| {
        settings.meta_listen = Some("127.0.0.1:0".into());
    })?;
    config.data_dir = dir.clone();
    let agent = Agent::start(config.clone()).await?;
    env.connected("worker-1").await;
    let host = format!("worker-1:{}", exporter.addr().port());
    let meta = agent.meta().unwrap();
    let shows = async |line: &str| {
        let shown = request(meta, &RawRequest::get("meta", "/metrics")).await?;
        let text = shown.text();
        ensure!(text.lines().any(|shown| shown == line), "{line}: {text}");
        anyhow::Ok(())
    };
    for full in [false, true] {
        let filler = full.then(|| disk.fill());
        if !full {
            disk.read_only(true);
        }
        let before = ends(&dir.join("agent.crt"))?;
        // The agent runs until the stored certificate has expired, so a request succeeds only with
        // the certificate in memory.
        eventually("the alarm", Duration::from_secs(20), async || {
            shows("tunnel_agent_certificate_unsaved 1").await
        })
        .await;
        let word = if full {
            "the disk is full"
        } else {
            "read-only"
        };
        eventually("the condition", Duration::from_secs(20), async || {
            let ready = request(meta, &RawRequest::get("meta", "/readyz?verbose")).await?;
            let text = ready.text();
            let is_shown = text.contains("[!] disk: ") && text.contains(word);
            ensure!(is_shown, "{text}");
            anyhow::Ok(())
        })
        .await;
        wait_until_after(before + Duration::from_secs(1)).await;
        let reply = request(env.http(), &RawRequest::get(&host, "/metrics")).await?;
        ensure!(reply.status == 200, "{}", reply.text());
        ensure!(
            ends(&dir.join("agent.crt"))? == before,
            "written to a full disk?"
        );
        if let Some(filler) = filler {
            std::fs::remove_file(filler)?;
        }
        disk.read_only(false);
        eventually("it is stored again", Duration::from_secs(40), async || {
            ensure!(ends(&dir.join("agent.crt"))? > before);
            shows("tunnel_agent_certificate_unsaved 0").await
        })
        .await;
    }
    agent.stop().await?;
    // Without the key and a token, the next start fails and names both.
    std::fs::remove_file(dir.join("agent.key"))?;
    config.token = None;
    let error = match Agent::start(config).await {
        Err(error) => error,
        Ok(agent) => agent.ended().await.unwrap_err(),
    };
    let text = format!("{error:#}");
    ensure!(
        text.contains("agent.key") && text.contains("token"),
        "{text}"
    );
    Ok(())
}

/// F24 at the server: fills the disk of the data directory. The server serves and renews with the
/// keys in memory, refuses tokens that it cannot save, and saves what it observed when it can.
#[tokio::test(flavor = "multi_thread")]
async fn f24_server_on_a_full_disk_serves_and_renews_and_catches_up() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let dir = scratch.path().join("server");
    let Some(disk) = or_skip(SmallDisk::new(&dir, 512)) else {
        return Ok(());
    };
    let mut env = TestEnv::start_with(|settings| {
        settings.data_dir = Some(dir.to_string_lossy().into_owned());
        settings.limits = TestEnv::limits("certificateLife: 6s");
    })
    .await?;
    let exporter = Exporter::start("worker-1").await?;
    let _agent = env.agent("worker-1").await?;
    let host = format!("worker-1:{}", exporter.addr().port());
    let filler = disk.fill();
    // The store has some room of its own.
    let refused = (0..5000).find_map(|_| env.token("worker-2", &[]).err());
    let refused = format!("{:#}", refused.context("the disk has room")?);
    ensure!(refused.contains("No space left"), "{refused}");
    let condition = "[!] saved state: ";
    let verbose = async || -> Result<String> {
        let page = RawRequest::get("meta", "/readyz?verbose");
        Ok(request(env.meta(), &page).await?.text())
    };
    eventually("the condition", Duration::from_secs(20), async || {
        let text = verbose().await?;
        ensure!(text.contains(condition), "{text}");
        anyhow::Ok(())
    })
    .await;
    let renewed = "tunnel_server_renewals_total{result=\"issued\"}";
    let before = metric(&env, renewed).await?;
    metric_reaches(&env, renewed, before + 1.0, Duration::from_secs(15)).await;
    let reply = request(env.http(), &RawRequest::get(&host, "/metrics")).await?;
    ensure!(reply.status == 200, "{}", reply.text());
    std::fs::remove_file(filler)?;
    eventually("all is saved", Duration::from_secs(20), async || {
        let text = verbose().await?;
        ensure!(!text.contains(condition), "{text}");
        anyhow::Ok(())
    })
    .await;
    let late = env.agent_config("worker-3")?;
    let _late = Agent::start(late).await?;
    env.connected("worker-3").await;
    env.restart_server().await?;
    let known = env.nodes().snapshot();
    ensure!(known.len() == 3, "{known:?}");
    Ok(())
}

/// T21: metrics, lists and `Debug` output contain no key and no token.
#[tokio::test(flavor = "multi_thread")]
async fn t21_metrics_nodes_and_debug_texts_hold_no_secret() -> Result<()> {
    let env = TestEnv::start().await?;
    let token = env.token("worker-1", &[])?;
    let mut config = env.agent_config_with("worker-1", |settings| {
        settings.meta_listen = Some("127.0.0.1:0".into());
    })?;
    config.token = Some(tunnel_agent::config::TokenSource::Inline(token.clone()));
    let debug = format!("{config:?}");
    let agent = Agent::start(config).await?;
    env.connected("worker-1").await;
    let key = std::fs::read_to_string(env.path().join("agent-worker-1").join("agent.key"))?;
    let ca_key = std::fs::read_to_string(env.path().join("server").join("ca.key"))?;
    let mut shown = vec![
        debug,
        format!("{agent:?}"),
        format!("{env:?}"),
        format!("{:?}", env.ca()),
    ];
    for path in ["/metrics", "/nodes", "/readyz?verbose"] {
        let page = request(env.meta(), &RawRequest::get("meta", path)).await?;
        shown.push(page.text());
    }
    let metrics = RawRequest::get("meta", "/metrics");
    shown.push(request(agent.meta().unwrap(), &metrics).await?.text());
    let secret = tunnel_proto::wire::enroll::hex(token.secret());
    let lines = key.lines().chain(ca_key.lines());
    let lines = lines.filter(|line| line.len() > 40);
    let secrets: Vec<&str> = lines.chain([secret.as_str()]).collect();
    ensure!(secrets.len() >= 3);
    for text in &shown {
        for secret in &secrets {
            ensure!(!text.contains(secret), "{}", &text[..200.min(text.len())]);
        }
    }
    let stored = std::fs::read(env.path().join("server/state.redb"))?;
    let stored = String::from_utf8_lossy(&stored);
    ensure!(
        stored.contains(token.id()) && !stored.contains(&secret),
        "only its hash is stored"
    );
    Ok(())
}
