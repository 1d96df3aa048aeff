//! A real Prometheus that scrapes meta ports and evaluates rules, and the alerts of the repository.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::client::{RawRequest, request};
use crate::guides::page;
use crate::manifests::{documents, items};
use crate::process::{Process, Program, ScratchDir, next_loopback};
use crate::tools::Tool;

/// A Prometheus that scrapes and evaluates every second.
#[derive(Debug)]
pub struct Prometheus {
    process: Process,
    api: SocketAddr,
    _scratch: ScratchDir,
}

impl Prometheus {
    /// Starts a Prometheus that scrapes these meta ports, each with the name of its job, and
    /// evaluates these rules.
    pub fn start(targets: &[(&str, SocketAddr)], rules: &str) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        scratch.file("rules.yaml", rules)?;
        let mut configuration = CONFIGURATION.to_owned();
        for (job, meta) in targets {
            let target = format!("      - {{ targets: [\"{meta}\"], labels: {{ job: {job} }} }}\n");
            configuration.push_str(&target);
        }
        let configuration = scratch.file("prometheus.yml", configuration)?;
        let data = scratch.path().join("data");
        let api = SocketAddr::from((next_loopback(), PORT));
        let program = Program::tool(Tool::Prometheus)?
            .arg(format!("--config.file={}", configuration.display()))
            .arg(format!("--storage.tsdb.path={}", data.display()))
            .arg(format!("--web.listen-address={api}"));
        Ok(Self {
            process: program.start()?,
            api,
            _scratch: scratch,
        })
    }

    pub fn process(&self) -> &Process {
        &self.process
    }

    /// Returns the series of a PromQL query.
    pub async fn query(&self, query: &str) -> Result<Vec<Value>> {
        let get = RawRequest::get("prometheus", &query_path(query));
        let reply = request(self.api, &get).await?;
        let answer: Value = serde_json::from_str(&reply.text()).with_context(|| reply.text())?;
        ensure!(answer["status"] == "success", "{query}: {answer}");
        Ok(items(&answer["data"]["result"]).cloned().collect())
    }

    /// Returns the name and the job of each alert that fires.
    pub async fn firing(&self) -> Result<BTreeSet<(String, String)>> {
        let firing = self.query("ALERTS{alertstate=\"firing\"}").await?;
        let label = |alert: &Value, name: &str| {
            let value = alert["metric"][name].as_str();
            value.unwrap_or_default().to_owned()
        };
        let firing = firing.iter();
        Ok(firing
            .map(|alert| (label(alert, "alertname"), label(alert, "job")))
            .collect())
    }
}

/// Returns the path of a PromQL query in the API of Prometheus.
pub fn query_path(query: &str) -> String {
    let encoded: String = query.bytes().map(|byte| format!("%{byte:02X}")).collect();
    format!("/api/v1/query?query={encoded}")
}

/// Returns the alerts of [`RULES`].
pub fn alerts() -> Result<Vec<Value>> {
    let rules = documents(&page(RULES)?)?.pop().context("no rules")?;
    let groups = items(&rules["groups"]);
    Ok(groups
        .flat_map(|group| items(&group["rules"]))
        .cloned()
        .collect())
}

/// Returns [`RULES`] with one second in place of the time that an alert waits, and with a short
/// window for limits.
pub fn shortened_rules() -> Result<String> {
    let rules = page(RULES)?;
    let lines = rules.lines().map(|line| match line.split_once("for: ") {
        Some((indent, _minutes)) if indent.trim().is_empty() => format!("{indent}for: 1s"),
        _ => line.to_owned(),
    });
    let lines: Vec<_> = lines.collect();
    Ok(lines.join("\n").replace("[10m]", "[10s]"))
}

/// The alerts, as a path in the repository.
pub const RULES: &str = "deploy/monitoring/rules.yaml";

/// The beginning of the configuration. The targets follow.
const CONFIGURATION: &str = "\
global: { scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s }
rule_files: [rules.yaml]
scrape_configs:
  - job_name: meta
    static_configs:
";

/// Port of Prometheus on a loopback address of its own, below those that Linux assigns.
const PORT: u16 = 21290;
