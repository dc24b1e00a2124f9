"""Our engine beside its peers', through the same workload and in turn.

What is installed is measured; what is not, or does not run, is told as left out with its reason. Each peer runs in a
process of its own, which does nothing while we are measured. A ratio above 1 of a rate, below 1 of a time, is in
our favour.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_async.bench import serve_peers
from lmcache_async.bench.cache import CacheForm
from lmcache_async.bench.frame import Case, option
from lmcache_async.bench.peer_child import Kind
from lmcache_async.bench.peer_ours import GROUPS
from lmcache_async.bench.peer_work import PeerError, Workload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from lmcache_async.bench.frame import Frame, Parameter, Probe, Row
    from lmcache_async.bench.peer_ours import Seconds
    from lmcache_async.bench.peer_work import Peer, Task

KINDS = (
    Kind("LMCache", "lmcache", "lmcache_async.bench.peer_lmcache"),
    Kind("vLLM", "vllm", "lmcache_async.bench.peer_vllm"),
)


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
    connectors: str = option("", "connectors of peers to run in a real vLLM too, or all", parse=str)

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
    if settings.connectors:
        async for row in serve_peers.rows(frame, connectors=settings.connectors):
            yield row


async def measure(work: Workload, frame: Frame, peers: Sequence[Peer]) -> AsyncIterator[Row]:
    """Rows of every task that a peer can do; a peer that fails at one is left out of it."""
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
            await probe()  # before the rounds: most of what fails, fails at once
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
    """The task's figure; `what` is its name and the peer's, for a peer."""

    async def probe() -> float:
        try:
            return task.figure(await seconds(*what[:1]))
        except PeerError as error:
            raise _LeftOutError(what[1], str(error)) from error

    return probe
