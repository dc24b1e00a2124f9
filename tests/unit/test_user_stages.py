"""Stages are plug-ins: one that misbehaves fails its request, and the engine continues."""

import asyncio
import contextlib
from dataclasses import replace

import pytest

from lmcache_async.engine.loop import LoopThread
from lmcache_async.errors import TierUnavailableError
from lmcache_async.pipeline.batch import (
    Batch,
    FetchedBatch,
    HashedBatch,
    LeasedBatch,
    MissingBatch,
    PlannedBatch,
    Scope,
    SealedBatch,
)
from lmcache_async.testing.fakes import DictTier, FakeRegistry
from lmcache_async.testing.rig import Rig
from tests.support.engines import leased

TOKENS = list(range(100, 132))  # 4 chunks of 8
SLOTS = list(range(32))


class Switch:
    """Whether the stages of a test misbehave now."""

    on = False


async def cancelled() -> None:
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


async def raises(error: BaseException) -> None:
    raise error


RAISED = {
    "SystemExit": lambda: raises(SystemExit(1)),
    "KeyboardInterrupt": lambda: raises(KeyboardInterrupt()),
    "GeneratorExit": lambda: raises(GeneratorExit()),
    "CancelledError": cancelled,
    "BaseExceptionGroup": lambda: raises(BaseExceptionGroup("of this test", [SystemExit(1)])),
    "no result": lambda: asyncio.sleep(0),
}
"""Calls of failing stages, by the error that they raise; one returns None."""


def stages_of(switch, misbehave):
    """A stage for each position in both chains; each calls `misbehave` while the switch is on."""

    def stage_of(kind, *, per_request=False):
        async def stage(batch: kind) -> kind:
            return await misbehave(batch) if switch.on else batch

        stage.per_request = per_request
        return stage

    return {
        "whole_request": stage_of(HashedBatch, per_request=True),
        "missing": stage_of(MissingBatch),
        "planned": stage_of(PlannedBatch),
        "sealed": stage_of(SealedBatch),
        "fetched": stage_of(FetchedBatch),
    }


STORE = ["hash", "lookup", "allocate", "device_to_host", "seal", "write"]
RETRIEVE = ["hash", "plan", "fetch", "verify", "host_to_device"]
JOINTS = [
    ("store", "whole_request", "hash"),
    ("store", "missing", "lookup"),
    ("store", "sealed", "seal"),
    ("retrieve", "whole_request", "hash"),
    ("retrieve", "planned", "plan"),
    ("retrieve", "fetched", "fetch"),
]


def opened(rig, chain, stage, behind, stages):
    names = {"store": list(STORE), "retrieve": list(RETRIEVE)}
    names[chain].insert(names[chain].index(behind) + 1, stage)
    return rig.open(
        registry=FakeRegistry(stages=stages),
        tiers=["cpu"],
        **{f"{chain}.stages": names[chain] for chain in names},
    )


@pytest.mark.parametrize("error", RAISED)
@pytest.mark.parametrize(("chain", "stage", "behind"), JOINTS)
def test_a_stage_that_fails_or_returns_nothing_fails_the_request_and_not_the_loop(
    chain, stage, behind, error
):
    rig, switch = Rig(), Switch()
    kind, text = (
        (TypeError, "returned NoneType, not ") if error == "no result" else (RuntimeError, f"raised {error}")
    )

    async def misbehave(batch):
        return await RAISED[error]()

    async def check():
        async with opened(rig, chain, stage, behind, stages_of(switch, misbehave)) as engine:
            rig.write(SLOTS, rig.content(TOKENS))
            await engine.store(TOKENS, SLOTS)
            switch.on = True
            call = (
                engine.store(range(500, 532), SLOTS) if chain == "store" else engine.retrieve(TOKENS, SLOTS)
            )
            with pytest.raises((kind, ExceptionGroup)) as caught:
                await call
            for cause in leaves(caught.value):
                assert isinstance(cause, kind)
                assert f"stage {stage!r} {text}" in str(cause)
            switch.on = False
            assert (await engine.retrieve(TOKENS, SLOTS)).all()
            assert leased(engine) == 0

    with contextlib.closing(LoopThread("stages")) as thread:
        thread.submit(check()).result(60)
    asyncio.run(check())


def leaves(error):
    """An exception, or all exceptions in a group."""
    if isinstance(error, BaseExceptionGroup):
        return [one for inner in error.exceptions for one in leaves(inner)]
    return [error]


