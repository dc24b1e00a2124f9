"""Effects of request parameters on the cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.integration.vllm_answers import Answer, Question, assert_same, tokens
from tests.integration.vllm_driver import Engine, EngineError, Engines, Reference, connector

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def engine(engines: Engines) -> Iterator[Engine]:
    with engines.started(connector()) as engine:
        yield engine


def ask(engine: Engine, question: Question) -> Answer:
    """Ask with an empty vLLM prefix cache, and wait for all stores."""
    answer = engine.ask(question)
    engine.settle()
    return answer


def test_a_request_that_is_not_to_be_saved_still_loads(engine: Engine, reference: Reference) -> None:
    question = Question(tokens("saved", 300))
    unsaved = replace(question, params={"skip_save": True})

    answers = [ask(engine, each) for each in (unsaved, unsaved, question, unsaved)]

    assert [answer.cached_tokens for answer in answers] == [0, 0, 0, 288]
    for answer in answers:
        assert_same(answer, reference(question))


def test_tags_and_salts_keep_requests_apart(engine: Engine, reference: Reference) -> None:
    question = Question(tokens("apart", 300))
    kinds = [
        question,
        *(replace(question, params={"tags": {"team": team}}) for team in "ab"),
        replace(question, params={"lmcache.tag.team": "c"}),
        *(replace(question, cache_salt=salt) for salt in "ab"),
    ]

    answers = [ask(engine, each) for each in kinds * 2]

    assert [answer.cached_tokens for answer in answers] == [0] * len(kinds) + [288] * len(kinds)
    for answer in answers:
        assert_same(answer, reference(question))


def test_a_wrong_key_stops_vllm_with_the_key_and_the_right_one(engines: Engines) -> None:
    with pytest.raises(EngineError) as raised:
        engines.start(connector(**{"arena.max_byte": "1GiB"}))

    message = str(raised.value)
    assert "ConfigError" in message
    assert "arena.max_byte" in message
    assert "arena.max_bytes" in message
