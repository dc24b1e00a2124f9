"""Tests of the docs: every Python example runs, every config loads, every command exists."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from lmcache_async.config import load_config
from tests.support import forked_python

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
OF_A_CHECKOUT = {"docs/simulation.md"}
"""Pages whose examples import `tests` or `tools`, which are not installed."""
FENCE = re.compile(
    r"^```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?[^\n]*\n(?P<text>.*?)^```",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page. One with a title is a file, which other blocks may import."""

    page: str
    line: int
    text: str
    title: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(language: str) -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found += [
            Block(
                str(page.relative_to(ROOT)),
                text.count("\n", 0, fence.start()) + 1,
                fence["text"],
                fence["title"] or "",
            )
            for fence in FENCE.finditer(text)
            if fence["language"] == language
        ]
    return found


PYTHON = blocks("python")


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_a_python_example_runs(block: Block, tmp_path: Path) -> None:
    for other in PYTHON:
        if other.title:
            (tmp_path / other.title).write_text(other.text, encoding="utf-8")
    (tmp_path / "example.py").write_text(block.text, encoding="utf-8")
    ended = forked_python.run("example.py", cwd=tmp_path, path=[ROOT] if block.page in OF_A_CHECKOUT else [])

    assert ended.status == 0, f"{block}\n{ended.output}"


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_a_config_example_loads(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(block.text, encoding="utf-8")

    load_config(path, env={})


def test_every_make_command_in_the_docs_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    commands = {
        command
        for page in PAGES
        for command in re.findall(r"(?:`|^)make ([a-z]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    }

    assert {"demo", "test"} <= commands
    assert commands <= targets


def test_the_readme_shows_config_and_code() -> None:
    shown = {block.page for language in ("python", "yaml") for block in blocks(language)}

    assert "README.md" in shown
    assert blocks("python")
    assert blocks("yaml")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_and_into_the_tree_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", page.read_text(encoding="utf-8"))

    assert [target for target in targets if not (page.parent / target).exists()] == []
