"""The peer tier: the contract, over one host, three, and TLS."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from lmcache_async.errors import TierClosedError, TierError
from lmcache_async.memory.arena import Arena
from lmcache_async.plugins.peer import PeerTier
from lmcache_async.testing.conformance import TierConformance
from lmcache_async.testing.records import key_of, record
from lmcache_async.tiers.base import Allocate
from lmcache_async.types import ChunkKey
from tests.tiers.peer_hosts import Host, config, running
from tests.tiers.valkey_tls import Authority


@pytest.fixture(scope="module")
def one() -> Iterator[list[Host]]:
    with running() as hosts:
        yield hosts


@pytest.fixture(scope="module")
def three() -> Iterator[list[Host]]:
    with running(3) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Host], dict[str, object]]]:
    """A host that speaks TLS and asks for certificates, and the options of who has one."""
    authority = Authority(tmp_path_factory.mktemp("tls"))
    tls = {"cert_file": authority.issue("server"), "client_ca_file": authority.file}
    ours = {"tls": True, "tls_ca_file": authority.file, "tls_cert_file": authority.issue("client")}
    with running(tls=tls) as hosts:
        yield hosts, ours


class PeerConformance(TierConformance):
    many_keys = 300
    hosts: list[Host]

    def on(self, hosts: list[Host], **options: object) -> Iterator[PeerTier]:
        """A tier over hosts that are empty; when it is closed no lease is left there."""
        self.hosts = hosts
        yield PeerTier(config(*hosts, **options))
        for host in hosts:
            host.empty()

    async def damage(self, tier: PeerTier, key: ChunkKey, edit: Callable[[bytes], bytes]) -> bool:
        [host] = [host for host in self.hosts if key in host.records()]
        host.replace(key, edit)
        return True


class TestWithOneHost(PeerConformance):
    many_keys = 2000

    @pytest.fixture
    def tier(self, one: list[Host]) -> Iterator[PeerTier]:
        yield from self.on(one, connections=1)

    async def test_it_says_when_it_is_not_open(
        self, tier: PeerTier, arena: Arena, allocate: Allocate
    ) -> None:
        with record(arena, 1) as buffer:
            with pytest.raises(TierClosedError):
                await tier.put(key_of(1), buffer)
            async with tier:
                await tier.put(key_of(1), buffer)
            with pytest.raises(TierClosedError):
                await tier.put(key_of(1), buffer)
        with pytest.raises(TierClosedError):
            await tier.get(key_of(1), allocate)


class TestWithThreeHosts(PeerConformance):
    @pytest.fixture
    def tier(self, three: list[Host]) -> Iterator[PeerTier]:
        yield from self.on(three)

    async def test_records_are_spread(self, tier: PeerTier, arena: Arena) -> None:
        async with tier:
            for number in range(60):
                with record(arena, number) as buffer:
                    await tier.put(key_of(number), buffer)
        shares = [len(host.records()) for host in self.hosts]
        assert sum(shares) == 60
        assert min(shares) > 5


class TestOverTLS(PeerConformance):
    many_keys = 200

    @pytest.fixture
    def tier(self, secured: tuple[list[Host], dict[str, object]]) -> Iterator[PeerTier]:
        hosts, ours = secured
        yield from self.on(hosts, **ours)


async def test_by_default_records_are_only_read(arena: Arena, allocate: Allocate) -> None:
    with running(writable=False) as [host]:
        reading = PeerTier(config(host, write_to="none"))
        assert not reading.capabilities.writes
        assert not reading.capabilities.removes
        with record(arena, 1) as buffer:
            content = bytes(buffer.view)
            host.replace(key_of(1), lambda _: content)
            async with reading as tier:
                assert await tier.count_prefix([key_of(1), key_of(2)]) == 1
                with pytest.raises(TierError, match="write_to: rendezvous"):
                    await tier.put(key_of(2), buffer)
                assert not await tier.remove(key_of(1))
                assert await tier.clear() == 0
                got = await tier.get(key_of(1), allocate)
                assert got is not None
                with got:
                    assert bytes(got.view) == content
            async with PeerTier(config(host)) as tier:
                with pytest.raises(TierError, match=r"takes nothing from peers.*set peer\.writable"):
                    await tier.put(key_of(2), buffer)
                with pytest.raises(TierError, match="NOPERM"):
                    await tier.remove(key_of(1))
        assert host.records() == {key_of(1)}
        assert host.leases() == 0


async def test_what_was_rejected_is_never_read_again_also_where_it_cannot_be_removed(
    arena: Arena, allocate: Allocate
) -> None:
    with running(writable=False) as [host], record(arena, 1) as buffer:
        content = bytes(buffer.view)
        host.replace(key_of(1), lambda _: content)
        async with PeerTier(config(host, write_to="none")) as tier:
            assert await tier.contains(key_of(1))
            assert not await tier.reject(key_of(1), "checksum")
            assert not await tier.contains(key_of(1))
            assert await tier.get(key_of(1), allocate) is None
