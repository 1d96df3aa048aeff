//! A server that dials Services by their addresses but has no right to list the address ranges of
//! Services.

use anyhow::{Context, Result, ensure};
use serde_json::json;
use tunnel_tests::cluster::server_roles_of;
use tunnel_tests::eventually::eventually;
use tunnel_tests::tools::{Tool, or_skip, require};

use super::absent::run;
use super::kubectl::kubectls;
use super::{ClusterEnv, FIRST, fetch_text};

on_both!(a_missing_right_to_list_ranges_is_a_condition_with_the_command_that_grants_it);

async fn a_missing_right_to_list_ranges_is_a_condition_with_the_command_that_grants_it(
    cluster_env: ClusterEnv,
) -> Result<()> {
    let files = kubectls().and_then(|files| require(&[Tool::Bash]).map(|()| files));
    let Some(files) = or_skip(files) else {
        return Ok(());
    };
    cluster_env.guide().await?;
    let [role, _] = server_roles_of(|right| right.resource != "servicecidrs");
    let path = "/apis/rbac.authorization.k8s.io/v1/clusterroles/tunnel-server";
    let rules = json!({ "rules": role["rules"] });
    cluster_env.cluster.admin().merge(path, &rules).await?;
    let socket = cluster_env.scratch.path().join("connect.sock");
    let socket = socket.to_string_lossy().into_owned();
    let setup = cluster_env.setup("a")?.args(&["--connect-uds", &socket]);
    let server = setup.start().await?;
    let command = eventually("the condition", FIRST, async || {
        let text = fetch_text(&server, "/readyz?verbose").await?;
        let mut lines = text.lines();
        let line = lines.find(|line| line.starts_with("[!] service ranges: "));
        let line = line.with_context(|| text.clone())?;
        ensure!(line.contains("servicecidrs"), "{line}");
        let (_, command) = line.split_once("or run: ").context("no command")?;
        Ok(command.to_owned())
    })
    .await;
    run(&cluster_env, &files[0], &command).await?;
    eventually("no condition", FIRST, async || {
        let text = fetch_text(&server, "/readyz?verbose").await?;
        ensure!(!text.contains("service ranges"), "{text}");
        Ok(())
    })
    .await;
    Ok(())
}
