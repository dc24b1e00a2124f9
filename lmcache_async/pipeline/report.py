"""Result of the store chain for one batch."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lmcache_async.errors import TierError
from lmcache_async.types import Chunk


class Drops(Counter[str]):
    """Number of dropped chunks by cause, and the chunks.

    Args:
        counts: Counts to start with. The chunks of other `Drops` are included.

    Attributes:
        chunks: The dropped chunks, each with its cause.
    """

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        super().__init__(counts)
        self.chunks: list[tuple[Chunk, str]] = [*counts.chunks] if isinstance(counts, Drops) else []

    def add(self, chunks: Sequence[Chunk], cause: str) -> None:
        if chunks:
            self[cause] += len(chunks)
            self.chunks.extend((chunk, cause) for chunk in chunks)

    def add_all(self, other: Counter[str]) -> None:
        """Add the counts and, if it has them, the chunks of `other`."""
        self.update(other)
        if isinstance(other, Drops):
            self.chunks.extend(other.chunks)


class WriteOutcomes:
    """Outcome of each of `count` chunks of a batch, complete when the slowest tier has finished.

    Attributes:
        causes: For each chunk "" if at least one tier stored it, else the cause; None as long as it is not known.
    """

    __slots__ = ("_complete", "_left", "causes")

    def __init__(self, count: int) -> None:
        self.causes: list[str | None] = [None] * count
        self._left = count
        self._complete: asyncio.Future[None] | None = None

    def note(self, position: int, cause: str) -> None:
        """Note the outcome of a chunk. Only the first one counts."""
        if self.causes[position] is None:
            self.causes[position] = cause
            self._left -= 1
            if not self._left and self._complete is not None and not self._complete.done():
                self._complete.set_result(None)

    def pending(self) -> asyncio.Future[None] | None:
        """Return a future that is done when the outcomes are complete; None if they are."""
        if self._left and self._complete is None:
            self._complete = asyncio.get_running_loop().create_future()
        return self._complete if self._left else None


@dataclass(slots=True, kw_only=True)
class BatchStored:
    """Result of storing a batch of chunks. Complete when the slowest tier has finished.

    Attributes:
        chunks: Chunks that were written to the tiers.
        outcomes: Outcomes of these chunks.
        shared: For each chunk, the results of the tiers that are shared with other processes; None if the
            tier stored it, else the error.
        present: Number of chunks of the request that were stored before.
        dropped: Number of chunks that were dropped before the write, by cause.
        bytes: Total bytes of the records.
    """

    chunks: tuple[Chunk, ...] = ()
    outcomes: WriteOutcomes = field(default_factory=lambda: WriteOutcomes(0))
    shared: tuple[Sequence[asyncio.Future[TierError | None]], ...] = ()
    present: int = 0
    dropped: Counter[str] = field(default_factory=Drops)
    bytes: int = 0
