"""Where a server is."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server.

    Attributes:
        host: Name or address; "" for a Unix socket.
        port: 0 for a Unix socket.
        path: Of the Unix socket; "" for TCP.
    """

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoint(text: str, port: int | None = None) -> Endpoint:
    """`name:port` or `[address]:port`; without a port the one given here.

    Raises:
        ValueError: It is neither, or there is no port.
    """
    try:
        parts = urlsplit(f"x://{text.strip()}")
        host, given = parts.hostname, port if parts.port is None else parts.port
    except ValueError:
        host, given = None, None
    if not host or given is None or parts.path or parts.query or parts.fragment or "@" in parts.netloc:
        what = "name:port or [address]:port" if port is None else "name, name:port or [address]:port"
        raise ValueError(f"expected {what}")
    return Endpoint(host, given)


def parse_listen(value: object) -> Endpoint:
    """A place to listen at.

    Raises:
        ValueError: It is none.
    """
    if not isinstance(value, str):
        raise ValueError("expected host:port, such as 127.0.0.1:7420")  # noqa: TRY004 - pydantic reads ValueError
    return parse_endpoint(value)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
