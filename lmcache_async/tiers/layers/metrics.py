"""Layer that counts and times the calls of a tier, by method."""

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
"""Upper bounds of the latency buckets, in seconds. One more bucket counts all slower calls."""


@dataclass(frozen=True, slots=True)
class VerbMetrics:
    """Metrics of one method since the tier was opened.

    Attributes:
        calls: Ended calls, with or without success.
        in_flight: Running calls.
        cancelled: Calls cancelled by their caller, at a deadline or before.
        chunks: Chunks of the ended calls.
        found: Chunks that were found by lookups, reads and removals.
        bytes: Bytes of the chunks read or written.
        errors: Failed calls, and failed chunks of batches, by class name of the error.
        seconds: Total duration of the ended calls in seconds.
        latency: Ended calls per bucket of `BUCKETS_S`, not cumulative; the last entry counts the calls above
            all bounds.
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
    """Metrics of one tier.

    Attributes:
        verbs: Metrics by method, of the methods that were called.
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
        options: Unused; the layer has no options.
        context: Context of the layer.
        clock: Clock in seconds. Not the clock of the loop: uvloop's only advances between iterations and has
            a resolution of a millisecond, but a local index answers in microseconds.
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
    """Count the result of a call. Batches are large: elements are visited one by one only if necessary."""
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
    elif isinstance(result, int):  # count_prefix, contains, remove or reject
        counts.found += result
