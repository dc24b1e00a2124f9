"""The changelog is made of its fragments, and nothing of them is lost."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest

from tools.changelog import KINDS, ChangelogError, main, read_fragments, release, section

ROOT = Path(__file__).parents[2]
DAY = dt.date(2026, 12, 1)
HEAD = "# Changelog\n\nWhat it is.\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "docs" / "changes").mkdir(parents=True)
    (tmp_path / "CHANGELOG.md").write_text(
        f"{HEAD}\n## Unreleased (0.2.0)\n\nSee there.\n\n## 0.1.0 (2026-11-22)\n\nOld.\n"
    )
    return tmp_path


def write(tree: Path, **fragments: str) -> None:
    for name, text in fragments.items():
        (tree / "docs" / "changes" / f"{name.replace('_', '.')}.md").write_text(text + "\n")


def make(tree: Path, version: str = "0.2.0") -> str:
    release(version, DAY, tree / "CHANGELOG.md", tree / "docs" / "changes")
    return (tree / "CHANGELOG.md").read_text()


def test_a_release_joins_the_fragments_by_kind_and_removes_them(tree: Path) -> None:
    write(
        tree, README="What these are.", b_feature="It can\ndo this.", a_fix="It is right.", c_removal="Gone."
    )

    assert make(tree) == (
        f"{HEAD}\n## 0.2.0 (2026-12-01)\n\n### Removed\n\n- Gone.\n\n### New\n\n- It can\n  do this.\n\n"
        "### Fixed\n\n- It is right.\n\n## 0.1.0 (2026-11-22)\n\nOld.\n"
    )
    assert [path.name for path in (tree / "docs" / "changes").iterdir()] == ["README.md"]


def test_links_are_written_for_the_place_of_the_changelog(tree: Path) -> None:
    write(tree, a_docs="See [scale.md](../scale.md#a), [there](https://example.org/a) and [here](#b).")

    assert "[scale.md](docs/scale.md#a), [there](https://example.org/a) and [here](#b)" in make(tree)


@pytest.mark.parametrize(
    ("fragments", "version", "why"),
    [
        ({}, "0.2.0", "nothing to release"),
        ({"a_feature": "New."}, "0.1.0", "has version 0.1.0 already"),
        ({"a_feature": "New."}, "two", "'two' is no version"),
        ({"a_news": "New."}, "0.2.0", "expected <short-name>.<kind>.md"),
        ({"a_fix": ""}, "0.2.0", "is empty"),
    ],
)
def test_what_makes_no_release_changes_nothing(
    tree: Path, fragments: dict[str, str], version: str, why: str
) -> None:
    write(tree, **fragments)
    before = {path: path.read_text() for path in tree.rglob("*.md")}

    with pytest.raises(ChangelogError, match=why):
        make(tree, version)
    assert {path: path.read_text() for path in tree.rglob("*.md")} == before


def test_the_fragments_of_this_tree_make_a_section(capsys: pytest.CaptureFixture[str]) -> None:
    fragments = read_fragments(ROOT / "docs" / "changes")

    assert main([]) == 0
    written = capsys.readouterr().out
    assert written.count("\n- ") >= len(fragments)
    assert all(heading in KINDS.values() for heading in _headings(section("x", fragments)))


def _headings(text: str) -> list[str]:
    return [line.removeprefix("### ") for line in text.splitlines() if line.startswith("### ")]
