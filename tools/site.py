"""What MkDocs does not do by itself: links that lead out of `docs/`, and the news of the next release.

The pages are written to be read in the tree, so they link to `../README.md` or to an example. On the site each such
file is a page below `source/`. MkDocs calls the functions whose names begin with `on_`, see `hooks` in mkdocs.yml.
"""

from __future__ import annotations

import html
import importlib
import posixpath
import pydoc
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # MkDocs loads this file by its path

from tools.changelog import read_fragments, section

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

SOURCE = "source"
NEWS = "changes/README.md"
WHOLE = {"reference/config.md": "lmcache_async.config", "reference/keys.md": "lmcache_async.hashing"}
"""Pages of all that a module has in its `__all__`; what a page does not name comes at its end."""

_LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?(?=\))")
_DIRECTIVE = re.compile(r"^::: (?P<name>lmcache_async\.[\w.]*Config)\n(?: +.*\n)*", re.MULTILINE)
_FENCE = re.compile(r"^(`{3,}).*?^\1\s*?$", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Pages that `nav` does not name come at its end: none is out of reach."""
    docs = Path(config.docs_dir)
    pages = sorted(path.relative_to(docs).as_posix() for path in docs.rglob("*.md"))
    named = str(config.nav)
    more = [page for page in pages if f"'{page}'" not in named and not _is_fragment(page)]
    if more:
        config.nav.append({"More": more})
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add a page for each file outside `docs/` that a page links to, and for those that they link to."""
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
    """Turn links between files of the tree into links between pages of the site."""
    uri = page.file.src_uri
    path = _path_of(uri)
    here = posixpath.dirname(uri)

    def link(match: re.Match[str]) -> str:
        target = _resolved(path, match["path"])
        if target is None:
            return match[0]
        return posixpath.relpath(_page_of(target), here or ".") + (match["anchor"] or "")

    written = _outside_fences(markdown, lambda text: _LINK.sub(link, text))
    if uri in WHOLE:
        written += _further_names(WHOLE[uri], written)
    written = _DIRECTIVE.sub(_with_options, written)
    if uri == NEWS:
        written += "\n" + section("The next release", read_fragments(ROOT / "docs" / "changes"))
    return written


def _further_names(module: str, markdown: str) -> str:
    """References of what the page does not name; the config's sections are among it, which need not be in `__all__`."""
    from lmcache_async.config import EngineConfig

    names = [f"{module}.{name}" for name in importlib.import_module(module).__all__]
    if module == EngineConfig.__module__.rpartition(".")[0]:
        found = [field.annotation for field in EngineConfig.model_fields.values()]
        sections = [one for one in found if isinstance(one, type) and hasattr(one, "model_fields")]
        names += [f"{one.__module__}.{one.__name__}" for one in sections]
    last = {name.rpartition(".")[2]: name for name in reversed(names)}
    return "".join(f"\n::: {name}\n" for short, name in last.items() if f".{short}\n" not in markdown)


def _with_options(match: re.Match[str]) -> str:
    """The reference of a part of the config, with a table of its keys where it has some."""
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
    """What a Markdown file of the tree links to, from the root."""
    text = _FENCE.sub("", (ROOT / path).read_text(encoding="utf-8"))
    for match in _LINK.finditer(text):
        target = _resolved(path, match["path"])
        if target is not None:
            yield target


def _resolved(path: str, link: str) -> str | None:
    """The file that a link leads to, from the root; a folder's is its README. None: there is none."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    if (ROOT / target).is_dir() and (ROOT / target / "README.md").is_file():
        return posixpath.join(target, "README.md")
    return target if (ROOT / target).exists() else None


def _page_of(target: str) -> str:
    """The page's place on the site."""
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
