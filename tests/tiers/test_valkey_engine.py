"""An engine with the usual layers over a real cluster of three: one node lost, then all, then all are back."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from lmcache_async.engine.engine import CacheEngine
from lmcache_async.plugins.valkey.topology import slot_of
from lmcache_async.testing.rig import Rig
from lmcache_async.tiers.middleware.breaker import CircuitState
from tests.support.chunks import chunks_of
from tests.support.valkey_servers import DEADLINE_S, ServerCluster, running_cluster

pytestmark = pytest.mark.one_loop

CHUNK, CHUNKS = 8, 6
BREAKER = {"name": "breaker", "pause_s": 0.1, "max_pause_s": 0.1}
"""As it is, but it soon tries again."""


@pytest.fixture
def cluster() -> Iterator[ServerCluster]:
    with running_cluster() as cluster:
        yield cluster


class Client:
    """Stores prompts and reads them again, in other places of the device's memory."""

    def __init__(self, rig: Rig, engine: CacheEngine, prefix: str) -> None:
        self.rig = rig
        self.engine = engine
        self.prefix = prefix

    @staticmethod
    def prompt(number: int) -> list[int]:
        return list(range(1000 * number, 1000 * number + CHUNKS * CHUNK))

    def homes(self, number: int) -> list[int]:
        """Which of the three nodes has each of the prompt's chunks."""
        chunks = chunks_of(self.engine, self.prompt(number))
        return [slot_of(f"{self.prefix}{chunk.key.hex()}".encode()) * 3 // 16384 for chunk in chunks]

    async def store(self, number: int) -> None:
        tokens = self.prompt(number)
        self.rig.write(range(len(tokens)), self.rig.content(tokens))
        await self.engine.store(tokens, range(len(tokens)))
        assert await self.engine.flush(timeout_s=DEADLINE_S)

    async def hit(self, number: int) -> int:
        """Chunks that came back; what came is right, and nothing else was touched."""
        tokens = self.prompt(number)
        slots = range(64, 64 + len(tokens))
        self.rig.wipe()
        hit = int((await self.engine.retrieve(tokens, slots)).sum())
        got = self.rig.read(slots)
        assert (got[:, :, :hit] == self.rig.content(tokens)[:, :, :hit]).all()
        assert (got[:, :, hit:] == -7).all()
        return hit // CHUNK

    def breaker(self) -> Any:
        return self.engine.statistics().layers["valkey"]["breaker"]

    def errors(self, verb: str) -> dict[str, int]:
        return dict(self.engine.statistics().layers["valkey"]["metrics"].verbs[verb].errors)


def opened(cluster: ServerCluster) -> tuple[Rig, Any, str]:
    rig, prefix = Rig(slabs=40), f"{uuid.uuid4().hex}:"
    tier = {
        "name": "valkey",
        "url": cluster.url,
        "mode": "cluster",
        "key_prefix": prefix,
        "layers": ["metrics", "retry", BREAKER, "deadline"],
    }
    return rig, rig.open(tiers=[tier]), prefix


async def test_a_lost_nodes_chunks_are_misses_and_the_others_serve_on(cluster: ServerCluster) -> None:
    rig, opening, prefix = opened(cluster)
    async with opening as engine:
        client = Client(rig, engine, prefix)
        for number in range(20):
            await client.store(number)
        assert [await client.hit(number) for number in range(20)] == [CHUNKS] * 20

        cluster.servers[0].kill()
        for number in range(20):
            homes = [*client.homes(number), 0]
            assert await client.hit(number) == homes.index(0), f"prompt {number}: its chunks lie at {homes}"
        for number in range(20, 40):
            await client.store(number)
            homes = [*client.homes(number), 0]
            assert await client.hit(number) == homes.index(0), f"prompt {number}: its chunks lie at {homes}"

        breaker = client.breaker()
        assert [breaker.lookup.state, breaker.read.state, breaker.write.state] == [CircuitState.CLOSED] * 3
        assert breaker.write.opened == 0
        dropped = sum(client.homes(number).count(0) for number in range(20, 40))
        assert sum(client.errors("put_many").values()) == dropped


async def test_a_cluster_of_which_nothing_is_left_is_left_alone_until_it_is_back(
    cluster: ServerCluster,
) -> None:
    rig, opening, prefix = opened(cluster)
    async with opening as engine:
        client = Client(rig, engine, prefix)
        await client.store(0)
        assert await client.hit(0) == CHUNKS

        for server in cluster.servers:
            server.kill()
        number = 0
        while client.breaker().lookup.refused + client.breaker().write.refused == 0:
            number += 1
            await client.store(number)
            assert await client.hit(number) == 0
        assert client.errors("put_many").keys() <= {
            "TierUnavailableError",
            "TierPartUnavailableError",  # of the first node that was asked, while the others seemed well
            "TierSuspendedError",
        }
        assert sum(client.errors("put_many").values()) > 0
        assert number < 20

        cluster.start_again()
        while await client.hit(0) < CHUNKS:
            await client.store(0)
        breaker = client.breaker()
        assert breaker.lookup.opened + breaker.write.opened > 0
        assert sum(client.errors("count_prefix").values()) > 0
