"""Prefill in one vLLM and decode in another, with a valkey tier between them, compared with one vLLM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from examples.demo.connectors import tokens_by_tier
from tests.integration.vllm_answers import Answer, Question, assert_same, tokens
from tests.integration.vllm_driver import BLOCK, CHUNK, Engine, Engines, Reference, connector
from tests.support.valkey_servers import Server, running

pytestmark = pytest.mark.vllm

WAIT_S, LOOKUP_S = 6.0, 10.0
# Of the producer's 256 blocks. Ten prompts have at most 130: none is dropped, however slow the copies are.
HELD_FRACTION = 0.75


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running() as server:
        yield server


def start(engines: Engines, server: Server, role: str, **more: Any) -> Engine:
    options = {"vllm.wait_for_producer_s": WAIT_S, "vllm.lookup_timeout_s": LOOKUP_S} | more
    return engines.start(connector(valkey=server.url, role=role, **options))


@pytest.fixture(scope="module")
def consumer(engines: Engines, server: Server) -> Iterator[Engine]:
    engine = start(engines, server, "kv_consumer")
    yield engine
    engine.kill()


@pytest.fixture
def producer(engines: Engines, server: Server) -> Iterator[Engine]:
    engine = start(engines, server, "kv_producer", **{"vllm.max_pinned_fraction": HELD_FRACTION})
    yield engine
    engine.kill()


def whole(question: Question) -> int:
    """Number of tokens expected from the cache: all whole blocks, or none if there is only one."""
    blocks = len(question.prompt) // BLOCK
    return blocks * BLOCK if len(question.prompt) > BLOCK else 0


def promised(answer: Answer) -> int:
    """Number of leading tokens that the producer promises as stored or in progress."""
    params = answer.kv_transfer_params
    return params["lmcache_async"]["tokens"] if params else 0


def mixed() -> list[Question]:
    """A hundred prompts: shorter than a block or a chunk, of whole chunks, with shared prefixes, and others."""
    lengths = [5, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 4 * CHUNK, 300]
    alone = [tokens(f"apart {index}", lengths[index % 10] + index // 10 % 2 * CHUNK) for index in range(60)]
    roots = [tokens(f"root {index}", 150 + 70 * index) for index in range(4)]
    shared = [roots[index % 4] + tokens(f"shared {index}", 7 * index) for index in range(40)]
    prompts = [prompt for pair in zip(alone, [*shared, *alone[40:]], strict=False) for prompt in pair]
    return [Question(prompt) for prompt in dict.fromkeys([*prompts, *alone, *shared])]


def hand_over(producer: Engine, consumer: Engine, questions: Sequence[Question]) -> list[Answer]:
    """Like a proxy: request the first token from the producer, and all tokens from the consumer with its parameters."""
    first = producer.ask_all([replace(question, max_tokens=1) for question in questions])
    producer.call("step")  # as vLLM's engine does
    for question, answer in zip(questions, first, strict=True):
        assert promised(answer) == len(question.prompt) // BLOCK * BLOCK  # nothing was dropped
    told = [replace(q, params=answer.kv_transfer_params) for q, answer in zip(questions, first, strict=True)]
    answers = consumer.ask_all(told)
    assert [answer.tokens[:1] for answer in answers] == [answer.tokens for answer in first]
    return answers


def test_a_hundred_requests_have_the_answers_of_one_vllm(
    producer: Engine, consumer: Engine, reference: Reference
) -> None:
    questions, begin = mixed(), consumer.log_size
    loaded: Counter[str] = Counter()
    cached = 0
    for at in range(0, len(questions), 10):
        batch = questions[at : at + 10]
        position = consumer.log_size
        for question, answer in zip(batch, hand_over(producer, consumer, batch), strict=True):
            assert_same(answer, reference(question))
            assert answer.cached_tokens == whole(question)  # the rest is in the last block
            cached += answer.cached_tokens
        loaded += tokens_by_tier(consumer.log(position))

    assert len(questions) == 100
    assert "promised" not in consumer.log(begin)  # no wait timed out
    assert set(loaded) <= {"valkey", "cpu"}
    assert loaded["valkey"] > cached / 2  # the others share a prefix that vLLM's own cache has


def test_a_producer_killed_before_its_writes_causes_no_wrong_or_late_answer(
    producer: Engine, consumer: Engine, reference: Reference
) -> None:
    written = [Question(tokens(f"written {index}", 150 + 90 * index)) for index in range(4)]
    lost = [Question(tokens(f"lost {index}", 150 + 90 * index)) for index in range(4)]
    first = producer.ask_all([replace(question, max_tokens=1) for question in written])
    producer.settle()
    producer.call("call", name="hold_copies")
    first += producer.ask_all([replace(question, max_tokens=1) for question in lost])
    producer.kill()
    questions = [*written, *lost]
    told = [replace(q, params=answer.kv_transfer_params) for q, answer in zip(questions, first, strict=True)]
    answers = consumer.ask_all(told)

    assert all(answer.kv_transfer_params for answer in first)
    for question, answer in zip(questions, answers, strict=True):
        assert_same(answer, reference(question))
        assert answer.cached_tokens == (whole(question) if question in written else 0)
        assert answer.seconds < WAIT_S + LOOKUP_S
    assert "promised" in consumer.log()
    consumer.settle()
