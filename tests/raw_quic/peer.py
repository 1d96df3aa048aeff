#!/usr/bin/env python3
"""A QUIC peer that sends packets that no QUIC library sends.

aioquic does the handshake. Afterwards this program writes the frames of its packets, which may be
invalid, and encrypts the packets with aioquic's keys. The peer acknowledges no packet of the
server, unless an attack does so itself. At the end the program prints one line of JSON: how many
packets and bytes it sent, how many bytes the server sent, and the code with which the server closed
the connection, if it did.

    peer.py ATTACK --server HOST:PORT --seconds N [--certificate FILE --key FILE --node NAME] [--streams N]
"""

import argparse
import itertools
import json
import os
import select
import socket
import ssl
import time

from aioquic import tls
from aioquic.buffer import Buffer
from aioquic.buffer import encode_uint_var as varint
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.crypto import CryptoError, CryptoPair

ALPN = "culvert/1"
VERSION = 1
PAYLOAD = 1150
PACKET_NUMBER_BYTES = 4
PATIENCE = 10.0
# The rate of a flood, about 190 Mbit/s. A faster flood fills the socket buffer of a debug build,
# and other peers then lose packets as on any full link.
PACKETS_A_SECOND = 20_000
# The id of the control stream, which is the first stream that the server opens. The id of each
# further stream is 4 higher.
CONTROL = 1
# Number of pieces with gaps in one stream. quinn closes a connection that leaves a few more in one
# stream.
PIECES = 1000


class Unexpected(Exception):
    """The server did something that the attack does not expect."""


