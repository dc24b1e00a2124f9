"""Race run: stores, loads and compute at the same time with random delays; the KV is compared after every round.

An engine with a small arena stores and loads prompts of a paged cache, while the model's stream computes. Delays of
random length are put on the model's stream and on the streams of the copier, between all of its steps. All memory
that a copy must not depend on is poisoned: blocks before a load and after each operation, payloads before a store,
staging memory before each gather and after each scatter. Loaded blocks are compared on the device, on the model's
stream, without a synchronisation before. After each round the whole cache must contain the poison, so that a copy to
a wrong place or after its end is found. Some operations are cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch

from lmcache_async import CacheEngine, Namespace, load_config
from lmcache_async.device.copier import CheckedJob, Copier, CopyJob, DeviceEvent, Fence
from lmcache_async.device.cuda import CudaCopier, Streams, open_cuda_copiers
from lmcache_async.device.layout import KVLayout
from lmcache_async.device.movers import Mover, Step
from lmcache_async.device.plan import Piece
from lmcache_async.device.planes import Int64s
from lmcache_async.device.progress import LoadProgress
from lmcache_async.engine import builder
from lmcache_async.testing.caches import VLLM_ORDERS, CacheForm, PagedCache
from tools.benchmarks.gpu_device import Gpu
from tools.torture.outcome import Outcome

POISON = 0xA5
MAX_DELAY_S = 1e-3
CLOCK_HZ = 1_500_000_000
"""Cycles per second that `torch.cuda._sleep` counts, roughly."""

CHUNK_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a race run.

    Attributes:
        blocks: Blocks of the paged cache.
        prompts: Different prompts of each engine.
        operations: Concurrent operations of a round.
        max_chunks: Maximum length of a prompt in chunks.
        arena_chunks: Slabs of the arena; fewer than all prompts need, so that slabs are used again.
        rounds: Rounds with one engine and one form of the cache.
        scale: Factor of the heads and elements of the cache.
        product: Rows of the matrices of the compute load.
    """

    blocks: int = 1024
    prompts: int = 12
    operations: int = 16
    max_chunks: int = 8
    arena_chunks: int = 48
    rounds: int = 20
    scale: int = 8
    product: int = 2048


QUICK = Sizes(blocks=64, prompts=4, operations=4, max_chunks=2, arena_chunks=8, rounds=3, scale=1, product=16)


class Delays:
    """Random delays on the current stream of the device, or in the calling thread on the host."""

    def __init__(self, gpu: Gpu, seed: int) -> None:
        self._gpu = gpu
        self._random = random.Random(seed)

    def put(self) -> None:
        """Delay the current stream with a probability of one half. The host does not wait."""
        if self._gpu.device.type == "cuda" and self._random.random() < 0.5:
            torch.cuda._sleep(int(self._random.random() * MAX_DELAY_S * CLOCK_HZ))  # type: ignore[no-untyped-call]

    def late(self, event: DeviceEvent) -> DeviceEvent:
        """Return an event that the waiting thread sees late. On the host the work itself is not delayed."""
        return LateEvent(event, self._random.random() * MAX_DELAY_S)


@dataclass(frozen=True, slots=True)
class LateEvent:
    event: DeviceEvent
    delay_s: float

    def synchronize(self) -> None:
        self.event.synchronize()
        time.sleep(self.delay_s)


