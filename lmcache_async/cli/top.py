"""`lmcache-async top`: shows the status page of an engine or a daemon in the terminal."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urljoin, urlsplit

import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from lmcache_async.cli.output import say
from lmcache_async.cli.top_view import render
from lmcache_async.config.files import read_secret_file
from lmcache_async.config.sources import PREFIX, TOKEN
from lmcache_async.errors import ConfigError

MISSING, REFUSED = 1, 2
"""Exit codes: no answer; the endpoint rejected the request or an option is invalid."""
TIMEOUT_S = 5.0
"""Deadline of a request, from the connection to the last byte of the response."""
MAX_BYTES = 16 << 20
"""Maximum size of a response."""


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
        self.url = url if "://" in url else f"http://{url}"
        try:
            parts = urlsplit(self.url)
            self._port = parts.port
            (parts.hostname or "").encode("idna")  # or the lookup of the name would fail in it
            path = urljoin(parts.path or "/", "status.json")
            self.path = quote(path, safe="/%:@!$&'()*+,;=~", errors="surrogateescape")
        except ValueError:
            raise _wrong(url) from None
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise _wrong(url)
        self._encrypted, self._host = parts.scheme == "https", parts.hostname
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
            code, content = self._get()
        except ssl.SSLCertVerificationError as error:
            text = f"its certificate cannot be trusted ({error.verify_message}); SSL_CERT_FILE may name one"
            raise StatusError(f"{self.url}: {text}", refused=True) from None
        except TimeoutError:
            raise StatusError(f"{self.url} gave no answer in {self._timeout_s:g} s") from None
        except OSError as error:
            text = f"nothing answers at {self.url}: {error.strerror or error}; is http.listen set there?"
            raise StatusError(text) from None
        except http.client.InvalidURL:
            raise _wrong(self.url) from None
        except http.client.HTTPException as error:
            raise StatusError(f"{self.url} does not speak HTTP: {error!r}", refused=True) from None
        if code in {401, 403}:
            wanted = "another token" if self._token else "a token"
            text = f"{self.url} wants {wanted}: set LMCACHE_ASYNC_TOKEN or --token-file"
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

    def _get(self) -> tuple[int, bytes]:
        connect = http.client.HTTPSConnection if self._encrypted else http.client.HTTPConnection
        connection = connect(self._host, self._port, timeout=self._timeout_s)
        late = threading.Event()
        try:
            connection.connect()
            # The timeout of the socket is per read. This ends a response that arrives byte by byte.
            timer = threading.Timer(self._timeout_s, _end, (connection.sock, late))
            timer.daemon = True
            timer.start()
            try:
                headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
                connection.request("GET", self.path, headers=headers)
                with connection.getresponse() as response:
                    found = response.status, response.read(MAX_BYTES)
            finally:
                timer.cancel()
        except (OSError, http.client.HTTPException) as error:
            raise (TimeoutError() if late.is_set() else error) from None
        finally:
            connection.close()
        if late.is_set():  # a body that was cut off
            raise TimeoutError
        return found


def _end(connection: socket.socket, late: threading.Event) -> None:
    late.set()
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _wrong(url: str) -> StatusError:
    return StatusError(f"{url}: expected an address such as http://127.0.0.1:7421", refused=True)


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
        raise typer.Exit(REFUSED if error.refused else MISSING) from None
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
                notice = Text(f"{error}; what is shown is old", style="bold red")
            live.update(_drawn(client, status, console.width, notice=notice), refresh=True)