class Peer:
    """A socket, and the connection over it after the handshake."""

    def __init__(self, arguments):
        host, port = arguments.server.rsplit(":", 1)
        self.arguments = arguments
        self.server = (host, int(port))
        self.socket = self.bound()
        self.began = None
        self.packets = self.sent = self.answered = self.expected = self.largest_acknowledged = 0
        self.closed = None  # the code of the server's CONNECTION_CLOSE
        self.forgotten = False  # whether the server answers with stateless resets
        self.heard = {}  # stream id: the offset up to which the server has sent
        self.crypto = None

    def bound(self):
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.bind(("127.0.0.1", 0))
        made.connect(self.server)
        made.setblocking(False)
        return made

    def client(self, token=b""):
        """Returns aioquic's end of a new connection."""
        configuration = QuicConfiguration(
            is_client=True, alpn_protocols=[ALPN], verify_mode=ssl.CERT_NONE, max_datagram_frame_size=1200, token=token
        )
        if self.arguments.certificate:
            configuration.load_cert_chain(self.arguments.certificate, self.arguments.key)
        made = QuicConnection(configuration=configuration)
        made.connect(self.server, now=time.monotonic())
        return made

    def connect(self):
        """Does the handshake with aioquic. Takes over its keys and connection ids when the server
        has confirmed the handshake.
        """
        quic, until = self.client(), time.monotonic() + PATIENCE
        while not quic._handshake_confirmed:
            for data, _ in quic.datagrams_to_send(now=time.monotonic()):
                self.socket.send(data)
            if quic._close_event is not None:
                self.closed = quic._close_event.error_code
                return
            if time.monotonic() > until:
                raise Unexpected("no handshake")
            self.wait(0.02)
            for data in self.datagrams():
                quic.receive_datagram(data, self.server, now=time.monotonic())
            timer = quic.get_timer()
            if timer is not None and timer <= time.monotonic():
                quic.handle_timer(now=time.monotonic())
        self.crypto = quic._cryptos[tls.Epoch.ONE_RTT]
        self.number = quic._packet_number
        self.cid, self.own_cid = quic._peer_cid.cid, quic.host_cid
        self.issued = {cid.sequence_number: cid.cid for cid in quic._peer_cid_available}
        self.heard = {id: 1 for id in quic._streams}

    def register(self):
        """Sends Hello on the control stream and waits for the server's Welcome."""
        self.until(lambda: CONTROL in self.heard, "opened no control stream")
        node = self.arguments.node.encode()
        hello = b"\x08\x01\x10\x01" + b"\x22" + varint(len(node)) + node + b"\x2a\x10" + os.urandom(16)
        message = b"\x0a" + varint(len(hello)) + hello
        # An empty StreamReply accepts the stream.
        before = self.heard[CONTROL]
        self.send([stream(CONTROL, 0, b"\0" + varint(len(message)) + message)])
        self.until(lambda: self.heard[CONTROL] > before, "sent no Welcome")

    def until(self, condition, else_the_server):
        until = time.monotonic() + PATIENCE
        while not condition():
            if self.closed is not None or time.monotonic() > until:
                raise Unexpected(f"the server {else_the_server}; closed: {self.closed}")
            self.wait(0.05)
            self.receive()

    def wait(self, seconds):
        select.select([self.socket], [], [], seconds)

    def datagrams(self):
        while True:
            try:
                data = self.socket.recv(2048)
            except BlockingIOError:
                return
            self.answered += len(data)
            yield data

    def throw(self, datagram, through=None):
        try:
            (through or self.socket).send(datagram)
        except BlockingIOError:
            select.select([], [self.socket], [], 0.01)
        self.packets += 1
        self.sent += len(datagram)
        if self.packets % 16 == 0:
            self.began = self.began or time.monotonic()
            time.sleep(max(0, self.began + self.packets / PACKETS_A_SECOND - time.monotonic()))

    def send(self, frames, through=None):
        """Sends one packet with these frames."""
        # quinn updates the keys after some packets (RFC 9001, section 6). aioquic updates its keys
        # when it reads the first packet with the new ones.
        first = 0x40 | self.crypto.key_phase << 2 | (PACKET_NUMBER_BYTES - 1)
        header = bytes([first]) + self.cid + self.number.to_bytes(PACKET_NUMBER_BYTES, "big")
        payload = b"".join(frames).ljust(PACKET_NUMBER_BYTES, b"\0")
        self.throw(self.crypto.encrypt_packet(header, payload, self.number), through)
        self.number += 1

    def flood(self, packets):
        """Sends these packets until the server closes the connection or the time is over."""
        until = time.monotonic() + self.arguments.seconds
        for frames in packets:
            self.send(frames)
            if self.packets % 16 == 0:
                self.receive()
                if self.closed is not None or self.forgotten or time.monotonic() > until:
                    return

    def leave(self):
        """Waits until the server closes the connection. After a second the peer closes it, again
        and again until the server answers.
        """
        began, left = time.monotonic(), False
        while self.closed is None and not self.forgotten and time.monotonic() < began + PATIENCE:
            if time.monotonic() > began + 1.0:
                self.send([frame(0x1D, 0, 0)])
                left = True
            self.wait(0.05)
            self.receive()
        if left:
            # The server's code answers the close by the peer and is not a result of the attack.
            self.closed = None

    def receive(self):
        for data in self.datagrams():
            if data[0] & 0x80 or self.crypto is None:
                continue
            try:
                _, payload, number = self.crypto.decrypt_packet(data, 1 + len(self.own_cid), self.expected)
            except CryptoError:
                self.forgotten = True
                continue
            self.expected = max(self.expected, number + 1)
            self.read(Buffer(data=payload))

    def read(self, buffer):
        """Reads the values that attacks need from the server's frames."""
        pull = buffer.pull_uint_var
        while not buffer.eof():
            kind = pull()
            if kind in (0x02, 0x03):
                self.largest_acknowledged = max(self.largest_acknowledged, pull())
                pull()
                for _ in range(2 * pull() + (4 if kind == 0x03 else 1)):
                    pull()
            elif kind in (0x1C, 0x1D):
                self.closed = pull()
                return
            elif kind == 0x06:
                pull()
                buffer.pull_bytes(pull())
            elif 0x08 <= kind <= 0x0F:
                id = pull()
                offset = pull() if kind & 4 else 0
                length = pull() if kind & 2 else buffer.capacity - buffer.tell()
                buffer.pull_bytes(length)
                self.heard[id] = max(self.heard.get(id, 0), offset + length)
            elif kind == 0x18:
                sequence, _ = pull(), pull()
                self.issued[sequence] = buffer.pull_bytes(buffer.pull_uint8())
                buffer.pull_bytes(16)
            elif kind in (0x1A, 0x1B):
                buffer.pull_bytes(8)
            elif kind in (0x30, 0x31):
                buffer.pull_bytes(pull() if kind == 0x31 else buffer.capacity - buffer.tell())
            elif kind in NUMBERS:
                for _ in range(NUMBERS[kind]):
                    pull()
            elif kind == 0x07:
                buffer.pull_bytes(pull())
            elif kind != 0x00:
                raise Unexpected(f"the server sent a frame of type {kind:#x}")


# Types of frames that consist of numbers only, and the count of their numbers.
NUMBERS = {0x01: 0, 0x04: 3, 0x05: 2, 0x10: 1, 0x11: 2, 0x12: 1, 0x13: 1, 0x14: 1, 0x15: 2, 0x16: 1, 0x17: 1, 0x19: 1, 0x1E: 0}


def frame(kind, *numbers):
    return varint(kind) + b"".join(varint(number) for number in numbers)


def stream(id, offset, data):
    return frame(0x0E, id, offset, len(data)) + data


def crypto(offset, data):
    return frame(0x06, offset, len(data)) + data


