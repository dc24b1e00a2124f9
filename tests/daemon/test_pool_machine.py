"""The pool compared with a model: leases do not overlap, quotas hold, no record is lost or duplicated."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from lmcache_async.daemon.config import TenantOptions
from lmcache_async.daemon.pool import Block, Pool
from lmcache_async.testing.records import key_of
from tests.support.thorough import machine_settings

PAGE = 4096
TENANTS = ("a", "b", "c")
QUOTAS = {"a": TenantOptions(max_bytes=20 * PAGE), "b": TenantOptions(reserved_bytes=10 * PAGE)}
numbers = st.integers(0, 5)
sizes = st.sampled_from([1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE, 9 * PAGE, 10 * PAGE, 16 * PAGE, 33 * PAGE])


class PoolMachine(RuleBasedStateMachine):
    readers: Bundle[tuple[str, Block, bytes]] = Bundle("readers")
    writers: Bundle[tuple[str, Block, bytes]] = Bundle("writers")

    @initialize(pages=st.integers(1, 60))
    def make(self, pages: int) -> None:
        memory = memoryview(bytearray(pages * PAGE + 7))
        self.pool = Pool(memory, quotas=QUOTAS)
        self.pages = pages
        self.serial = 0
        self.contents: dict[tuple[str, bytes], bytes] = {}
        self.live: list[tuple[Block, bytes]] = []
        # Leases of readers, for records that are not removed.
        self.read: list[tuple[Block, tuple[str, bytes]]] = []

    @rule(target=writers, tenant=st.sampled_from(TENANTS), nbytes=sizes, number=numbers)
    def reserve(self, tenant: str, nbytes: int, number: int):
        before = self.pool.statistics().tenants
        block = self.pool.reserve(tenant, key_of(number), nbytes)
        after = self.pool.statistics().tenants
        b = after["b"]
        if tenant != "b" and b.evictions > before["b"].evictions:
            assert b.bytes >= QUOTAS["b"].reserved_bytes
        if block is None:
            return multiple()
        assert (len(block.view), block.nbytes, block.offset % PAGE) == (nbytes, nbytes, 0)
        self.serial += 1
        content = (str(self.serial).encode() * nbytes)[:nbytes]
        block.view[:] = content
        self.live.append((block, content))
        return (tenant, block, content)

    @rule(writer=consumes(writers))
    def commit(self, writer: tuple[str, Block, bytes]) -> None:
        tenant, block, content = writer
        key = block.key
        there = self.pool.contains(tenant, [key]) == [True]
        self.pool.commit(block)
        self.live.remove((block, content))
        if not there:
            self.contents[tenant, key] = content
        assert self.pool.contains(tenant, [key]) == [True]

    @rule(lease=consumes(writers) | consumes(readers))
    def release(self, lease: tuple[str, Block, bytes]) -> None:
        tenant, block, content = lease
        self.pool.release(block)
        self.live.remove((block, content))
        if (read := (block, (tenant, block.key))) in self.read:
            self.read.remove(read)

    @rule(tenant=st.sampled_from(TENANTS), nbytes=sizes, some=st.lists(numbers, min_size=1, max_size=6))
    def store(self, tenant: str, nbytes: int, some: list[int]) -> None:
        """Store a prompt like an engine."""
        self.pool.contains(tenant, [key_of(number) for number in some])
        for number in some:
            key = key_of(number)
            block = self.pool.reserve(tenant, key, nbytes)
            if block is None or key in self.pool.keys(tenant):
                if block is not None:
                    self.pool.release(block)
                continue
            self.serial += 1
            block.view[:] = self.contents[tenant, key] = (str(self.serial).encode() * nbytes)[:nbytes]
            self.pool.commit(block)

    @rule(target=readers, which=st.integers(0, 100), times=st.integers(1, 3))
    def lease(self, which: int, times: int):
        """Lease an existing record, possibly several times."""
        held = sorted((tenant, key) for tenant in TENANTS for key in self.pool.keys(tenant))
        if not held:
            return multiple()
        tenant, key = held[which % len(held)]
        leases = []
        for _ in range(times):
            block = self.pool.lease(tenant, key)
            assert block is not None
            assert bytes(block.view) == self.contents[tenant, key]
            self.live.append((block, self.contents[tenant, key]))
            self.read.append((block, (tenant, key)))
            leases.append((tenant, block, self.contents[tenant, key]))
        return multiple(*leases)

    @rule(tenant=st.sampled_from(TENANTS), prompt=st.lists(numbers, max_size=6, unique=True))
    def look(self, tenant: str, prompt: list[int]) -> None:
        keys = [key_of(number) for number in sorted(prompt)]
        there = self.pool.contains(tenant, keys)
        assert there == [key in self.pool.keys(tenant) for key in keys]

    @rule(which=st.integers(0, 100), tenant=st.sampled_from(TENANTS))
    def remove(self, which: int, tenant: str) -> None:
        held = sorted(self.pool.keys(tenant))
        key = held[which % len(held)] if held else key_of(0)
        assert self.pool.remove(tenant, key) is bool(held)
        self.read = [(block, of) for block, of in self.read if of != (tenant, key)]
        assert self.pool.lease(tenant, key) is None
        assert not self.pool.remove(tenant, key)

    @precondition(lambda self: len(self.live) > 3)
    @rule(tenant=st.sampled_from(TENANTS))
    def clear(self, tenant: str) -> None:
        held = len(self._held(tenant))
        assert self.pool.clear(tenant) == held
        self.read = [(block, of) for block, of in self.read if of[0] != tenant]
        assert self.pool.keys(tenant) == []

    @invariant()
    def leases_do_not_overlap(self) -> None:
        for block, content in self.live:
            assert bytes(block.view) == content
        spans = sorted({(block.offset, block.offset + block.nbytes) for block, _ in self.live})
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))

    @invariant()
    def what_is_leased_stays(self) -> None:
        held = {tenant: set(self.pool.keys(tenant)) for tenant in TENANTS}
        assert all(key in held[tenant] for _, (tenant, key) in self.read)

    @invariant()
    def the_figures_are_right(self) -> None:
        statistics = self.pool.statistics()
        held = sum(tenant.bytes for tenant in statistics.tenants.values())
        assert held + statistics.unused_bytes == statistics.max_bytes == self.pages * PAGE
        for name, tenant in statistics.tenants.items():
            assert tenant.bytes <= tenant.max_bytes
            keys = self.pool.keys(name)
            pages = [-(-len(self.contents[name, key]) // PAGE) for key in keys]
            assert (tenant.chunks, tenant.record_bytes) == (len(keys), sum(pages) * PAGE)
            assert self._held(name) <= self.contents.keys()
        leases = sum(tenant.readers + tenant.writers for tenant in statistics.tenants.values())
        assert leases == len(self.live)

    def teardown(self) -> None:
        for block, _ in self.live:
            self.pool.release(block)
        for tenant in TENANTS:
            self.pool.clear(tenant)
        statistics = self.pool.statistics()
        assert statistics.unused_bytes == statistics.max_bytes
        assert statistics.segments == 1
        assert sum(tenant.bytes for tenant in statistics.tenants.values()) == 0

    def _held(self, tenant: str) -> set[tuple[str, bytes]]:
        return {(tenant, key) for key in self.pool.keys(tenant)}


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = machine_settings(100, 40)
