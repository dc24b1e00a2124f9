"""Cost of the connector on vLLM's scheduler thread: each call, timed on that thread, for long prompts.

The scheduler connector, its lookup thread, and vLLM's requests and block pool are real. Lookups are answered
by the real server in another process, with an engine that has exactly the keys of every second prompt. Each
request passes all calls that vLLM makes for it: arrival, matching until there is an answer, then either a
load and its end, or a prefill in steps with its stores, and the end. The limit is one read of each token id
of the prompt, the minimum cost of any work with its tokens on that thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import multiprocessing
import random
import statistics
import tempfile
import time
from array import array
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from lmcache_async.bench.measure import Frame, Row
from lmcache_async.config import load_config
from lmcache_async.engine.lookup import FirstPresent, LookupResult
from lmcache_async.hashing import ChunkHasher
from lmcache_async.integration.vllm.lookup_server import PROTOCOL, Identity, LookupServer, socket_path
from lmcache_async.types import ChunkKey
from tools.benchmarks.command import option

CHUNK = 256
ROOT = b"scheduler bench."


@dataclass(frozen=True, slots=True)
class Workload:
    """Attributes are options; see docs/benchmarks.md."""

    requests: int = option(500, "requests, every second one a hit")
    tokens: int = option(32768, "tokens of each prompt")
    block_size: int = option(16, "tokens of vLLM's blocks")


class KnownKeys:
    """An engine that has the chunks of every second prompt."""

    def __init__(self, load: Workload) -> None:
        self.keys: set[bytes] = set()
        for index in range(0, load.requests, 2):
            self.keys.update(ChunkHasher(ROOT, chunk_size=CHUNK).extend_keys(prompt(index, load.tokens)))

    async def lookup_keys(self, keys: Sequence[ChunkKey], *, lookup_id: str | None = None) -> LookupResult:
        del lookup_id
        count = next((at for at, key in enumerate(keys) if key not in self.keys), len(keys))
        return LookupResult(count=count, by_tier={"cpu": count}, pinned=count)

    async def first_present(
        self, runs: Sequence[Sequence[ChunkKey]], *, lookup_id: str | None = None
    ) -> FirstPresent | None:
        del lookup_id
        position = next((at for at, run in enumerate(runs) if self.keys.issuperset(run)), None)
        return FirstPresent(position, pinned=True, tier="cpu") if position is not None else None

    def unpin(self, lookup_id: str) -> None:
        del lookup_id


def prompt(index: int, num_tokens: int) -> list[int]:
    """Return new int objects above Python's cached ones, as a tokenizer makes them."""
    chosen = random.Random(index)
    return [chosen.randrange(1000, 128000) for _ in range(num_tokens)]


def serve(load: Workload, path: Path, ready: Any) -> None:
    """Main function of the other process: one rank's lookup server."""

    async def main() -> None:
        identity = Identity(PROTOCOL, ROOT, "xxh3_128", CHUNK, load.block_size)
        await LookupServer(KnownKeys(load), identity, path, clear=_never).start()
        ready.set()
        await asyncio.Event().wait()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())


async def _never(epoch: int, memory_only: bool) -> int:
    raise RuntimeError(f"unexpected clear ({epoch}, {memory_only})")


T = TypeVar("T")

STEP_TOKENS = 8192
LIMIT = "array('i', tokens)"

Settings = Workload
QUICK = Workload(requests=6, tokens=2048)

_START_S = 120.0


@dataclass(slots=True)
class Spent:
    """Wall-clock seconds, and CPU seconds of the thread.

    On a busy machine the two differ, because the thread waits for a CPU.
    """

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)  # of the requests

    def add(self, wall: float, cpu: float, number: int) -> None:
        self.wall.append(wall)
        self.cpu.append(cpu)
        self.numbers.append(number)


@dataclass(slots=True)
class Times:
    """Times of each call, and of all calls of each request together."""

    calls: defaultdict[str, Spent] = field(default_factory=lambda: defaultdict(Spent))
    requests: defaultdict[str, Spent] = field(default_factory=lambda: defaultdict(Spent))
    number: int = 0
    wall: float = 0.0
    cpu: float = 0.0

    def call(self, name: str, function: Callable[..., T], *arguments: Any) -> T:
        cpu, wall = time.thread_time(), time.perf_counter()
        result = function(*arguments)
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        self.calls[name].add(wall, cpu, self.number)
        self.wall += wall
        self.cpu += cpu
        return result

    def note(self, name: str) -> None:
        self.requests[name].add(self.wall, self.cpu, self.number)

    def end(self, name: str) -> None:
        self.note(name)
        self.note("all")
        self.wall = self.cpu = 0.0


