//! Tests of datagrams through a link.

use super::*;
use crate::eventually::eventually;

#[tokio::test]
async fn clean_link_passes_both_ways() {
    let path = Path::new().await;
    path.agent.send(b"up").await.unwrap();
    let (up, port) = recv(&path.server).await;
    path.server.send_to(b"down", port).await.unwrap();
    let (down, from) = recv(&path.agent).await;
    assert_eq!(
        (&*up, &*down, from),
        (&b"up"[..], &b"down"[..], path.link.addr())
    );
    assert_ne!(port, path.agent.local_addr().unwrap());

    let counters = path.link.counters();
    let (up, down) = (counters.udp.up, counters.udp.down);
    assert_eq!((up.received.packets, up.received.bytes), (1, 2));
    assert_eq!((down.received.packets, down.received.bytes), (1, 4));
    assert_eq!((up.dropped.packets, down.dropped.packets), (0, 0));
    assert_eq!(counters.udp_flows, 1);
}

#[tokio::test]
async fn delay_holds_each_datagram_that_long() {
    let path = Path::new().await;
    path.link
        .set(TrafficClass::UDP, Impairment::delayed(millis(40)));
    let start = Instant::now();
    path.agent.send(b"1").await.unwrap();
    path.agent.send(b"2").await.unwrap();
    assert_eq!(recv(&path.server).await.0, b"1");
    assert!(start.elapsed() >= millis(40));
    let (second, port) = recv(&path.server).await;
    assert_eq!(second, b"2");
    let start = Instant::now();
    path.server.send_to(b"3", port).await.unwrap();
    recv(&path.agent).await;
    assert!(start.elapsed() >= millis(40));
}

#[tokio::test]
async fn larger_datagrams_than_the_cap_vanish() {
    let path = Path::new().await;
    path.link
        .set(TrafficClass::UDP.up(), Impairment::capped(1200));
    for len in [1201, 1200, 9000, 1] {
        path.agent.send(&vec![0; len]).await.unwrap();
    }
    let (first, port) = recv(&path.server).await;
    assert_eq!((first.len(), recv(&path.server).await.0.len()), (1200, 1));
    assert_eq!(path.link.counters().udp.up.too_big, 2);
    path.server.send_to(&[0; 9000], port).await.unwrap();
    assert_eq!(recv(&path.agent).await.0.len(), 9000);
}

#[tokio::test]
async fn black_hole_drops_one_direction_only() {
    let path = Path::new().await;
    let port = path.port().await;
    path.link
        .set(TrafficClass::UDP.up(), Impairment::black_hole());
    path.agent.send(b"lost").await.unwrap();
    path.server.send_to(b"down", port).await.unwrap();
    assert_eq!(recv(&path.agent).await.0, b"down");
    path.dropped_up(1).await;
    path.link.heal();
    path.agent.send(b"up").await.unwrap();
    assert_eq!(recv(&path.server).await.0, b"up");
}

#[tokio::test]
async fn black_hole_takes_what_is_under_way() {
    let path = Path::new().await;
    path.link
        .set(TrafficClass::UDP, Impairment::delayed(millis(100)));
    path.agent.send(b"lost").await.unwrap();
    path.received_up(1).await;
    path.link.set(TrafficClass::UDP, Impairment::black_hole());
    path.dropped_up(1).await;
    path.link.heal();
    path.agent.send(b"marker").await.unwrap();
    assert_eq!(recv(&path.server).await.0, b"marker");
}

#[tokio::test]
async fn rebinding_changes_the_port_and_closes_the_old_one() {
    let path = Path::new().await;
    let old = path.port().await;
    path.link.rebind();
    path.server.send_to(b"late", old).await.unwrap();
    let new = path.port().await;
    assert_eq!(new.ip(), old.ip());
    assert_ne!(new, old);
    path.server.send_to(b"late", old).await.unwrap();
    path.server.send_to(b"marker", new).await.unwrap();
    assert_eq!(recv(&path.agent).await.0, b"marker");
}

#[tokio::test]
async fn moving_changes_the_address() {
    let path = Path::new().await;
    assert_eq!(path.port().await.ip(), IpAddr::from([127, 0, 0, 1]));
    let elsewhere = IpAddr::from([127, 0, 0, 9]);
    path.link.move_to(elsewhere);
    let port = path.port().await;
    assert_eq!(port.ip(), elsewhere);
    path.server.send_to(b"there", port).await.unwrap();
    assert_eq!(recv(&path.agent).await.0, b"there");
    path.link.rebind();
    assert_eq!(path.port().await.ip(), elsewhere);
}

