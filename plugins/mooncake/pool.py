"""Asyncio client of a Mooncake Store. If the master does not answer, the pool is joined in the background."""

from __future__ import annotations

import asyncio
import collections
import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from lmcache_async.errors import (
    MissingDependencyError,
    TierClosedError,
    TierError,
    TierFullError,
    TierUnavailableError,
)
from lmcache_async.logging import LimitedLogger, describe
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.memory.threads import WorkerPool, in_thread, wait_done, wait_ended
from lmcache_async.plugins.mooncake.config import MooncakeConfig
from lmcache_async.types import ChunkKey

if TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore

T = TypeVar("T")

_OPEN_S = 30.0
"""Longest wait for Mooncake's client at the start, in seconds. The client takes 20 s to reject invalid options."""
_RETRY_S = 1.0
"""Pause between two attempts to join, in seconds."""
_CONNECT_S = 5.0
_LOCAL_BUFFER_BYTES = 16 << 20
NOT_FOUND = -704
NOT_READY = -703  # it is being written, and not visible
TOO_LONG = -600  # the object is longer than the memory for it
_FULL = -200
_PACKAGES = {
    "libibverbs": "libibverbs1",
    "libnl": "libibverbs1",
    "libnuma": "libnuma1",
    "libcurl": "libcurl4",
}
_MEANINGS = {
    -1: "internal error of Mooncake's client",
    -10: "Mooncake's client is out of memory",
    _FULL: "the pool is full: add segments, or let the master evict earlier",
    TOO_LONG: "invalid parameter",
    NOT_READY: "another client is writing the record",
    -706: "another client is reading the record",
    -707: "the read took longer than the master's lease: raise default_kv_lease_ttl",
    -800: "the transfer failed",
    -900: "the master does not answer",
    -901: "the master did not answer in time",
}


