"""Base class of the bundled tiers: lifetime of the open backend, running calls, single chunks as batches of one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Generic, TypeVar

from lmcache_async.errors import ChunkCorruptError, TierClosedError, TierError
from lmcache_async.logging import LimitedLogger
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.memory.header import MAX_RECORD_BYTES
from lmcache_async.tiers.base import Allocate, Tier, TierConfig, TierStatistics
from lmcache_async.tiers.results import unwrap
from lmcache_async.types import ChunkKey

logger = LimitedLogger(logging.getLogger(__name__))

ConfigT = TypeVar("ConfigT", bound=TierConfig)
OpenedT = TypeVar("OpenedT")


class BundledTier(Tier[ConfigT], Generic[ConfigT, OpenedT]):
    """A tier with a backend object, which exists while the tier is open. Used on one event loop.

    A derived class overrides `contains_many`, `get_many` and `put_many`, or the methods for single chunks.

    Args:
        label: Name of the tier in messages, such as `s3 tier of s3://bucket`.

    Attributes:
        removes_invalid: Whether a read removes a record of an invalid length. If not, it raises ChunkCorruptError.
    """

    removes_invalid = True

    def __init__(self, config: ConfigT, label: str) -> None:
        super().__init__(config)
        self._label = label
        self._arena: Arena | None = None
        self._max_record_bytes = MAX_RECORD_BYTES
        self._opened: OpenedT | None = None
        self._process = 0
        self._corrupt: Counter[str] = Counter()  # by cause
        self._running = 0
        self._ended: asyncio.Future[None] | None = None

    def bind(self, arena: Arena) -> None:
        """Use the arena, and limit records to its slabs."""
        self._arena = arena
        self._max_record_bytes = arena.slab_bytes

    async def contains(self, key: ChunkKey) -> bool:
        return (await self.contains_many([key]))[0]

    async def count_prefix(self, keys: Sequence[ChunkKey]) -> int:
        return [*await self.contains_many(keys), False].index(False)

    async def get(self, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        [result] = await self.get_many([key], allocate)
        return unwrap(result)

    async def put(self, key: ChunkKey, buffer: Buffer) -> None:
        [error] = await self.put_many([(key, buffer)])
        if error is not None:
            raise error

    def statistics(self) -> TierStatistics:
        """Return the counts of corrupt records. The base class has no number or size of records."""
        return TierStatistics(corrupt=self._corrupt.total(), corrupt_by_cause=dict(self._corrupt))

    def _open(self, opened: OpenedT) -> None:
        self._opened, self._process = opened, os.getpid()

    def _bound(self) -> Arena:
        """Return the arena. Raise TierClosedError before `bind`."""
        if self._arena is None:
            raise TierClosedError(f"the {self._label} needs bind(arena) before it is opened")
        return self._arena

    def _usable(self) -> OpenedT:
        """Return the backend object. Raise TierClosedError if the tier is not open, or was opened before a fork."""
        if self._opened is None:
            raise TierClosedError(f"the {self._label} is not open")
        if self._process != os.getpid():
            raise TierClosedError(
                f"the {self._label} was opened before this process was forked: open one in this process"
            )
        return self._opened

    @contextlib.contextmanager
    def _call(self) -> Iterator[OpenedT]:
        """Provide the backend object for one call. Closing the tier waits until the block has ended."""
        opened = self._usable()
        self._running += 1
        try:
            yield opened
        finally:
            self._running -= 1
            if not self._running and self._ended is not None and not self._ended.done():
                self._ended.set_result(None)

    async def _reject_length(
        self, key: ChunkKey, delete: Callable[[], Awaitable[object]], nbytes: int | None = None
    ) -> None:
        """Count a record of an invalid length as corrupt, and delete it. It is a miss.

        Args:
            key: Its key.
            delete: Deletes it.
            nbytes: Its length, if it is known.

        Raises:
            ChunkCorruptError: Invalid records are not removed.
        """
        found = "an invalid length" if nbytes is None else f"{nbytes} bytes"
        text = f"the record of key {key.hex()} has {found}, expected 1 to {self._max_record_bytes}"
        if not self.removes_invalid:
            raise ChunkCorruptError(text, cause="length")
        self._corrupt["length"] += 1
        logger.report(f"{self._label}.length", "%s: %s; it is a miss and is deleted", self._label, text)
        with contextlib.suppress(TierError):
            await delete()
            if self.on_evicted is not None:
                self.on_evicted([key])

    async def _end_calls(self) -> None:
        """Start no further call, and wait until no call is running. Only one task may wait.

        There is no deadline, so the caller must make sure that the calls end. Cancellation only stops the wait.
        """
        self._opened = None
        if self._running:
            self._ended = asyncio.get_running_loop().create_future()
            await self._ended
