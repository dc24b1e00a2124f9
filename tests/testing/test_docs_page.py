"""The tests of docs/test-your-tier.md pass in a separate project."""

import re
from pathlib import Path

import pytest

from tests.support.projects import run_tests

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "test-your-tier.md").read_text(encoding="utf-8")
[TIER] = re.findall(
    r"^```python title=\"my_tiers\.py\"\n(.*?)^```",
    (DOCS / "write-a-tier.md").read_text(encoding="utf-8"),
    re.MULTILINE | re.DOTALL,
)
TESTS = re.findall(r"^```python title=\"test_[a-z]+\.py\"\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(TESTS)))
def test_the_pages_tests_pass(number, tmp_path):
    (tmp_path / "my_tiers.py").write_text(TIER, encoding="utf-8")
    (tmp_path / "test_page.py").write_text(TESTS[number], encoding="utf-8")
    run_tests(tmp_path)


def test_the_tier_has_at_most_thirty_lines():
    tier = TIER[TIER.index("class FolderConfig") :]

    assert len(TESTS) == 2
    assert len([line for line in tier.splitlines() if line.strip()]) <= 30
