"""Where the source refuses a config, and which of these places a piece of code passes."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
ERRORS = frozenset({"ConfigError", "MissingDependencyError", "UnknownPluginError", "disagree"})
VALIDATORS = (
    "lmcache_async/config",
    "lmcache_async/daemon/config.py",
    "lmcache_async/config/values.py",
    "lmcache_async/tiers/middleware/limit.py",
    "plugins",
)
"""Where a ValueError is a refusal too: pydantic makes an error of it. Of plugins, those files that read options."""
READERS = frozenset({"config.py", "address.py"})
NOT_OF_CONFIGS = (
    "lmcache_async/bench/",
    "lmcache_async/testing/",
    "lmcache_async/cli/",
    "lmcache_async/maintenance/",
    "plugins/disk/offline.py",
)
"""Benchmarks, tests and commands: what they refuse are their own options and files."""


@dataclass(frozen=True, slots=True, order=True)
class Site:
    """A statement that refuses a config.

    Attributes:
        file: Its path from the root.
        first: Its first line.
        last: Its last line.
        text: As it is written.
    """

    file: str
    first: int
    last: int
    text: str

    @property
    def name(self) -> str:
        """How lists name it: lines move, texts do not."""
        return f"{self.file}: {self.text}"


def sites() -> list[Site]:
    """Every place, in order."""
    found = []
    for folder in ("lmcache_async", "plugins", "stages"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            name = str(file.relative_to(ROOT))
            if not name.startswith(NOT_OF_CONFIGS):
                found += _in_file(name, ast.parse(file.read_text(encoding="utf-8")))
    return sorted(found)


@contextmanager
def passed(wanted: Iterable[Site]) -> Iterator[set[tuple[str, int]]]:
    """Record the executed lines, as file and number, of every function that contains one of these places.

    Other functions are not traced line by line: that would take most of the time.
    """
    by_file: dict[str, list[Site]] = {}
    for site in wanted:
        by_file.setdefault(str((ROOT / site.file).resolve()), []).append(site)
    lines: set[tuple[str, int]] = set()
    names: dict[CodeType, str] = {}

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        del argument
        if event == "line":
            lines.add((names[frame.f_code], frame.f_lineno))
        return local

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        del event, argument
        code = frame.f_code
        if code not in names:
            names[code] = _file_of(code, by_file.get(str(Path(code.co_filename).resolve()), []))
        return local if names[code] else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


def was_passed(site: Site, lines: set[tuple[str, int]]) -> bool:
    return any((site.file, line) in lines for line in range(site.first, site.last + 1))


def _file_of(code: CodeType, sites: Sequence[Site]) -> str:
    """Return the file of the sites if one of them is within the lines of `code`, else an empty string."""
    numbers = [number for _, _, number in code.co_lines() if number]
    for site in sites:
        if min(numbers, default=0) <= site.last and site.first <= max(numbers, default=0):
            return site.file
    return ""


def _in_file(name: str, tree: ast.Module) -> Iterator[Site]:
    reads = any(name.startswith(part) for part in VALIDATORS)
    if name.startswith("plugins"):
        reads = Path(name).name in READERS
    for node in ast.walk(tree):
        wanted: ast.expr | None = None
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            called = node.exc.func
            kind = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
            if kind in ERRORS or (kind == "ValueError" and reads):
                wanted = node.exc
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
            called = node.value.func
            if isinstance(called, ast.Name) and called.id in ERRORS:
                wanted = node.value
        elif isinstance(node, ast.Call) and _is_problems_append(node.func):
            wanted = node
        if wanted is not None:
            yield Site(
                name, node.lineno, node.end_lineno or node.lineno, " ".join(ast.unparse(wanted).split())
            )


def _is_problems_append(called: ast.expr) -> bool:
    match called:
        case ast.Attribute(value=ast.Name(id="problems"), attr="append"):
            return True
    return False
