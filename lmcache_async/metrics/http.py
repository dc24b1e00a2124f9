"""Requests to the status endpoint: access control and responses, without I/O."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from lmcache_async.config.files import read_secret_file
from lmcache_async.config.values import is_loopback
from lmcache_async.errors import ConfigError
from lmcache_async.metrics.charts import Sample, Source
from lmcache_async.metrics.samples import CONTENT_TYPE

MIN_TOKEN_CHARACTERS = 16

_OPTION = "http.token_file"
_TEXT = "text/plain; charset=utf-8"
_JSON = "application/json"
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
"""Content types of the files of the page, by the end of their name."""
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:;"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers of every response: no external resources, no framing, no caching."""

_FRESH_S = 0.2
"""Seconds for which a response is reused, so that the load on the loop does not grow with the number of readers."""


class AccessTokens:
    """Access tokens, kept as SHA-256 digests. If there are none, every request is allowed."""

    def __init__(self, digests: Sequence[bytes] = ()) -> None:
        self._digests = tuple(digests)

    @classmethod
    def read(cls, file: Path | None) -> Self:
        """Read a file with one token per line. Lines that begin with # are comments. No error contains a token."""
        if file is None:
            return cls()
        digests = []
        text = read_secret_file(file, _OPTION).decode("utf-8", "replace")
        for number, line in enumerate(text.splitlines(), 1):
            token = line.strip()
            if not token or token.startswith("#"):
                continue
            if len(token) < MIN_TOKEN_CHARACTERS or not token.isascii() or " " in token:
                raise ConfigError(
                    f"{_OPTION}: {file}, line {number}: a token must have at least {MIN_TOKEN_CHARACTERS}"
                    " ASCII characters and no space"
                )
            digests.append(_digest(token))
        if not digests:
            raise ConfigError(f"{_OPTION}: {file} contains no token; generate one with: openssl rand -hex 32")
        return cls(digests)

    def allow(self, authorization: str) -> bool:
        """Whether this header grants access: `Bearer TOKEN`, or `Basic` with the token as password."""
        if not self._digests:
            return True
        given = _digest(_token_of(authorization))
        # All are compared, so that the time does not depend on which one matches.
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        return any(matches)


def is_loopback_name(host_header: str) -> bool:
    """Whether the `Host` header names the loopback. Any other name indicates DNS rebinding."""
    try:
        name = urlsplit(f"//{host_header}").hostname
    except ValueError:
        return False
    return name is not None and (is_loopback(name) or name.endswith(".localhost"))


def _token_of(authorization: str) -> str:
    scheme, _, credentials = authorization.strip().partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip()
    if scheme.lower() == "basic":
        try:
            decoded = base64.b64decode(credentials.strip(), validate=True)
        except (binascii.Error, ValueError):
            return ""
        return decoded.decode("utf-8", "replace").partition(":")[2]
    return ""


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True, slots=True)
class Response:
    """Response to a request."""

    status: int
    body: bytes
    kind: str = _TEXT
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Responder:
    """Responds to requests for one source.

    `loopback` means that only this machine can connect; requests with another host name are then rejected.
    `interval_s` is the time between two samples.
    """

    source: Source
    samples: Sequence[Sample]
    tokens: AccessTokens
    loopback: bool
    interval_s: float
    clock: Callable[[], float] = time.monotonic
    _page: dict[str, Response] = field(default_factory=lambda: _page(), init=False)
    _fresh: dict[str, tuple[float, Response]] = field(default_factory=dict, init=False)

    def respond(self, method: str, path: str, headers: Mapping[str, str]) -> Response:
        """Return the response. `headers` must be case-insensitive."""
        if self.loopback and not is_loopback_name(headers.get("Host", "")):
            return _error(421, "this server does not serve that host name; use 127.0.0.1 or localhost")
        if method not in {"GET", "HEAD"}:
            return _error(405, "only GET and HEAD are allowed", {"Allow": "GET, HEAD"})
        if path == "/healthz":
            return Response(200, b"ok\n")
        if not self.tokens.allow(headers.get("Authorization", "")):
            return _error(
                401,
                "a token is required: Authorization: Bearer TOKEN, or the token as the password of any user",
                {"WWW-Authenticate": 'Basic realm="lmcache-async", charset="UTF-8"'},
            )
        if path in self._page:
            return self._page[path]
        if path == "/metrics":
            return self._recent(path, lambda: Response(200, self.source.metrics(), CONTENT_TYPE))
        if path == "/status.json":
            return self._recent(path, lambda: Response(200, self._status(), _JSON))
        return _error(404, "the paths are /, /status.json, /metrics and /healthz")

    def _recent(self, path: str, make: Callable[[], Response]) -> Response:
        made_at, response = self._fresh.get(path, (0.0, None))
        if response is None or self.clock() - made_at > _FRESH_S:
            response = make()
            self._fresh[path] = (self.clock(), response)
        return response

    def _status(self) -> bytes:
        samples = [*self.samples]
        charts = [asdict(chart) for chart in self.source.charts(samples)] if len(samples) > 1 else []
        for chart in charts:
            for series in chart["series"]:
                series["values"] = [_short(value) for value in series["values"]]
        status: dict[str, Any] = self.source.status()
        status["charts"] = {"interval_s": self.interval_s, "list": charts}
        return json.dumps(status, separators=(",", ":"), allow_nan=False).encode()


def _error(status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    return Response(status, f"{text}\n".encode(), headers=headers or {})


def _short(value: float | None) -> float | None:
    """Round to four digits, which are enough for a chart."""
    return None if value is None else float(f"{value:.4g}")


def _page() -> dict[str, Response]:
    """Return the files of the page by path."""
    found = {}
    for file in (files("lmcache_async.metrics") / "page").iterdir():
        kind = _TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            path = "/" if file.name == "index.html" else f"/{file.name}"
            found[path] = Response(200, file.read_bytes(), f"{kind}; charset=utf-8")
    return found
