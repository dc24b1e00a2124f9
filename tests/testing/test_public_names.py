"""What `lmcache_async.testing` offers, and to whom: everything by name, fakes without a test runner."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lmcache_async.testing as kit

PAGE = (Path(__file__).parents[2] / "docs" / "test-your-tier.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", kit.__all__)
def test_a_public_name_is_there_and_says_what_it_is(name: str) -> None:
    assert getattr(kit, name).__doc__
    assert name in dir(kit)


@pytest.mark.parametrize(
    "name", ["TierConformance", "TierMachine", "DictTier", "token_streams", "tier_stacks"]
)
def test_the_page_speaks_of_it(name: str) -> None:
    assert name in PAGE


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'TierConformity'"):
        _ = kit.TierConformity


def run(missing: str, code: str) -> subprocess.CompletedProcess[str]:
    script = f"import sys\nsys.modules[{missing!r}] = None\nfrom lmcache_async.errors import *\n{code}"
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("missing", "name"),
    [("pytest", "TierConformance"), ("hypothesis", "TierMachine"), ("hypothesis", "payloads")],
)
def test_who_lacks_a_package_is_told_what_to_install(missing: str, name: str) -> None:
    ran = run(missing, f"from lmcache_async.testing import {name}")

    assert ran.returncode == 1
    assert f"needs the package {missing}, which is not installed" in ran.stderr
    assert "pip install 'lmcache-async[testing]'" in ran.stderr


def test_the_fakes_need_no_test_runner() -> None:
    code = (
        "sys.modules['hypothesis'] = None\nfrom lmcache_async.testing import DictTier, FaultyTier, FaultPlan"
    )
    ran = run("pytest", code)

    assert ran.returncode == 0, ran.stderr
