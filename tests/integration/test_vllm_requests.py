"""Effects of request parameters, roles and resets on the cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("key", ["skip_save", "force_skip_save", "lmcache.skip_save"])
def test_a_request_that_is_not_to_be_saved_is_not(engine: Engine, reference: Reference, key: str) -> None:
    question = Question(tokens(key, 300), params={key: True})

    answers = [ask(engine, question) for _ in range(2)]

    assert [answer.cached_tokens for answer in answers] == [0, 0]
    for answer in answers:
        assert_same(answer, reference(question))


def test_a_request_that_is_not_to_be_saved_still_loads(engine: Engine, reference: Reference) -> None:
    prompt = tokens("loads", 300)
    ask(engine, Question(prompt))

    answer = ask(engine, Question(prompt, params={"skip_save": True}))

    assert answer.tiers == {"cpu": 288}
    assert_same(answer, reference(Question(prompt)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"params": {"tags": {"team": "a"}}}, {"params": {"tags": {"team": "b"}}}),
        ({"params": {"lmcache.tag.team": "a"}}, {}),
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({"cache_salt": "a"}, {}),
    ],
    ids=["tags", "a tag and none", "salts", "a salt and none"],
)
def test_tags_and_salts_keep_requests_apart(
    engine: Engine, reference: Reference, one: dict[str, Any], other: dict[str, Any]
) -> None:
    prompt = tokens(f"apart {one} {other}", 300)

    answers = [ask(engine, Question(prompt, **how)) for how in (one, other, one, other)]

    assert [answer.cached_tokens for answer in answers] == [0, 0, 288, 288]
    for answer in answers:
        assert_same(answer, reference(Question(prompt)))


def test_a_reset_of_the_connector_leaves_no_hit(engine: Engine, reference: Reference) -> None:
    question = Question(tokens("reset", 500))
    ask(engine, question)
    engine.forget()

    answer = ask(engine, question)
    again = ask(engine, question)

    assert (answer.cached_tokens, again.cached_tokens) == (0, 480)
    assert_same(answer, reference(question))
    assert_same(again, reference(question))


def test_a_producer_stores_and_loads_and_a_consumer_only_loads(
    engines: Engines, reference: Reference, tmp_path: Path
) -> None:
    stored, new = Question(tokens("role", 600)), Question(tokens("new", 400))

    with engines.started(connector(disk=tmp_path, role="kv_producer")) as producer:
        produced = [ask(producer, stored) for _ in range(2)]
        producer.close()
    with engines.started(connector(disk=tmp_path, role="kv_consumer")) as consumer:
        loaded = ask(consumer, stored)
        computed = [ask(consumer, new) for _ in range(2)]

    assert [answer.cached_tokens for answer in produced] == [0, 576]
    assert loaded.tiers == {"disk": 576}
    assert [answer.cached_tokens for answer in computed] == [0, 0]
    for answer in (*produced, loaded):
        assert_same(answer, reference(stored))
    for answer in computed:
        assert_same(answer, reference(new))


def test_a_wrong_key_stops_vllm_with_the_key_and_the_right_one(engines: Engines) -> None:
    with pytest.raises(EngineError) as raised:
        engines.start(connector(**{"arena.max_byte": "1GiB"}))

    message = str(raised.value)
    assert "ConfigError" in message
    assert "arena.max_byte" in message
    assert "arena.max_bytes" in message