class DelayedStreams:
    """Streams of the copier whose work starts late, and whose end is seen late."""

    def __init__(self, inner: Streams, delays: Delays) -> None:
        self._inner = inner
        self._delays = delays

    def thread(self) -> contextlib.AbstractContextManager[Any]:
        return self._inner.thread()

    def open(self, priority: int) -> Any:
        return self._inner.open(priority)

    @contextlib.contextmanager
    def use(self, stream: Any) -> Iterator[None]:
        with self._inner.use(stream):
            self._delays.put()
            yield

    def record(self, stream: Any, *, spin: bool = False) -> DeviceEvent:
        return self._delays.late(self._inner.record(stream, spin=spin))

    def end_of(self, stream: Any) -> DeviceEvent:
        return self._delays.late(self._inner.end_of(stream))

    def record_current(self) -> Fence:
        return self._inner.record_current()

    def reached(self, fence: Fence) -> bool:
        return self._inner.reached(fence)

    def wait(self, stream: Any, fence: Fence) -> None:
        self._inner.wait(stream, fence)

    def pinned(self, num_words: int) -> torch.Tensor:
        return self._inner.pinned(num_words)


class PoisoningMover:
    """Delays around the kernels, and poison in staging memory."""

    def __init__(self, inner: Mover, delays: Delays) -> None:
        self._inner = inner
        self._delays = delays
        self.columns = inner.columns

    def fill(self, table: Int64s, jobs: Sequence[CheckedJob], part: Sequence[Piece]) -> list[Step]:
        return self._inner.fill(table, jobs, part)

    def move(
        self, steps: Sequence[Step], table: torch.Tensor, staging: torch.Tensor, *, to_staging: bool
    ) -> None:
        if to_staging:
            staging.fill_(POISON)
        self._delays.put()
        self._inner.move(steps, table, staging, to_staging=to_staging)
        self._delays.put()
        if not to_staging:
            staging.fill_(POISON)


class PoisoningCopier:
    """Poisons payloads before they are filled."""

    def __init__(self, inner: CudaCopier) -> None:
        self._inner = inner

    @property
    def layout(self) -> KVLayout:
        return self._inner.layout

    def fence(self) -> Fence | None:
        return self._inner.fence()

    async def wait_fence(self, fence: Fence) -> None:
        await self._inner.wait_fence(fence)

    async def gather(
        self, jobs: Sequence[CopyJob], fence: Fence | None = None, *, digest: bool = False
    ) -> list[bytes] | None:
        for job in jobs:
            np.asarray(job.payload)[:] = POISON
        return await self._inner.gather(jobs, fence, digest=digest)

    async def scatter(
        self, jobs: Sequence[CopyJob], fence: Fence | None = None, progress: LoadProgress | None = None
    ) -> None:
        await self._inner.scatter(jobs, fence, progress)

    def close(self) -> None:
        self._inner.close()


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt and its KV: for each layer the elements of its blocks."""

    tokens: tuple[int, ...]
    kv: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Block ids in host memory and on the device: int64 of shape (blocks,)."""

    ids: torch.Tensor
    on_device: torch.Tensor


