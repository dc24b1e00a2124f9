"""Fixtures, hooks and helpers of the conformance suites."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
import pytest_asyncio

from lmcache_async.errors import TierError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.testing.records import allocator, check_record, key_of, record, small_arena
from lmcache_async.testing.steps import DEADLINE_S
from lmcache_async.tiers.base import Allocate, Tier, TierStatistics
from lmcache_async.tiers.results import check_flag, type_text
from lmcache_async.types import ChunkKey

T = TypeVar("T")

ARENA_SLABS = 48
"""Number of records that the arena of a test holds at the same time."""

LOOP_THREADS = 4
"""Threads of the default executor of an event loop on which the threads of a tier are compared."""


class TierRig:
    """An open tier, the arena that it is bound to, and its calls by chunk number.

    Args:
        length: Payload bytes of each chunk, by number.
        readonly: Pass read-only buffers to `put`, as an engine does.
    """

    def __init__(
        self,
        tier: Tier,
        arena: Arena,
        length: Callable[[int], int] = lambda _: 5000,
        *,
        readonly: bool = True,
    ) -> None:
        self.tier = tier
        self.arena = arena
        self.allocate = allocator(arena)
        self.length = length
        self.evicted: list[ChunkKey] = []  # keys passed to `on_evicted` of a limited tier
        self._readonly = readonly

    @property
    def statistics(self) -> TierStatistics:
        return self.tier.statistics()

    @property
    def leases_content(self) -> bool:
        """Whether `get` returns leases of the stored content and does not call `allocate`."""
        return self.tier.capabilities.in_arena or self.tier.capabilities.own_memory

    @contextlib.contextmanager
    def items(self, numbers: Iterable[int]) -> Iterator[list[tuple[ChunkKey, Buffer]]]:
        """Provide sealed records in buffers that are released after the block."""
        items = []
        for number in numbers:
            buffer = record(self.arena, number, self.length(number))
            if self._readonly:
                with buffer:
                    buffer = buffer.lend(_Caller())
            items.append((key_of(number), buffer))
        try:
            yield items
        finally:
            release_all([buffer for _, buffer in items if not buffer.released])

    async def put(self, *numbers: int) -> None:
        """Put these chunks, one after the other."""
        for number in numbers:
            with self.items([number]) as [(key, buffer)]:
                await self.tier.put(key, buffer)

    async def put_many(self, numbers: Iterable[int]) -> Sequence[TierError | None]:
        with self.items(numbers) as items:
            results = await self.tier.put_many(items)
            _check_list("put_many", results, len(items))
            return results

    async def get_many(
        self, numbers: Iterable[int], allocate: Allocate | None = None
    ) -> Sequence[Buffer | TierError | None]:
        keys = [key_of(number) for number in numbers]
        results = await self.tier.get_many(keys, allocate or self.allocate)
        _check_list("get_many", results, len(keys))
        return results

    async def get(self, number: int) -> Buffer | None:
        got = await self.tier.get(key_of(number), self.allocate)
        assert got is None or isinstance(got, Buffer), f"get returned {type_text(got)}, not a Buffer"
        return got

    async def contains(self, number: int) -> bool:
        found = check_flag("contains", await self.tier.contains(key_of(number)))
        lacks = self.tier.lacks(key_of(number))  # also for a miss, which must not change a later answer
        assert not (found and lacks), "lacks and contains contradict each other"
        return found

    async def remove(self, number: int) -> bool:
        return check_flag("remove", await self.tier.remove(key_of(number)))

    async def holds(self, *numbers: int) -> bool:
        """Return whether all of the chunks are stored, and assert that their records are right."""
        all_stored = True
        for number in numbers:
            got = await self.get(number)
            all_stored &= got is not None
            if got is not None:
                with got:
                    check_record(got, number, self.length(number))
        return all_stored

    async def check_stored(self, *numbers: int) -> None:
        """Assert that all of the chunks are stored and that their records are right."""
        missing = [number for number in numbers if not await self.holds(number)]
        assert not missing, f"get reports a miss for the stored chunks {missing}"

    async def stored(self, numbers: Iterable[int]) -> list[int]:
        """Return those of the chunks that `contains` finds."""
        return [number for number in numbers if await self.contains(number)]

    async def keys(self) -> set[ChunkKey]:
        """Return the keys that `keys` yields, and assert that none is repeated."""
        keys = [key async for key in self.tier.keys()]  # noqa: SIM118 - no dict
        assert len(set(keys)) == len(keys), "keys returned a key twice"
        return set(keys)

    async def check_leases(self) -> None:
        """Wait until only the chunks of a tier in the arena are leased. Fail after DEADLINE_S."""
        deadline = asyncio.get_running_loop().time() + DEADLINE_S
        in_arena = self.tier.capabilities.in_arena
        while (leased := self.arena.statistics().leased_slabs) != (
            kept := self.statistics.chunks if in_arena else 0
        ):
            assert asyncio.get_running_loop().time() < deadline, (
                f"{leased} slabs of the arena are leased, but the tier keeps {kept} chunks there: a lease was not released"
            )
            await asyncio.sleep(0)

    def overwrite_free_memory(self) -> None:
        """Overwrite all free memory, so that a read without a lease returns wrong bytes."""
        statistics = self.arena.statistics()
        buffers = []
        for _ in range(statistics.num_slabs - statistics.leased_slabs):
            if (buffer := self.arena.lease_nowait(self.arena.slab_bytes)) is not None:
                buffer.view[:] = b"\xee" * buffer.nbytes
                buffers.append(buffer)
        release_all(buffers)


@contextlib.asynccontextmanager
async def opened_rig(tier: Tier, arena: Arena) -> AsyncIterator[TierRig]:
    """Bind and open a tier."""
    tier.bind(arena)
    async with tier as entered:
        assert entered is tier, "the async context does not return the tier"
        yield TierRig(tier, arena)


class Cases:
    """The fixtures and hooks of a conformance suite.

    Attributes:
        many_keys: Number of records of the test with many records. Reduce it for a slow backend.
        reports_evictions: Whether the tier calls `on_evicted` for the chunks that it evicts, which is required of tiers.
            Set it to False for a wrapper of a tier that has no such callback itself.
    """

    many_keys: ClassVar[int] = 2000
    reports_evictions: ClassVar[bool] = True

    def __init_subclass__(cls, **options: Any) -> None:
        """Mark every async test for pytest-asyncio, as its strict mode requires."""
        super().__init_subclass__(**options)
        for name, case in vars(cls).items():
            if name.startswith("test_") and inspect.iscoroutinefunction(case):
                pytest.mark.asyncio(case)

    @pytest.fixture
    def tier(self) -> Tier:
        """The tier to test: new, neither bound nor opened. Must be overridden."""
        raise NotImplementedError(
            f"{type(self).__name__} has no fixture `tier`, which returns a tier to test"
        )

    def reopen(self, tier: Tier) -> Tier:
        """Return a new tier over the content of `tier`, which is persistent and closed."""
        return type(tier)(tier.config)

    def limit(self, tier: Tier, max_bytes: int) -> Tier | None:
        """Return a new, empty tier with a capacity, not opened; None if tiers of this kind have no limit.

        The default works for a config with a field `max_bytes`.

        Args:
            tier: Tier of the fixture, not opened.
            max_bytes: Capacity in bytes.
        """
        if "max_bytes" not in type(tier.config).model_fields:
            return None
        return type(tier)(tier.config.model_copy(update={"max_bytes": max_bytes}))

    async def damage(self, tier: Tier, key: ChunkKey, edit: Callable[[bytes], bytes]) -> bool:
        """Change the record that the backend of the open tier stores under `key`, without calling the tier.

        The default returns False.

        Args:
            tier: The open tier.
            key: Key of a stored chunk.
            edit: Returns the new content for the stored one.

        Returns:
            Whether the content was changed. If not, the tests of damaged content do not apply.
        """
        del tier, key, edit
        return False

    async def stop_backend(self, tier: Tier) -> bool:
        """Make the backend of the open tier fail for the rest of the test, without calling the tier.

        Return whether it was stopped; the default returns False. If not, the test of a failing backend does not apply.
        """
        del tier
        return False

    @pytest.fixture
    def arena(self) -> Iterator[Arena]:
        """Memory for records. Fails the test if a lease is left at the end."""
        arena = small_arena(ARENA_SLABS)
        yield arena
        leased = arena.statistics().leased_slabs
        arena.close()
        assert leased == 0, f"{leased} leases are left after the tier was closed"

    @pytest.fixture
    def allocate(self, arena: Arena) -> Allocate:
        """Lease buffers of `arena`."""
        return allocator(arena)

    @pytest_asyncio.fixture
    async def opened(self, tier: Tier, arena: Arena) -> AsyncIterator[Tier]:
        """`tier`, bound and opened; closed after the test."""
        async with opened_rig(tier, arena) as rig:
            yield rig.tier

    @pytest_asyncio.fixture
    async def rig(self, opened: Tier, arena: Arena) -> AsyncIterator[TierRig]:
        """The calls of `opened` by chunk number. Fails the test if a lease is left before the tier is closed."""
        rig = TierRig(opened, arena)
        yield rig
        await rig.check_leases()


async def in_time(call: Awaitable[T]) -> T:
    """Return the result of the call, or fail if it does not end within DEADLINE_S."""
    task = asyncio.ensure_future(call)
    _, running = await asyncio.wait({task}, timeout=DEADLINE_S)
    if running:
        task.cancel()
    assert not running, f"a call did not end in {DEADLINE_S} s"
    return task.result()


class _Caller:
    """Owner of the buffers lent to a tier; leases that a tier retains belong to the tier."""

    def retained(self, lease: Buffer) -> None:
        """Do nothing: the tier releases the lease."""


def start_threads_of_loop() -> None:
    """Give the running loop a default executor whose threads are all started, so that no call of a tier starts one."""
    executor = ThreadPoolExecutor(LOOP_THREADS)
    asyncio.get_running_loop().set_default_executor(executor)
    started = threading.Barrier(LOOP_THREADS + 1, timeout=DEADLINE_S)
    for _ in range(LOOP_THREADS):
        executor.submit(started.wait)
    started.wait()


def open_resources() -> set[object]:
    """Return the open files and connections of this process, and its Python threads."""
    resources: set[object] = {*threading.enumerate()}
    for descriptor in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):  # closed meanwhile, such as the one of the directory itself
            resources.add((descriptor.name, str(descriptor.readlink())))
    return resources


async def wait_for_no_others(before: set[object], now: Callable[[], Collection[object]]) -> None:
    """Wait until `now()` has nothing that was not there before. Fail after DEADLINE_S."""
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while left := {*now()} - before:
        assert asyncio.get_running_loop().time() < deadline, f"the closed tier has left these open: {left}"
        await asyncio.sleep(0)


def release_all(results: object) -> None:
    """Release the buffers of a result of `get` or `get_many`. Other results are ignored."""
    for result in results if isinstance(results, list) else [results]:
        if isinstance(result, Buffer):
            result.release()


def _check_list(verb: str, results: object, count: int) -> None:
    assert isinstance(results, list | tuple), f"{verb} returned {type_text(results)}, not a list"
    assert len(results) == count, f"{verb} returned {len(results)} answers for {count} chunks"


def are_answers(results: Iterable[object]) -> bool:
    """Return whether these are valid results of `put_many`: None or a TierError each."""
    return all(result is None or isinstance(result, TierError) for result in results)
