//! Credentials over their whole life: enrollment, renewal, grace period, revocation, certificates
//! that the operator provides, and refused peers.

pub(crate) mod attacks;
pub(crate) mod ca_rotation;
mod client_ca;
mod clocks;
mod credential_files;
mod delegation;
mod diag;
pub(crate) mod disk;
mod distrusted;
mod enrollment;
mod impostor;
mod life;
mod processes;
mod revoked;
mod rotation;
mod secrets;
mod stolen_leaf;
mod targets;

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, SystemTime};

use anyhow::Result;
use tunnel_proto::identity::validity;
use tunnel_proto::tls::files::chain;
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::env::TestEnv;
use tunnel_tests::eventually::eventually;

/// Returns the end of the validity of the certificate in a file.
fn ends(path: &Path) -> Result<SystemTime> {
    let certificates = chain(&std::fs::read(path)?)?;
    Ok(validity(&certificates[0])?.1)
}

/// Returns the value of a server metric, or 0 without such a series. `name` includes the labels in
/// the form of the exposition format. Without labels, this is the sum over all of them.
pub(crate) async fn metric(env: &TestEnv, name: &str) -> Result<f64> {
    metric_at(env.meta(), name).await
}

/// Returns the value of a metric at a meta port.
async fn metric_at(meta: SocketAddr, name: &str) -> Result<f64> {
    let shown = request(meta, &RawRequest::get("meta", "/metrics")).await?;
    let text = shown.text();
    let series = text.lines().filter_map(|line| line.strip_prefix(name));
    let series = series.filter(|rest| rest.starts_with([' ', '{']));
    let values = series.filter_map(|rest| rest.rsplit(' ').next());
    Ok(values.map(str::parse::<f64>).sum::<Result<f64, _>>()?)
}

/// Waits until a server metric is 0.
async fn metric_is_zero(env: &TestEnv, name: &str, patience: Duration) {
    eventually(&format!("{name} 0"), patience, async || {
        let value = metric(env, name).await?;
        anyhow::ensure!(value == 0.0, "{name} is {value}");
        anyhow::Ok(())
    })
    .await;
}

/// Starts a server that issues certificates of this lifetime.
async fn short_lives(seconds: u64) -> Result<TestEnv> {
    TestEnv::start_with(|settings| {
        settings.limits = TestEnv::limits(&format!("certificateLife: {seconds}s"));
    })
    .await
}

/// Waits until the time is past `end`.
async fn wait_until_after(end: SystemTime) {
    let over = async || (SystemTime::now() > end).then_some(());
    eventually("the certificate ends", Duration::from_secs(10), over).await;
}

/// Waits until a server metric is at least `least`.
pub(crate) async fn metric_reaches(env: &TestEnv, name: &str, least: f64, patience: Duration) {
    eventually(&format!("{name} {least}"), patience, async || {
        let value = metric(env, name).await?;
        anyhow::ensure!(value >= least, "{name} is {value}");
        anyhow::Ok(())
    })
    .await;
}
