"""A daemon on its own thread, and a directory for its socket, whose path must be short."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self, TypeVar

import uvloop

from lmcache_async.daemon.config import DaemonConfig
from lmcache_async.daemon.pool import Pool
from lmcache_async.daemon.server import Daemon
from lmcache_async.plugins.host import HostConfig, HostTier
from lmcache_async.types import ChunkKey

T = TypeVar("T")

DEADLINE_S = 30
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
    """A real daemon on its own thread and event loop. `call` runs a coroutine on the daemon's loop."""

    def __init__(self, path: Path, **options: object) -> None:
        small = {"max_bytes": 64 * MIB, "huge_pages": False, "prefault": False}
        self.config = DaemonConfig.model_validate({"socket": path, **small, **options})
        self.path = path
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="test-daemon", daemon=True)
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(DEADLINE_S)
        if self._error is not None:
            self._thread.join(DEADLINE_S)
            raise self._error
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the daemon as SIGTERM does."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    @property
    def pool(self) -> Pool:
        return self.daemon.pool

    def call(self, function: Callable[[], T]) -> T:
        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(DEADLINE_S)

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

    def _run(self) -> None:
        uvloop.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        try:
            async with Daemon(self.config) as self.daemon:
                self._started.set()
                await self._stop.wait()
        except BaseException as error:  # noqa: BLE001 - raised where the daemon was to start
            self._error = error
            self._started.set()
