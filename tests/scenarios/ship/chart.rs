//! Compares the chart with the overlays, and its schema with wrong values. Helm renders the chart.

use std::path::Path;
use std::process::Output;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tunnel_tests::manifests::{OVERLAYS, documents, find, items, overlay, render, repository};
use tunnel_tests::process::ScratchDir;
use tunnel_tests::tools::{Tool, or_skip, require, target_dir};

use crate::cluster::kustomizers;

/// Runs `helm template` with a file of values.
fn template(values: &Path, namespace: &str) -> Result<Output> {
    let mut helm = Tool::Helm.command()?;
    helm.args(["template", "culvert"])
        .arg(repository().join("deploy/chart"))
        .args(["--kube-version", "1.30.0", "--namespace", namespace])
        .arg("--values")
        .arg(values);
    helm.output().context("helm")
}

/// Returns the objects of the chart with a file of values.
fn objects(values: &Path, namespace: &str) -> Result<Vec<Value>> {
    let output = template(values, namespace)?;
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{}: {errors}", values.display());
    documents(std::str::from_utf8(&output.stdout)?)
}

/// Returns the objects of the chart with values as text, in `kube-system`.
fn with_values(values: &str) -> Result<Vec<Value>> {
    let scratch = ScratchDir::new()?;
    let file = scratch.file("values.yaml", values)?;
    objects(&file, "kube-system").with_context(|| values.to_owned())
}

fn sorted(mut objects: Vec<Value>) -> Vec<Value> {
    objects.sort_by_key(|object| {
        let metadata = &object["metadata"];
        format!(
            "{} {} {}",
            object["kind"], metadata["namespace"], metadata["name"]
        )
    });
    objects
}

#[test]
fn chart_equals_each_overlay_object_by_object() -> Result<()> {
    let programs = require(&[Tool::Helm]).and_then(|()| kustomizers());
    let Some(programs) = or_skip(programs) else {
        return Ok(());
    };
    let kubectl = programs.first().context("one at least")?;
    for name in OVERLAYS {
        let namespace = match name {
            "namespace" => "culvert",
            _ => "kube-system",
        };
        let values = repository().join(format!("deploy/chart/ci/{name}.yaml"));
        let chart = sorted(objects(&values, namespace)?);
        let rendered = sorted(render(kubectl, &overlay(name))?);
        for (from_chart, from_overlay) in chart.iter().zip(&rendered) {
            ensure!(
                from_chart == from_overlay,
                "{name}: {from_chart:#} is not {from_overlay:#}"
            );
        }
        let (found, wanted) = (chart.len(), rendered.len());
        ensure!(found == wanted, "{name}: {found} objects, not {wanted}");
    }
    Ok(())
}

#[test]
fn templates_are_those_that_the_manifests_make() -> Result<()> {
    let programs = require(&[Tool::Bash, Tool::Python]).and_then(|()| kustomizers());
    if or_skip(programs).is_none() {
        return Ok(());
    }
    let scratch = ScratchDir::new()?;
    let mut script = Tool::Bash.command()?;
    script
        .arg(repository().join("deploy/chart.sh"))
        .arg(scratch.path());
    // Where the script finds a kubectl that `tests/tools.sh` unpacked.
    if let Some(target) = target_dir() {
        script.env("CARGO_TARGET_DIR", target);
    }
    let output = script.output()?;
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{errors}");
    let chart = repository().join("deploy/chart");
    let mut made = vec![Path::new("Chart.yaml").to_owned()];
    for entry in std::fs::read_dir(scratch.path().join("templates"))? {
        made.push(Path::new("templates").join(entry?.file_name()));
    }
    ensure!(made.len() > 5, "{made:?}");
    for file in made {
        let checked_in = std::fs::read_to_string(chart.join(&file)).unwrap_or_default();
        let new = std::fs::read_to_string(scratch.path().join(&file))?;
        let shown = file.display();
        ensure!(
            checked_in == new,
            "deploy/chart/{shown} is stale; run: make chart"
        );
    }
    Ok(())
}

#[test]
fn schema_refuses_wrong_values() -> Result<()> {
    if or_skip(require(&[Tool::Helm])).is_none() {
        return Ok(());
    }
    let scratch = ScratchDir::new()?;
    for values in WRONG {
        let file = scratch.file("values.yaml", values)?;
        let output = template(&file, "kube-system")?;
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        let by_schema = errors.contains("values don't meet the specifications of the schema");
        ensure!(!output.status.success() && by_schema, "{values}: {errors}");
    }
    Ok(())
}

