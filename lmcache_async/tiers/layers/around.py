"""Base class of layers that treat all methods alike."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import NamedTuple, TypeVar

from lmcache_async.errors import TierError
from lmcache_async.memory.buffer import Buffer
from lmcache_async.tiers.base import Allocate
from lmcache_async.tiers.layers.base import ConfiguredLayer
from lmcache_async.types import ChunkKey

T = TypeVar("T")


class Kind(StrEnum):
    """Kind of a call."""

    LOOKUP = "lookup"
    READ = "read"
    WRITE = "write"


class Call(NamedTuple):
    """One call of a tier, for one chunk or a batch.

    Attributes:
        verb: Name of the method.
        kind: Kind of the call.
        chunks: Number of chunks.
        given: Buffers of a put, leased by the caller until the call has ended.
    """

    verb: str
    kind: Kind
    chunks: int
    given: Sequence[Buffer] = ()

    @property
    def nbytes(self) -> int:
        """Total bytes of `given`."""
        return sum(buffer.nbytes for buffer in self.given)


class AroundLayer(ConfiguredLayer):
    """Passes every lookup, read and write through `around`; `keys`, `clear` and `scrub` are forwarded."""

    @abstractmethod
    async def around(self, call: Call, run: Callable[[], Awaitable[T]]) -> T:
        """Carry out a call: await `run()` any number of times and return its result or raise an error.

        If it is cancelled, it must end at once. Buffers of a result that is not returned must be released.

        Args:
            call: The call.
            run: Calls the tier inside.
        """

    async def contains(self, key: ChunkKey) -> bool:
        return await self.around(Call("contains", Kind.LOOKUP, 1), lambda: self.inner.contains(key))

    async def count_prefix(self, keys: Sequence[ChunkKey]) -> int:
        call = Call("count_prefix", Kind.LOOKUP, len(keys))
        return await self.around(call, lambda: self.inner.count_prefix(keys))

    async def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        call = Call("contains_many", Kind.LOOKUP, len(keys))
        return await self.around(call, lambda: self.inner.contains_many(keys))

    async def get(self, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        return await self.around(Call("get", Kind.READ, 1), lambda: self.inner.get(key, allocate))

    async def get_many(self, keys: Sequence[ChunkKey], allocate: Allocate) -> list[Buffer | TierError | None]:
        call = Call("get_many", Kind.READ, len(keys))
        return await self.around(call, lambda: self.inner.get_many(keys, allocate))

    async def put(self, key: ChunkKey, buffer: Buffer) -> None:
        call = Call("put", Kind.WRITE, 1, (buffer,))
        await self.around(call, lambda: self.inner.put(key, buffer))

    async def put_many(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[TierError | None]:
        call = Call("put_many", Kind.WRITE, len(items), [buffer for _, buffer in items])
        return await self.around(call, lambda: self.inner.put_many(items))

    async def remove(self, key: ChunkKey) -> bool:
        return await self.around(Call("remove", Kind.WRITE, 1), lambda: self.inner.remove(key))

    async def reject(self, key: ChunkKey, cause: str) -> bool:
        return await self.around(Call("reject", Kind.WRITE, 1), lambda: self.inner.reject(key, cause))
