"""Three hosts, which are processes of this machine, and proxies between them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from tests.hosts.host import main as run_host
from tests.hosts.proxies import Link, Proxies
from tests.support import forked_python

HOSTS = ("a", "b", "c")
ANSWER_S = 250.0


class RemoteHost:
    """Remote control of a `host.Host`."""

    def __init__(self) -> None:
        self.channel, theirs = socket.socketpair()
        with theirs:
            self._process = forked_python.context().Process(target=run_host, args=(theirs,), daemon=True)
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


class Network:
    """Hosts `a`, `b` and `c`; a context manager that ends them. Connections to their servers go through proxies.

    Attributes:
        hosts: By name.
    """

    def __init__(self, seed: int) -> None:
        self._proxies = Proxies(seed)
        self._ways: dict[tuple[str, int], int] = {}
        self.hosts = {name: RemoteHost() for name in HOSTS}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            for host in self.hosts.values():
                host.close()
        finally:
            self._proxies.close()

    def way(self, host: str, port: int) -> int:
        """Return the port of this machine at which all hosts reach a port of a host."""
        if (host, port) not in self._ways:
            self._ways[host, port] = self._proxies.open(host, port)
        return self._ways[host, port]

    def forget_ways(self) -> None:
        """Forget all ways after their servers have ended."""
        self._ways.clear()

    def become(self, link: Link, cut: Sequence[str] = ()) -> None:
        """Set the properties of all connections, and cut some hosts off."""
        self._proxies.link = link
        self._proxies.cut = frozenset(cut)

    def isolates(self, host: str) -> bool:
        """Whether a host that is cut off has a server that is then unreachable."""
        return any(host == server for server, _ in self._ways)

    @property
    def lost(self) -> int:
        """Return the number of lost pieces."""
        return self._proxies.lost

    def all(
        self, operation: str, arguments: Callable[[str], Mapping[str, Any]] | None = None
    ) -> dict[str, Any]:
        """Call an operation of all hosts concurrently and return the answers."""
        for name, host in self.hosts.items():
            host.begin(operation, **(arguments(name) if arguments else {}))
        return {name: host.end() for name, host in self.hosts.items()}