/// Each switch adds or removes its objects and no others.
#[test]
fn switches_add_and_remove_their_objects() -> Result<()> {
    if or_skip(require(&[Tool::Helm])).is_none() {
        return Ok(());
    }
    let default = names(&with_values("{}")?);
    for (values, added, removed) in SWITCHES {
        let found = names(&with_values(values)?);
        let is_more = |name: &&String| !default.contains(name);
        let is_less = |name: &&String| !found.contains(name);
        let more: Vec<_> = found.iter().filter(is_more).collect();
        let less: Vec<_> = default.iter().filter(is_less).collect();
        ensure!(
            more == added && less == removed,
            "{values}: {more:?} {less:?}"
        );
    }
    Ok(())
}

/// Returns the kinds and names of objects, sorted.
fn names(objects: &[Value]) -> Vec<String> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let name = |object: &Value| {
        let (kind, name) = (&object["kind"], &object["metadata"]["name"]);
        format!("{} {}", text(kind), text(name))
    };
    let mut names: Vec<_> = objects.iter().map(name).collect();
    names.sort();
    names
}

#[test]
fn server_without_dns_opens_no_port_for_dns() -> Result<()> {
    if or_skip(require(&[Tool::Helm])).is_none() {
        return Ok(());
    }
    for object in with_values("dns: { enabled: false }")? {
        let text = object.to_string();
        ensure!(!text.contains("10053"), "{object:#}");
    }
    Ok(())
}

#[test]
fn values_reach_the_fields_that_they_name() -> Result<()> {
    if or_skip(require(&[Tool::Helm])).is_none() {
        return Ok(());
    }
    let objects = with_values(VALUES)?;
    let server = &find(&objects, "Deployment", "tunnel-server")?["spec"];
    ensure!(server["replicas"] == 4, "{server}");
    let edge = json!({ "key": "example.com/edge", "operator": "NotIn", "values": ["true"] });
    let pod = &server["template"]["spec"];
    let affinity = &pod["affinity"]["nodeAffinity"];
    let required = &affinity["requiredDuringSchedulingIgnoredDuringExecution"];
    let required = &required["nodeSelectorTerms"][0]["matchExpressions"][0];
    ensure!(*required == edge, "{affinity}");
    ensure!(pod["nodeSelector"]["pool"] == "system", "{pod}");
    let taint = json!({ "key": "dedicated", "operator": "Exists" });
    ensure!(items(&pod["tolerations"]).any(|found| *found == taint));
    ensure!(pod["imagePullSecrets"] == json!([{ "name": "registry" }]));
    let container = &pod["containers"][0];
    let image = "registry.example.com/culvert/tunnel-server:1.2.3";
    ensure!(container["image"] == image, "{container}");
    ensure!(container["imagePullPolicy"] == "Always", "{container}");
    let resources = json!({ "limits": { "memory": "2Gi" } });
    ensure!(container["resources"] == resources, "{container}");
    for flag in ["--drain-delay=10s", "--edge-label=example.com/edge"] {
        ensure!(items(&container["args"]).any(|word| word == flag), "{flag}");
    }
    let agent = &find(&objects, "DaemonSet", "tunnel-agent")?["spec"]["template"]["spec"];
    ensure!(agent["nodeSelector"]["example.com/edge"] == "true");
    ensure!(agent["imagePullSecrets"] == pod["imagePullSecrets"]);
    let args = &agent["containers"][0]["args"];
    ensure!(items(args).any(|word| word == "--replicas=1"), "{args}");
    let address = &find(&objects, "ConfigMap", "tunnel-agent")?["data"]["server"];
    ensure!(address == "a.example.com:10262,[2001:db8::1]:443");
    let ports = &find(&objects, "ConfigMap", "yurt-tunnel-server-cfg")?["data"];
    ensure!(ports["http-proxy-ports"] == "9100, 9256", "{ports}");
    let service = find(&objects, "Service", "x-tunnel-server-svc")?;
    ensure!(service["metadata"]["annotations"]["a"] == "b", "{service}");
    let spec = &service["spec"];
    let ranges = json!(["192.0.2.0/24"]);
    ensure!(spec["loadBalancerSourceRanges"] == ranges, "{service}");
    ensure!(spec["externalTrafficPolicy"] == "Cluster", "{service}");
    for (kind, name) in [
        ("Secret", "tunnel-server-ca"),
        ("ConfigMap", "tunnel-ca"),
        ("Lease", "tunnel-dns-controller"),
        ("Namespace", "kube-system-tokens"),
    ] {
        let kept = find(&objects, kind, name)?["metadata"]["annotations"].clone();
        ensure!(kept["helm.sh/resource-policy"] == "keep", "{kind} {name}");
    }
    Ok(())
}

