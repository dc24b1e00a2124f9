"""What an endpoint shows: asked of whoever is shown, on its loop; and the words that page and `top` share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Any, Literal, Protocol, TypeAlias

Unit: TypeAlias = Literal["share", "bytes", "bytes/s", "tokens/s", "count"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment.

    Attributes:
        time: Seconds, monotonic.
        counts: What only grows.
        gauges: What goes up and down.
    """

    time: float
    counts: Mapping[str, float]
    gauges: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart; None where there is nothing to say, as of a share of nothing."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Chart:
    """Values over time, oldest first, all series of the same length.

    Attributes:
        title: In words.
        unit: Of the values.
        series: In the order that they are stacked in, where they are.
        stacked: They are parts of one whole.
        note: What the values are, in a sentence.
    """

    title: str
    unit: Unit
    series: Sequence[Series]
    stacked: bool = False
    note: str = ""


def package_version() -> str:
    """Of lmcache-async; "unknown" in a checkout that nobody installed."""
    try:
        return version("lmcache-async")
    except PackageNotFoundError:
        return "unknown"


class Source(Protocol):
    """What is shown. Called on the loop, many times a minute: nothing waits, nothing raises."""

    def sample(self) -> Sample:
        """As of now."""

    def charts(self, samples: Sequence[Sample]) -> list[Chart]:
        """What there is to draw."""

    def status(self) -> dict[str, Any]:
        """Everything but the charts, as JSON has it."""

    def metrics(self) -> bytes:
        """In Prometheus' text format."""


def rates(samples: Sequence[Sample], name: str) -> list[float]:
    """How fast a count grew before each sample but the first, a second."""
    return [
        max(0.0, after.counts.get(name, 0) - before.counts.get(name, 0)) / max(after.time - before.time, 1e-3)
        for before, after in pairwise(samples)
    ]


def shares(
    samples: Sequence[Sample], parts: Sequence[str], whole: str, *, window: int
) -> dict[str, list[float | None]]:
    """For each sample but the first, how much each count was of `whole` in the last `window` samples.

    Parts are counted later than the whole, when their load has ended; all together are at most 1.
    """
    found: dict[str, list[float | None]] = {part: [] for part in parts}
    for index in range(1, len(samples)):
        before, after = samples[max(0, index - window)], samples[index]
        grown = Counter(
            {name: after.counts.get(name, 0) - before.counts.get(name, 0) for name in (*parts, whole)}
        )
        total = max(grown[whole], sum(grown[part] for part in parts))
        for part in parts:
            found[part].append(grown[part] / total if total > 0 else None)
    return found


def gauge_values(samples: Sequence[Sample], name: str) -> list[float]:
    """A gauge in each sample but the first."""
    return [sample.gauges.get(name, 0.0) for sample in samples[1:]]
