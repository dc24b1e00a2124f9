"""Options of the host tier."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator

from lmcache_async.config.values import (
    Count,
    Flag,
    NameText,
    OptionalSize,
    Seconds,
    SocketPath,
    parse_name,
    unless_none,
)
from lmcache_async.daemon.messages import MAX_TENANT_BYTES
from lmcache_async.tiers.base import TierConfig


def _parse_tenant(value: object) -> str:
    name = parse_name(value)
    if len(name) > MAX_TENANT_BYTES:
        raise ValueError(f"expected at most {MAX_TENANT_BYTES} characters")
    return name


def _parse_user(value: object) -> int | None:
    value = unless_none(value)
    if value is None:
        return None
    if isinstance(value, bool) or not re.fullmatch(r"[0-9]{1,10}", str(value), re.ASCII):
        raise ValueError("expected the number of a user")
    return int(str(value))


class HostConfig(TierConfig):
    """Options of the host tier.

    Attributes:
        socket: Of the daemon; by default the place where it listens by default.
        tenant: Whose records these are: engines of one tenant share theirs, and see no others.
        daemon_uid: The user that the daemon must run as; by default our own or root.
        connect_timeout_s: Longest time to connect, in seconds.
        lookup_timeout_s: Longest time of a lookup or a removal.
        transfer_timeout_s: Longest time until leases or reservations are given.
        max_lease_bytes: Most bytes that this engine may have leases and reservations of; by default, and
            at most, what the daemon allows.
        copy_threads: Threads that copy records into the pool.
        pin: Pin the pool for CUDA, in the background, where the engine pins its arena.
        prefault: Map the pool's pages in the background, so that no first read pays for it.
    """

    socket: SocketPath | None = None
    tenant: Annotated[str, BeforeValidator(_parse_tenant, json_schema_input_type=NameText)] = "default"
    daemon_uid: Annotated[int | None, BeforeValidator(_parse_user)] = None
    connect_timeout_s: Seconds = 0.5
    lookup_timeout_s: Seconds = 0.8
    transfer_timeout_s: Seconds = 10.0
    max_lease_bytes: OptionalSize = None
    copy_threads: Count = 2
    pin: Flag = True
    prefault: Flag = True
