//! Objects of the manifests that do not exist. The server may not create them, reports the command
//! that does, and continues with what it has.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use tunnel_tests::cluster::Objects;
use tunnel_tests::eventually::eventually;
use tunnel_tests::process::{Program, Server};
use tunnel_tests::tools::{Tool, or_skip, require};

use super::kubectl::kubectls;
use super::{ClusterEnv, FIRST, GUIDE_RECORDS, fetch_text};

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
    let server = cluster_env
        .setup("a")?
        .args(&["--single-replica"])
        .start()
        .await?;

    // Without any of these objects, the server itself has the routes and records of the nodes.
    eventually("the nodes", FIRST, async || {
        let text = fetch_text(&server, "/metrics").await?;
        let records = "tunnel_server_kubernetes_records 2";
        ensure!(text.lines().any(|line| line == records), "{text}");
        Ok(())
    })
    .await;
    // Only the leader reads the map of the records, so this condition comes after the one of the
    // Lease.
    for (condition, object) in [
        ("writing lease", "Lease kube-system/tunnel-dns-controller"),
        ("ca certificates", "ConfigMap kube-system/tunnel-ca"),
        ("writing records", "ConfigMap kube-system/yurt-tunnel-nodes"),
    ] {
        let command = command_of(&server, condition, object).await;
        run(&cluster_env, &files[0], &command).await?;
    }
    cluster_env
        .wait_for_records("the records", FIRST, GUIDE_RECORDS)
        .await;
    eventually("no condition", FIRST, async || {
        let text = fetch_text(&server, "/readyz?verbose").await?;
        ensure!(!text.contains("does not exist"), "{text}");
        ensure!(
            cluster_env
                .objects()
                .bundle()
                .await?
                .contains("BEGIN CERTIFICATE")
        );
        Ok(())
    })
    .await;

    // The test repeats this with an object that is deleted while the server runs.
    cluster_env
        .cluster
        .admin()
        .delete(&Objects::bundle_path())
        .await?;
    let object = "ConfigMap kube-system/tunnel-ca";
    let command = command_of(&server, "ca certificates", object).await;
    run(&cluster_env, &files[0], &command).await?;
    eventually("the certificates again", FIRST, async || {
        ensure!(
            cluster_env
                .objects()
                .bundle()
                .await?
                .contains("BEGIN CERTIFICATE")
        );
        Ok(())
    })
    .await;
    Ok(())
}

/// Waits for a condition about an object, and returns its command.
async fn command_of(server: &Server, condition: &str, object: &str) -> String {
    eventually(condition, FIRST, async || {
        let text = fetch_text(server, "/readyz?verbose").await?;
        let begin = format!("[!] {condition}: ");
        let line = text.lines().find(|line| line.starts_with(&begin));
        let line = line.with_context(|| text.clone())?;
        ensure!(line.contains(&format!("{object} does not exist")), "{line}");
        let (_, command) = line
            .split_once("as the manifests do: ")
            .with_context(|| line.to_owned())?;
        Ok(command.to_owned())
    })
    .await
}

/// Runs a command like an operator who copies it.
pub(super) async fn run(cluster_env: &ClusterEnv, kubectl: &Path, command: &str) -> Result<()> {
    let folder = kubectl.parent().context("a folder")?.to_owned();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::iter::once(folder).chain(std::env::split_paths(&path));
    let program = Program::tool(Tool::Bash)?.args(["-ec", command]);
    let program = program
        .env("PATH", std::env::join_paths(folders)?)
        .env("KUBECONFIG", cluster_env.cluster.admin_kubeconfig()?)
        .env("HOME", cluster_env.scratch.path());
    program.run().await?.ok()?;
    Ok(())
}
