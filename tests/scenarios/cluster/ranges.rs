//! A server that dials Services by their addresses but has no right to list the address ranges of
//! Services.

use anyhow::Result;
use serde_json::json;
use tunnel_tests::cluster::server_roles_of;
use tunnel_tests::tools::{Tool, or_skip, require};

use super::absent::follow;
use super::kubectl::kubectls;
use super::{ClusterEnv, FIRST, READYZ, wait_until_gone};

on_both!(a_missing_right_to_list_ranges_is_a_condition_with_the_command_that_grants_it);

async fn a_missing_right_to_list_ranges_is_a_condition_with_the_command_that_grants_it(
    cluster_env: ClusterEnv,
) -> Result<()> {
    let files = kubectls().and_then(|files| require(&[Tool::Bash]).map(|()| files));
    let Some(files) = or_skip(files) else {
        return Ok(());
    };
    cluster_env.guide().await?;
    let [role, ..] = server_roles_of(|right| right.resource != "servicecidrs");
    let path = "/apis/rbac.authorization.k8s.io/v1/clusterroles/tunnel-server";
    let rules = json!({ "rules": role["rules"] });
    cluster_env.admin().merge(path, &rules).await?;
    let socket = cluster_env.scratch.path().join("connect.sock");
    let socket = socket.to_string_lossy().into_owned();
    let setup = cluster_env.setup("a")?.args(&["--connect-uds", &socket]);
    let server = setup.start().await?;
    let (condition, object) = ("service ranges", "servicecidrs");
    follow(&cluster_env, &server, &files[0], condition, object).await?;
    wait_until_gone(&server, READYZ, FIRST, condition).await;
    Ok(())
}
