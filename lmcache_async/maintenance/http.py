"""Requests of commands to a server that answers with JSON."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from typing import Any, Self
from urllib.parse import SplitResult, urlsplit

import httpx

from lmcache_async.errors import TierUnavailableError

MAX_BYTES = 16 << 20
"""Maximum size of a response. A longer one is cut off."""


class RequestError(TierUnavailableError):
    """A request has no usable response. A repetition of a `permanent` one would fail too."""

    def __init__(self, text: str, *, permanent: bool = False) -> None:
        super().__init__(text)
        self.permanent = permanent


def parse_address(text: str) -> SplitResult:
    """Parse the address of a server, with or without `http://`."""
    parts = urlsplit(text if "://" in text else f"http://{text}")
    host = parts.hostname or ""
    host.encode("idna")  # or the lookup of the name would fail in it
    if parts.scheme not in {"http", "https"} or not host or " " in parts.netloc or parts.port == 0:
        raise ValueError(text)
    return parts


class JSONClient:
    """A connection pool to one server, as an async context. Proxies of the environment are not used.

    `timeout_s` limits a request up to the last byte of its response. `hint` is advice for an unreachable server.
    """

    def __init__(self, base: str, *, token: str, timeout_s: float, hint: str) -> None:
        if not (token.isascii() and token.isprintable()):
            raise ValueError("the token contains invalid characters")
        self._base = base
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._timeout_s = timeout_s
        self._hint = hint

    async def __aenter__(self) -> Self:
        self._client = httpx.AsyncClient(headers=self._headers, timeout=None, trust_env=False)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Return the status code and the decoded response; its first characters if it is not JSON."""
        url, data = self._base + path, bytearray()
        content = None if body is None else json.dumps(body)  # in ASCII, also for text that has no UTF-8 form
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._client.stream(method, url, content=content, headers=headers) as response,
            ):
                async for part in response.aiter_bytes():
                    data += part
                    if len(data) > MAX_BYTES:
                        break
        except TimeoutError:
            raise RequestError(f"{url}: no answer in {self._timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._explained(url, error) from error
        try:
            return response.status_code, json.loads(data)
        except (ValueError, RecursionError):
            return response.status_code, data[:500].decode("utf-8", "replace")

    def _explained(self, url: str, error: Exception) -> RequestError:
        cause: BaseException = error
        while inner := (
            cause.exceptions[0]
            if isinstance(cause, BaseExceptionGroup)
            else cause.__cause__ or cause.__context__
        ):
            cause = inner
        if isinstance(cause, ssl.SSLCertVerificationError):
            text = f"its certificate cannot be trusted ({cause.verify_message}); SSL_CERT_FILE may name one"
            return RequestError(f"{url}: {text}", permanent=True)
        is_protocol_error = isinstance(error, httpx.ProtocolError | httpx.DecodingError)
        if is_protocol_error and "disconnected" not in str(error):
            return RequestError(f"{url}: the server does not speak HTTP: {error!r}", permanent=True)
        number = cause.errno if isinstance(cause, OSError) and not isinstance(cause, ssl.SSLError) else None
        why = os.strerror(number) if number and number > 0 else cause
        return RequestError(f"no server answers at {url}: {why}; {self._hint}")
