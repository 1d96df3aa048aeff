//! Scrape configurations for targets on nodes, as entries of `prometheus.yml` or as objects of the
//! Prometheus operator.

use tunnel_proto::wire::name::{NodeName, Port};

use super::values::{ServerAddress, proxy_url, yaml};
use super::{OutputArgs, RenderError};

/// How Prometheus reaches the targets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ScrapeMethod {
    /// Through the CONNECT listener; targets keep their addresses.
    ProxyUrl,
    /// The server lists the nodes; their names resolve to the server.
    HttpSd,
    /// A rule replaces the address of a target by the name of its node, which resolves to the
    /// server.
    Relabel,
}

/// The object that is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ScrapeObject {
    /// An entry of `scrape_configs` of prometheus.yml.
    Config,
    ServiceMonitor,
    PodMonitor,
    ScrapeConfig,
}

/// The flags of `render prometheus`.
#[derive(Debug, Clone, clap::Args)]
pub struct PrometheusArgs {
    /// How Prometheus reaches the targets
    #[arg(long, value_enum)]
    pub method: ScrapeMethod,
    /// What to print: an entry of prometheus.yml, or an object of the Prometheus operator
    #[arg(long, value_enum, default_value = "config")]
    pub object: ScrapeObject,
    /// Name of the job; for monitors also the label app.kubernetes.io/name of the exporter
    #[arg(long, value_name = "NAME", default_value = "node-exporter")]
    pub job: String,
    /// Namespace of the object
    #[arg(long, value_name = "NS", default_value = "monitoring")]
    pub namespace: String,
    /// Name of the exporter's port, for monitors
    #[arg(long, value_name = "NAME", default_value = "metrics")]
    pub port_name: String,
    /// Port of the targets, for http-sd and --target
    #[arg(long, value_name = "PORT", default_value = "9100")]
    pub port: Port,
    /// With proxy-url, a node to scrape without discovery; repeatable
    #[arg(long, value_name = "NODE")]
    pub target: Vec<NodeName>,
    /// Address of the CONNECT listener, for proxy-url
    #[arg(
        long,
        value_name = "HOST:PORT",
        default_value = "tunnel-connect.kube-system.svc:8131"
    )]
    pub proxy: ServerAddress,
    /// Name of the server's --connect-auth for proxy-url; replace PASSWORD in the text
    #[arg(long, value_name = "NAME")]
    pub proxy_user: Option<String>,
    /// Address of the server's meta port, for http-sd
    #[arg(
        long,
        value_name = "HOST:PORT",
        default_value = "tunnel-server-metrics.kube-system.svc:10265"
    )]
    pub meta: ServerAddress,
    /// With http-sd, leave out nodes that are not reached through the tunnel
    #[arg(long)]
    pub edge_only: bool,
    /// With relabel, the label with the name of the target's node
    #[arg(
        long,
        value_name = "LABEL",
        default_value = "__meta_kubernetes_pod_node_name"
    )]
    pub node_label: String,
    /// Where the text goes.
    #[command(flatten)]
    pub output: OutputArgs,
}

impl PrometheusArgs {
    /// Returns the text.
    ///
    /// # Errors
    /// Returns [`RenderError::Usage`] for a method that the object does not offer.
    pub(super) fn text(&self) -> Result<String, RenderError> {
        match self.object {
            ScrapeObject::Config => Ok(self.config()),
            ScrapeObject::ServiceMonitor => self.monitor("ServiceMonitor", "endpoints"),
            ScrapeObject::PodMonitor => self.monitor("PodMonitor", "podMetricsEndpoints"),
            ScrapeObject::ScrapeConfig => self.scrape_config(),
        }
    }

