"""What the connector costs vLLM's scheduler thread: each call, timed on that thread, for long prompts.

    python -m lmcache_async.bench.scheduler [--json FILE] [--requests N] [--tokens N] [--block-size N]

The scheduler half and its lookup thread are the real ones, so are vLLM's requests and block pool; lookups
are answered by the real server in another process, over an engine that has exactly the keys of every
second prompt. Each request goes through all calls that vLLM makes for it: arrival, matching until the
answer is there, then either a load and its end, or a prefill in steps with its stores, and the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from array import array
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from lmcache_async.bench.lookup_process import CHUNK, Workload, prompt, serve
from lmcache_async.config import load_config
from lmcache_async.integration.vllm.wire import socket_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


T = TypeVar("T")

STEP_TOKENS = 8192

_START_S = 120.0


@dataclass(slots=True)
class Spent:
    """Seconds that passed, and those of them in which the thread had a CPU.

    On a busy machine the two differ: a thread waits for a CPU, whatever it does.
    """

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def add(self, wall: float, cpu: float) -> None:
        self.wall.append(wall)
        self.cpu.append(cpu)


@dataclass(slots=True)
class Times:
    """What each call took, and all calls of each request together."""

    calls: defaultdict[str, Spent] = field(default_factory=lambda: defaultdict(Spent))
    requests: defaultdict[str, Spent] = field(default_factory=lambda: defaultdict(Spent))
    wall: float = 0.0
    cpu: float = 0.0

    def call(self, name: str, function: Callable[..., T], *arguments: Any) -> T:
        cpu, wall = time.thread_time(), time.perf_counter()
        result = function(*arguments)
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        self.calls[name].add(wall, cpu)
        self.wall += wall
        self.cpu += cpu
        return result

    def note(self, name: str) -> None:
        self.requests[name].add(self.wall, self.cpu)

    def end(self, name: str) -> None:
        self.note(name)
        self.note("all")
        self.wall = self.cpu = 0.0


class Driver:
    """The part of vLLM's scheduler that calls us."""

    def __init__(self, load: Workload, half: Any) -> None:
        from vllm.v1.core.block_pool import BlockPool

        self.load = load
        self.half = half
        self.times = Times()
        self.pool = BlockPool(
            8 * load.tokens // load.block_size, enable_caching=True, hash_block_size=load.block_size
        )
        self.tables: dict[str, list[Any]] = {}
        manager = SimpleNamespace(block_pool=self.pool, get_blocks=self._table)
        half.bind_cache_manager(manager)

    def run(self, index: int) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        half, times = self.half, self.times
        tokens = prompt(index, self.load.tokens)
        request = Request(f"r{index}", tokens, SamplingParams(max_tokens=1), None)
        times.call("on_new_request", half.on_new_request, request)
        external = self._match(request)
        blocks = self.pool.get_new_blocks(self.load.tokens // self.load.block_size)
        self.tables[request.request_id] = blocks
        table = self._table(request.request_id)
        times.call("update_state_after_alloc", half.allocated, request, table, external)
        times.note("until admitted")
        times.note("until admitted, hit" if external else "until admitted, miss")
        if external:
            self._load(request, external)
        else:
            self._prefill(request)
        times.call("request_finished", half.finished, request)
        self.pool.free_blocks(reversed(self.tables.pop(request.request_id)))
        times.end("hit" if external else "miss, with its stores")

    def _match(self, request: Any) -> int:
        """Ask as vLLM's idle loop does: once a step, of a millisecond."""
        while True:
            external, _ = self.times.call("get_num_new_matched_tokens", self.half.match, request, 0)
            if external is not None:
                return int(external)
            time.sleep(0.001)

    def _load(self, request: Any, external: int) -> None:
        metadata = self._step(request, 0)
        if len(metadata.loads) != 1:
            raise RuntimeError("the load was not planned")
        self._report(finished={request.request_id})
        request.num_computed_tokens = external - 1
        self.times.call(
            "update_state_after_alloc", self.half.allocated, request, self._table(request.request_id), 0
        )
        self._step(request, 1)

    def _prefill(self, request: Any) -> None:
        while request.num_computed_tokens < request.num_tokens:
            metadata = self._step(request, min(STEP_TOKENS, request.num_tokens - request.num_computed_tokens))
            if not metadata.stores:
                raise RuntimeError("nothing was stored")
            self._report(copied={job.job_id: 1 for job in metadata.stores})

    def _step(self, request: Any, count: int) -> Any:
        name = request.request_id
        output = SimpleNamespace(num_scheduled_tokens={name: count} if count else {})
        metadata = self.times.call("build_connector_meta", self.half.plan_step, output)
        request.num_computed_tokens += count
        return metadata

    def _report(self, *, finished: set[str] | None = None, copied: dict[int, int] | None = None) -> None:
        from lmcache_async.integration.vllm.metadata import WorkerReport

        output = SimpleNamespace(
            invalid_block_ids=set(),
            finished_recving=finished,
            kv_connector_worker_meta=WorkerReport(copied) if copied else None,
        )
        self.times.call("update_connector_output", self.half.update, output)

    def _table(self, request_id: str) -> Any:
        return SimpleNamespace(blocks=(self.tables[request_id],))


@contextlib.contextmanager
def scheduler_half(load: Workload, path: Path) -> Iterator[Any]:
    from lmcache_async.integration.vllm.lookup_client import LookupClient
    from lmcache_async.integration.vllm.scheduler import Roles, SchedulerHalf

    config = load_config(
        env={}, extra={"chunk_size": CHUNK, "vllm": {"lookup_timeout_s": 10, "max_pinned_fraction": 1}}
    )
    client = LookupClient([path], chunk_size=CHUNK, block_size=load.block_size, lookup_timeout_s=10.0)
    half = SchedulerHalf(config, block_size=load.block_size, world_size=1, roles=Roles(), client=client)
    try:
        while not client.ready:
            time.sleep(0.01)
        yield half
    finally:
        half.close()


def measure(load: Workload) -> Times:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="lma") as directory:
        path, ready = socket_path(Path(directory), "bench", 0), context.Event()
        server = context.Process(target=serve, args=(load, path, ready), daemon=True)
        server.start()
        try:
            if not ready.wait(_START_S):
                raise RuntimeError(f"the lookup server did not start within {_START_S:.0f} s")
            with scheduler_half(load, path) as half:
                driver = Driver(load, half)
                for index in range(load.requests):
                    driver.run(index)
                return driver.times
        finally:
            server.terminate()
            server.join()