def new_connection_id(sequence, retire_prior_to):
    return frame(0x18, sequence, retire_prior_to) + b"\x08" + sequence.to_bytes(8, "big") + os.urandom(16)


def packed(frames):
    """Yields packets, each with as many of the frames as fit."""
    packet, size = [], 0
    for one in frames:
        if size + len(one) > PAYLOAD:
            yield packet
            packet, size = [], 0
        packet.append(one)
        size += len(one)


def each(make):
    """Returns packets with one frame for each number, without end."""
    return packed(make(number) for number in itertools.count())


def again(packets, count=64):
    """Repeats the first `count` packets without end. They are built once, so that they can be sent
    fast.
    """
    return itertools.cycle([[b"".join(frames)] for frames in itertools.islice(packets, count)])


def on_streams(streams):
    """Returns packets with pieces of one byte and gaps of one byte, on each stream in turn. After
    `PIECES` pieces they repeat.
    """
    return each(lambda n: stream(streams[n % len(streams)], 1001 + 2 * (n // len(streams) % PIECES), b"x"))


# S23: connection ids and paths.


def retires_ids_as_they_are_issued(peer):
    """Retires each id without using it. The server then has to issue a new id, which it may not
    send before older ones are acknowledged.
    """
    held = max(peer.issued)
    peer.cid, until = peer.issued[held], time.monotonic() + peer.arguments.seconds
    sequences = (number for number in itertools.count() if number != held)
    while peer.closed is None and time.monotonic() < until:
        # One of the eight ids each time, so that the peer does not retire an id that a slow server
        # has not issued yet.
        peer.send([frame(0x19, next(sequences))])
        asked = peer.number
        # The server acknowledges both packets at once when it has received the second.
        peer.send([b"\x01"])
        late = time.monotonic() + 0.05
        while peer.largest_acknowledged < asked and time.monotonic() < late:
            peer.wait(0.01)
            peer.receive()


def retires_one_id_again(peer):
    """Retires one id again and again. The packets use another id, because the server drops packets
    with a retired id.
    """
    peer.cid = peer.issued[max(peer.issued)]
    peer.flood(again(each(lambda _: frame(0x19, 0))))


def challenges_from_many_paths(peer):
    sockets = [peer.bound() for _ in range(200)]
    until = time.monotonic() + peer.arguments.seconds
    for through in itertools.cycle(sockets):
        peer.send([b"\x1a" + os.urandom(8) for _ in range(100)], through)
        if peer.packets % 16 == 0:
            peer.receive()
            if peer.closed is not None or time.monotonic() > until:
                return


def gaps_on_many_streams(peer):
    """Sends pieces with gaps on the streams that the server has opened for callers. The test starts
    the callers.
    """
    peer.until(lambda: len(peer.heard) > peer.arguments.streams, "opened too few streams")
    streams = [id for id in peer.heard if id != CONTROL]
    peer.flood(again(on_streams(streams), count=PIECES * len(streams) // 100))


# Unauthenticated peers, without a certificate or without a complete handshake.


def hello_flood(peer):
    """Sends first packets of handshakes, each of another connection and with another token."""
    first = [peer.client(os.urandom(40)).datagrams_to_send(now=time.monotonic())[0][0] for _ in range(200)]
    throw_all(peer, itertools.cycle(first))


def versions_unknown(peer):
    """Sends unknown versions. The server answers with the versions that it supports."""
    datagrams = [initial_header(0x1A2A3A4A + n, os.urandom(8)).ljust(1200, b"\0") for n in range(200)]
    throw_all(peer, itertools.cycle(datagrams))


def initial_gaps(peer):
    """Sends the ClientHello of one handshake in bytes with gaps, without end. Any peer can compute
    the keys of Initial packets.
    """
    cid = os.urandom(8)
    pair = CryptoPair()
    pair.setup_initial(cid, is_client=True, version=VERSION)

    def packets():
        for number, frames in enumerate(again(each(lambda n: crypto(1001 + 2 * (n % PIECES), b"x")))):
            # Servers drop Initial packets in datagrams of less than 1200 bytes (RFC 9000, section
            # 14.1).
            payload = b"".join(frames).ljust(1200, b"\0")
            length = varint(PACKET_NUMBER_BYTES + len(payload) + pair.aead_tag_size)
            header = initial_header(VERSION, cid) + b"\0" + length + number.to_bytes(PACKET_NUMBER_BYTES, "big")
            yield pair.encrypt_packet(header, payload, number)

    throw_all(peer, packets())


def initial_header(version, cid):
    first = bytes([0xC0 | (PACKET_NUMBER_BYTES - 1)])
    return first + version.to_bytes(4, "big") + bytes([len(cid)]) + cid + b"\x08" + b"clientid"


def throw_all(peer, datagrams):
    until = time.monotonic() + peer.arguments.seconds
    for datagram in datagrams:
        peer.throw(datagram)
        if peer.packets % 16 == 0:
            peer.receive()
            if time.monotonic() > until:
                return


UNAUTHENTICATED = {
    "hello_flood": hello_flood,
    "versions_unknown": versions_unknown,
    "initial_gaps": initial_gaps,
    "no_certificate": lambda peer: peer.connect(),
}

ATTACKS = {
    # S23.
    "new_ids_that_retire_all": lambda peer: peer.flood(each(lambda n: new_connection_id(n + 100, n + 100))),
    "new_ids_above_the_limit": lambda peer: peer.flood(each(lambda n: new_connection_id(n, 0))),
    "retires_ids_as_they_are_issued": retires_ids_as_they_are_issued,
    "retires_one_id_again": retires_one_id_again,
    "retires_ids_never_issued": lambda peer: peer.flood(each(lambda n: frame(0x19, 1000 + n))),
    "path_challenges": lambda peer: peer.flood(again(each(lambda _: b"\x1a" + os.urandom(8)))),
    "path_challenges_from_many_paths": challenges_from_many_paths,
    # S20.
    "gaps_on_many_streams": gaps_on_many_streams,
    "gaps_without_end": lambda peer: peer.flood(each(lambda n: stream(CONTROL, 1001 + 2 * n, b"x"))),
    "same_pieces_again": lambda peer: peer.flood(again(on_streams([CONTROL]))),
    "crypto_gaps_without_end": lambda peer: peer.flood(each(lambda n: crypto(5001 + 2 * n, b"x"))),
    "same_crypto_again": lambda peer: peer.flood(again(each(lambda n: crypto(5001 + 2 * (n % PIECES), b"x")))),
    "crypto_beyond_its_buffer": lambda peer: peer.flood(each(lambda n: crypto(1 << 20, b"x"))),
    "beyond_the_window": lambda peer: peer.flood(each(lambda n: stream(CONTROL, 1 << 30, b"x"))),
    "empty_pieces": lambda peer: peer.flood(again(each(lambda _: stream(CONTROL, 20, b"")))),
    # Frames that agents may not send, and floods of frames that they may send.
    "streams_of_its_own": lambda peer: peer.flood(each(lambda n: stream(4 * n, 0, b"x"))),
    "unidirectional_streams": lambda peer: peer.flood(each(lambda n: stream(4 * n + 2, 0, b"x"))),
    "resets_of_unopened_streams": lambda peer: peer.flood(each(lambda n: frame(0x04, 4 * n + 4001, 7, 0))),
    "stops_of_unopened_streams": lambda peer: peer.flood(each(lambda n: frame(0x05, 4 * n + 4001, 7))),
    "acks_of_what_was_never_sent": lambda peer: peer.flood(each(lambda n: frame(0x02, 1 << 30, 0, 0, 0))),
    "ack_ranges_below_zero": lambda peer: peer.flood(each(lambda n: frame(0x02, 1, 0, 300, *([0] * 601)))),
    "reserved_frames": lambda peer: peer.flood(each(lambda n: frame(0x21 + 31 * n))),
    "frames_of_servers": lambda peer: peer.flood(each(lambda n: frame(0x1E))),
    "datagrams_too_large": lambda peer: peer.flood([frame(0x31, 1100) + b"x" * 1100] for _ in itertools.count()),
    "datagrams": lambda peer: peer.flood(again(each(lambda _: frame(0x31, 1) + b"x"))),
    "pings": lambda peer: peer.flood(again(each(lambda _: b"\x01"))),
    "limits_and_blocked": lambda peer: peer.flood(again(packed(itertools.cycle(LIMITS)))),
}
LIMITS = [frame(0x10, 1 << 40), frame(0x11, CONTROL, 1 << 40), frame(0x12, 1000), frame(0x14, 9), frame(0x15, CONTROL, 9), frame(0x16, 9)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("attack", choices=[*UNAUTHENTICATED, *ATTACKS])
    parser.add_argument("--server", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--certificate")
    parser.add_argument("--key")
    parser.add_argument("--node")
    parser.add_argument("--streams", type=int, default=0)
    arguments = parser.parse_args()
    peer = Peer(arguments)
    if arguments.attack in UNAUTHENTICATED:
        UNAUTHENTICATED[arguments.attack](peer)
    else:
        peer.connect()
        peer.register()
        ATTACKS[arguments.attack](peer)
        peer.leave()
    print(json.dumps({"packets": peer.packets, "sent": peer.sent, "answered": peer.answered, "closed": peer.closed}))


if __name__ == "__main__":
    main()
