//! The version of the software as a metric.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::gauge::ConstGauge;

/// The collector that exports `tunnel_build_info`. Both binaries use the same name, so that one query
/// shows which versions are in use.
#[derive(Debug)]
pub(super) struct BuildInfo;

impl Collector for BuildInfo {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let gauge = ConstGauge::new(1_u64);
        let help = "Version of the software, and the commit that it was built from; the value is 1";
        let kind = gauge.metric_type();
        let mut family = encoder.encode_descriptor("tunnel_build_info", help, None, kind)?;
        let labels = [("version", env!("CARGO_PKG_VERSION")), ("commit", COMMIT)];
        gauge.encode(family.encode_family(&labels)?)
    }
}

/// Commit of the sources, from `CULVERT_COMMIT` in the environment of the build, or `unknown`.
pub const COMMIT: &str = match option_env!("CULVERT_COMMIT") {
    Some(commit) => commit,
    None => "unknown",
};

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;

    use super::*;

    #[test]
    fn version_and_commit_are_labels() {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(BuildInfo));
        let mut page = String::new();
        prometheus_client::encoding::text::encode(&mut page, &registry).unwrap();
        let version = env!("CARGO_PKG_VERSION");
        let series = format!("tunnel_build_info{{version=\"{version}\",commit=\"{COMMIT}\"}} 1\n");
        assert!(page.contains(&series), "{page}");
    }
}
