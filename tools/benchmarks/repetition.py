"""Repetition of operations that are too short for one measurement."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from lmcache_async.bench.measure import Frame, Probe


def repeat_s(frame: Frame) -> float:
    """Return the seconds for which a probe repeats a shorter operation."""
    return 0.0 if frame.quick else 0.02


def mean_seconds(frame: Frame, function: Callable[[], object]) -> float:
    """Return the mean seconds of a call, over `repeat_s`."""
    count, start = 0, time.perf_counter()
    while True:
        function()
        count += 1
        passed = time.perf_counter() - start
        if passed >= repeat_s(frame):
            return passed / count


async def mean_figure(frame: Frame, once: Probe) -> float:
    """Return the mean of the figures taken in `repeat_s`."""
    figures, start = [], time.perf_counter()
    while True:
        figures.append(await once())
        if time.perf_counter() - start >= repeat_s(frame):
            return statistics.fmean(figures)
