//! A scripted proxy for tests that serves one connection at a time.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};

pub(crate) struct FakeProxy(TcpListener);

impl FakeProxy {
    pub(crate) async fn start() -> Self {
        Self(TcpListener::bind("127.0.0.1:0").await.unwrap())
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.0.local_addr().unwrap()
    }

    /// Returns the head of a request, and the connection positioned after it.
    pub(crate) async fn request(&self) -> (String, TcpStream) {
        let (mut socket, _) = self.0.accept().await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(socket.read_u8().await.unwrap());
        }
        (String::from_utf8(head).unwrap(), socket)
    }

    /// Answers one client's request with `answer`.
    pub(crate) async fn answer(&self, answer: &[u8]) -> (String, TcpStream) {
        let (request, mut socket) = self.request().await;
        socket.write_all(answer).await.unwrap();
        (request, socket)
    }

    /// Relays between one client and `server`, whatever the client requested, until both ends have
    /// ended. Returns the request.
    pub(crate) async fn relay(&self, server: SocketAddr) -> String {
        let (request, mut client) = self.answer(b"HTTP/1.1 200 OK\r\n\r\n").await;
        let mut server = TcpStream::connect(server).await.unwrap();
        // The test observes an abort of either end at the other end.
        let _ended = copy_bidirectional(&mut client, &mut server).await;
        request
    }
}
