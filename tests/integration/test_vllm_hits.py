"""Hits in host memory, compared with vLLM without a connector: greedy tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.model_families import make_eagle_head
from tests.integration.vllm_answers import TOLERANCE, Question, assert_same, difference, tokens
from tests.integration.vllm_driver import (
    BLOCK,
    CHUNK,
    OFFLOADING,
    Engine,
    Engines,
    Reference,
    complaints,
    connector,
    several,
)
from tests.integration.vllm_records import change_first_payload_byte, record_of

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module", params=["auto", "never"], ids=["layerwise", "before"])
def engine(engines: Engines, request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = engines.start(connector(**{"vllm.layerwise_load": request.param}))
    yield engine
    engine.kill()


def test_vllm_alone_meets_the_required_accuracy(reference: Reference) -> None:
    question = Question(tokens("alone", 700))

    hit = reference.own_hit(question)

    assert hit.cached_tokens == 672
    assert difference(hit, reference(question)) <= TOLERANCE


@pytest.mark.parametrize("place", [0, 300, 600])
def test_the_answers_depend_on_every_part_of_the_prompt(reference: Reference, place: int) -> None:
    prompt = list(tokens("alone", 700))
    prompt[place] = 3 + prompt[place] % 500

    assert difference(reference(Question(tuple(prompt))), reference(Question(tokens("alone", 700)))) > 0.1


@pytest.mark.parametrize("length", [64, 640, 700, 1000, 1200], ids=lambda length: f"{length} tokens")
def test_a_hit_has_all_whole_blocks_and_the_same_answer(
    engine: Engine, reference: Reference, length: int
) -> None:
    question = Question(tokens(f"hit {length}", length))

    cold = engine.ask(question)
    engine.settle()
    warm = engine.ask(question)

    assert cold.cached_tokens == 0
    # Also the whole of a prompt of whole blocks; vLLM then recomputes its last token.
    assert warm.cached_tokens == length - length % BLOCK
    assert warm.tiers == {"cpu": length - length % BLOCK}
    assert_same(cold, reference(question))
    assert_same(warm, reference(question))


def test_every_block_is_loaded_to_its_own_place(engine: Engine, reference: Reference) -> None:
    """Attention does not depend on the order of loaded blocks; only prompts that end among them detect a swap."""
    question = Question(tokens("places", 10 * BLOCK + 5))
    engine.ask(question)
    engine.settle()
    loaded = engine.ask(question)
    shorter = [Question(question.prompt[: blocks * BLOCK + 5], max_tokens=2) for blocks in range(1, 10)]

    answers = [engine.ask(one) for one in shorter]  # from vLLM's own cache, which has the loaded blocks now

    assert loaded.tiers == {"cpu": 10 * BLOCK}
    for blocks, (one, answer) in enumerate(zip(shorter, answers, strict=True), 1):
        assert (answer.cached_tokens, answer.tiers) == (blocks * BLOCK, {})
        assert_same(answer, reference(one))


def test_requests_of_one_moment_share_a_prefix(engine: Engine, reference: Reference) -> None:
    prefix = tokens("shared", 400)
    questions = [Question(prefix + tokens(f"shared {i}", 60 + 90 * i)) for i in range(6)]

    cold = engine.ask_all(questions)
    settled = engine.settle()
    warm = engine.ask_all(questions)

    for question, one, other in zip(questions, cold, warm, strict=True):
        whole = len(question.prompt) - len(question.prompt) % BLOCK
        assert other.cached_tokens == whole
        assert_same(one, reference(question))
        assert_same(other, reference(question))
    assert engine.settle()["chunks"] == settled["chunks"]  # nothing was stored again


def test_a_prompt_larger_than_the_arena_is_stored_completely_on_disk(
    engines: Engines, reference: Reference, tmp_path: Path
) -> None:
    question = Question(tokens("larger", 1200))

    with engines.started(connector(disk=tmp_path, arena_chunks=6)) as engine:
        for _ in range(3):
            answer = engine.ask(question)
            engine.settle()
            assert_same(answer, reference(question))

    assert answer.cached_tokens == 1184
    assert answer.tiers["disk"] >= 1184 - 6 * CHUNK


def test_a_hit_of_a_model_with_an_eagle_head_is_loaded_once_and_not_computed(
    engines: Engines, reference: Reference, tmp_path: Path
) -> None:
    draft = {
        "method": "eagle",
        "num_speculative_tokens": 3,
        "model": str(make_eagle_head(tmp_path / "draft")),
    }
    question = Question(tokens("eagle", 450))
    with engines.started(connector(), speculative_config=draft) as engine:
        engine.ask(question)
        engine.settle()
        warm = engine.ask(question)

    assert warm.cached_tokens == 448
    assert "retrieved 448/448" in warm.log
    assert not complaints(warm.log)
    assert_same(warm, reference(question))


@pytest.mark.parametrize("behind", [False, True], ids=["before it", "behind it"])
def test_two_ranks_beside_another_connector(
    engines: Engines, reference: Reference, tmp_path: Path, behind: bool
) -> None:
    """VLLM loads from the first connector that has a hit. After a reset only our disk has one."""
    question = Question(tokens(f"beside another {behind}", 450))
    own = connector(disk=tmp_path, **{"vllm.reset_cache": "memory"})
    both = several(OFFLOADING, own) if behind else several(own, OFFLOADING)
    with engines.started(both, tensor_parallel_size=2) as engine:
        answers = [engine.ask(question)]
        engine.settle()
        answers.append(engine.ask(question))
        engine.forget()
        change_first_payload_byte(record_of(tmp_path / "rank-1", question.prompt, 2 * CHUNK))
        answers.append(engine.ask(question))
        engine.forget()
        answers.append(engine.ask(question))

    assert [answer.cached_tokens for answer in answers] == [0, 448, 448, 448]
    of_both_ranks = [{}, {} if behind else {"cpu": 2 * 448}, {"disk": 448 + 2 * CHUNK}, {"disk": 2 * 448}]
    assert [answer.tiers for answer in answers] == of_both_ranks
    for answer in answers:
        assert_same(answer, reference(question))
