"""Metrics as plain data: families of samples that add up over ranks and steps, and Prometheus' text of them.

A family without samples says what a series is; with samples it is what `engine_families` and its like
give at one moment. Families travel as lists (`to_plain`), for msgpack and for vLLM's own messages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Merge: TypeAlias = Literal["sum", "max"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of what `exposition` gives."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a family.

    Attributes:
        labels: The labels' values, in the order of the family's `labels`.
        value: Of a counter or a gauge; of a histogram the sum of all that was observed.
        counts: Of a histogram: how many observations lie at or below each of its `buckets` and above the one
            before it; last, those above all. Not cumulative.
    """

    labels: tuple[str, ...]
    value: float
    counts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """All samples of one metric.

    Attributes:
        name: As Prometheus has it; a counter's ends with `_total`.
        kind: Of metric.
        help: One sentence.
        labels: The labels' names.
        samples: At most one for the same labels.
        buckets: Of a histogram: upper bounds, ascending, without infinity.
        merge: What a gauge of several ranks is together.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    samples: tuple[Sample, ...] = ()
    buckets: tuple[float, ...] = ()
    merge: Merge = "sum"


class Filling:
    """Samples on their way into the families of a table.

    Args:
        table: What there may be; without samples.
    """

    def __init__(self, table: Iterable[Family]) -> None:
        self._table = {family.name: family for family in table}
        self._samples: dict[str, dict[tuple[str, ...], Sample]] = {}

    def put(self, name: str, value: float, *labels: str) -> None:
        """A counter's or a gauge's value. Values with the same labels add up."""
        self._put(name, Sample(labels, value))

    def put_counts(self, name: str, counts: Sequence[int], total: float, *labels: str) -> None:
        """A histogram's observations: how many in each bucket, and their sum."""
        self._put(name, Sample(labels, total, tuple(counts)))

    def families(self) -> list[Family]:
        """Those that have samples, in the table's order."""
        return [
            replace(family, samples=tuple(self._samples[name].values()))
            for name, family in self._table.items()
            if name in self._samples
        ]

    def _put(self, name: str, sample: Sample) -> None:
        family = self._table[name]
        if len(sample.labels) != len(family.labels):
            raise ValueError(f"{name} has the labels {family.labels}, not the values {sample.labels}")
        samples = self._samples.setdefault(name, {})
        former = samples.get(sample.labels)
        samples[sample.labels] = sample if former is None else _together(family, former, sample)


def merged(groups: Iterable[Iterable[Family]]) -> list[Family]:
    """Families of several ranks or steps as one: counters and histograms add up, gauges by their `merge`.

    Raises:
        ValueError: Families of one name differ in kind, labels or buckets.
    """
    found: dict[str, tuple[Family, dict[tuple[str, ...], Sample]]] = {}
    for family in (family for group in groups for family in group):
        first, samples = found.setdefault(family.name, (family, {}))
        _check_alike(first, family)
        for sample in family.samples:
            former = samples.get(sample.labels)
            samples[sample.labels] = sample if former is None else _together(first, former, sample)
    return [replace(family, samples=tuple(samples.values())) for family, samples in found.values()]


def since(families: Iterable[Family], former: Iterable[Family]) -> list[Family]:
    """What was counted and observed since `former`, without what did not change; gauges as they are now.

    Gauges that did not change are left out too, and so are families of which nothing is left.
    """
    before = {(family.name, sample.labels): sample for family in former for sample in family.samples}
    changed: list[Family] = []
    for family in families:
        samples = []
        for sample in family.samples:
            old = before.get((family.name, sample.labels))
            if sample == old:
                continue
            if old is not None and family.kind != "gauge":
                counts = tuple(new - seen for new, seen in zip(sample.counts, old.counts, strict=True))
                sample = Sample(sample.labels, sample.value - old.value, counts)
            samples.append(sample)
        if samples:
            changed.append(replace(family, samples=tuple(samples)))
    return changed


def labelled(families: Iterable[Family], **labels: str) -> list[Family]:
    """The same with further labels in front, such as the rank or the engine."""
    names, values = tuple(labels), tuple(labels.values())
    return [
        replace(
            family,
            labels=names + family.labels,
            samples=tuple(replace(sample, labels=values + sample.labels) for sample in family.samples),
        )
        for family in families
    ]


def to_plain(families: Iterable[Family]) -> list[list[Any]]:
    """Lists, texts and numbers alone."""
    return [
        [
            family.name,
            family.kind,
            family.help,
            list(family.labels),
            [[list(sample.labels), sample.value, list(sample.counts)] for sample in family.samples],
            list(family.buckets),
            family.merge,
        ]
        for family in families
    ]


def from_plain(plain: Iterable[Sequence[Any]]) -> list[Family]:
    """The families that `to_plain` gave."""
    return [
        Family(
            name,
            kind,
            help_text,
            tuple(labels),
            tuple(Sample(tuple(values), value, tuple(counts)) for values, value, counts in samples),
            tuple(buckets),
            merge,
        )
        for name, kind, help_text, labels, samples, buckets, merge in plain
    ]


def exposition(families: Iterable[Family]) -> bytes:
    """What a Prometheus server reads, as text of `CONTENT_TYPE`. Each name may come once: see `merged`."""
    lines: list[str] = []
    for family in families:
        text = family.help.replace("\\", r"\\").replace("\n", r"\n")
        lines += [f"# HELP {family.name} {text}", f"# TYPE {family.name} {family.kind}"]
        for sample in family.samples:
            pairs = [
                f'{name}="{_escaped(value)}"'
                for name, value in zip(family.labels, sample.labels, strict=True)
            ]
            if family.kind == "histogram":
                lines += _histogram_lines(family, sample, pairs)
            else:
                lines.append(f"{family.name}{_braced(pairs)} {_number(sample.value)}")
    return "".join(f"{line}\n" for line in lines).encode()


def _histogram_lines(family: Family, sample: Sample, pairs: list[str]) -> list[str]:
    lines = []
    total = 0
    for bound, count in zip((*family.buckets, math.inf), sample.counts, strict=True):
        total += count
        le = f'le="{_number(bound)}"'
        lines.append(f"{family.name}_bucket{_braced([*pairs, le])} {total}")
    lines.append(f"{family.name}_sum{_braced(pairs)} {_number(sample.value)}")
    lines.append(f"{family.name}_count{_braced(pairs)} {total}")
    return lines


def _together(family: Family, one: Sample, other: Sample) -> Sample:
    if family.kind == "gauge" and family.merge == "max":
        return max(one, other, key=lambda sample: sample.value)
    counts = tuple(a + b for a, b in zip(one.counts, other.counts, strict=True))
    return Sample(one.labels, one.value + other.value, counts)


def _check_alike(one: Family, other: Family) -> None:
    if (one.kind, one.labels, one.buckets) != (other.kind, other.labels, other.buckets):
        raise ValueError(
            f"{one.name} is a {one.kind} of {one.labels} with the buckets {one.buckets}, and a {other.kind} of"
            f" {other.labels} with {other.buckets}"
        )


def _braced(pairs: list[str]) -> str:
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(value)
