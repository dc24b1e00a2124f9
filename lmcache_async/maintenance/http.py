"""Requests of commands to a server that answers with JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httpx

from lmcache_async.config.validation import without_user
from lmcache_async.errors import ConfigError, TierUnavailableError

MAX_BYTES = 16 << 20
"""Maximum size of a response. A longer one is cut off."""


def parse_address(text: str, message: str) -> SplitResult:
    """Parse the address of a server, with or without `http://`. An invalid one is a ConfigError with this message."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(text if "://" in text else f"http://{text}")
        host = parts.hostname or ""
        host.encode("idna")  # raises ValueError here, not in the lookup of the name
        if parts.scheme in {"http", "https"} and host and " " not in parts.netloc and parts.port != 0:
            return parts
    raise ConfigError(message)


def open_client(token: str, token_name: str) -> httpx.AsyncClient:
    """Return a client that sends the token; open it with `async with`.

    Of the environment, SSL_CERT_FILE and SSL_CERT_DIR are used, but no proxies.
    """
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(f"{token_name} contains characters that a key cannot have, such as a line break")
    headers = {"Accept-Encoding": "identity"}  # a few bytes of a compressed response can fill the memory
    if token:
        headers["Authorization"] = f"Bearer {token}"
    return httpx.AsyncClient(
        headers=headers, timeout=None, trust_env=False, verify=httpx.create_ssl_context(trust_env=True)
    )


async def request_json(
    client: httpx.AsyncClient, method: str, url: str, body: Any = None, *, timeout_s: float, hint: str
) -> tuple[int, Any]:
    """Return the status code and the decoded response; its first characters if it is not JSON.

    `timeout_s` limits the time up to the last byte. `hint` is advice for an unreachable server. Raises
    TierUnavailableError if the server may answer later, otherwise ConfigError.
    """
    data = bytearray()
    content = None if body is None else json.dumps(body)  # in ASCII, also for text that has no UTF-8 form
    headers = {} if body is None else {"Content-Type": "application/json"}
    try:
        async with (
            asyncio.timeout(timeout_s),
            client.stream(method, url, content=content, headers=headers) as response,
        ):
            async for part in response.aiter_raw():
                data += part
                if len(data) > MAX_BYTES:
                    break
    except TimeoutError:
        raise TierUnavailableError(f"{without_user(url)}: no answer in {timeout_s:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _explained(without_user(url), error, hint) from error
    try:
        return response.status_code, json.loads(data)
    except (ValueError, RecursionError):
        return response.status_code, data[:500].decode("utf-8", "replace")


def _explained(url: str, error: Exception, hint: str) -> ConfigError | TierUnavailableError:
    cause: BaseException = error
    while inner := (
        cause.exceptions[0] if isinstance(cause, BaseExceptionGroup) else cause.__cause__ or cause.__context__
    ):
        cause = inner
    if isinstance(cause, ssl.SSLCertVerificationError):
        text = f"the server's certificate cannot be trusted: {cause.verify_message}"
        return ConfigError(
            f"{url}: {text}; set SSL_CERT_FILE to a file with the certificate of its authority"
        )
    is_protocol_error = isinstance(error, httpx.ProtocolError)
    is_closed = "disconnected" in str(error) or "peer closed" in str(error)  # before or during the response
    if is_protocol_error and not is_closed:
        return ConfigError(f"{url}: the server does not speak HTTP: {error!r}")
    number = cause.errno if isinstance(cause, OSError) and not isinstance(cause, ssl.SSLError) else None
    why = os.strerror(number) if number and number > 0 else cause
    return TierUnavailableError(f"no server answers at {url}: {why}; {hint}")
