"""Layer that counts and times the calls of a tier, by method."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from lmcache_async.memory.buffer import Buffer
from lmcache_async.metrics.metrics import CallMetrics
from lmcache_async.tiers.base import Tier
from lmcache_async.tiers.layers.around import AroundLayer, Call, Kind
from lmcache_async.tiers.layers.base import LayerConfig, LayerContext, LayerStatistics

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MetricsStatistics(LayerStatistics):
    """Metrics of the calls of one tier.

    Attributes:
        verbs: Metrics by method, of the methods that were called.
    """

    verbs: Mapping[str, CallMetrics]


class MetricsLayer(AroundLayer):
    """Records calls, chunks, bytes, errors and durations in the engine's metrics; changes nothing.

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
        self._verbs = context.metrics.calls()

    def layer_statistics(self) -> MetricsStatistics:
        return MetricsStatistics(verbs={verb: call.copy() for verb, call in self._verbs.items()})

    async def around(self, call: Call, run: Callable[[], Awaitable[T]]) -> T:
        counts = self._verbs.get(call.verb)
        if counts is None:
            counts = self._verbs[call.verb] = CallMetrics()
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
            counts.ended(call.chunks, self._clock() - start)


def _count(counts: CallMetrics, call: Call, result: object) -> None:
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
