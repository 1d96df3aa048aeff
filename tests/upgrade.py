#!/usr/bin/env python3
"""Upgrades a server and an agent to this version and back under 100 requests/s, and counts failures.

    tests/upgrade.py NEW                  from the previous release, built from its tag
    tests/upgrade.py NEW --rev REVISION   from another revision of this repository
    tests/upgrade.py NEW --old OLD        from binaries

NEW and OLD are directories with tunnel-server and tunnel-agent. The server is replaced before the
agent in both directions, so that each version of the server works with each version of the agent,
on the files that the other version has left. A request may fail only between the SIGTERM to a
process and the first answer over its successor, which is at most LIMIT later. The body of an answer
that runs at the SIGTERM arrives completely.

Exits with 77 and a reason where there is nothing to compare with.
"""

import argparse
import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RATE = 100
# Seconds of load before and after each replacement.
STEADY = 3.0
# Seconds for which the body runs that a replacement must not cut.
BODY = 3.0
# Most seconds from a SIGTERM to the first answer over the successor: the body above, the start of
# a process, and the agent's wait before it dials again.
LIMIT = 15.0
NODE = "worker-1"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("new", type=Path)
    parser.add_argument("--old", type=Path)
    parser.add_argument("--rev")
    arguments = parser.parse_args()
    for program in ("tunnel-server", "tunnel-agent"):
        if not (arguments.new / program).is_file():
            skip(f"needs {program} in {arguments.new}")
    old = arguments.old or build(arguments.rev or previous_tag())
    with tempfile.TemporaryDirectory() as work:
        asyncio.run(run(Stack(Path(work), old.resolve(), arguments.new.resolve())))


