//! `install.yaml` applied by kubectl: the server fills the objects with the rights in the file, and
//! a second apply keeps what the server wrote.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tunnel_tests::cluster::{edge, shipped};
use tunnel_tests::eventually::eventually;
use tunnel_tests::manifests::{OVERLAYS, folder, installed, overlay, render};
use tunnel_tests::tools::or_skip;

use super::kubectl::{Kubectl, kubectls, kustomizers};
use super::{ClusterEnv, FIRST, GUIDE_IP, GUIDE_RECORDS, READYZ, WITH_WORKER_2, fetch_text};

on_both!(
    kubectl_applies_install_yaml_and_applying_it_again_keeps_what_the_server_wrote,
    manifests_that_ship_objects_empty_keep_those_that_the_server_made_before,
    kubectl_applies_each_overlay_in_a_dry_run,
);

async fn kubectl_applies_install_yaml_and_applying_it_again_keeps_what_the_server_wrote(
    cluster_env: ClusterEnv,
) -> Result<()> {
    let Some(files) = or_skip(kubectls()) else {
        return Ok(());
    };
    let manifest = std::fs::read_to_string(folder().join("install.yaml"))?;
    let objects = cluster_env.objects();
    // The rights must come from the manifests, not from the harness.
    cluster_env.cluster.allow_server(false).await?;
    for kind in ["ConfigMap", "Secret", "Lease"] {
        objects.delete_shipped(kind).await?;
    }
    let first = Kubectl::new(files[0].clone(), cluster_env.cluster.admin_kubeconfig()?)?;
    let stdout = first.apply("", &manifest).await?;
    ensure!(stdout.lines().count() == installed()?.len(), "{stdout}");

    cluster_env.add_nodes().await?;
    let _server = cluster_env.server("a").await?;
    let service = objects.service().await?;
    let address = service["spec"]["clusterIP"].as_str();
    let address = address.context("a cluster address")?;
    let records = GUIDE_RECORDS.replace(GUIDE_IP, address);
    cluster_env.wait_for_records(FIRST, &records).await;
    eventually("the extra port of the manifest", FIRST, async || {
        ensure!(extra_port(&cluster_env).await?, "not yet");
        Ok(())
    })
    .await;

    cluster_env.wait_for_bundle().await;
    let before = objects.filled().await?;
    let is_filled = |filled: &Value| *filled != json!([null, null]);
    // The filled objects are two ConfigMaps, the Secret of the CA, and the Lease of the writer.
    ensure!(
        before.values().filter(|filled| is_filled(filled)).count() == 4,
        "{before:#?}"
    );
    for file in files {
        let kubectl = Kubectl::new(file, cluster_env.cluster.admin_kubeconfig()?)?;
        let again = kubectl.apply("", &manifest).await?;
        ensure!(
            !again.lines().any(|line| line.ends_with("created")),
            "{again}"
        );
        ensure!(extra_port(&cluster_env).await?, "the server's port is gone");
        ensure!(objects.records().await? == records, "records");
        ensure!(objects.filled().await? == before, "something was emptied");
        let forced = "--server-side --force-conflicts";
        kubectl.apply(forced, &shipped_by_manifests()?).await?;
        ensure!(
            objects.filled().await? == before,
            "emptied on the server's side"
        );
    }
    Ok(())
}

/// Tests the upgrade of an installation whose manifests left the creation of ConfigMaps and Leases
/// to the server.
async fn manifests_that_ship_objects_empty_keep_those_that_the_server_made_before(
    cluster_env: ClusterEnv,
) -> Result<()> {
    let Some(files) = or_skip(kubectls()) else {
        return Ok(());
    };
    let objects = cluster_env.objects();
    objects.delete_shipped("ConfigMap").await?;
    objects.delete_shipped("Lease").await?;
    cluster_env.cluster.allow_creation().await?;
    cluster_env.guide().await?;
    let setup = cluster_env.setup("a")?.args(&["--single-replica"]);
    let server = setup.start().await?;
    cluster_env.wait_for_records(FIRST, GUIDE_RECORDS).await;
    cluster_env.wait_for_bundle().await;
    let before = objects.filled().await?;
    let shipped = shipped_by_manifests()?;
    for file in files {
        let kubectl = Kubectl::new(file, cluster_env.cluster.admin_kubeconfig()?)?;
        for _ in 0..2 {
            kubectl.apply("", &shipped).await?;
            let after = objects.filled().await?;
            let mut filled = before.iter();
            ensure!(
                filled.all(|(path, filled)| after.get(path) == Some(filled)),
                "something was emptied: {before:#?}, then {after:#?}"
            );
        }
    }
    // The server continues with only the rights of the manifests.
    cluster_env.cluster.allow_server(true).await?;
    objects.add(&edge("worker-2")).await?;
    cluster_env.wait_for_records(FIRST, WITH_WORKER_2).await;
    let conditions = fetch_text(&server, READYZ).await?;
    ensure!(!conditions.contains("does not exist"), "{conditions}");
    Ok(())
}

/// The API server checks each overlay. The fake one serves no autoscalers.
async fn kubectl_applies_each_overlay_in_a_dry_run(cluster_env: ClusterEnv) -> Result<()> {
    let Some(files) = or_skip(kustomizers()) else {
        return Ok(());
    };
    let file = files.first().context("one at least")?;
    let kubectl = Kubectl::new(file.clone(), cluster_env.cluster.admin_kubeconfig()?)?;
    let list = |items: &[Value]| {
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": items });
        list.to_string()
    };
    for name in OVERLAYS {
        let mut objects = render(file, &overlay(name))?;
        if cluster_env.fake_api().is_ok() {
            objects.retain(|object| object["kind"] != "HorizontalPodAutoscaler");
        }
        // A dry run creates no namespace for the other objects.
        let is_namespace = |object: &&Value| object["kind"] == "Namespace";
        let namespaces: Vec<_> = objects.iter().filter(is_namespace).cloned().collect();
        if !namespaces.is_empty() {
            kubectl.apply("", &list(&namespaces)).await?;
        }
        let printed = kubectl.apply("--dry-run=server", &list(&objects)).await;
        let printed = printed.context(name)?;
        let count = printed.lines().count();
        ensure!(count == objects.len(), "{name}: {printed}");
    }
    Ok(())
}

/// Returns a list of the objects of `install.yaml` that the server fills.
fn shipped_by_manifests() -> Result<String> {
    let names: Vec<Value> = shipped()
        .into_iter()
        .map(|(_, object)| object["metadata"]["name"].clone())
        .collect();
    let objects = installed()?;
    let is_filled = |object: &Value| {
        let kind = object["kind"].as_str().unwrap_or_default();
        ["ConfigMap", "Secret", "Lease"].contains(&kind)
            && names.contains(&object["metadata"]["name"])
    };
    let items: Vec<Value> = objects.into_iter().filter(is_filled).collect();
    ensure!(items.len() >= 5, "{items:?}");
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": items });
    Ok(list.to_string())
}

/// Returns whether the Service has the port that `yurt-tunnel-server-cfg` of the manifests
/// requests.
async fn extra_port(cluster_env: &ClusterEnv) -> Result<bool> {
    let service: Value = cluster_env.objects().service().await?;
    let ports = service["spec"]["ports"].as_array().context("no ports")?;
    Ok(ports
        .iter()
        .any(|port| port["name"] == "dnat-9100" && port["port"] == 9100))
}
