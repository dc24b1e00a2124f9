"""What commands say: results to the one stream, errors to the other, and the codes that they end with."""

from __future__ import annotations

import json
from typing import Annotated, Any, NoReturn

import typer

PROBLEM = 1
"""The command ran, and what it looked at is wrong."""
USAGE = 2
"""The command could not run: an option, a file or a package is not as it needs it."""

JSONFlag = Annotated[bool, typer.Option("--json", help="Print JSON in place of text.")]


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))


def refuse(error: Exception | str) -> NoReturn:
    """Say why the command could not run, and end."""
    typer.echo(str(error), err=True)
    raise typer.Exit(USAGE) from None
