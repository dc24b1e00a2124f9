"""MkDocs hooks: links from pages to files outside `docs/`, and the changelog of the next release.

Pages are written to be read in the repository, so they link to `../README.md` or to an example. On the site each
such file is a page below `source/`. MkDocs calls the functions `on_*`, see `hooks` in mkdocs.yml.
"""

from __future__ import annotations

import html
import importlib
import posixpath
import pydoc
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # MkDocs loads this file by its path; `tools.config_page` is imported later
SOURCE = "source"
NEWS = "changes/README.md"
WHOLE = {"reference/config.md": "lmcache_async.config", "reference/keys.md": "lmcache_async.hashing"}
"""Pages that document all of a module's `__all__`. Names that the page does not mention are added at its end."""

_LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?(?=\))")
_DIRECTIVE = re.compile(r"^::: (?P<name>lmcache_async\.[\w.]*Config)\n(?: +.*\n)*", re.MULTILINE)
_FENCE = re.compile(r"^(`{3,}).*?^\1\s*?$", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages that `nav` does not name at its end."""
    docs = Path(config.docs_dir)
    pages = sorted(path.relative_to(docs).as_posix() for path in docs.rglob("*.md"))
    named = str(config.nav)
    more = [page for page in pages if f"'{page}'" not in named and not _is_fragment(page)]
    if more:
        config.nav.append({"More": more})
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add a page for each file outside `docs/` that is linked, directly or through another such file."""
    from mkdocs.structure.files import File, InclusionLevel

    waiting = [posixpath.join("docs", file.src_uri) for file in files.documentation_pages()]
    seen: set[str] = set(waiting)
    while waiting:
        path = waiting.pop()
        for target in _targets(path):
            if target in seen or target.startswith("docs/"):
                continue
            seen.add(target)
            page = File.generated(
                config, _page_of(target), content=_content(target), inclusion=InclusionLevel.NOT_IN_NAV
            )
            files.append(page)
            if target.endswith(".md"):
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links between files of the repository to links between pages of the site."""
    uri = page.file.src_uri
    written = _rewrite_links(markdown, _path_of(uri), uri)
    if uri in WHOLE:
        written += _further_names(WHOLE[uri], written)
    written = _DIRECTIVE.sub(_with_options, written)
    if uri == NEWS:
        written += "\n" + _rewrite_links(_next_release(), "CHANGELOG.md", uri)
    return written


def _rewrite_links(markdown: str, path: str, uri: str) -> str:
    """Rewrite the links of a text from the file `path` of the repository for the page `uri`."""

    def link(match: re.Match[str]) -> str:
        target = _resolved(path, match["path"])
        if target is None:
            return match[0]
        return posixpath.relpath(_page_of(target), posixpath.dirname(uri) or ".") + (match["anchor"] or "")

    return _outside_fences(markdown, lambda text: _LINK.sub(link, text))


def _next_release() -> str:
    command = ["towncrier", "build", "--draft", "--version", "Next release"]
    result = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return result.stdout


def _further_names(module: str, markdown: str) -> str:
    """Return references of the names that the page does not mention, for the config with all its sections."""
    from lmcache_async.config import EngineConfig

    names = [f"{module}.{name}" for name in importlib.import_module(module).__all__]
    if module == EngineConfig.__module__.rpartition(".")[0]:
        found = [field.annotation for field in EngineConfig.model_fields.values()]
        sections = [one for one in found if isinstance(one, type) and hasattr(one, "model_fields")]
        names += [f"{one.__module__}.{one.__name__}" for one in sections]
    last = {name.rpartition(".")[2]: name for name in reversed(names)}
    return "".join(f"\n::: {name}\n" for short, name in last.items() if f".{short}\n" not in markdown)


def _with_options(match: re.Match[str]) -> str:
    """Add a table of the keys to the reference of a section of the configuration."""
    from tools.config_page import format_default

    model = pydoc.locate(match["name"])
    fields = getattr(model, "model_fields", {})
    rows = [
        f"| `{name}` | {format_default(field)} | {html.escape(field.description)} |"
        for name, field in fields.items()
        if field.description
    ]
    if not rows:
        return match[0]
    return "\n".join([match[0], "| key | default | meaning |", "|---|---|---|", *rows, ""])


def _is_fragment(page: str) -> bool:
    return page.startswith("changes/") and page != NEWS


def _targets(path: str) -> Iterator[str]:
    """Yield the targets of the links of a Markdown file, relative to the root."""
    text = _FENCE.sub("", (ROOT / path).read_text(encoding="utf-8"))
    for match in _LINK.finditer(text):
        target = _resolved(path, match["path"])
        if target is not None:
            yield target


def _resolved(path: str, link: str) -> str | None:
    """Return the target of a link, relative to the root; None if it does not exist. A folder's target is its README."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    if (ROOT / target).is_dir() and (ROOT / target / "README.md").is_file():
        return posixpath.join(target, "README.md")
    return target if (ROOT / target).exists() else None


def _page_of(target: str) -> str:
    """Return the path of the page on the site."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return posixpath.join(SOURCE, target if target.endswith(".md") else f"{target}.md")


def _path_of(uri: str) -> str:
    return uri.removeprefix(f"{SOURCE}/") if uri.startswith(f"{SOURCE}/") else posixpath.join("docs", uri)


def _content(target: str) -> str:
    path = ROOT / target
    if target.endswith(".md"):
        return path.read_text(encoding="utf-8")
    if path.is_dir():
        names = sorted(str(file.relative_to(path)) for file in path.rglob("*.*") if file.suffix != ".pyc")
        return f"# {target}\n\n" + "\n".join(f"- `{name}`" for name in names) + "\n"
    return f"# {target}\n\n````{path.suffix[1:] or 'text'}\n{path.read_text(encoding='utf-8')}\n````\n"


def _outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    pieces, end = [], 0
    for fence in _FENCE.finditer(markdown):
        pieces += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*pieces, change(markdown[end:])])
