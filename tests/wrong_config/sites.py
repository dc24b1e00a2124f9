"""Statements of the source that refuse a config, and those that a piece of code executes."""

from __future__ import annotations

import ast
import re
import sys
import trace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("lmcache_async", "plugins", "stages")
REFUSAL = re.compile(
    r"(raise|return) (ConfigError|MissingDependencyError|UnknownPluginError|disagree)\(|problems\.append\("
)
VALIDATORS = (
    "lmcache_async/config",
    "lmcache_async/daemon/config.py",
    "lmcache_async/config/values.py",
    "lmcache_async/tiers/middleware/limit.py",
    "plugins",
)
"""A ValueError is a refusal where pydantic turns it into an error. Of plug-ins, only the files that parse options."""
READERS = frozenset({"config.py", "address.py"})
NOT_OF_CONFIGS = (
    "lmcache_async/bench/",
    "lmcache_async/testing/",
    "lmcache_async/cli/",
    "lmcache_async/maintenance/",
    "plugins/disk/offline.py",
)
"""Benchmarks, tests and commands, which refuse their own options and files."""


@dataclass(frozen=True, slots=True, order=True)
class Site:
    """A statement that refuses a config.

    Attributes:
        file: Its path from the root.
        first: Its first line.
        last: Its last line.
        text: Its source text.
    """

    file: str
    first: int
    last: int
    text: str

    @property
    def name(self) -> str:
        """Its name in lists, without line numbers, which change."""
        return f"{self.file}: {self.text}"


def sites() -> list[Site]:
    """Return every such statement, in order."""
    found = []
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            name = str(file.relative_to(ROOT))
            if not name.startswith(NOT_OF_CONFIGS):
                found += _in_file(name, ast.parse(file.read_text(encoding="utf-8")))
    return sorted(found)


def executed(runs: Iterable[Callable[[], object]]) -> set[tuple[str, int]]:
    """Return the executed lines of the source, as file and number."""
    tracer = trace.Trace(trace=False, ignoredirs=[sys.prefix, sys.base_prefix])
    before = sys.gettrace()
    try:
        for run in runs:
            tracer.runfunc(run)
    finally:
        sys.settrace(before)
    found = {(Path(file).resolve(), line) for file, line in tracer.results().counts}
    return {(str(file.relative_to(ROOT)), line) for file, line in found if file.is_relative_to(ROOT)}


def was_passed(site: Site, lines: set[tuple[str, int]]) -> bool:
    return any((site.file, line) in lines for line in range(site.first, site.last + 1))


def _in_file(name: str, tree: ast.Module) -> Iterator[Site]:
    reads = any(name.startswith(part) for part in VALIDATORS)
    if name.startswith("plugins"):
        reads = Path(name).name in READERS
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise | ast.Return | ast.Expr):
            text = " ".join(ast.unparse(node).split())
            if REFUSAL.match(text) or (reads and text.startswith("raise ValueError(")):
                yield Site(name, node.lineno, node.end_lineno or node.lineno, text)
