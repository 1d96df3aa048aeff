//! Hostile values in the rendered texts, the examples of the guides, and files that are written or
//! compared.

use std::fs;
use std::process::Command;

use clap::Parser;
use clap::error::ErrorKind;
use serde_json::{Value, json};
use tunnel_process::scratch::ScratchDir;

use super::values::{shell, yaml};
use super::*;

#[test]
fn yaml_scalars_parse_back_to_their_values() {
    for name in HOSTILE.into_iter().chain(READ_AS_OTHER_TYPES).chain(PLAIN) {
        let scalar = yaml(name);
        assert!(scalar.is_ascii() && !scalar.contains('\n'), "{scalar}");
        let text = format!(
            "block: {scalar}\nlist:\n  - {scalar}\nflow: {{ a: [{scalar}, x], b: {scalar} }}\n"
        );
        let expected = json!({
            "block": name, "list": [name], "flow": { "a": [name, "x"], "b": name },
        });
        assert_eq!(parsed(&text), expected, "{text}");
    }
}

#[test]
fn words_of_the_shell_expand_to_their_values() {
    for name in HOSTILE {
        let script = format!("printf %s {}", shell(name));
        let output = Command::new("sh").args(["-c", &script]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), name, "{script}");
    }
}

#[test]
fn hostile_values_of_flags_stay_values() {
    for name in HOSTILE.into_iter().filter(|name| !name.is_empty()) {
        let selector = rendered(&["egress-selector", &format!("--uds={name}")]);
        let transport = &selector["egressSelections"][0]["connection"]["transport"];
        assert_eq!(*transport, json!({ "uds": { "udsName": name } }));

        let file = format!("--egress-selector={name}");
        let pod = rendered(&["apiserver", &file, &format!("--mount-dir={name}")]);
        let container = &pod["spec"]["containers"][0];
        let flag = format!("--egress-selector-config-file={name}");
        assert_eq!(container["command"], json!(["kube-apiserver", flag]));
        assert_eq!(container["volumeMounts"][1]["mountPath"], name);

        let flags = ["job", "namespace", "port-name", "node-label"];
        let flags = flags.map(|flag| format!("--{flag}={name}"));
        let mut words = vec!["prometheus", "--method=relabel", "--object=service-monitor"];
        words.extend(flags.iter().map(String::as_str));
        let monitor = rendered(&words);
        assert_eq!(monitor["metadata"]["namespace"], name);
        assert_eq!(monitor["metadata"]["name"], format!("edge-{name}"));
        let endpoint = &monitor["spec"]["endpoints"][0];
        assert_eq!(endpoint["port"], name);
        let labels = &endpoint["relabelings"][0]["sourceLabels"];
        assert_eq!(*labels, json!([name, "__address__"]));

        let user = format!("--proxy-user={name}");
        let config = rendered(&["prometheus", "--method=proxy-url", &user]);
        let url = config["scrape_configs"][0]["proxy_url"].as_str().unwrap();
        let (user, host) = url.split_once(":PASSWORD@").unwrap();
        assert_eq!(host, "tunnel-connect.kube-system.svc:8131");
        assert!(
            !user
                .trim_start_matches("http://")
                .contains(['/', ':', '@', '#', '?'])
        );

        let files = ["ca-file", "cert-file", "key-file"].map(|flag| format!("--{flag}={name}"));
        let mut words = vec!["kubeconfig", "worker-1"];
        words.extend(files.iter().map(String::as_str));
        let config = rendered(&words);
        let cluster = &config["clusters"][0]["cluster"];
        assert_eq!(cluster["certificate-authority"], name);
        let user = json!({ "client-certificate": name, "client-key": name });
        assert_eq!(config["users"][0]["user"], user);

        let image = format!("--image={name}");
        let objects = documents(&["node-local-dns", "--cluster-dns=10.96.0.10", &image]);
        let container = &objects[3]["spec"]["template"]["spec"]["containers"][0];
        assert_eq!(container["image"], name);
    }
}

