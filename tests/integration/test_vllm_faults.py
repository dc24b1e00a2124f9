"""Errors, delays of 5 s and damaged records below a real vLLM: the answers are those of one without connector."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.vllm_driver import Engines, Reference
from tools.torture.outcome import Outcome
from tools.torture.vllm import torture

pytestmark = pytest.mark.vllm


def test_faults_change_no_answer_and_delay_none_beyond_its_deadline(
    engines: Engines, reference: Reference, tmp_path: Path
) -> None:
    outcome = torture(engines, reference, tmp_path / "kv", Outcome("vllm"), questions=24, seconds=0.0, seed=5)

    assert outcome.problems == []
    assert outcome.counts["requests"] == 24
    assert outcome.counts["faults seen"] > 0
    assert outcome.counts["tokens from disk"] > 0  # and it was not by asking nobody
