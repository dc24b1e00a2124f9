"""One tier is sick: the engine's calls meet their deadlines, and soon are as fast as without the tier.

Time is virtual, so the numbers are no measurements, but results of the layers.
"""

import asyncio
import statistics

import pytest

from lmcache_async.errors import TierUnavailableError
from lmcache_async.testing.fakes import FakeRegistry
from lmcache_async.testing.rig import Rig
from lmcache_async.tiers.middleware.breaker import CircuitState
from tests.simulation.loop import run
from tests.support.engines import retrieve
from tests.tiers.layered import HANG, ScriptedTier, now

STORE_S = RETRIEVE_S = 8.0
TOKENS = 40
CALL_S = 0.002


class SteadyTier(ScriptedTier):
    """A tier whose calls all take the same time. Derived tiers are sick."""

    sick = True

    def __init__(self, config):
        super().__init__(far=True)

    def result_of_call(self, verb):
        return CALL_S

    async def _do(self, verb, keys):
        self.script.appendleft(self.result_of_call(verb) if self.sick else CALL_S)
        await super()._do(verb, keys)


class FailingTier(SteadyTier):
    """A tier whose calls fail at once."""

    def result_of_call(self, verb):
        return TierUnavailableError("away")


class HangingTier(SteadyTier):
    """A tier that never answers."""

    def result_of_call(self, verb):
        return HANG


class UnreadableTier(SteadyTier):
    """A tier that stores chunks and reports them, but whose reads never end, like a stuck disk."""

    def __init__(self, config):
        super().__init__(config)
        self.far = False

    def result_of_call(self, verb):
        return HANG if verb == "get_many" else None


class Client:
    """Stores prompts and retrieves them into other rows.

    Attributes:
        seconds: Duration of each round.
        hits: Number of tokens with the right content, for each retrieve.
    """

    def __init__(self, rig, engine):
        self.rig = rig
        self.engine = engine
        self.seconds = []
        self.hits = []
        self._prompts = 0

    async def rounds(self, count, pause_s=0.0):
        for _ in range(count):
            await asyncio.sleep(pause_s)
            start = now()
            await self._round()
            self.seconds.append(now() - start)

    async def _round(self):
        self._prompts += 1
        tokens = list(range(self._prompts * 1000, self._prompts * 1000 + TOKENS))
        self.rig.write(range(TOKENS), self.rig.content(tokens))
        start = now()
        await self.engine.store(tokens, range(TOKENS))
        assert now() - start <= STORE_S + 0.01
        start = now()
        self.hits.append(sum(await retrieve(self.rig, self.engine, tokens)))
        assert now() - start <= RETRIEVE_S + 0.01


def opened(tier_class, check, **options):
    """Return the result of `check(client, tier)` in an engine that has this tier before a healthy one."""

    async def main():
        tiers = []

        class Kept(tier_class):
            def __init__(self, config):
                super().__init__(config)
                tiers.append(self)

        rig = Rig(slabs=40)
        async with rig.open(
            registry=FakeRegistry(tiers={"first": Kept, "good": SteadyTier}),
            tiers=[{"name": "first", "timeout_s": 5, **options}, {"name": "good", "timeout_s": 5}],
            **{"store.timeout_s": STORE_S, "retrieve.timeout_s": RETRIEVE_S},
        ) as engine:
            result = await check(Client(rig, engine), tiers[0])
            start = now()
        assert now() - start <= 2 * engine.config.shutdown_timeout_s + 0.1
        return result

    return run(main)


def breaker_of(client):
    return client.engine.statistics().layers["first"]["breaker"]


@pytest.mark.parametrize("tier_class", [FailingTier, HangingTier, UnreadableTier])
def test_a_failing_tier_is_suspended_soon_and_then_only_probes_are_slow(tier_class):
    async def healthy_rounds(client, tier):
        await client.rounds(40)
        return max(client.seconds), sum(client.seconds[4:])

    async def rounds(client, tier):
        await client.rounds(40)
        first = client.seconds
        client.seconds = []
        await client.rounds(150, pause_s=2.0)
        return client, first, breaker_of(client)

    longest, total = opened(SteadyTier, healthy_rounds)
    client, first, breaker = opened(tier_class, rounds)

    assert client.hits == [TOKENS] * 190
    assert sum(seconds > longest for seconds in first) <= 4
    assert sum(first[4:]) <= total
    slow = [seconds for seconds in client.seconds if seconds > 0.5]
    tries = breaker.lookup.opened + breaker.read.opened + breaker.write.opened
    assert tries >= 4  # it was tried repeatedly
    assert len(slow) <= 5 + 2 * tries
    assert statistics.median(client.seconds) <= 0.02


def test_a_recovered_tier_serves_again():
    async def check(client, tier):
        await client.rounds(10)
        assert breaker_of(client).lookup.state is CircuitState.OPEN
        tier.sick = False
        await client.rounds(20, pause_s=5.0)
        return breaker_of(client), len(tier.records)

    breaker, records = opened(FailingTier, check)

    assert breaker.lookup.state is breaker.write.state is CircuitState.CLOSED
    assert records > 0
