"""`lmcache-async top`: shows the status page of an engine or a daemon in the terminal."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urljoin

import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text
from typer import Argument, Option

from lmcache_async.cli.output import PROBLEM, refuse
from lmcache_async.cli.top_view import render
from lmcache_async.config.files import read_secret_file
from lmcache_async.config.sources import PREFIX, TOKEN
from lmcache_async.errors import ConfigError, TierUnavailableError
from lmcache_async.maintenance.http import open_client, parse_address, request_json

TIMEOUT_S = 5.0


class StatusClient:
    """Reads `status.json` of one endpoint."""

    def __init__(
        self, url: str, *, token: str = "", token_file: Path | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        parts = parse_address(url, f"{url}: expected an address such as http://127.0.0.1:7421")
        self.url = parts.geturl()
        path = urljoin(parts.path or "/", "status.json")
        self.path = quote(path, safe="/%:@!$&'()*+,;=~", errors="surrogateescape")
        self._origin = f"{parts.scheme}://{parts.netloc}"
        self._token = token.strip() if token_file is None else _from_file(token_file)
        self._timeout_s = timeout_s

    def read(self) -> dict[str, Any]:
        """Return the current status.

        Raises:
            TierUnavailableError: There is no answer for now.
            ConfigError: The address or the token is wrong.
        """

        async def get() -> tuple[int, Any]:
            url, hint = self._origin + self.path, "check that http.listen is set there"
            async with open_client(self._token, "the token") as client:
                return await request_json(client, "GET", url, timeout_s=self._timeout_s, hint=hint)

        code, status = asyncio.run(get())
        if code in {401, 403}:
            wanted = "another token" if self._token else "a token"
            raise ConfigError(f"{self.url} requires {wanted}: set LMCACHE_ASYNC_TOKEN or --token-file")
        if code != 200:
            kind = ConfigError if code < 500 else TierUnavailableError
            raise kind(f"{self.url} answered {code}; it is not a status page")
        if not isinstance(status, dict) or status.get("kind") not in {"engine", "daemon"}:
            raise ConfigError(f"{self.url} is not a status page of lmcache-async")
        return status


def _from_file(file: Path) -> str:
    text = read_secret_file(file, "--token-file").decode("utf-8", "replace")
    lines = [line.strip() for line in text.splitlines()]
    token = next((line for line in lines if line and not line.startswith("#")), "")
    if not token:
        raise ConfigError(f"--token-file: {file} contains no token")
    return token


def top_command(
    url: Annotated[
        str,
        Argument(metavar="URL", help="Address of the status page as logged, such as http://127.0.0.1:7421."),
    ],
    interval: Annotated[float, Option(min=0.2, help="Seconds between two updates.")] = 2.0,
    once: Annotated[bool, Option("--once", help="Print the status once and exit.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print JSON, one line per update.")] = False,
    token_file: Annotated[
        Path | None, Option(help="File with the access token, if one is required.", dir_okay=False)
    ] = None,
    token: Annotated[
        str, Option(envvar=PREFIX + TOKEN, help="The access token; prefer the variable or a file.")
    ] = "",
) -> None:
    """Show hits by tier, transfer rates, queues, leases, breakers and recent requests, until Ctrl-C.

    Exits with 1 if there is no answer to the first request, with 2 if the endpoint rejects the request or an
    option is invalid. docs/status.md describes how to enable the endpoint.
    """
    console = Console(highlight=False)
    try:
        client = StatusClient(url, token=token, token_file=token_file)
        status = client.read()
        if as_json:
            typer.echo(json.dumps(status, separators=(",", ":")))
            while not once:
                time.sleep(interval)
                typer.echo(json.dumps(client.read(), separators=(",", ":")))
        elif once:
            console.print(_drawn(client, status, console.width))
        else:
            watch(client, status, console, lambda: time.sleep(interval))
    except TierUnavailableError as error:
        refuse(error, PROBLEM)
    except ConfigError as error:
        refuse(error)
    except KeyboardInterrupt:
        pass


def _drawn(
    client: StatusClient, status: dict[str, Any], width: int, *, notice: Text | None = None
) -> RenderableType:
    """Return the status as it is shown."""
    try:
        return render(status, width=width, notice=notice)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        raise ConfigError(
            f"{client.url} has the format of another version: use the lmcache-async top of that version, or --json"
        ) from None


def watch(client: StatusClient, status: dict[str, Any], console: Console, pause: Callable[[], None]) -> None:
    """Show the status until interrupted, also if the endpoint does not answer for a while."""
    with Live(
        _drawn(client, status, console.width), console=console, screen=True, auto_refresh=False
    ) as live:
        while True:
            pause()
            notice = None
            try:
                status = client.read()
            except TierUnavailableError as error:
                notice = Text(f"{error}; the status shown is old", style="bold red")
            live.update(_drawn(client, status, console.width, notice=notice), refresh=True)
