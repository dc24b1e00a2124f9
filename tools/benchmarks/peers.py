"""This engine compared with other products, with the same workload and alternately.

Installed products are measured. Others, and tasks that fail, are left out with the reason. Each peer runs in
a process of its own, since peers leave threads behind, replace signal handlers and may crash. It is idle
while this engine is measured. Seconds are measured in that process, around the peer's own call. This engine
is better if the ratio of a rate is above 1, or that of a time below 1.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from lmcache_async.bench.measure import Case, Frame, Parameter, Probe, Row
from lmcache_async.bench.memory import CacheForm, PromptCache
from lmcache_async.engine.engine import CacheEngine
from lmcache_async.hashing import ChunkHasher, RequestNamespace
from tools.benchmarks.command import option
from tools.benchmarks.loop import Batches

HASH_LIST, HASH_ARRAY = "hash, list", "hash, int64 array"
STORE, RETRIEVE = "store", "retrieve"
STORE_NOTHING, RETRIEVE_NOTHING = "store, no copies", "retrieve, no copies"
LOOKUP, LOOKUP_PINNED = "lookup", "lookup, pinned"


@dataclass(frozen=True, slots=True)
class Task:
    """One operation to measure.

    Attributes:
        unit: Unit of its figure.
        amount: The figure is `amount` per second for a rate, and `amount` times the seconds for a time.
    """

    name: str
    unit: str
    amount: float

    def figure(self, seconds: float) -> float:
        return self.amount / seconds if self.unit.endswith("/s") else self.amount * seconds


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes, equal for all engines.

    Attributes:
        form: The cache whose KV is stored and retrieved.
        hash_tokens: Tokens of the prompt that is hashed.
        chunks: Chunks of the prompt that is stored and retrieved without copies, and looked up.
    """

    form: CacheForm
    hash_tokens: int
    chunks: int

    @property
    def small(self) -> CacheForm:
        """A cache of `chunks` chunks with the smallest records."""
        return CacheForm(self.chunks * self.form.chunk_size, chunk_size=self.form.chunk_size)

    @property
    def nbytes(self) -> int:
        """Bytes of KV in the large cache, in bfloat16."""
        form = self.form
        return form.tokens * form.layers * form.heads * 2 * form.head_dim * 2

    @property
    def prompt(self) -> npt.NDArray[np.int64]:
        """The prompt that is hashed."""
        return np.random.default_rng(0).integers(1000, 128000, self.hash_tokens)

    def tasks(self) -> dict[str, Task]:
        chunk_us = 1e6 / self.chunks
        tasks = [
            *(Task(name, "M tokens/s", self.hash_tokens / 1e6) for name in (HASH_LIST, HASH_ARRAY)),
            *(Task(name, "GB/s", self.nbytes / 1e9) for name in (STORE, RETRIEVE)),
            *(Task(name, "us/chunk", chunk_us) for name in (STORE_NOTHING, RETRIEVE_NOTHING)),
            *(Task(name, "us/chunk", chunk_us) for name in (LOOKUP, LOOKUP_PINNED)),
        ]
        return {task.name: task for task in tasks}


Ready: TypeAlias = "Callable[[], AbstractContextManager[Callable[[], float]]]"
"""Opens a function that does a task once and returns the seconds."""


class PeerError(Exception):
    """A peer or one of its tasks does not run. The message has the reason."""


class Peer(Protocol):
    """Another product, ready to be measured."""

    @property
    def name(self) -> str:
        """Name and version."""

    @property
    def tasks(self) -> Collection[str]:
        """Names of the tasks that it can do."""

    async def seconds(self, task: str) -> float:
        """Do a task once and return the seconds.

        Raises:
            PeerError: It failed.
        """


class PeerModule(Protocol):
    """Interface of a peer's module, which is imported only in the process of the peer."""

    @staticmethod
    def tasks(work: Workload) -> dict[str, Ready]:
        """Return a context manager for each supported task. One is open at any time."""


_START_S = 180.0
_TASK_S = 120.0
_END_S = 5.0

