"""A daemon on its own thread, and a directory for its socket, whose path must be short."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self, TypeVar

from lmcache_async.daemon.config import DaemonConfig
from lmcache_async.daemon.pool import Pool
from lmcache_async.daemon.server import Daemon
from lmcache_async.engine.loop import LoopThread
from lmcache_async.plugins.host import HostConfig, HostTier
from lmcache_async.types import ChunkKey

T = TypeVar("T")

DEADLINE_S = 150
MIB = 1 << 20


WAITS = {"connect_timeout_s": 10, "lookup_timeout_s": 10, "transfer_timeout_s": 10}
"""Deadlines of the host and the valkey tier for a busy machine."""


def host_tier(path: Path, **options: object) -> HostTier:
    """Return a host tier with its own tenant and with deadlines for a busy machine."""
    given = {"socket": path, "tenant": uuid.uuid4().hex, "prefault": False, **WAITS, **options}
    return HostTier(HostConfig.model_validate(given))


@contextlib.contextmanager
def socket_path() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="lmca-"))
    try:
        yield directory / "s"
    finally:
        shutil.rmtree(directory)


class ThreadedDaemon:
    """A real daemon on its own thread and event loop. `call` calls a function there."""

    def __init__(self, path: Path, **options: object) -> None:
        small = {"max_bytes": 64 * MIB, "huge_pages": False, "prefault": False}
        self.config = DaemonConfig.model_validate({"socket": path, **small, **options})
        self.path = path
        self._opened = contextlib.AsyncExitStack()

    def __enter__(self) -> Self:
        self.loop = LoopThread("test-daemon")
        try:
            opening = self._opened.enter_async_context(Daemon(self.config))
            self.daemon = self.loop.submit(opening).result(DEADLINE_S)
        except BaseException:
            self.loop.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the daemon as SIGTERM does. May be called twice."""
        if not self.loop.closed:
            self.loop.submit(self._opened.aclose()).result(DEADLINE_S)
            self.loop.close()

    @property
    def pool(self) -> Pool:
        return self.daemon.pool

    def call(self, function: Callable[[], T]) -> T:
        async def run() -> T:
            return function()

        return self.loop.submit(run()).result(DEADLINE_S)

    def leases(self, tenant: str = "default") -> tuple[int, int]:
        """Return the number of leases of readers and of writers."""
        held = self.call(lambda: self.pool.tenant_statistics(tenant))
        return held.readers, held.writers

    async def until_leases(self, wanted: tuple[int, int], tenant: str = "default") -> None:
        """Wait until the daemon has processed the messages of its clients."""
        async with asyncio.timeout(DEADLINE_S):
            while self.leases(tenant) != wanted:
                await asyncio.sleep(0)

    def edit(self, tenant: str, key: ChunkKey, change: Callable[[bytes], bytes]) -> bool:
        """Change a stored record without a client. Return whether this was possible."""

        def replace() -> bool:
            slot = self.pool.lease(tenant, key)
            assert slot is not None
            content = change(bytes(slot.view))
            self.pool.release(slot)
            if not content:
                return False
            self.pool.remove(tenant, key)
            target = self.pool.reserve(tenant, key, len(content))
            assert target is not None
            target.view[:] = content
            self.pool.commit(target)
            return True

        return self.call(replace)