class Pool:
    """Batch calls of Mooncake's client, in threads. Reads, writes and requests to the master have separate threads.

    Every call raises TierUnavailableError until the pool is joined. A call that is cancelled while a thread works
    on it ends when the thread has finished.

    Args:
        arena: Memory that records are read into and written from. It stays mapped until Mooncake's client no longer uses it.
        store: A client that is already set up; it is not closed by the pool. By default a new client.
    """

    def __init__(
        self, config: MooncakeConfig, arena: Arena, store: MooncakeDistributedStore | None = None
    ) -> None:
        self._config = config
        self._address = arena.address
        self._memory: memoryview | None = arena.region  # keeps the memory mapped
        self._is_own = store is None
        mooncake = _client_module()
        self._new_store = mooncake.MooncakeDistributedStore
        self._store = self._new_store() if store is None else store
        self._replication = mooncake.ReplicateConfig()
        self._replication.replica_num = config.replicas
        self._reads = WorkerPool(config.threads, thread_name_prefix="lmcache-mooncake-read")
        self._writes = WorkerPool(config.threads, thread_name_prefix="lmcache-mooncake-write")
        self._requests = WorkerPool(1, thread_name_prefix="lmcache-mooncake-request")  # to the master
        self._is_set_up = False
        self._joined = False
        self._closed = False
        self._joining: asyncio.Task[None] | None = None
        self._transferring: collections.Counter[ChunkKey] = collections.Counter()
        self._removing: set[ChunkKey] = set()
        self._waiters: list[asyncio.Future[None]] = []
        self._logger = LimitedLogger(logging.getLogger(__name__))

    async def open(self) -> None:
        """Join the pool. If its master does not answer, keep trying in the background.

        Raises:
            TierError: Mooncake's client refuses the options or the memory.
        """
        first = asyncio.ensure_future(self._join())
        try:
            await asyncio.wait({first}, timeout=_OPEN_S)
        except asyncio.CancelledError:
            await _cancel(first)
            raise
        if not first.done():
            self._warn(f"the master of {self._config.url} did not answer within {_OPEN_S:.0f} s")
        elif (error := first.exception()) is None:
            return
        elif isinstance(error, TierUnavailableError):
            self._warn(error)
        else:
            raise error
        self._joining = asyncio.create_task(self._keep_joining(first))

    async def aclose(self) -> None:
        """Leave the pool. If cancelled, it is left when the calls in threads have ended, as by `close_later`."""
        left = self._close()
        try:
            if self._joining is not None:
                await asyncio.wait({self._joining})
            await wait_ended(left, abandon=True)
        except BaseException:
            left.add_done_callback(self._log_failure)
            self._abandon_threads()
            raise
        self._requests.shutdown(wait=True)
        left.result()

    def close_later(self) -> None:
        """Leave the pool when the calls in threads have ended, without waiting for them."""
        self._close().add_done_callback(self._log_failure)
        self._abandon_threads()

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        codes = await self._call(self._requests, lambda: self._store.batch_is_exist(self._object_names(keys)))
        for key, code in zip(keys, codes, strict=False):  # the caller checks the number of results
            if code < 0 and code not in {NOT_FOUND, NOT_READY}:
                raise self.error("find", key, code)
        return [code == 1 for code in codes]

    async def get(self, keys: Sequence[ChunkKey], buffers: Sequence[Buffer]) -> list[int]:
        """Read each record into its buffer. Return its length or an error code for each."""
        return await self._transfer(self._reads, self._store.batch_get_into, keys, buffers)

    async def put(self, keys: Sequence[ChunkKey], buffers: Sequence[Buffer]) -> list[int]:
        """Write each record from its buffer. Return 0 or an error code for each."""
        return await self._transfer(
            self._writes, self._store.batch_put_from, keys, buffers, self._replication
        )

    async def remove(self, key: ChunkKey) -> bool:
        """Remove a record when this client does not read or write it. Other clients detect reused memory by the checksum."""
        await self._wait_until(lambda: key not in self._transferring and key not in self._removing)
        self._removing.add(key)
        try:
            [name] = self._object_names([key])
            code = await self._call(self._requests, partial(self._store.remove, name, force=True))
        finally:
            self._removing.discard(key)
            self._wake()
        if code not in {0, NOT_FOUND, NOT_READY}:
            raise self.error("remove", key, code)
        return bool(code == 0)

    def error(self, verb: str, key: ChunkKey, code: int) -> TierError:
        """Return the exception for an error code."""
        text = f"cannot {verb} {self._object_names([key])[0]} of {self._config.url}: {_meaning(code)}"
        return TierFullError(text) if code == _FULL else TierUnavailableError(text)

    async def _transfer(
        self,
        threads: WorkerPool,
        call: Callable[..., Iterable[int]],
        keys: Sequence[ChunkKey],
        buffers: Sequence[Buffer],
        *options: object,
    ) -> list[int]:
        """Transfer records when no removal of them is pending. Memory of a removed record may hold another record."""
        await self._wait_until(lambda: self._removing.isdisjoint(keys))
        self._transferring.update(keys)

        def run() -> list[int]:
            addresses, sizes = [each.address for each in buffers], [each.nbytes for each in buffers]
            return [int(code) for code in call(self._object_names(keys), addresses, sizes, *options)]

        try:
            return await self._call(threads, run)
        finally:
            self._transferring -= collections.Counter(keys)
            self._wake()

    async def _wait_until(self, is_free: Callable[[], bool]) -> None:
        while not is_free():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _call(self, threads: WorkerPool, call: Callable[[], T]) -> T:
        if self._closed:
            raise self._closed_error()
        if not self._joined:
            raise TierUnavailableError(
                f"the pool of {self._config.url} has not been joined yet: its master does not answer"
            )
        try:
            return await in_thread(threads, call)
        except CancelledError as error:  # it had not begun when the pool was closed
            raise self._closed_error() from error

    def _closed_error(self) -> TierClosedError:
        return TierClosedError(f"the mooncake tier of {self._config.url} was closed")

    def _warn(self, cause: object) -> None:
        self._logger.report(
            "open", "%s; the mooncake tier misses every chunk until the pool has been joined", cause
        )

    async def _join(self) -> None:
        """Join the pool in a thread. If cancelled, do not wait for the thread, which may take minutes."""
        joined = self._requests.submit(self._join_blocking)
        await wait_ended(joined, abandon=True)
        joined.result()

    def _join_blocking(self) -> None:
        """Join the pool, and register the memory that records are read into and written from."""
        if self._is_own:
            self._set_up()
        if self._closed:
            return
        assert self._memory is not None  # until the pool is left
        nbytes = len(self._memory)
        if code := self._store.register_buffer(self._address, nbytes):
            if self._is_own:
                self._store.close()
                self._store, self._is_set_up = self._new_store(), False  # for the next attempt
            raise TierError(
                f"Mooncake's client cannot register the arena's {nbytes} bytes for {self._config.protocol}: {_meaning(code)};"
                " with rdma, check ulimit -l"
            )
        self._joined = True

    def _set_up(self) -> None:
        config = self._config
        host, _, port = config.master.rpartition(":")
        try:  # the client would try for minutes, and cannot be interrupted
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
        except OSError as error:
            raise TierUnavailableError(
                f"the master of {config.url} does not answer: {error}; check that it is running and that url is correct"
            ) from error
        options = {
            "local_hostname": config.hostname,
            "metadata_server": config.metadata,
            "global_segment_size": str(config.segment_bytes),
            "local_buffer_size": str(_LOCAL_BUFFER_BYTES),  # for calls that copy, which are not used
            "protocol": config.protocol,
            "rdma_devices": config.devices,
            "master_server_addr": config.master,
        }
        if code := self._store.setup(options):
            self._store = self._new_store()  # for the next attempt
            raise TierError(
                f"cannot join the pool of {config.url} as {config.hostname} by {config.protocol}:"
                f" {_meaning(code)}; check that the master is running and that url, hostname and protocol are correct"
            )
        self._is_set_up = True

    def _close(self) -> Future[None]:
        """Start no further call, and leave the pool in a thread after the running calls. Return a future of the end."""
        self._closed = True
        if self._joining is not None:
            self._joining.cancel()
        left: Future[None] = Future()
        left.set_running_or_notify_cancel()  # its waiter cannot cancel it
        try:
            self._requests.submit(self._leave, left)
        except RuntimeError:  # no thread was ever started, so no call was made
            left.set_result(None)
        self._requests.shutdown(wait=False)
        return left

    def _leave(self, left: Future[None]) -> None:
        try:
            for threads in (self._reads, self._writes):
                threads.shutdown(wait=True, cancel_futures=True)
            try:
                if self._joined:
                    self._store.unregister_buffer(self._address)
            finally:
                if self._is_set_up:
                    self._store.close()
        except BaseException as error:  # noqa: BLE001 - raised by `aclose`
            left.set_exception(error)  # the memory stays mapped, because it may still be registered
        else:
            self._memory = None
            left.set_result(None)

    def _log_failure(self, left: Future[None]) -> None:
        if (error := left.exception()) is not None:
            self._logger.report("leave", "the mooncake tier did not leave its pool: %s", describe(error))

    def _abandon_threads(self) -> None:
        for threads in (self._requests, self._reads, self._writes):
            threads.abandon()

    def _object_names(self, keys: Sequence[ChunkKey]) -> list[str]:
        return [self._config.prefix + key.hex() for key in keys]

    async def _keep_joining(self, attempt: asyncio.Future[None]) -> None:
        while True:
            try:
                await attempt
            except TierError as error:
                self._logger.report("join", "the mooncake tier has not joined the pool yet: %s", error)
            except Exception as error:  # noqa: BLE001 - no free thread now; the next attempt may have one
                cause = type(error).__name__
                self._logger.report(cause, "the mooncake tier has not joined the pool yet: %r", error)
            else:
                self._logger.log(
                    logging.INFO, "joined", "the mooncake tier has joined the pool of %s", self._config.url
                )
                return
            await asyncio.sleep(_RETRY_S)
            attempt = asyncio.ensure_future(self._join())