#[test]
fn hostile_names_of_hosts_and_nodes_are_refused() {
    let server = "--dns-server=10.77.0.1";
    for name in HOSTILE {
        for (words, flag) in [
            (&["agent", "--node=a"][..], "--server"),
            (&["agent", "--server=a:1"][..], "--node"),
            (&["coredns"][..], "--dns-server"),
            (&["coredns"][..], "--hosts"),
            (&["coredns", server][..], "--upstream"),
            (&["coredns", server][..], "--zone"),
            (&["prometheus", "--method=http-sd"][..], "--meta"),
            (&["node-local-dns"][..], "--cluster-dns"),
            (
                &["node-local-dns", "--cluster-dns=10.96.0.10"][..],
                "--zone",
            ),
            (&["kubeconfig", "worker-1"][..], "--tls-server-name"),
        ] {
            let flag = format!("{flag}={name}");
            let line = ["render"].iter().chain(words).copied().chain([&*flag]);
            let refused = Line::try_parse_from(line).unwrap_err();
            let kind = refused.kind();
            let is_value = matches!(kind, ErrorKind::ValueValidation | ErrorKind::InvalidValue);
            assert!(is_value, "{flag}: {refused}");
        }
    }
}

#[test]
fn guides_have_the_rendered_texts() {
    let selector = include_str!("../../../../docs/how-to/egress-selector.md");
    let dns = include_str!("../../../../docs/how-to/dns.md");
    let prometheus = include_str!("../../../../docs/how-to/prometheus.md");
    let monitor = include_str!("../../../../deploy/examples/servicemonitor.yaml");
    let discovery = "prometheus --method http-sd";
    for (page, line) in [
        (selector, "egress-selector"),
        (selector, "apiserver --egress-selector"),
        (
            dns,
            "apiserver --dns-server 10.77.0.1 --second-nameserver 192.0.2.53",
        ),
        (
            dns,
            "coredns --dns-server 10.77.0.1:5353 --upstream 192.0.2.53",
        ),
        (dns, "coredns --hosts"),
        (prometheus, discovery),
        (
            monitor,
            "prometheus --method relabel --object service-monitor",
        ),
    ] {
        let words: Vec<_> = line.split_whitespace().collect();
        let text = text(&words);
        assert!(page.contains(&text), "{line}:\n{text}");
    }
}

#[test]
fn node_local_dns_asks_the_agent_for_names_of_the_cluster_and_the_node_for_others() {
    let flags = ["node-local-dns", "--cluster-dns=10.96.0.10"];
    for (mode, addresses) in [
        ("ipvs", vec!["169.254.20.10"]),
        ("iptables", vec!["169.254.20.10", "10.96.0.10"]),
    ] {
        let mode = format!("--proxy-mode={mode}");
        let more = [&*mode, "--zone=nodes.example.com"];
        let objects = documents(&[&flags[..], &more].concat());
        let kinds: Vec<_> = objects.iter().map(|object| &object["kind"]).collect();
        let expected = [
            "ServiceAccount",
            "Service",
            "ConfigMap",
            "DaemonSet",
            "Service",
        ];
        assert_eq!(kinds, expected);
        let arguments = &objects[3]["spec"]["template"]["spec"]["containers"][0]["args"];
        assert_eq!(arguments[1], addresses.join(","));
        let corefile = objects[2]["data"]["Corefile"].as_str().unwrap();
        let blocks: Vec<_> = corefile.split_inclusive("\n}\n").collect();
        let zones = [
            "cluster.local",
            "in-addr.arpa",
            "ip6.arpa",
            "nodes.example.com",
            ".",
        ];
        assert_eq!(blocks.len(), zones.len(), "{corefile}");
        for (block, zone) in blocks.iter().zip(zones) {
            assert!(block.starts_with(&format!("{zone}:53 {{\n")), "{block}");
            assert!(block.contains("serve_stale 24h"), "{block}");
            assert!(
                block.contains(&format!("    bind {}\n", addresses.join(" "))),
                "{block}"
            );
            let forward = match zone {
                "." => "forward . __PILLAR__UPSTREAM__SERVERS__\n",
                _ => "forward . 169.254.20.11:1053 {\n        force_tcp\n",
            };
            assert!(block.contains(forward), "{block}");
        }
    }
}

