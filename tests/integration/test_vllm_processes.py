"""As users have it: scheduler and worker in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.vllm_answers import Question, assert_same, tokens
from tests.integration.vllm_driver import Engines, Reference, complaints, connector

pytestmark = pytest.mark.vllm


def test_hits_across_processes_and_a_kill(engines: Engines, reference: Reference, tmp_path: Path) -> None:
    prefix = tokens("processes", 500)
    questions = [Question(prefix + tokens(f"processes {i}", 60 * i)) for i in range(8)]

    with engines.started(connector(disk=tmp_path), processes=True) as engine:
        cold = engine.ask_all(questions)
        engine.settle()
        warm = engine.ask_all(questions)
        engine.settle()
        engine.kill()
    with engines.started(connector(disk=tmp_path), processes=True) as engine:
        restarted = engine.ask_all(questions)
        engine.settle()
        log = engine.close()

    for question, *answers in zip(questions, cold, warm, restarted, strict=True):
        whole = len(question.prompt) // 32 * 32
        assert [answer.cached_tokens for answer in answers][1:] == [whole, whole]
        for answer in answers:
            assert_same(answer, reference(question))
    assert "disk=" in restarted[0].log
    assert complaints(log) == []
