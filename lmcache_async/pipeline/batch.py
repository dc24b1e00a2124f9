"""Data types of the store and retrieve chains: a request, then batches of its chunks.

Each step has its own batch type, so a chain with stages in the wrong order is rejected when it is built.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, Self, TypeVar

import numpy as np

from lmcache_async.device.copier import Fence
from lmcache_async.device.progress import LoadProgress
from lmcache_async.memory.buffer import Buffer
from lmcache_async.types import BlockIds, Chunk, Tokens

AnyBatch = TypeVar("AnyBatch", bound="Batch")

NO_TOKENS: Tokens = np.empty(0, np.int32)
NO_ROWS: BlockIds = np.empty(0, np.int64)

LOOKUP_SHARE, READ_SHARE = 0.5, 0.9
"""Shares of the remaining time of a request that a stage waits for lookups and for reads. If a tier does not answer, its call
then fails before the request is cancelled: the chunks of the other tiers are used, and its circuit breaker counts the failure."""

_LAST = 8
"""Ratio of a full batch to the smallest last batch of chunks that have to be read."""

_RESIDENT_CHUNKS = 512
"""Chunks of a batch in host memory, unless more may be in flight. The event loop prepares its copy in some milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Arguments of a store or a retrieve.

    A request contains either chunks that are already hashed, with their device rows (as from the connector),
    or tokens with one row per `tokens_per_row` tokens, which the hash stage splits into chunks.

    Attributes:
        request_id: Request id for log lines.
        group: Index of the KV cache group.
        chunks: Hashed chunks in prefix order.
        rows: For each chunk its rows in the paged KV cache, int64 in order: block ids if a row is a block,
            slots if a row is a token. In a retrieve, -1 is a row that is not written.
        tokens: Token ids from position 0, int32 of shape (n,); input of the hash stage.
        row_ids: Rows of all `tokens`, int64; input of the hash stage.
        root: Root of the key chain of `tokens`; b"" is the engine's own root.
        request_namespace: Text for everything that the request's KV depends on besides the engine's namespace
            (`RequestNamespace.label`); part of each record.
        fence: Device event that the copy waits for.
        reported: Whether the engine counts and logs the result. Otherwise the caller has that done once for all KV cache
            groups of a request, by `CacheEngine.report_stored` or `report_retrieved`.
    """

    request_id: str = ""
    group: int = 0
    chunks: tuple[Chunk, ...] = ()
    rows: tuple[BlockIds, ...] = ()
    tokens: Tokens = field(default_factory=lambda: NO_TOKENS)
    row_ids: BlockIds = field(default_factory=lambda: NO_ROWS)
    root: bytes = b""
    request_namespace: str = ""
    fence: Fence | None = None
    reported: bool = True

    @property
    def waited_for(self) -> bool:
        """Whether the model thread waits for the request."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRequest(Request):
    """Store the KV of the chunks.

    Attributes:
        on_copied: Called exactly once, on the loop's thread, when device memory is no longer read.
    """

    on_copied: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrieveRequest(Request):
    """Load the KV of the longest stored prefix of the chunks into its rows.

    Attributes:
        awaited: The model thread waits for the end, so the request uses only chunks in host memory and waits for no
            tier and no other request.
        progress: Progress for a model thread that waits for single layers: queried before the first row is written, and
            updated as rows are written. None for other requests.
    """

    awaited: bool = False
    progress: LoadProgress | None = None

    @property
    def waited_for(self) -> bool:
        return self.awaited or self.progress is not None


class Lease(Protocol):
    """A resource held by a batch while it is in the chain: a buffer, or room in a queue."""

    def release(self) -> None: ...


