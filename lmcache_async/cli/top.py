"""`lmcache-async top`: a running engine or daemon in the terminal, by what its status page serves."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from lmcache_async.cli.output import say
from lmcache_async.cli.top_client import StatusClient, StatusError
from lmcache_async.cli.top_view import render
from lmcache_async.config.sources import PREFIX, TOKEN

MISSING, REFUSED = 1, 2
"""How it ends: nothing there, or no way in."""


def top_command(
    url: Annotated[
        str,
        typer.Argument(
            help="Address of the status page, as the log names it, such as http://127.0.0.1:7421."
        ),
    ],
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, print it and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as JSON, one line each look.")
    ] = False,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token, where one is needed.", dir_okay=False)
    ] = None,
    token: Annotated[
        str, typer.Option(envvar=PREFIX + TOKEN, help="The token; better by its variable or by file.")
    ] = "",
) -> None:
    """Show hits by tier, GB/s, queues, leases, breakers and the last requests, until Ctrl-C.

    Ends with 1 when nothing answers there at the first look, with 2 when it refuses or an option is wrong.
    docs/status.md says how to have an engine serve it.
    """
    try:
        client = StatusClient(url, token=token, token_file=token_file)
        told = client.read()
        if once or as_json:
            _print(client, told, interval, once=once, as_json=as_json)
        else:
            watch(client, told, Console(highlight=False), lambda: time.sleep(interval))
    except StatusError as error:
        say(error, to_stderr=True)
        raise typer.Exit(REFUSED if error.refused else MISSING) from None
    except KeyboardInterrupt:
        pass


def _print(
    client: StatusClient, told: dict[str, object], interval: float, *, once: bool, as_json: bool
) -> None:
    while True:
        if as_json:
            typer.echo(json.dumps(told, separators=(",", ":")))
        else:
            console = Console(highlight=False)
            console.print(_drawn(client, told, console.width))
        if once:
            return
        time.sleep(interval)
        told = client.read()


def _drawn(
    client: StatusClient, told: dict[str, object], width: int, *, notice: Text | None = None
) -> RenderableType:
    """What is told as it is shown, in so many columns.

    Raises:
        StatusError: It has not the form that it has here.
    """
    try:
        return render(told, width=width, notice=notice)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        text = f"{client.url} speaks another version: use that version's lmcache-async top, or --json"
        raise StatusError(text, refused=True) from None


def watch(client: StatusClient, told: dict[str, object], console: Console, pause: Callable[[], None]) -> None:
    """Goes on when there is no answer for a while: an engine that starts again is shown again.

    Raises:
        StatusError: It refuses, or speaks another version.
    """
    with Live(_drawn(client, told, console.width), console=console, screen=True, auto_refresh=False) as live:
        while True:
            pause()
            shown: RenderableType
            try:
                told = client.read()
                shown = _drawn(client, told, console.width)
            except StatusError as error:
                if error.refused:
                    raise
                notice = Text(f"{error}; what is shown is old", style="bold red")
                shown = _drawn(client, told, console.width, notice=notice)
            live.update(shown, refresh=True)
