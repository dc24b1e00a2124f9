"""`python -m tools.benchmarks.frames`: Python frames and tasks between the engine and the system calls of the disk.

A call of the engine is stopped in the thread that reads or writes a record. The report lists this package's
frames in that thread, and in the chain of coroutines of each kind of task that waits for it at that moment.
Frames of the standard library are not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import lmcache_async
from lmcache_async.bench.memory import CacheForm, PromptCache
from lmcache_async.engine.engine import CacheEngine
from lmcache_async.hashing import ChunkHasher

_PACKAGE = Path(lmcache_async.__file__).resolve().parent
_OURS = tuple(f"{_PACKAGE.parent / folder}{os.sep}" for folder in (_PACKAGE.name, "stages", "plugins"))
_NOT_OURS = f"{_PACKAGE / 'bench'}{os.sep}"
_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Depth:
    """Frames of one call.

    Attributes:
        parts: For each kind of task, and last for the thread of the system call, its frames of this package,
            outermost first.
    """

    parts: Sequence[Sequence[str]]

    @property
    def frames(self) -> int:
        return sum(map(len, self.parts))

    def __str__(self) -> str:
        lines = [f"{self.frames} frames in {len(self.parts)} kinds of tasks and threads"]
        for part in self.parts:
            lines += [f"  {part[0]}", *(f"    {name}" for name in part[1:])]
        return "\n".join(lines)


class Stop:
    """Replaces a system call and records the frames of its first call.

    Args:
        call: The system call.
        loop: Event loop of the engine.
        ignored: Tasks that are not part of the call.
    """

    def __init__(
        self, call: Callable[..., Any], loop: asyncio.AbstractEventLoop, ignored: set[asyncio.Task[Any]]
    ) -> None:
        self.depth: Depth | None = None
        self._call = call
        self._loop = loop
        self._ignored = ignored
        self._first = threading.Lock()
        self._recorded = threading.Event()

    def __call__(self, *args: Any) -> Any:
        if self._first.acquire(blocking=False):
            thread = _stack(sys._getframe(1))
            # Recorded on the loop's thread, after all other callbacks that are ready.
            self._loop.call_soon_threadsafe(self._loop.call_later, 0.1, self._record, thread)
            self._recorded.wait(_WAIT_S)
        return self._call(*args)

    def _record(self, thread: Sequence[str]) -> None:
        kinds: dict[str, Sequence[str]] = {}
        for task in asyncio.all_tasks(self._loop) - self._ignored:
            chain = _chain(task.get_coro())
            if chain and len(chain) > len(kinds.get(chain[0], ())):
                kinds[chain[0]] = chain
        self.depth = Depth([*kinds.values(), thread])
        self._recorded.set()


async def depth_of(verb: str, directory: Path) -> Depth:
    """Return the frames of one call of an engine with memory and a disk.

    Args:
        verb: `store` or `retrieve` of the engine, or `load`: a retrieve that the vLLM connector starts.
        directory: Directory for the records.
    """
    cache = PromptCache(CacheForm(256))
    tiers = ["cpu", {"name": "disk", "path": str(directory), "max_bytes": "1GiB"}]
    async with cache.open(tiers=tiers) as engine:
        call: Callable[[], Awaitable[object]] = lambda: cache.store(engine)
        if verb != "store":
            await cache.store(engine)
            await engine.clear(memory_only=True)
            call = lambda: cache.retrieve(engine) if verb == "retrieve" else _load(cache, engine)
        own = asyncio.current_task()
        # The tasks of the queue write; they are part of a store.
        ignored = {task for task in asyncio.all_tasks() if task is not own and verb != "store"}
        name = "pwrite" if verb == "store" else "preadv"
        stop = Stop(getattr(os, name), asyncio.get_running_loop(), ignored)
        with mock.patch.object(os, name, stop):
            await call()
    if stop.depth is None:
        raise RuntimeError(f"{verb} made no call of os.{name}")
    return stop.depth


class _Loop:
    """The loop of the test in place of the engine's thread."""

    def submit(self, coroutine: Coroutine[Any, Any, None]) -> Future[None]:
        ended: Future[None] = Future()
        task = asyncio.ensure_future(coroutine)
        task.add_done_callback(lambda _: ended.set_result(None))
        return ended


async def _load(cache: PromptCache, engine: CacheEngine) -> None:
    """Load the prompt as the vLLM connector does."""
    # vLLM is imported here, because the other calls do not need it.
    from lmcache_async.integration.vllm.groups import KVGroup, KVGroups
    from lmcache_async.integration.vllm.jobs import Job, JobPart
    from lmcache_async.integration.vllm.worker import Transfers

    form = cache.form
    hasher = ChunkHasher(cache.namespace.root(), chunk_size=form.chunk_size)
    keys = b"".join(hasher.extend_keys(cache.tokens))
    part = JobPart(0, 0, cache.tokens.tobytes(), (keys,), (), cache.blocks.astype("int64").tobytes())
    transfers = Transfers(
        engine,
        _Loop(),
        rank=0,
        chunk_size=form.chunk_size,
        groups=KVGroups((KVGroup(0, form.block_size),)),
        layout=cache.layout,
    )
    transfers.load([Job(1, "r", "", 0, (part,))])
    while not transfers.take_finished():  # noqa: ASYNC110 - as vLLM does after each step
        await asyncio.sleep(0.001)


def _chain(coroutine: Any) -> list[str]:
    """Return the frames of a suspended coroutine and of the coroutines that it awaits."""
    names = []
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "ag_frame", None)
        if frame is not None and _is_ours(frame):
            names.append(_name(frame))
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "ag_await", None)
    return names


def _stack(frame: FrameType | None) -> list[str]:
    names = []
    while frame is not None:
        if _is_ours(frame):
            names.append(_name(frame))
        frame = frame.f_back
    return names[::-1]


def _is_ours(frame: FrameType) -> bool:
    path = os.path.realpath(frame.f_code.co_filename)
    return path.startswith(_OURS) and not path.startswith(_NOT_OURS)


def _name(frame: FrameType) -> str:
    path = Path(os.path.realpath(frame.f_code.co_filename))
    return f"{path.relative_to(_PACKAGE.parent)}: {frame.f_code.co_qualname}"


def main(arguments: Sequence[str]) -> int:
    """Print the frames of a store, a retrieve and a load."""
    argparse.ArgumentParser(prog="python -m tools.benchmarks.frames", description=__doc__).parse_args(
        arguments
    )
    for verb, call in (("load", "os.preadv"), ("retrieve", "os.preadv"), ("store", "os.pwrite")):
        with tempfile.TemporaryDirectory(prefix="lmcache-async-frames") as directory:
            depth = asyncio.run(depth_of(verb, Path(directory)))
            sys.stdout.write(f"{verb} to {call}: {depth}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
