"""Fixtures, hooks and helpers of the conformance suites."""

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
"""Number of records that the arena of a test holds at the same time."""


class Cases:
    """The fixtures and hooks of a conformance suite.

    Attributes:
        many_keys: Number of records of the test with many records. Reduce it for a slow backend.
    """

    many_keys: ClassVar[int] = 2000

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
        """Return a new tier over the content that `tier`, persistent and closed, has stored."""
        return type(tier)(tier.config)

    def limit(self, tier: Tier, max_bytes: int) -> Tier | None:
        """Return a new, empty tier with a capacity, not opened.

        The default works for a config with a field `max_bytes`.

        Args:
            tier: Tier of the fixture, not opened.
            max_bytes: Capacity in bytes.

        Returns:
            The tier, or None if tiers of this kind have no limit.
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

    @pytest.fixture
    def arena(self) -> Iterator[Arena]:
        """Memory for records. Fails the test if a lease is left at the end."""
        arena = small_arena(ARENA_SLABS)
        yield arena
        leased = arena.statistics().leased_slabs
        arena.close()
        assert leased == 0, f"{leased} leases were not given back until the tier was closed"

    @pytest.fixture
    def allocate(self, arena: Arena) -> Allocate:
        """Lease buffers of `arena`."""

        async def allocate(nbytes: int) -> Buffer:
            return await arena.lease(nbytes, timeout_s=5)

        return allocate

    @pytest_asyncio.fixture
    async def opened(self, tier: Tier, arena: Arena) -> AsyncIterator[Tier]:
        """`tier`, bound and opened; closed after the test."""
        tier.bind(arena)
        async with tier:
            yield tier


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


def record(arena: Arena, number: int, payload_bytes: int = 5000) -> Buffer:
    """Return the sealed record of chunk `number` in a read-only buffer, as an engine passes it to `put`."""
    with records.record(arena, number, payload_bytes) as buffer:
        return buffer.lend(_Caller())


async def put(tier: Tier, arena: Arena, numbers: Iterable[int], payload_bytes: int = 5000) -> None:
    """Put these chunks, one after the other."""
    for number in numbers:
        with record(arena, number, payload_bytes) as buffer:
            await tier.put(key_of(number), buffer)


async def holds(tier: Tier, number: int, allocate: Allocate, payload_bytes: int = 5000) -> bool:
    """Return whether the chunk is stored, and assert that its record is right."""
    got = await tier.get(key_of(number), allocate)
    if got is None:
        return False
    with got:
        check_record(got, number, payload_bytes)
    return True


def release_all(results: object) -> None:
    """Release the buffers of a result of `get` or `get_many`. Other results are ignored."""
    for result in results if isinstance(results, list) else [results]:
        if isinstance(result, Buffer):
            result.release()


async def listed(tier: Tier) -> set[ChunkKey]:
    """Return the keys that `keys` yields, and assert that none is repeated."""
    keys = [key async for key in tier.keys()]  # noqa: SIM118 - no dict
    assert len(set(keys)) == len(keys), "keys gave a key twice"
    return set(keys)


async def leases_are_back(tier: Tier, arena: Arena) -> None:
    """Wait until only the chunks of a tier in the arena are leased. Fail after DEADLINE_S."""
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while (leased := arena.statistics().leased_slabs) != (kept := chunks_in_arena(tier)):
        assert asyncio.get_running_loop().time() < deadline, (
            f"{leased} slabs of the arena are leased, and the tier keeps {kept} chunks there: a lease leaks"
        )
        await asyncio.sleep(0)


def chunks_in_arena(tier: Tier) -> int:
    """Number of leases of the arena that the tier may hold."""
    return tier.statistics().chunks if tier.capabilities.in_arena else 0


def leases_content(tier: Tier) -> bool:
    """Whether `get` returns leases of the stored content and does not call `allocate`."""
    return tier.capabilities.in_arena or tier.capabilities.own_memory


def scribble(arena: Arena) -> None:
    """Overwrite all free memory, so that a read without a lease returns wrong bytes."""
    statistics = arena.statistics()
    buffers = []
    for _ in range(statistics.num_slabs - statistics.leased_slabs):
        if (buffer := arena.lease_nowait(arena.slab_bytes)) is not None:
            buffer.view[:] = b"\xee" * buffer.nbytes
            buffers.append(buffer)
    for buffer in buffers:
        buffer.release()


def are_answers(results: Iterable[object]) -> bool:
    """Return whether these are valid results of `put_many`: None or a TierError each."""
    return all(result is None or isinstance(result, TierError) for result in results)
