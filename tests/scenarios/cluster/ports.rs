//! The ConfigMap of the ports: the Service's extra ports, and the ports that the listeners allow.

use std::net::SocketAddr;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tunnel_tests::client::{ClientTls, Endpoint, RawRequest, request};
use tunnel_tests::cluster::{Objects, endpoints};
use tunnel_tests::eventually::eventually;
use tunnel_tests::process::{Listener, Server};
use tunnel_tests::targets::Exporter;
use tunnel_tests::tools::or_skip;

use super::kubectl::{Kubectl, kubectls};
use super::{ClusterEnv, FIRST, GUIDE_RECORDS, REACTION, READYZ, Site, fetch_text};

on_both!(
    dns_2_an_https_port_becomes_a_port_of_the_service_and_kubectl_describes_it,
    dns_3_only_good_entries_count_and_ports_of_others_survive,
    dns_4_https_wins_and_a_changed_target_keeps_its_name,
    dns_15_loopback_ports_and_node_ports_are_both_reached,
    p7_a_port_is_refused_until_it_is_configured_and_where_the_agent_refuses_it,
);

/// Returns the ports of the HTTP and the HTTPS listener, which are the targets of the Service's
/// ports.
fn listener_ports(server: &Server) -> (u16, u16) {
    (
        server.address(Listener::Http).port(),
        server.address(Listener::Https).port(),
    )
}

async fn dns_2_an_https_port_becomes_a_port_of_the_service_and_kubectl_describes_it(
    cluster_env: ClusterEnv,
) -> Result<()> {
    let server = cluster_env.guided_server().await?;
    let (admin, objects) = (cluster_env.admin(), cluster_env.objects());
    objects.set_ports(&[("https-proxy-ports", "9100")]).await?;
    let (_, https) = listener_ports(&server);
    cluster_env.wait_for_ports(Some((9100, https))).await;
    let service = objects.service().await?;
    ensure!(service["metadata"]["annotations"].is_null(), "{service}");

    // No controller creates Endpoints and EndpointSlices here. kubectl shows one or the other.
    let endpoints = endpoints(&service, "192.168.33.220");
    admin
        .create("/api/v1/namespaces/kube-system/endpoints", &endpoints)
        .await?;
    let slice = json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": { "name": "x", "labels": { "kubernetes.io/service-name": service["metadata"]["name"] } },
        "endpoints": [{ "addresses": ["192.168.33.220"], "conditions": { "ready": true } }],
        "ports": endpoints["subsets"][0]["ports"],
    });
    let slices = "/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices";
    admin.create(slices, &slice).await?;
    let Some(files) = or_skip(kubectls()) else {
        return Ok(());
    };
    for file in files {
        let kubectl = Kubectl::new(file, cluster_env.cluster.admin_kubeconfig()?)?;
        let describe = "-n kube-system describe svc x-tunnel-server-internal-svc";
        let text = kubectl.ok(describe).await?;
        let rows: Vec<Vec<&str>> = text
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        let of = |word: &str| {
            rows.iter()
                .filter(|row| row.first() == Some(&word))
                .map(|row| row[1..].join(" "))
                .collect::<Vec<_>>()
        };
        let target = format!("{https}/TCP");
        ensure!(
            of("Port:") == ["http 10255/TCP", "https 10250/TCP", "dnat-9100 9100/TCP"],
            "{text}"
        );
        ensure!(
            of("TargetPort:") == ["10264/TCP", "10263/TCP", &target],
            "{text}"
        );
        let ends =
            ["10264", "10263", &https.to_string()].map(|port| format!("192.168.33.220:{port}"));
        ensure!(of("Endpoints:") == ends, "{text}");
        ensure!(of("IP:") == ["10.106.217.16"], "{text}");
        ensure!(
            rows.contains(&vec!["Session", "Affinity:", "None"]),
            "{text}"
        );
        ensure!(rows.contains(&vec!["Annotations:", "<none>"]), "{text}");
    }
    Ok(())
}

async fn dns_3_only_good_entries_count_and_ports_of_others_survive(
    cluster_env: ClusterEnv,
) -> Result<()> {
    cluster_env.guide().await?;
    let objects = cluster_env.objects();
    let path = Objects::path("services", "x-tunnel-server-internal-svc");
    let mut service = objects.service().await?;
    let ports = service["spec"]["ports"].as_array_mut().context("ports")?;
    ports.push(json!({ "name": "custom", "port": 8443, "targetPort": "web", "protocol": "TCP" }));
    ports.push(json!({ "name": "dnat-53", "port": 53, "targetPort": 5353, "protocol": "UDP" }));
    let replaced = cluster_env.admin().replace(&path, &service).await?;
    let before = replaced["spec"]["ports"].as_array().context("ports")?;
    let server = cluster_env.server("a").await?;
    cluster_env.wait_for_records(FIRST, GUIDE_RECORDS).await;
    let ports = [("https-proxy-ports", "9100, 9100,,70000,abc, 10250")];
    objects.set_ports(&ports).await?;
    let (_, https) = listener_ports(&server);
    let added =
        json!({ "name": "dnat-9100", "port": 9100, "protocol": "TCP", "targetPort": https });
    let wanted = [&before[..], &[added]].concat();
    wait_for_exact_ports(&cluster_env, &wanted).await;
    eventually("the mistakes to be reported", FIRST, async || {
        let text = fetch_text(&server, READYZ).await?;
        ensure!(text.contains("70000") && text.contains("abc"), "{text}");
        Ok(())
    })
    .await;
    objects.set_ports(&[("https-proxy-ports", "")]).await?;
    wait_for_exact_ports(&cluster_env, before).await;
    Ok(())
}

