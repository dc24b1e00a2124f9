"""HTTP requests of commands."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httpx

MAX_BYTES = 16 << 20
"""Maximum size of a response. A longer one is cut off."""


def parse_address(text: str) -> SplitResult:
    """Parse the address of a server, with or without `http://`.

    Raises:
        ValueError: It is not an HTTP address.
    """
    parts = urlsplit(text if "://" in text else f"http://{text}")
    host = parts.hostname or ""
    host.encode("idna")  # or the lookup of the name would fail in it
    if parts.scheme not in {"http", "https"} or not host or " " in parts.netloc or parts.port == 0:
        raise ValueError(text)
    return parts


def open_client(token: str) -> httpx.AsyncClient:
    """Return a client that sends a bearer token, unless it is "". Proxies of the environment are not used."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return httpx.AsyncClient(headers=headers, timeout=None, trust_env=False)


async def request(
    client: httpx.AsyncClient, method: str, url: str, *, timeout_s: float, body: Any = None
) -> tuple[int, bytes]:
    """Send a request and return the status code and the content.

    Args:
        client: The client.
        method: Method of the request.
        url: Address.
        timeout_s: Deadline, from the connection to the last byte of the response.
        body: Content of the request, sent as JSON.

    Raises:
        TimeoutError: The response was not complete in time.
        httpx.HTTPError: The request failed.
        httpx.InvalidURL: The address is invalid.
    """
    data = bytearray()
    content = None if body is None else json.dumps(body)  # in ASCII, also for text that has no UTF-8 form
    headers = {} if body is None else {"Content-Type": "application/json"}
    async with (
        asyncio.timeout(timeout_s),
        client.stream(method, url, content=content, headers=headers) as response,
    ):
        async for part in response.aiter_bytes():
            data += part
            if len(data) > MAX_BYTES:
                break
    return response.status_code, bytes(data)
