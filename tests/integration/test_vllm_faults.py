"""Errors, delays of 5 s and damaged records below a real vLLM: the answers equal those without connector."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.vllm_answers import Answer, Question
from tests.integration.vllm_driver import Engines, Reference
from tools.torture.outcome import Outcome
from tools.torture.vllm import USUAL, compare, faulty, torture

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(("layers", "questions"), [((), 16), (USUAL, 8)], ids=["bare", "usual layers"])
def test_faults_change_no_answer_and_delay_none_beyond_its_deadline(
    engines: Engines, reference: Reference, tmp_path: Path, layers: tuple[str, ...], questions: int
) -> None:
    outcome = Outcome("vllm")

    torture(
        engines, reference, faulty(tmp_path, 5, layers), outcome, questions=questions, seconds=0.0, seed=5
    )

    assert outcome.problems == []
    assert outcome.counts["requests"] >= questions
    assert outcome.counts["faults seen"] > 0


def test_a_late_or_different_answer_is_reported() -> None:
    outcome = Outcome("vllm", {"latest, in seconds": 0.0})
    question = Question((3, 4, 5))
    right = Answer(0, "length", [7], [{"7": -0.1, "8": -2.0, "9": -3.0, "10": -4.0, "11": -5.0}], 0.1)

    compare(question, right, right, outcome)
    assert outcome.problems == []

    compare(question, replace(right, seconds=5.2), right, outcome)
    compare(question, replace(right, tokens=[8]), right, outcome)
    compare(question, replace(right, finish_reason="abort"), right, outcome)
    assert ["longer than" in outcome.problems[0], "apart" in outcome.problems[1]] == [True, True]
    assert "ended with 'abort'" in outcome.problems[2]
