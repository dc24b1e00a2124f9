"""Options of the mooncake tier."""

import socket
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field

from lmcache_async.config.values import Count, Name, Size, SizeInput, parse_size, unless_none
from lmcache_async.tiers.base import TierConfig


def _parse_url(value: object) -> str:
    parts = urlsplit(value.strip()) if isinstance(value, str) else urlsplit("")
    try:
        is_right = parts.scheme in {"mooncake", "mooncakestore"} and parts.hostname and parts.port
    except ValueError:
        is_right = False
    if not is_right or "@" in parts.netloc or parts.path.strip("/") or parts.query:
        raise ValueError("expected the master's address, such as mooncake://master:50051")
    return f"mooncake://{parts.netloc}"


def _parse_host(value: object) -> object:
    value = unless_none(value)
    return socket.gethostname() if value is None else value


def _parse_share(value: object) -> int:
    return 0 if value in (0, "0") and value is not False else parse_size(value)


class MooncakeConfig(TierConfig):
    """Options of the mooncake tier.

    Attributes:
        url: The master's address, `mooncake://host:port`.
        hostname: This machine's name or address, by which others of the pool reach it; with a port, if
            that is to be fixed. The machine's own name if not given.
        metadata: Where the engine finds its peers: `P2PHANDSHAKE`, or the URL of a metadata server.
        protocol: `tcp` or `rdma`, or another that the installed build has.
        devices: Names of RDMA devices, between commas; empty: all.
        segment_bytes: Memory that this process gives to the pool; 0 if it only uses what others give.
        prefix: What every record's name in the pool begins with.
        replicas: How many segments hold a record.
        threads: Calls of the engine that read at the same time, each one batch, and as many that write. One
            moves more by TCP than several do.
        batch_bytes: Most bytes of one such call, but at least one chunk.
    """

    url: Annotated[str, BeforeValidator(_parse_url)]
    hostname: Annotated[str, BeforeValidator(_parse_host), Field(validate_default=True)] = ""
    metadata: str = "P2PHANDSHAKE"
    protocol: Name = "tcp"
    devices: str = ""
    segment_bytes: Annotated[
        int, BeforeValidator(_parse_share, json_schema_input_type=SizeInput | Literal[0, "0"])
    ] = 0
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{0,64}$")] = "lmcache-async/"
    replicas: Annotated[Count, Field(le=16)] = 1
    threads: Annotated[Count, Field(le=64)] = 1
    batch_bytes: Size = 64 << 20

    @property
    def master(self) -> str:
        return self.url.removeprefix("mooncake://")
