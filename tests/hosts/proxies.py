"""Proxies for machines without namespaces: delays, stalls and cuts.

With TCP a lost packet is a stall: a piece that is lost here arrives `STALL_S` later, and so does everything after it.
"""

from __future__ import annotations

import asyncio
import contextlib
from random import Random

from lmcache_async.engine.loop import LoopThread
from tests.hosts.link import Link

STALL_S = 0.2
"""Minimum retransmission timeout of Linux."""
_PIECE = 9000


class Proxies:
    """Proxies to ports of this machine, all served by one thread.

    Attributes:
        link: Current properties of each connection.
        cut: Hosts that are cut off, as destinations and as origins.
    """

    def __init__(self, seed: int) -> None:
        self.link = Link()
        self.cut: frozenset[str] = frozenset()
        self.lost = 0
        self._dice = Random(seed)
        self._loop = LoopThread("proxies")
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, hosts: frozenset[str], port: int) -> int:
        """Open a proxy to a port and return the proxy's port. It passes no data while one of these hosts is cut off."""
        return self._loop.submit(self._open(hosts, port)).result(30)

    def close(self) -> None:
        self._loop.submit(self._close()).result(30)
        self._loop.close()

    async def _open(self, hosts: frozenset[str], port: int) -> int:
        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self._serve(hosts, port, reader, writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(
                lambda _: writer.transport.abort()
            )  # a task cancelled before its start aborts nothing

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        self._servers.append(server)
        way: int = server.sockets[0].getsockname()[1]
        return way

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(
        self, hosts: frozenset[str], port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        back: asyncio.StreamWriter | None = None
        with contextlib.suppress(OSError):
            try:
                there, back = await asyncio.open_connection("127.0.0.1", port)
                pumps = {
                    asyncio.ensure_future(self._pump(hosts, reader, back)),
                    asyncio.ensure_future(self._pump(hosts, there, writer)),
                }
                try:
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for pump in pumps:
                        pump.cancel()
                    await asyncio.gather(*pumps, return_exceptions=True)
            finally:
                writer.transport.abort()
                if back is not None:
                    back.transport.abort()

    async def _pump(
        self, hosts: frozenset[str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Forward pieces in order, each after its delay; several are in transit at once."""
        loop = asyncio.get_running_loop()
        way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)

        async def deliver() -> None:
            while True:
                due, piece = await way.get()
                await asyncio.sleep(due - loop.time())
                while not self.cut.isdisjoint(hosts):
                    await asyncio.sleep(0.01)
                writer.write(piece)
                await writer.drain()

        delivery = asyncio.ensure_future(deliver())
        try:
            due = 0.0
            while piece := await reader.read(_PIECE):
                link = self.link
                late_s = link.delay_s + self._dice.random() * link.jitter_s
                if self._dice.random() < link.loss:
                    self.lost += 1
                    late_s += STALL_S
                due = max(due, loop.time() + late_s)
                await way.put((due, piece))
        finally:
            delivery.cancel()
            await asyncio.gather(delivery, return_exceptions=True)
