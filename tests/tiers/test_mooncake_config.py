"""Options of the mooncake tier, and errors if its engine is not installed. Needs no pool."""

from __future__ import annotations

import sys

import pytest

from lmcache_async.config import validate_options
from lmcache_async.errors import ConfigError, MissingDependencyError, TierClosedError
from lmcache_async.plugins.mooncake import MooncakeConfig, MooncakeTier

URL = "mooncake://master:50051"


@pytest.mark.parametrize(
    "options",
    [
        {"url": "mooncake://master:x"},
        {"url": "mooncake://user@master:50051"},
        {"url": f"{URL}/path"},
    ],
)
def test_wrong_options_are_refused(options):
    with pytest.raises(ConfigError):
        validate_options(MooncakeConfig, options, "here")


def test_all_spellings_of_options_are_accepted():
    config = MooncakeConfig.model_validate({"url": "mooncakestore://m:50051/", "segment_bytes": "4GiB"})

    assert (config.url, config.master, config.segment_bytes) == ("mooncake://m:50051", "m:50051", 4 << 30)
    assert config.hostname
    assert not MooncakeTier(config).capabilities.persistent


async def test_without_an_arena_it_is_not_opened():
    with pytest.raises(TierClosedError, match="bind"):
        await MooncakeTier(MooncakeConfig.model_validate({"url": URL})).__aenter__()


class _Broken:
    """A finder whose module exists but whose libraries cannot be loaded."""

    def __init__(self, failure: str) -> None:
        self._failure = failure

    def find_spec(self, name: str, *_: object) -> None:
        if name == "mooncake.store":
            raise ImportError(self._failure)


CANNOT = "cannot open shared object file: No such file or directory"


@pytest.mark.parametrize(
    ("failure", "advice"),
    [
        (
            f"libibverbs.so.1: {CANNOT}",
            r"libibverbs\.so\.1: .*: install libibverbs1 \(package names of Debian",
        ),
        (f"libnl-route-3.so.200: {CANNOT}", "install libibverbs1 "),
        (f"libnuma.so.1: {CANNOT}", "install libnuma1 "),
        (f"libcudart.so.12: {CANNOT}", "without CUDA, install the package mooncake-transfer-engine-non-cuda"),
        (f"libother.so.1: {CANNOT}", r"libother\.so\.1: .*install libibverbs1 libnuma1 libcurl4"),
    ],
)
async def test_a_missing_library_is_named_with_its_package(arena, monkeypatch, failure, advice):
    _forget_engine(monkeypatch)
    monkeypatch.setattr(sys, "meta_path", [_Broken(failure), *sys.meta_path])
    tier = MooncakeTier(MooncakeConfig.model_validate({"url": URL}))
    tier.bind(arena)
    with pytest.raises(MissingDependencyError, match=advice):
        await tier.__aenter__()


@pytest.mark.parametrize("missing", ["mooncake", "mooncake.store"])
async def test_the_error_without_the_package_names_the_package_to_install(arena, monkeypatch, missing):
    _forget_engine(monkeypatch)
    monkeypatch.setitem(sys.modules, missing, None)
    tier = MooncakeTier(MooncakeConfig.model_validate({"url": URL}))
    tier.bind(arena)
    with pytest.raises(MissingDependencyError, match=r"pip install 'lmcache-async\[mooncake\]'.*non-cuda"):
        await tier.__aenter__()


def _forget_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the engine appear as not yet imported."""
    if (package := sys.modules.get("mooncake")) is not None:
        monkeypatch.delattr(package, "store", raising=False)
    monkeypatch.delitem(sys.modules, "mooncake.store", raising=False)
