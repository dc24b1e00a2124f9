"""Charts of the status page and of `lmcache-async top`, and the protocol of the sources of their data."""

from __future__ import annotations

import functools
import os
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Any, Literal, Protocol, TypeAlias

Unit: TypeAlias = Literal["share", "bytes", "bytes/s", "tokens/s", "count"]


@dataclass(frozen=True, slots=True)
class Sample:
    """Counters and gauges at one moment (monotonic, in seconds), by names that the source chooses."""

    time: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart; None where there is no value, such as a share without requests."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Chart:
    """Values over time, oldest first; all series have the same length. Stacked lines are parts of one whole."""

    title: str
    unit: Unit
    series: Sequence[Series]
    stacked: bool = False
    note: str = ""


class Source(Protocol):
    """Content of a status page. Called on the loop several times a second; must not block or raise."""

    def sample(self) -> Sample:
        """Return the current values for the charts."""

    def charts(self, samples: Sequence[Sample]) -> list[Chart]:
        """Return the charts of these samples."""

    def status(self) -> dict[str, Any]:
        """Return everything except the charts, for JSON."""

    def metrics(self) -> bytes:
        """Return the metrics in Prometheus' text format."""


def page_head(
    kind: Literal["engine", "daemon"], title: str, facts: Sequence[tuple[str, str]], opened: float
) -> dict[str, Any]:
    """Return the first part of a status: what is shown, the process, and the time since `opened`."""
    process = (("host", socket.gethostname()), ("process", str(os.getpid())), ("lmcache-async", _version()))
    now = time.time()
    return {
        "kind": kind,
        "title": title,
        "facts": [list(fact) for fact in (*facts, *process)],
        "time": round(now, 3),
        "uptime_s": round(now - opened, 3),
    }


@functools.cache
def _version() -> str:
    try:
        return version("lmcache-async")
    except PackageNotFoundError:  # a checkout that is not installed
        return "unknown"


def rates(samples: Sequence[Sample], name: str) -> list[float]:
    """Return the growth of a counter per second, for each sample after the first."""
    return [
        max(0.0, after.values.get(name, 0) - before.values.get(name, 0)) / max(after.time - before.time, 1e-3)
        for before, after in pairwise(samples)
    ]


def shares(
    samples: Sequence[Sample], parts: Sequence[str], whole: str, *, window: int
) -> dict[str, list[float | None]]:
    """Return the share of each counter in `whole` over the last `window` samples, for each sample after the first.

    A part is counted when its load ends, which may be later than the whole. The sum of all shares is at most 1.
    """
    found: dict[str, list[float | None]] = {part: [] for part in parts}
    for index in range(1, len(samples)):
        before, after = samples[max(0, index - window)].values, samples[index].values
        grown = Counter({name: after.get(name, 0) - before.get(name, 0) for name in (*parts, whole)})
        total = max(grown[whole], sum(grown[part] for part in parts))
        for part in parts:
            found[part].append(grown[part] / total if total > 0 else None)
    return found


def gauge_values(samples: Sequence[Sample], name: str) -> list[float]:
    """Return the value of a gauge in each sample after the first."""
    return [sample.values.get(name, 0.0) for sample in samples[1:]]
