"""The frame of all benchmarks: a figure and its limits are measured in turn, and come out as rows.

A figure by itself says as much of the machine and its neighbours as of our code. So each is measured beside
what bounds it, in the same process, round by round and in a random order. What counts is the median of the
rounds' ratios.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

DEFAULT_ROUNDS = 7
QUICK_ROUNDS = 2

Probe: TypeAlias = "Callable[[], Awaitable[float]]"
"""Measures once and gives one figure."""

Parameter: TypeAlias = str | int | float | bool


def count(text: str) -> int:
    """A whole number from the command line, of at least 1."""
    if text.isascii() and text.isdigit() and int(text):
        return int(text)
    raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, not {text!r}")


def option(default: Any, help: str, *, parse: Callable[[str], Any] = count) -> Any:
    """A field of a benchmark's settings that the command line can set, as `--its-name`."""
    return field(default=default, metadata={"help": help, "parse": parse})


@dataclass(frozen=True, slots=True)
class Case:
    """A figure to be measured beside its limits.

    Attributes:
        unit: Of the figure and of its limits; what ends in "/s" is the better the higher, all else the lower.
        limits: What bounds it, by name; one row for each.
        parameters: What it was measured with.
    """

    name: str
    unit: str
    measure: Probe
    limits: Mapping[str, Probe]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Row:
    """A figure beside one limit.

    Attributes:
        value: Median of the rounds.
        limit_value: The same.
        ratio: Median of the rounds' own ratios, figure to limit; not the ratio of the two medians.
        ratios: Of each round.
        more: Further figures of the same measurement.
    """

    name: str
    value: float
    unit: str
    limit_name: str
    limit_value: float
    ratio: float
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    ratios: tuple[float, ...] = ()
    more: Mapping[str, float] = field(default_factory=dict)

    @property
    def better(self) -> str:
        """Whether `more` or `less` of the unit is better."""
        return "more" if self.unit.endswith("/s") else "less"

    @classmethod
    def of(
        cls,
        name: str,
        unit: str,
        values: Sequence[float],
        limit_name: str,
        limits: Sequence[float],
        parameters: Mapping[str, Parameter],
        more: Mapping[str, float] | None = None,
    ) -> Row:
        """The row of a figure's rounds and those of one of its limits."""
        ratios = tuple(value / limit for value, limit in zip(values, limits, strict=True))
        return cls(
            name=name,
            value=statistics.median(values),
            unit=unit,
            limit_name=limit_name,
            limit_value=statistics.median(limits),
            ratio=statistics.median(ratios),
            parameters=parameters,
            ratios=ratios,
            more=more or {},
        )

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "better": self.better}


class Progress(Protocol):
    """Told how far a benchmark is."""

    def __call__(self, done: int, total: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Frame:
    """How a benchmark is to measure.

    Attributes:
        rounds: That count; one more is made before them, to warm up.
        quick: Whether it is only to be seen that it runs.
        left_out: What could not be measured here, and why; told with the rows.
    """

    rounds: int = DEFAULT_ROUNDS
    quick: bool = False
    progress: Progress = lambda done, total: None
    chosen: random.Random = field(default_factory=random.Random)
    left_out: list[str] = field(default_factory=list)

    def leave_out(self, what: str, why: str) -> None:
        """Say that `what` is not measured."""
        self.left_out.append(f"{what}: {why}")

    @property
    def repeat_s(self) -> float:
        """For so long a probe repeats what takes less."""
        return 0.0 if self.quick else 0.02

    async def compare(self, cases: Sequence[Case]) -> list[Row]:
        """All cases in each round, each directly beside its limits, everything in a random order."""
        taken = [{name: list[float]() for name in ("", *case.limits)} for case in cases]
        done, total = 0, len(cases) * (self.rounds + 1)
        for number in range(self.rounds + 1):
            for index in self.chosen.sample(range(len(cases)), len(cases)):
                probes = {"": cases[index].measure, **cases[index].limits}
                for name in self.chosen.sample(list(probes), len(probes)):
                    value = await probes[name]()
                    if number:
                        taken[index][name].append(value)
                done += 1
                self.progress(done, total)
        return [
            Row.of(case.name, case.unit, figures[""], name, figures[name], case.parameters)
            for case, figures in zip(cases, taken, strict=True)
            for name in case.limits
        ]

    def seconds(self, function: Callable[[], object]) -> float:
        """What one call takes, of as many calls as fill `repeat_s`."""
        count, start = 0, time.perf_counter()
        while True:
            function()
            count += 1
            passed = time.perf_counter() - start
            if passed >= self.repeat_s:
                return passed / count

    async def mean(self, once: Probe) -> float:
        """The mean of as many figures as take `repeat_s` together."""
        figures, start = [], time.perf_counter()
        while True:
            figures.append(await once())
            if time.perf_counter() - start >= self.repeat_s:
                return statistics.fmean(figures)


class BenchmarkModule(Protocol):
    """What the file of a benchmark has.

    Attributes:
        Settings: A frozen dataclass; the fields made by `option` are options of the command line.
        QUICK: Settings for a run of a few seconds.
    """

    Settings: type[Any]
    QUICK: Any

    @staticmethod
    def run(settings: Any, frame: Frame) -> AsyncIterator[Row]:
        """Measure; runs on a uvloop loop of its own."""
