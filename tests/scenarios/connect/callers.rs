//! F20 on the CONNECT door: the CA of its callers' certificates is replaced while tunnels run.

use anyhow::{Context, Result, ensure};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tunnel_tests::ca::{Issued, replace};
use tunnel_tests::client::{Door, EgressDialer};
use tunnel_tests::eventually::eventually;
use tunnel_tests::process::ScratchDir;
use tunnel_tests::targets::EchoTarget;
use tunnel_tests::world::PATIENCE;

use super::{DOOR, Lab, NODE, Pki};
use crate::credentials::metric_reaches;

async fn echoes(tunnel: &mut (impl AsyncRead + AsyncWrite + Unpin), text: &[u8]) -> Result<()> {
    tunnel.write_all(text).await?;
    let mut heard = vec![0; text.len()];
    tunnel.read_exact(&mut heard).await?;
    ensure!(heard == text, "{heard:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn f20_ca_of_the_connect_door_is_replaced_and_cuts_no_tunnel() -> Result<()> {
    let (pki, next) = (Pki::new()?, Pki::new()?);
    let scratch = ScratchDir::new()?;
    let ca = scratch.file("callers.crt", pki.ca.pem())?;
    let lab = Lab::mutual(&pki, &scratch, &ca).await?;
    let _agent = lab.world.agent(NODE).await?;
    let echo = EchoTarget::start().await?;
    let by_name = format!("{NODE}:{}", echo.addr().port());
    let direct = echo.addr().to_string();
    let door = lab.world.bound().connect.context("a door")?;
    let dialer = |caller: &Issued| -> Result<EgressDialer> {
        let tls = pki.tls(DOOR, Some(caller))?;
        Ok(EgressDialer::tcp(Door::tls(door, tls)))
    };
    let (old, new) = (dialer(&pki.client()?)?, dialer(&next.client()?)?);
    let mut tunnels = [old.dial(&by_name).await?, old.dial(&direct).await?];
    for tunnel in &mut tunnels {
        echoes(tunnel, b"before").await?;
    }
    ensure!(new.dial(&by_name).await.is_err(), "a stranger came in");
    let reloads = |result: &str| {
        format!(
            "tunnel_server_credential_reloads_total{{files=\"connect_client_ca\",result=\"{result}\"}}"
        )
    };
    // What cannot be used changes nothing.
    replace(&ca, b"no certificate")?;
    lab.world.reload();
    metric_reaches(&lab.world, &reloads("failed"), 1.0, PATIENCE).await;
    echoes(&mut old.dial(&by_name).await?, b"still").await?;
    replace(&ca, next.ca.pem().as_bytes())?;
    lab.world.reload();
    eventually("the new caller comes in", PATIENCE, async || {
        echoes(&mut new.dial(&by_name).await?, b"new").await
    })
    .await;
    ensure!(old.dial(&by_name).await.is_err(), "the old caller came in");
    for tunnel in &mut tunnels {
        echoes(tunnel, b"after").await?;
    }
    Ok(())
}
