"""Each broken tier fails the conformance suite, and a correct one passes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.testing.broken_tiers import BROKEN

ROOT = Path(__file__).parents[2]
CONFTEST = """
import collections, itertools, json, pathlib, pytest
from lmcache_async.testing.conformance import base

FAILED = {}
TEXTS = {}

def pytest_runtestloop(session):
    found = collections.Counter()  # faults by case
    for cls, items in itertools.groupby(session.items, lambda item: item.cls):
        broken = cls.__name__ not in ("TestDictTier", "TestThreadsOfLoop")
        base.DEADLINE_S = 0.1 if broken else 60.0  # what is broken hangs or leaks by intention
        for item in sorted(items, key=lambda item: -found[item.name]):
            if cls.__name__ not in FAILED:  # one failure is enough
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        found.update(FAILED.get(cls.__name__, ()))
    return True

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    report = (yield).get_result()
    if report.failed:
        TEXTS[item.cls.__name__] = str(report.longrepr)
        FAILED.setdefault(item.cls.__name__, []).append(item.name)

def pytest_sessionfinish(session):
    pathlib.Path("failed.json").write_text(json.dumps([FAILED, TEXTS]))
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """By name of the test class: the first failing case, and pytest's report."""
    folder = tmp_path_factory.mktemp("third_party")
    (folder / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    source = Path(__file__).with_name("suite_over_broken_tiers.py").read_text(encoding="utf-8")
    (folder / "test_broken.py").write_text(source, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\nasyncio_mode = strict\n", encoding="utf-8")
    plugins = ["-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:logging"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=line", *plugins, "test_broken.py"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )
    path = folder / "failed.json"
    assert path.exists(), ran.stdout + ran.stderr
    result: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return result


@pytest.fixture
def failed(outcome):
    return outcome[0]


@pytest.mark.parametrize("name", ["TestDictTier", "TestThreadsOfLoop"])
def test_a_correct_tier_passes_in_a_project_without_our_conftest(name, failed):
    assert failed.get(name) is None


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_the_suite_detects_a_broken_tier(kind, failed):
    assert failed.get(f"Test{kind.__name__}"), f"no case finds out: {kind.__doc__}"


def test_a_failure_shows_the_values(outcome):
    """As in a test module, because assertion rewriting is enabled for the kit."""
    assert "assert 1 == 0" in outcome[1]["TestPrefixOverHoles"]
    assert "get returned an object of type bytes, not a Buffer" in outcome[1]["TestReturnsBytes"]
