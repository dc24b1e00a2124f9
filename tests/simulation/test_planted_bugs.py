"""The simulation finds each of these planted bugs within its budget."""

import asyncio
import sys
from dataclasses import replace

import pytest

from lmcache_async.engine.engine import CacheEngine
from lmcache_async.engine.lookup import Pins
from lmcache_async.hashing import RequestNamespace
from lmcache_async.memory.budget import ByteBudget
from lmcache_async.metrics.metrics import CallMetrics
from lmcache_async.pipeline.batch import Scope
from lmcache_async.pipeline.runner import Runner
from lmcache_async.registry import STAGES, Registry
from lmcache_async.tiers.handle import CallLeases
from lmcache_async.tiers.middleware.deadline import DeadlineLayer
from lmcache_async.tiers.stack import Fetched, TierStack
from lmcache_async.tiers.writer import TierWriter
from tests.simulation.faults import Faults
from tests.simulation.world import simulate

SEEDS = 30
STEPS = 400


def stage(name):
    """Load the class of a stage as the engine does."""
    return Registry().load(STAGES, name)


def no_verify(patch):
    """Records are not verified, while backends damage them."""
    patch(stage("verify"), "_check", lambda self, batch, checksums: (len(batch.chunks), None))


def no_checksum(patch):
    """Only headers are verified."""
    patch(stage("verify"), "_needs_checksum", lambda self, tier: False)


def lease_kept_on_cancel(patch):
    """The leases of a batch are not released when its task is cancelled."""
    finish = Runner._finish

    def leaky(self, run, index, nbytes, gate):
        if run.tasks[index].cancelled():
            run.batches[index].scope._leases.clear()
        finish(self, run, index, nbytes, gate)

    patch(Runner, "_finish", leaky)


def namespace_dropped(patch):
    """The keys of two tenants have the same root."""
    patch(RequestNamespace, "root", lambda self, engine_root, *_: engine_root)


def hole_ignored_by_the_plan(patch):
    """The plan continues after the first missing chunk."""

    async def plan(self, keys, **options):
        tiers, cause = await plan_of(self, keys, **options)
        return tiers + (0,) * (len(keys) - len(tiers)), cause

    plan_of = TierStack.plan
    patch(TierStack, "plan", plan)


def hole_ignored_by_the_fetch(patch):
    """Chunks after one that vanished take its position."""

    async def fetch(self, keys, tiers, allocate, **options):
        got, sources = [], []
        for index, key in enumerate(keys):
            fetched = await fetch_of(self, [key], [tiers[index]], allocate, **options)
            got += fetched.buffers
            sources += fetched.tiers
        return Fetched(tuple(got), tuple(sources), "")

    fetch_of = TierStack.fetch
    patch(TierStack, "fetch", fetch)


def no_deadlines(patch):
    """Calls of a tier that hangs have no timeout."""
    run = Runner.run
    patch(DeadlineLayer, "around", lambda self, call, next: next(call))
    patch(Runner, "run", lambda self, request, **options: run(self, request, **options | {"timeout_s": 1e6}))


def no_deadline_of_requests(patch):
    run = Runner.run
    patch(
        Runner,
        "run",
        lambda self, request, *, timeout_s, **options: run(self, request, timeout_s=1e6, **options),
    )


def flush_forgets(patch):
    """A flush does not wait for queued writes."""

    async def flush(self, *, timeout_s):
        return True

    patch(TierWriter, "flush", flush)


def clear_does_not_wait(patch):
    """Running stores and writes end after a clear."""

    async def clear(self, *, memory_only=False):
        tiers = [stacked.tier for stacked in self._parts.stack.tiers]
        return sum(
            [await tier.clear() for tier in tiers if not (memory_only and tier.capabilities.persistent)]
        )

    patch(CacheEngine, "clear", clear)


def bytes_kept_on_cancel(patch):
    """A reservation that is granted and cancelled in the same loop iteration is not released."""
    patch(ByteBudget, "release", release_once_in(ByteBudget.release, 20))


def release_once_in(release, often):
    calls = 0

    def forgetful(self, nbytes):
        nonlocal calls
        calls += 1
        if calls % often:
            release(self, nbytes)

    return forgetful


def pins_forgotten(patch):
    """`unpin` drops the leases without releasing them."""

    def release(self, lookup_id):
        if held := self._held.pop(lookup_id, None):
            held[1].cancel()
            self.count -= len(held[0])

    patch(Pins, "release", release)


def device_read_too_late(patch):
    """The caller is notified that its memory may be reused before the copy."""
    store = CacheEngine.store_chunks

    def early(self, request):
        if request.on_copied is not None:
            request.on_copied()
        return store(self, replace(request, on_copied=None))

    patch(CacheEngine, "store_chunks", early)


def late_call_loses_its_lease(patch):
    """A tier that still writes after its caller was cancelled uses a slab with another lease."""
    patch(CallLeases, "lend", lambda self, buffer: buffer)


def queue_without_bound(patch):
    """The queue of a tier exceeds its limit."""
    patch(ByteBudget, "_fits", lambda self, nbytes: True)


def encryption_left_out(patch):
    """Slow tiers get the plain record."""
    patch(
        stage("encrypt"),
        "_encrypt",
        lambda self, batch, copies: [
            copy.view.__setitem__(slice(None), buffer.view)
            for buffer, copy in zip(batch.buffers, copies, strict=False)
        ],
    )


def cancelled_calls_stay_in_flight(patch):
    """The metrics do not count the end of a cancelled call."""
    ended = CallMetrics.ended

    def forgets(self, chunks, seconds):
        ended(self, chunks, seconds)
        self.in_flight += isinstance(sys.exception(), asyncio.CancelledError)

    patch(CallMetrics, "ended", forgets)


def leases_never_given_back(patch):
    """The leases of every batch are kept."""
    patch(Scope, "close", lambda self: None)


BUGS = {
    Faults.NONE: {
        namespace_dropped: 14,
        lease_kept_on_cancel: 9,
        bytes_kept_on_cancel: 20,
        pins_forgotten: 35,
        device_read_too_late: 27,
        leases_never_given_back: 4,
        cancelled_calls_stay_in_flight: 9,
        hole_ignored_by_the_plan: 1,
        encryption_left_out: 11,
    },
    Faults.MANY: {
        no_verify: 27,
        no_checksum: 9,
        flush_forgets: 5,
        clear_does_not_wait: 9,
        hole_ignored_by_the_fetch: 56,
        late_call_loses_its_lease: 39,
        queue_without_bound: 3,
        no_deadlines: 12,
        no_deadline_of_requests: 5,
    },
}
"""Bugs by level of faults, each with a seed that finds it in about a second unless draws change."""
PLANTED = [(faults, bug, seed) for faults, bugs in BUGS.items() for bug, seed in bugs.items()]


@pytest.mark.parametrize(("faults", "bug", "first"), PLANTED, ids=[bug.__name__ for _, bug, _ in PLANTED])
def test_a_planted_bug_is_found(faults, bug, first, monkeypatch):
    bug(monkeypatch.setattr)

    for seed in (first, *range(SEEDS)):
        report = simulate(seed, steps=STEPS, faults=faults)
        if report.violation:
            break

    assert report.violation, f"{SEEDS} simulations of {STEPS} operations did not notice"