QUIET = {
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_LOG_LEVEL": "CRITICAL",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Environment of a peer's process: no usage statistics and little output."""


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """Return the distributions by package. It takes seconds, because it reads the file lists of all distributions."""
    return importlib.metadata.packages_distributions()


@dataclass(frozen=True, slots=True)
class Kind:
    """A product that may be installed.

    Attributes:
        package: The package to look for.
        module: The module of this folder that drives it.
    """

    title: str
    package: str
    module: str

    @property
    def name(self) -> str:
        """The title and the installed version."""
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            names = _distributions().get(self.package, [self.package])
            return f"{self.title} {importlib.metadata.version(names[0])}"
        return self.title

    @contextlib.contextmanager
    def open(self, work: Workload) -> Iterator[ChildPeer]:
        """Start its process.

        Raises:
            PeerError: It is not installed, or does not start.
        """
        if importlib.util.find_spec(self.package) is None:
            raise PeerError(f"the package {self.package} is not installed")
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(self.module, work, theirs), daemon=True)
        process.start()
        theirs.close()
        try:
            peer = ChildPeer(self.name, ours)
            peer.wait_ready()
            yield peer
        finally:
            ours.close()
            process.terminate()
            process.join(_END_S)
            if process.is_alive():
                process.kill()
                process.join()


class ChildPeer:
    """A `Peer` in a process of its own."""

    def __init__(self, name: str, connection: Connection) -> None:
        self.name = name
        self.tasks: frozenset[str] = frozenset()
        self._connection = connection

    def wait_ready(self) -> None:
        """Wait until the process is ready.

        Raises:
            PeerError: It does not start.
        """
        self.tasks = frozenset(self._answer(_START_S)["tasks"])

    async def seconds(self, task: str) -> float:
        # The loop is blocked meanwhile, because this engine must be idle while a peer is measured.
        try:
            self._connection.send_bytes(task.encode())
        except OSError as error:
            raise PeerError(f"its process has ended: {error}") from error
        return float(self._answer(_TASK_S)["seconds"])

    def _answer(self, deadline_s: float) -> dict[str, Any]:
        try:
            if not self._connection.poll(deadline_s):
                raise PeerError(f"no answer within {deadline_s:.0f} s")
            answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise PeerError("its process has ended") from error
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer


def serve(module: str, work: Workload, connection: Any) -> None:
    """Main function of a peer's process: do tasks by name until the connection is closed."""
    os.environ.update(QUIET)

    def tell(**answer: str | float | list[str]) -> None:
        connection.send_bytes(json.dumps(answer).encode())

    try:
        tasks = cast("PeerModule", importlib.import_module(module)).tasks(work)
    except BaseException as error:  # noqa: BLE001 - any error goes to the other process
        tell(error=_told(error))
        return
    tell(tasks=list(tasks))
    ready, run = "", _unknown
    with contextlib.suppress(EOFError, OSError), contextlib.ExitStack() as used:
        while True:
            task = connection.recv_bytes().decode()
            try:
                if task != ready:
                    ready, run = "", _unknown
                    used.close()  # resources of the previous task
                    run = used.enter_context(tasks[task]())
                    ready = task
                tell(seconds=run())
            except Exception as error:  # noqa: BLE001 - any error goes to the other process
                ready = ""
                tell(error=_told(error))


def _unknown() -> float:
    raise PeerError("nothing is ready")


def _told(error: BaseException) -> str:
    """Return the error as one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, PeerError) else f"{type(error).__name__}: {text[:300]}"


KINDS = (
    Kind("LMCache", "lmcache", "tools.benchmarks.peers_lmcache"),
    Kind("vLLM", "vllm", "tools.benchmarks.peers_vllm"),
)


Seconds: TypeAlias = "Callable[[], Awaitable[float]]"
"""Does a task once and returns the seconds."""

_BATCH = 16  # chunks of a batch: as many as 32 MiB have records of 2 MiB
_ROOT = b"benchmark of key"


async def hashing(work: Workload) -> AsyncIterator[dict[str, Seconds]]:
    def seconds(tokens: Any) -> Seconds:
        async def run() -> float:
            start = time.perf_counter()
            ChunkHasher(_ROOT, chunk_size=work.form.chunk_size).extend_keys(tokens)
            return time.perf_counter() - start

        return run

    yield {
        HASH_LIST: seconds(work.prompt.tolist()),
        HASH_ARRAY: seconds(work.prompt),
    }


async def copying(work: Workload) -> AsyncIterator[dict[str, Seconds]]:
    cache = PromptCache(work.form)
    async with cache.open(copy_threads=1) as engine:
        yield _moves(cache, engine, STORE, RETRIEVE)


async def bookkeeping(work: Workload) -> AsyncIterator[dict[str, Seconds]]:
    cache = PromptCache(work.small)
    # Lookups may pin a quarter of the arena. Like those of peers, they must pin the whole prompt.
    async with Batches(cache, _BATCH).open(**{"arena.max_bytes": 4 * cache.arena_bytes}) as engine:
        yield {
            **_moves(cache, engine, STORE_NOTHING, RETRIEVE_NOTHING),
            **_lookups(cache, engine),
        }


GROUPS = tuple(map(contextlib.asynccontextmanager, (hashing, copying, bookkeeping)))
"""Groups of tasks that share an engine; one is open at any time."""


def _moves(
    cache: PromptCache, engine: CacheEngine, store_name: str, retrieve_name: str
) -> dict[str, Seconds]:
    store, retrieve = cache.probes(engine, lambda seconds: seconds)
    return {store_name: store, retrieve_name: retrieve}


def _lookups(cache: PromptCache, engine: CacheEngine) -> dict[str, Seconds]:
    """Return lookups from tokens. A peer's lookup hashes the tokens too."""
    root = RequestNamespace().root(cache.namespace.root(), cache.namespace.algorithm, b"")
    tokens = cache.tokens.astype(np.int64)

    async def lookup() -> float:
        await cache.ensure_stored(engine)
        start = time.perf_counter()
        found = await engine.lookup(tokens)
        return _checked(start, found, len(tokens))

    async def pinned() -> float:
        await cache.ensure_stored(engine)
        start = time.perf_counter()
        keys = ChunkHasher(root, chunk_size=cache.form.chunk_size).extend_keys(tokens)
        result = await engine.lookup_keys(keys, lookup_id="benchmark")
        engine.unpin("benchmark")
        return _checked(start, result.pinned, cache.num_chunks)

    return {LOOKUP: lookup, LOOKUP_PINNED: pinned}


