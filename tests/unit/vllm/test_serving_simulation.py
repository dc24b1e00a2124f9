"""The connectors in the simulation: every request gets its own answer, and a seed replays exactly."""

from __future__ import annotations

import pytest

from lmcache_async.integration.vllm.lookup import LookupClient
from lmcache_async.integration.vllm.scheduler import BlockPins, SchedulerConnector
from lmcache_async.integration.vllm.worker import Transfers
from tests.simulation.faults import Faults
from tests.simulation.serving import simulate_serving


@pytest.mark.parametrize("faults", list(Faults))
@pytest.mark.parametrize("seed", [0, 2])
def test_every_request_gets_its_own_answer_despite_faults(seed: int, faults: Faults):
    report = simulate_serving(seed, steps=300, faults=faults)

    assert report.violation == ""
    assert report.made >= 300
    assert faults is not Faults.NONE or report.counts["hit tokens"] > 0


def test_a_seed_repeats_a_run_exactly():
    first, again = (simulate_serving(7, steps=200, faults=Faults.MANY) for _ in range(2))

    assert (first.digest, first.decisions, first.counts) == (again.digest, again.decisions, again.counts)
    assert first.command == "python -m tools.simulate --serving --seed 7 --steps 200 --faults many"


def a_load_that_fails_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transfers, "take_failed_blocks", lambda self: set())


def what_lookups_pinned_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LookupClient, "release", lambda self, lookup, answer: None)


def a_load_has_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transfers, "take_finished", lambda self: set())


def loads_never_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SchedulerConnector, "_load_ended", lambda self, request_id: None)


def resets_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SchedulerConnector, "reset", lambda self: None)


def blocks_are_not_held_for_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    pin = BlockPins.pin
    monkeypatch.setattr(BlockPins, "pin", lambda self, job_id, blocks, held=None: pin(self, job_id, []))


@pytest.mark.parametrize(
    ("plant", "first"),  # a seed that finds it within seconds, unless a draw changes before it
    [
        (a_load_that_fails_is_believed, (2, Faults.MANY)),
        (what_lookups_pinned_is_kept, (4, Faults.NONE)),
        (a_load_has_no_end, (0, Faults.NONE)),
        (loads_never_end, (0, Faults.NONE)),
        (resets_are_ignored, (0, Faults.NONE)),
        (blocks_are_not_held_for_stores, (0, Faults.NONE)),
    ],
)
def test_a_planted_bug_is_found(plant, first, monkeypatch: pytest.MonkeyPatch):
    plant(monkeypatch)
    others = [(seed, faults) for seed in range(6) for faults in (Faults.NONE, Faults.MANY)]

    assert any(
        simulate_serving(seed, steps=300, faults=faults).violation for seed, faults in (first, *others)
    )
