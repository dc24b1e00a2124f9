"""The worker connector over an engine controlled by the test."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmcache_async.config import load_config
from lmcache_async.device.layout import KVLayout
from lmcache_async.engine import loop as loop_module
from lmcache_async.engine.builder import EngineGroup
from lmcache_async.errors import ConfigError
from lmcache_async.hashing import Namespace
from lmcache_async.integration.vllm import worker as worker_module
from lmcache_async.integration.vllm.groups import KVGroup, KVGroups
from lmcache_async.integration.vllm.jobs import SKIP, Job, JobPart, StepMetadata, WorkerReport
from lmcache_async.integration.vllm.lookup_server import encode, receive, socket_path
from lmcache_async.integration.vllm.worker import RankEngine, Transfers, WorkerConnector
from lmcache_async.memory.threads import wait_done
from lmcache_async.metrics.metrics import EngineMetrics
from lmcache_async.testing.steps import DEADLINE_S, turns
from lmcache_async.types import RetrieveReport, StoreReport
from tests.support.broken_loop import BrokenLoops
from tests.support.vllm_simulator import Until

CHUNK, BLOCK = 4, 2
LAYERS = ("first", "second")


class Engine:
    """An engine with results from `retrieve` and `store`, set by the test."""

    def __init__(self) -> None:
        self.copier = self
        self.fences = 0
        self.metrics = EngineMetrics()
        self.retrieved: list[Any] = []
        self.stored: list[Any] = []
        self.cleared: list[bool] = []
        self.hit_chunks = 99
        self.error: Exception | None = None
        self.store_report = StoreReport()
        self.reports: dict[str, StoreReport | RetrieveReport] = {}
        self.gate = threading.Event()
        self.gate.set()

    def fence(self) -> int:
        self.fences += 1
        return self.fences

    async def retrieve_chunks(self, request: Any) -> RetrieveReport:
        self.retrieved.append(request)
        await asyncio.to_thread(self.gate.wait)
        if self.error:
            raise self.error
        return RetrieveReport(hit_chunks=min(self.hit_chunks, len(request.chunks)))

    async def store_chunks(self, request: Any) -> StoreReport:
        self.stored.append(request)
        await asyncio.to_thread(self.gate.wait)
        if self.error:
            raise self.error
        request.on_copied()
        return self.store_report

    def report_stored(self, request_id: str, report: StoreReport) -> None:
        assert self.reports.setdefault(f"stored {request_id}", report) is report, "reported twice"

    def report_retrieved(self, request_id: str, report: RetrieveReport) -> None:
        assert self.reports.setdefault(f"retrieved {request_id}", report) is report, "reported twice"

    def memory_lookup(self) -> None:
        return None

    def watched_memory(self) -> str | None:
        return "cpu"

    async def clear(self, *, memory_only: bool = False) -> int:
        self.cleared.append(memory_only)
        return 3


def job(job_id: int = 1, *, blocks: tuple[int, ...] = (10, 11, 12, 13, 14), epoch: int = 0) -> Job:
    num_tokens = len(blocks) * BLOCK
    return Job(
        job_id=job_id,
        request_id=f"r{job_id}",
        request_namespace="tenant",
        epoch=epoch,
        parts=(
            JobPart(
                group=0,
                start=0,
                tokens=array("i", range(num_tokens)).tobytes(),
                keys=(b"0" * 16 * 3, b"1" * 16 * 3),
                texts=(),
                block_ids=array("q", blocks).tobytes(),
            ),
        ),
    )


class Worker(WorkerConnector):
    """A worker connector with the test's engine."""

    def __init__(
        self,
        engine: Engine,
        socket_dir: Path,
        groups: KVGroups,
        *,
        rank: int = 1,
        kv_events: bool = False,
    ) -> None:
        self.engine = engine
        self.closed = False
        self.socket = socket_path(socket_dir, "engine", 1)

        @contextlib.asynccontextmanager
        async def open_engine(*args: Any, **kwargs: Any) -> AsyncIterator[Engine]:
            self.watcher = kwargs.get("watcher")
            yield engine
            self.closed = True

        self.rank = RankEngine(
            load_config(env={}, extra={"chunk_size": CHUNK}),
            rank=rank,
            groups=groups,
            address=self.socket,
            kv_events=kv_events,
            open_engine=open_engine,
        )
        self.open = self.rank.open
        super().__init__([self.rank])

    def step(self, *loads: Job, stores: Sequence[Job] = ()) -> None:
        self.begin_step(StepMetadata(loads=loads, stores=tuple(stores)))
        self.start_stores()


