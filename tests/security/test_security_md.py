"""The statements of SECURITY.md hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lmcache_async.config import load_config
from lmcache_async.config.model import EngineConfig
from lmcache_async.config.validation import known_keys

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`([^`\n]+)`", TEXT)
TESTS = sorted({name for name in NAMED if name.startswith("tests/")})


@pytest.mark.parametrize("name", TESTS)
def test_each_test_that_it_names_is_there(name):
    assert list(ROOT.glob(name.rstrip("/")))


def test_every_defence_has_a_named_test():
    rows = re.findall(r"^\| (?!threat|---)(.+) \|$", TEXT, re.MULTILINE)

    assert len(rows) >= 10
    assert all("`tests/" in row for row in rows)


def test_each_setting_that_it_names_is_one():
    keys = set(known_keys(EngineConfig))
    settings = {name.split(":")[0] for name in NAMED if re.fullmatch(r"[a-z]+[_.][a-z_.]+(: \w+)?", name)}
    settings -= {"cache_salt", "kv_transfer_params"}  # fields of requests
    settings -= {"lmcache_async_corrupt_records_total"}  # a metric

    assert {"hash_key_file", "encryption.key_file", "plugins.third_party"} <= settings
    assert settings <= keys


def test_the_checklists_settings_are_a_config(tmp_path):
    config = load_config(
        env={},
        extra={
            "hash_algorithm": "blake3",
            "hash_key_file": str(tmp_path / "h"),
            "plugins.third_party": False,
        },
    )

    assert not config.plugins.third_party
