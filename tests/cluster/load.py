"""Callers: calls at a rate, followed logs, execs, DNS queries, clients of an agent's listener.

Calls start at their times whether or not earlier ones have been answered. All times are seconds of
the monotonic clock.
"""

import base64
import concurrent.futures
import contextlib
import os
import queue
import random
import re
import socket
import ssl
import struct
import threading
import time

from nodes import CONTROL_PLANE

RATE = 10
# Longer than kube-apiserver's 30 s for a dial.
TIMEOUT = 40
# kube-apiserver closes idle connections after 90 s.
IDLE = 60
NXDOMAIN = 3
now = time.monotonic


class Outcome:
    """A call: when it began, how long it took, what failed."""

    def __init__(self, began, took, error):
        self.began, self.took, self.error = began, took, error


class Repeated:
    """Runs `once` at a rate until `stop`, which returns the outcomes."""

    def __init__(self, once, rate=RATE, enter=None):
        self.once, self.outcomes, self.stopping = once, [], threading.Event()
        self.pool = concurrent.futures.ThreadPoolExecutor(rate * TIMEOUT, initializer=enter)
        self.thread = threading.Thread(target=self.run, args=(1 / rate,), daemon=True)
        self.thread.start()

    def run(self, interval):
        due = now()
        while not self.stopping.is_set():
            self.pool.submit(self.one)
            due += interval
            self.stopping.wait(max(0.0, due - now()))

    def one(self):
        began = now()
        error = None
        try:
            self.once()
        except Exception as problem:  # pylint: disable=broad-except
            error = f"{type(problem).__name__}: {problem}"[:160]
        self.outcomes.append(Outcome(began, now() - began, error))

    def stop(self):
        self.stopping.set()
        self.thread.join()
        self.pool.shutdown()
        return sorted(self.outcomes, key=lambda outcome: outcome.began)


class Calls(Repeated):
    """Short reads of a pod's log over kept connections to kube-apiserver."""

    def __init__(self, api, pod, rate=RATE):
        self.api, self.pod, self.idle = api, pod, queue.LifoQueue()
        super().__init__(self.read, rate)

    def read(self):
        connection = self.connection()
        try:
            connection.request("GET", f"/api/v1/namespaces/default/pods/{self.pod}/log?tailLines=1")
            answer = connection.getresponse()
            text = answer.read()
        except BaseException:
            connection.close()
            raise
        if answer.will_close:
            connection.close()
        self.idle.put((connection, now()))
        if answer.status != 200:
            raise OSError(f"{answer.status} {message(text)}")

    def connection(self):
        """Returns the connection that was used last, unless kube-apiserver may be about to close it."""
        with contextlib.suppress(queue.Empty):
            connection, since = self.idle.get_nowait()
            if now() < since + IDLE:
                return connection
            connection.close()
        return self.api.connection(TIMEOUT)


def message(body):
    """Returns what a Status of the API server says, without what differs in each answer."""
    text = body.decode(errors="replace").split('"message":"')[-1].split('","')[0]
    return re.sub(r"edge-\d|tick-\d|\d+(\.\d+)+(:\d+)?|https?://\S+|->\S+", "*", text)[:140].strip()


def execute(api, pod):
    """Runs a command in a pod by a WebSocket, which is a new connection to the node."""
    with api.socket(TIMEOUT) as stream:
        key = base64.b64encode(os.urandom(16)).decode()
        query = "command=echo&command=hello&stdout=true&stderr=true"
        stream.sendall(
            f"GET /api/v1/namespaces/default/pods/{pod}/exec?{query} HTTP/1.1\r\nHost: {CONTROL_PLANE}\r\n"
            f"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Protocol: v5.channel.k8s.io\r\n\r\n".encode()
        )
        received = b""
        while b"\x01hello" not in received:
            data = stream.recv(4096)
            if not data:
                raise OSError(f"ended after {received[:200]!r}")
            received += data
            if not received.startswith(b"HTTP/1.1 101"[: len(received)]) and b"\r\n\r\n" in received:
                body = received.split(b"\r\n\r\n", 1)[1] or stream.recv(4096)
                raise OSError(f"{received[9:12].decode()} {message(body)}")


