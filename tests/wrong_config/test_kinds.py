"""Any value in any field: errors have our own messages, none of pydantic's."""

from __future__ import annotations

import datetime as dt
import math
from pathlib import Path
from typing import Annotated, Any, get_args

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from lmcache_async.config import EngineConfig, LayerSpec, validate_options
from lmcache_async.config.validation import EXPECTED
from lmcache_async.daemon.config import DaemonConfig, TenantOptions
from lmcache_async.errors import ConfigError
from lmcache_async.registry import LAYERS, TIERS
from lmcache_async.testing.fakes import installed

WRONG: list[Any] = [
    *(None, True, False, 0, 1, -1, 10**30, 1.5, -0.5, math.nan, math.inf),
    *("", "x", "a b", "{}", "-1", "9" * 5000, "\0", "\ud800", "x" * 5000, b"x", b"\xff"),
    *([], [[]], [None], [1.5], [{}], {}, {"x": 1}, {1: 2}, {"a": {"b": []}}, {1, 2}, (1, 2)),
    *(dt.date(2026, 1, 1), dt.datetime(2026, 1, 1, tzinfo=dt.UTC), Path("x")),
]
"""Values that YAML, JSON and vLLM's options can represent."""
NO_NUMBERS = [True, False, math.nan, math.inf, "nan", "1e400", 10**30, 10**400, 1e300, "9" * 5000, -1, "-1"]
"""Values that no configurable number accepts."""
OURS = frozenset({"value_error", "literal_error", "missing", "extra_forbidden", "invalid_key", "disagree"})
"""Kinds of errors with their own messages, in addition to EXPECTED."""


def kinds_of(annotation: Any) -> set[Any]:
    parts = get_args(annotation)
    return set().union(*map(kinds_of, parts)) if parts else {annotation}


def models() -> list[type[BaseModel]]:
    """All models of the engine, the daemon, the tiers and the layers, including nested ones."""
    found: dict[type[BaseModel], None] = {}
    registry = installed()
    todo: list[Any] = [EngineConfig, DaemonConfig]
    todo += [registry.load(TIERS, name).config_type for name in registry.available(TIERS)]
    todo += [registry.load(LAYERS, name).options_type for name in registry.available(LAYERS)]
    while todo:
        model = todo.pop()
        if isinstance(model, type) and issubclass(model, BaseModel) and model not in found:
            found[model] = None
            todo += [kind for info in model.model_fields.values() for kind in kinds_of(info.annotation)]
    return list(found)


FIELDS = [(model, name) for model in models() for name in model.model_fields]
NUMBERS = {
    f"{model.__name__}.{name}": model.model_fields[name]
    for model, name in FIELDS
    if kinds_of(model.model_fields[name].annotation) & {int, float}
}


@pytest.mark.parametrize("info", NUMBERS.values(), ids=NUMBERS)
def test_no_number_accepts_booleans_infinity_negative_or_huge_values(info):
    metadata = tuple(info.metadata)
    adapter = TypeAdapter(Annotated[info.annotation, *metadata] if metadata else info.annotation)
    for value in NO_NUMBERS:
        with pytest.raises(ValidationError):
            adapter.validate_python(value)


def test_the_search_finds_the_numbers():
    assert {"EngineConfig.chunk_size", "VLLMConfig.prefill_tokens_per_s", "RetryConfig.seed"} <= set(NUMBERS)
    assert {"TierSpec.timeout_s", "HostConfig.daemon_uid", "MooncakeConfig.segment_bytes"} <= set(NUMBERS)
    assert {LayerSpec, TenantOptions} <= {model for model, _ in FIELDS}
    assert len(NUMBERS) > 60


@pytest.mark.parametrize(
    ("model", "name"), FIELDS, ids=[f"{model.__name__}.{name}" for model, name in FIELDS]
)
def test_every_error_of_a_field_has_our_words(model, name):
    for value in WRONG:
        kinds, told = refused(model, {name: value})

        assert kinds <= OURS | set(EXPECTED), value
        assert all(line.startswith("here: ") and line.isprintable() for line in told), (value, told)
        assert not any(
            word in line for line in told for word in ("Input", "Value error", "should", "pydantic")
        )


def refused(model: type[BaseModel], options: dict[str, Any]) -> tuple[set[str], list[str]]:
    """The kinds of pydantic's errors, and the resulting messages."""
    try:
        model.model_validate(options)
    except ValidationError as error:
        kinds = {one["type"] for one in error.errors()}
    else:
        return set(), []
    with pytest.raises(ConfigError) as caught:
        validate_options(model, options, "here")
    return kinds, str(caught.value).split("\n")
