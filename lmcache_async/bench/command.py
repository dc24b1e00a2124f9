"""`python -m lmcache_async.bench NAME [options]`: the benchmarks where the extra `cli` is not installed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_async.bench.frame import DEFAULT_ROUNDS, count
from lmcache_async.bench.runner import Request, lines, run
from lmcache_async.bench.table import ALL, BENCHMARKS, left_out
from lmcache_async.errors import LMCacheAsyncError

if TYPE_CHECKING:
    from collections.abc import Sequence

FORMER_DEFAULT = "scheduler"


def main(arguments: Sequence[str]) -> int:
    """Run what the arguments say; the exit status. Without a name it is `scheduler`, as it always was."""
    names = "\n".join(f"  {benchmark.name:12}{benchmark.summary}" for benchmark in BENCHMARKS)
    parser = argparse.ArgumentParser(
        prog="python -m lmcache_async.bench",
        description=f"Benchmarks:\n{names}\n  {ALL:12}all of them, one after the other",
        epilog="Options of single benchmarks are in docs/benchmarks.md.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--report", type=Path, help="write report.html and plots to this directory")
    parser.add_argument(
        "--rounds", type=count, help=f"how often each is measured; {DEFAULT_ROUNDS} by default"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, only to see that it runs")
    name, rest = FORMER_DEFAULT, list(arguments)
    if rest and not rest[0].startswith("-"):
        name, rest = rest[0], rest[1:]
    given, own = parser.parse_known_args(rest)
    try:
        request = Request(name, given.json, given.report, given.rounds, given.quick, tuple(own))
        for result in run(request, lambda *_: None):
            sys.stdout.write("\n".join(lines(result)) + "\n")
    except LMCacheAsyncError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if name == ALL:
        sys.stderr.write("".join(f"{line}\n" for line in left_out()))
    return 0