class Follow(threading.Thread):
    """A followed log: the time of each line, and how the stream ended."""

    SILENCE = 20

    def __init__(self, api, pod):
        super().__init__(daemon=True)
        self.api, self.pod = api, pod
        self.began, self.times, self.end, self.ended = now(), [], None, None
        self.stream = None
        self.is_closed = False
        self.start()

    def run(self):
        try:
            end = self.read()
        except TimeoutError:
            end = "silent"
        except ConnectionResetError:
            end = "reset"
        except (OSError, ValueError) as error:
            end = f"{error}"[:80]
        self.ended, self.end = now(), "closed" if self.is_closed else end

    def read(self):
        self.stream = self.api.socket(self.SILENCE)
        path = f"/api/v1/namespaces/default/pods/{self.pod}/log?follow=true&tailLines=1"
        self.stream.sendall(f"GET {path} HTTP/1.1\r\nHost: {CONTROL_PLANE}\r\n\r\n".encode())
        file = self.stream.makefile("rb")
        status = file.readline().split()
        while file.readline().strip():
            pass
        if not status or status[1] != b"200":
            return f"status {status}"
        while True:
            size = file.readline()
            if not size:
                return "cut"
            if int(size, 16) == 0:
                return "end"
            data = file.read(int(size, 16))
            if len(data) < int(size, 16) or file.readline() != b"\r\n":
                return "cut"
            self.times += [now()] * data.count(b"\n")

    def close(self):
        if self.end is None:
            self.is_closed = True
            if self.stream:
                # The plain socket below TLS: another thread reads.
                socket.socket.shutdown(self.stream, socket.SHUT_RDWR)
        self.join()

    def longest_silence(self, since):
        """Returns the longest time without a line from `since` until the end."""
        times = [since] + [at for at in self.times if at >= since] + [self.ended]
        return max(later - earlier for earlier, later in zip(times, times[1:]))


class NoName(OSError):
    """An answer that the name does not exist, with which a lookup ends."""


def resolve(servers, name, attempts, timeout=1.0):
    """Asks for both addresses of a name as the resolver of Go does, which kube-apiserver has.

    Each query asks the servers in order, `attempts` times, from a new port each time. An answer that the
    name does not exist ends it. The lookup ends with the slower of both queries.
    """
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        ipv6 = pool.submit(query_all, servers, name, 28, attempts, timeout)
        if not query_all(servers, name, 1, attempts, timeout):
            raise OSError("no address")
        # Its failure is no failure of the lookup.
        ipv6.exception()


def query_all(servers, name, kind, attempts, timeout):
    for server in servers * attempts:
        try:
            return query(server, name, kind, timeout)
        except NoName:
            raise
        except OSError as error:
            problem = error
    raise problem


def query(server, name, kind, timeout):
    """Sends one query, and returns the number of answers."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(timeout)
        client.connect((server, 53))
        labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
        number = random.getrandbits(16)
        client.send(struct.pack(">6H", number, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">2H", kind, 1))
        answer = client.recv(1500)
    code, answers = answer[3] & 15, struct.unpack(">H", answer[6:8])[0]
    if code == NXDOMAIN:
        raise NoName("no such host")
    if code:
        raise OSError(f"code {code}")
    return answers


class HostResolver(threading.Thread):
    """A resolver of the host, as the second nameserver of kube-apiserver: it knows no names of nodes."""

    def __init__(self, address):
        super().__init__(daemon=True)
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind((address, 53))
        self.start()

    def run(self):
        while True:
            query, client = self.socket.recvfrom(1500)
            # An answer, with the question alone.
            end = query.index(b"\0", 12) + 5
            header = query[:2] + struct.pack(">5H", 0x8180 | NXDOMAIN, 1, 0, 0, 0)
            self.socket.sendto(header + query[12:end], client)


def dial_listener(address, pki, message=b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"):
    """Asks the API server through an agent's listener over a new connection."""
    context = ssl.create_default_context(cafile=pki.file("ca.crt"))
    context.load_cert_chain(pki.file("admin.crt"), pki.file("admin.key"))
    with socket.create_connection(address, timeout=5) as plain:
        with context.wrap_socket(plain, server_hostname="kubernetes.default.svc") as stream:
            stream.sendall(message)
            status = stream.recv(64)
            if b" 200 " not in status:
                raise OSError(repr(status))


class Watch(threading.Thread):
    """A watch through an agent's listener, dialed again at once when it ends, as a kubelet does."""

    def __init__(self, address, pki, node):
        super().__init__(daemon=True)
        self.address, self.pki, self.node = address, pki, node
        self.stopping, self.ends = False, []
        self.start()

    def run(self):
        self.node.enter()
        context = ssl.create_default_context(cafile=self.pki.file("ca.crt"))
        context.load_cert_chain(self.pki.file("admin.crt"), self.pki.file("admin.key"))
        while not self.stopping:
            try:
                with socket.create_connection(self.address, timeout=5) as plain:
                    with context.wrap_socket(plain, server_hostname="kubernetes.default.svc") as stream:
                        stream.settimeout(1)
                        stream.sendall(b"GET /api/v1/nodes?watch=true HTTP/1.1\r\nHost: x\r\n\r\n")
                        self.follow(stream)
            except OSError:
                time.sleep(0.1)

    def follow(self, stream):
        while not self.stopping:
            try:
                if not stream.recv(65536):
                    return
            except TimeoutError:
                pass