#[test]
fn node_local_dns_differs_from_the_published_objects_in_what_the_guide_lists() {
    let guide = include_str!("../../../../docs/how-to/node-local-dns.md");
    let (_, listed) = guide.split_once("\n## Differences").unwrap();
    let mut expected = PUBLISHED.to_owned();
    for (row, published, here) in [
        ("`forward`", "CLUSTER_DNS {", "169.254.20.11:1053 {"),
        (
            "`health_check`",
            "force_tcp\n",
            "force_tcp\n    health_check 250ms\n    max_fails 1\n",
        ),
        ("`cache`", "9984 5\n", "9984 5\n    serve_stale 24h\n"),
        (
            "`cache`",
            "cache 30\n",
            "cache 30 {\n    serve_stale 24h\n    }\n",
        ),
        (
            "image",
            "image: any",
            "image: registry.k8s.io/dns/k8s-dns-node-cache:1.26.7",
        ),
        (
            "nodes",
            "hostNetwork:",
            "nodeSelector: { openyurt.io/is-edge-worker: 'true' }\n      hostNetwork:",
        ),
    ] {
        assert!(listed.contains(&format!("\n| {row}")), "{row}");
        assert!(expected.contains(published), "{published}");
        expected = expected.replace(published, here);
    }
    let expected = expected.split("\n---\n").map(parsed).map(trimmed);
    let rendered = documents(&["node-local-dns", "--cluster-dns=10.96.0.10"]);
    let rendered = rendered.into_iter().map(trimmed);
    assert_eq!(rendered.collect::<Vec<_>>(), expected.collect::<Vec<_>>());
}

#[test]
fn flags_of_node_local_dns_that_contradict_each_other_are_errors() {
    for (flags, hint) in [
        (
            &["--part=kubelet", "--proxy-mode=iptables"][..],
            "stays as it is",
        ),
        (&["--cloud-dns=169.254.20.10"], "ask itself"),
        (
            &["--cloud-dns=10.96.0.10", "--proxy-mode=iptables"],
            "ask itself",
        ),
        (
            &["--local-ip=fd00::10", "--proxy-mode=iptables"],
            "families",
        ),
    ] {
        let line = ["render", "node-local-dns", "--cluster-dns=10.96.0.10"];
        let verb = Line::try_parse_from([&line[..], flags].concat())
            .unwrap()
            .verb;
        let error = verb.run().unwrap_err();
        assert_eq!(error.exit_code(), 64);
        assert!(error.to_string().contains(hint), "{flags:?}: {error}");
    }
}

