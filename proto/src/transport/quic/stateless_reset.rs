//! Stateless resets (RFC 9000, section 10.3) that a restarted server sends by itself. An agent would
//! otherwise notice the restart only by the answer to its next packet, seconds later.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use aws_lc_rs::hmac::{HMAC_SHA256, Key, sign};
use tokio::time::sleep;

use super::connection_id::CONNECTION_ID_BYTES;

/// Resets that are sent together. With [`BATCH_INTERVAL`], 2,000 a second.
const BATCH: usize = 20;
/// Time between two batches.
const BATCH_INTERVAL: Duration = Duration::from_millis(10);
/// Random bytes before the token, so that the datagram looks like other short packets.
const PADDING_BYTES: usize = 26;
/// Length of a stateless reset token.
const TOKEN_BYTES: usize = 16;

/// A peer of a live connection, as a later process with the same keys can reach it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ResetTarget {
    /// Address of the peer.
    pub remote: SocketAddr,
    /// The id of this end to which the peer sends its packets.
    pub connection_id: [u8; CONNECTION_ID_BYTES],
}

/// The sender of stateless resets on the endpoint's socket.
#[derive(Debug)]
pub(super) struct ResetSender {
    socket: UdpSocket,
    key: Key,
}

impl ResetSender {
    /// Creates a sender with a handle of the endpoint's socket. `key` is the endpoint's reset key.
    pub(super) fn new(socket: &UdpSocket, key: &[u8]) -> io::Result<Self> {
        Ok(Self {
            socket: socket.try_clone()?,
            key: Key::new(HMAC_SHA256, key),
        })
    }

    /// Sends a reset to each target, 2,000 a second. Cancel-safe, and resets that were not sent are
    /// lost.
    pub(super) async fn send(&self, targets: &[ResetTarget]) {
        for batch in targets.chunks(BATCH) {
            for target in batch {
                // A lost reset costs no more than the agent's own detection.
                let _best_effort = self
                    .socket
                    .send_to(&self.datagram(target), self.destination(target.remote));
            }
            sleep(BATCH_INTERVAL).await;
        }
    }

    /// Returns a reset. quinn derives the token of a connection id in the same way.
    fn datagram(&self, target: &ResetTarget) -> Vec<u8> {
        let padding: [u8; PADDING_BYTES] = rand::random();
        let mut datagram = padding.to_vec();
        if let Some(first) = datagram.first_mut() {
            // The fixed bit of a short header.
            *first = 0b0100_0000 | (*first >> 2);
        }
        let signature = sign(&self.key, &target.connection_id);
        datagram.extend(signature.as_ref().iter().take(TOKEN_BYTES));
        datagram
    }

    /// Returns the address in the form that the socket takes. A socket of both families takes IPv6
    /// addresses only.
    fn destination(&self, remote: SocketAddr) -> SocketAddr {
        let is_ipv6 = self.socket.local_addr().is_ok_and(|own| own.is_ipv6());
        match remote {
            SocketAddr::V4(v4) if is_ipv6 => {
                SocketAddr::from((v4.ip().to_ipv6_mapped(), v4.port()))
            }
            SocketAddr::V4(_) | SocketAddr::V6(_) => remote,
        }
    }
}

/// Returns the source connection id of a packet with a long header (RFC 9000, section 17.2), if the
/// id has the length of this end's ids. The peer sends its packets to that id.
pub(super) fn source_connection_id(packet: &[u8]) -> Option<[u8; CONNECTION_ID_BYTES]> {
    let (first, rest) = packet.split_first()?;
    if first & LONG_HEADER == 0 {
        return None;
    }
    let (_version, rest) = rest.split_at_checked(4)?;
    let (length, rest) = rest.split_first()?;
    let (_destination, rest) = rest.split_at_checked(usize::from(*length))?;
    let (length, rest) = rest.split_first()?;
    rest.get(..usize::from(*length))?.try_into().ok()
}

/// The bit of the first byte that marks a long header.
const LONG_HEADER: u8 = 0x80;

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn source_id_is_read_from_long_headers_alone() {
        let mut packet = vec![0xc0, 0, 0, 0, 1, 3, 7, 7, 7, 12];
        packet.extend([9; CONNECTION_ID_BYTES]);
        packet.extend([5; 100]);
        let expected = Some([9; CONNECTION_ID_BYTES]);
        assert_eq!(source_connection_id(&packet), expected);
        for length in 0..10 + CONNECTION_ID_BYTES {
            assert_eq!(source_connection_id(&packet[..length]), None, "{length}");
        }
        packet[9] = 8;
        assert_eq!(source_connection_id(&packet), None, "another length");
        packet[9] = 12;
        packet[0] = 0x40;
        assert_eq!(source_connection_id(&packet), None, "short header");
    }

    #[tokio::test]
    async fn reset_is_a_short_packet_that_ends_with_the_token() {
        let receiver = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        let sender = ResetSender::new(&socket, &[7; 64]).unwrap();
        let target = ResetTarget {
            remote: receiver.local_addr().unwrap(),
            connection_id: [9; CONNECTION_ID_BYTES],
        };
        sender.send(&[target]).await;
        let mut datagram = [0; 100];
        let (length, from) = receiver.recv_from(&mut datagram).unwrap();
        assert_eq!(from.port(), socket.local_addr().unwrap().port());
        assert_eq!(length, PADDING_BYTES + TOKEN_BYTES);
        assert_eq!(datagram[0] & 0xc0, 0x40);
        let key = Key::new(HMAC_SHA256, &[7; 64]);
        let token = sign(&key, &target.connection_id);
        assert_eq!(
            datagram[PADDING_BYTES..length],
            token.as_ref()[..TOKEN_BYTES]
        );
    }
}