class Scope:
    """Leases of one batch. They are released when the batch has left the chain, for whatever reason.

    Attributes:
        reserved_bytes: Bytes of the budget that are reserved for the batch in the chain; see `Batch.budget_bytes`.
        deadline: Time of the event loop by which the run of the request ends; infinity if it is not known.
    """

    __slots__ = ("_leases", "deadline", "reserved_bytes")

    def __init__(self) -> None:
        self._leases: list[Lease] = []
        self.reserved_bytes = 0
        self.deadline = math.inf

    def earlier(self, share: float) -> float:
        """Return the time of the event loop at which this share of the time until the deadline has passed."""
        now = asyncio.get_running_loop().time()
        return now + (self.deadline - now) * share

    def add(self, leases: Iterable[Lease]) -> None:
        self._leases.extend(leases)

    def close(self) -> None:
        leases, self._leases = self._leases, []
        for lease in leases:
            if not (isinstance(lease, Buffer) and lease.released):  # a stage may release a lease itself
                lease.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Chunks of one request in prefix order, with their device rows.

    Each field that is a tuple has one element per chunk, or none, also in derived classes.

    Attributes:
        request: The request.
        chunks: The chunks.
        rows: Device rows of each chunk; see `Request`.
        drops: Number of chunks of the request that were dropped so far, by cause (stores only).
        scope: Owner of every lease that a stage takes.
    """

    request: Request
    chunks: tuple[Chunk, ...]
    rows: tuple[BlockIds, ...]
    drops: Counter[str] = field(default_factory=Counter)
    scope: Scope = field(default_factory=Scope)

    def budget_bytes(self, chunk_bytes: int, max_bytes: int) -> int:
        """Return the bytes to reserve from a budget of `max_bytes`, while the batch is in the chain."""
        return 0 if self.request.waited_for else min(len(self.chunks) * chunk_bytes, max_bytes)

    def cuts(self, size: int, most: int) -> list[int]:
        """Return the positions at which the batches of a request end, in order.

        Args:
            size: Chunks of a batch.
            most: Maximum number of chunks in flight.
        """
        del most
        return [*range(size, len(self.chunks), size), len(self.chunks)]

    def first(self, count: int) -> Self:
        """Return the batch of the first `count` chunks, with the same scope."""
        return self if count == len(self.chunks) else replace(self, **self._slices(0, count))

    def as_type(self, batch_type: type[AnyBatch], **changes: Any) -> AnyBatch:
        """Return a batch of another type with these changes, and with all fields that both types have."""
        common = {name: getattr(self, name) for name in _common_fields((type(self), batch_type))}
        return batch_type(**common | changes)

    def part(self, start: int, stop: int) -> Self:
        """Return the batch of chunks `start`..`stop`, with its own scope.

        The counts of the whole request belong to its first batch, so that they are counted once.
        """
        drops = self.drops if start == 0 else Counter()
        own = self._own_part(start, stop)
        return replace(self, **self._slices(start, stop), **own, drops=drops, scope=Scope())

    def _own_part(self, start: int, stop: int) -> dict[str, Any]:
        """Return the fields of `part` that this class adds, other than tuples."""
        del start, stop
        return {}

    def _slices(self, start: int, stop: int) -> dict[str, Any]:
        """Return the fields with one element per chunk, for the chunks `start`..`stop`."""
        values = {name: getattr(self, name) for name in _common_fields((type(self), type(self)))}
        return {name: value[start:stop] for name, value in values.items() if isinstance(value, tuple)}


@functools.cache
def _common_fields(types: tuple[type[Batch], type[Batch]]) -> list[str]:
    first, second = ([each.name for each in fields(one)] for one in types)
    return [name for name in first if name in second]


@dataclass(frozen=True, slots=True, kw_only=True)
class HashedBatch(Batch):
    """Chunks with keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingBatch(Batch):
    """Chunks that at least one tier lacks.

    Attributes:
        present: Number of chunks of the request that were stored before.
    """

    present: int = 0

    def _own_part(self, start: int, stop: int) -> dict[str, Any]:
        return {"present": self.present if start == 0 else 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedBatch(MissingBatch):
    """Chunks with a leased buffer for each record.

    Attributes:
        buffers: One buffer per chunk.
    """

    buffers: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledBatch(LeasedBatch):
    """Chunks with payloads in the buffers. Device memory is no longer read.

    Attributes:
        checksums: xxh3_128 of each payload if the copy computed them, else empty. Valid only for the stage
            directly after the copy.
    """

    checksums: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedBatch(LeasedBatch):
    """Chunks with sealed records in the buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncryptedBatch(SealedBatch):
    """Chunks with encrypted records for the tiers outside the arena.

    Attributes:
        at_rest: Encrypted records of the first `len(at_rest)` chunks. The other chunks are stored only in
            tiers in the arena.
    """

    at_rest: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBatch(Batch):
    """The hit: a prefix of the request's chunks.

    Attributes:
        tiers: For each chunk the index in the stack of the tier that should serve it.
        cause: Reason why the prefix ends; "" if all requested chunks were found.
        resident: Number of leading chunks that are in host memory already.
    """

    tiers: tuple[int, ...] = ()
    cause: str = ""
    resident: int = 0

    @property
    def in_memory(self) -> bool:
        """Whether all chunks are in host memory already."""
        return self.resident == len(self.chunks)

    def cuts(self, size: int, most: int) -> list[int]:
        """Return the positions at which the batches of a request end; see `Batch.cuts`.

        Leading chunks in host memory need no further memory. They form large batches, because nothing is copied
        between two batches. The first of several has `most` chunks, so that its copy begins early. The last batches of
        chunks that have to be read get smaller and smaller, because nothing is read during the copy of the last one.
        """
        count = len(self.chunks)
        if self.request.waited_for:
            return [count]
        ends: list[int] = []
        done = 0
        if self.resident >= size or self.in_memory:
            done = self.resident
            if done > 2 * most:
                ends = [*range(most, done, max(most, _RESIDENT_CHUNKS))]
            ends.append(done)
        while done < count:
            left = count - done
            done += min(size, left, max(size // _LAST, -(-left // 2)))
            ends.append(done)
        return ends

    def budget_bytes(self, chunk_bytes: int, max_bytes: int) -> int:
        """Return the bytes to reserve; see `Batch.budget_bytes`.

        A batch in host memory takes at most half of the budget, so that the next one is prepared during its copy.
        """
        return Batch.budget_bytes(self, chunk_bytes, max_bytes // 2 if self.in_memory else max_bytes)

    def _own_part(self, start: int, stop: int) -> dict[str, Any]:
        return {
            "cause": self.cause if stop >= len(self.chunks) else "",
            "resident": max(0, min(stop, self.resident) - start),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedBatch(PlannedBatch):
    """Chunks with their records in buffers.

    Attributes:
        tiers: For each chunk the index of the tier that it was read from.
        buffers: One buffer per chunk.
    """

    buffers: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedBatch(FetchedBatch):
    """Chunks with verified records."""
