"""Hosts for the peer tier's tests: a real pool and its server, on a loop and a thread of their own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import uvloop

from lmcache_async.daemon.peer_options import PeerOptions
from lmcache_async.daemon.peers import PeerServer
from lmcache_async.daemon.pool import Pool
from lmcache_async.daemon.tenants import TenantStatistics
from lmcache_async.plugins.peer import PeerConfig
from lmcache_async.types import ChunkKey

T = TypeVar("T")

DEADLINE_S = 20.0
MAX_RECORD_BYTES = 32 << 20


class Host:
    """One pool; its server can be killed and started again, at the same port."""

    def __init__(self, *, nbytes: int = 16 << 20, segment_bytes: int = 1 << 20, **options: object) -> None:
        self.memory = memoryview(bytearray(nbytes))
        self.pool = Pool(self.memory, segment_bytes=segment_bytes)
        self.port = 0
        self._options = {"writable": True, **options}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end = asyncio.Event()
        self._thread: threading.Thread | None = None
        self.server: PeerServer | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns when it takes connections."""
        ready = threading.Event()
        self._end = asyncio.Event()

        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            options = PeerOptions.model_validate({"listen": self.address, **self._options})
            async with PeerServer(self.pool, options, max_record_bytes=MAX_RECORD_BYTES) as self.server:
                self.port = self.server.port
                ready.set()
                await self._end.wait()

        self._thread = threading.Thread(target=lambda: uvloop.run(serve()))
        self._thread.start()
        assert ready.wait(DEADLINE_S)

    def kill(self) -> None:
        """Every connection is reset; the pool and its records stay."""
        if self._thread is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(DEADLINE_S)
            assert not self._thread.is_alive()
        self._thread = None

    def ask(self, work: Callable[[], T]) -> T:
        """What the work comes to on the pool's thread."""
        assert self._loop is not None

        async def run() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(DEADLINE_S)

    def call_soon(self, work: Callable[[], object]) -> None:
        """Keep the pool's thread busy with that; nobody waits for it."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(work)

    def tenant(self, name: str = "default") -> TenantStatistics:
        return self.ask(lambda: self.pool.tenant_statistics(name))

    def leases(self) -> int:
        """Of readers and writers, of all tenants."""
        tenants = self.ask(self.pool.statistics).tenants.values()
        return sum(tenant.readers + tenant.writers for tenant in tenants)

    def records(self, tenant: str = "default") -> set[ChunkKey]:
        return set(self.ask(lambda: self.pool.keys(tenant)))

    def connections(self) -> int:
        assert self.server is not None
        return self.ask(self.server.statistics).connections

    def empty(self) -> None:
        """Forget everything, once nobody is connected; by then no lease is left."""
        deadline = time.monotonic() + DEADLINE_S
        while self.connections():
            assert time.monotonic() < deadline
        assert self.leases() == 0
        self.ask(lambda: self.pool.clear("default"))

    def replace(self, key: ChunkKey, edit: Callable[[bytes], bytes], tenant: str = "default") -> None:
        """Put `edit` of a record in its place."""

        def work() -> None:
            old = self.pool.lease(tenant, key)
            content = b"" if old is None else bytes(old.view)
            if old is not None:
                self.pool.release(old)
                self.pool.remove(tenant, key)
            if new := edit(content):
                slot = self.pool.reserve(tenant, len(new), key=key)
                assert slot is not None
                slot.view[:] = new
                self.pool.commit(tenant, key, slot)

        self.ask(work)


@contextlib.contextmanager
def running(count: int = 1, **options: object) -> Iterator[list[Host]]:
    hosts = [Host(**options) for _ in range(count)]
    try:
        for host in hosts:
            host.start()
        yield hosts
    finally:
        for host in hosts:
            host.kill()


def config(*hosts: Host, **options: object) -> PeerConfig:
    """Deadlines for a busy machine; records are put to all hosts."""
    waits = {"connect_timeout_s": 10, "lookup_timeout_s": 10, "transfer_timeout_s": 10, "retry_s": 0.01}
    return PeerConfig.model_validate(
        {"peers": [host.address for host in hosts], "write_to": "rendezvous", **waits, **options}
    )
