"""Options of the host tier."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import BeforeValidator

from lmcache_async.config.values import (
    Count,
    Flag,
    NameText,
    OptionalSize,
    OptionalUserId,
    Seconds,
    SocketPath,
    parse_name,
)
from lmcache_async.daemon.messages import MAX_TENANT_BYTES
from lmcache_async.tiers.base import TierConfig


def _parse_tenant(value: object) -> str:
    name = parse_name(value)
    if len(name) > MAX_TENANT_BYTES:
        raise ValueError(f"expected at most {MAX_TENANT_BYTES} characters")
    return name


class HostConfig(TierConfig):
    """Options of the host tier.

    Attributes:
        socket: Path of the daemon's socket; by default the default path of the daemon.
        tenant: Tenant of the records. Engines of one tenant share records and see no others.
        daemon_uid: User id that the daemon must run as; by default that of this process or root.
        connect_timeout_s: Longest time to connect, in seconds.
        lookup_timeout_s: Longest time of a lookup or a removal, in seconds.
        transfer_timeout_s: Longest wait for leases or reservations, in seconds.
        max_lease_bytes: Limit of the leases and reservations of this engine, in bytes; by default, and at
            most, the limit of the daemon.
        copy_threads: Threads that copy records into the pool.
        pin: Pin the pool for CUDA, in the background, if the arena is pinned.
        prefault: Map the pages of the pool in the background, so that first reads cause no page faults.
    """

    socket: SocketPath | None = None
    tenant: Annotated[str, BeforeValidator(_parse_tenant, json_schema_input_type=NameText)] = "default"
    daemon_uid: OptionalUserId = None
    connect_timeout_s: Seconds = 0.5
    lookup_timeout_s: Seconds = 0.8
    transfer_timeout_s: Seconds = 10.0
    max_lease_bytes: OptionalSize = None
    copy_threads: Count = 2
    pin: Flag = True
    prefault: Flag = True

    @property
    def trusted_users(self) -> frozenset[int]:
        """The users whose daemon is accepted."""
        return frozenset({os.geteuid(), 0} if self.daemon_uid is None else {self.daemon_uid})
