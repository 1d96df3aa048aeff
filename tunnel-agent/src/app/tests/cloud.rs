//! Connections to a listener for a target of the cloud, over the transports of the product.

use tokio::net::TcpStream;
use tokio::time::Instant;
use tunnel_proto::transport::{IncomingStream, find_cause};
use tunnel_proto::wire::code::RefusalCode;
use tunnel_proto::wire::control::{CAPABILITY_CLOUD, Welcome};
use tunnel_proto::wire::header::{Refusal, StreamHeader, StreamKind, Target};
use tunnel_proto::wire::name::Port;

use super::*;

/// Connects until the agent opens a stream. Before its session is registered, it resets connections.
async fn connect(address: SocketAddr, session: &dyn Session) -> (TcpStream, IncomingStream) {
    let connected = async {
        loop {
            let Ok(mut client) = TcpStream::connect(address).await else {
                continue;
            };
            let incoming = tokio::select! {
                incoming = session.accept() => incoming.unwrap(),
                _reset = client.read_u8() => continue,
            };
            return (client, incoming);
        }
    };
    timeout(LONG, connected).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn local_connection_reaches_the_server_and_the_server_does_not_reach_the_listener() {
    for transport in ["quic", "h2"] {
        let mut env = TestEnv::start(|settings| {
            settings.transport = Some(transport.into());
            settings.cloud_listen = vec!["apiserver=127.0.0.1:0".into()];
            settings.localhost_ports = Some("1-65535".into());
        })
        .await;
        env.enroll().await;
        let session = env.session(transport).await;
        session.set_max_concurrent_streams(8);
        let offered = Welcome {
            capabilities: vec![CAPABILITY_CLOUD.to_owned()],
            ..net::welcome()
        };
        let admitted = timeout(LONG, net::admit(&*session, offered)).await;
        let (_reader, _writer) = admitted.unwrap();

        let (mut client, incoming) = connect(env.cloud[0], &*session).await;
        let (header, mut stream) = incoming.header(Instant::now() + LONG).await.unwrap();
        let apiserver = StreamKind::Cloud("apiserver".parse().unwrap());
        assert_eq!(header.kind, apiserver);
        stream.accept("").await.unwrap();
        client.write_all(b"question").await.unwrap();
        client.shutdown().await.unwrap();
        let mut question = Vec::new();
        stream.read_to_end(&mut question).await.unwrap();
        assert_eq!(question, b"question");
        stream.write_all(b"answer").await.unwrap();
        let mut answer = Vec::new();
        let (ended, read) = tokio::join!(stream.shutdown(), client.read_to_end(&mut answer));
        ended.unwrap();
        read.unwrap();
        assert_eq!(answer, b"answer");

        let port = Port::new(env.cloud[0].port()).unwrap();
        let header = StreamHeader::new(StreamKind::Target(Target::Loopback(port)));
        let mut stream = session.open(&header, LONG).await.unwrap();
        let error = stream.accepted().await.unwrap_err();
        let refusal = find_cause::<Refusal>(&error).unwrap();
        assert_eq!(refusal.code, RefusalCode::Policy, "{}", refusal.detail);

        env.shutdown.stop().cancel();
        env.ended().await;
    }
}
