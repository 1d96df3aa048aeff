//! A hostile target that accepts all data over TLS with a given certificate, and captures it.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Result;
use rustls::sign::CertifiedKey;
use rustls::version::{TLS12, TLS13};
use rustls_pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio_util::io::InspectReader;

use super::accept::{ANY_LOOPBACK_PORT, Listening, target_methods};
use super::tls::{Presented, TargetTls};

/// A target that answers each request with 200 and `captured`.
#[derive(Debug)]
pub struct ImpostorTarget {
    listening: Listening,
    captured: Arc<Mutex<Captured>>,
    presented: Presented,
}

/// The data captured by an [`ImpostorTarget`].
#[derive(Debug, Default, Clone)]
pub struct Captured {
    /// Number of failed handshakes.
    pub failed: u64,
    pub certificates: Vec<CertificateDer<'static>>,
    /// Bytes as received on the wire.
    pub wire: Vec<u8>,
    /// Bytes received inside TLS.
    pub requests: Vec<u8>,
}

target_methods!(ImpostorTarget);

impl ImpostorTarget {
    /// Starts an impostor with this certificate that requests client certificates. With `old` the
    /// impostor supports only TLS 1.2, where certificates are not encrypted; otherwise only TLS
    /// 1.3.
    pub async fn start(own: &Arc<CertifiedKey>, old: bool) -> Result<Self> {
        let presented = Presented::default();
        let versions = if old { [&TLS12] } else { [&TLS13] };
        let tls = TargetTls::recording_clients(own, &versions, Arc::clone(&presented))?;
        let captured = Arc::new(Mutex::new(Captured::default()));
        let shared = Arc::clone(&captured);
        let listening = Listening::start(ANY_LOOPBACK_PORT, None, move |wire, _traffic| {
            let captured = Arc::clone(&shared);
            let capturing = InspectReader::new(wire, move |bytes: &[u8]| {
                lock(&captured).wire.extend_from_slice(bytes);
            });
            serve(tls.clone(), capturing, Arc::clone(&shared))
        });
        Ok(Self {
            listening: listening.await?,
            captured,
            presented,
        })
    }

    /// Returns all captured data so far.
    pub fn captured(&self) -> Captured {
        let presented = self.presented.lock();
        Captured {
            certificates: presented.unwrap_or_else(PoisonError::into_inner).clone(),
            ..lock(&self.captured).clone()
        }
    }
}

impl Captured {
    /// Returns whether these bytes occur in the captured data, encrypted or decrypted.
    pub fn holds(&self, bytes: &[u8]) -> bool {
        [&self.wire, &self.requests]
            .iter()
            .any(|all| all.windows(bytes.len()).any(|part| part == bytes))
    }
}

async fn serve<S>(tls: TargetTls, wire: S, captured: Arc<Mutex<Captured>>) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut stream = match tls.acceptor().accept(wire).await {
        Ok(stream) => stream,
        Err(error) => {
            lock(&captured).failed += 1;
            return Err(error);
        }
    };
    let mut piece = vec![0; 4096];
    loop {
        let n = stream.read(&mut piece).await?;
        let read = piece.get(..n).unwrap_or_default();
        lock(&captured).requests.extend_from_slice(read);
        if n == 0 {
            return stream.shutdown().await;
        }
        if read.ends_with(b"\r\n\r\n") {
            stream
                .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\ncaught\n")
                .await?;
        }
    }
}

fn lock(captured: &Mutex<Captured>) -> MutexGuard<'_, Captured> {
    captured.lock().unwrap_or_else(PoisonError::into_inner)
}