def _checked(start: float, found: int, expected: int) -> float:
    """Return the seconds since `start`, for a correct answer."""
    seconds = time.perf_counter() - start
    if found != expected:
        raise RuntimeError(f"{found} of {expected} were there")
    return seconds


@dataclass(frozen=True, slots=True)
class Settings:
    """Attributes are options; see docs/benchmarks.md."""

    tokens: int = option(8192, "tokens of the prompt that is stored and retrieved")
    layers: int = option(32, "layers of its model")
    heads: int = option(8, "KV heads")
    head_dim: int = option(128, "elements of a head")
    block_size: int = option(16, "tokens of a block")
    chunk_size: int = option(256, "tokens of a chunk")
    hash_tokens: int = option(131072, "tokens of the prompt that is hashed")
    chunks: int = option(512, "chunks that are stored and retrieved without copies, and looked up")

    @property
    def work(self) -> Workload:
        form = CacheForm(
            self.tokens, self.layers, self.heads, self.head_dim, self.block_size, self.chunk_size
        )
        return Workload(form, self.hash_tokens, self.chunks)


QUICK = Settings(tokens=512, layers=2, hash_tokens=4096, chunks=8)


async def run(settings: Settings, frame: Frame) -> AsyncIterator[Row]:
    with contextlib.ExitStack() as stack:
        peers = []
        for kind in KINDS:
            try:
                peers.append(stack.enter_context(kind.open(settings.work)))
            except PeerError as error:
                frame.leave_out(kind.name, str(error))
        async for row in measure(settings.work, frame, peers):
            yield row


async def measure(work: Workload, frame: Frame, peers: Sequence[Peer]) -> AsyncIterator[Row]:
    """Yield the rows of every task that a peer can do. A peer that fails at a task is left out of it."""
    if not peers:
        return
    tasks = work.tasks()
    for group in GROUPS:
        async with group(work) as ours:
            for name, seconds in ours.items():
                for row in await _compare(frame, tasks[name], seconds, peers):
                    yield row


async def _compare(frame: Frame, task: Task, ours: Seconds, peers: Sequence[Peer]) -> list[Row]:
    parameters: dict[str, Parameter] = {"amount": task.amount}
    able = {
        peer.name: _probe(task, peer.seconds, task.name, peer.name)
        for peer in peers
        if task.name in peer.tasks
    }
    for name, probe in list(able.items()):
        try:
            await probe()  # before the rounds, because most failures occur at once
        except _LeftOutError as error:
            del able[name]
            frame.leave_out(f"{task.name}, {name}", str(error))
    while able:
        case = Case(task.name, task.unit, _probe(task, ours), able, parameters)
        try:
            return await frame.compare([case])
        except _LeftOutError as error:
            del able[error.name]
            frame.leave_out(f"{task.name}, {error.name}", str(error))
    return []


class _LeftOutError(Exception):
    def __init__(self, name: str, why: str) -> None:
        super().__init__(why)
        self.name = name


def _probe(task: Task, seconds: Callable[..., Awaitable[float]], *what: str) -> Probe:
    """Return a probe of the task's figure. For a peer, `what` is the name of the task and of the peer."""

    async def probe() -> float:
        try:
            return task.figure(await seconds(*what[:1]))
        except PeerError as error:
            raise _LeftOutError(what[1], str(error)) from error

    return probe
