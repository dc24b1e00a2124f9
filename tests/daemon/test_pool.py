"""The pool: eviction order, quotas and refusals."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.daemon import pool as pool_module
from lmcache_async.daemon.allocator import RangeAllocator
from lmcache_async.daemon.config import TenantOptions
from lmcache_async.daemon.pool import MAX_TENANTS, MAX_TRIES, Block, Pool
from lmcache_async.testing.records import key_of
from lmcache_async.tiers.eviction import LRUPolicy
from lmcache_async.types import ChunkKey

PAGE = 4096


def pool_of(pages: int, **options: object) -> Pool:
    return Pool(memoryview(bytearray(pages * PAGE)), **options)  # type: ignore[arg-type]


def put(pool: Pool, numbers: Iterable[int], tenant: str = "t", pages: int = 1) -> list[int]:
    """Put records, and return the numbers of those admitted."""
    taken = []
    for number in numbers:
        block = pool.reserve(tenant, key_of(number), pages * PAGE)
        if block is not None:
            block.view[:4] = number.to_bytes(4, "little")
            pool.commit(block)
            taken.append(number)
    return taken


def held(pool: Pool, tenant: str = "t") -> list[int]:
    return sorted(int.from_bytes(key, "big") for key in pool.keys(tenant))


def test_a_chunk_is_not_evicted_for_its_continuation() -> None:
    pool = pool_of(3)
    put(pool, [50, 51])
    pool.contains("t", [key_of(0), key_of(1)])
    put(pool, [0])
    pool.contains("t", [key_of(50), key_of(51)])  # now chunk 0 is the oldest
    put(pool, [1])

    assert {0, 1} <= set(held(pool))


def test_leased_records_stay_and_a_pool_full_of_leases_refuses() -> None:
    pool = pool_of(4)
    put(pool, range(4))
    blocks = [pool.lease("t", key_of(number)) for number in range(4)]

    assert put(pool, [9]) == []
    assert put(pool, [9], "other", pages=4) == []
    for number, block in enumerate(blocks):
        assert block is not None
        assert int.from_bytes(block.view[:4], "little") == number
        pool.release(block)
    assert put(pool, [9]) == [9]


def test_the_prefix_of_a_leased_chunk_stays() -> None:
    pool = pool_of(4)
    pool.contains("t", [key_of(number) for number in range(4)])
    put(pool, range(4))
    block = pool.lease("t", key_of(3))
    assert block is not None

    assert put(pool, [10]) == []
    pool.release(block)
    assert put(pool, [10]) == [10]
    assert held(pool) == [0, 1, 2, 10]


def test_leases_end_once() -> None:
    pool = pool_of(4)
    block = pool.reserve("t", key_of(1), 10)
    assert block is not None
    pool.commit(block)
    with pytest.raises(RuntimeError, match="twice"):
        pool.release(block)
    lease = pool.lease("t", key_of(1))
    assert lease is not None
    with pytest.raises(ValueError, match="not reserved"):
        pool.commit(lease)
    pool.release(lease)
    with pytest.raises(RuntimeError, match="twice"):
        pool.release(lease)
    with pytest.raises(ValueError, match="at least 1 byte"):
        pool.reserve("t", key_of(1), 0)


def test_a_tenant_at_its_quota_evicts_its_own_records() -> None:
    pool = pool_of(100, quotas={"t": TenantOptions(max_bytes=3 * PAGE)})
    put(pool, range(5), "u")
    put(pool, range(7))

    assert held(pool) == [4, 5, 6]
    assert held(pool, "u") == [0, 1, 2, 3, 4]
    assert put(pool, [9], pages=4) == []
    assert held(pool) == [4, 5, 6]


def test_reservations_count_against_the_quota() -> None:
    pool = pool_of(100, other_quota=TenantOptions(max_bytes=2 * PAGE))
    slots = [pool.reserve("t", key_of(number), PAGE) for number in range(3)]

    assert slots[2] is None
    for slot in slots[:2]:
        assert slot is not None
        pool.release(slot)
    assert pool.reserve("t", key_of(5), 2 * PAGE) is not None


def test_reserved_bytes_are_not_evicted_for_other_tenants() -> None:
    pool = pool_of(10, quotas={"t": TenantOptions(reserved_bytes=4 * PAGE)})
    put(pool, range(8))
    assert put(pool, range(20), "u") == list(range(20))

    assert held(pool) == [4, 5, 6, 7]
    assert put(pool, [30], "u", pages=7) == []
    assert held(pool) == [4, 5, 6, 7]


def test_records_of_a_tenant_at_its_reservation_are_not_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan of all records for each refused one would block the daemon for seconds."""
    pool = pool_of(10, quotas={"t": TenantOptions(reserved_bytes=8 * PAGE)})
    put(pool, range(10))
    assert put(pool, range(20, 30), tenant="other") == list(range(20, 30))
    examined: list[Block] = []
    monkeypatch.setattr(pool_module, "_is_unused", lambda block: bool(examined.append(block)) or True)
    put(pool, [30], tenant="other")

    assert held(pool) == list(range(2, 10))
    assert {block.owner.name for block in examined} == {"other"}


