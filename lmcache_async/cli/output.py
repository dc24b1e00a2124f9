"""Output of the commands: results on stdout, errors and progress on stderr, and exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from typer import Option

PASSED, PROBLEM, USAGE, IN_USE, STOPPED = 0, 1, 2, 3, 130
"""Exit codes: success; the command found a problem; it could not run; in use by another process; Ctrl-C."""

JSONFlag = Annotated[bool, Option("--json", help="Print JSON instead of text.")]


def plain(text: object) -> str:
    """Replace unprintable characters. Names are untrusted and may contain terminal escape sequences."""
    return "".join(letter if letter.isprintable() else "�" for letter in str(text))


def say(text: object, *, to_stderr: bool = False) -> None:
    """Print text without unprintable characters."""
    _write("\n".join(map(plain, str(text).split("\n"))), to_stderr=to_stderr)


def print_json(value: Any) -> None:
    """Print a value as JSON: a dataclass as its attributes, other types as text."""
    _write(json.dumps(value, indent=2, default=lambda one: vars(one) if is_dataclass(one) else str(one)))


def _write(text: str, *, to_stderr: bool = False) -> None:
    try:
        typer.echo(text, err=to_stderr)
    except BrokenPipeError:
        Console().on_broken_pipe()  # exits with 1, without a message
    except OSError as error:
        if to_stderr:
            raise
        refuse(f"the output cannot be written: {error.strerror}")


def refuse(error: Exception | str, code: int = USAGE) -> NoReturn:
    """Print why the command could not run, and exit."""
    with contextlib.suppress(OSError):  # the exit code is the same if stderr cannot be written
        say(error, to_stderr=True)
    raise typer.Exit(code) from None


def end_process(code: int) -> NoReturn:
    """End the process without waiting for its threads, which may hang."""
    try:
        Console(stderr=True).show_cursor()  # hidden while progress is shown
        sys.stdout.flush()
    finally:  # also if neither can be written
        os._exit(code)


@contextlib.contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a command as Ctrl-C does, with the removal of its files and the normal screen."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        handler = signal.getsignal(signal.SIGINT)  # of the event loop, if one runs
        # SIGINT is ignored in a background command of a shell script.
        (handler if callable(handler) else signal.default_int_handler)(number, frame)

    numbers = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str, int, int, int], None]]:
    """Yield a function that shows the progress of items: their kind, number done, total number, and bytes.

    The progress bar is on stderr and cleared at the end. Nothing is shown if stderr is not a terminal.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[size]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, size="")

        def show(what: str, done: int, total: int, nbytes: int) -> None:
            size = decimal(nbytes) if nbytes else ""
            if not done:  # other items begin; without a reset the task stays finished
                bar.reset(task)
            bar.update(task, description=what, completed=done, total=total, size=size)

        yield show


def human(nbytes: float) -> str:
    """Format a size with at most four digits. --json has all digits."""
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.1f} {unit}"


def number(count: int, noun: str) -> str:
    """Format a count with its noun, such as `1 record` or `2 records`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
