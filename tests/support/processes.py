"""Server processes of tests: start and stop, free ports, waits, hangs."""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

WAIT_S = 150.0
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


class Startable(Protocol):
    def start(self) -> None: ...

    def stop(self) -> None: ...


S = TypeVar("S", bound=Startable)


@contextlib.contextmanager
def started(server: S) -> Iterator[S]:
    """Start a server, and stop it at the end of the block, also if it did not start."""
    try:
        server.start()
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def hanging(send: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Stop the process that `send` sends signals to, for the duration of the block."""
    send(signal.SIGSTOP)
    try:
        yield
    finally:
        send(signal.SIGCONT)


PORT_NAME = "\0lmcache-async-test-port-"
"""Prefix of the abstract unix sockets that reserve ports."""


def open_fds() -> int:
    """Return the number of open file descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def free_ports(count: int) -> list[int]:
    """Return ports at which no server listens, and which no connection and no other test process gets.

    The kernel gives ports of its ephemeral range to connections, so a port of that range can be
    in use by the time the server starts, or while a test restarts it.
    """
    low, high = map(int, EPHEMERAL.read_text().split())
    candidates = [port for port in range(10_000, 65_536) if not low <= port <= high]
    random.SystemRandom().shuffle(candidates)
    with contextlib.ExitStack() as stack:
        found = (port for port in candidates if _bound(stack.enter_context(socket.socket()), port))
        return list(itertools.islice(found, count))


def _bound(one: socket.socket, port: int) -> bool:
    name = socket.socket(socket.AF_UNIX)
    try:
        one.bind(("", port))
        name.bind(f"{PORT_NAME}{port}")
    except OSError:
        name.close()
        return False
    name.detach()  # the name, and with it the port, belongs to this process until it ends
    return True


def free_port() -> int:
    return free_ports(1)[0]


def accepts(port: int) -> bool:
    """Return True if a server listens on the port. Raise OSError otherwise."""
    socket.create_connection(("127.0.0.1", port)).close()
    return True


def wait_until(true: Callable[[], bool], process: subprocess.Popen[Any] | None = None) -> None:
    """Poll a condition of another process, which sends no event. An OSError counts as not yet true.

    Fail after `WAIT_S`, or when `process` has ended.
    """
    deadline = time.monotonic() + WAIT_S
    while True:
        assert process is None or process.poll() is None, "the server has ended; see its log"
        with contextlib.suppress(OSError):
            if true():
                return
        assert time.monotonic() < deadline, f"not within {WAIT_S} s"
        time.sleep(0.01)
