"""docs/from-lmcache.md agrees with the code about each of LMCache's keys, and the calls that it names exist."""

from __future__ import annotations

import pydoc
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from lmcache_async.cache_engine import LMCacheEngine
from lmcache_async.config import load_config
from lmcache_async.config.lmcache import (
    ALIASES,
    REMOTE_TIERS,
    SUPPORTED,
    UNSUPPORTED,
    UNSUPPORTED_PREFIXES,
    UNSUPPORTED_VARIABLES,
)

PAGE = (Path(__file__).parents[2] / "docs" / "from-lmcache.md").read_text(encoding="utf-8")
QUOTED = re.compile(r"`([^`]+)`")
TABLES = [
    re.findall(r"^\| (?!---)(.+) \|$", table, re.MULTILINE)
    for table in re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE)
]


def told() -> list[dict[str, str]]:
    """Each table as a mapping of the quoted names in the first column to the second column."""
    tables = []
    for rows in TABLES:
        cells = [row.split(" | ") for row in rows[1:]]
        tables.append({name: row[1] for row in cells for name in QUOTED.findall(row[0])})
    return tables


@pytest.mark.parametrize(
    "expected",
    [
        {key: f"`{ours}`" for key, (ours, _) in SUPPORTED.items()},
        {key: f"`{tier}`" for key, tier in REMOTE_TIERS.items()},
        {key: f"`{today}`" for key, today in ALIASES.items()},
        UNSUPPORTED,
        UNSUPPORTED_VARIABLES,
        UNSUPPORTED_PREFIXES,
    ],
    ids=["renamed", "schemes", "older names", "unsupported", "unsupported variables", "unsupported families"],
)
def test_a_table_agrees_with_the_code(expected: Mapping[str, str]) -> None:
    assert expected in told()


def test_the_two_files_of_the_page_say_the_same(tmp_path: Path) -> None:
    theirs, ours = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    configs = []
    for name, text in (("lmcache.yaml", theirs), ("config.yaml", ours)):
        (tmp_path / name).write_text(text, encoding="utf-8")
        configs.append(load_config(tmp_path / name, env={}))

    assert configs[0].tiers[1].options["path"].endswith("/var/cache/kv")
    assert [(tier.name, _plain(tier.options)) for tier in configs[0].tiers] == [
        (tier.name, _plain(tier.options)) for tier in configs[1].tiers
    ]
    assert configs[0].arena == configs[1].arena
    assert configs[0].store == configs[1].store


def test_every_call_that_the_page_names_is_there() -> None:
    names = set(re.findall(r"`(lmcache_async\.[\w.]+)`", PAGE))

    assert "lmcache_async.cache_engine.LMCacheEngine.store" in names
    assert [name for name in names if pydoc.locate(name) is None] == []


def test_every_method_of_the_engine_is_on_the_page() -> None:
    methods = {name for name in vars(LMCacheEngine) if not name.startswith("_")} - {"closed", "attach"}

    assert [name for name in sorted(methods) if f"cache_engine.LMCacheEngine.{name}`" not in PAGE] == []


def _plain(options: Mapping[str, object]) -> dict[str, str]:
    """Options as written, in one spelling."""
    config = {key: str(value).removeprefix("file://") for key, value in options.items()}
    return {key: "107374182400" if value == "100GiB" else value for key, value in config.items()}


def test_every_series_that_the_page_names_is_on_the_page_of_metrics() -> None:
    series = set(re.findall(r"`(lmcache_async_\w+)`", PAGE))
    metrics = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")

    assert len(series) > 10
    assert [name for name in sorted(series) if f"| `{name}` |" not in metrics] == []
