"""Output of the commands: results on stdout, errors on stderr, and exit codes."""

from __future__ import annotations

import json
from typing import Annotated, Any, NoReturn

import typer

PASSED, PROBLEM, USAGE, IN_USE, STOPPED = 0, 1, 2, 3, 130
"""Exit codes: success; the command found a problem; it could not run; in use by another process; Ctrl-C."""

JSONFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def plain(text: object) -> str:
    """Replace unprintable characters. Names come from others and may contain terminal escape sequences."""
    return "".join(letter if letter.isprintable() else "�" for letter in str(text))


def plain_lines(text: object) -> str:
    """`plain` for each line."""
    return "\n".join(plain(line) for line in str(text).split("\n"))


def say(text: object, *, to_stderr: bool = False) -> None:
    typer.echo(plain_lines(text), err=to_stderr)


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))


def refuse(error: Exception | str, code: int = USAGE) -> NoReturn:
    """Print why the command could not run, and exit."""
    say(error, to_stderr=True)
    raise typer.Exit(code) from None


def human(nbytes: int) -> str:
    """Format a size with one decimal. --json has all digits."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def number(count: int, noun: str) -> str:
    """`1 record`, `2 records`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
