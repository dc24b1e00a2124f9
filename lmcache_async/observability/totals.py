"""What an engine's stores and retrieves came to since it was opened, added up for metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from lmcache_async.observability.instrument import Instrument
from lmcache_async.types import RetrieveReport, StoreReport

BUCKETS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
"""Upper bounds of the buckets of stores and retrieves, in seconds; one more has all that was slower."""


@dataclass(slots=True)
class Durations:
    """How long something took.

    Attributes:
        seconds: All together.
        counts: How many by bucket, not cumulative; see `BUCKETS_S`.
    """

    seconds: float = 0.0
    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))

    def note(self, seconds: float) -> None:
        self.seconds += seconds
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1


class Totals(Instrument):
    """Adds reports up, on the loop's thread: a few additions a store and a retrieve, none a chunk.

    Attributes:
        retrieves: By why they ended: `complete`, or the report's cause.
        asked_tokens: Of all retrieves.
        hit_tokens: Of all retrieves, by the id of the tier that gave them.
        retrieved_bytes: Payload bytes copied to the device.
        retrieve_seconds: From a retrieve's request to its end.
        stores: All that have ended.
        stored_chunks: Chunks that at least one tier took.
        shared_chunks: Of these, those that a tier keeps which other processes read.
        stored_tokens: Tokens of the stored chunks.
        present_chunks: Chunks that were there already.
        dropped_chunks: Chunks that no tier took, by cause.
        stored_bytes: Of the records that stores made, headers among them.
        store_seconds: From a store's request to the last tier's answer.
        copy_seconds: From a store's request until device memory was not read any more.
        changed: Called after each report.
    """

    def __init__(self) -> None:
        self.retrieves: Counter[str] = Counter()
        self.asked_tokens = 0
        self.hit_tokens: Counter[str] = Counter()
        self.retrieved_bytes = 0
        self.retrieve_seconds = Durations()
        self.stores = 0
        self.stored_chunks = 0
        self.shared_chunks = 0
        self.stored_tokens = 0
        self.present_chunks = 0
        self.dropped_chunks: Counter[str] = Counter()
        self.stored_bytes = 0
        self.store_seconds = Durations()
        self.copy_seconds = Durations()
        self.changed: Callable[[], None] | None = None

    def stored(self, request_id: str, report: StoreReport) -> None:
        del request_id
        self.stores += 1
        self.stored_chunks += report.stored
        self.shared_chunks += report.shared
        self.stored_tokens += report.tokens
        self.present_chunks += report.present
        self.dropped_chunks.update(report.dropped)
        self.stored_bytes += report.bytes
        self.store_seconds.note(report.seconds)
        self.copy_seconds.note(report.copy_seconds)
        self._tell()

    def retrieved(self, request_id: str, report: RetrieveReport) -> None:
        del request_id
        self.retrieves[report.cause or "complete"] += 1
        self.asked_tokens += report.asked_tokens
        self.hit_tokens.update(report.by_tier)
        self.retrieved_bytes += report.bytes
        self.retrieve_seconds.note(report.seconds)
        self._tell()

    def _tell(self) -> None:
        if self.changed is not None:
            self.changed()