def test_the_oldest_records_of_all_tenants_are_evicted() -> None:
    pool = pool_of(6)
    put(pool, range(3), "u")
    put(pool, range(3), "t")
    put(pool, range(10, 13), "t")

    assert held(pool, "u") == []
    assert held(pool, "t") == [0, 1, 2, 10, 11, 12]


@pytest.mark.parametrize(("old", "new"), [(3, 4), (4, 3), (1, 13), (13, 1), (40, 41)])
def test_records_of_another_size_replace_the_least_recently_used(old: int, new: int) -> None:
    pool = pool_of(240)
    put(pool, range(240 // old), pages=old)
    assert held(pool) == list(range(240 // old))

    for number in range(1000, 1000 + 120 // new):
        assert put(pool, [number], pages=new) == [number]

    count = 120 // new
    assert held(pool)[-count:] == list(range(1000, 1000 + count))
    kept = held(pool)[:-count]
    assert kept == list(range(240 // old))[-len(kept) :]
    assert pool.tenant_statistics("t").bytes >= (240 - 2 * max(old, new)) * PAGE  # no more than necessary


def test_records_are_evicted_around_leased_ones() -> None:
    pool = pool_of(12)
    put(pool, range(12))
    blocks = [pool.lease("t", key_of(number)) for number in (2, 8)]

    assert put(pool, [20], pages=6) == []
    assert put(pool, [21], pages=5) == [21]
    assert held(pool) == [0, 1, 2, 8, 9, 10, 11, 21]
    for block in blocks:
        assert block is not None
        pool.release(block)


def test_a_neighbour_that_the_new_chunk_continues_is_not_evicted() -> None:
    pool = pool_of(6)
    pool.contains("t", [key_of(number) for number in (0, 1)])
    put(pool, [10, 0, 11, 12, 13, 14])

    assert put(pool, [1], pages=2) == [1]
    assert held(pool) == [0, 1, 10, 13, 14]


def test_a_record_that_no_neighbours_make_room_for_is_refused_after_a_bounded_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = pool_of(2000)
    put(pool, range(2000))
    blocks = [pool.lease("t", key_of(number)) for number in range(0, 2000, 2)]
    oldest, examined = LRUPolicy.oldest, list[ChunkKey]()

    def count(policy: LRUPolicy, evictable: Callable[[ChunkKey], bool]) -> ChunkKey | None:
        return oldest(policy, lambda key: examined.append(key) or evictable(key))

    monkeypatch.setattr(LRUPolicy, "oldest", count)

    assert put(pool, [5000], pages=2) == []
    assert len(examined) == MAX_TRIES + 1
    assert put(pool, [5001]) == [5001]
    assert put(pool, [5002], pages=2001) == []
    assert all(blocks)


@given(st.lists(st.integers(1, 8), max_size=40), st.data())
def test_unused_ranges_are_merged_and_taken_best_fit(sizes: list[int], data: st.DataObject) -> None:
    allocator = RangeAllocator(64 * PAGE + 100)
    taken: dict[int, int] = {}
    for size in sizes:
        if taken and data.draw(st.booleans()):
            start = data.draw(st.sampled_from(sorted(taken)))
            allocator.give(start, taken.pop(start))
        used = sorted(taken.items())
        edges = [(0, 0), *used, (64 * PAGE, 0)]
        gaps = [
            (right - left - length, left + length)
            for (left, length), (right, _) in itertools.pairwise(edges)
            if right > left + length
        ]
        start = allocator.take(size * PAGE)
        assert start == min((gap for gap in gaps if gap[0] >= size * PAGE), default=(0, None))[1]
        if start is not None:
            taken[start] = size * PAGE
        assert allocator.free_bytes == 64 * PAGE - sum(taken.values())
    for start, nbytes in taken.items():
        allocator.give(start, nbytes)

    assert (len(allocator), allocator.free_bytes) == (1, 64 * PAGE)


def test_tenants_that_hold_nothing_are_forgotten() -> None:
    pool = pool_of(4)
    put(pool, [1])
    for number in range(2 * MAX_TENANTS):
        pool.contains(f"tenant-{number}", [key_of(1)])

    assert len(pool._tenants) <= MAX_TENANTS
    assert held(pool) == [1]
    assert set(pool.statistics().tenants) == {"t"}
