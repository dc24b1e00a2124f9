"""From what a person names to a target: a directory, or a tier of a config."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_async.config import EngineConfig, TierSpec, load_config, validate_options
from lmcache_async.config.validation import Origin
from lmcache_async.errors import ConfigError
from lmcache_async.memory.encryption import RecordCipher
from lmcache_async.observability.logging import LimitedLogger
from lmcache_async.records.directory import DirectoryTarget
from lmcache_async.records.target import Target
from lmcache_async.records.tier import TierTarget
from lmcache_async.registry import TIERS, Registry
from lmcache_async.tiers.base import Tier
from lmcache_async.tiers.layers.border import BorderLayer
from lmcache_async.tiers.layers.guard import GuardLayer
from lmcache_async.tiers.rest import at_rest_of

MAX_RECORD_BYTES = 256 << 20
_UNBOUNDED = 1 << 62
_OF_ONE = re.compile(r"(dp[0-9]+|(dp[0-9]+-)?rank-[0-9]+)")  # the directory of one rank or replica


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSpec:
    """What the command line says.

    Attributes:
        path: A directory of the disk tier; None where a tier is named.
        config: The engine's config file, for `tier`, and for the keys of encryption and hash.
        tier: The id of one of its tiers, or a tier of its own as JSON.
        rank: Which rank's directory, where each has one.
        in_flight: Records to work on at the same time.
        max_bytes: As `DirectoryTarget`'s, where the tier's own options do not say.
    """

    path: Path | None = None
    config: Path | None = None
    tier: str | None = None
    rank: int | None = None
    in_flight: int = 4
    max_record_bytes: int = MAX_RECORD_BYTES
    max_bytes: int | None = None

    def of_tier(self, tier: str) -> TargetSpec:
        """The same of a tier of the config."""
        return dataclasses.replace(self, path=None, tier=tier)

    def read_config(self) -> EngineConfig | None:
        return None if self.config is None else load_config(self.config)


def open_target(spec: TargetSpec, *, change: bool, registry: Registry | None = None) -> Target:
    """The target, not opened yet.

    Args:
        change: Whether it will be changed: a directory is held alone then.

    Raises:
        ConfigError: It is not named well, or cannot be worked on from outside.
    """
    registry = registry or Registry()
    config = spec.read_config()
    if spec.path is not None:
        if spec.tier is not None:
            raise ConfigError(
                f"--tier {spec.tier}: a directory is named too ({spec.path}); one of them is meant"
            )
        _check_ranks(spec.path)
        named = TierSpec.model_validate(
            {"name": "disk", "path": str(spec.path.absolute()), "max_bytes": spec.max_bytes or _UNBOUNDED}
        ).placed(Origin(str(spec.path)))
    elif spec.tier is None:
        raise ConfigError("name a directory, or a tier with --tier: the id of one in --config, or JSON")
    else:
        named = _named(spec, config)
    return _target(spec, named, config, registry, change=change)


def open_keys(config: EngineConfig | None) -> tuple[RecordCipher | None, bytes]:
    """The cipher and the hash key of the config; None and b"" where there are none."""
    if config is None:
        return None, b""
    cipher = RecordCipher(config.encryption.read_keys()) if config.encryption.enabled else None
    return cipher, config.read_hash_key()


def reachable_tiers(config: EngineConfig, registry: Registry | None = None) -> list[str]:
    """The ids of the config's tiers that are no memory of the engine's own, fastest first.

    Raises:
        ConfigError: A tier or an option of one is wrong.
    """
    registry = registry or Registry()
    reachable = []
    for tier in config.tiers:
        tier_class = _class_of(registry, tier, third_party=config.plugins.third_party)
        options = validate_options(tier_class.config_type, tier.options, tier.origin)
        if not tier_class(options).capabilities.in_arena:
            reachable.append(tier.id)
    return reachable


def _class_of(registry: Registry, spec: TierSpec, *, third_party: bool) -> type[Tier]:
    tier_class = registry.load(TIERS, spec.name, third_party=third_party)
    if not (isinstance(tier_class, type) and issubclass(tier_class, Tier)):
        raise ConfigError(f"{spec.where}: {spec.name!r} is {tier_class!r}, which is no subclass of Tier")
    return tier_class


def _named(spec: TargetSpec, config: EngineConfig | None) -> TierSpec:
    assert spec.tier is not None
    if spec.tier.lstrip().startswith("{"):
        try:
            value = json.loads(spec.tier)
            return TierSpec.model_validate(value).placed(Origin("--tier"))
        except ValueError as error:  # pydantic's too
            raise ConfigError(
                f'--tier: expected a tier as JSON, such as {{"name": "valkey", ...}}: {error}'
            ) from None
    if config is None:
        raise ConfigError(f"--tier {spec.tier} is the id of a tier in a config: name its file with --config")
    for tier in config.tiers:
        if tier.id == spec.tier:
            return tier
    ids = ", ".join(tier.id for tier in config.tiers)
    raise ConfigError(
        f"{spec.config} has no tier {spec.tier}; it has {ids}; a directory is written with a slash, such as ./{spec.tier}"
    )


def _target(
    spec: TargetSpec, named: TierSpec, config: EngineConfig | None, registry: Registry, *, change: bool
) -> Target:
    third_party = config.plugins.third_party if config is not None else True
    tier_class = _class_of(registry, named, third_party=third_party)
    options: Mapping[str, Any] = named.options
    if spec.rank is not None and "subdirectory" in tier_class.config_type.model_fields:
        options = {**options, "subdirectory": f"rank-{spec.rank}"}
    validated = validate_options(tier_class.config_type, options, named.origin)
    if (rest := at_rest_of(tier_class, validated)) is not None:
        if change:
            _check_ranks(rest.place)
        limit = getattr(validated, "max_bytes", None)
        return DirectoryTarget(
            rest,
            change=change,
            max_bytes=spec.max_bytes or (limit if limit != _UNBOUNDED else None),
            max_record_bytes=spec.max_record_bytes,
            in_flight=spec.in_flight,
        )
    tier = tier_class(validated)
    if tier.capabilities.in_arena:
        raise ConfigError(
            f"tier {named.id!r} is memory of the engine's own process: nobody else can reach what is in it"
        )
    logger = LimitedLogger(logging.getLogger("lmcache_async.records"))
    guarded = GuardLayer(
        BorderLayer(tier, name=named.id, logger=logger),
        name=named.id,
        timeout_s=named.timeout_s,
        open_timeout_s=named.open_timeout_s,
        logger=logger,
    )
    return TierTarget(
        guarded,
        name=named.id,
        max_record_bytes=spec.max_record_bytes,
        in_flight=spec.in_flight,
        timeout_s=named.timeout_s,
    )


def _check_ranks(path: Path) -> None:
    """Where several ranks or replicas have a directory each in here, one of those is meant."""
    try:
        ranks = sorted(
            entry.name for entry in path.iterdir() if _OF_ONE.fullmatch(entry.name) and entry.is_dir()
        )
        own = any(path.glob("[0-9a-f][0-9a-f]"))
    except OSError:
        return  # opening it says more
    if ranks and not own:
        raise ConfigError(
            f"{path} has a directory for each rank or replica: name one of them, such as {path / ranks[0]}"
        )
