"""What commands say: results to the one stream, errors to the other, and the codes that they end with."""

from __future__ import annotations

import json
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text

PROBLEM = 1
"""The command ran, and what it looked at is wrong."""
USAGE = 2
"""The command could not run: an option, a file or a package is not as it needs it."""

JSONFlag = Annotated[bool, typer.Option("--json", help="Print JSON in place of text.")]


def plain(text: object) -> str:
    """Without what a terminal would obey and what cannot be encoded: names are other people's."""
    return "".join(letter if letter.isprintable() else "�" for letter in str(text))


def plain_lines(text: object) -> str:
    """The same, with the ends of its lines."""
    return "\n".join(plain(line) for line in str(text).split("\n"))


def say(text: object, *, to_stderr: bool = False) -> None:
    """Lines as they are: never folded, and nothing in them is a markup, an emoji or an order to the terminal."""
    Console(stderr=to_stderr).print(Text(plain_lines(text)), soft_wrap=True)


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))


def refuse(error: Exception | str) -> NoReturn:
    """Say why the command could not run, and end."""
    typer.echo(plain_lines(error), err=True)
    raise typer.Exit(USAGE) from None
