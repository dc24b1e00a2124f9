"""Layer that counts and times the calls of a tier, by method."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lmcache_async.memory.buffer import Buffer
from lmcache_async.metrics.metrics import CallMetrics
from lmcache_async.tiers.middleware.base import (
    Call,
    Layer,
    LayerConfig,
    LayerContext,
    LayerStatistics,
    Next,
    Results,
    Verb,
)


@dataclass(frozen=True, slots=True)
class MetricsStatistics(LayerStatistics):
    """Metrics of the calls of one tier.

    Attributes:
        verbs: Metrics by method, of the methods that were called.
    """

    verbs: Mapping[str, CallMetrics]


class MetricsLayer(Layer):
    """Records calls, chunks, bytes, errors and durations in the engine's metrics; changes nothing.

    Args:
        options: Unused; the layer has no options.
        context: Context of the layer.
        clock: Clock in seconds. Not the clock of the loop: uvloop's only advances between iterations and has
            a resolution of a millisecond, but a local index answers in microseconds.
    """

    fits_arena = True
    transparent = True
    bounded = True

    def __init__(
        self,
        options: LayerConfig,
        context: LayerContext,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(options, context)
        self._clock = clock
        self._verbs = context.metrics.calls()

    def statistics(self) -> MetricsStatistics:
        return MetricsStatistics(verbs={verb: call.copy() for verb, call in self._verbs.items()})

    async def around(self, call: Call, next: Next) -> Results:
        counts = self._verbs.get(call.verb)
        if counts is None:
            counts = self._verbs[call.verb] = CallMetrics()
        counts.in_flight += 1
        start = self._clock()
        try:
            results = await next(call)
        except asyncio.CancelledError:
            counts.cancelled += 1
            raise
        except Exception as error:
            counts.errors[type(error).__name__] += 1
            raise
        else:
            _count(counts, call, results)
            return results
        finally:
            counts.ended(call.chunks, self._clock() - start)


def _count(counts: CallMetrics, call: Call, results: Results) -> None:
    """Count the results of a call. Batches are large: elements are visited one by one only if necessary."""
    if call.items:
        counts.bytes += call.nbytes
        if any(results):
            for error, (_, buffer) in zip(results, call.items, strict=True):
                if error is not None:
                    counts.errors[type(error).__name__] += 1
                    counts.bytes -= buffer.nbytes
    elif call.verb is Verb.GET_MANY:
        for result in results:
            if isinstance(result, Buffer):
                counts.found += 1
                counts.bytes += result.nbytes
            elif result is not None:
                counts.errors[type(result).__name__] += 1
    else:
        counts.found += results.count(True)