/// Switches, with the objects that each adds and removes.
const SWITCHES: [(&str, &[&str], &[&str]); 7] = [
    ("dns: { enabled: false }", &[], &["Service tunnel-dns"]),
    (
        "agent: { enabled: false }",
        &[],
        &["DaemonSet tunnel-agent", "ServiceAccount tunnel-agent"],
    ),
    (
        "podDisruptionBudget: { enabled: false }",
        &[],
        &["PodDisruptionBudget tunnel-server"],
    ),
    (
        "networkPolicy: { enabled: false }",
        &[],
        &["NetworkPolicy tunnel-server"],
    ),
    (
        "monitoring: { enabled: true }",
        &[
            "Service tunnel-server-metrics",
            "ServiceMonitor tunnel-server",
        ],
        &[],
    ),
    // The namespace kube-system belongs to the cluster.
    ("namespace: { create: true }", &[], &[]),
    (
        "namespace: { createTokens: false }",
        &[],
        &["Namespace kube-system-tokens"],
    ),
];
/// Values that differ from the default, each with a field of an object.
const VALUES: &str = "
image: { prefix: registry.example.com/culvert/, tag: 1.2.3, pullPolicy: Always, pullSecrets: [{ name: registry }] }
advertise: ['a.example.com:10262', '[2001:db8::1]:443']
edgeLabel: example.com/edge
proxyPorts: { http: '9100, 9256' }
keepState: true
server:
  replicas: 4
  resources: { limits: { memory: 2Gi } }
  extraArgs: [--drain-delay=10s]
  nodeSelector: { pool: system }
  tolerations: [{ key: dedicated, operator: Exists }]
agent: { extraArgs: [--replicas=1] }
service:
  type: LoadBalancer
  externalTrafficPolicy: Cluster
  annotations: { a: b }
  loadBalancerSourceRanges: [192.0.2.0/24]
";
/// Values that the schema refuses: wrong types, unknown names, texts of a wrong form, and values
/// that exclude each other.
const WRONG: [&str; 42] = [
    "variant: scale",
    "variant: null",
    "images: {}",
    r#"image: { prefix: "" }"#,
    "image: { prefix: culvert/ }",
    "image: { prefix: registry.example.com/culvert }",
    "image: { prefix: registry.example.com/Culvert/ }",
    r#"image: { tag: "-1" }"#,
    "image: { tag: 1.0 }",
    "image: { pullPolicy: Sometimes }",
    "image: { pullSecrets: [registry] }",
    "advertise: cloud.example.com:31008",
    "advertise: [cloud.example.com]",
    r#"advertise: ["cloud.example.com:0"]"#,
    r#"advertise: ["2001:db8::1:31008"]"#,
    r#"edgeLabel: "edge worker""#,
    "proxyPorts: { http: 9100 }",
    r#"proxyPorts: { http: "9100-9200" }"#,
    r#"proxyPorts: { tcp: "22" }"#,
    "server: { replicas: 0 }",
    "server: { replicas: 65 }",
    r#"server: { replicas: "2" }"#,
    "server: { resources: { limit: {} } }",
    "server: { resources: { limits: { memory: lots } } }",
    "server: { extraArgs: [log-level=debug] }",
    "server: { nodeSelector: { kubernetes.io/os: windows } }",
    "server: { tolerations: [{ effect: NoStart }] }",
    r#"server: { requireClientCertificate: "yes" }"#,
    r#"agent: { enabled: "false" }"#,
    "agent: { nodeSelector: { zone: 1 } }",
    "service: { type: ExternalName }",
    "service: { nodePort: 0 }",
    r#"service: { nodePort: "31008" }"#,
    "service: { externalTrafficPolicy: local }",
    "service: { annotations: { a: true } }",
    "service: { type: LoadBalancer, loadBalancerSourceRanges: [192.0.2.1] }",
    "service: { loadBalancerSourceRanges: [192.0.2.0/24] }",
    "dns: false",
    "autoscaling: { enabled: true, maxReplicas: 64 }",
    "networkPolicy: { enable: false }",
    "{ variant: hostport, autoscaling: { enabled: true } }",
    "{ autoscaling: { enabled: true }, server: { replicas: 3 } }",
];
