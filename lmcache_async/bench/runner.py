"""Runs benchmarks one after the other and writes what came out; both commands are made of this."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import difflib
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import uvloop

from lmcache_async.bench.frame import DEFAULT_ROUNDS, QUICK_ROUNDS, Frame, Row
from lmcache_async.bench.machine import machine_facts
from lmcache_async.bench.report import check_matplotlib, write_report
from lmcache_async.bench.table import find
from lmcache_async.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from lmcache_async.bench.frame import BenchmarkModule
    from lmcache_async.bench.table import Benchmark


COMMON_OPTIONS = ("--json", "--report", "--rounds", "--quick")


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for.

    Attributes:
        name: Of a benchmark, or `all`.
        rounds: None for the usual number.
        own: Options of the benchmark itself, as on a command line.
    """

    name: str
    json_file: Path | None = None
    report: Path | None = None
    rounds: int | None = None
    quick: bool = False
    own: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """What one benchmark came to."""

    benchmark: Benchmark
    settings: Any
    rows: tuple[Row, ...]
    seconds: float
    left_out: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "summary": self.benchmark.summary,
            "settings": dataclasses.asdict(self.settings),
            "seconds": round(self.seconds, 3),
            "rows": [row.as_dict() for row in self.rows],
            "left_out": list(self.left_out),
        }


def run(request: Request, progress: Callable[[str, int, int], None]) -> Iterator[Result]:
    """Each result as it comes. What is asked for is checked before anything runs.

    The files are written again with each result, so that they hold those of a run that is interrupted.

    Args:
        progress: Called with a benchmark's name, how many steps of it are done, and of how many.

    Raises:
        ConfigError: There is no such benchmark or option.
        MissingDependencyError: A package is not installed; the message says how to get it.
    """
    chosen = find(request.name)
    if request.own and len(chosen) > 1:
        raise ConfigError(f"{request.own[0]} is no option of {request.name}: name the benchmark it is of")
    loaded = [(benchmark, benchmark.load()) for benchmark in chosen]
    settings = [settings_of(module, benchmark.name, request) for benchmark, module in loaded]
    if request.report is not None:
        check_matplotlib()
    return _run(request, list(zip(loaded, settings, strict=True)), progress)


def settings_of(module: BenchmarkModule, name: str, request: Request) -> Any:
    """The benchmark's settings: the usual or the quick ones, and on top of them what is given.

    Raises:
        ConfigError: It has no such option, or the value is none.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    fields = [field for field in dataclasses.fields(module.Settings) if "help" in field.metadata]
    flags = ["--" + field.name.replace("_", "-") for field in fields]
    for flag, field in zip(flags, fields, strict=True):
        parser.add_argument(flag, dest=field.name, type=field.metadata["parse"])
    try:
        given, unknown = parser.parse_known_args(request.own)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"benchmark {name}: {error}") from None
    if unknown:
        raise ConfigError(_unknown_option(name, unknown[0], flags))
    chosen = {field: value for field, value in vars(given).items() if value is not None}
    return dataclasses.replace(module.QUICK if request.quick else module.Settings(), **chosen)


def _unknown_option(name: str, flag: str, own: Sequence[str]) -> str:
    flag = flag.partition("=")[0]
    close = difflib.get_close_matches(flag, [*COMMON_OPTIONS, *own], n=1, cutoff=0.6)
    hint = f" did you mean {close[0]}?" if close else ""
    return f"benchmark {name} has no option {flag};{hint} its own are {', '.join(own)}"


def lines(result: Result) -> list[str]:
    """The rows as a table of plain text."""
    head = ("", "", "unit", "limit", "", "ratio")
    body = [
        (row.name, _figure(row.value), row.unit, _figure(row.limit_value), row.limit_name, f"{row.ratio:.3f}")
        for row in result.rows
    ]
    table = [head, *body]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    right = {1, 3, 5}
    title = f"{result.benchmark.name}: {result.benchmark.summary}"
    return [
        title,
        *(
            "  ".join(
                cell.rjust(width) if column in right else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in table
            if body
        ),
        *(f"left out: {text}" for text in result.left_out),
    ]


class _Parser(argparse.ArgumentParser):
    """Says what is wrong to its caller instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentTypeError(message)


def _run(
    request: Request,
    chosen: Sequence[tuple[tuple[Benchmark, BenchmarkModule], Any]],
    progress: Callable[[str, int, int], None],
) -> Iterator[Result]:
    results: list[Result] = []
    facts = machine_facts()
    rounds = request.rounds or (QUICK_ROUNDS if request.quick else DEFAULT_ROUNDS)
    for (benchmark, module), settings in chosen:

        def tell(done: int, total: int, name: str = benchmark.name) -> None:
            progress(name, done, total)

        frame = Frame(rounds=rounds, quick=request.quick, progress=tell)
        start = time.perf_counter()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            rows = runner.run(_collect(module, settings, frame))
        seconds = time.perf_counter() - start
        results.append(Result(benchmark, settings, rows, seconds, tuple(frame.left_out)))
        whole = {
            "machine": facts,
            "quick": request.quick,
            "rounds": rounds,
            "benchmarks": {result.benchmark.name: result.as_dict() for result in results},
        }
        if request.json_file is not None:
            request.json_file.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
        if request.report is not None:
            write_report(request.report, whole, newest=benchmark.name)
        yield results[-1]


async def _collect(module: BenchmarkModule, settings: Any, frame: Frame) -> tuple[Row, ...]:
    return tuple([row async for row in module.run(settings, frame)])


def _figure(value: float) -> str:
    """Four digits that mean something."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
