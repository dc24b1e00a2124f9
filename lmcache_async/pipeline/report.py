"""Result of the store chain for one batch, and merged reports."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lmcache_async.errors import TierError
from lmcache_async.types import Chunk, RetrieveReport, StoreReport, WriteResult


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
    """Results of the tiers for the chunks of a batch. Complete when the slowest tier has finished.

    Args:
        count: Number of chunks.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._results: list[Sequence[WriteResult]] = []  # by tier
        self._shared: list[Sequence[WriteResult]] = []  # those of tiers that are shared with other processes

    def add(self, results: Sequence[WriteResult], *, shared: bool) -> None:
        """Add the result of a tier for each chunk."""
        self._results.append(results)
        if shared:
            self._shared.append(results)

    def pending(self) -> list[asyncio.Future[TierError | None]]:
        """Return the writes that have not ended."""
        each = (result for results in self._results for result in results)
        return [result for result in each if isinstance(result, asyncio.Future) and not result.done()]

    def causes(self) -> list[str | None]:
        """Return for each chunk "" if a tier stored it, None if a result is not known, else the cause."""
        if all(results.count(None) == self._count for results in self._results):  # the most frequent case
            return [""] * self._count
        return [_cause(results) for results in zip(*self._results, strict=True)]

    def shared(self) -> int:
        """Return the number of chunks stored by now in a tier that is shared with other processes."""
        return sum(any(map(_is_stored, results)) for results in zip(*self._shared, strict=True))


def _cause(results: Sequence[WriteResult]) -> str | None:
    if any(map(_is_stored, results)):
        return ""
    futures = [result for result in results if isinstance(result, asyncio.Future)]
    if any(future.cancelled() or not future.done() for future in futures):
        return None
    queued = [future.result() for future in futures]
    return type((queued or results)[0]).__name__


def _is_stored(result: WriteResult) -> bool:
    if isinstance(result, asyncio.Future):
        return result.done() and not result.cancelled() and result.result() is None
    return result is None


@dataclass(slots=True, kw_only=True)
class BatchStored:
    """Result of storing a batch of chunks. Complete when the slowest tier has finished.

    Attributes:
        chunks: Chunks that were written to the tiers.
        outcomes: Outcomes of these chunks.
        present: Number of chunks of the request that were stored before.
        dropped: Number of chunks that were dropped before the write, by cause.
        bytes: Total bytes of the records.
    """

    chunks: tuple[Chunk, ...] = ()
    outcomes: WriteOutcomes = field(default_factory=lambda: WriteOutcomes(0))
    present: int = 0
    dropped: Counter[str] = field(default_factory=Drops)
    bytes: int = 0


def merge_stores(reports: Sequence[StoreReport]) -> StoreReport:
    """Merge the reports of the KV cache groups of one store. Tokens and times are the largest ones, the rest are sums."""
    return StoreReport(
        stored=sum(report.stored for report in reports),
        shared=sum(report.shared for report in reports),
        present=sum(report.present for report in reports),
        dropped=sum((report.dropped for report in reports), Counter()),
        tokens=max((report.tokens for report in reports), default=0),
        bytes=sum(report.bytes for report in reports),
        seconds=max((report.seconds for report in reports), default=0.0),
        copy_seconds=max((report.copy_seconds for report in reports), default=0.0),
    )


def merge_retrieves(reports: Sequence[RetrieveReport]) -> RetrieveReport:
    """Merge the reports of the KV cache groups of one load.

    The tokens are those of the longest group. The cause is the first one of any group.
    """
    longest = max(reports, key=lambda report: report.asked_tokens, default=RetrieveReport())
    return replace(
        longest,
        hit_chunks=sum(report.hit_chunks for report in reports),
        bytes=sum(report.bytes for report in reports),
        seconds=max((report.seconds for report in reports), default=0.0),
        cause=next((report.cause for report in reports if report.cause), ""),
    )