class Driver:
    """The calls of vLLM's scheduler to the connector."""

    def __init__(self, load: Workload, side: Any) -> None:
        from vllm.v1.core.block_pool import BlockPool

        self.load = load
        self.side = side
        self.times = Times()
        self.pool = BlockPool(
            8 * load.tokens // load.block_size, enable_caching=True, hash_block_size=load.block_size
        )
        self.tables: dict[str, list[Any]] = {}
        manager = SimpleNamespace(block_pool=self.pool, get_blocks=self._table)
        side.bind_cache_manager(manager)

    def run(self, index: int) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        side, times = self.side, self.times
        times.number = index
        tokens = prompt(index, self.load.tokens)
        request = Request(f"r{index}", tokens, SamplingParams(max_tokens=1), None)
        times.call("on_new_request", side.on_new_request, request)
        external = self._match(request)
        blocks = self.pool.get_new_blocks(self.load.tokens // self.load.block_size)
        self.tables[request.request_id] = blocks
        table = self._table(request.request_id)
        times.call("update_state_after_alloc", side.allocated, request, table, external)
        times.note("until admitted")
        times.note("until admitted, hit" if external else "until admitted, miss")
        if external:
            self._load(request, external)
        else:
            self._prefill(request)
        times.call("request_finished", side.finished, request)
        self.pool.free_blocks(reversed(self.tables.pop(request.request_id)))
        times.end("hit" if external else "miss, with its stores")

    def _match(self, request: Any) -> int:
        """Poll as in vLLM's idle loop: once per step of a millisecond."""
        while True:
            external, _ = self.times.call("get_num_new_matched_tokens", self.side.match, request, 0)
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
            "update_state_after_alloc", self.side.allocated, request, self._table(request.request_id), 0
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
        output = SimpleNamespace(
            num_scheduled_tokens={name: count} if count else {},
            total_num_scheduled_tokens=count,
            scheduled_spec_decode_tokens={},
        )
        metadata = self.times.call("build_connector_meta", self.side.plan_step, output)
        request.num_computed_tokens += count
        return metadata

    def _report(self, *, finished: set[str] | None = None, copied: dict[int, int] | None = None) -> None:
        from lmcache_async.integration.vllm.jobs import WorkerReport

        output = SimpleNamespace(
            invalid_block_ids=set(),
            finished_recving=finished,
            kv_connector_worker_meta=WorkerReport(copied) if copied else None,
        )
        self.times.call("update_connector_output", self.side.update, output)

    def _table(self, request_id: str) -> Any:
        return SimpleNamespace(blocks=(self.tables[request_id],))


@contextlib.contextmanager
def scheduler_of(load: Workload, path: Path) -> Iterator[Any]:
    from lmcache_async.integration.vllm.groups import KVGroup, KVGroups
    from lmcache_async.integration.vllm.lookup import LookupClient
    from lmcache_async.integration.vllm.request import Roles
    from lmcache_async.integration.vllm.scheduler import SchedulerConnector

    config = load_config(
        env={}, extra={"chunk_size": CHUNK, "vllm": {"lookup_timeout_s": 10, "max_pinned_fraction": 1}}
    )
    groups = KVGroups((KVGroup(0, load.block_size),))
    client = LookupClient([path], chunk_size=CHUNK, groups=groups, lookup_timeout_s=10.0)
    side = SchedulerConnector(config, groups=groups, world_size=1, roles=Roles(), client=client)
    try:
        while not client.ready:
            time.sleep(0.01)
        yield side
    finally:
        side.close()


async def run(settings: Settings, frame: Frame) -> AsyncIterator[Row]:
    """Yield the rows. A round is a request with its own limit."""
    times, floors = measure(settings, frame)
    for kind, spent_by_name in (("request", times.requests), ("call", times.calls)):
        for name, spent in spent_by_name.items():
            yield _row(settings, f"{kind}: {name}", spent, floors)


def measure(load: Workload, frame: Frame) -> tuple[Times, list[float]]:
    """Return the times of the calls, and the limit of each request."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="lma") as directory:
        path, ready = socket_path(Path(directory), "bench", 0), context.Event()
        server = context.Process(target=serve, args=(load, path, ready), daemon=True)
        server.start()
        try:
            if not ready.wait(_START_S):
                raise RuntimeError(f"the lookup server did not start within {_START_S:.0f} s")
            with scheduler_of(load, path) as side:
                driver = Driver(load, side)
                floors = [_one_request(driver, frame, index) for index in range(load.requests)]
                return driver.times, floors
        finally:
            server.terminate()
            server.join()


def _one_request(driver: Driver, frame: Frame, index: int) -> float:
    """Run a request and measure its limit, in a random order. Return the limit."""
    floor_first = frame.chosen.random() < 0.5
    floor = _floor(driver.load, index) if floor_first else 0.0
    driver.run(index)
    frame.progress(index + 1, driver.load.requests)
    return floor if floor_first else _floor(driver.load, index)


def _floor(load: Workload, index: int) -> float:
    """Return the seconds of one read of each token id of a new prompt."""
    tokens = prompt(load.requests + index, load.tokens)
    start = time.perf_counter()
    array("i", tokens)
    return time.perf_counter() - start


def _row(load: Workload, name: str, spent: Spent, floors: Sequence[float]) -> Row:
    wall, cpu = sorted(spent.wall), sorted(spent.cpu)
    more = {
        "count": len(wall),
        "p99_ms": 1e3 * _percentile(wall),
        "cpu_median_ms": 1e3 * statistics.median(cpu),
        "cpu_p99_ms": 1e3 * _percentile(cpu),
    }
    values = [1e3 * seconds for seconds in spent.wall]
    limits = [1e3 * floors[number] for number in spent.numbers]
    row = Row.of(name, "ms", values, LIMIT, limits, dataclasses.asdict(load), more)
    return dataclasses.replace(row, ratios=())  # one for each request, too many to list


def _percentile(ordered: Sequence[float]) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
