"""The changelog is written by towncrier from the fragments in `docs/changes/`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLD = "## 0.1.0 (2026-11-22)\n\nOld.\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "docs" / "changes").mkdir(parents=True)
    for name in ("pyproject.toml", "docs/changes/README.md", "docs/changes/template.md.jinja"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n<!-- releases -->\n\n{OLD}")
    return tmp_path


def build(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "towncrier", "build", "--version", "0.2.0", *arguments]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=250, check=False)


def write(tree: Path, **fragments: str) -> None:
    for name, text in fragments.items():
        (tree / "docs" / "changes" / f"{name.replace('_', '.')}.md").write_text(text + "\n")


def test_a_release_joins_the_fragments_by_kind_and_removes_them(tree: Path) -> None:
    text = (
        "It can\ndo this: [scale.md](../scale.md#a), [there](https://example.org/a), [notice](../../NOTICE)."
    )
    write(tree, b_feature=text, a_fix="It is right.", c_removal="Gone.")

    result = build(tree, "--yes", "--date", "2026-12-01")

    assert result.returncode == 0, result.stderr
    assert (tree / "CHANGELOG.md").read_text() == (
        "# Changelog\n\n<!-- releases -->\n\n## 0.2.0 (2026-12-01)\n\n### Removed\n\n- Gone.\n\n### New\n\n"
        "- It can\n  do this: [scale.md](docs/scale.md#a), [there](https://example.org/a), [notice](NOTICE).\n\n"
        f"### Fixed\n\n- It is right.\n\n{OLD}"
    )
    left = sorted(path.name for path in (tree / "docs" / "changes").iterdir())
    assert left == ["README.md", "template.md.jinja"]


def test_a_fragment_of_an_unknown_kind_is_an_error(tree: Path) -> None:
    write(tree, a_news="New.")

    result = build(tree, "--draft")

    assert result.returncode != 0
    assert "a.news.md" in result.stderr + result.stdout


def test_every_fragment_of_this_tree_is_in_the_next_section() -> None:
    fragments = [path for path in (ROOT / "docs" / "changes").glob("*.md") if path.name != "README.md"]

    result = build(ROOT, "--draft")

    assert result.returncode == 0, result.stderr
    assert all(path.read_text().strip() for path in fragments), "an empty fragment"
    assert result.stdout.count("\n- ") >= len(fragments)