NAMESPACE = Namespace(model="m0", weights="w", dtype="float32", layout="l")


@pytest.fixture
def layout() -> KVLayout:
    layers = {name: torch.zeros(20, 1, BLOCK, 4) for name in LAYERS}
    return KVLayout.from_block_views(layers, num_blocks=20, block_size=BLOCK)


@pytest.fixture
def make(socket_dir: Path, layout: KVLayout) -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def make(
        engine: Engine | None = None, groups: Sequence[KVGroup] = (KVGroup(0, BLOCK),), **options: Any
    ) -> Worker:
        made.append(Worker(engine or Engine(), socket_dir, KVGroups(groups), **options))
        made[-1].open(*(EngineGroup(layout, replace(NAMESPACE, model=f"m{group.index}")) for group in groups))
        return made[-1]

    yield make
    for side in made:
        side.engine.gate.set()
        side.close()


@pytest.fixture
def worker(make: Callable[..., Worker]) -> Worker:
    return make()


def finished(worker: Worker, until: Until, count: int = 1) -> tuple[list[str], set[int]]:
    names: list[str] = []

    def more() -> bool:
        names.extend(worker.take_finished())
        return len(names) >= count

    until(more)
    return names, worker.take_failed_blocks()


def reports(worker: Worker, until: Until, *, copied: int = 0, answered: int = 0) -> WorkerReport:
    """The sum of all reports until so many stores are copied, and so many are answered by the tiers."""
    found = WorkerReport({})

    def more() -> bool:
        nonlocal found
        found = found.aggregate(worker.take_report() or WorkerReport({}))
        return len(found.copied) >= copied and len(found.answered) >= answered

    until(more)
    return found


def copied(worker: Worker, until: Until, count: int = 1) -> Mapping[int, int]:
    return reports(worker, until, copied=count).copied


def test_a_load_gives_the_engine_its_ranks_chunks_and_ends_once(worker: Worker, until: Until):
    worker.begin_step(StepMetadata(loads=(job(),)))
    worker.start_loads()  # not again: on a CPU a load begins with the step

    assert finished(worker, until) == (["r1"], set())
    (request,) = worker.engine.retrieved
    assert [chunk.key for chunk in request.chunks] == [b"1" * 16] * 3
    assert [rows.tolist() for rows in request.rows] == [[10, 11], [12, 13], [14]]
    assert request.request_namespace == "tenant"
    assert worker.take_finished() == set()