/// The script changes flags and configuration of a kubelet once, and nothing else.
#[test]
fn kubelet_gives_pods_the_address_of_the_cache_after_the_script() {
    const FLAGS: &str = "CLUSTER_DNS=\"--cluster-dns=10.96.0.10\"\nOTHER=\"--v=2\"\n";
    let script = text(&[
        "node-local-dns",
        "--cluster-dns=10.96.0.10",
        "--part=kubelet",
    ]);
    let scratch = ScratchDir::new().unwrap();
    let root = scratch.path();
    let file = root.join("var/lib/kubelet/config.yaml");
    let flags = root.join("etc/kubernetes/kubelet");
    for folder in [&file, &flags] {
        fs::create_dir_all(folder.parent().unwrap()).unwrap();
    }
    let run = || {
        let output = Command::new("sh")
            .args(["-c", &script])
            .env("ROOT", root)
            .output();
        output.unwrap()
    };
    for (before, after) in [
        (
            "a: 1\nclusterDNS:\n- 10.96.0.10\n- 10.96.0.11\nclusterDomain: b\n",
            "a: 1\nclusterDNS: [169.254.20.10]\nclusterDomain: b\n",
        ),
        (
            "clusterDNS: [10.96.0.10]\nlist:\n- x\n",
            "clusterDNS: [169.254.20.10]\nlist:\n- x\n",
        ),
        (
            "clusterDNS:\n  - \"10.96.0.10\"\n",
            "clusterDNS: [169.254.20.10]\n",
        ),
    ] {
        fs::write(&file, before).unwrap();
        fs::write(&flags, FLAGS).unwrap();
        for _ in 0..2 {
            let output = run();
            assert!(output.status.success(), "{output:?}");
            assert_eq!(fs::read_to_string(&file).unwrap(), after);
            let expected = FLAGS.replace("10.96.0.10", "169.254.20.10");
            assert_eq!(fs::read_to_string(&flags).unwrap(), expected);
        }
        let saved = fs::read_to_string(file.with_extension("yaml.culvert")).unwrap();
        assert_eq!(saved, before);
    }
    fs::remove_file(&flags).unwrap();
    fs::write(&file, "a: 1\n").unwrap();
    let output = run();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && error.contains("cluster-dns"),
        "{error}"
    );
}

#[test]
fn kubeconfig_names_the_node_the_listener_and_the_name_of_the_certificate() {
    let config = rendered(&["kubeconfig", "2", "--port=16443", "--proxy-user=a b"]);
    let cluster = json!({
        "server": "https://2:16443",
        "tls-server-name": "kubernetes.default.svc",
        "certificate-authority": "2-ca.crt",
        "proxy-url": "http://a%20b:PASSWORD@127.0.0.1:8131",
    });
    assert_eq!(
        config["clusters"],
        json!([{ "name": "2", "cluster": cluster }])
    );
    let context = json!({ "cluster": "2", "user": "2" });
    assert_eq!(
        config["contexts"],
        json!([{ "name": "2", "context": context }])
    );
    assert_eq!(config["current-context"], "2");
    assert_eq!(config["users"], Value::Null);
    let config = rendered(&["kubeconfig", "worker-1", "--token-file=/run/token"]);
    assert_eq!(
        config["users"][0]["user"],
        json!({ "tokenFile": "/run/token" })
    );
}

#[test]
fn every_object_of_prometheus_is_valid_yaml() {
    for method in ["proxy-url", "http-sd", "relabel"] {
        for object in ["config", "service-monitor", "pod-monitor", "scrape-config"] {
            let words = [
                "prometheus",
                "--edge-only",
                "--target=worker-1",
                "--target=2",
            ];
            let (method, object) = (format!("--method={method}"), format!("--object={object}"));
            let line = ["render"].iter().chain(&words).copied();
            let line = line.chain([&*method, &*object]);
            let RenderVerb::Prometheus(arguments) = Line::try_parse_from(line).unwrap().verb else {
                panic!("{method}");
            };
            match arguments.text() {
                Ok(text) => assert!(parsed(&text).is_object(), "{text}"),
                Err(error) => assert_eq!(error.exit_code(), 64),
            }
        }
    }
    let config = rendered(&[
        "prometheus",
        "--method=proxy-url",
        "--target=worker-1",
        "--target=2",
    ]);
    let targets = &config["scrape_configs"][0]["static_configs"][0]["targets"];
    assert_eq!(*targets, json!(["worker-1:9100", "2:9100"]));
}

