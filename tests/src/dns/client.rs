//! A DNS client that sends bytes and returns the answer.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use hickory_proto::op::{Message, Query};
use hickory_proto::rr::{Name, RData, RecordType};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::timeout;

use crate::eventually::scaled;

#[derive(Debug, Clone, Copy)]
pub struct DnsClient {
    server: SocketAddr,
    source: Option<IpAddr>,
}

impl DnsClient {
    pub fn new(server: SocketAddr) -> Self {
        let source = None;
        Self { server, source }
    }

    /// Sets `source` as the source address of datagrams.
    pub fn from_source(self, source: IpAddr) -> Self {
        let source = Some(source);
        Self { source, ..self }
    }

    /// Sends a query over UDP.
    pub async fn ask(&self, name: &str, kind: RecordType) -> Result<Message> {
        self.send(&query(name, kind)?).await
    }

    /// Sends a query message over UDP.
    pub async fn send(&self, query: &Message) -> Result<Message> {
        let answer = self.exchange(&query.to_vec()?).await?;
        let answer = Message::from_vec(&answer.context("no answer")?)?;
        ensure!(
            answer.metadata.id == query.metadata.id,
            "id of another query"
        );
        ensure!(answer.queries == query.queries, "another question");
        Ok(answer)
    }

    /// Returns the addresses of a name, of both families.
    pub async fn addresses(&self, name: &str) -> Result<Vec<IpAddr>> {
        let (v4, v6) = tokio::try_join!(
            self.ask(name, RecordType::A),
            self.ask(name, RecordType::AAAA)
        )?;
        Ok([addresses(&v4), addresses(&v6)].concat())
    }

    /// Sends bytes in a datagram. Returns `None` if there is no answer.
    pub async fn exchange(&self, bytes: &[u8]) -> Result<Option<Vec<u8>>> {
        let source = self.source.unwrap_or_else(|| match self.server {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        });
        let socket = UdpSocket::bind((source, 0)).await?;
        // Connected: like every stub resolver, the client accepts answers only from the queried
        // address.
        socket.connect(self.server).await?;
        socket.send(bytes).await?;
        let mut answer = vec![0; 65_535];
        match timeout(scaled(WAIT_TIMEOUT), socket.recv(&mut answer)).await {
            Ok(length) => {
                answer.truncate(length?);
                Ok(Some(answer))
            }
            Err(_elapsed) => Ok(None),
        }
    }

    /// Sends queries over one TCP connection and returns their answers.
    pub async fn over_tcp(&self, queries: &[Message]) -> Result<Vec<Message>> {
        let mut stream = TcpStream::connect(self.server).await?;
        let mut answers = Vec::new();
        for query in queries {
            let bytes = query.to_vec()?;
            stream.write_u16(u16::try_from(bytes.len())?).await?;
            stream.write_all(&bytes).await?;
        }
        for _ in queries {
            let read = async {
                let mut answer = vec![0; usize::from(stream.read_u16().await?)];
                stream.read_exact(&mut answer).await?;
                anyhow::Ok(answer)
            };
            let answer = timeout(scaled(WAIT_TIMEOUT), read)
                .await
                .context("no answer")??;
            answers.push(Message::from_vec(&answer)?);
        }
        Ok(answers)
    }
}

/// Returns a query that requests recursion.
pub fn query(name: &str, kind: RecordType) -> Result<Message> {
    let mut name = Name::from_ascii(name)?;
    name.set_fqdn(true);
    let mut message = Message::query();
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(name, kind));
    Ok(message)
}

pub fn addresses(answer: &Message) -> Vec<IpAddr> {
    let found = answer
        .answers
        .iter()
        .filter_map(|record| match &record.data {
            RData::A(address) => Some(IpAddr::V4(address.0)),
            RData::AAAA(address) => Some(IpAddr::V6(address.0)),
            _ => None,
        });
    found.collect()
}

/// Longer than any timeout of the server.
const WAIT_TIMEOUT: Duration = Duration::from_secs(3);
