"""`lmcache-async top`: shows the status page of an engine or a daemon in the terminal."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urljoin

import httpx
import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from lmcache_async.cli.output import PROBLEM, USAGE, say
from lmcache_async.cli.top_view import render
from lmcache_async.config.files import read_secret_file
from lmcache_async.config.sources import PREFIX, TOKEN
from lmcache_async.errors import ConfigError
from lmcache_async.maintenance.http import open_client, parse_address, request

TIMEOUT_S = 5.0
"""Deadline of a request, from the connection to the last byte of the response."""


class StatusError(Exception):
    """The status cannot be shown.

    Attributes:
        refused: Whether a repetition would fail too.
    """

    def __init__(self, text: str, *, refused: bool = False) -> None:
        super().__init__(text)
        self.refused = refused


class StatusClient:
    """Reads `status.json` of one endpoint. Proxies of the environment are not used.

    Args:
        url: Address, with or without `http://` and a path.
        token: Access token, if one is required.
        token_file: File with the token, instead of `token`.
        timeout_s: Deadline of a request.

    Raises:
        StatusError: The address or the file cannot be used.
    """

    def __init__(
        self, url: str, *, token: str = "", token_file: Path | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        try:
            parts = parse_address(url)
        except ValueError:
            text = f"{url}: expected an address such as http://127.0.0.1:7421"
            raise StatusError(text, refused=True) from None
        self.url = parts.geturl()
        self._parts = parts
        path = urljoin(parts.path or "/", "status.json")
        self.path = quote(path, safe="/%:@!$&'()*+,;=~", errors="surrogateescape")
        self._address = f"{parts.scheme}://{parts.netloc}{self.path}"
        self._timeout_s = timeout_s
        self._token = _from_file(token_file) if token_file is not None else token.strip()
        if not (self._token.isascii() and self._token.isprintable()):
            raise StatusError("the token contains invalid characters", refused=True)

    def read(self) -> dict[str, Any]:
        """Return the current status.

        Raises:
            StatusError: There is no answer, or it is not a status.
        """
        try:
            code, content = asyncio.run(self._get())
        except TimeoutError:
            raise StatusError(f"{self.url} gave no answer in {self._timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._explained(error) from None
        if code in {401, 403}:
            wanted = "another token" if self._token else "a token"
            text = f"{self.url} requires {wanted}: set LMCACHE_ASYNC_TOKEN or --token-file"
            raise StatusError(text, refused=True)
        if code != 200:
            raise StatusError(f"{self.url} answered {code}; it is not a status page", refused=code < 500)
        try:
            status = json.loads(content)
        except (ValueError, RecursionError):
            status = None
        if not isinstance(status, dict) or status.get("kind") not in {"engine", "daemon"}:
            raise StatusError(f"{self.url} is not a status page of lmcache-async", refused=True)
        return status

    async def _get(self) -> tuple[int, bytes]:
        async with open_client(self._token) as client:
            return await request(client, "GET", self._address, timeout_s=self._timeout_s)

    def _explained(self, error: Exception) -> StatusError:
        cause: BaseException = error
        while inner := (
            cause.exceptions[0]
            if isinstance(cause, BaseExceptionGroup)
            else cause.__cause__ or cause.__context__
        ):
            cause = inner
        if isinstance(cause, ssl.SSLCertVerificationError):
            text = f"its certificate cannot be trusted ({cause.verify_message}); SSL_CERT_FILE may name one"
            return StatusError(f"{self.url}: {text}", refused=True)
        if isinstance(error, httpx.ProtocolError | httpx.DecodingError):
            # httpx has one error for a connection that is closed without an answer and after an incomplete one.
            if "disconnected" not in str(error):
                return StatusError(f"{self.url} does not speak HTTP: {error!r}", refused=True)
            if self._answers_without_http():
                return StatusError(f"{self.url} does not speak HTTP", refused=True)
        number = cause.errno if isinstance(cause, OSError) and not isinstance(cause, ssl.SSLError) else None
        why = os.strerror(number) if number and number > 0 else cause
        return StatusError(f"nothing answers at {self.url}: {why}; is http.listen set there?")

    def _answers_without_http(self) -> bool:
        """Whether a request on a second connection is answered with other bytes than HTTP's."""
        if self._parts.scheme != "http":
            return False
        address = (self._parts.hostname or "", self._parts.port or 80)
        try:
            with socket.create_connection(address, self._timeout_s) as connection:
                connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
                return not b"HTTP/".startswith(connection.recv(5))
        except OSError:
            return False


def _from_file(file: Path) -> str:
    try:
        text = read_secret_file(file, "--token-file").decode("utf-8", "replace")
    except ConfigError as error:
        raise StatusError(str(error), refused=True) from None
    lines = [line.strip() for line in text.splitlines()]
    token = next((line for line in lines if line and not line.startswith("#")), "")
    if not token:
        raise StatusError(f"--token-file: {file} contains no token", refused=True)
    return token


def top_command(
    url: Annotated[
        str, typer.Argument(help="Address of the status page as logged, such as http://127.0.0.1:7421.")
    ],
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two updates.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print the status once and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one line per update.")] = False,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the access token, if one is required.", dir_okay=False)
    ] = None,
    token: Annotated[
        str, typer.Option(envvar=PREFIX + TOKEN, help="The access token; prefer the variable or a file.")
    ] = "",
) -> None:
    """Show hits by tier, transfer rates, queues, leases, breakers and recent requests, until Ctrl-C.

    Exits with 1 if there is no answer to the first request, with 2 if the endpoint rejects the request or an
    option is invalid. docs/status.md describes how to enable the endpoint.
    """
    try:
        client = StatusClient(url, token=token, token_file=token_file)
        status = client.read()
        if not (once or as_json):
            watch(client, status, Console(highlight=False), lambda: time.sleep(interval))
        while True:
            if as_json:
                typer.echo(json.dumps(status, separators=(",", ":")))
            else:
                console = Console(highlight=False)
                console.print(_drawn(client, status, console.width))
            if once:
                return
            time.sleep(interval)
            status = client.read()
    except StatusError as error:
        say(error, to_stderr=True)
        raise typer.Exit(USAGE if error.refused else PROBLEM) from None
    except KeyboardInterrupt:
        pass


def _drawn(
    client: StatusClient, status: dict[str, Any], width: int, *, notice: Text | None = None
) -> RenderableType:
    """Return the status as it is shown.

    Raises:
        StatusError: It has another form than in this version.
    """
    try:
        return render(status, width=width, notice=notice)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        text = f"{client.url} speaks another version: use that version's lmcache-async top, or --json"
        raise StatusError(text, refused=True) from None


def watch(client: StatusClient, status: dict[str, Any], console: Console, pause: Callable[[], None]) -> None:
    """Show the status until interrupted, also if the endpoint does not answer for a while.

    Raises:
        StatusError: The endpoint rejects requests, or has another version.
    """
    with Live(
        _drawn(client, status, console.width), console=console, screen=True, auto_refresh=False
    ) as live:
        while True:
            pause()
            notice = None
            try:
                status = client.read()
            except StatusError as error:
                if error.refused:
                    raise
                notice = Text(f"{error}; the status shown is old", style="bold red")
            live.update(_drawn(client, status, console.width, notice=notice), refresh=True)
