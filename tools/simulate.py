"""`make simulate`: run the deterministic simulation and print how to repeat a failure."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.simulation.base import SimulationReport
from tests.simulation.faults import Faults
from tests.simulation.loop import Hang
from tests.simulation.world import simulate

app = typer.Typer(add_completion=False)


@app.command()
def simulate_command(
    seed: Annotated[int, typer.Option(help="Seed of the first simulation.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Operations of each simulation.")] = 1000,
    seeds: Annotated[int, typer.Option(min=1, help="Number of simulations: seed, seed + 1, and so on.")] = 1,
    faults: Annotated[Faults, typer.Option(help="Amount of injected faults.")] = Faults.SOME,
    serving: Annotated[
        bool, typer.Option("--serving", help="Include vLLM's scheduler and the connector; needs vLLM.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the reports to this file.", dir_okay=False)
    ] = None,
    watchdog: Annotated[
        float, typer.Option(min=0.0, help="Seconds without progress that count as a hang; 0 to disable.")
    ] = 300.0,
) -> None:
    """Run the real engine in virtual time, with random errors, delays, crashes and damage.

    After a violation, print the command that repeats it and exit with 1.
    """
    console, errors = Console(highlight=False), Console(stderr=True)
    reports: list[SimulationReport] = []
    columns = (TextColumn("seed {task.fields[seed]}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True) as bar, watch(watchdog) as alive:
        task = bar.add_task("", total=seeds * steps, seed=seed)
        for number in range(seeds):

            def advance(made: int, number: int = number) -> None:
                alive()
                bar.update(task, completed=number * steps + min(made, steps), seed=seed + number)

            report = _run(serving)(seed + number, steps=steps, faults=faults, progress=advance)
            reports.append(report)
            console.print(_line(report), soft_wrap=True)
            if report.violation:
                _explain(errors, report)
    if json_file is not None:
        json_file.write_text(json.dumps([report.as_dict() for report in reports], indent=2) + "\n")
    if any(report.violation for report in reports):
        raise typer.Exit(1)


def _line(report: SimulationReport) -> str:
    state = f"VIOLATION at step {report.made}" if report.violation else "ok"
    rate = report.made / report.real_s if report.real_s else 0.0
    return (
        f"seed {report.seed}: {state}; {report.made} operations, {report.decisions} decisions, "
        f"{report.counts.get('crash', 0)} crashes, {report.virtual_s:.1f} virtual s in {report.real_s:.1f} s "
        f"({rate:.0f} operations/s), digest {report.digest}"
    )


def _explain(console: Console, report: SimulationReport) -> None:
    for line in (
        f"seed {report.seed}, step {report.made}: {report.violation}",
        "the last operations:",
        *(f"  {step}" for step in report.last_steps),
        "the last steps of the event loop, with their virtual times:",
        *(f"  {decision}" for decision in report.last_decisions),
        "the same again:",
        f"  {report.command}",
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


AGAIN_S = 30.0
"""Interval of further interrupts by the watchdog, in seconds."""


@contextmanager
def watch(seconds: float) -> Iterator[Callable[[], None]]:
    """Raise Hang in the block after `seconds` of real time without a call of the yielded function."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Hang(f"no progress in {seconds} real seconds: a call blocks the event loop or never ends")

    def alive() -> None:
        # Repeated, because an exception is ignored in some callbacks, such as those of garbage collection.
        signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        alive()
        yield alive
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _run(serving: bool) -> Callable[..., SimulationReport]:
    if not serving:
        return simulate
    try:
        from tests.simulation.serving import simulate_serving
    except ImportError as error:
        raise typer.BadParameter(f"--serving needs vLLM in this environment: {error}") from error
    return simulate_serving


if __name__ == "__main__":
    app(prog_name="python -m tools.simulate")
