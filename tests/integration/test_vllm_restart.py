"""Hits on disk after the process has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.vllm_answers import Question, assert_same, tokens
from tests.integration.vllm_driver import CHUNK, Engines, Reference, complaints, connector

pytestmark = pytest.mark.vllm


def stored_and_ended(engines: Engines, disk: Path, *questions: Question) -> None:
    """Run one engine: ask, then end it. A normal end is silent."""
    engine = engines.start(connector(disk=disk))
    engine.ask_all(questions)
    engine.settle()
    assert complaints(engine.close()) == []


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def test_one_prompt_comes_from_memory_and_disk(engines: Engines, reference: Reference, disk: Path) -> None:
    question = Question(tokens("mixed", 900))
    start = Question(question.prompt[: 5 * CHUNK + 1])
    stored_and_ended(engines, disk, question)

    with engines.started(connector(disk=disk)) as engine:
        promoted = engine.ask(start)
        engine.settle()
        answer = engine.ask(question)

    assert promoted.tiers == {"disk": 5 * CHUNK}
    assert answer.tiers == {"cpu": 5 * CHUNK, "disk": 896 - 5 * CHUNK}
    assert answer.cached_tokens == 896
    assert_same(promoted, reference(start))
    assert_same(answer, reference(question))


def test_a_process_killed_while_it_stores_leaves_nothing_wrong(
    engines: Engines, reference: Reference, disk: Path
) -> None:
    question = Question(tokens("killed", 1100))
    with engines.started(connector(disk=disk)) as engine:
        [name] = engine.add(question)
        engine.step_until("RUNNING", name)
        for _ in range(3):
            engine.call("step")
        engine.kill()

    with engines.started(connector(disk=disk)) as engine:
        answers = []
        for _ in range(2):
            answers.append(engine.ask(question))
            engine.settle()

    assert [answer.cached_tokens for answer in answers][1:] == [1088]
    for answer in answers:
        assert_same(answer, reference(question))