def test_a_load_that_a_step_awaits_has_ended_when_the_step_ends(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(worker_module, "IDLE_S", 60.0)
    worker.engine.gate.clear()
    transfers = worker.rank.transfers
    wait = transfers.wait

    def open_gate_and_wait(jobs: Collection[int], timeout_s: float) -> None:
        worker.engine.gate.set()
        wait(jobs, timeout_s)

    monkeypatch.setattr(transfers, "wait", open_gate_and_wait)
    worker.begin_step(StepMetadata(loads=(replace(job(), awaited=True), job(2))))

    assert "r1" in worker.take_finished()
    assert {each.request_id: each.waited_for for each in worker.engine.retrieved} == {"r1": True, "r2": False}


def test_an_awaited_load_that_takes_too_long_ends_in_a_later_step(
    worker: Worker, until: Until, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(worker_module, "IDLE_S", 0.0)
    worker.engine.gate.clear()
    worker.begin_step(StepMetadata(loads=(replace(job(), awaited=True),)))
    assert worker.take_finished() == set()

    worker.engine.gate.set()
    assert finished(worker, until) == (["r1"], set())


def test_blocks_beyond_the_hit_are_reported_no_later_than_the_end(worker: Worker, until: Until):
    worker.engine.hit_chunks = 1
    worker.begin_step(StepMetadata(loads=(job(blocks=(SKIP, 11, SKIP, 13, 14)),)))

    assert finished(worker, until) == (["r1"], {13, 14})


@pytest.mark.parametrize("broken", ["the engine", "the fence"])
def test_an_error_fails_every_block_of_a_load_and_releases_the_blocks_of_a_store(
    worker: Worker, until: Until, monkeypatch: pytest.MonkeyPatch, broken: str
):
    if broken == "the engine":
        worker.engine.error = RuntimeError("a bug")
    else:
        monkeypatch.setattr(worker.engine, "fence", lambda: 1 / 0)
    worker.step(job(blocks=(SKIP, 11, 12)), stores=[job(7)])

    assert finished(worker, until) == (["r1"], {11, 12})
    assert copied(worker, until) == {7: 1}


@pytest.mark.parametrize("broken", ["the fence", "the loop"])
def test_a_store_that_is_handed_over_and_cannot_be_started_is_reported_as_not_shared(
    make: Callable[..., Worker], until: Until, monkeypatch: pytest.MonkeyPatch, broken: str
):
    loops = BrokenLoops(monkeypatch)
    side = make()
    if broken == "the fence":
        monkeypatch.setattr(side.engine, "fence", lambda: 1 / 0)
        side.step(stores=[replace(job(7), hand_over=True)])
    else:
        side.engine.gate.clear()
        side.step(stores=[replace(job(7), hand_over=True)])
        until(lambda: bool(side.engine.stored))
        loops.break_one(side.rank._loop.call_soon)
    reports: list[WorkerReport] = []
    until(lambda: bool(reports.extend(filter(None, [side.take_report()])) or reports))
    side.engine.gate.set()

    assert [(dict(report.answered), dict(report.unshared)) for report in reports] == [({7: 1}, {7: 3})]
    side.close()
    assert side.take_report() is None


def test_a_broken_load_does_not_affect_others(worker: Worker, until: Until):
    broken = Job(2, "r2", "", 0, (JobPart(0, 0, b"\0" * 16, (), (), array("q", [3, 4]).tobytes()),))
    worker.begin_step(StepMetadata(loads=(broken, job())))

    names, failed = finished(worker, until, 2)
    assert (sorted(names), failed) == (["r1", "r2"], {3, 4})


@pytest.mark.parametrize(
    "second", [KVGroup(1, BLOCK), KVGroup(1, BLOCK, window=3 * BLOCK)], ids=["full attention", "windows"]
)
def test_a_load_of_two_groups_ends_once_and_fails_as_a_whole_request(
    make: Callable[..., Worker], until: Until, second: KVGroup
):
    """VLLM cannot map block ids of several groups to requests."""
    side = make(groups=(KVGroup(0, BLOCK), second))
    (first,) = job().parts
    both = replace(job(), parts=(first, replace(first, group=1)))
    side.engine.hit_chunks = 2
    side.step(both, stores=[replace(both, job_id=8)])

    assert finished(side, until) == (["r1"], set())
    assert side.take_failed_requests() == {"r1"}
    assert copied(side, until) == {8: 1}
    assert len(side.engine.stored) == 2
    assert [request.group for request in side.engine.retrieved] == [0, 1]


def test_a_job_of_several_groups_is_reported_once(make: Callable[..., Worker], until: Until):
    class Reporting(Engine):
        """The second group has a window of one chunk, of which nothing is found."""

        async def retrieve_chunks(self, request: Any) -> RetrieveReport:
            if request.group:
                return RetrieveReport(asked_tokens=4, cause="miss", seconds=0.5)
            found = Counter({"cpu": 10})
            return RetrieveReport(
                hit_chunks=3, hit_tokens=10, asked_tokens=10, bytes=10**6, by_tier=found, seconds=0.1
            )

        async def store_chunks(self, request: Any) -> StoreReport:
            dropped = Counter({"full": 1})
            return StoreReport(
                stored=1, present=1, dropped=dropped, tokens=6 - request.group, bytes=10**6, seconds=0.5
            )

    side = make(Reporting(), (KVGroup(0, BLOCK), KVGroup(1, BLOCK)))
    (first,) = job().parts
    both = replace(job(), parts=(first, replace(first, group=1)))
    side.step(both, stores=[replace(both, job_id=8)])
    until(lambda: len(side.engine.reports) == 2)

    load, stored = (side.engine.reports[f"{verb} r1"] for verb in ("retrieved", "stored"))
    assert isinstance(load, RetrieveReport)
    assert isinstance(stored, StoreReport)
    assert (load.hit_tokens, load.asked_tokens, dict(load.by_tier), load.cause) == (
        10,
        10,
        {"cpu": 10},
        "miss",
    )
    assert (load.bytes, load.seconds) == (10**6, 0.5)
    assert (stored.tokens, stored.stored, stored.present, stored.bytes) == (6, 2, 2, 2 * 10**6)
    assert dict(stored.dropped) == {"full": 2}


def test_after_a_group_that_fails_at_once_no_other_group_is_loaded(make: Callable[..., Worker], until: Until):
    """A coroutine that is never awaited would be a warning, which fails the test."""

    class Failing(Engine):
        async def retrieve_chunks(self, request: Any) -> RetrieveReport:
            self.retrieved.append(request)
            raise OSError("no more threads")

    side = make(Failing(), [KVGroup(index, BLOCK) for index in range(4)])
    (first,) = job().parts
    parts = tuple(replace(first, group=index) for index in range(4))
    side.begin_step(StepMetadata(loads=(replace(job(), parts=parts),)))

    assert finished(side, until) == (["r1"], set())
    assert side.take_failed_requests() == {"r1"}
    side.close()
    assert [request.group for request in side.engine.retrieved] == [0]


@pytest.mark.parametrize("leading", [0, 1])
def test_kv_events_are_of_the_leading_group(make: Callable[..., Worker], until: Until, leading: int):
    window = KVGroup(1 - leading, BLOCK, window=3 * BLOCK)
    groups = sorted([KVGroup(leading, BLOCK), window, KVGroup(2, BLOCK)], key=lambda group: group.index)
    side = make(groups=groups, rank=0, kv_events=True)
    (part,) = job(blocks=(10, 11)).parts
    keys = [bytes([group.index]) * 16 for group in groups]
    parts = tuple(
        replace(part, group=group.index, keys=(key,)) for group, key in zip(groups, keys, strict=True)
    )
    side.step(stores=[replace(job(), parts=parts, event_lora_name="")])
    copied(side, until)

    side.watcher.stored("cpu", keys)
    report = side.take_report()

    assert report is not None
    assert [event.key for event in report.events] == [keys[leading]]


def test_stores_start_after_the_forward_behind_a_fence(worker: Worker, until: Until):
    worker.begin_step(StepMetadata(stores=(job(7),)))
    assert not worker.engine.stored
    worker.start_stores()

    assert copied(worker, until) == {7: 1}
    assert worker.engine.stored[0].fence == 1
    assert worker.take_report() is None


@pytest.mark.parametrize(
    ("report", "unshared"),
    [
        (StoreReport(stored=3, shared=3), 0),
        (StoreReport(stored=2, shared=1, present=1), 1),
        (StoreReport(stored=3), 3),
        (StoreReport(present=3), None),
        (None, 3),
    ],
    ids=["all", "not all", "none", "written before", "it failed"],
)
def test_the_result_of_a_store_for_a_consumer_is_reported(
    worker: Worker, until: Until, report: StoreReport | None, unshared: int | None
):
    if report is None:
        worker.engine.error = RuntimeError("a bug")
    else:
        worker.engine.store_report = report
    worker.step(stores=[replace(job(7), hand_over=True), job(8)])
    found = reports(worker, until, copied=2, answered=1)

    assert found.answered == {7: 1}
    assert found.unshared == ({} if unshared is None else {7: unshared})


def test_the_models_thread_never_waits_for_an_engine(worker: Worker, until: Until):
    worker.engine.gate.clear()
    worker.step(job(1), stores=[job(2)])

    assert worker.take_finished() == set()
    assert worker.take_report() is None
    worker.engine.gate.set()
    assert finished(worker, until)[0] == ["r1"]
    assert copied(worker, until) == {2: 1}


async def ask(path: Path, message: dict[str, Any]) -> dict[str, Any]:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(encode({"id": 1, **message}))
    try:
        return await receive(reader)
    finally:
        writer.close()
        await writer.wait_closed()


async def test_a_client_of_another_protocol_gets_an_error_and_the_server_continues(worker: Worker):
    assert "error" in await ask(worker.socket, {"op": "nonsense"})
    assert (await ask(worker.socket, {"op": "hello"}))["root"] == NAMESPACE.root()


async def test_a_store_planned_before_a_reset_is_dropped_after_it(worker: Worker, until: Until):
    await ask(worker.socket, {"op": "clear", "epoch": 1, "memory_only": True})
    worker.step(stores=[replace(job(1, epoch=0), hand_over=True), job(2, epoch=1)])
    found = reports(worker, until, copied=2, answered=1)

    assert (found.copied, found.answered) == ({1: 1, 2: 1}, {1: 1})
    assert found.unshared == {}  # that says nothing about the tiers
    assert [request.request_id for request in worker.engine.stored] == ["r2"]
    assert worker.engine.cleared == [True]


@pytest.mark.parametrize("turns_before", range(8))
async def test_no_group_of_a_store_begins_after_a_reset_has_begun(turns_before: int):
    """A reset waits only for the stores that have begun."""
    calls: list[str] = []

    class Slow(Engine):
        async def store_chunks(self, request: Any) -> StoreReport:
            calls.append("store")
            await turns(20)
            return await super().store_chunks(request)

        async def clear(self, *, memory_only: bool = False) -> int:
            calls.append("clear")
            return await super().clear(memory_only=memory_only)

    groups = KVGroups(KVGroup(index, BLOCK) for index in range(3))
    layout: Any = SimpleNamespace(layer_ends={}, num_planes=1)
    engine: Any = Slow()
    transfers = Transfers(
        engine,
        SimpleNamespace(submit=None),
        rank=0,
        chunk_size=CHUNK,
        groups=groups,
        layout=layout,  # type: ignore[arg-type]
    )
    stored = job()
    stored = replace(stored, parts=tuple(replace(stored.parts[0], group=index) for index in range(3)))

    storing = asyncio.ensure_future(transfers._store(stored, None))
    await turns(turns_before)
    await transfers.clear(1, memory_only=True)
    await storing

    assert "store" not in calls[calls.index("clear") :]


def test_close_closes_the_engine_and_removes_the_socket(make: Callable[..., Worker]):
    side = make()
    side.close()
    side.close()

    assert side.closed
    assert not side.socket.exists()


def test_an_engine_that_cannot_be_closed_does_not_keep_the_others_open():
    calls: list[str] = []

    def fail() -> None:
        calls.append("close")
        raise RuntimeError("cannot be closed")

    engine = SimpleNamespace(stop=lambda: calls.append("stop"), close=fail)
    with pytest.raises(RuntimeError, match="cannot be closed"):
        WorkerConnector([engine, engine]).close()

    assert sorted(calls) == ["close", "close", "stop", "stop"]


def test_jobs_after_the_end_are_reported_as_failed(make: Callable[..., Worker]):
    side = make()
    side.close()
    side.step(job(1), stores=[job(2)])

    assert side.take_finished() == {"r1"}
    assert side.take_failed_blocks() == {10, 11, 12, 13, 14}
    assert side.take_report() is not None


def test_when_the_loop_thread_ends_by_itself_every_job_is_reported_once_and_vllm_continues(
    make: Callable[..., Worker], until: Until, monkeypatch: pytest.MonkeyPatch
):
    loops = BrokenLoops(monkeypatch)
    side = make()
    side.engine.gate.clear()
    side.step(job(1), stores=[job(2)])
    until(lambda: bool(side.engine.retrieved and side.engine.stored))

    loops.break_one(side.rank._loop.call_soon)
    assert finished(side, until) == (["r1"], {10, 11, 12, 13, 14})
    assert copied(side, until) == {2: 1}
    side.engine.gate.set()

    side.step(job(3, blocks=(1, 2)), stores=[job(4)])
    assert finished(side, until) == (["r3"], {1, 2})
    assert copied(side, until) == {4: 1}
    assert side.rank.take_stats() is not None
    side.close()
    assert side.take_finished() == set()
    assert side.take_report() is None


@pytest.mark.parametrize("ends", [True, False], ids=["cancelled", "not cancelled"])
def test_when_the_loop_thread_ends_while_the_engine_is_opened_the_start_fails(
    socket_dir: Path, layout: KVLayout, monkeypatch: pytest.MonkeyPatch, ends: bool
):
    monkeypatch.setattr(loop_module, "LAST_S", 0.01)
    loops = BrokenLoops(monkeypatch)

    @contextlib.asynccontextmanager
    async def open_engine(*args: Any, **kwargs: Any) -> AsyncIterator[Engine]:
        loops.break_one(asyncio.get_running_loop().call_soon)
        opened = asyncio.get_running_loop().create_future()
        await (opened if ends else wait_done(opened))
        yield Engine()

    side = RankEngine(
        load_config(env={}, extra={"chunk_size": CHUNK}),
        rank=0,
        groups=KVGroups((KVGroup(0, BLOCK),)),
        address=socket_path(socket_dir, "engine", 0),
        open_engine=open_engine,
    )
    errors: list[BaseException] = []

    def start(side: RankEngine, errors: list[BaseException]) -> None:
        try:
            side.open(EngineGroup(layout, NAMESPACE))
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    starting = threading.Thread(target=start, args=(side, errors), daemon=True)
    starting.start()
    starting.join(DEADLINE_S)
    assert [isinstance(error, Exception) for error in errors] == [True]
    side.close()
    del side, errors
    gc.collect()  # asyncio logs now that the task never ended, and not during another test


def test_the_end_of_a_numbered_step_is_reported_once(worker: Worker):
    worker.begin_step(StepMetadata(step=7))
    report = worker.take_report()

    assert (report.step, report.copied) == (7, {})
    assert worker.take_report() is None


def test_a_config_that_cannot_work_stops_the_start(socket_dir: Path, layout: KVLayout):
    side = RankEngine(
        load_config(env={}, extra={"chunk_size": CHUNK, "tiers": ["nonsense"]}),
        rank=0,
        groups=KVGroups((KVGroup(0, BLOCK),)),
        address=socket_path(socket_dir, "engine", 0),
    )
    with pytest.raises(ConfigError, match="nonsense"):
        side.open(EngineGroup(layout, NAMESPACE))


# Layer-wise loads


@pytest.fixture
def deep(make: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch) -> Worker:
    """A deadline far longer than any wait."""
    monkeypatch.setattr(worker_module, "BEGIN_S", 60.0)
    return make()


def waited_load(job_id: int = 1) -> StepMetadata:
    return StepMetadata(loads=(replace(job(job_id), layerwise=True),))


def test_each_layer_waits_until_its_part_of_a_layerwise_load_is_copied(deep: Worker, until: Until):
    deep.engine.gate.clear()
    deep.begin_step(waited_load())
    until(lambda: bool(deep.engine.retrieved))
    progress = deep.engine.retrieved[0].progress
    assert progress.begin()
    passed: list[str] = []

    def forward() -> None:
        for name in LAYERS:
            deep.wait_for_layer(name)
            passed.append(name)

    model = threading.Thread(target=forward)
    model.start()

    progress.advance(1)
    until(lambda: passed == ["first"])
    progress.advance(2)
    model.join(60)
    assert passed == ["first", "second"]
    deep.engine.gate.set()
    assert (deep.take_failed_blocks(), deep.take_finished()) == (set(), set())


def test_a_layerwise_load_that_does_not_begin_is_abandoned_and_never_written(
    deep: Worker, until: Until, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(worker_module, "BEGIN_S", 0.0)
    deep.engine.gate.clear()
    deep.begin_step(waited_load())
    for name in LAYERS:
        deep.wait_for_layer(name)
    assert deep.take_failed_blocks() == {10, 11, 12, 13, 14}

    until(lambda: bool(deep.engine.retrieved))
    assert not deep.engine.retrieved[0].progress.begin()
    deep.engine.hit_chunks = 0
    deep.engine.gate.set()
    monkeypatch.setattr(worker_module, "BEGIN_S", 60.0)
    deep.begin_step(waited_load(2))
    for name in LAYERS:
        deep.wait_for_layer(name)
    failed = deep.take_failed_blocks()  # only of the second one: the other blocks were reported before
    assert failed == {10, 11, 12, 13, 14}
    assert deep.take_failed_blocks() == set()


@pytest.mark.parametrize(
    ("waited", "broken", "failed"),
    [
        (LAYERS, "", {12, 13, 14}),
        (LAYERS[:1], "", {10, 11, 12, 13, 14}),
        (["shares the cache of another"], "", {12, 13, 14}),  # it waits for every layer
        (["first", "shares the cache of another"], "", {10, 11, 12, 13, 14}),  # and excuses no other
        (LAYERS, "fence", {10, 11, 12, 13, 14}),
        (LAYERS, "outcome", {10, 11, 12, 13, 14}),
    ],
)
def test_blocks_that_were_not_found_or_not_awaited_are_known_when_the_forward_ends(
    deep: Worker, monkeypatch: pytest.MonkeyPatch, waited: Sequence[str], broken: str, failed: set[int]
):
    deep.engine.hit_chunks = 1
    if broken == "fence":
        monkeypatch.setattr(deep.engine, "fence", lambda: 1 / 0)
    deep.begin_step(waited_load())
    for name in waited:
        deep.wait_for_layer(name)
    if broken == "outcome":
        monkeypatch.setattr(worker_module.LayerwiseLoads, "_was_awaited", lambda *_: 1 / 0)

    assert deep.take_failed_blocks() == failed
    assert deep.take_finished() == set()
