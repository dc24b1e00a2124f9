"""An engine survives a misbehaving tier, with the default layers and without layers, on both kinds of loops.

Each misbehaviour is tested once with the default layers on a loop thread, as in vLLM, and once without layers on the
caller's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from lmcache_async.engine.engine import CacheEngine
from lmcache_async.engine.loop import LoopThread
from lmcache_async.errors import ConfigError
from lmcache_async.logging import LimitedLogger
from lmcache_async.testing.fakes import DictTier
from lmcache_async.testing.rig import Rig
from lmcache_async.testing.steps import DEADLINE_S
from lmcache_async.tiers.handle import TierHandle
from lmcache_async.types import ChunkKey
from tests.support.engines import leased, retrieve
from tests.support.tiers import registry_of
from tests.tiers.misbehaviour import MISBEHAVIOURS, MisbehavingTier, Misbehaviour

CHUNKS = 4
"""Chunks of a prompt."""

HANGING_TIMEOUT_S = 0.02
"""`timeout_s` of a tier whose calls do not end by themselves."""

NO_LAYERS: Sequence[object] = ()
"""The setting `layers` of a tier without layers."""


@pytest.mark.parametrize("mode", MISBEHAVIOURS, ids=str)
def test_an_engine_on_a_loop_thread_outlives_a_misbehaving_tier_with_the_default_layers(mode):
    _run_on_a_loop_thread(_Case(mode, layers=None))


@pytest.mark.parametrize("mode", [mode for mode in MISBEHAVIOURS if mode.ends_loop], ids=str)
def test_an_engine_on_a_loop_thread_outlives_a_tier_without_layers_that_ends_the_loop(mode):
    _run_on_a_loop_thread(_Case(mode, NO_LAYERS))


@pytest.mark.parametrize("mode", [mode for mode in MISBEHAVIOURS if not mode.ends_loop], ids=str)
def test_an_engine_on_the_callers_loop_outlives_a_misbehaving_tier_without_layers(mode):
    case = _Case(mode, NO_LAYERS)

    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await case.attack()
            await case.serves_the_rest()

    asyncio.run(main())


def _run_on_a_loop_thread(case: _Case) -> None:
    with contextlib.closing(LoopThread("border")) as thread:
        thread.submit(case.attack()).result(DEADLINE_S)
        thread.submit(case.serves_the_rest()).result(DEADLINE_S)


def test_a_tier_without_capabilities_is_refused():
    mode = next(mode for mode in MISBEHAVIOURS if str(mode) == "capabilities answers None")
    tier = MisbehavingTier(mode)
    tier.begin()

    with pytest.raises(
        ConfigError, match="tier 'bad': its `capabilities` must be an instance of Capabilities"
    ):
        TierHandle(tier, name="bad", timeout_s=1, logger=LimitedLogger(logging.getLogger("test")))


class _Case:
    """An engine over three tiers: the misbehaving one is the fastest, then host memory, then a dict."""

    def __init__(self, mode: Misbehaviour, layers: Sequence[object] | None) -> None:
        self._mode = mode
        self._layers = layers
        self._rig = Rig()
        self._records: dict[ChunkKey, bytes] = {}
        self._first = list(range(100, 100 + CHUNKS * self._rig.chunk_size))
        self._second = list(range(500, 500 + CHUNKS * self._rig.chunk_size))

    async def attack(self) -> None:
        """Store, then look up, retrieve and store with the misbehaviour, then check the engine's state."""
        mode, bad = self._mode, MisbehavingTier(self._mode)
        async with self._open(bad=bad, other=self._other()) as engine:
            await self._store(engine, self._first)
            assert await engine.flush(timeout_s=DEADLINE_S)
            bad.begin()
            for _ in range(CHUNKS + 1):
                found = await self._retrieve(engine, self._first)
            assert found == len(self._first) or not mode.serves, "the other tiers did not serve the prompt"
            for _ in range(3):
                await self._store(engine, self._second)
                found = await self._retrieve(engine, self._second)
            assert found == len(self._second) or not mode.serves, "the other tiers did not take the prompt"
            engine.statistics()
            if mode.hangs:
                bad.end()  # otherwise its running calls would keep their buffers
            await _until_idle(engine)

    async def serves_the_rest(self) -> None:
        """Assert that the other tiers serve the chunks that were stored meanwhile."""
        async with self._open(other=self._other()) as engine:
            for tokens in (self._first, self._second):
                assert await self._retrieve(engine, tokens) == len(tokens), "another tier lost chunks"
            await _until_idle(engine)

    def _other(self) -> DictTier:
        return DictTier(records=self._records)

    def _open(self, **tiers: DictTier) -> Any:
        specs: list[object] = [{"name": "other", "layers": []}]
        if "bad" in tiers:
            bad: dict[str, object] = {"name": "bad", "timeout_s": DEADLINE_S}
            if self._mode.hangs:
                bad["timeout_s"] = HANGING_TIMEOUT_S
            if self._layers is not None:
                bad["layers"] = list(self._layers)
            specs = [bad, "cpu", *specs]
        return self._rig.open(
            registry=registry_of(**{name: _loads(tier) for name, tier in tiers.items()}),
            tiers=specs,
            **{
                "retrieve.timeout_s": DEADLINE_S,
                "store.timeout_s": DEADLINE_S,
                "store.allocate_timeout_s": DEADLINE_S,
            },
        )

    async def _store(self, engine: CacheEngine, tokens: list[int]) -> None:
        slots = range(len(tokens))
        self._rig.write(slots, self._rig.content(tokens))
        report = await engine.store(tokens, list(slots))
        assert not report.dropped, f"dropped: {report.dropped}"

    async def _retrieve(self, engine: CacheEngine, tokens: list[int]) -> int:
        """Return the number of tokens found, and assert that their KV is right."""
        found = await engine.lookup(tokens)
        assert 0 <= found <= len(tokens)
        mask = await retrieve(self._rig, engine, tokens)
        assert mask == sorted(mask, reverse=True), "the hit is not a prefix"
        return sum(mask)


def _loads(tier: DictTier) -> type[DictTier]:
    """Return a class whose constructor returns that tier, for a registry."""

    class Loads(DictTier):
        def __new__(cls, *_: Any) -> Any:
            return tier

        def __init__(self, *_: Any) -> None:
            """Do nothing: the tier is initialized already."""

    return Loads


async def _until_idle(engine: CacheEngine) -> None:
    """Wait until only the slabs of the tier in host memory are leased."""
    await engine.flush(timeout_s=DEADLINE_S)
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while True:
        statistics, leaked = engine.statistics(), leased(engine)
        if not leaked and not statistics.running and not statistics.late_calls:
            return
        assert asyncio.get_running_loop().time() < deadline, (
            f"{leaked} slabs are leased, {statistics.late_calls} calls have not ended"
        )
        await asyncio.sleep(0)
