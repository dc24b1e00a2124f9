"""The s3 tier: chunks as objects of a bucket that several processes share."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np

from lmcache_async.errors import TierUnavailableError
from lmcache_async.logging import LimitedLogger
from lmcache_async.memory.buffer import Buffer
from lmcache_async.memory.threads import WorkerPool, in_thread
from lmcache_async.plugins.s3.bucket import Bucket, concurrently, open_store
from lmcache_async.plugins.s3.config import S3Config
from lmcache_async.tiers.base import Allocate, Capabilities
from lmcache_async.tiers.bundled import BundledTier
from lmcache_async.types import ChunkKey

if TYPE_CHECKING:
    from obstore import Bytes, ObjectMeta
    from obstore.store import ObjectStore

T = TypeVar("T")

_FIRST_WINDOW = 4
"""Number of keys looked up first. Small, because for most prompts that are not stored the first chunk is a miss."""
_ATTEMPTS = 3
"""Attempts to read a record that is replaced between the request of its length and those of its parts."""
_NUM_COPIES = 2
"""Threads that copy into the arena. One thread copies 10 GB/s, unless it waits for a CPU."""


class S3Tier(BundledTier[S3Config, Bucket]):
    """Stores each record as one object, put in one request: it exists as a whole or not at all.

    The tier has no index: a lookup is a request to the store, so records of other processes are found. If the
    largest record fits into `part_bytes`, a record is read by one request; otherwise by a HEAD request and
    concurrent reads of its parts, all of the same version. A thread of the tier copies the bytes into the arena.
    The client never writes to the arena, so a request that ends late does not write to reused memory.

    If cancelled, a call that reads ends at once or after a running copy. A call that writes or removes ends
    with its request, within `request_timeout_s`, and the effect of the request stays.

    Args:
        config: The options.
        store: The client; by default created from the config.
    """

    config_type = S3Config

    def __init__(self, config: S3Config, *, store: ObjectStore | None = None) -> None:
        super().__init__(config, f"s3 tier of {config.url}")
        self._store = store
        self._copies: WorkerPool | None = None
        self._logger = LimitedLogger(logging.getLogger(__name__))

    @property
    def capabilities(self) -> Capabilities:
        parts = -(-min(self._max_record_bytes, 1 << 30) // self.config.part_bytes)
        return Capabilities(
            persistent=True,
            removes=True,
            lists=True,
            shared=True,
            max_concurrency=max(2, self.config.concurrency // parts),
        )

    async def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        with self._call() as bucket:
            return await _find_all(bucket, keys)

    async def count_prefix(self, keys: Sequence[ChunkKey]) -> int:
        """Look up a few keys, then `concurrency` keys at a time, until there is a miss."""
        start, width = 0, _FIRST_WINDOW
        with self._call() as bucket:
            while start < len(keys):
                there = await _find_all(bucket, keys[start : start + width])
                if not all(there):
                    return start + there.index(False)
                start, width = start + width, self.config.concurrency
        return len(keys)

    async def get(self, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        with self._call() as bucket:
            if self._max_record_bytes <= self.config.part_bytes:
                return await self._get_whole(bucket, key, allocate)
            return await self._get_parts(bucket, key, allocate)

    async def put(self, key: ChunkKey, buffer: Buffer) -> None:
        with self._call() as bucket:
            await bucket.write(key, buffer)

    async def remove(self, key: ChunkKey) -> bool:
        with self._call() as bucket:
            if await bucket.find(key) is None:
                return False
            await bucket.delete(key)
            return True

    async def keys(self) -> AsyncIterator[ChunkKey]:
        """Yield the keys of all records, as the store lists them. This may take many requests."""
        async for page in self._usable().pages():
            for key in page:
                yield key

    async def clear(self) -> int:
        """Delete the records under the prefix, including those of other processes. Other objects stay."""
        with self._call() as bucket:
            return await bucket.delete_all()

    async def __aenter__(self) -> Self:
        """Check the bucket and open. If the store does not answer, the tier is opened anyway.

        Raises:
            ConfigError: The options are invalid.
            TierError: There is no such bucket, or the credentials are refused.
        """
        bucket = Bucket(self.config, self._store or open_store(self.config))
        try:
            await bucket.check()
        except TierUnavailableError as error:
            self._logger.report(
                "open",
                "%s; the s3 tier misses every chunk until the store answers; check that it is running and that endpoint"
                " is correct",
                error,
            )
        self._open(bucket)
        self._copies = WorkerPool(_NUM_COPIES, thread_name_prefix="lmcache-s3-copy")
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close after running calls have ended. The records stay."""
        await self._end_calls()
        if self._copies is not None:
            self._copies.shutdown(wait=True)  # copies end before their calls

    async def _get_whole(self, bucket: Bucket, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        buffer = await allocate(self._max_record_bytes)
        with contextlib.ExitStack() as undo:
            undo.callback(buffer.release)
            content = await bucket.read(key, buffer.nbytes)
            if content is None:
                return None
            if isinstance(content, dict) or not len(content):
                nbytes = content["size"] if isinstance(content, dict) else 0
                await self._reject_length(key, partial(bucket.delete, key), nbytes)
                return None
            await self._copy(content, buffer, 0)
            buffer.resize(len(content))
            undo.pop_all()
        return buffer

    async def _get_parts(self, bucket: Bucket, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        for _ in range(_ATTEMPTS):
            found = await bucket.find(key)
            if found is None:
                return None
            nbytes, step = found["size"], self.config.part_bytes
            if not 0 < nbytes <= self._max_record_bytes:
                await self._reject_length(key, partial(bucket.delete, key), nbytes)
                return None
            buffer = await allocate(nbytes)
            parts = [
                self._read_part(bucket, key, found, buffer, start, min(start + step, nbytes))
                for start in range(0, nbytes, step)
            ]
            try:
                if all(await concurrently(parts)):
                    return buffer
            except BaseException:
                buffer.release()
                raise
            buffer.release()  # the object was replaced or removed since it was found
        raise TierUnavailableError(
            f"the record of key {key.hex()} in {self.config.url} was replaced during {_ATTEMPTS} reads"
        )

    async def _read_part(
        self, bucket: Bucket, key: ChunkKey, found: ObjectMeta, buffer: Buffer, start: int, stop: int
    ) -> bool:
        """Read a part of the found version. Return whether that version still exists."""
        content = await bucket.read_part(key, found, start, stop)
        if content is None:
            return False
        if len(content) != stop - start:
            raise TierUnavailableError(
                f"the store returned {len(content)} bytes of key {key.hex()}, expected {stop - start}"
            )
        await self._copy(content, buffer, start)
        return True

    async def _copy(self, content: Bytes, buffer: Buffer, start: int) -> None:
        """Copy into the buffer from `start` on, in a thread. If cancelled, wait for the end of the copy."""
        assert self._copies is not None
        await in_thread(self._copies, partial(_fill, content, buffer, start))


async def _find_all(bucket: Bucket, keys: Sequence[ChunkKey]) -> list[bool]:
    found = await concurrently([bucket.find(key) for key in keys])
    return [meta is not None for meta in found]


def _fill(content: Bytes, buffer: Buffer, start: int) -> None:
    np.copyto(buffer.array[start : start + len(content)], np.frombuffer(memoryview(content), dtype=np.uint8))
