"""All benchmarks by name. A new one is a file beside this one and a line in the table."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from lmcache_async.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from lmcache_async.bench.frame import BenchmarkModule

ALL = "all"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A line of the table.

    Attributes:
        name: Of its file too.
        needs: A package that must be there, beside our own requirements.
    """

    name: str
    summary: str
    needs: str = ""

    @property
    def available(self) -> bool:
        return not self.needs or importlib.util.find_spec(self.needs) is not None

    def load(self) -> BenchmarkModule:
        """Its file, imported now.

        Raises:
            MissingDependencyError: It needs a package that is not installed.
        """
        if not self.available:
            raise MissingDependencyError(
                f"the benchmark {self.name} needs {self.needs}, which is not installed: "
                f"pip install 'lmcache-async[{self.needs}]'"
            )
        return cast("BenchmarkModule", importlib.import_module(f"lmcache_async.bench.{self.name}"))


BENCHMARKS = (
    Benchmark("hash", "chunk keys from tokens, beside the bare hash function"),
    Benchmark("lookup", "a lookup of a long prompt, beside an echo of as many bytes and a dict"),
    Benchmark("arena", "store and retrieve in host memory, beside memcpy"),
    Benchmark("disk", "store and retrieve on disk, beside pwrite and pread"),
    Benchmark("loop", "what the event loop costs a chunk, beside one turn of the loop and one thread hop"),
    Benchmark("scheduler", "the connector on vLLM's scheduler thread, beside one look at the tokens", "vllm"),
    Benchmark("checksums", "store and load on disk with checksums, beside the same without"),
)


def find(name: str) -> list[Benchmark]:
    """The benchmarks of that name: one, or all that can run here for `all`.

    Raises:
        ConfigError: There is none.
    """
    if name == ALL:
        return [benchmark for benchmark in BENCHMARKS if benchmark.available]
    by_name = {benchmark.name: benchmark for benchmark in BENCHMARKS}
    if name in by_name:
        return [by_name[name]]
    names = [*by_name, ALL]
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f" did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"there is no benchmark {name!r};{hint} there are: {', '.join(names)}")
