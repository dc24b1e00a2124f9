"""Options of the daemon, and their configuration file."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import model_validator

from lmcache_async.config.model import HTTPConfig, Section
from lmcache_async.config.sources import read_file
from lmcache_async.config.validation import (
    KeyPath,
    Loaded,
    Origin,
    disagree,
    explain,
    known_keys,
    validate_all,
)
from lmcache_async.config.values import (
    MAX_BYTES,
    Count,
    Flag,
    Name,
    OptionalSize,
    Seconds,
    Size,
    SizeOrZero,
    SocketPath,
    UserId,
    format_size,
)
from lmcache_async.errors import ConfigError
from lmcache_async.registry import REMOVED_TIERS

logger = logging.getLogger(__name__)

MIN_BYTES = 1 << 20
_NO_EFFECT = {"segment_bytes": "records of all sizes share the memory of the pool"}
"""Options of earlier versions without effect, and the reason."""
_HOW_TO_GIVE_A_SIZE = "pass --max-bytes to serve, such as --max-bytes 20GiB, or set it in the config file"


class TenantOptions(Section):
    """Quota of a tenant.

    Attributes:
        max_bytes: Maximum bytes of its records and reservations; the whole pool by default.
        reserved_bytes: Bytes that other tenants do not evict.
    """

    max_bytes: OptionalSize = None
    reserved_bytes: SizeOrZero = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_bytes is not None and self.reserved_bytes > self.max_bytes:
            raise disagree(
                f"{format_size(self.reserved_bytes)} exceed max_bytes of {format_size(self.max_bytes)};"
                " lower reserved_bytes or raise max_bytes",
                "reserved_bytes",
                "max_bytes",
            )
        return self


class DaemonConfig(Section):
    """Options of `lmcache-async serve`.

    Attributes:
        socket: Path of the socket for clients; by default one of this user, see `default_socket`.
        max_bytes: Size of the pool. It is shared memory, which counts against a container's limit.
        segment_bytes: Without effect; accepted, with a warning, in configurations of earlier versions.
        huge_pages: Request huge pages, if the kernel has them for shared memory.
        prefault: Touch all pages in the background after the start.
        allow_uids: Other users whose processes may connect. The mode of the socket is then 0666, and the
            daemon checks the user of each connection.
        max_clients: Maximum number of connections; each rank of each engine has one.
        max_client_bytes: Maximum bytes of leases and reservations of one client; a quarter of the pool by default.
        greeting_timeout_s: Maximum time for a new client to send its greeting, in seconds.
        tenants: Quotas by tenant.
        other_tenants: Quota of each tenant that `tenants` does not name; without `reserved_bytes`.
        http: Status page and metrics; off by default.
    """

    socket: SocketPath | None = None
    max_bytes: Size
    segment_bytes: OptionalSize = None
    huge_pages: Flag = True
    prefault: Flag = True
    allow_uids: tuple[UserId, ...] = ()
    max_clients: Count = 256
    max_client_bytes: OptionalSize = None
    greeting_timeout_s: Seconds = 5.0
    tenants: Mapping[Name, TenantOptions] = {}
    other_tenants: TenantOptions = TenantOptions()
    http: HTTPConfig = HTTPConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_bytes < MIN_BYTES:
            raise disagree(f"{self.max_bytes} bytes are too few; expected at least {MIN_BYTES}", "max_bytes")
        if (reserved := sum(tenant.reserved_bytes for tenant in self.tenants.values())) > self.max_bytes:
            raise disagree(
                f"all tenants reserve {format_size(reserved)}, more than max_bytes of"
                f" {format_size(self.max_bytes)}; lower their reserved_bytes or raise max_bytes",
                "tenants",
                "max_bytes",
            )
        if self.other_tenants.reserved_bytes:
            raise disagree("only named tenants can reserve bytes", "other_tenants")
        return self

    @property
    def client_bytes(self) -> int:
        """Maximum bytes of leases of one client."""
        return self.max_bytes // 4 if self.max_client_bytes is None else self.max_client_bytes


_NOTHING = DaemonConfig(max_bytes=MAX_BYTES)


def load_daemon_config(file: Path | None, given: Mapping[str, Any]) -> DaemonConfig:
    """Return the configuration from the command's options and the YAML file; options take precedence.

    Raises:
        ConfigError: The file cannot be read, or a key or a value is wrong; one line for each.
    """
    loaded = survey_daemon_config(file, given).valid()
    for note in loaded.notes:
        logger.warning("no effect: %s", note)
    return loaded.config


def survey_daemon_config(file: Path | None, given: Mapping[str, Any]) -> Loaded[DaemonConfig]:
    """Load the configuration with the origins of its values and its mistakes; arguments as in `load_daemon_config`."""
    problems: list[str] = []
    try:
        content, origin = read_file(file, problems) if file is not None else ({}, Origin("options"))
    except ConfigError as error:
        return Loaded(_NOTHING, Origin(str(file)), problems=(str(error),))
    options = {key: value for key, value in given.items() if value is not None}
    content |= options
    places: dict[KeyPath, str] = {(key,): f"--{key.replace('_', '-')}" for key in options}
    origin = Origin(origin.name, {**origin.places, **places})
    config, errors = validate_all(DaemonConfig, content)
    if config is None:  # max_bytes is missing or invalid; the rest is checked with another one
        config, others = validate_all(DaemonConfig, content | {"max_bytes": MAX_BYTES})
        known = {(one["loc"], one["msg"]) for one in errors}
        errors += [one for one in others if (one["loc"], one["msg"]) not in known]
    tenants = content.get("tenants")
    names = tenants if isinstance(tenants, Mapping) else ()
    keys = [f"tenants.{name}.{key}" for name in names for key in TenantOptions.model_fields]
    keys += known_keys(DaemonConfig)
    for one in errors:
        if one["type"] == "missing" and one["loc"] == ("max_bytes",):
            place = f"{file}: " if file is not None else ""
            problems.append(f"{place}max_bytes is missing: {_HOW_TO_GIVE_A_SIZE}")
        elif one["loc"] == ("peer",):
            problems.append(f"{origin.at(one['loc'])}: peer: {REMOVED_TIERS['peer']}")
        else:
            problems.append(explain(one, keys, origin))
    notes = tuple(f"{origin.at((key,))}: {key}: {why}" for key, why in _NO_EFFECT.items() if key in content)
    return Loaded(config or _NOTHING, origin, notes, tuple(problems))