@dataclass(slots=True, eq=False)
class Race:
    """One engine, one form of the paged cache, some rounds."""

    gpu: Gpu
    sizes: Sizes
    cache: PagedCache
    engine: CacheEngine
    delays: Delays
    random: random.Random
    outcome: Outcome
    prompts: list[Prompt]
    wrong: torch.Tensor
    matrix: torch.Tensor

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, gpu: Gpu, sizes: Sizes, seed: int, outcome: Outcome) -> AsyncIterator[Race]:
        rng = random.Random(seed)
        device = str(gpu.device)
        form = random_form(rng, sizes)
        cache = form.build(sizes.blocks, device=device)
        for storage in cache.storages:
            storage.fill_(POISON)
        layout = cache.layout
        delays = Delays(gpu, seed)
        config = load_config(
            env={},
            extra={
                "chunk_size": CHUNK_BLOCKS * form.tokens,
                "arena.max_bytes": sizes.arena_chunks * (layout.payload_bytes(CHUNK_BLOCKS) + 8192),
                "tiers": ["cpu"],
            },
        )
        namespace = Namespace(
            model="race",
            weights="none",
            dtype=layout.dtype,
            layout=layout.text,
            chunk_size=config.chunk_size,
        )
        # Not so small that a round of a large cache consists of thousands of delayed parts.
        small = max(1 << 16, layout.payload_bytes(CHUNK_BLOCKS) // 4)
        staging = rng.choice([small, 1 << 20, 64 << 20]) if device != "cpu" else 1 << 16

        def open_copiers(layouts: Sequence[KVLayout], **_: Any) -> list[Copier]:
            streams = DelayedStreams(gpu.streams(), delays)
            movers = [PoisoningMover(gpu.mover(layout), delays) for layout in layouts]
            copiers = open_cuda_copiers(layouts, staging_bytes=staging, streams=streams, movers=movers)
            return [PoisoningCopier(copier) for copier in copiers]

        with mock.patch.object(builder, "open_copiers", open_copiers):
            async with CacheEngine.open(config, layout=layout, namespace=namespace) as engine:
                matrix = torch.randn(sizes.product, sizes.product, device=gpu.device)
                wrong = torch.zeros((), dtype=torch.int64, device=gpu.device)
                race = cls(gpu, sizes, cache, engine, delays, rng, outcome, [], wrong, matrix)
                race.prompts += [race.random_prompt(number) for number in range(sizes.prompts)]
                yield race

    def random_prompt(self, number: int) -> Prompt:
        """Return a prompt of random length with KV that no other block of any prompt has."""
        form = self.cache.form
        blocks = self.random.randint(1, self.sizes.max_chunks) * CHUNK_BLOCKS
        start = number << 16
        kv = []
        for tensor in self.cache.tensors:
            shape = (blocks, *tensor.shape[1:])
            nbytes = tensor[0].numel() * tensor.element_size() * blocks
            content = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=self.gpu.device)
            kv.append(content.view(form.dtype).view(shape))
        return Prompt(tuple(range(start, start + blocks * form.tokens)), tuple(kv))

    async def round(self) -> None:
        """Run operations at the same time, each with blocks of its own, then check the whole cache."""
        blocks = torch.tensor(self.random.sample(range(self.sizes.blocks), self.sizes.blocks))
        on_device = blocks.to(self.gpu.device)  # waits for the device, so once, before everything else
        most = self.sizes.max_chunks * CHUNK_BLOCKS
        tasks = []
        for number in range(min(self.sizes.operations, self.sizes.blocks // most)):
            prompt = self.random.choice(self.prompts)
            here = slice(number * most, number * most + len(prompt.kv[0]))
            operation = self.random.choice([self.store, self.load])
            tasks.append(asyncio.create_task(operation(prompt, Rows(blocks[here], on_device[here]))))
        for task in tasks:
            if self.random.random() < 0.1:
                for _ in range(self.random.randint(0, 10)):
                    await asyncio.sleep(0)
                task.cancel()
            self.compute()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        self.outcome.add("operations", len(ended))
        for result in ended:
            if isinstance(result, asyncio.CancelledError):
                self.outcome.add("cancelled")
            elif isinstance(result, BaseException):
                self.outcome.problem(f"an operation failed: {result!r}")
        self.check()
        if self.random.random() < 0.1:
            await self.engine.clear()

    async def store(self, prompt: Prompt, rows: Rows) -> None:
        """Compute the KV of a prompt, store it, and reuse its blocks at once."""
        self.compute()
        self.write(rows, prompt.kv)
        try:
            report = await self.engine.store(prompt.tokens, rows.ids)
        finally:
            self.poison(rows)
        self.outcome.add("stored chunks", report.stored)

    async def load(self, prompt: Prompt, rows: Rows) -> None:
        """Load the stored part of a prompt, read it on the model's stream, and reuse the blocks."""
        self.compute()
        self.poison(rows)
        try:
            mask = await self.engine.retrieve(prompt.tokens, rows.ids)
            hit = int(mask.sum()) // self.cache.form.tokens
            self.compare(rows, prompt.kv, hit)
            self.outcome.add("loads that hit" if hit else "loads that missed")
            self.outcome.add("compared blocks", len(rows.ids))
        finally:
            self.poison(rows)

    def compute(self) -> None:
        """Submit a product and a delay to the model's stream."""
        torch.mm(self.matrix, self.matrix)
        self.delays.put()

    def write(self, rows: Rows, kv: Sequence[torch.Tensor]) -> None:
        for tensor, content in zip(self.cache.tensors, kv, strict=True):
            bits(tensor).index_copy_(0, rows.on_device, bits(content))
            self.delays.put()

    def poison(self, rows: Rows) -> None:
        for tensor in self.cache.tensors:
            words = bits(tensor)
            words.index_fill_(0, rows.on_device, poison_of(words))

    def compare(self, rows: Rows, kv: Sequence[torch.Tensor], hit: int) -> None:
        """Count wrong elements: KV of the prompt in the first `hit` blocks, poison in the others."""
        for tensor, content in zip(self.cache.tensors, kv, strict=True):
            found = bits(tensor).index_select(0, rows.on_device)
            self.wrong += (found[:hit] != bits(content)[:hit]).sum()
            self.wrong += (found[hit:] != poison_of(found)).sum()

    def check(self) -> None:
        """Wait for the device; report wrong elements and bytes that are not poison."""
        wrong = int(self.wrong)  # waits for the model's stream
        self.wrong.zero_()
        self.outcome.expect(not wrong, f"{wrong} elements of loaded KV are wrong ({self.cache.form})")
        stray = sum(int((storage != POISON).sum()) for storage in self.cache.storages)
        self.outcome.expect(
            not stray, f"{stray} bytes were written after their copy ended ({self.cache.form})"
        )
        for storage in self.cache.storages:
            storage.fill_(POISON)
        self.outcome.add("rounds")
        self.outcome.add("checked bytes", sum(len(storage) for storage in self.cache.storages))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view as integers, which are compared bit by bit."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def poison_of(words: torch.Tensor) -> int:
    """Return an integer whose bytes are all POISON."""
    return int.from_bytes(bytes([POISON] * words.element_size()), "little", signed=words.dtype.is_signed)


def random_form(rng: random.Random, sizes: Sizes) -> CacheForm:
    return CacheForm(
        order=rng.choice(VLLM_ORDERS),
        layers=rng.randint(1, 2 * sizes.scale),
        heads=rng.choice([1, 2, sizes.scale]),
        tokens=rng.choice([4, 16]),
        content=rng.choice([7, 16, 8 * sizes.scale, 16 * sizes.scale]),
        dtype=rng.choice([torch.bfloat16, torch.float32, torch.uint8]),
        separate=rng.random() < 0.5,
    )


async def run(
    gpu: Gpu,
    sizes: Sizes,
    *,
    seconds: float,
    seed: int,
    most_engines: int = 0,
    ended: Callable[[Outcome], object] = lambda _: None,
) -> Outcome:
    """Race for some seconds.

    Args:
        gpu: The device.
        sizes: Sizes of each race.
        seconds: Time after which no further round starts.
        seed: Seed of all choices; durations vary.
        most_engines: Maximum number of engines, each with another form of cache; 0 for no limit.
        ended: Called with the outcome so far when an engine has ended.
    """
    outcome = Outcome("race", {"seed": seed})
    deadline = time.monotonic() + seconds
    torch.manual_seed(seed)
    for number in itertools.count():
        if time.monotonic() >= deadline or outcome.aborted or (most_engines and number == most_engines):
            break
        async with Race.open(gpu, sizes, seed * 1_000_003 + number, outcome) as race:
            outcome.add("engines")
            for _ in range(sizes.rounds):
                await race.round()
                outcome.progress(seconds - max(0.0, deadline - time.monotonic()), seconds, "seconds")
                if time.monotonic() >= deadline:
                    break
        gpu.trim()
        ended(outcome.end())
    outcome.expect(outcome.counts.get("loads that hit", 0) > 0, "no load found anything")
    return outcome.end()
