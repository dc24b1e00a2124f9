"""`lmcache-async bench`: run benchmarks, each beside the limit of what it measures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lmcache_async.bench.frame import DEFAULT_ROUNDS
from lmcache_async.bench.runner import Request, lines, run
from lmcache_async.bench.table import ALL, BENCHMARKS, left_out
from lmcache_async.errors import LMCacheAsyncError

NAMES = ", ".join(benchmark.name for benchmark in BENCHMARKS)


def complete_names(incomplete: str) -> list[str]:
    names = [*(benchmark.name for benchmark in BENCHMARKS), ALL]
    return [name for name in names if name.startswith(incomplete)]


def bench_command(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help=f"One of {NAMES}; or {ALL}.", autocompletion=complete_names),
    ],
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.", dir_okay=False)
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", help="Write report.html and plots to this directory.", file_okay=False),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help=f"How often each is measured; {DEFAULT_ROUNDS} by default.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, only to see that it runs.")] = False,
) -> None:
    """Measure, each figure in turn with the limit of what it measures.

    Some benchmarks have further options of their own; docs/benchmarks.md names them.
    """
    console, errors = Console(highlight=False), Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task(name, total=None)

        def advance(name: str, done: int, total: int) -> None:
            bar.update(task, description=name, completed=done, total=total)

        try:
            for result in run(Request(name, json_file, report, rounds, quick, tuple(context.args)), advance):
                for line in lines(result):
                    console.print(line, markup=False, soft_wrap=True)
                bar.reset(task, total=None)
        except LMCacheAsyncError as error:
            errors.print(str(error), markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(2) from None
    if name == ALL:
        for line in left_out():
            errors.print(line, markup=False)
