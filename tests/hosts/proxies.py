"""Proxies before the ports of hosts: delays, stalls and cuts.

With TCP a lost packet is a stall: a piece that is lost here arrives `STALL_S` later, and so does everything after it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from lmcache_async.engine.loop import LoopThread
from tests.support.proxy import Direction, Proxy

STALL_S = 0.2
"""Minimum retransmission timeout of Linux."""
_PIECE = 9000


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a connection between hosts.

    Attributes:
        delay_s: Minimum delay, in seconds.
        jitter_s: Maximum additional delay of some packets, in seconds.
        loss: Fraction of packets that are lost.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0


class Proxies:
    """Proxies to ports of this machine, all served by one thread.

    Attributes:
        link: Current properties of each connection.
        cut: Hosts that are cut off.
        lost: Number of lost pieces.
    """

    def __init__(self, seed: int) -> None:
        self.link = Link()
        self.cut: frozenset[str] = frozenset()
        self.lost = 0
        self.dice = Random(seed)
        self._loop = LoopThread("proxies")
        self._opened = contextlib.AsyncExitStack()

    def open(self, host: str, port: int) -> int:
        """Open a proxy to a port of the host, and return the proxy's port."""
        return self._loop.submit(self._open(host, port)).result(30)

    def close(self) -> None:
        self._loop.submit(self._opened.aclose()).result(30)
        self._loop.close()

    async def _open(self, host: str, port: int) -> int:
        proxy = await self._opened.enter_async_context(Proxy(port))
        proxy.requests = proxy.answers = _Way(self, host)
        return proxy.port


class _Way(Direction):
    """Both directions of the connections to a host."""

    def __init__(self, proxies: Proxies, host: str) -> None:
        super().__init__()
        self._proxies = proxies
        self._host = host

    async def pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: Callable[[], None]
    ) -> None:
        """Forward pieces in order, each after its delay; several are in transit at once."""
        del seen
        loop, proxies = asyncio.get_running_loop(), self._proxies
        way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)

        async def deliver() -> None:
            while True:
                due, piece = await way.get()
                await asyncio.sleep(due - loop.time())
                while self._host in proxies.cut:
                    await asyncio.sleep(0.01)
                writer.write(piece)
                await writer.drain()

        delivery = asyncio.ensure_future(deliver())
        try:
            due = 0.0
            while piece := await reader.read(_PIECE):
                link = proxies.link
                late_s = link.delay_s + proxies.dice.random() * link.jitter_s
                if proxies.dice.random() < link.loss:
                    proxies.lost += 1
                    late_s += STALL_S
                due = max(due, loop.time() + late_s)
                await way.put((due, piece))
        finally:
            delivery.cancel()
            await asyncio.gather(delivery, return_exceptions=True)
