//! A data directory whose file system does not answer or is read-only: callers, probes and agents are
//! served from memory, and a condition says so.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use tunnel_tests::eventually::eventually;
use tunnel_tests::metrics::meta_page;
use tunnel_tests::process::{
    Listener, Process, Program, ScratchDir, ServerSetup, Signal, stored_text,
};
use tunnel_tests::tools::{Skip, Tool, or_skip};

use super::{CONNECT, NODE, Stack};
use crate::credentials::disk::SmallDisk;

#[tokio::test(flavor = "multi_thread")]
async fn server_whose_file_system_does_not_answer_serves_from_memory_and_says_so() -> Result<()> {
    let Some(python) = or_skip(Program::tool(Tool::Python)) else {
        return Ok(());
    };
    let mut stack = Stack::start(&[], &[]).await?;
    let meta = stack.server.address(Listener::Meta);
    let data_dir = Path::new(stack.server.data_dir()).to_owned();
    let Some(blocker) = or_skip(block(python, &data_dir.join("state.redb")).await) else {
        return Ok(());
    };
    let condition = "[!] disk: data directory";
    eventually("the condition", HANGING, async || {
        let page = meta_page(meta, "/readyz?verbose").await?;
        ensure!(page.contains(condition), "{page}");
        ensure!(page.contains("does not answer"), "{page}");
        anyhow::Ok(())
    })
    .await;
    // Requests, probes and the handshake of an agent ask for revocations, which are in memory.
    stack.server.get_ok(&stack.host(), "/metrics").await?;
    meta_page(meta, "/livez").await?;
    stack.agent.signal(Signal::Kill)?;
    stack.agent.end(CONNECT).await?;
    stack.agent = stack.agent_setup.start()?;
    stack
        .wait_for_traffic("an agent that connects meanwhile", CONNECT)
        .await;
    // A revocation is in force although it cannot be saved. On a slow machine the file may open by
    // now.
    let revoking = stack.server.verb(&["nodes", "revoke", NODE])?.run().await?;
    ensure!(revoking.code() == Some(0), "{revoking}");
    let log = stack.agent.log();
    eventually("the end of the session", CONNECT, async || {
        ensure!(log.contains("credential_revoked"), "{log}");
        anyhow::Ok(())
    })
    .await;

    blocker.kill().await?;
    eventually("the end of the condition", HANGING, async || {
        let page = meta_page(meta, "/readyz?verbose").await?;
        ensure!(!page.contains(condition), "{page}");
        // The server writes what the file had that is gone, and what was ordered meanwhile.
        let saved = stored_text(&data_dir)?;
        ensure!(saved.contains("\"revoked\":true") && saved.contains("\"usedBy\""));
        anyhow::Ok(())
    })
    .await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn server_starts_from_memory_where_its_data_directory_is_read_only() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let folder = scratch.path().join("server");
    let Some(disk) = or_skip(SmallDisk::new(&folder, DISK_KIB)) else {
        return Ok(());
    };
    let setup = ServerSetup::on_loopback(&folder);
    disk.read_only(true);
    let refused = setup.start().await.map(|_server| ());
    let refused = format!("{:#}", refused.expect_err("there is no CA"));
    ensure!(
        refused.contains("ca.key: Read-only file system"),
        "{refused}"
    );

    disk.read_only(false);
    let server = setup.start().await?;
    let agent_setup = server
        .agent_setup(NODE, &scratch.path().join("agent"))
        .await?;
    let _agent = agent_setup.start()?;
    server.wait_until_connected(&[NODE]).await;
    let revoke = server.verb(&["nodes", "revoke", "worker-2"])?.run().await?;
    revoke.ok()?;
    server.into_process().kill().await?;
    disk.read_only(true);

    let server = setup.start().await?;
    let meta = server.address(Listener::Meta);
    eventually("the agent", CONNECT, async || {
        let nodes = meta_page(meta, "/nodes").await?;
        ensure!(nodes.contains("\"connected\":true"), "{nodes}");
        anyhow::Ok(())
    })
    .await;
    eventually("the conditions", HANGING, async || {
        let page = meta_page(meta, "/readyz?verbose").await?;
        ensure!(page.contains("[!] disk: data directory"), "{page}");
        ensure!(
            page.contains("the server runs from memory") || page.contains("in memory only"),
            "{page}"
        );
        anyhow::Ok(())
    })
    .await;
    // What the server had is in force, and is saved with what is new as soon as that is possible.
    disk.read_only(false);
    eventually("the commands", HANGING, async || {
        let listed = server.verb(&["nodes", "revocations"])?.run().await?.ok()?;
        ensure!(listed.contains("worker-2"), "{listed}");
        let page = meta_page(meta, "/readyz?verbose").await?;
        ensure!(!page.contains("[!]"), "{page}");
        anyhow::Ok(())
    })
    .await;
    let revoke = server.verb(&["nodes", "revoke", "worker-3"])?.run().await?;
    ensure!(!revoke.err.contains("pending"), "{revoke}");
    revoke.ok()?;
    Ok(())
}

/// Replaces a file by one whose open blocks. Returns the process that holds the new file.
async fn block(python: Program, file: &Path) -> Result<Process, Skip> {
    let failed = |error: anyhow::Error| Skip::because(format!("no lease of a file: {error:#}"));
    let holder = python.args(["-c", LEASE]).arg(file).start();
    let mut holder = holder.map_err(failed)?;
    let held = holder.wait_for_line("lease", CONNECT, |line| (line == "held").then_some(()));
    held.await.map_err(failed)?;
    Ok(holder)
}

/// A lease blocks each process that opens the file until its holder gives it back, or after 45 s
/// (`/proc/sys/fs/lease-break-time`).
const LEASE: &str = r#"
import fcntl, os, signal, sys, time
signal.signal(signal.SIGIO, signal.SIG_IGN)
path = sys.argv[1]
held = os.open(path + ".held", os.O_RDWR | os.O_CREAT, 0o600)
fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
os.rename(path + ".held", path)
print("held", flush=True)
time.sleep(600)
"#;

/// Room for the store of a few nodes and the keys.
const DISK_KIB: u32 = 8 * 1024;
/// The server looks every 5 s whether the file is still there, it has 5 s to answer, and the condition is checked every 10 s.
const HANGING: Duration = Duration::from_secs(30);
