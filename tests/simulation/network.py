"""Simulated Unix sockets: data arrives in order after a delay, until the connection is cut."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from random import Random
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

if TYPE_CHECKING:
    from tests.simulation.loop import SimulatedLoop

DELAY_S = 5e-4
"""Longest delay of a message, in seconds."""

CUT_S = 2.0
"""Longest time from the start of a connection to its cut, in seconds."""

Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]


class SimulatedWriter:
    """The methods of a `StreamWriter` that are used."""

    def __init__(self, network: Network, peer: asyncio.StreamReader) -> None:
        self._network = network
        self._peer = peer
        self._arrives = 0.0
        self._closed = False

    @property
    def transport(self) -> SimulatedWriter:
        return self

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        if not self._closed:
            self._later(lambda: self._peer.feed_data(bytes(data)))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._later(self._peer.feed_eof)

    def abort(self) -> None:
        self.close()

    def cut(self) -> None:
        """Send no more data. Data that was sent may still arrive."""
        self.close()

    def is_closing(self) -> bool:
        return self._closed

    async def drain(self) -> None:
        await asyncio.sleep(0)

    async def wait_closed(self) -> None:
        await asyncio.sleep(0)

    def _later(self, arrive: Callable[[], object]) -> None:
        loop, rng = self._network.loop, self._network.rng
        self._arrives = max(self._arrives, loop.time() + DELAY_S * rng.random())
        loop.call_at(self._arrives, _unless_ended(self._peer, arrive))


class Network:
    """Listening sockets and connections.

    Args:
        cut: Probability that a connection is refused, and that it is cut after a while.

    Attributes:
        reliable: From now on, no connection is refused or cut.
        has_cut: Whether a connection was cut.
    """

    def __init__(self, loop: SimulatedLoop, rng: Random, *, cut: float) -> None:
        self.loop = loop
        self.rng = rng
        self.reliable = False
        self.has_cut = False
        self._cut = cut
        self._listening: dict[str, Accept] = {}

    def listen(self, path: object, accept: Accept) -> None:
        self._listening[str(path)] = accept

    async def connect(self, path: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Replacement of `asyncio.open_unix_connection`."""
        await asyncio.sleep(DELAY_S * self.rng.random())
        accept = self._listening.get(str(path))
        if accept is None or self._strikes():
            raise ConnectionRefusedError(f"no server listens at {path}")
        here, there = asyncio.StreamReader(), asyncio.StreamReader()
        mine, theirs = SimulatedWriter(self, there), SimulatedWriter(self, here)
        accept(there, cast("asyncio.StreamWriter", theirs))
        if self._strikes():
            self.has_cut = True
            for writer in (mine, theirs):
                self.loop.call_later(CUT_S * self.rng.random(), writer.cut)
        return here, cast("asyncio.StreamWriter", mine)

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """Connect the scheduler and worker connectors through this network in the block."""
        any_peer: Callable[[Any], int] = lambda _: 0
        with (
            patch("asyncio.open_unix_connection", self.connect),
            patch("lmcache_async.integration.vllm.lookup.check_peer", any_peer),
            patch("lmcache_async.integration.vllm.lookup_server.check_peer", any_peer),
        ):
            yield

    def _strikes(self) -> bool:
        return not self.reliable and self.rng.random() < self._cut


def _unless_ended(reader: asyncio.StreamReader, arrive: Callable[[], object]) -> Callable[[], None]:
    def call() -> None:
        if not reader.at_eof() and not reader._eof:  # type: ignore[attr-defined]
            arrive()

    return call
