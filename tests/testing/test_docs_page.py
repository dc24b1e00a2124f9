"""The tests of docs/test-your-tier.md pass in a separate project."""

import re
from pathlib import Path

import pytest

from tests.support.projects import run_tests

PAGE = (Path(__file__).parents[2] / "docs" / "test-your-tier.md").read_text(encoding="utf-8")
TESTS = re.findall(r"^```python title=\"test_[a-z]+\.py\"\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(TESTS)))
def test_the_pages_tests_pass(number, tmp_path):
    (tmp_path / "test_page.py").write_text(TESTS[number], encoding="utf-8")
    run_tests(tmp_path)


def test_the_page_has_a_tier_of_at_most_thirty_lines_and_its_test():
    tier = re.search(r"^class FolderConfig.*?(?=^class TestFolderTier)", TESTS[0], re.MULTILINE | re.DOTALL)

    assert len(TESTS) == 2
    assert tier is not None
    assert len([line for line in tier[0].splitlines() if line.strip()]) <= 30