#[tokio::test]
async fn address_of_another_machine_drops() {
    let path = Path::new().await;
    path.link.move_to(IpAddr::from([192, 0, 2, 1]));
    path.agent.send(b"lost").await.unwrap();
    path.dropped_up(1).await;
}

#[tokio::test]
async fn duplicates_arrive_twice() {
    let path = Path::new().await;
    let twice = Impairment::default().with_duplicate(1.0);
    path.link.set(TrafficClass::UDP, twice.clone());
    path.agent.send(b"a").await.unwrap();
    for _ in 0..2 {
        assert_eq!(recv(&path.server).await.0, b"a");
    }
    path.link
        .set(TrafficClass::UDP, twice.with_delay(millis(5)));
    path.agent.send(b"b").await.unwrap();
    for _ in 0..2 {
        assert_eq!(recv(&path.server).await.0, b"b");
    }
    path.forwarded_up(4).await;
    let up = path.link.counters().udp.up;
    assert_eq!((up.received.packets, up.duplicated), (2, 2));
}

#[tokio::test]
async fn corruption_flips_one_bit() {
    let path = Path::new().await;
    path.link
        .set(TrafficClass::UDP, Impairment::default().with_corrupt(1.0));
    let sent = [0b1010_0101; 100];
    path.agent.send(&sent).await.unwrap();
    let (got, _) = recv(&path.server).await;
    let flipped = sent.iter().zip(&got).map(|(a, b)| (a ^ b).count_ones());
    assert_eq!((got.len(), flipped.sum()), (100, 1_u32));
    path.agent.send(b"").await.unwrap();
    assert_eq!(recv(&path.server).await.0, b"");
    assert_eq!(path.link.counters().udp.up.corrupted, 1);
}

#[tokio::test]
async fn flapping_link_passes_only_in_its_up_times() {
    let path = Path::new().await;
    path.port().await;
    let long = Duration::from_secs(3600);
    path.link.flap(TrafficClass::UDP, Duration::ZERO, long, 1);
    eventually("down", WAIT_TIMEOUT, || async {
        path.agent.send(b"probe").await.unwrap();
        (path.link.counters().udp.up.dropped.packets > 0).then_some(())
    })
    .await;
    path.link.heal();
    path.link.flap(TrafficClass::UDP, millis(1), millis(1), 3);
    eventually("up", WAIT_TIMEOUT, || async {
        path.agent.send(b"who am I").await.unwrap();
        tokio::time::timeout(GLANCE, recv(&path.server)).await
    })
    .await;
}

/// An agent, a link and a server.
struct Path {
    agent: UdpSocket,
    link: Link,
    server: UdpSocket,
}

impl Path {
    async fn new() -> Self {
        let server = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let link = Link::start(server.local_addr().unwrap(), SEED).unwrap();
        let agent = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        agent.connect(link.addr()).await.unwrap();
        Self {
            agent,
            link,
            server,
        }
    }

    /// Returns the address at which the server receives the agent's datagrams.
    async fn port(&self) -> SocketAddr {
        self.agent.send(b"who am I").await.unwrap();
        loop {
            let (payload, port) = recv(&self.server).await;
            if payload == b"who am I" {
                return port;
            }
        }
    }

    async fn received_up(&self, packets: u64) {
        self.up("seen", packets, |count| count.received).await;
    }

    async fn forwarded_up(&self, packets: u64) {
        self.up("forwarded", packets, |count| count.forwarded).await;
    }

    async fn dropped_up(&self, packets: u64) {
        self.up("dropped", packets, |count| count.dropped).await;
    }

    async fn up(&self, what: &str, packets: u64, pick: fn(Count) -> Tally) {
        eventually(what, WAIT_TIMEOUT, || async {
            let found = pick(self.link.counters().udp.up).packets;
            (found == packets).then_some(()).ok_or(found)
        })
        .await;
    }
}

async fn recv(socket: &UdpSocket) -> (Vec<u8>, SocketAddr) {
    let mut buffer = vec![0; 65535];
    let (len, from) = soon("a datagram", socket.recv_from(&mut buffer))
        .await
        .unwrap();
    (buffer[..len].to_vec(), from)
}
