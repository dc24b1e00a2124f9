"""Requests for the records of one bucket, limited in number, with errors translated to TierError."""

from __future__ import annotations

import asyncio
import contextlib
import re
import weakref
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import BaseError, PreconditionError

from lmcache_async.errors import TierUnavailableError
from lmcache_async.memory.buffer import Buffer
from lmcache_async.memory.threads import run_shielded
from lmcache_async.plugins.s3.config import S3Config
from lmcache_async.plugins.s3.stores import translated
from lmcache_async.types import ChunkKey

if TYPE_CHECKING:
    from obstore import Bytes, GetOptions, ObjectMeta
    from obstore.store import ObjectStore

_NAME = re.compile(r"([0-9a-f]{2})/(\1[0-9a-f]{30})")
_NO_NAME = "-"  # no record has this prefix, so a list of it is short
_PAGE = 1000  # names in one response, the maximum of the stores


def name_of(key: ChunkKey) -> str:
    """Return the object's name under the prefix. Stores spread the load by the 256 groups of names."""
    name = key.hex()
    return f"{name[:2]}/{name}"


class Bucket:
    """Access to one bucket. Used on one event loop.

    Every request ends within the config's `request_timeout_s`. If cancelled, a request that reads is dropped;
    a request that writes or deletes is awaited, so it has no effect after the call.
    """

    def __init__(self, config: S3Config, store: ObjectStore) -> None:
        self._store = store
        self._url = config.url
        self._at = f" at {config.endpoint}" if config.endpoint else ""
        self._timeout_s = config.request_timeout_s
        self._slots = asyncio.Semaphore(config.concurrency)

    async def check(self) -> None:
        """Raise TierError if the bucket does not exist, refuses the credentials or does not answer."""
        async with self._request(f"use {self._url}"):
            await obstore.list(self._store, prefix=_NO_NAME, chunk_size=_PAGE).collect_async()

    async def find(self, key: ChunkKey) -> ObjectMeta | None:
        """Return length and version of the object; None if it does not exist."""
        async with self._request("find", key):
            with contextlib.suppress(FileNotFoundError):
                return await obstore.head_async(self._store, name_of(key))
        return None

    async def read(self, key: ChunkKey, max_bytes: int) -> Bytes | ObjectMeta | None:
        """Return the object; only its length if that is above `max_bytes`; None if it does not exist."""
        async with self._request("read", key):
            try:
                answer = await obstore.get_async(self._store, name_of(key))
            except FileNotFoundError:
                return None
            if answer.meta["size"] > max_bytes:
                return answer.meta
            return await answer.bytes_async()

    async def read_part(self, key: ChunkKey, found: ObjectMeta, start: int, stop: int) -> Bytes | None:
        """Return the bytes `start` to `stop` of the found version; None if that does not exist any more."""
        options: GetOptions = {"range": (start, stop)}
        if found["e_tag"] is not None:
            options["if_match"] = found["e_tag"]
        async with self._request("read", key):
            try:
                answer = await obstore.get_async(self._store, name_of(key), options=options)
            except (FileNotFoundError, PreconditionError):
                return None
            return await answer.bytes_async()

    async def write(self, key: ChunkKey, buffer: Buffer) -> None:
        """Put the object in one request. It exists as a whole or not at all."""
        async with self._request("write", key):
            await run_shielded(self._send(key, buffer))

    async def delete(self, key: ChunkKey) -> None:
        """Delete the object if it exists."""
        async with self._request("delete", key):
            await run_shielded(self._delete([key]))

    async def delete_all(self) -> int:
        """Delete every record. Return the number of records."""
        count = 0
        async for keys in self.pages():
            async with self._request(f"delete records of {self._url}"):
                await run_shielded(self._delete(keys))
            count += len(keys)
        return count

    async def pages(self) -> AsyncIterator[list[ChunkKey]]:
        """Yield the keys of all records in batches. Objects with other names are skipped."""
        listing = obstore.list(self._store, chunk_size=_PAGE)
        while True:
            async with self._request(f"list {self._url}"):
                page = await anext(listing, None)
            if page is None:
                return
            matches = [_NAME.fullmatch(entry["path"]) for entry in page]
            yield [ChunkKey(bytes.fromhex(match[2])) for match in matches if match]

    async def _send(self, key: ChunkKey, buffer: Buffer) -> None:
        """Put the object, and wait until the client does not use the memory of the record any more.

        The client sends directly from the memory, in threads of its own, and may use it even after it has
        answered. It keeps a reference to the array meanwhile, so a weak reference reports the end. The slab
        is not reused while the array exists.
        """
        loop, unused = asyncio.get_running_loop(), asyncio.Event()

        def note(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(unused.set)

        lent = [buffer.array]
        guard = weakref.ref(lent[0], note)
        try:
            await obstore.put_async(self._store, name_of(key), lent.pop(), use_multipart=False)
        finally:
            lent.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timeout_s):
                    await unused.wait()
        if guard() is not None:  # clients of real servers release it with their connection
            raise TierUnavailableError(
                f"the client still uses the memory of a record {self._timeout_s} s after it was put to {self._url}"
            )

    async def _delete(self, keys: Sequence[ChunkKey]) -> None:
        with contextlib.suppress(FileNotFoundError):
            await obstore.delete_async(self._store, [name_of(key) for key in keys])

    @contextlib.asynccontextmanager
    async def _request(self, verb: str, key: ChunkKey | None = None) -> AsyncIterator[None]:
        async with self._slots:
            try:
                yield
            except (BaseError, OSError, ValueError) as error:
                what = verb if key is None else f"{verb} {self._url}/{name_of(key)}"
                raise translated(error, f"{what}{self._at}") from error