def previous_tag():
    """Returns the newest tag before this commit."""
    command = ["git", "describe", "--tags", "--abbrev=0", "HEAD^"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        skip("there is no earlier release; give --rev or --old")
    return found.stdout.strip()


def build(revision):
    """Builds both binaries of a revision, and returns their directory."""
    command = ["git", "rev-parse", "--verify", f"{revision}^{{commit}}"]
    commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    target = Path(os.environ.get("CARGO_TARGET_DIR", "target")).resolve()
    source = target / "upgrade" / commit
    source.mkdir(parents=True, exist_ok=True)
    archive = subprocess.run(["git", "archive", commit], capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", source], input=archive, check=True)
    packages = ["-p", "tunnel-server", "-p", "tunnel-agent"]
    built = target / "upgrade" / "target"
    environment = {**os.environ, "CARGO_TARGET_DIR": str(built)}
    cargo = ["cargo", "build", "--locked", *packages]
    subprocess.run(cargo, cwd=source, env=environment, check=True)
    return built / "debug"


class Stack:
    """A server and an agent of either version, with their files, and the node's target."""

    def __init__(self, work, old, new):
        self.work = work
        self.binaries = {"old": old, "new": new}
        # An address that nothing else uses, since the ports stay the same in all processes.
        self.host = "127." + ".".join(str(random.randint(1, 254)) for _ in range(3))
        self.agents, self.http, self.https, self.meta, self.target = self.free_ports(5)
        self.running = {}

    def free_ports(self, count):
        with contextlib.ExitStack() as sockets:
            bound = [sockets.enter_context(socket.socket()) for _ in range(count)]
            for one in bound:
                one.bind((self.host, 0))
            return [one.getsockname()[1] for one in bound]

    def arguments(self, kind):
        data = ["--data-dir", str(self.work / kind)]
        if kind == "server":
            ports = {"agent": self.agents, "http": self.http, "https": self.https, "meta": self.meta}
            listeners = [f"--{name}-listen={self.host}:{port}" for name, port in ports.items()]
            return data + listeners + ["--http-proxy-ports", str(self.target), "--proxy-port-listen", "off"]
        token = ["--token-file", str(self.work / "token"), "--node-name", NODE]
        address = ["--node-ip", self.host, "--meta-listen", "off"]
        return data + token + address + ["--server", f"{self.host}:{self.agents}"]

    def start(self, kind, version):
        program = self.binaries[version] / f"tunnel-{kind}"
        # The logs of all processes of a kind are one file.
        with open(self.work / f"{kind}.log", "ab") as log:
            command = [program, "run", *self.arguments(kind)]
            self.running[kind] = subprocess.Popen(command, stdout=log, stderr=log)

    async def stop(self, kind):
        process = self.running.pop(kind)
        process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(process.wait, 60)
        ensure(code == 0, f"the {kind} ended with {code}", self)

    def create_token(self):
        program = self.binaries["old"] / "tunnel-server"
        command = [program, "token", "create", "--node", NODE, "--data-dir", self.work / "server"]
        token = subprocess.run(command, capture_output=True, check=True).stdout
        (self.work / "token").write_bytes(token)

    def kill(self):
        for process in self.running.values():
            process.kill()
            process.wait()

    async def get(self, path):
        """Returns the body of an answer. Raises an exception for a failure of any kind."""
        reader, writer = await asyncio.open_connection(self.host, self.http)
        try:
            host = f"Host: {NODE}:{self.target}\r\nConnection: close"
            writer.write(f"GET {path} HTTP/1.1\r\n{host}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            status = int(head.split()[1])
            if status != 200:
                raise OSError(f"status {status}")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            return await reader.readexactly(int(length.split(b":")[1]))
        finally:
            writer.close()


class Load:
    """Requests at a fixed rate, independent of the answers."""

    def __init__(self, stack):
        self.stack = stack
        # Times at which a request was sent and ended, with what failed, or None.
        self.results = []
        self.tasks = set()
        self.sending = asyncio.create_task(self.send())

    async def send(self):
        due = time.monotonic()
        while True:
            task = asyncio.create_task(self.ask())
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
            due += 1 / RATE
            await asyncio.sleep(max(0, due - time.monotonic()))

    async def ask(self):
        sent = time.monotonic()
        failure = None
        try:
            await asyncio.wait_for(self.stack.get("/"), 10)
        except Exception as error:  # Any failure counts.
            failure = f"{type(error).__name__}: {error}"
        self.results.append((sent, time.monotonic(), failure))

    async def end(self):
        self.sending.cancel()
        await asyncio.gather(*self.tasks)


async def serve_target(reader, writer):
    """Answers a request of the agent: `/body` in ten parts."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            parts = 10 if b" /body " in head else 1
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {5 * parts}\r\n\r\n".encode())
            for part in range(parts):
                if part:
                    await asyncio.sleep(BODY / parts)
                writer.write(b"part\n")
                await writer.drain()
    except (OSError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def answered(stack):
    """Waits until a request is answered, and returns the time."""
    since = time.monotonic()
    while time.monotonic() < since + 60:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.TimeoutError):
            await asyncio.wait_for(stack.get("/"), 2)
            return time.monotonic()
        await asyncio.sleep(0.02)
    raise SystemExit(f"no request is answered within 60 s\n{tail(stack)}")


async def replace(stack, kind, version):
    """Replaces a process, and returns the time in which requests may fail."""
    body = asyncio.create_task(stack.get("/body"))
    await asyncio.sleep(BODY / 10)
    begin = time.monotonic()
    await stack.stop(kind)
    stack.start(kind, version)
    end = await answered(stack)
    ensure(await body == b"part\n" * 10, "the body is not complete", stack)
    await asyncio.sleep(STEADY)
    return begin, end


async def run(stack):
    target = await asyncio.start_server(serve_target, stack.host, stack.target)
    try:
        stack.start("server", "old")
        await opened(stack)
        stack.create_token()
        stack.start("agent", "old")
        await answered(stack)
        load = Load(stack)
        await asyncio.sleep(STEADY)
        gaps = []
        for kind, version in (("server", "new"), ("agent", "new"), ("server", "old"), ("agent", "old")):
            gaps.append((f"{kind} to {version}", *await replace(stack, kind, version)))
        await load.end()
        report(stack, load.results, gaps)
        for kind in ("agent", "server"):
            await stack.stop(kind)
    finally:
        stack.kill()
        target.close()


async def opened(stack):
    """Waits until the server accepts agents."""
    since = time.monotonic()
    while time.monotonic() < since + 30:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(stack.host, stack.agents)
            writer.close()
            return
        await asyncio.sleep(0.02)
    raise SystemExit(f"the server does not start\n{tail(stack)}")


def report(stack, results, gaps):
    failures = [(sent, ended, failure) for sent, ended, failure in results if failure]
    beyond = failures
    for name, begin, end in gaps:
        # A request that was on its way at the SIGTERM ends after it.
        inside = [failed for failed in failures if failed[0] <= end and failed[1] >= begin]
        before = sum(sent < begin for sent, _, _ in inside)
        print(
            f"{name}: {len(inside)} requests failed in the {end - begin:.1f} s until the first answer,"
            f" {before} of them on their way at the SIGTERM"
        )
        ensure(end - begin <= LIMIT, f"longer than {LIMIT:.0f} s", stack)
        beyond = [failed for failed in beyond if failed not in inside]
    print(f"{len(results)} requests, {len(failures)} failed, {len(beyond)} of them beyond these times")
    for sent, ended, failure in beyond:
        name, begin, _ = min(gaps, key=lambda gap: abs(sent - gap[1]))
        print(f"sent {sent - begin:+.3f} s, ended {ended - begin:+.3f} s from the SIGTERM of {name}: {failure}")
    ensure(not beyond, "requests failed beyond these times", stack)
    answers = len(results) - len(failures)
    ensure(answers > RATE * 4 * STEADY, "too few answers", stack)


def ensure(holds, message, stack):
    if not holds:
        raise SystemExit(f"upgrade-test: {message}\n{tail(stack)}")


def tail(stack):
    logs = [path.read_text(errors="replace").splitlines()[-20:] for path in stack.work.glob("*.log")]
    return "\n".join(line for log in logs for line in log)


def skip(reason):
    print(f"skip: {reason}")
    sys.exit(77)


if __name__ == "__main__":
    main()
