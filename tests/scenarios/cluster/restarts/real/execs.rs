//! Commands that kubectl runs in Pods, with bytes in both directions.

use anyhow::{Context, Result, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;
use tunnel_tests::eventually::scaled;
use tunnel_tests::gear::Gear;
use tunnel_tests::process::Piped;
use tunnel_tests::targets::deterministic_bytes;

use super::{FIRST, Kubectl, QUIET, agents, pod_name};

/// A running `kubectl exec -i`. Its command sends stdin back.
pub(super) struct KubectlExec {
    piped: Piped,
    /// Number of blocks that were sent and came back.
    blocks: usize,
}

impl KubectlExec {
    pub(super) async fn start(kubectl: &Kubectl, pod: &str) -> Result<Self> {
        let program = kubectl.program(&format!("exec -i {pod} -- cat"));
        let mut exec = Self {
            piped: program.start_piped()?,
            blocks: 0,
        };
        exec.goes_on().await?;
        Ok(exec)
    }

    /// Fails unless a block comes back byte for byte.
    pub(super) async fn goes_on(&mut self) -> Result<()> {
        let Piped {
            process,
            stdin,
            stdout,
        } = &mut self.piped;
        let sent = deterministic_bytes(self.blocks as u64, BLOCK_BYTES);
        let mut received = vec![0; BLOCK_BYTES];
        // The pipes do not hold the whole block.
        let exchange = async {
            let send = async {
                stdin.write_all(&sent).await?;
                stdin.flush().await
            };
            tokio::try_join!(send, stdout.read_exact(&mut received))
        };
        timeout(scaled(FIRST), exchange)
            .await
            .with_context(|| format!("no echo; {process}"))?
            .with_context(|| format!("exec has ended; {process}"))?;
        ensure!(sent == received, "block {} has changed", self.blocks);
        self.blocks += 1;
        Ok(())
    }

    /// Ends stdin. Fails unless the command has received all bytes and succeeds.
    pub(super) async fn finish(self) -> Result<()> {
        let Piped {
            mut process, stdin, ..
        } = self.piped;
        drop(stdin);
        let status = process.end(FIRST).await?;
        ensure!(status.success(), "{status}; {process}");
        let count = format!("{} bytes", self.blocks * BLOCK_BYTES);
        ensure!(process.log().contains(&count), "no {count}; {process}");
        Ok(())
    }
}

/// Starts commands in all Pods in turn.
pub(super) async fn start(kubectl: &Kubectl) -> Result<Vec<KubectlExec>> {
    let execs = Gear::current().pick(4, 20);
    let mut running = Vec::new();
    for pod in (1..=agents()).cycle().map(pod_name).take(execs) {
        running.push(KubectlExec::start(kubectl, &pod).await?);
    }
    Ok(running)
}

/// Fails unless kubectl reports the end of commands: success after all bytes, and an exit code.
pub(super) async fn ensure_ends_are_reported(kubectl: &Kubectl, pod: &str) -> Result<()> {
    KubectlExec::start(kubectl, pod).await?.finish().await?;
    let failed = kubectl.program(&format!("exec {pod} -- exit-3")).run();
    failed.await?.ensure_failed(3, &["exit code 3"])
}

/// Fails unless each command goes on.
pub(super) async fn all_go_on(execs: &mut [KubectlExec]) -> Result<()> {
    for exec in execs {
        exec.goes_on().await?;
    }
    Ok(())
}

/// Returns the commands that have not ended.
pub(super) async fn still_running(all: Vec<KubectlExec>) -> Vec<KubectlExec> {
    let mut running = Vec::new();
    for mut exec in all {
        if exec.piped.process.end(QUIET).await.is_err() {
            running.push(exec);
        }
    }
    running
}

/// More than the pipes hold.
const BLOCK_BYTES: usize = 256 << 10;