async def _cancel(task: asyncio.Future[None]) -> None:
    """Cancel the task and wait for its end."""
    task.cancel()
    await wait_done(task)
    if not task.cancelled():
        task.exception()  # retrieved, so that asyncio does not log it


def _client_module() -> Any:
    """Import Mooncake's client on first use, because it needs system libraries that may be missing."""
    try:
        from mooncake import store
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"the tier mooncake needs the package {error.name}, which is not installed:"
            " pip install 'lmcache-async[mooncake]' (without CUDA: mooncake-transfer-engine-non-cuda)"
        ) from error
    except ImportError as error:
        raise MissingDependencyError(
            f"the tier mooncake needs a system library that is missing: {error}: {_advice(str(error))}"
        ) from error
    return store


def _advice(failure: str) -> str:
    """Return the advice for an error of the dynamic loader."""
    if "libcu" in failure or "libnv" in failure:
        return (
            "without CUDA, install the package mooncake-transfer-engine-non-cuda instead of"
            " mooncake-transfer-engine"
        )
    needed = [package for library, package in _PACKAGES.items() if library in failure]
    return f"install {' '.join(needed or dict.fromkeys(_PACKAGES.values()))} (package names of Debian and Ubuntu)"


def _meaning(code: int) -> str:
    """Return the description of an error code."""
    return f"{_MEANINGS.get(code, 'unknown error')} (code {code})"
