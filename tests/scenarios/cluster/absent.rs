//! Objects of the manifests that do not exist. The server may not create them, reports the command
//! that does, and continues with what it has.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use tunnel_tests::cluster::Objects;
use tunnel_tests::eventually::eventually;
use tunnel_tests::process::{Program, Server};
use tunnel_tests::tools::{Tool, or_skip, require};

use super::kubectl::kubectls;
use super::{ClusterEnv, FIRST, GUIDE_RECORDS, READYZ, fetch_text, wait_for_text, wait_until_gone};

on_both!(an_absent_object_is_a_condition_with_the_command_that_creates_it);

async fn an_absent_object_is_a_condition_with_the_command_that_creates_it(
    cluster_env: ClusterEnv,
) -> Result<()> {
    let files = kubectls().and_then(|files| require(&[Tool::Bash]).map(|()| files));
    let Some(files) = or_skip(files) else {
        return Ok(());
    };
    cluster_env.guide().await?;
    cluster_env.objects().delete_shipped("ConfigMap").await?;
    cluster_env.objects().delete_shipped("Lease").await?;
    let revocations = Objects::path("secrets", "tunnel-server-revocations");
    cluster_env.admin().delete(&revocations).await?;
    let setup = cluster_env.setup("a")?.args(&["--single-replica"]);
    let server = setup.start().await?;

    // Without any of these objects, the server itself has the routes and records of the nodes.
    let records = "\ntunnel_server_kubernetes_records 2\n";
    wait_for_text(&server, "/metrics", FIRST, records).await;
    // Only the leader reads the map of the records, so this condition comes after the one of the
    // Lease.
    for (condition, object) in [
        ("writing lease", "Lease kube-system/tunnel-dns-controller"),
        ("ca certificates", "ConfigMap kube-system/tunnel-ca"),
        ("writing records", "ConfigMap kube-system/yurt-tunnel-nodes"),
        (
            "revocations",
            "Secret kube-system/tunnel-server-revocations",
        ),
    ] {
        let object = &format!("{object} does not exist");
        follow(&cluster_env, &server, &files[0], condition, object).await?;
    }
    cluster_env.wait_for_records(FIRST, GUIDE_RECORDS).await;
    wait_until_gone(&server, READYZ, FIRST, "does not exist").await;
    cluster_env.wait_for_bundle().await;

    // The test repeats this with an object that is deleted while the server runs.
    let admin = cluster_env.admin();
    admin.delete(&Objects::bundle_path()).await?;
    let object = "ConfigMap kube-system/tunnel-ca does not exist";
    follow(&cluster_env, &server, &files[0], "ca certificates", object).await?;
    cluster_env.wait_for_bundle().await;
    Ok(())
}

/// Waits for a condition about an object, and runs its command like an operator who copies it.
pub(super) async fn follow(
    cluster_env: &ClusterEnv,
    server: &Server,
    kubectl: &Path,
    condition: &str,
    object: &str,
) -> Result<()> {
    let command = eventually(condition, FIRST, async || {
        let text = fetch_text(server, READYZ).await?;
        let begin = format!("[!] {condition}: ");
        let line = text.lines().find(|line| line.starts_with(&begin));
        let line = line.with_context(|| text.clone())?;
        ensure!(line.contains(object), "{line}");
        let commands = ["as the manifests do: ", "or run: "];
        let mut commands = commands.iter().filter_map(|begin| line.split_once(begin));
        let (_, command) = commands.next().with_context(|| line.to_owned())?;
        Ok(command.to_owned())
    })
    .await;
    let folder = kubectl.parent().context("a folder")?.to_owned();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::iter::once(folder).chain(std::env::split_paths(&path));
    let program = Program::tool(Tool::Bash)?.args(["-ec", &command]);
    let program = program
        .env("PATH", std::env::join_paths(folders)?)
        .env("KUBECONFIG", cluster_env.cluster.admin_kubeconfig()?)
        .env("HOME", cluster_env.scratch.path());
    program.run().await?.ok()?;
    Ok(())
}
