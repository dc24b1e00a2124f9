"""Whatever stands in whatever field: what is wrong is said in our words, none of pydantic's."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from lmcache_async.cli.options import KINDS, options_type
from lmcache_async.config import EngineConfig, LayerSpec, TierSpec, validate_options
from lmcache_async.config.validation import EXPECTED
from lmcache_async.daemon.config import DaemonConfig, TenantOptions
from lmcache_async.errors import ConfigError
from lmcache_async.registry import LAYERS, TIERS, Registry

WRONG: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        10**30,
        1.5,
        -0.5,
        math.nan,
        math.inf,
        "",
        "x",
        "a b",
        "{}",
        "-1",
        "9" * 5000,
        "\0",
    ),
    *(
        [],
        [[]],
        [None],
        [1.5],
        [{}],
        {},
        {"x": 1},
        {1: 2},
        {"a": {"b": []}},
        b"x",
        b"\xff",
        "\ud800",
        "x" * 5000,
    ),
    *(
        dt.date(2026, 1, 1),
        dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
        {1, 2},
        Path("x"),
        (1, 2),
    ),
]
"""What YAML, JSON and vLLM's options can hold."""
OURS = frozenset({"value_error", "literal_error", "missing", "extra_forbidden", "invalid_key", "disagree"})
"""Kinds of errors that have words of their own, beside those in EXPECTED."""


def models() -> Iterator[type[BaseModel]]:
    yield from (EngineConfig, TierSpec, LayerSpec, DaemonConfig, TenantOptions)
    for info in EngineConfig.model_fields.values():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield info.annotation
    registry = Registry()
    for kind, group in (("tier", TIERS), ("layer", LAYERS)):
        for name in registry.available(group):
            model = options_type(kind, registry.load(KINDS[kind], name))
            assert model is not None
            yield model


FIELDS = [(model, name) for model in dict.fromkeys(models()) for name in model.model_fields]


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
    """The kinds of pydantic's errors, and what is told of them."""
    try:
        model.model_validate(options)
    except ValidationError as error:
        kinds = {one["type"] for one in error.errors()}
    else:
        return set(), []
    with pytest.raises(ConfigError) as caught:
        validate_options(model, options, "here")
    return kinds, str(caught.value).split("\n")
