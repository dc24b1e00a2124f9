"""What the cases of the conformance suite share: the tier, its hooks, an arena, and marks for pytest-asyncio."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any, ClassVar, TypeVar

import pytest
import pytest_asyncio

from lmcache_async.errors import TierError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.testing import records
from lmcache_async.testing.records import check_record, key_of, small_arena
from lmcache_async.testing.steps import DEADLINE_S
from lmcache_async.tiers.base import Allocate, Tier
from lmcache_async.types import ChunkKey

T = TypeVar("T")

ARENA_SLABS = 48
"""Records that the arena of a case holds at the same time."""


class Cases:
    """The fixtures and hooks of a conformance suite.

    Attributes:
        many_keys: Records of the case about many; fewer where each costs a lot.
    """

    many_keys: ClassVar[int] = 10_000

    def __init_subclass__(cls, **options: Any) -> None:
        """Mark every async case for pytest-asyncio, whose strict mode runs only what is marked."""
        super().__init_subclass__(**options)
        for name, case in vars(cls).items():
            if name.startswith("test_") and inspect.iscoroutinefunction(case):
                pytest.mark.asyncio(case)

    @pytest.fixture
    def tier(self) -> Tier:
        """To be overridden: a new tier, neither bound nor opened."""
        raise NotImplementedError(
            f"{type(self).__name__} has no fixture `tier`, which returns a tier to test"
        )

    def reopen(self, tier: Tier) -> Tier:
        """A new tier over what `tier`, a persistent one that was closed, has left behind."""
        return type(tier)(tier.config)

    def limit(self, tier: Tier, max_bytes: int) -> Tier | None:
        """A new and empty tier with room for `max_bytes`; None where tiers of its kind have no limit.

        It works by itself for a config with a field `max_bytes`. `tier` is not open.
        """
        if "max_bytes" not in type(tier.config).model_fields:
            return None
        return type(tier)(tier.config.model_copy(update={"max_bytes": max_bytes}))

    async def damage(self, tier: Tier, key: ChunkKey, edit: Callable[[bytes], bytes]) -> bool:
        """Replace what the backend holds under `key` by `edit` of it, behind the back of the open tier.

        Returns:
            Whether it was done; the cases of damaged content then apply.
        """
        del tier, key, edit
        return False

    @pytest.fixture
    def arena(self) -> Iterator[Arena]:
        """Memory for records; in the end all of it has to be back."""
        arena = small_arena(ARENA_SLABS)
        yield arena
        leased = arena.statistics().leased_slabs
        arena.close()
        assert leased == 0, f"{leased} leases were not given back until the tier was closed"

    @pytest.fixture
    def allocate(self, arena: Arena) -> Allocate:
        """Gives leases of `arena`."""

        async def allocate(nbytes: int) -> Buffer:
            return await arena.lease(nbytes, timeout_s=5)

        return allocate

    @pytest_asyncio.fixture
    async def opened(self, tier: Tier, arena: Arena) -> AsyncIterator[Tier]:
        """`tier`, bound and opened; closed after the case."""
        tier.bind(arena)
        async with tier:
            yield tier


async def in_time(call: Awaitable[T]) -> T:
    """What the call comes to; a failure where it hangs."""
    task = asyncio.ensure_future(call)
    _, running = await asyncio.wait({task}, timeout=DEADLINE_S)
    if running:
        task.cancel()
    assert not running, f"a call did not end in {DEADLINE_S} s"
    return task.result()


class _Caller:
    """Owns the leases that a tier is given; leases that a tier retains are the tier's own."""

    def retained(self, lease: Buffer) -> None:
        """Nothing to do: the tier releases it."""


def record(arena: Arena, number: int, payload_bytes: int = 5000) -> Buffer:
    """The sealed record of chunk `number` as an engine gives it to `put`: in a read-only buffer."""
    with records.record(arena, number, payload_bytes) as buffer:
        return buffer.lend(_Caller())


async def put(tier: Tier, arena: Arena, numbers: Iterable[int], payload_bytes: int = 5000) -> None:
    """Put these chunks, one after the other."""
    for number in numbers:
        with record(arena, number, payload_bytes) as buffer:
            await tier.put(key_of(number), buffer)


async def holds(tier: Tier, number: int, allocate: Allocate, payload_bytes: int = 5000) -> bool:
    """Whether the chunk is there; what is there has to be right."""
    got = await tier.get(key_of(number), allocate)
    if got is None:
        return False
    with got:
        check_record(got, number, payload_bytes)
    return True


def release_all(results: object) -> None:
    """Give back the buffers of a result of `get` or `get_many`; other results hold none."""
    for result in results if isinstance(results, list) else [results]:
        if isinstance(result, Buffer):
            result.release()


async def listed(tier: Tier) -> set[ChunkKey]:
    """What `keys` gives, each once."""
    keys = [key async for key in tier.keys()]  # noqa: SIM118 - no dict
    assert len(set(keys)) == len(keys), "keys gave a key twice"
    return set(keys)


async def leases_are_back(tier: Tier, arena: Arena) -> None:
    """Nothing is leased but what a tier in the arena keeps there; calls that end late are waited for."""
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while (leased := arena.statistics().leased_slabs) != (kept := chunks_in_arena(tier)):
        assert asyncio.get_running_loop().time() < deadline, (
            f"{leased} slabs of the arena are leased, and the tier keeps {kept} chunks there: a lease leaks"
        )
        await asyncio.sleep(0)


def chunks_in_arena(tier: Tier) -> int:
    """How many leases of the arena the tier may hold."""
    return tier.statistics().chunks if tier.capabilities.in_arena else 0


def leases_content(tier: Tier) -> bool:
    """Whether `get` gives leases of what the tier keeps, and asks `allocate` for nothing."""
    return tier.capabilities.in_arena or tier.capabilities.own_memory


def scribble(arena: Arena) -> None:
    """Write over all memory that is free: whoever still reads there without a lease reads nonsense."""
    statistics = arena.statistics()
    buffers = []
    for _ in range(statistics.num_slabs - statistics.leased_slabs):
        if (buffer := arena.lease_nowait(arena.slab_bytes)) is not None:
            buffer.view[:] = b"\xee" * buffer.nbytes
            buffers.append(buffer)
    for buffer in buffers:
        buffer.release()


def are_answers(results: Iterable[object]) -> bool:
    """Whether these are what `put_many` may answer: None, or why not."""
    return all(result is None or isinstance(result, TierError) for result in results)
