"""Where the source refuses a config, and which of these places a piece of code passes."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
ERRORS = frozenset({"ConfigError", "MissingDependencyError", "UnknownPluginError", "disagree"})
VALIDATORS = (
    "lmcache_async/config",
    "lmcache_async/daemon/config.py",
    "lmcache_async/config/values.py",
    "lmcache_async/tiers/layers/limit.py",
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
def passed() -> Iterator[set[tuple[str, int]]]:
    """File and line of all that is executed in files of ours within the block."""
    lines: set[tuple[str, int]] = set()
    names: dict[str, str | None] = {}

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        del argument
        if event == "line":
            lines.add((names[frame.f_code.co_filename] or "", frame.f_lineno))
        return local

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if file not in names:
            names[file] = _ours(file)
        return local if names[file] else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


def was_passed(site: Site, lines: set[tuple[str, int]]) -> bool:
    return any((site.file, line) in lines for line in range(site.first, site.last + 1))


def _ours(file: str) -> str | None:
    path = Path(file).resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) and "tests" not in path.parts else None


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
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "problems.append":
            wanted = node
        if wanted is not None:
            yield Site(
                name, node.lineno, node.end_lineno or node.lineno, " ".join(ast.unparse(wanted).split())
            )