#[test]
fn existing_file_is_overwritten_only_by_force_and_a_check_finds_differences() {
    let folder = ScratchDir::new().unwrap();
    let file = folder.path().join("egress-selector.yaml");
    let run = |flags: &[&str]| {
        let line = ["render", "egress-selector"].iter().chain(flags);
        Line::try_parse_from(line).unwrap().verb.run()
    };
    let path = file.to_str().unwrap();
    run(&["-f", path]).unwrap();
    assert!(matches!(
        run(&["-f", path]),
        Err(RenderError::FileExists(_))
    ));
    run(&["--check", path]).unwrap();
    run(&["-f", path, "--force", "--uds", "/run/other.sock"]).unwrap();
    let error = run(&["--check", path]).unwrap_err();
    assert!(matches!(error, RenderError::Differs(_)) && error.exit_code() == 1);
    run(&["--check", path, "--uds", "/run/other.sock"]).unwrap();
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

/// The command line of the verb.
#[derive(Debug, Parser)]
struct Line {
    #[command(subcommand)]
    verb: RenderVerb,
}

fn text(words: &[&str]) -> String {
    let line = ["render"].iter().chain(words);
    match Line::try_parse_from(line).unwrap().verb {
        RenderVerb::EgressSelector(arguments) => arguments.text(),
        RenderVerb::Apiserver(arguments) => arguments.text(),
        RenderVerb::Coredns(arguments) => arguments.text(),
        RenderVerb::NodeLocalDns(arguments) => arguments.text().unwrap(),
        RenderVerb::Kubeconfig(arguments) => arguments.text(),
        RenderVerb::Prometheus(arguments) => arguments.text().unwrap(),
        RenderVerb::Agent(arguments) => arguments.text(),
    }
}

fn rendered(words: &[&str]) -> Value {
    parsed(&text(words))
}

/// Returns the documents of a rendered text.
fn documents(words: &[&str]) -> Vec<Value> {
    text(words).split("\n---\n").map(parsed).collect()
}

fn parsed(text: &str) -> Value {
    serde_saphyr::from_str(text).unwrap_or_else(|error| panic!("{error}:\n{text}"))
}

/// Returns an object with a Corefile without its indentation.
fn trimmed(mut object: Value) -> Value {
    if let Some(corefile) = object.pointer_mut("/data/Corefile") {
        let lines = corefile.as_str().unwrap().lines().map(str::trim);
        *corefile = lines.collect::<Vec<_>>().join("\n").into();
    }
    object
}

/// The objects of NodeLocal DNSCache as they are published, for IPVS and with the addresses and the
/// domain filled in.
const PUBLISHED: &str = r#"
apiVersion: v1
kind: ServiceAccount
metadata:
  name: node-local-dns
  namespace: kube-system
  labels: { kubernetes.io/cluster-service: "true", addonmanager.kubernetes.io/mode: Reconcile }
---
apiVersion: v1
kind: Service
metadata:
  name: kube-dns-upstream
  namespace: kube-system
  labels:
    k8s-app: kube-dns
    kubernetes.io/cluster-service: "true"
    addonmanager.kubernetes.io/mode: Reconcile
    kubernetes.io/name: KubeDNSUpstream
spec:
  ports:
    - { name: dns, port: 53, protocol: UDP, targetPort: 53 }
    - { name: dns-tcp, port: 53, protocol: TCP, targetPort: 53 }
  selector: { k8s-app: kube-dns }
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: node-local-dns
  namespace: kube-system
  labels: { addonmanager.kubernetes.io/mode: Reconcile }
data:
  Corefile: |
    cluster.local:53 {
    errors
    cache {
    success 9984 30
    denial 9984 5
    }
    reload
    loop
    bind 169.254.20.10
    forward . CLUSTER_DNS {
    force_tcp
    }
    prometheus :9253
    health 169.254.20.10:8080
    }
    in-addr.arpa:53 {
    errors
    cache 30
    reload
    loop
    bind 169.254.20.10
    forward . CLUSTER_DNS {
    force_tcp
    }
    prometheus :9253
    }
    ip6.arpa:53 {
    errors
    cache 30
    reload
    loop
    bind 169.254.20.10
    forward . CLUSTER_DNS {
    force_tcp
    }
    prometheus :9253
    }
    .:53 {
    errors
    cache 30
    reload
    loop
    bind 169.254.20.10
    forward . __PILLAR__UPSTREAM__SERVERS__
    prometheus :9253
    }
---
apiVersion: apps/v1
kind: DaemonSet
metadata:
  name: node-local-dns
  namespace: kube-system
  labels:
    k8s-app: node-local-dns
    kubernetes.io/cluster-service: "true"
    addonmanager.kubernetes.io/mode: Reconcile
spec:
  updateStrategy: { rollingUpdate: { maxUnavailable: 10% } }
  selector: { matchLabels: { k8s-app: node-local-dns } }
  template:
    metadata:
      labels: { k8s-app: node-local-dns }
      annotations: { prometheus.io/port: "9253", prometheus.io/scrape: "true" }
    spec:
      priorityClassName: system-node-critical
      serviceAccountName: node-local-dns
      hostNetwork: true
      dnsPolicy: Default
      tolerations:
        - { key: CriticalAddonsOnly, operator: Exists }
        - { effect: NoExecute, operator: Exists }
        - { effect: NoSchedule, operator: Exists }
      containers:
        - name: node-cache
          image: any
          resources: { requests: { cpu: 25m, memory: 5Mi } }
          args: [-localip, 169.254.20.10, -conf, /etc/Corefile, -upstreamsvc, kube-dns-upstream]
          securityContext: { privileged: true }
          ports:
            - { containerPort: 53, name: dns, protocol: UDP }
            - { containerPort: 53, name: dns-tcp, protocol: TCP }
            - { containerPort: 9253, name: metrics, protocol: TCP }
          livenessProbe:
            httpGet: { host: 169.254.20.10, path: /health, port: 8080 }
            initialDelaySeconds: 60
            timeoutSeconds: 5
          volumeMounts:
            - { mountPath: /run/xtables.lock, name: xtables-lock, readOnly: false }
            - { name: config-volume, mountPath: /etc/coredns }
            - { name: kube-dns-config, mountPath: /etc/kube-dns }
      volumes:
        - { name: xtables-lock, hostPath: { path: /run/xtables.lock, type: FileOrCreate } }
        - { name: kube-dns-config, configMap: { name: kube-dns, optional: true } }
        - name: config-volume
          configMap: { name: node-local-dns, items: [{ key: Corefile, path: Corefile.base }] }
---
apiVersion: v1
kind: Service
metadata:
  name: node-local-dns
  namespace: kube-system
  labels: { k8s-app: node-local-dns }
  annotations: { prometheus.io/port: "9253", prometheus.io/scrape: "true" }
spec:
  clusterIP: None
  ports: [{ name: metrics, port: 9253, targetPort: 9253 }]
  selector: { k8s-app: node-local-dns }
"#;

/// Values with a meaning for YAML, the shell, a Corefile or a reader. None is a name of a host, an
/// address or a plain absolute path.
const HOSTILE: [&str; 28] = [
    "",
    " ",
    "a b",
    "'",
    "\"",
    "it's \"quoted\"",
    "a\nb: c",
    "a\n---\nkind: Secret",
    "\r\n",
    "a\tb",
    "$(reboot)",
    "`reboot`",
    "${HOME}",
    "{$HOME}",
    "a;reboot",
    "a: b",
    "a:",
    "a # b",
    "#",
    "-x y",
    "--help!",
    "- a",
    "[a, b]",
    "{a: b}",
    "*a",
    "a\\",
    "a\u{202e}b\u{2066}c\u{1f600}",
    "a\u{85}b\u{2028}c\u{7f}",
];

/// Strings that YAML reads as other types without quotes.
const READ_AS_OTHER_TYPES: [&str; 10] = [
    "true",
    "No",
    "~",
    "null",
    "1e3",
    "0x1f",
    "12:30",
    ".inf",
    "::1",
    "2001-01-01",
];

/// Strings that need no quotes.
const PLAIN: [&str; 4] = ["worker-1", "/run/a.sock", "http://a:1/b?c=d", "10.0.0.1"];