    fn config(&self) -> String {
        let job = yaml(&self.job);
        let settings = match self.method {
            ScrapeMethod::ProxyUrl => {
                format!(
                    "    proxy_url: {}\n{}",
                    proxy_url(&self.proxy, self.proxy_user.as_deref()),
                    self.targets("static_configs", "    ")
                )
            }
            ScrapeMethod::HttpSd => format!(
                "    http_sd_configs:\n      - url: {}\n{}",
                self.discovery_url(),
                self.edge_rule("relabel_configs", "source_labels", "    ")
            ),
            ScrapeMethod::Relabel => {
                let label = yaml(&self.node_label);
                format!(
                    "    relabel_configs:
      - source_labels: [{label}, __address__]
        regex: (.+);.*:(.*)
        target_label: __address__
        replacement: $1:$2
"
                )
            }
        };
        format!("scrape_configs:\n  - job_name: {job}\n{settings}")
    }

    fn monitor(&self, kind: &str, endpoints: &str) -> Result<String, RenderError> {
        let method = match self.method {
            ScrapeMethod::ProxyUrl => format!(
                "      proxyUrl: {}\n",
                proxy_url(&self.proxy, self.proxy_user.as_deref())
            ),
            ScrapeMethod::Relabel => format!(
                "      relabelings:
        - sourceLabels: [{}, __address__]
          regex: (.+);.*:(.*)
          targetLabel: __address__
          replacement: $1:$2
",
                yaml(&self.node_label)
            ),
            ScrapeMethod::HttpSd => {
                return Err(RenderError::Usage(
                    "monitors have no http-sd; use --object scrape-config, or another --method",
                ));
            }
        };
        let (job, port) = (yaml(&self.job), yaml(&self.port_name));
        let head = self.head("v1", kind);
        Ok(format!(
            "{head}  selector:
    matchLabels:
      app.kubernetes.io/name: {job}
  {endpoints}:
    - port: {port}
{method}"
        ))
    }

    fn scrape_config(&self) -> Result<String, RenderError> {
        let settings = match self.method {
            ScrapeMethod::ProxyUrl => {
                format!(
                    "  proxyUrl: {}\n{}",
                    proxy_url(&self.proxy, self.proxy_user.as_deref()),
                    self.targets("staticConfigs", "  ")
                )
            }
            ScrapeMethod::HttpSd => format!(
                "  httpSDConfigs:\n    - url: {}\n{}",
                self.discovery_url(),
                self.edge_rule("relabelings", "sourceLabels", "  ")
            ),
            ScrapeMethod::Relabel => {
                return Err(RenderError::Usage(
                    "a ScrapeConfig needs discovery for relabel; use http-sd, or a ServiceMonitor or PodMonitor",
                ));
            }
        };
        Ok(format!(
            "{}  jobName: {}\n{settings}",
            self.head("v1alpha1", "ScrapeConfig"),
            yaml(&self.job)
        ))
    }

    fn head(&self, version: &str, kind: &str) -> String {
        let name = yaml(&format!("edge-{}", self.job));
        let namespace = yaml(&self.namespace);
        format!(
            "\
apiVersion: monitoring.coreos.com/{version}
kind: {kind}
metadata:
  name: {name}
  namespace: {namespace}
spec:
"
        )
    }

    fn discovery_url(&self) -> String {
        let (meta, port) = (&self.meta, self.port);
        yaml(&format!("http://{meta}/sd/prometheus?port={port}"))
    }

    fn targets(&self, key: &str, indent: &str) -> String {
        if self.target.is_empty() {
            return String::new();
        }
        let port = self.port;
        let targets = self.target.iter();
        let targets: Vec<_> = targets
            .map(|node| yaml(&format!("{node}:{port}")))
            .collect();
        let targets = targets.join(", ");
        format!("{indent}{key}:\n{indent}  - targets: [{targets}]\n")
    }

    fn edge_rule(&self, key: &str, source_labels: &str, indent: &str) -> String {
        if !self.edge_only {
            return String::new();
        }
        format!(
            "\
{indent}{key}:
{indent}  - {source_labels}: [__meta_tunnel_edge]
{indent}    regex: \"true\"
{indent}    action: keep
"
        )
    }
}
