"""An HTTP client on a plain socket, which returns the complete response of a server."""

from __future__ import annotations

import asyncio
import json
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

DEADLINE_S = 150


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


async def ask(
    url: str,
    path: str = "/",
    *,
    method: str = "GET",
    headers: dict[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
) -> Response:
    """Send one request and read until the server closes the connection."""
    parts = urlsplit(url)
    given = {"Host": parts.netloc, **(headers or {})}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items()), "", ""]
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection(
            parts.hostname, parts.port, ssl=tls, server_hostname=parts.hostname if tls else None
        )
        try:
            writer.write("\r\n".join(lines).encode("latin-1"))
            return parse_response(await reader.read())
        finally:
            writer.close()


def parse_response(content: bytes) -> Response:
    head, _, body = content.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Response(int(first.split()[1]), headers, body)