@pytest.mark.parametrize(
    ("chain", "stage", "behind"), [joint for joint in JOINTS if joint[1] != "whole_request"]
)
async def test_a_stage_that_forgets_the_scope_of_its_batch_leaks_nothing(chain, stage, behind):
    rig, switch = Rig(), Switch()

    async def forgets(batch: Batch):
        return replace(batch, scope=Scope())

    async with opened(rig, chain, stage, behind, stages_of(switch, forgets)) as engine:
        switch.on = True
        rig.write(SLOTS, rig.content(TOKENS))
        await engine.store(TOKENS, SLOTS)
        for _ in range(3):
            assert (await engine.retrieve(TOKENS, SLOTS)).all()
        assert leased(engine) == 0


async def test_a_stage_that_releases_a_buffer_of_its_batch_strands_no_batch():
    rig, switch = Rig(), Switch()

    async def releases(batch: LeasedBatch):
        batch.buffers[0].release()
        raise LookupError("of this test")

    async with opened(rig, "store", "sealed", "seal", stages_of(switch, releases)) as engine:
        switch.on = True
        for _ in range(3):
            with pytest.raises(ExceptionGroup):
                await engine.store(TOKENS, SLOTS)
        assert leased(engine) == 0


@pytest.mark.parametrize(("stage", "behind"), [("planned", "plan"), ("fetched", "fetch")])
async def test_a_stage_that_drops_chunks_without_a_cause_ends_the_hit_there(stage, behind):
    rig, switch = Rig(), Switch()

    async def shortens(batch: PlannedBatch):
        return batch.first(1)

    class Persistent(DictTier):
        def __init__(self, config):
            super().__init__(config, records=records)

    records = {}
    names = list(RETRIEVE)
    names.insert(names.index(behind) + 1, stage)
    settings = {"retrieve.stages": names, "retrieve.batch_bytes": 2 * rig.slab_bytes}
    registry = FakeRegistry(tiers={"slow": Persistent}, stages=stages_of(switch, shortens))
    async with rig.open(registry=registry, tiers=["cpu", "slow"], **settings) as engine:
        rig.write(SLOTS, rig.content(TOKENS))
        await engine.store(TOKENS, SLOTS)
        for load in (lambda: engine.prefetch(TOKENS), lambda: count_loaded(engine)):
            switch.on = False
            await engine.clear(memory_only=True)
            switch.on = True

            assert await load() == rig.chunk_size


@pytest.mark.parametrize(
    ("chain", "stage", "behind"),
    [
        ("store", "whole_request", "hash"),
        ("store", "sealed", "seal"),
        ("retrieve", "whole_request", "hash"),
        ("retrieve", "fetched", "fetch"),
    ],
)
async def test_the_log_has_the_reason_of_a_stage_that_fails(chain, stage, behind, caplog):
    rig, switch = Rig(), Switch()
    names = list(STORE if chain == "store" else RETRIEVE)
    names.insert(names.index(behind) + 1, stage)
    registry = FakeRegistry(stages=stages_of(switch, lambda _: raises(TierUnavailableError("no licence"))))
    async with rig.open(registry=registry, **{f"{chain}.stages": names}) as engine:
        switch.on = chain == "store"
        await engine.store(TOKENS, SLOTS)
        switch.on = True
        await engine.retrieve(TOKENS, SLOTS)

    text = f"stage '{stage}' raised TierUnavailableError: no licence; its chunks are dropped or missed"
    assert caplog.messages.count(text) == 1


async def count_loaded(engine):
    return (await engine.retrieve(TOKENS, SLOTS)).sum()


async def test_an_error_that_two_stages_raise_does_not_end_a_caller_that_caught_it():
    """The traceback of such an error has the frames of all callers, and that of a caller may be suspended."""
    rig, error = Rig(), LookupError("of this test")
    first, second = Switch(), Switch()
    names = ["hash", "whole_request", "lookup", "missing", *STORE[2:]]

    async def fails(batch):
        raise error

    stages = {
        "whole_request": stages_of(first, fails)["whole_request"],
        "missing": stages_of(second, fails)["missing"],
    }
    async with rig.open(registry=FakeRegistry(stages=stages), **{"store.stages": names}) as engine:
        first.on = True
        with pytest.raises(LookupError):
            await engine.store(TOKENS, SLOTS)
        first.on, second.on = False, True

        with pytest.raises(ExceptionGroup):
            await engine.store(TOKENS, SLOTS)
