"""The state machine finds what is wrong with a tier by itself, without a case written for it."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from lmcache_async.testing import DictConfig, DictTier, TierMachine
from lmcache_async.testing.conformance import base
from tests.testing import broken_tiers
from tests.testing.broken_tiers import BROKEN

# Generated, not shrunk: that it fails is what we want to know.
SETTINGS = settings(
    max_examples=150,  # it ends with the first that fails
    stateful_step_count=20,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    report_multiple_bugs=False,
)

# What a machine has no call for: memory refused, memory of somebody else, calls beyond the closing.
BEYOND_IT = {broken_tiers.NoMemoryBreaksBatch, broken_tiers.OtherMemory, broken_tiers.OddErrorWhenClosed}
FINDABLE = [kind for kind in BROKEN if kind not in BEYOND_IT]


def machine_of(kind: type[DictTier]) -> type[TierMachine]:
    class Machine(TierMachine):
        def make_tier(self, directory, max_bytes):
            if not hasattr(self, "records"):
                self.records = {}
            return kind(DictConfig(max_bytes=max_bytes), records=self.records)

        async def damage_content(self, key, edit):
            self.records[key] = edit(self.records[key])
            return True

    return Machine


@pytest.mark.parametrize("kind", FINDABLE, ids=lambda kind: kind.__name__)
def test_the_machine_fails_a_tier_that(kind: type[DictTier], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "DEADLINE_S", 0.05)

    with pytest.raises(BaseException):  # noqa: B017, PT011 - whatever shows it
        run_state_machine_as_test(machine_of(kind), settings=SETTINGS)


def test_the_machine_passes_an_honest_tier() -> None:
    run_state_machine_as_test(machine_of(DictTier), settings=settings(SETTINGS, max_examples=20))
