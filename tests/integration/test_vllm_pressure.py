"""Preemption and aborts: a small block pool, and requests that end at any time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.vllm_answers import Question, assert_same, tokens
from tests.integration.vllm_driver import Engine, Engines, Reference, connector

pytestmark = pytest.mark.vllm

BLOCKS = 40


@pytest.fixture(scope="module")
def engine(engines: Engines) -> Iterator[Engine]:
    options = {"num_gpu_blocks_override": BLOCKS, "max_model_len": 1024}
    # Loads run concurrently with the batch; a layer-wise load blocks it.
    with engines.started(connector(**{"vllm.layerwise_load": "never"}), **options) as engine:
        yield engine


def assert_nothing_is_held(engine: Engine) -> None:
    engine.settle()
    assert engine.call("free_blocks") == [BLOCKS - 1, BLOCKS - 1]


def test_preempted_requests_have_the_same_answers(engine: Engine, reference: Reference) -> None:
    questions = [Question(tokens(f"preempted {i}", 260 + 40 * i), max_tokens=160) for i in range(4)]
    before = engine.call("counters")["vllm:num_preemptions"]

    answers = engine.ask_all(questions)

    assert engine.call("counters")["vllm:num_preemptions"] > before
    for question, answer in zip(questions, answers, strict=True):
        assert_same(answer, reference(question))
    assert "retrieved" in answers[0].log  # preempted requests loaded their own KV from the connector
    assert_nothing_is_held(engine)


def test_a_request_aborted_while_it_is_loaded(engine: Engine, reference: Reference) -> None:
    question, other = Question(tokens("aborted load", 400)), Question(tokens("beside the load", 200))
    engine.ask(question)
    engine.settle()
    engine.call("call", name="hold_copies")

    [name] = engine.add(question)
    engine.step_until("WAITING_FOR_REMOTE_KVS", name)
    engine.call("abort", names=[name])
    held = engine.call("free_blocks")[0]
    engine.call("step")  # notifies the worker of the abort
    has_work = engine.call("has_work")
    beside = engine.ask(other)
    was_reset = engine.call("reset", connector=False)
    engine.call("call", name="let_copies_go")

    assert held == BLOCKS - 1 - 12  # vLLM keeps its blocks until the load has ended
    assert has_work  # vLLM steps until then, also without other requests
    assert not was_reset
    assert_same(beside, reference(other))
    assert_nothing_is_held(engine)
    again = engine.ask(question)
    assert again.tiers == {"cpu": 384}
    assert_same(again, reference(question))


def test_a_request_aborted_while_it_is_stored(engine: Engine, reference: Reference) -> None:
    question, other = Question(tokens("aborted store", 400)), Question(tokens("beside the store", 200))
    engine.call("call", name="hold_copies")

    [name] = engine.add(question)
    engine.step_until("RUNNING", name)
    engine.call("step")
    engine.call("abort", names=[name])
    engine.call("step")
    held = engine.call("free_blocks")[0]
    beside = engine.ask(other)
    was_reset = engine.call("reset", connector=False)
    engine.call("call", name="let_copies_go")

    assert 0 < held < BLOCKS - 1  # blocks of a finished request, while they are read
    assert not was_reset
    assert_same(beside, reference(other))
    assert_nothing_is_held(engine)
    assert_same(engine.ask(question), reference(question))
