"""What travels along the two chains: a request, then batches of its chunks.

Each joint has a type of its own, so a chain put together in the wrong order does not build.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import numpy as np

from lmcache_async.device.copier import Fence
from lmcache_async.device.progress import LoadProgress
from lmcache_async.memory.buffer import Buffer
from lmcache_async.types import BlockIds, Chunk, Tokens

NO_TOKENS: Tokens = np.empty(0, np.int32)
NO_ROWS: BlockIds = np.empty(0, np.int64)

_LAST = 8
"""The last batch of what has to be read is so many times smaller than others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What one store or retrieve is about.

    It names its chunks and the device rows that hold them (as the connector does, which has hashed
    already), or the tokens and one row for each `tokens_per_row` of them, for the hash stage to cut.

    Attributes:
        request_id: For log lines.
        chunks: Hashed chunks in prefix order.
        rows: For each chunk its rows in the paged KV cache, in order: block ids where a row is a block,
            slots where it is a token. In a retrieve -1 marks a row that is not to be written.
        tokens: Token ids from position 0 on, int32 of shape (n,); for the hash stage.
        row_ids: The rows of all of `tokens`, int64; for the hash stage.
        root: What the keys of `tokens` begin with; b"" is the engine's own root.
        request_namespace: Text that stands for what the request's KV depends on besides the engine's
            namespace (`RequestNamespace.label`); part of each record.
        fence: What the copy waits for on the device.
    """

    request_id: str = ""
    chunks: tuple[Chunk, ...] = ()
    rows: tuple[BlockIds, ...] = ()
    tokens: Tokens = field(default_factory=lambda: NO_TOKENS)
    row_ids: BlockIds = field(default_factory=lambda: NO_ROWS)
    root: bytes = b""
    request_namespace: str = ""
    fence: Fence | None = None

    @property
    def waited_for(self) -> bool:
        """Whether the model's thread stands still until it has ended."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRequest(Request):
    """Keep the KV of these chunks.

    Attributes:
        on_copied: Called exactly once, on the loop's thread, when device memory is not read any more.
    """

    on_copied: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrieveRequest(Request):
    """Bring the KV of the longest prefix of these chunks back to its rows.

    Attributes:
        progress: Asked before anything is written, and told how far it has come. The model's thread waits
            for it: such a request takes what is in host memory, and waits for no tier and no other request.
    """

    progress: LoadProgress | None = None

    @property
    def waited_for(self) -> bool:
        return self.progress is not None


class Lease(Protocol):
    """What a batch holds for as long as it is in the chain: a buffer, or room in a queue."""

    def release(self) -> None: ...


class Scope:
    """The leases of one batch: all given back when the batch has left the chain, however it left."""

    __slots__ = ("_leases",)

    def __init__(self) -> None:
        self._leases: list[Lease] = []

    def add(self, leases: Iterable[Lease]) -> None:
        self._leases.extend(leases)

    def close(self) -> None:
        leases, self._leases = self._leases, []
        for lease in leases:
            if not (isinstance(lease, Buffer) and lease.released):  # a stage may have ended a lease itself
                lease.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Chunks of one request in prefix order, with the rows that hold them.

    Attributes:
        drops: Chunks of the request that fell out so far, by cause (stores only).
        scope: Takes every lease that a stage makes.
    """

    request: Request
    chunks: tuple[Chunk, ...]
    rows: tuple[BlockIds, ...]
    drops: Counter[str] = field(default_factory=Counter)
    scope: Scope = field(default_factory=Scope)

    @property
    def budget_chunks(self) -> int:
        """How many chunks' bytes the batch holds of what may be in flight."""
        return 0 if self.request.waited_for else len(self.chunks)

    def cuts(self, size: int, most: int) -> list[int]:
        """Where to cut a request's chunks into batches: the positions at which batches end.

        Args:
            size: Chunks of a batch.
            most: Chunks that may be in flight at one time.
        """
        del most
        return [*range(size, len(self.chunks), size), len(self.chunks)]

    def part(self, start: int, stop: int) -> Self:
        """The batch of chunks start..stop, with a scope of its own and no drops."""
        return replace(
            self,
            chunks=self.chunks[start:stop],
            rows=self.rows[start:stop],
            drops=Counter(),
            scope=Scope(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HashedBatch(Batch):
    """Every chunk has its key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingBatch(Batch):
    """Chunks that no tier has yet.

    Attributes:
        present: How many chunks of the request were there already.
    """

    present: int = 0

    def part(self, start: int, stop: int) -> Self:
        # The whole request's counts travel with its first batch, once.
        return replace(
            self,
            chunks=self.chunks[start:stop],
            rows=self.rows[start:stop],
            drops=self.drops if start == 0 else Counter(),
            scope=Scope(),
            present=self.present if start == 0 else 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedBatch(MissingBatch):
    """Each chunk has a leased buffer for its record."""

    buffers: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledBatch(LeasedBatch):
    """The payloads are in the buffers; device memory is not read any more.

    Attributes:
        checksums: xxh3_128 of each payload, where the copy has taken them; else nothing. They are there
            only for a stage that comes directly behind the copy.
    """

    checksums: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedBatch(LeasedBatch):
    """The buffers hold sealed records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncryptedBatch(SealedBatch):
    """What tiers outside of the arena are given is encrypted.

    Attributes:
        at_rest: The secret form of the first so many records; the others are for the arena's tiers alone.
    """

    at_rest: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBatch(Batch):
    """The hit: a prefix of the request's chunks.

    Attributes:
        tiers: For each chunk the index, in the stack, of the tier that is to serve it.
        cause: Why the prefix ends where it ends; "" when all that was asked for is there.
        resident: How many leading chunks are in host memory already.
    """

    tiers: tuple[int, ...] = ()
    cause: str = ""
    resident: int = 0

    def cuts(self, size: int, most: int) -> list[int]:
        """What is in host memory goes in one batch: there is nothing to read while it is copied.

        Of what has to be read the last batches are ever smaller: nothing is read while the last is copied.
        """
        count = len(self.chunks)
        first = count if self.request.waited_for else min(self.resident, most)
        if first == count:
            return [first] if first > size else Batch.cuts(self, size, most)
        ends = [first] if first >= size else [0]
        while (left := count - ends[-1]) > 0:
            ends.append(ends[-1] + min(size, left, max(size // _LAST, -(-left // 2))))
        return ends if ends[0] else ends[1:]

    def part(self, start: int, stop: int) -> Self:
        last = stop >= len(self.chunks)
        return replace(
            self,
            chunks=self.chunks[start:stop],
            rows=self.rows[start:stop],
            drops=Counter(),
            scope=Scope(),
            tiers=self.tiers[start:stop],
            cause=self.cause if last else "",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedBatch(PlannedBatch):
    """Each chunk's record is in a buffer; `tiers` tells which tier really gave it."""

    buffers: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedBatch(FetchedBatch):
    """Each record was proven to be the chunk asked for."""
