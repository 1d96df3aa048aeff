//! P11 11a: a real Prometheus scrapes real node_exporters through the CONNECT listener. `proxy_url`
//! is its only configuration for that.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tunnel_tests::ca::{Leaf, TestCa};
use tunnel_tests::eventually::eventually;
use tunnel_tests::netns::{CLOUD_ADDRESS, EDGE_ADDRESS, Topology};
use tunnel_tests::process::{AgentSetup, Listener, Program, ScratchDir, ServerSetup};
use tunnel_tests::tools::{Tool, or_skip, require};

use super::NODE;
use crate::prometheus::{active_targets, prometheus, query_prometheus};

#[tokio::test(flavor = "multi_thread")]
async fn p11_prometheus_scrapes_http_and_https_by_proxy_url_and_a_wrong_password_is_down()
-> Result<()> {
    let tools = require(&[Tool::Prometheus, Tool::NodeExporter, Tool::Curl]);
    let Some(sites) = or_skip(tools.and_then(|()| Topology::new())) else {
        return Ok(());
    };
    let scratch = ScratchDir::new()?;
    let [edge, _] = sites.edges();
    let issuer = TestCa::new("cluster")?;
    let serving = issuer.issue(&Leaf::target(NODE))?;
    let (certificate, key) = serving.write(scratch.path(), "exporter")?;
    let ca = scratch.file("ca.crt", issuer.pem())?;
    let web = format!(
        "tls_server_config: {{ cert_file: {}, key_file: {} }}\n",
        certificate.display(),
        key.display()
    );
    let web = scratch.file("web.yml", web)?;
    let exporter = |port: u16| -> Result<Program> {
        Ok(Program::tool(Tool::NodeExporter)?
            .arg(format!("--web.listen-address={EDGE_ADDRESS}:{port}"))
            .args(["--collector.disable-defaults", "--collector.uname"])
            .inside(Some(edge.node())))
    };
    let _plain = exporter(9100)?.start()?;
    let secure = exporter(9101)?.arg(format!("--web.config.file={}", web.display()));
    let _secure = secure.start()?;
    let passwords = scratch.file("passwords", "prometheus:right-0123456789\n")?;
    let (endpoint, passwords) = (format!("{CLOUD_ADDRESS}:8131"), passwords.to_string_lossy());
    let setup = ServerSetup::new(&scratch.path().join("server"), Some(sites.cloud()));
    let setup = setup.args(&["--http-proxy-ports", "9100", "--connect-ports", "9101"]);
    let setup = setup.args(&["--proxy-port-listen", "off"]);
    let setup = setup.args(&["--connect-listen", &endpoint, "--connect-auth", &passwords]);
    let server = setup.start().await?;
    let token = server.token(NODE, Some(EDGE_ADDRESS.into())).await?;
    let agents = SocketAddr::new(
        CLOUD_ADDRESS.into(),
        server.address(Listener::Agents).port(),
    );
    let folder = scratch.path().join("agent");
    let agent = AgentSetup::new(NODE, agents, &folder, Some(edge.node()));
    let _agent = agent.args(&["--token", &token]).start()?;
    server.wait_until_connected(&[NODE]).await;

    let scrapes = SCRAPES.replace("CA", &ca.to_string_lossy());
    let prometheus = prometheus(sites.cloud(), &scratch, &scrapes)?;
    let expected = [
        ("by-name", "up", ""),
        ("http", "up", ""),
        ("https", "up", ""),
        ("no-such-node", "down", "403"),
        ("wrong-http", "down", "407"),
        // For https, Go's error contains only the reason phrase of the proxy's status line.
        ("wrong-https", "down", "password of --connect-auth"),
    ];
    eventually("the scrapes", WAIT_TIMEOUT, async || {
        let targets = active_targets(sites.cloud()).await?;
        for (job, health, hint) in expected {
            let target = targets.iter().find(|target| target["labels"]["job"] == job);
            let target = target.with_context(|| format!("{job} is missing"))?;
            let error = target["lastError"].as_str().unwrap_or_default();
            ensure!(
                target["health"] == health && error.contains(hint),
                "{job}: {target:#}; {prometheus}"
            );
        }
        ensure!(targets.len() == expected.len());
        Ok(())
    })
    .await;
    // PromQL reports the target as down, too.
    let query = "up{job=\"wrong-http\"}";
    let found = query_prometheus(sites.cloud(), query).await?;
    ensure!(found["data"]["result"][0]["value"][1] == "0", "{found}");
    Ok(())
}

/// Scrape jobs with targets by address, as service discovery finds them, one target by name, and
/// one target that does not exist.
const SCRAPES: &str = r#"
global: { scrape_interval: 1s, scrape_timeout: 1s }
scrape_configs:
  - job_name: http
    proxy_url: http://prometheus:right-0123456789@10.77.0.1:8131
    static_configs: [{ targets: ["192.168.33.221:9100"] }]
  - job_name: https
    proxy_url: http://prometheus:right-0123456789@10.77.0.1:8131
    scheme: https
    tls_config: { ca_file: CA, server_name: worker-1 }
    static_configs: [{ targets: ["192.168.33.221:9101"] }]
  - job_name: by-name
    proxy_url: http://prometheus:right-0123456789@10.77.0.1:8131
    static_configs: [{ targets: ["worker-1:9100"] }]
  - job_name: no-such-node
    proxy_url: http://prometheus:right-0123456789@10.77.0.1:8131
    static_configs: [{ targets: ["nowhere:9100"] }]
  - job_name: wrong-http
    proxy_url: http://stale:wrong@10.77.0.1:8131
    static_configs: [{ targets: ["192.168.33.221:9100"] }]
  - job_name: wrong-https
    proxy_url: http://stale:wrong@10.77.0.1:8131
    scheme: https
    tls_config: { ca_file: CA, server_name: worker-1 }
    static_configs: [{ targets: ["192.168.33.221:9101"] }]
"#;

/// Time limit for the start of Prometheus and a few scrapes.
const WAIT_TIMEOUT: Duration = Duration::from_secs(30);
