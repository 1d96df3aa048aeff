//! `install.yaml` applied by kubectl: what a server with the rights in it makes of the objects, and applying it again.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tunnel_tests::cluster::{cloud, edge};
use tunnel_tests::eventually::eventually;
use tunnel_tests::manifests::{folder, installed};
use tunnel_tests::tools::or_skip;

use super::kubectl::{Kubectl, kubectls};
use super::{FIRST, Lab};

on_both!(kubectl_applies_install_yaml_and_applying_it_again_keeps_what_the_server_wrote);

async fn kubectl_applies_install_yaml_and_applying_it_again_keeps_what_the_server_wrote(
    lab: Lab,
) -> Result<()> {
    let Some(files) = or_skip(kubectls()) else {
        return Ok(());
    };
    let manifest = folder().join("install.yaml");
    let manifest = manifest.to_string_lossy().into_owned();
    let apply = ["apply", "-f", &manifest];
    // The rights are to come from the manifests, not from the harness.
    lab.cluster.allow_server(false).await?;
    let first = Kubectl::new(files[0].clone(), lab.cluster.admin_kubeconfig()?)?;
    let told = first.ok(&apply).await?;
    ensure!(told.lines().count() == installed()?.len(), "{told}");

    lab.objects().add(&edge("worker-1")).await?;
    lab.objects()
        .add(&cloud("master-1", "192.168.33.220"))
        .await?;
    // As the manifest has it, whose rights have no Leases of replicas.
    let server = lab.setup("a")?.args(&["--single-replica"]);
    let _server = server.start().await?;
    let service = lab.objects().service().await?;
    let address = service["spec"]["clusterIP"]
        .as_str()
        .context("a cluster address")?;
    let records = format!("{address}\tworker-1\n192.168.33.220\tmaster-1");
    lab.wait_for_records("the records", FIRST, &records).await;
    eventually("the extra port of the manifest", FIRST, async || {
        ensure!(extra_port(&lab).await?, "not yet");
        Ok(())
    })
    .await;

    for file in files {
        let kubectl = Kubectl::new(file, lab.cluster.admin_kubeconfig()?)?;
        let again = kubectl.ok(&apply).await?;
        ensure!(
            !again.lines().any(|line| line.ends_with("created")),
            "{again}"
        );
        ensure!(extra_port(&lab).await?, "the server's port is gone");
        ensure!(lab.objects().records().await? == records, "records");
    }
    Ok(())
}

/// Whether the Service has the port that `yurt-tunnel-server-cfg` of the manifests asks for.
async fn extra_port(lab: &Lab) -> Result<bool> {
    let service: Value = lab.objects().service().await?;
    let ports = service["spec"]["ports"].as_array().context("no ports")?;
    Ok(ports
        .iter()
        .any(|port| port["name"] == "dnat-9100" && port["port"] == 9100))
}
