"""Reads status.json; whatever is in the way becomes one sentence."""

from __future__ import annotations

import http.client
import io
import json
import socket
import ssl
import time
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from lmcache_async.config.files import read_secret_file
from lmcache_async.errors import ConfigError

TIMEOUT_S = 5.0
"""For connecting, and again for the whole of an answer."""
MAX_BYTES = 16 << 20
"""More than that no status page says."""


class StatusError(Exception):
    """There is nothing to show, and why.

    Attributes:
        refused: It will be so again until somebody changes something.
    """

    def __init__(self, text: str, *, refused: bool = False) -> None:
        super().__init__(text)
        self.refused = refused


class StatusClient:
    """Reads one endpoint. Proxies of the environment are not used.

    Args:
        url: With or without `http://` and a path.
        token: Said if it is there.
        token_file: It is read from there.
        timeout_s: Longest wait for a connection, and for an answer from its first byte to its last.

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
            (parts.hostname or "").encode("idna")  # or the look-up of the name would fail in it
            folder = parts.path if parts.path.endswith("/") else parts.path.rpartition("/")[0] + "/"
            self._path = quote(f"{folder}status.json", safe="/%:@!$&'()*+,;=~", errors="surrogateescape")
        except ValueError:
            raise _wrong(url) from None
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise _wrong(url)
        self._encrypted, self._host = parts.scheme == "https", parts.hostname
        self._timeout_s = timeout_s
        self._token = _from_file(token_file) if token_file is not None else token.strip()
        if not (self._token.isascii() and self._token.isprintable()):
            raise StatusError("the token has characters that no token has", refused=True)

    def read(self) -> dict[str, Any]:
        """What is told now.

        Raises:
            StatusError: There is no answer, or none that can be read.
        """
        try:
            status, content = self._get()
        except ssl.SSLCertVerificationError as error:
            text = f"{self.url}: its certificate cannot be trusted ({error.verify_message}); SSL_CERT_FILE may name one"
            raise StatusError(text, refused=True) from None
        except TimeoutError:
            raise StatusError(f"{self.url} gave no answer in {self._timeout_s:g} s") from None
        except OSError as error:
            text = f"nothing answers at {self.url}: {error.strerror or error}; is http.listen set there?"
            raise StatusError(text) from None
        except http.client.InvalidURL:
            raise _wrong(self.url) from None
        except http.client.HTTPException as error:
            raise StatusError(f"{self.url} does not speak HTTP: {error!r}", refused=True) from None
        if status in {401, 403}:
            how = "LMCACHE_ASYNC_TOKEN or --token-file gives one"
            said = "another token" if self._token else "a token"
            raise StatusError(f"{self.url} wants {said}: {how}", refused=True)
        if status != 200:
            raise StatusError(f"{self.url} answered {status}; it is no status page", refused=status < 500)
        try:
            told = json.loads(content)
        except (ValueError, RecursionError):
            told = None
        if not isinstance(told, dict) or told.get("kind") not in {"engine", "daemon"}:
            raise StatusError(f"{self.url} is no status page of lmcache-async", refused=True)
        return told

    def _get(self) -> tuple[int, bytes]:
        connect = http.client.HTTPSConnection if self._encrypted else http.client.HTTPConnection
        connection = connect(self._host, self._port, timeout=self._timeout_s)
        try:
            headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
            connection.connect()
            end = time.monotonic() + self._timeout_s
            connection.response_class = partial(_Answer, end=end)  # type: ignore[assignment]  # it is only called
            connection.request("GET", self._path, headers=headers)
            with connection.getresponse() as answer:
                return answer.status, answer.read(MAX_BYTES)
        finally:
            connection.close()


class _Answer(http.client.HTTPResponse):
    """An answer that is there as a whole by a moment: `end`, on the monotonic clock."""

    def __init__(self, sock: socket.socket, *given: Any, end: float, **named: Any) -> None:
        super().__init__(sock, *given, **named)
        self.fp = io.BufferedReader(_Timely(sock, self.fp.detach(), end))


class _Timely(io.RawIOBase):
    """Reads a socket until a moment, however slowly it tells: a time-out of its own is for each piece."""

    def __init__(self, sock: socket.socket, raw: io.RawIOBase, end: float) -> None:
        self._socket, self._raw, self._end = sock, raw, end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


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
        raise StatusError(f"--token-file: {file} holds no token", refused=True)
    return token
