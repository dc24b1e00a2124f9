"""Values that no configurable number of the engine, the daemon, a tier or a layer accepts."""

import math
from collections.abc import Iterator
from typing import Annotated, Any, get_args

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from lmcache_async.config import EngineConfig, load_config
from lmcache_async.daemon.config import DaemonConfig
from lmcache_async.registry import LAYERS, TIERS
from tests.support.tiers import installed

NO_NUMBERS = [
    True,
    False,
    math.nan,
    math.inf,
    "nan",
    "1e400",
    10**30,
    10**400,
    1e300,
    "9" * 5000,
    -1,
    "-1",
]


def kinds(annotation: Any) -> set[Any]:
    """Return the types of an annotation."""
    parts = get_args(annotation)
    return set().union(*map(kinds, parts)) if parts else {annotation}


def models() -> Iterator[type[BaseModel]]:
    registry = installed()
    todo: list[type[BaseModel]] = [EngineConfig, DaemonConfig]
    todo += [registry.load(TIERS, name).config_type for name in registry.available(TIERS)]
    todo += [registry.load(LAYERS, name).options_type for name in registry.available(LAYERS)]
    seen = set()
    while todo:
        model = todo.pop()
        if model in seen:
            continue
        seen.add(model)
        yield model
        for info in model.model_fields.values():
            todo += [
                kind
                for kind in kinds(info.annotation)
                if isinstance(kind, type) and issubclass(kind, BaseModel)
            ]


def numbers() -> list[Any]:
    return [
        pytest.param(info, id=f"{model.__name__}.{name}")
        for model in models()
        for name, info in model.model_fields.items()
        if kinds(info.annotation) & {int, float}
    ]


@pytest.mark.parametrize("info", numbers())
def test_no_number_accepts_booleans_infinity_negative_or_huge_values(info):
    metadata = tuple(info.metadata)
    adapter = TypeAdapter(Annotated[info.annotation, *metadata] if metadata else info.annotation)
    for value in NO_NUMBERS:
        with pytest.raises(ValidationError):
            adapter.validate_python(value)


def test_the_walk_finds_the_numbers():
    found = {parameter.id for parameter in numbers()}

    assert {"EngineConfig.chunk_size", "VLLMConfig.prefill_tokens_per_s", "RetryConfig.seed"} <= found
    assert {"TierSpec.timeout_s", "HostConfig.daemon_uid", "MooncakeConfig.segment_bytes"} <= found
    assert len(found) > 60


def test_the_largest_values_are_accepted():
    found = load_config(
        env={},
        extra={"chunk_size": 1 << 24, "shutdown_timeout_s": 1e9, "vllm.prefill_tokens_per_s": "none"},
    )

    assert (found.chunk_size, found.shutdown_timeout_s) == (1 << 24, 1e9)
    assert found.vllm.prefill_tokens_per_s is None
