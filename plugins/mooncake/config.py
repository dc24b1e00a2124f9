"""Options of the mooncake tier."""

import socket
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field

from lmcache_async.config.values import Count, Name, Size, SizeOrZero, unless_none
from lmcache_async.tiers.base import TierConfig


def _parse_url(value: object) -> str:
    try:
        parts = urlsplit(value.strip()) if isinstance(value, str) else urlsplit("")
        is_right = parts.scheme in {"mooncake", "mooncakestore"} and parts.hostname and parts.port
    except ValueError:
        is_right = False
    if not is_right or "@" in parts.netloc or parts.path.strip("/") or parts.query:
        raise ValueError("expected the address of the master, such as mooncake://master:50051")
    return f"mooncake://{parts.netloc}"


def _parse_host(value: object) -> object:
    value = unless_none(value)
    return socket.gethostname() if value is None else value


class MooncakeConfig(TierConfig):
    """Options of the mooncake tier.

    Attributes:
        url: Address of the master, `mooncake://host:port`.
        hostname: Name or address of this machine for the other members of the pool, optionally with a fixed
            port. The host name by default.
        metadata: How members of the pool find each other: `P2PHANDSHAKE`, or the URL of a metadata server.
        protocol: `tcp`, `rdma`, or another protocol of the installed Mooncake.
        devices: Names of RDMA devices, separated by commas; all devices if empty.
        segment_bytes: Memory that this process adds to the pool; 0 to only use the memory of other members.
        prefix: Prefix of all record names in the pool.
        replicas: Number of segments that store each record.
        threads: Maximum number of concurrent reads, each one batch, and of concurrent writes. With TCP, one
            thread is faster than several.
        batch_bytes: Maximum bytes of a batch, but at least one chunk.
    """

    url: Annotated[str, BeforeValidator(_parse_url)]
    hostname: Annotated[str, BeforeValidator(_parse_host), Field(validate_default=True)] = ""
    metadata: str = "P2PHANDSHAKE"
    protocol: Name = "tcp"
    devices: str = ""
    segment_bytes: SizeOrZero = 0
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{0,64}$")] = "lmcache-async/"
    replicas: Annotated[Count, Field(le=16)] = 1
    threads: Annotated[Count, Field(le=64)] = 1
    batch_bytes: Size = 64 << 20

    @property
    def master(self) -> str:
        return self.url.removeprefix("mooncake://")
