"""The state machine of the engine finds planted bugs; each breaks one guarantee."""

import asyncio

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from lmcache_async.device.cpu import CpuCopier
from lmcache_async.hashing import RequestNamespace
from lmcache_async.memory import record
from lmcache_async.stages import verify as verify_stage
from lmcache_async.testing import CacheMachine
from lmcache_async.tiers.writer import TierWriter

SETTINGS = settings(
    max_examples=300,  # it ends at the first failure
    stateful_step_count=15,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    report_multiple_bugs=False,
)


class Machine(CacheMachine):
    # A retrieve waits this long if slabs are leaked.
    settings = CacheMachine.settings | {"retrieve.timeout_s": 3.0}


def header_sealed(header, payload, **wanted):
    return record.is_sealed(header, None, **wanted)


def header_verified(view, *, payload, **wanted):
    return record.verify(view, payload=False, **wanted)


def no_checksum(monkeypatch):
    """A record with a flipped byte is returned."""
    monkeypatch.setattr(verify_stage, "is_sealed", header_sealed)
    monkeypatch.setattr(verify_stage, "verify", header_verified)


def one_namespace(monkeypatch):
    """Tenants share keys."""
    plain = RequestNamespace()
    real = RequestNamespace.root
    monkeypatch.setattr(RequestNamespace, "root", lambda self, *given: real(plain, *given))


def leaking_writer(monkeypatch):
    """The lease of a written chunk is not released."""
    real = TierWriter._end

    def end(self, item, error):
        item.buffer.retain()
        real(self, item, error)

    monkeypatch.setattr(TierWriter, "_end", end)


def scatter_is_lost(monkeypatch):
    """Loaded chunks are not copied to device memory."""

    async def scatter(self, *arguments, **options):
        await asyncio.sleep(0)

    monkeypatch.setattr(CpuCopier, "scatter", scatter)


@pytest.mark.parametrize("plant", [no_checksum, one_namespace, leaking_writer, scatter_is_lost])
def test_the_machine_detects_a_planted_bug(plant, monkeypatch):
    plant(monkeypatch)

    with pytest.raises(BaseException):  # noqa: B017, PT011 - whatever shows it
        run_state_machine_as_test(Machine, settings=SETTINGS)
