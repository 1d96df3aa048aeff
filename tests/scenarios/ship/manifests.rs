//! Compares the manifests with the code: flags, variables, names and ports. Every kubectl on this
//! machine renders each overlay.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use clap::Command;
use serde_json::{Value, json};
use tunnel_server::cluster::objects::{PEER_PORT, PEER_PORT_NAME};
use tunnel_server::config::{EDGE_LABEL, ObjectNames};
use tunnel_tests::ca::{Leaf, TestCa};
use tunnel_tests::manifests::{
    ADDRESS_PLACEHOLDER, Container, Facts, INSTALLED, OVERLAYS, find, installed, items, overlay,
    render, repository, set_address,
};
use tunnel_tests::process::{Program, ScratchDir};
use tunnel_tests::tools::{Tool, or_skip, require};

use crate::cluster::kustomizers;

mod rights;

/// Names of overlays, with their objects.
type Rendered = Vec<(&'static str, Vec<Value>)>;

/// Renders every overlay with the first kubectl on this machine, and sets the address that agents
/// dial. Returns nothing, with a note, if there is no kubectl.
fn overlays() -> Result<Rendered> {
    let Some(files) = or_skip(kustomizers()) else {
        return Ok(Vec::new());
    };
    let file = files.first().context("one at least")?;
    let each = OVERLAYS.map(|name| {
        let mut objects = render(file, &overlay(name))?;
        set_address(&mut objects, "tunnel.example.com:31008")?;
        Ok((name, objects))
    });
    each.into_iter().collect()
}

/// Returns the two workloads, with the container of each.
fn workloads(objects: &[Value]) -> Result<[(&'static str, Value, Container); 2]> {
    let facts = Facts {
        node: "worker-1".into(),
        address: "192.168.33.221".into(),
    };
    let one = |name: &'static str, kind| -> Result<_> {
        let workload = find(objects, kind, name)?;
        let container = Container::of(workload, objects, &facts)?;
        Ok((name, workload.clone(), container))
    };
    Ok([
        one("tunnel-server", "Deployment")?,
        one("tunnel-agent", "DaemonSet")?,
    ])
}

#[test]
fn every_kubectl_renders_each_overlay_and_install_yaml_is_the_plain_one() -> Result<()> {
    let Some(files) = or_skip(kustomizers()) else {
        return Ok(());
    };
    let sorted = |mut objects: Vec<Value>| {
        objects.sort_by_key(|object| format!("{}{}", object["kind"], object["metadata"]["name"]));
        objects
    };
    for file in files {
        for name in OVERLAYS {
            let rendered = render(&file, &overlay(name))?;
            ensure!(rendered.len() > 10, "{name}: {} objects", rendered.len());
            ensure!(
                name != INSTALLED || sorted(rendered) == sorted(installed()?),
                "deploy/manifests/install.yaml is stale; run: make install-yaml"
            );
        }
    }
    Ok(())
}

/// A container runtime takes a name without a registry for one of a public registry, where anyone
/// may own it.
#[test]
fn images_have_the_registry_that_the_user_names() -> Result<()> {
    for (_, workload, _) in workloads(&installed()?)? {
        let image = &workload["spec"]["template"]["spec"]["containers"][0]["image"];
        let cannot_be_pulled = image
            .as_str()
            .is_some_and(|name| name.starts_with(UNPULLABLE));
        ensure!(cannot_be_pulled, "{image}");
    }
    if or_skip(require(&[Tool::Bash])).is_none() {
        return Ok(());
    }
    for (prefix, tag, reason) in [
        ("", "0.1.0", "PREFIX is not set"),
        ("culvert/", "0.1.0", "names no registry"),
        ("culvert", "0.1.0", "is not HOST"),
        ("registry.example.com", "0.1.0", "is not HOST"),
        ("registry.example.com/culvert", "0.1.0", "is not HOST"),
        ("registry.example.com/Culvert/", "0.1.0", "is not HOST"),
        ("registry.example.com/culvert/ ", "0.1.0", "is not HOST"),
        ("registry.example.com/culvert/", "", "TAG is not set"),
        ("registry.example.com/culvert/", "-1", "is not a tag"),
    ] {
        for script in ["deploy/manifests.sh", "deploy/images.sh"] {
            // The version is the default tag of images.
            if script == "deploy/images.sh" && tag.is_empty() {
                continue;
            }
            let output = Tool::Bash
                .command()?
                .arg(repository().join(script))
                .env("PREFIX", prefix)
                .env("TAG", tag)
                .output()?;
            let error = String::from_utf8_lossy(&output.stderr).into_owned();
            let is_refused = !output.status.success() && output.stdout.is_empty();
            ensure!(is_refused, "{script} {prefix:?} {tag:?}: {error}");
            ensure!(
                error.contains(reason),
                "{script} {prefix:?} {tag:?}: {error}"
            );
        }
    }
    Ok(())
}

/// Only the operator knows the address that edge nodes reach. Without it `token create` would
/// print an address that no edge node can dial.
#[tokio::test]
async fn server_and_agent_refuse_to_start_without_the_address_that_agents_dial() -> Result<()> {
    for (name, _, container) in workloads(&installed()?)? {
        let mut check = Program::ours(name)?.arg("check-config");
        for (variable, value) in &container.env {
            check = check.env(variable, value);
        }
        let output = check.run().await?;
        let is_refused = output.code() == Some(64) && output.err.contains(ADDRESS_PLACEHOLDER);
        ensure!(is_refused, "{name}: {output}");
    }
    Ok(())
}

/// The load balancer leads to nodes with a server only, so that the server sees agents' addresses.
#[test]
fn agents_reach_a_server_at_any_node_or_at_the_load_balancer() -> Result<()> {
    for (overlay, objects) in overlays()? {
        let spec = &find(&objects, "Service", "x-tunnel-server-svc")?["spec"];
        let found = (&spec["type"], &spec["externalTrafficPolicy"]);
        let is_balanced = overlay == "loadbalancer";
        let wanted = if is_balanced {
            ("LoadBalancer", "Local")
        } else {
            ("NodePort", "Cluster")
        };
        ensure!(
            found.0 == wanted.0 && found.1 == wanted.1,
            "{overlay}: {spec}"
        );
        for port in items(&spec["ports"]) {
            // The balancer's, too, so that one overlay can replace another.
            ensure!(port["nodePort"] == 31008, "{overlay}: {port}");
        }
    }
    Ok(())
}

/// The agents' network is that of their hosts, which the other levels forbid.
#[test]
fn a_namespace_of_its_own_says_which_pods_it_allows() -> Result<()> {
    for (overlay, objects) in overlays()? {
        let namespaces: BTreeSet<_> = objects
            .iter()
            .filter_map(|object| object["metadata"]["namespace"].as_str())
            .collect();
        let Ok(namespace) = find(&objects, "Namespace", "culvert") else {
            let expected = BTreeSet::from(["kube-system", "kube-system-tokens"]);
            ensure!(namespaces == expected, "{overlay}");
            continue;
        };
        ensure!(overlay == "namespace", "{overlay}");
        let labels = &namespace["metadata"]["labels"];
        for mode in ["enforce", "audit", "warn"] {
            let label = format!("pod-security.kubernetes.io/{mode}");
            ensure!(labels[&label] == "privileged", "{labels}");
        }
        // The binding of the role that every cluster has.
        let outside = objects
            .iter()
            .filter(|object| object["metadata"]["namespace"] == "kube-system");
        let outside: Vec<_> = outside.map(|object| &object["roleRef"]["name"]).collect();
        ensure!(
            outside == ["extension-apiserver-authentication-reader"],
            "{outside:?}"
        );
        let [(_, _, server), _] = workloads(&objects)?;
        let account = "system:serviceaccount:culvert:tunnel-agent";
        let account = format!("--agent-service-account={account}");
        ensure!(server.args.contains(&account), "{:?}", server.args);
    }
    Ok(())
}

#[tokio::test]
async fn check_config_takes_the_arguments_and_variables_of_each_container() -> Result<()> {
    // The test provides the data of the server and of the kubelet: the ConfigMap with the server's
    // CA, and a node's certificate with its key.
    let ca = TestCa::new("ca")?;
    let node = ca.issue(&Leaf::agent("worker-1"))?;
    let bundle = json!({
        "kind": "ConfigMap", "metadata": { "name": "tunnel-ca" }, "data": { "ca.crt": ca.pem() },
    });
    for (overlay, mut objects) in overlays()? {
        objects.retain(|object| object["metadata"]["name"] != "tunnel-ca");
        objects.push(bundle.clone());
        for (name, _, container) in workloads(&objects)? {
            let scratch = ScratchDir::new()?;
            let args = container.laid_out(scratch.path(), &objects, TOKEN)?;
            let kubelet = scratch.path().join("var/lib/kubelet/pki");
            if kubelet.is_dir() {
                let pair = format!("{}{}", node.certificate, node.key);
                std::fs::write(kubelet.join("kubelet-client-current.pem"), pair)?;
            }
            let run = args.first().is_some_and(|word| word == "run");
            ensure!(run, "{overlay}: {args:?}");
            let mut check = Program::ours(name)?.arg("check-config").args(&args[1..]);
            // The ServiceAccount's files exist in a container only.
            check = check.arg("--settings-only");
            // Every container of a cluster has this variable.
            check = check.env("KUBERNETES_SERVICE_HOST", "10.96.0.1");
            for (variable, value) in &container.env {
                check = check.env(variable, value);
            }
            let output = check.run().await?;
            let text = output.to_string();
            // The openness of yurt-tunnel is not without a word.
            let expected =
                usize::from(overlay == "openyurt" && text.contains("--compat yurt-tunnel"));
            let is_taken = output.status.success() && text.matches("warning").count() == expected;
            ensure!(is_taken, "{overlay}: {name}: {output}");
        }
    }
    Ok(())
}

#[test]
fn flags_and_variables_of_the_manifests_are_those_of_the_code() -> Result<()> {
    for (overlay, objects) in overlays()? {
        for (name, _, container) in workloads(&objects)? {
            let command = match name {
                "tunnel-server" => tunnel_server::cli::command(),
                _ => tunnel_agent::cli::command(),
            };
            let (flags, variables) = known(&command)?;
            let mut seen = BTreeSet::new();
            for word in &container.args[1..] {
                let flag = word.split('=').next().unwrap_or_default();
                ensure!(flags.contains(flag), "{overlay}: {name} has no flag {flag}");
                ensure!(seen.insert(flag), "{overlay}: {name}: {flag} comes twice");
            }
            for variable in container.env.keys() {
                let is_known = variables.contains(variable);
                ensure!(is_known, "{overlay}: {name} reads no variable {variable}");
            }
        }
    }
    Ok(())
}

/// Returns the flags and variables of `run`, and the variables of the downward API: the agent reads
/// two of them without clap, and `HOST_IP` is for arguments.
fn known(command: &Command) -> Result<(BTreeSet<String>, BTreeSet<String>)> {
    let run = command.find_subcommand("run").context("run")?;
    let flags = run.get_arguments().filter_map(|flag| flag.get_long());
    let flags = flags.map(|flag| format!("--{flag}")).collect();
    let variables = run.get_arguments().filter_map(|flag| flag.get_env());
    let variables = variables.map(|name| name.to_string_lossy().into_owned());
    let downward = ["NODE_NAME", "NODE_IP", "HOST_IP"].map(str::to_owned);
    Ok((flags, variables.chain(downward).collect()))
}

#[test]
fn names_and_ports_lead_to_each_other() -> Result<()> {
    let names = ObjectNames::default();
    for (overlay, objects) in overlays()? {
        find(&objects, "Service", &names.internal_service)?;
        find(&objects, "ConfigMap", &names.ports_config_map)?;
        let [(_, deployment, server), (_, daemons, agent)] = workloads(&objects)?;
        let ports: BTreeSet<_> = items(&server.spec["ports"])
            .map(|port| (port["protocol"].to_string(), port["containerPort"].as_u64()))
            .collect();
        let template = &deployment["spec"]["template"]["metadata"]["labels"];
        for service in objects.iter().filter(|object| object["kind"] == "Service") {
            for port in items(&service["spec"]["ports"]) {
                let target = (port["protocol"].to_string(), port["targetPort"].as_u64());
                ensure!(ports.contains(&target), "{overlay}: {port} leads nowhere");
            }
            let selector = service["spec"]["selector"].as_object();
            let mut selector = selector.context("selector")?.iter();
            let selects = selector.all(|(key, value)| template[key] == *value);
            ensure!(selects, "{overlay}: {service} selects nothing");
        }
        let policy = find(&objects, "NetworkPolicy", "tunnel-server")?;
        for port in items(&policy["spec"]["ingress"]).flat_map(|rule| items(&rule["ports"])) {
            let target = (port["protocol"].to_string(), port["port"].as_u64());
            ensure!(ports.contains(&target), "{overlay}: {port}");
        }
        for (endpoint, port) in [("http", 10264), ("meta", 10265), ("dns", 10053)] {
            let flag = format!("--{endpoint}-listen=[::]:{port}");
            ensure!(server.args.contains(&flag), "{overlay}: no {flag}");
        }
        let selector = &daemons["spec"]["template"]["spec"]["nodeSelector"];
        ensure!(selector[EDGE_LABEL] == "true", "{overlay}: {selector}");
        ensure!(agent.env["NODE_NAME"] == "worker-1", "{overlay}");
    }
    Ok(())
}

/// The servers that an overlay runs, and how a rollout replaces them.
#[derive(Debug, PartialEq, Eq)]
enum Rollout {
    /// Servers that share nothing of the host but the path of a socket, which they take in turn. One
    /// is added before one ends.
    Surge,
    /// Servers that each use a socket and a port of their host. One ends before one is added.
    OnePerHost,
}

impl Rollout {
    fn of(overlay: &str) -> Self {
        match overlay {
            "hostport" => Self::OnePerHost,
            _ => Self::Surge,
        }
    }

    /// Returns the number of replicas, or null where an autoscaler sets the number.
    fn replicas(&self, overlay: &str) -> Value {
        match self {
            Self::Surge if overlay == "scale" => Value::Null,
            Self::Surge => 2.into(),
            Self::OnePerHost => 3.into(),
        }
    }
}

/// Checks the rollout of the servers. Several servers find each other.
/// They overlap if they share no port of the host.
fn rolls_without_an_outage(
    overlay: &str,
    objects: &[Value],
    deployment: &Value,
    container: &Container,
) -> Result<()> {
    let strategy = &deployment["spec"]["strategy"];
    let pod = &deployment["spec"]["template"]["spec"];
    let has = |flag: &str| container.args.iter().any(|arg| arg == flag);
    let rollout = Rollout::of(overlay);
    let shares_host = pod.get("hostNetwork").is_some()
        || items(&container.spec["ports"]).any(|port| port.get("hostPort").is_some())
        || items(&pod["volumes"]).any(|volume| {
            let is_socket = volume["name"] == "connect" && overlay == "egress-selector";
            let shared = ["hostPath", "persistentVolumeClaim"];
            !is_socket && shared.iter().any(|kind| volume.get(kind).is_some())
        });
    ensure!(shares_host == (rollout != Rollout::Surge), "{overlay}");
    let replicas = &deployment["spec"]["replicas"];
    ensure!(
        *replicas == rollout.replicas(overlay),
        "{overlay}: {replicas}"
    );
    let rolling = |surge: u8, unavailable: u8| {
        let counts = json!({ "maxSurge": surge, "maxUnavailable": unavailable });
        json!({ "type": "RollingUpdate", "rollingUpdate": counts })
    };
    let expected = match rollout {
        Rollout::Surge => rolling(1, 0),
        Rollout::OnePerHost => rolling(0, 1),
    };
    ensure!(*strategy == expected, "{overlay}: {strategy}");
    let peers = find(objects, "Service", &ObjectNames::default().peer_service)?;
    ensure!(!has("--single-replica"), "{overlay}");
    let peers = &peers["spec"];
    ensure!(peers["clusterIP"] == "None", "{overlay}: {peers}");
    ensure!(peers["publishNotReadyAddresses"] == true, "{overlay}");
    let port = &peers["ports"][0];
    let port = (&port["name"], &port["targetPort"]);
    ensure!(port.0 == PEER_PORT_NAME && *port.1 == PEER_PORT, "{port:?}");
    Ok(())
}

/// The next agent runs next to the one that it replaces: in the network of the host, which has the
/// lock of both, and with a socket of its own for the probes.
fn agents_hand_over(daemon_set: &Value) -> Result<()> {
    let strategy = &daemon_set["spec"]["updateStrategy"]["rollingUpdate"];
    let expected = json!({ "maxSurge": "10%", "maxUnavailable": 0 });
    ensure!(*strategy == expected, "{strategy}");
    let pod = &daemon_set["spec"]["template"]["spec"];
    ensure!(pod["hostNetwork"] == true, "{pod}");
    let container = &pod["containers"][0];
    let mut variables = items(&container["env"]);
    let socket = variables.find(|entry| entry["name"] == "TUNNEL_AGENT_META_SOCKET");
    let socket = socket.and_then(|entry| entry["value"].as_str());
    let folder = socket
        .and_then(|path| path.rsplit_once('/'))
        .context("no socket")?
        .0;
    let mut mounts = items(&container["volumeMounts"]);
    let mount = mounts
        .find(|mount| mount["mountPath"] == folder)
        .context("no mount")?;
    let mut volumes = items(&pod["volumes"]);
    let volume = volumes.find(|volume| volume["name"] == mount["name"]);
    ensure!(
        volume.context("no volume")?["emptyDir"].is_object(),
        "{pod}"
    );
    Ok(())
}

/// Servers of an installation at most.
const SERVERS_MAX: u64 = 64;

/// Time that a process needs to close its sessions and sockets after the drain, in seconds.
const STOP_MARGIN: u64 = 5;

/// Returns the time from SIGTERM to the end of the drain, in seconds.
fn longest_stop(name: &str, container: &Container) -> Result<u64> {
    let seconds = |flag: &str, default: u64| -> Result<u64> {
        let set = |arg: &String| Some(arg.strip_prefix(flag)?.strip_prefix('=')?.to_owned());
        let Some(value) = container.args.iter().find_map(set) else {
            return Ok(default);
        };
        let number = value.strip_suffix('s').context("not in seconds")?;
        Ok(number.parse()?)
    };
    let delay = match name {
        "tunnel-server" => 5,
        _ => 0,
    };
    Ok(seconds("--drain-delay", delay)? + seconds("--drain-timeout", 30)?)
}

#[test]
fn pods_have_no_more_than_they_need() -> Result<()> {
    for (overlay, objects) in overlays()? {
        let [server, agent] = workloads(&objects)?;
        rolls_without_an_outage(overlay, &objects, &server.1, &server.2)?;
        agents_hand_over(&agent.1)?;
        for (name, workload, container) in [server, agent] {
            let place = format!("{overlay}: {name}");
            let (pod, spec) = (&container.pod, &container.spec);
            let root = match name {
                "tunnel-agent" => overlay == "kubelet-cert",
                _ => has_socket(overlay),
            };
            ensure!(container.uid == if root { 0 } else { 65532 }, "{place}");
            let non_root = pod["securityContext"]["runAsNonRoot"].as_bool();
            ensure!(non_root == (!root).then_some(true), "{place}");
            let seccomp = &pod["securityContext"]["seccompProfile"]["type"];
            ensure!(seccomp == "RuntimeDefault", "{place}");
            let own = json!({
                "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "capabilities": { "drop": ["ALL"] },
            });
            let context = &spec["securityContext"];
            ensure!(*context == own, "{place}: {context}");
            ensure!(pod["enableServiceLinks"] == false, "{place}");
            ensure!(pod["automountServiceAccountToken"] == false, "{place}");
            ensure!(pod["dnsPolicy"] == "Default", "{place}");
            let priority = pod["priorityClassName"].as_str().unwrap_or_default();
            ensure!(priority.starts_with("system-"), "{place}: {priority}");
            let is_server = name == "tunnel-server";
            for (probe, path) in [
                ("startupProbe", "/livez"),
                ("livenessProbe", "/livez"),
                (
                    "readinessProbe",
                    if is_server { "/servingz" } else { "/readyz" },
                ),
            ] {
                if is_server {
                    let found = &spec[probe]["httpGet"]["path"];
                    ensure!(*found == path, "{place}: {probe}");
                    continue;
                }
                // Two agents of a node run during a rolling update, and one has the meta port.
                let live = (path == "/livez").then_some("--live");
                let command: Vec<_> = ["/tunnel-agent", "healthcheck"]
                    .into_iter()
                    .chain(live)
                    .collect();
                let found = &spec[probe]["exec"]["command"];
                ensure!(*found == json!(command), "{place}: {probe}: {found}");
            }
            ensure!(spec["resources"]["limits"]["memory"].is_string(), "{place}");
            ensure!(spec["resources"]["requests"]["cpu"].is_string(), "{place}");
            let grace = pod["terminationGracePeriodSeconds"].as_u64();
            let stop = longest_stop(name, &container)? + STOP_MARGIN;
            ensure!(
                grace >= Some(stop),
                "{place}: {grace:?} is less than {stop}"
            );
            for mount in items(&spec["volumeMounts"]) {
                let socket = has_socket(overlay) && mount["name"] == "connect";
                let writable = mount["name"] == "data" || socket;
                ensure!(writable || mount["readOnly"] == true, "{place}: {mount}");
            }
            for object in [&workload, &workload["spec"]["template"]] {
                let labels = &object["metadata"]["labels"];
                for label in ["name", "component", "part-of"] {
                    let label = format!("app.kubernetes.io/{label}");
                    ensure!(labels[&label].is_string(), "{place}: no {label}");
                }
            }
        }
    }
    Ok(())
}

/// In each overlay the server prefers the control plane and never runs on an edge node. A node
/// without the edge label is no edge node, so the tutorial sets the label first.
#[test]
fn the_server_prefers_the_control_plane_and_never_lands_on_an_edge() -> Result<()> {
    for (overlay, objects) in overlays()? {
        let [(_, _, server), _] = workloads(&objects)?;
        let affinity = &server.pod["affinity"]["nodeAffinity"];
        let preferred = &affinity["preferredDuringSchedulingIgnoredDuringExecution"];
        let roles: Vec<_> = items(preferred)
            .flat_map(|term| items(&term["preference"]["matchExpressions"]))
            .map(|role| (&role["key"], &role["operator"]))
            .collect();
        let mut roles = roles.iter();
        let is_preferred = roles.any(|(key, operator)| *key == ROLE && *operator == "Exists");
        ensure!(is_preferred, "{overlay}: {preferred}");
        let required = &affinity["requiredDuringSchedulingIgnoredDuringExecution"];
        let required = &required["nodeSelectorTerms"][0]["matchExpressions"][0];
        let no_edge = json!({ "key": EDGE_LABEL, "operator": "NotIn", "values": ["true"] });
        let selector = &server.pod["nodeSelector"];
        ensure!(
            *required == no_edge || selector[EDGE_LABEL] == "false",
            "{overlay}: {affinity} {selector}"
        );
        let pinned = selector.get(ROLE).is_some();
        ensure!(pinned == has_socket(overlay), "{overlay}: {selector}");
    }
    Ok(())
}

/// Returns whether the kube-apiserver of the server's host opens a socket of the server.
fn has_socket(overlay: &str) -> bool {
    ["egress-selector", "hostport"].contains(&overlay)
}

/// The port for other servers is open to servers only.
#[test]
fn only_servers_reach_the_port_for_servers() -> Result<()> {
    for (overlay, objects) in overlays()? {
        let policy = find(&objects, "NetworkPolicy", "tunnel-server")?;
        let rules = items(&policy["spec"]["ingress"]).filter(|rule| {
            let mut ports = items(&rule["ports"]);
            ports.any(|port| port["port"] == PEER_PORT)
        });
        let sources: Vec<_> = rules.map(|rule| &rule["from"]).collect();
        let servers = json!([{ "podSelector": policy["spec"]["podSelector"] }]);
        ensure!(sources == [&servers], "{overlay}: {sources:?}");
    }
    Ok(())
}

/// Somebody who may create pods can set any label of them, so a label of the namespace is needed, too.
#[test]
fn callers_of_other_namespaces_need_a_label_of_their_namespace() -> Result<()> {
    for (overlay, objects) in overlays()? {
        let policy = find(&objects, "NetworkPolicy", "tunnel-server")?;
        let rules = items(&policy["spec"]["ingress"]).filter(|rule| {
            let mut ports = items(&rule["ports"]);
            ports.any(|port| [10264, 10265].map(Value::from).contains(&port["port"]))
        });
        for source in rules.flat_map(|rule| items(&rule["from"])) {
            let labels = |selector: &Value| selector["matchLabels"]["tunnel-caller"] == "true";
            ensure!(labels(&source["podSelector"]), "{overlay}: {source}");
            let namespaces = &source["namespaceSelector"];
            let is_own = namespaces.is_null();
            ensure!(is_own || labels(namespaces), "{overlay}: {source}");
        }
    }
    Ok(())
}

/// The autoscaler never starts more servers than an installation can have, also during a rollout.
#[test]
fn the_autoscaler_stays_within_the_most_servers() -> Result<()> {
    for (overlay, objects) in overlays()? {
        let found = find(&objects, "HorizontalPodAutoscaler", "tunnel-server");
        ensure!(found.is_ok() == (overlay == "scale"), "{overlay}");
        let Ok(autoscaler) = found else { continue };
        let spec = &autoscaler["spec"];
        ensure!(spec["minReplicas"] == 2, "{spec}");
        let max = spec["maxReplicas"].as_u64().context("maxReplicas")?;
        ensure!(max < SERVERS_MAX, "{max}");
        ensure!(spec["scaleTargetRef"]["kind"] == "Deployment", "{spec}");
        let policy = json!([{ "type": "Pods", "value": 1, "periodSeconds": 300 }]);
        ensure!(
            spec["behavior"]["scaleDown"]["policies"] == policy,
            "{spec}"
        );
    }
    Ok(())
}

/// Agents outside of pods dial the address that the agents of the DaemonSet dial. Where each server
/// has an address of its own, a flag replaces that address.
#[test]
fn the_server_advertises_the_address_of_the_agents() -> Result<()> {
    for (overlay, objects) in overlays()? {
        let [(_, _, server), (_, _, agent)] = workloads(&objects)?;
        let advertised = server.env.get("TUNNEL_SERVER_ADVERTISE");
        ensure!(advertised.is_some(), "{overlay}: {:?}", server.env);
        let dialed = agent.env.get("TUNNEL_AGENT_SERVER");
        ensure!(advertised == dialed, "{overlay}");
        let own = "--advertise=192.168.33.221:10262".to_owned();
        let is_own = server.args.contains(&own);
        let args = &server.args;
        ensure!(is_own == (overlay == "hostport"), "{overlay}: {args:?}");
    }
    Ok(())
}

/// In each overlay the kube-apiserver of the how-to opens the socket that the server creates, in a
/// folder that the server may write to.
#[test]
fn egress_selector_overlays_and_their_page_agree() -> Result<()> {
    let page = std::fs::read_to_string(repository().join("docs/how-to/egress-selector.md"))?;
    for (overlay, objects) in overlays()? {
        let [(_, _, server), _] = workloads(&objects)?;
        let flag = |name: &str| server.args.iter().find_map(|word| word.strip_prefix(name));
        match (flag("--connect-uds="), flag("--connect-listen=")) {
            (Some(socket), None) => {
                ensure!(has_socket(overlay), "{overlay}");
                ensure!(page.contains(&format!("udsName: {socket}")), "{socket}");
                let folder = std::path::Path::new(socket).parent().context("a folder")?;
                let mounted = server.mounts.iter().find(|(path, _)| path == folder);
                let (_, volume) = mounted.context("not mounted")?;
                let host = &volume["hostPath"];
                ensure!(host["path"].as_str().map(std::path::Path::new) == Some(folder));
                ensure!(host["type"] == "DirectoryOrCreate", "{host}");
                let shown = folder.display();
                let its = format!("hostPath: {{ path: {shown}, type: DirectoryOrCreate }}");
                ensure!(page.contains(&its), "{its}");
                // The kubelet creates the folder for root.
                ensure!(server.uid == 0, "{overlay}: {}", server.uid);
            }
            (None, Some(listen)) => {
                let (_, port) = listen.rsplit_once(':').context("a port")?;
                let port: u64 = port.parse()?;
                let name = ObjectNames::default().internal_service;
                let service = find(&objects, "Service", &name)?;
                let has = |list: &Value| items(list).any(|found| found["port"] == port);
                ensure!(has(&service["spec"]["ports"]), "{overlay}: {service}");
                let policy = find(&objects, "NetworkPolicy", "tunnel-server")?;
                let mut rules = items(&policy["spec"]["ingress"]);
                ensure!(rules.any(|rule| has(&rule["ports"])), "{overlay}: {policy}");
            }
            (None, None) => ensure!(!overlay.starts_with("egress-selector"), "{overlay}"),
            (Some(_), Some(_)) => anyhow::bail!("{overlay}: two listeners"),
        }
    }
    Ok(())
}

/// Prefix of images that no registry has (RFC 2606).
const UNPULLABLE: &str = "culvert.invalid/";
/// Label with which kubeadm marks the control plane.
const ROLE: &str = "node-role.kubernetes.io/control-plane";
/// A token in the form of a join token.
const TOKEN: &str = "9fc003be7234.959257e11ca36db30416e4647358e1d7987a025d1e144b63";
