"""The documentation site: it builds without a warning, loads nothing from other servers, and has every public name."""

from __future__ import annotations

import ast
import html
import importlib
import os
import re
import subprocess
import sys
import tomllib
import zlib
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from pydantic import BaseModel

from lmcache_async.config import EngineConfig
from tests.packaging.test_docs import blocks
from tools.site import _content, _resolved

ROOT = Path(__file__).parents[2]
FETCHED = re.compile(r"""(?:<script[^>]*\ssrc|<link[^>]*\shref|<img[^>]*\ssrc)=["']?(?:https?:)?//[^"' >]+""")
SVG = "{http://www.w3.org/2000/svg}"
TAG = re.compile(r"</?[a-z][^>]*>")
SECTIONS = [
    field.annotation
    for field in EngineConfig.model_fields.values()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
]
INSIDE = ("lmcache_async.integration.",)
"""Modules whose `__all__` is for internal use."""


def build(tree: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """Not `--quiet`, which hides warnings from `--strict` too."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)],
        cwd=tree,
        env=os.environ
        | {
            "NO_MKDOCS_2_WARNING": "1",  # the notice about MkDocs 2 is irrelevant here
            "WHOLE_SITE": "false",  # see mkdocs.yml
        },
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    built = build(ROOT, target)
    assert built.returncode == 0, built.stdout + built.stderr
    return target


@pytest.fixture(scope="module")
def documented(site: Path) -> set[str]:
    """Every documented name, from the inventory that other projects link with."""
    _, _, _, _, packed = (site / "objects.inv").read_bytes().split(b"\n", 4)
    return {line.split(" ", 1)[0] for line in zlib.decompress(packed).decode().splitlines()}


def test_every_page_is_built(site: Path) -> None:
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "changes"]
    expected = {path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in pages}

    built = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    assert {name.replace("README.html", "index.html") for name in expected} <= built


def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# A page\n\n[There](nowhere.md)\n")
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    validation = re.search(r"^validation:\n(?: .*\n)+", settings, re.MULTILINE)
    assert validation
    (tmp_path / "mkdocs.yml").write_text(f"site_name: x\nstrict: true\n{validation[0]}")

    built = build(tmp_path, tmp_path / "site")

    assert built.returncode == 1
    assert "nowhere.md" in built.stderr


def test_no_page_makes_a_request_to_a_server(site: Path) -> None:
    asking = {
        str(path.relative_to(site)): FETCHED.findall(path.read_text(encoding="utf-8"))
        for path in site.rglob("*.html")
    }

    assert {name: found for name, found in asking.items() if found} == {}
    assert FETCHED.search('<script src="https://example.org/a.js">')


def test_the_news_of_the_next_release_are_on_the_site(site: Path) -> None:
    news = (site / "changes" / "index.html").read_text(encoding="utf-8")

    assert "Next release" in news


def test_files_of_the_tree_that_pages_link_to_are_pages(site: Path) -> None:
    security = (site / "security.html").read_text(encoding="utf-8")
    quoted = (site / "source" / "SECURITY.html").read_text(encoding="utf-8")

    assert 'href="source/SECURITY.html"' in security
    assert 'href="../security.html' in quoted


def test_every_key_of_the_config_is_explained(site: Path) -> None:
    page = html.unescape(TAG.sub("", (site / "reference" / "config.html").read_text(encoding="utf-8")))
    explained = 0
    for section in (EngineConfig, *SECTIONS):
        for field in section.model_fields.values():
            if field.description:
                assert field.description in page
                explained += 1

    assert explained > 40


def test_links_are_resolved_from_the_page_that_has_them() -> None:
    assert _resolved("docs/tiers/disk.md", "../layers.md") == "docs/layers.md"
    assert _resolved("docs/README.md", "../examples/custom_tier") == "examples/custom_tier/README.md"
    assert _resolved("docs/README.md", "nowhere.md") is None
    assert "```toml" in _content("pyproject.toml")


def test_every_public_name_has_a_page(documented: set[str]) -> None:
    public = exported_names() | entry_points()

    assert "lmcache_async.Tier" in public
    assert sorted(public - documented) == []


def test_every_name_imported_by_docs_and_examples_has_a_page(documented: set[str]) -> None:
    sources = [block.text for block in blocks("python")]
    sources += [path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*/src/**/*.py")]
    imported = {name for source in sources for name in imported_names(source)}

    assert "lmcache_async.load_config" in imported
    assert sorted(imported - documented) == []


def exported_names() -> set[str]:
    """`module.name` for each `__all__` of the package."""
    names = set()
    for folder in ("lmcache_async", "stages", "plugins"):
        for path in (ROOT / folder).rglob("*.py"):
            inside = path.relative_to(ROOT)
            dotted = ".".join(inside.with_suffix("").parts).removesuffix(".__init__")
            module = dotted if folder == "lmcache_async" else f"lmcache_async.{dotted}"
            if not module.startswith(INSIDE):
                names |= {f"{module}.{name}" for name in exports(path, module)}
    return names


def exports(path: Path, module: str) -> list[str]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return list(importlib.import_module(module).__all__)
    return []


def entry_points() -> set[str]:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    return {target.replace(":", ".") for points in groups.values() for target in points.values()}


def imported_names(source: str) -> set[str]:
    tree = compile(source, "block", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
    return {
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lmcache_async."))
        or (isinstance(node, ast.ImportFrom) and node.module == "lmcache_async")
        for alias in node.names
    }


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs" / "diagrams").glob("*.svg")), ids=lambda path: path.stem
)
def test_a_diagram_is_drawn_within_its_frame_and_is_on_a_page(path: Path) -> None:
    drawing = ET.parse(path).getroot()
    _, _, width, height = map(float, drawing.attrib["viewBox"].split())
    boxes = [
        {name: float(one.attrib.get(name, 0)) for name in ("x", "y", "width", "height")}
        for one in drawing.iter(f"{SVG}rect")
    ]

    assert len(boxes) > 2
    assert all(box["x"] + box["width"] <= width and box["y"] + box["height"] <= height for box in boxes)
    assert any(
        f"diagrams/{path.name})" in page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")
    )


def test_every_tier_has_a_page() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    targets = {target: name for name, target in groups["lmcache_async.tiers"].items() if name != "redis"}

    assert [name for name in targets.values() if not (ROOT / "docs" / "tiers" / f"{name}.md").is_file()] == []


def test_every_page_of_results_is_in_the_navigation_and_in_the_table() -> None:
    folder = ROOT / "docs" / "benchmarks"
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    table = (folder / "README.md").read_text(encoding="utf-8")

    pages = {path.name for path in folder.glob("2*.md")}
    assert pages == set(re.findall(r"benchmarks/(2\S+\.md)", navigation))
    assert pages == set(re.findall(r"\]\((2[^)]+\.md)\)", table))
