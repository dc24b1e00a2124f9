"""A tier slower than computing: the hit is computed, and loaded again once the tier is fast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.vllm_answers import Question, assert_same, tokens
from tests.integration.vllm_driver import Engines, Reference, connector

pytestmark = pytest.mark.vllm


def slow(disk: Path, **extra: Any) -> dict[str, Any]:
    """Settings of a disk tier whose reads take a second and are never kept in memory."""
    transfer = connector(disk=disk, **{"retrieve.promote": False, "vllm.load_policy": "auto", **extra})
    faults = {"name": "faults", "delay_s": 1.0, "get": {"delay": 1.0}}
    transfer["kv_connector_extra_config"]["tiers"][1]["layers"] = [faults]
    return transfer


@pytest.mark.parametrize("overlapped", [False, True], ids=["sync", "async"])
def test_hits_in_a_tier_known_as_slow_are_computed(
    engines: Engines, reference: Reference, tmp_path: Path, overlapped: bool
) -> None:
    """The first hit is loaded and shows the speed of the tier; the next one is not."""
    options = {"async_scheduling": True} if overlapped else {}
    questions = [Question(tokens(f"slow {number}", 730)) for number in range(3)]
    with engines.started(connector(disk=tmp_path / "kv")) as engine:
        engine.ask_all(questions)
        engine.settle()

    with engines.started(slow(tmp_path / "kv"), **options) as engine:
        assert engine.call("overlaps") == overlapped
        warm = [engine.ask(Question(tokens(f"something else {number}", 730))) for number in range(3)]
        rate = engine.call("prefill_rate")
        first, second, third = (engine.ask(question) for question in questions)
        log = engine.log()

    assert all(answer.cached_tokens == 0 for answer in warm)
    # At least half of the tokens took as long as the rate implies, and all of them fit into the times of the answers.
    assert rate >= 730 / 2 / max(answer.seconds for answer in warm)
    assert (first.tiers, first.cached_tokens) == ({"disk": 704}, 704)
    assert first.seconds > 1.0
    for answer in (second, third):
        assert answer.cached_tokens == 0
    assert "decided=recompute" in log
    for question, answer in zip(questions, (first, second, third), strict=True):
        assert_same(answer, reference(question))