async fn wait_for_exact_ports(cluster_env: &ClusterEnv, wanted: &[Value]) {
    eventually("the ports", REACTION, async || {
        let service = cluster_env.objects().service().await?;
        let ports = service["spec"]["ports"].as_array();
        ensure!(ports.is_some_and(|ports| ports == wanted), "{service}");
        Ok(())
    })
    .await;
}

async fn dns_4_https_wins_and_a_changed_target_keeps_its_name(
    cluster_env: ClusterEnv,
) -> Result<()> {
    let server = cluster_env.guided_server().await?;
    let objects = cluster_env.objects();
    let (http, https) = listener_ports(&server);
    let both = [("http-proxy-ports", "9100"), ("https-proxy-ports", "9100")];
    objects.set_ports(&both).await?;
    cluster_env.wait_for_ports(Some((9100, https))).await;
    objects.set_ports(&both[..1]).await?;
    cluster_env.wait_for_ports(Some((9100, http))).await;
    Ok(())
}

async fn dns_15_loopback_ports_and_node_ports_are_both_reached(
    cluster_env: ClusterEnv,
) -> Result<()> {
    cluster_env.guide().await?;
    let server = cluster_env.server("a").await?;
    let own = Exporter::start_on("127.0.0.2:0".parse()?, "node-address", None).await?;
    let inner = Exporter::start_on("127.0.0.1:0".parse()?, "loopback-address", None).await?;
    let (own_port, inner_port) = (
        own.addr().port().to_string(),
        inner.addr().port().to_string(),
    );
    let arguments = ["--node-ip", "127.0.0.2", "--localhost-ports", &inner_port];
    let _site = Site::start(&cluster_env, &server, "worker-1", &arguments).await?;
    let both = format!("{own_port}, {inner_port}");
    // Only the lists decide. Without the entry, the agent dials the loopback target's port at the
    // node's address.
    for (list, port, status, content) in [
        (inner_port.as_str(), &own_port, 200, "node-address"),
        (&inner_port, &inner_port, 200, "loopback-address"),
        ("10266", &inner_port, 502, ""),
    ] {
        let lists = [
            ("http-proxy-ports", both.as_str()),
            ("localhost-proxy-ports", list),
        ];
        cluster_env.objects().set_ports(&lists).await?;
        let get = RawRequest::get(&format!("worker-1:{port}"), "/metrics");
        eventually("both classes of targets", REACTION, async || {
            let reply = request(server.address(Listener::Http), &get).await?;
            ensure!(
                reply.status == status && reply.text().contains(content),
                "{}: {}",
                reply.status,
                reply.text()
            );
            Ok(())
        })
        .await;
    }
    Ok(())
}

async fn p7_a_port_is_refused_until_it_is_configured_and_where_the_agent_refuses_it(
    cluster_env: ClusterEnv,
) -> Result<()> {
    cluster_env.guide().await?;
    let server = cluster_env.server("a").await?;
    let denied = Exporter::start("worker-1").await?;
    let denied_port = denied.addr().port().to_string();
    let arguments = ["--deny-ports", &denied_port];
    let site = Site::start(&cluster_env, &server, "worker-1", &arguments).await?;
    let http = server.address(Listener::Http);
    let plain = Endpoint::plain(http);
    let tls = Endpoint::tls(
        server.address(Listener::Https),
        ClientTls::insecure("worker-1", None)?,
    );
    let get = RawRequest::get(&site.host(), "/metrics");
    for endpoint in [&plain, &tls] {
        let reply = request(endpoint.clone(), &get).await?;
        ensure!(reply.status == 403, "{}: {}", reply.status, reply.text());
        ensure!(
            reply.header("x-tunnel-error") == Some("refused_by_policy")
                && reply.text().contains(&site.port().to_string()),
            "{}",
            reply.text()
        );
    }

    let list = format!("{}, {denied_port}", site.port());
    let objects = cluster_env.objects();
    objects.set_ports(&[("http-proxy-ports", &list)]).await?;
    let served = async || site.serves(&server).await;
    eventually("the port by Host", REACTION, served).await;
    // A caller of the Service reaches this target: kube-proxy provides the cluster address and the
    // port, and the target is the listener.
    let target = eventually("the port of the Service", REACTION, async || {
        let service = objects.service().await?;
        let mut ports = service["spec"]["ports"].as_array().into_iter().flatten();
        let own = ports.find(|port| port["port"] == site.port());
        let target = own.context("no such port")?["targetPort"].as_u64();
        anyhow::Ok(u16::try_from(target.context("no number")?)?)
    })
    .await;
    let through_service = request(SocketAddr::new(http.ip(), target), &get).await?;
    ensure!(
        through_service.status == 200 && through_service.text().contains("worker-1"),
        "{}",
        through_service.text()
    );

    let denied_get = RawRequest::get(&format!("worker-1:{denied_port}"), "/metrics");
    let reply = request(plain.clone(), &denied_get).await?;
    ensure!(
        reply.status == 403 && reply.text().contains("deny-ports"),
        "{}: {}",
        reply.status,
        reply.text()
    );
    ensure!(
        denied.traffic().accepted() == 0,
        "the agent dialed what it denies"
    );

    objects.remove_ports().await?;
    eventually("the port refused again", REACTION, async || {
        let reply = request(plain.clone(), &get).await?;
        ensure!(reply.status == 403, "{}", reply.status);
        Ok(())
    })
    .await;
    Ok(())
}
