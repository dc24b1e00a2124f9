"""Three hosts and their network: namespaces and simulated packets, or processes and proxies."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from tests.hosts import tun
from tests.hosts.host import main as run_host
from tests.hosts.link import Link
from tests.hosts.proxies import Proxies
from tests.hosts.wire import Wire
from tests.support import forked_python

HOSTS = ("a", "b", "c")
ANSWER_S = 250.0


class RemoteHost:
    """Remote control of a `host.Host`, in its own namespaces if an address is given."""

    def __init__(self, address: str = "") -> None:
        self.channel, theirs = socket.socketpair()
        with theirs:
            self._process = forked_python.context().Process(
                target=run_host, args=(theirs, address), daemon=True
            )
            self._process.start()
        self._left = b""

    def call(self, operation: str, **arguments: Any) -> Any:
        """Call an operation and return its answer."""
        self.begin(operation, **arguments)
        return self.end()

    def begin(self, operation: str, **arguments: Any) -> None:
        self.channel.sendall(json.dumps({"do": operation, **arguments}).encode() + b"\n")

    def end(self) -> Any:
        while b"\n" not in self._left:
            assert select.select([self.channel], [], [], ANSWER_S)[0], (
                f"a host did not answer in {ANSWER_S} s"
            )
            piece = self.channel.recv(1 << 16)
            assert piece, "a host has ended"
            self._left += piece
        line, self._left = self._left.split(b"\n", 1)
        return json.loads(line)

    def close(self) -> None:
        """Close the channel, then make sure that the host and its children have ended."""
        self.channel.close()
        try:
            self._process.join(30)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()


class Network(ABC):
    """Hosts `a`, `b` and `c`; a context manager that ends them.

    Attributes:
        hosts: By name.
    """

    hosts: dict[str, RemoteHost]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @abstractmethod
    def address(self, host: str) -> str:
        """Return the address of the host's servers."""

    @abstractmethod
    def way(self, host: str, port: int, *, origin: str = "") -> tuple[str, int]:
        """Return the address at which other hosts reach a port.

        Args:
            host: Host of the server.
            port: Port of the server.
            origin: The only host that uses this address, so it fails when that host is cut off. None for any host.
        """

    @abstractmethod
    def become(self, link: Link, cut: Sequence[str] = ()) -> None:
        """Set the properties of all connections, and cut some hosts off."""

    @abstractmethod
    def isolates(self, host: str) -> bool:
        """Whether a host that is cut off is really unreachable."""

    @property
    @abstractmethod
    def lost(self) -> int:
        """Return the number of lost packets or pieces."""

    def forget_ways(self) -> None:
        """Forget all addresses after their servers have ended."""

    def all(
        self, operation: str, arguments: Callable[[str], Mapping[str, Any]] | None = None
    ) -> dict[str, Any]:
        """Call an operation of all hosts concurrently and return the answers."""
        for name, host in self.hosts.items():
            host.begin(operation, **(arguments(name) if arguments else {}))
        return {name: host.end() for name, host in self.hosts.items()}

    def close(self) -> None:
        for host in self.hosts.values():
            host.close()


class Namespaces(Network):
    """Hosts with their own network namespaces, which exchange packets."""

    def __init__(self, seed: int) -> None:
        self.hosts = {}
        devices: dict[str, int] = {}
        try:
            for name in HOSTS:
                self.hosts[name] = remote = RemoteHost(self.address(name))
                assert select.select([remote.channel], [], [], ANSWER_S)[0], "a host gave no device"
                _, (devices[self.address(name)],), _, _ = socket.recv_fds(remote.channel, 1, 1)
        except BaseException:
            super().close()
            for device in devices.values():
                os.close(device)
            raise
        self._wire = Wire(devices, seed)
        self._wire.start()

    def address(self, host: str) -> str:
        return f"10.9.0.{1 + HOSTS.index(host)}"

    def way(self, host: str, port: int, *, origin: str = "") -> tuple[str, int]:
        del origin
        return self.address(host), port

    def become(self, link: Link, cut: Sequence[str] = ()) -> None:
        self._wire.link = link
        self._wire.cut = frozenset(socket.inet_aton(self.address(host)) for host in cut)

    def isolates(self, host: str) -> bool:
        del host
        return True

    @property
    def lost(self) -> int:
        return self._wire.lost

    def close(self) -> None:
        super().close()
        self._wire.close()


class OneMachine(Network):
    """Hosts that are processes of this machine; connections to their servers go through proxies."""

    def __init__(self, seed: int) -> None:
        self._proxies = Proxies(seed)
        self._ways: dict[tuple[str, int, str], int] = {}
        self.hosts = {name: RemoteHost() for name in HOSTS}

    def address(self, host: str) -> str:
        del host
        return "127.0.0.1"

    def way(self, host: str, port: int, *, origin: str = "") -> tuple[str, int]:
        if origin == host:
            return self.address(host), port  # its own loopback
        way = (host, port, origin)
        if way not in self._ways:
            self._ways[way] = self._proxies.open(frozenset((host, origin)), port)
        return self.address(host), self._ways[way]

    def forget_ways(self) -> None:
        self._ways.clear()

    def become(self, link: Link, cut: Sequence[str] = ()) -> None:
        self._proxies.link = link
        self._proxies.cut = frozenset(cut)

    def isolates(self, host: str) -> bool:
        return any(host in {server, origin} for server, _, origin in self._ways)

    @property
    def lost(self) -> int:
        return self._proxies.lost

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._proxies.close()


NETWORKS: Mapping[str, Callable[[int], Network]] = {
    "proxies": OneMachine,
    **({"namespaces": Namespaces} if tun.possible() else {}),
}
"""Networks that this machine supports, by name; each is created from a seed."""
