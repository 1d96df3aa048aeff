//! Hostile clients over the network.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures_util::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tunnel_tests::dns::{Message, RecordType, ResponseCode, query};
use tunnel_tests::env::{TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::{eventually, scaled};

use super::{client, client_that_knows, env, listener, no_upstream, with_dns};

#[tokio::test]
async fn hostile_datagrams_get_a_short_answer_or_none_and_service_goes_on() -> Result<()> {
    let env = env(&no_upstream()).await?;
    let client = client_that_knows(&env, "worker-1").await?;
    let plain = query("worker-1", RecordType::A)?.to_vec()?;
    let with = |at: usize, byte: u8| {
        let mut message = plain.clone();
        message[at] = byte;
        message
    };
    let mut loops = plain[..12].to_vec();
    loops.extend([0xc0, 14, 0xc0, 12, 0, 1, 0, 1]);
    let oversize = [&plain[..], &[0; 9000]].concat();
    let axfr = query("nodes.tunnel.internal", RecordType::AXFR)?.to_vec()?;
    let any = query("example.com", RecordType::ANY)?.to_vec()?;
    for (what, message, code) in [
        ("cut short", plain[..14].to_vec(), ResponseCode::FormErr),
        ("no question", with(5, 0), ResponseCode::FormErr),
        ("many questions", with(4, 0xff), ResponseCode::FormErr),
        ("oversize", oversize, ResponseCode::FormErr),
        ("compression loop", loops, ResponseCode::FormErr),
        ("update", with(2, 0x28), ResponseCode::NotImp),
        ("chaos", with(plain.len() - 1, 3), ResponseCode::Refused),
        ("axfr", axfr, ResponseCode::Refused),
        ("any", any, ResponseCode::Refused),
    ] {
        let reply = client.exchange(&message).await?;
        let reply = reply.with_context(|| format!("{what}: no answer"))?;
        ensure!(reply.len() <= message.len() + 12, "{what}: {reply:?}");
        let read = Message::from_vec(&reply)?;
        ensure!(read.metadata.response_code == code, "{what}: {read}");
    }
    // The server sends no answer to these messages, because an answer would help an attacker. The
    // query that follows them is answered first.
    let silent = [with(2, 0x81), plain[..8].to_vec(), Vec::new()];
    let socket = tokio::net::UdpSocket::bind("127.0.0.1:0").await?;
    socket.connect(listener(&env)?).await?;
    for message in &silent {
        socket.send(message).await?;
    }
    let mut last = plain.clone();
    last[0] = !plain[0];
    socket.send(&last).await?;
    let mut reply = [0; 512];
    timeout(scaled(WAIT_TIMEOUT), socket.recv(&mut reply)).await??;
    ensure!(reply[..2] == last[..2], "something else was answered first");
    Ok(())
}

#[tokio::test]
async fn one_source_that_floods_is_limited_and_nonsense_is_answered_ever_less() -> Result<()> {
    let env = TestEnv::start_with(|settings| {
        with_dns(settings, &no_upstream());
        settings.limits = TestEnv::limits("{ dnsPerSource: 200 }");
    })
    .await?;
    let address = listener(&env)?;
    let flood = async |message: Vec<u8>| -> Result<usize> {
        let socket = tokio::net::UdpSocket::bind("127.0.0.1:0").await?;
        socket.connect(address).await?;
        for _ in 0..2000 {
            socket.send(&message).await?;
        }
        let (mut answered, mut reply) = (0, [0; 512]);
        let pause = Duration::from_millis(300);
        while let Ok(_received) = timeout(pause, socket.recv(&mut reply)).await {
            answered += 1;
        }
        Ok(answered)
    };
    let answered = flood(query("worker-9", RecordType::A)?.to_vec()?).await?;
    ensure!((200..1500).contains(&answered), "{answered} of 2000");
    let mut nonsense = query("worker-9", RecordType::A)?.to_vec()?;
    nonsense[5] = 0;
    let answered = flood(nonsense).await?;
    ensure!(answered < 1000, "{answered} answers");
    Ok(())
}

#[tokio::test]
async fn connections_that_stall_or_lie_about_their_length_are_closed() -> Result<()> {
    let env = env(&no_upstream()).await?;
    let address = listener(&env)?;
    // Opens more connections than the 32 that one source may have. The server closes the excess at
    // once and serves the others.
    let mut open_conns = Vec::new();
    for _ in 0..40 {
        open_conns.push(TcpStream::connect(address).await?);
    }
    // All at once: after five seconds the server closes those that it serves, too.
    let reads = open_conns.iter_mut().map(async |stream| {
        let read = timeout(scaled(Duration::from_millis(500)), stream.read(&mut [0; 1])).await;
        matches!(read, Ok(Ok(0) | Err(_)))
    });
    let closed = join_all(reads)
        .await
        .into_iter()
        .filter(|is_closed| *is_closed);
    let closed = closed.count();
    ensure!(closed == 8, "{closed} of 40 were closed at once");
    drop(open_conns);
    eventually("a connection that is served", WAIT_TIMEOUT, async || {
        let asked = [query("worker-9", RecordType::A)?];
        let answers = client(&env)?.over_tcp(&asked).await?;
        ensure!(answers.len() == 1);
        anyhow::Ok(())
    })
    .await;
    // Announces 65,535 bytes and sends ten. The whole message must arrive within five seconds.
    let mut liar = TcpStream::connect(address).await?;
    liar.write_u16(u16::MAX).await?;
    liar.write_all(&[0; 10]).await?;
    let ended = timeout(scaled(WAIT_TIMEOUT), liar.read(&mut [0; 1])).await;
    let ended = ended.context("kept open")?;
    ensure!(matches!(ended, Ok(0) | Err(_)), "{ended:?}");
    Ok(())
}
