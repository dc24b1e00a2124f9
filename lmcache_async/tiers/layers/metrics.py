"""What calls of a tier come to: counted by verb."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from lmcache_async.memory.buffer import Buffer
from lmcache_async.tiers.base import Tier
from lmcache_async.tiers.layers.around import AroundLayer, Call, Kind
from lmcache_async.tiers.layers.base import LayerConfig, LayerContext, LayerStatistics

T = TypeVar("T")

BUCKETS_S = (
    0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005,
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Upper bounds of the latency buckets, in seconds; one more bucket has all that is slower."""


@dataclass(frozen=True, slots=True)
class VerbMetrics:
    """What the calls of one verb came to, since the tier was opened.

    Attributes:
        calls: That have ended, however.
        in_flight: That have not.
        cancelled: That ended because their caller gave them up, at a deadline or before.
        chunks: That the ended calls were about.
        found: Of these, those that were there: of lookups, reads and removals.
        bytes: Of the chunks read or written.
        errors: Failed calls, and failed chunks of batches, by the name of the error.
        seconds: That the ended calls took together.
        latency: How many of them took at most as long as each of `BUCKETS_S` says and longer than the
            bound before it; last, those that took longer than all.
    """

    calls: int
    in_flight: int
    cancelled: int
    chunks: int
    found: int
    bytes: int
    errors: Mapping[str, int]
    seconds: float
    latency: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MetricsStatistics(LayerStatistics):
    """A snapshot of the metrics of one tier.

    Attributes:
        verbs: By verb, as far as it was called.
    """

    verbs: Mapping[str, VerbMetrics]


@dataclass(slots=True)
class _Counts:
    calls: int = 0
    in_flight: int = 0
    cancelled: int = 0
    chunks: int = 0
    found: int = 0
    bytes: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    latency: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))

    def snapshot(self) -> VerbMetrics:
        return VerbMetrics(
            calls=self.calls,
            in_flight=self.in_flight,
            cancelled=self.cancelled,
            chunks=self.chunks,
            found=self.found,
            bytes=self.bytes,
            errors=dict(self.errors),
            seconds=self.seconds,
            latency=tuple(self.latency),
        )


class MetricsLayer(AroundLayer):
    """Counts calls, chunks, bytes and errors, and how long calls take; changes nothing.

    Args:
        inner: The tier.
        options: There are none.
        context: Where it is.
        clock: Seconds. Not the loop's: uvloop's stands still between two turns and counts milliseconds,
            where an index answers in microseconds.
    """

    fits_arena = True

    def __init__(
        self,
        inner: Tier,
        options: LayerConfig,
        context: LayerContext,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(inner, options, context)
        self._clock = clock
        self._verbs: dict[str, _Counts] = {}

    def layer_statistics(self) -> MetricsStatistics:
        return MetricsStatistics(verbs={verb: counts.snapshot() for verb, counts in self._verbs.items()})

    async def around(self, call: Call, run: Callable[[], Awaitable[T]]) -> T:
        counts = self._verbs.get(call.verb)
        if counts is None:
            counts = self._verbs[call.verb] = _Counts()
        counts.in_flight += 1
        start = self._clock()
        try:
            result = await run()
        except asyncio.CancelledError:
            counts.cancelled += 1
            raise
        except Exception as error:
            counts.errors[type(error).__name__] += 1
            raise
        else:
            _count(counts, call, result)
            return result
        finally:
            seconds = self._clock() - start
            counts.in_flight -= 1
            counts.calls += 1
            counts.chunks += call.chunks
            counts.seconds += seconds
            counts.latency[bisect_left(BUCKETS_S, seconds)] += 1


def _count(counts: _Counts, call: Call, result: object) -> None:
    """What came back. Nothing is looked at one by one that can be counted at once: batches are large."""
    if call.kind is Kind.READ:
        for answer in result if isinstance(result, list) else (result,):
            if isinstance(answer, Buffer):
                counts.found += 1
                counts.bytes += answer.nbytes
            elif answer is not None:
                counts.errors[type(answer).__name__] += 1
    elif call.given:
        errors = result if isinstance(result, list) and any(result) else ()
        counts.bytes += call.nbytes
        for error, buffer in zip(errors, call.given, strict=False):
            if error is not None:
                counts.errors[type(error).__name__] += 1
                counts.bytes -= buffer.nbytes
    elif isinstance(result, list):
        counts.found += sum(result)
    elif isinstance(result, int):  # of a prefix; or whether one was there
        counts.found += result