def physical_floor(load: Workload, repeats: int = 50) -> Spent:
    """One look at each token id of a prompt: what any work on the scheduler's thread would cost at least."""
    times = Times()
    for index in range(repeats):
        tokens = prompt(index, load.tokens)
        times.call("array", array, "i", tokens)
    return times.calls["array"]


def summary(spent: Spent) -> dict[str, float]:
    """Median and 99th percentile in milliseconds, of wall and of CPU time."""
    row: dict[str, float] = {"count": len(spent.wall)}
    for clock, seconds in (("wall", sorted(spent.wall)), ("cpu", sorted(spent.cpu))):
        row[f"{clock}_median_ms"] = statistics.median(seconds) * 1e3
        row[f"{clock}_p99_ms"] = seconds[min(len(seconds) - 1, int(len(seconds) * 0.99))] * 1e3
    return row


def report(load: Workload) -> dict[str, Any]:
    times = measure(load)
    return {
        "workload": {"requests": load.requests, "tokens": load.tokens, "block_size": load.block_size},
        "per request": {name: summary(spent) for name, spent in times.requests.items()},
        "per call": {name: summary(spent) for name, spent in times.calls.items()},
        "reference": {"array('i', tokens)": summary(physical_floor(load))},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Cost of the connector on vLLM's scheduler thread.")
    parser.add_argument("--json", type=Path, help="write the numbers there too")
    for name, default in (("requests", 500), ("tokens", 32768), ("block-size", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args(arguments)
    result = report(Workload(given.requests, given.tokens, given.block_size))
    columns = ("count", "wall_median_ms", "wall_p99_ms", "cpu_median_ms", "cpu_p99_ms")
    for section in ("per request", "per call", "reference"):
        sys.stdout.write(f"{section:28}" + "".join(f"{column:>16}" for column in columns) + "\n")
        for name, row in result[section].items():
            numbers = "".join(f"{row[column]:16.3f}" for column in columns[1:])
            sys.stdout.write(f"  {name:26}{row['count']:16.0f}{numbers}\n")
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
