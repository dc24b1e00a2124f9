"""Options of the daemon, and the file they come from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from lmcache_async.config.explain import KeyPath, Origin, disagree, explain, known_keys
from lmcache_async.config.http import HTTPConfig
from lmcache_async.config.sizes import parse_size
from lmcache_async.config.sources import read_file
from lmcache_async.config.values import (
    Count,
    CountInput,
    Flag,
    Name,
    OptionalSize,
    Seconds,
    Size,
    SizeInput,
    SocketPath,
)
from lmcache_async.daemon.peer_options import PeerOptions
from lmcache_async.daemon.room import SEGMENT_BYTES
from lmcache_async.daemon.tenants import Quota

if TYPE_CHECKING:
    from pydantic import ValidationInfo

MIN_BYTES = 1 << 20


def _parse_share(value: object) -> int:
    return 0 if value in (0, "0") and value is not False else parse_size(value)  # no set: a list has no hash


Share = Annotated[int, BeforeValidator(_parse_share, json_schema_input_type=SizeInput | Literal[0, "0"])]


def _parse_user(value: object) -> int:
    if isinstance(value, bool) or not re.fullmatch(r"[0-9]{1,10}", str(value), re.ASCII):
        raise ValueError("expected the number of a user")
    return int(str(value))


UserNumber = Annotated[int, BeforeValidator(_parse_user, json_schema_input_type=CountInput | Literal[0, "0"])]


class TenantOptions(BaseModel):
    """What a tenant may hold.

    Attributes:
        max_bytes: The most; all of the pool by default.
        reserved_bytes: What others never evict.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_bytes: OptionalSize = None
    reserved_bytes: Share = 0

    @property
    def quota(self) -> Quota:
        return Quota(max_bytes=self.max_bytes, reserved_bytes=self.reserved_bytes)

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> Self:
        del info
        if self.max_bytes is not None and self.reserved_bytes > self.max_bytes:
            raise disagree("it is more than max_bytes", "reserved_bytes")
        return self


class DaemonConfig(BaseModel):
    """Options of `lmcache-async serve`.

    Attributes:
        socket: Where clients connect; by default a place of this user's, see `default_socket`.
        max_bytes: Of the pool. It is shared memory: a container's limit has to allow it.
        segment_bytes: Memory is cut for one size of record in pieces of up to so many bytes.
        huge_pages: Ask for huge pages, where the kernel gives them to shared memory.
        prefault: Take all memory at the start, in the background.
        allow_uids: Other users whose processes may connect; the socket is then open to all, and asks.
        max_clients: Connections at the same time; each rank of each engine has one.
        max_client_bytes: What one client may have leases and reservations of; a quarter of the pool by default.
        greeting_timeout_s: Longest time for a client to say who it is.
        tenants: Quotas by tenant.
        other_tenants: The quota of each one that is not named; `reserved_bytes` is for named ones.
        peer: What is served to other hosts; nothing by default.
        http: The status page and metrics; not served by default.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    socket: SocketPath | None = None
    max_bytes: Size
    segment_bytes: Size = SEGMENT_BYTES
    huge_pages: Flag = True
    prefault: Flag = True
    allow_uids: tuple[UserNumber, ...] = ()
    max_clients: Count = 256
    max_client_bytes: OptionalSize = None
    greeting_timeout_s: Seconds = 5.0
    tenants: Mapping[Name, TenantOptions] = {}
    other_tenants: TenantOptions = TenantOptions()
    peer: PeerOptions | None = None
    http: HTTPConfig = HTTPConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_bytes < MIN_BYTES:
            raise disagree(f"a pool has at least {MIN_BYTES} bytes", "max_bytes")
        if sum(tenant.reserved_bytes for tenant in self.tenants.values()) > self.max_bytes:
            raise disagree("tenants have reserved more than max_bytes together", "tenants")
        if self.other_tenants.reserved_bytes:
            raise disagree("only tenants with a name reserve", "other_tenants")
        return self

    @property
    def client_bytes(self) -> int:
        """The most that one client may have leases of."""
        return self.max_bytes // 4 if self.max_client_bytes is None else self.max_client_bytes


def load_daemon_config(file: Path | None, given: Mapping[str, Any]) -> DaemonConfig:
    """The config from the command's options, then the YAML file.

    Raises:
        ConfigError: The file cannot be read, or a key or a value is wrong; a line for each.
    """
    content, origin = read_file(file) if file is not None else ({}, Origin("options"))
    options = {key: value for key, value in given.items() if value is not None}
    try:
        return DaemonConfig.model_validate(content | options)
    except ValidationError as error:
        origins: dict[KeyPath, Origin] = {(key,): Origin(f"--{key.replace('_', '-')}") for key in options}
        raise explain(error, [*known_keys(DaemonConfig), *_tenants_keys(content)], origins, origin) from None


def _tenants_keys(content: Mapping[str, Any]) -> list[str]:
    tenants = content.get("tenants")
    names = tenants if isinstance(tenants, Mapping) else ()
    return [f"tenants.{name}.{key}" for name in names for key in TenantOptions.model_fields]
