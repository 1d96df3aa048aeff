//! F20 on the CONNECT listener: the CA of the callers' certificates is replaced while tunnels are
//! open.

use anyhow::{Result, ensure};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tunnel_tests::ca::{Leaf, TestCa, replace};
use tunnel_tests::client::EgressDialer;
use tunnel_tests::env::WAIT_TIMEOUT;
use tunnel_tests::eventually::eventually;
use tunnel_tests::process::ScratchDir;
use tunnel_tests::targets::EchoTarget;

use super::{ConnectFixture, LISTENER, NODE, caller_tls};
use crate::credentials::metric_reaches;

async fn echoes(tunnel: &mut (impl AsyncRead + AsyncWrite + Unpin), text: &[u8]) -> Result<()> {
    tunnel.write_all(text).await?;
    let mut echoed = vec![0; text.len()];
    tunnel.read_exact(&mut echoed).await?;
    ensure!(echoed == text, "{echoed:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn f20_ca_of_the_connect_listener_is_replaced_and_cuts_no_tunnel() -> Result<()> {
    let (old_ca, next) = (TestCa::new("old")?, TestCa::new("next")?);
    let scratch = ScratchDir::new()?;
    let ca = scratch.file("callers.crt", old_ca.pem())?;
    let fixture = ConnectFixture::mutual(&old_ca, &scratch, &ca).await?;
    let _agent = fixture.env.agent(NODE).await?;
    let echo = EchoTarget::start().await?;
    let by_name = format!("{NODE}:{}", echo.addr().port());
    let direct = echo.addr().to_string();
    let dialer = |issuer: &TestCa| -> Result<EgressDialer> {
        let caller = issuer.issue(&Leaf::caller("apiserver"))?;
        fixture.tls_dialer(caller_tls(&old_ca, LISTENER, Some(&caller))?)
    };
    let (old, new) = (dialer(&old_ca)?, dialer(&next)?);
    let mut tunnels = [old.dial(&by_name).await?, old.dial(&direct).await?];
    for tunnel in &mut tunnels {
        echoes(tunnel, b"before").await?;
    }
    ensure!(new.dial(&by_name).await.is_err(), "the new caller came in");
    let reloads = |result: &str| {
        format!(
            "tunnel_server_credential_reloads_total{{files=\"connect_client_ca\",result=\"{result}\"}}"
        )
    };
    // An unusable file changes nothing.
    replace(&ca, b"no certificate")?;
    fixture.env.reload();
    metric_reaches(&fixture.env, &reloads("failed"), 1.0, WAIT_TIMEOUT).await;
    echoes(&mut old.dial(&by_name).await?, b"still").await?;
    replace(&ca, next.pem().as_bytes())?;
    fixture.env.reload();
    eventually("the new caller comes in", WAIT_TIMEOUT, async || {
        echoes(&mut new.dial(&by_name).await?, b"new").await
    })
    .await;
    ensure!(old.dial(&by_name).await.is_err(), "the old caller came in");
    for tunnel in &mut tunnels {
        echoes(tunnel, b"after").await?;
    }
    Ok(())
}
