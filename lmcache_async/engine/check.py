"""Everything that is wrong with a config, without opening anything: plug-ins, options, chains, files of secrets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from lmcache_async.config import EngineConfig, TierSpec, validate_options
from lmcache_async.engine.builder import default_logger
from lmcache_async.engine.secrets import retrieve_stages, store_stages
from lmcache_async.engine.tiers import layer_context, layered, load_layer, load_tier
from lmcache_async.errors import LMCacheAsyncError
from lmcache_async.pipeline.batch import RetrieveRequest, StoreRequest
from lmcache_async.pipeline.chain import Chain
from lmcache_async.pipeline.report import BatchStored
from lmcache_async.pipeline.stage import Stage, StageInfo, describe
from lmcache_async.registry import STAGES, Registry
from lmcache_async.tiers.base import Tier
from lmcache_async.tiers.layers.base import Shared
from lmcache_async.types import RetrieveReport
from lmcache_async.web.opening import check_endpoint


def problems(config: EngineConfig, registry: Registry) -> list[str]:
    """A line for each thing that would keep an engine of this config from being made on this machine."""
    shared = Shared()
    found = [line for spec in config.tiers for line in _of_tier(config, spec, registry, shared)]
    for key, takes, gives in (
        ("store", StoreRequest, BatchStored),
        ("retrieve", RetrieveRequest, RetrieveReport),
    ):
        found += _of_chain(config, key, takes, gives, registry)
    found += _lines(config.read_hash_key)
    found += _lines(config.encryption.read_keys)
    found += check_endpoint(config.http)
    return list(dict.fromkeys(found))


def make_tier(spec: TierSpec, registry: Registry, *, third_party: bool) -> Tier:
    """The tier alone, without layers, not opened.

    Raises:
        LMCacheAsyncError: Its name or its options are wrong, or a package is missing.
    """
    tier_class = load_tier(registry, spec, third_party=third_party)
    return tier_class(validate_options(tier_class.config_type, spec.options, spec.where))


def _of_tier(config: EngineConfig, spec: TierSpec, registry: Registry, shared: Shared) -> Iterator[str]:
    third_party = config.plugins.third_party
    tier: Tier | None = None
    try:
        tier = make_tier(spec, registry, third_party=third_party)
    except Exception as error:  # noqa: BLE001 - whatever a plug-in of somebody else's raises
        yield from _told(error, spec.where)
    for index, layer in reversed(list(enumerate(spec.layers or ()))):
        context = layer_context(spec, index, layer, default_logger(), shared)
        try:
            if tier is not None:
                tier = layered(registry, layer, tier, context, third_party=third_party)
            else:  # what is wrong with its layers is told all the same
                layer_class = load_layer(registry, layer, context.where, third_party=third_party)
                validate_options(layer_class.options_type, layer.options, context.where, beside=("id",))
        except Exception as error:  # noqa: BLE001 - as above
            yield from _told(error, context.where)


def _of_chain(config: EngineConfig, key: str, takes: type, gives: type, registry: Registry) -> Iterator[str]:
    where = f"{key}.stages"
    try:
        names = store_stages(config) if key == "store" else retrieve_stages(config)
    except LMCacheAsyncError as error:
        yield from _told(error, where)
        return
    stages, wrong = _stages(names, registry, where, third_party=config.plugins.third_party)
    yield from wrong
    if not wrong:
        try:
            Chain(stages).check_ends(takes, gives)
        except LMCacheAsyncError as error:
            yield from _told(error, where)


def _stages(
    names: Sequence[str], registry: Registry, where: str, *, third_party: bool
) -> tuple[list[StageInfo], list[str]]:
    stages: list[StageInfo] = []
    wrong: list[str] = []
    for name in names:
        try:
            stages.append(
                describe(name, cast("Stage[Any, Any]", registry.load(STAGES, name, third_party=third_party)))
            )
        except Exception as error:  # noqa: BLE001 - whatever a plug-in of somebody else's raises
            wrong += _told(error, where)
    return stages, wrong


def _lines(read: Callable[[], object]) -> list[str]:
    try:
        read()
    except LMCacheAsyncError as error:
        return list(_told(error, ""))
    return []


def _told(error: Exception, where: str) -> Iterator[str]:
    """What is wrong, with its place, which an error of a plug-in's own does not know."""
    text = str(error) if isinstance(error, LMCacheAsyncError) else f"it cannot be made: {_short(error)}"
    for line in text.split("\n"):
        yield line if not where or line.startswith(where) else f"{where}: {line}"


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error!s:.200}".replace("\n", " ")
