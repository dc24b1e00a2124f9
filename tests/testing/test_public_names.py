"""Public names of `lmcache_async.testing`, and those that work without a test runner."""

from __future__ import annotations

from pathlib import Path

import pytest

import lmcache_async.testing as kit
from tests.support import forked_python
from tests.support.forked_python import Ended

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "test-your-tier.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", kit.__all__)
def test_a_public_name_exists_and_has_a_docstring(name):
    assert getattr(kit, name).__doc__
    assert name in dir(kit)


@pytest.mark.parametrize(
    "name", ["TierConformance", "TierMachine", "DictTier", "token_streams", "tier_stacks"]
)
def test_the_page_describes_it(name):
    assert name in PAGE


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'TierConformity'"):
        _ = kit.TierConformity


def run(folder: Path, missing: str, code: str) -> Ended:
    """Run code in which the package `missing` cannot be imported."""
    program = f"import sys\nsys.modules[{missing!r}] = None\nfrom lmcache_async.errors import *\n{code}\n"
    (folder / "program.py").write_text(program, encoding="utf-8")
    return forked_python.run("program.py", cwd=folder, path=[ROOT])


@pytest.mark.parametrize(
    ("missing", "name"),
    [("pytest", "TierConformance"), ("hypothesis", "TierMachine"), ("hypothesis", "payloads")],
)
def test_a_missing_package_is_reported_with_the_command_to_install_it(tmp_path, missing, name):
    ran = run(tmp_path, missing, f"from lmcache_async.testing import {name}")

    assert ran.status == 1
    assert f"needs the package {missing}, which is not installed" in ran.output
    assert "pip install 'lmcache-async[testing]'" in ran.output


def test_the_fakes_need_no_test_runner(tmp_path):
    code = (
        "sys.modules['hypothesis'] = None\nfrom lmcache_async.testing import DictTier, FaultyTier, FaultPlan"
    )
    ran = run(tmp_path, "pytest", code)

    assert ran.status == 0, ran.output
