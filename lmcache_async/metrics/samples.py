"""Values of metric series at one moment, and their export to Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, TypeAlias

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from lmcache_async.metrics.series import SERIES, Series

Labels: TypeAlias = tuple[str, ...]
Value: TypeAlias = float | tuple[float, ...]
"""A number. For a histogram, the sum of the observations, then their number in each bucket (not cumulative)."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of `exposition`."""


class Samples:
    """Values of metric series by name and label values: all of them, or what an interval added."""

    def __init__(self) -> None:
        self._values: dict[str, dict[Labels, Value]] = {}

    def __bool__(self) -> bool:
        return bool(self._values)

    def __iter__(self) -> Iterator[tuple[Series, Labels, Value]]:
        """All values, in the order of the table of series."""
        for name, series in SERIES.items():
            for labels, value in self._values.get(name, {}).items():
                yield series, labels, value

    def add(self, name: str, value: Value, *labels: str) -> None:
        """Add a value. Values with the same labels are added up, or merged as their series says.

        `name` is that of the series without prefix. `labels` are label values in the order of the series.

        Raises:
            KeyError: There is no such series.
            ValueError: The series has other labels.
        """
        series = SERIES[name]
        if len(labels) != len(series.labels):
            raise ValueError(f"{name} has the labels {series.labels}, but the values {labels} were given")
        values = self._values.setdefault(name, {})
        former = values.get(labels)
        if former is None:
            values[labels] = value
        elif series.merge == "max":
            values[labels] = max(former, value)
        else:
            values[labels] = _sum(former, value)

    def get(self, name: str, *labels: str) -> Value | None:
        """The value with these labels; None if there is none."""
        return self._values.get(name, {}).get(labels)

    def total(self, name: str) -> float:
        """Sum over all labels; of a histogram the sum of its observations. 0 without a value."""
        values = self._values.get(name, {}).values()
        return sum(value[0] if isinstance(value, tuple) else value for value in values)

    def since(self, former: Samples) -> Samples:
        """Return what was added since `former`, and the gauges that have changed.

        Values that have not changed are left out.
        """
        added = Samples()
        for series, labels, value in self:
            before = former.get(series.name, *labels)
            if before is None or series.kind == "gauge":
                if value != before:
                    added.add(series.name, value, *labels)
            elif value != before:
                added.add(series.name, _sum(value, before, sign=-1), *labels)
        return added

    def update(self, later: Samples) -> None:
        """Add what a later interval added, and take over its gauges."""
        for series, labels, value in later:
            if series.kind == "gauge":
                self._values.get(series.name, {}).pop(labels, None)
            self.add(series.name, value, *labels)

    def to_plain(self) -> dict[str, list[list[Any]]]:
        """Return the values as lists, strings and numbers, for msgpack and vLLM's messages."""
        return {
            name: [[list(labels), list(value) if isinstance(value, tuple) else value] for labels, value in values.items()]
            for name, values in self._values.items()
        }  # fmt: skip

    @classmethod
    def from_plain(cls, plain: Mapping[str, Sequence[Sequence[Any]]]) -> Samples:
        """Return the values of `to_plain`. Series that are not in the table, of another version, are ignored."""
        samples = cls()
        for name, values in plain.items():
            if name in SERIES:
                for labels, value in values:
                    samples.add(name, tuple(value) if isinstance(value, list) else value, *labels)
        return samples

    def families(self) -> list[Metric]:
        """Return the metric families of prometheus_client."""
        families: dict[str, Metric] = {}
        for series, labels, value in self:
            family = families.get(series.name)
            if family is None:
                family = families[series.name] = _FAMILIES[series.kind](
                    series.full_name, series.help, labels=series.labels
                )
            if isinstance(value, tuple):
                bounds = [*map(floatToGoString, series.buckets), "+Inf"]
                buckets = list(zip(bounds, accumulate(value[1:]), strict=True))
                family.add_metric(labels, buckets=buckets, sum_value=value[0])
            else:
                family.add_metric(labels, value)
        return list(families.values())


def exposition(families: Iterable[Metric]) -> bytes:
    """Return the families in Prometheus' text format."""
    registry = SimpleNamespace(collect=lambda: families)
    text: bytes = generate_latest(registry)
    return text


_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}


def _sum(one: Value, other: Value, *, sign: int = 1) -> Value:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return tuple(a + sign * b for a, b in zip(one, other, strict=True))
    return one + sign * other  # type: ignore[operator]  # one series has numbers or histograms
