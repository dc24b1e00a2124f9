"""Recurrent states in a real vLLM: equal answers, and hits as long as vLLM's own prefix cache gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from lmcache_async.memory.header import read_header
from tests.integration.model_families import make_recurrent_model
from tests.integration.vllm_answers import Question, assert_same, tokens
from tests.integration.vllm_driver import Engine, Engines, Reference, connector
from tests.integration.vllm_records import change_first_payload_byte, namespace_of

pytestmark = pytest.mark.vllm

BLOCK = 64  # vLLM makes blocks of attention as large as a state
BFLOAT16: dict[str, Any] = {"dtype": "bfloat16"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_recurrent_model(tmp_path_factory.mktemp("qwen3-next") / "model"))


@pytest.fixture(scope="module")
def plain(engines: Engines, model: str) -> Reference:
    return Reference(engines.start(model=model, **BFLOAT16))


@pytest.fixture(scope="module")
def engine(engines: Engines, model: str, directory: Path) -> Engine:
    return engines.start(connector(disk=directory), model=model, **BFLOAT16)


@pytest.mark.parametrize("length", [BLOCK, BLOCK + 1, 5 * BLOCK - 1, 5 * BLOCK, 5 * BLOCK + 1, 500])
def test_a_prompt_is_loaded_as_far_as_vllm_would_use_it(
    engine: Engine, plain: Reference, length: int
) -> None:
    question = Question(tokens(f"states {length}", length))
    own = plain.own_hit(question)

    cold = engine.ask(question)
    engine.settle()
    warm = engine.ask(question)

    assert cold.cached_tokens == 0
    assert warm.cached_tokens == own.cached_tokens == (length - 1) // BLOCK * BLOCK
    assert_same(cold, plain(question))
    assert_same(warm, plain(question))


def test_a_longer_prompt_continues_where_the_shorter_one_ended(engine: Engine, plain: Reference) -> None:
    prompt = tokens("longer", 700)
    engine.ask(Question(prompt[:420]))
    engine.settle()

    answer = engine.ask(Question(prompt))

    assert answer.cached_tokens == 384
    assert_same(answer, plain(Question(prompt)))


def test_prompts_with_a_common_prefix_continue_there_from_the_third_on(
    engine: Engine, plain: Reference
) -> None:
    """VLLM has forgotten the first one when the second one comes, so only the connector knows where they differ."""
    common = tokens("common", 300)
    answers = []
    for name in ("first", "second", "third"):
        question = Question((*common, *tokens(name, 200)))
        answers.append(engine.ask(question))
        engine.settle()
        assert_same(answers[-1], plain(question))

    assert [answer.cached_tokens for answer in answers] == [0, 0, 256]


def test_vllms_own_hit_is_extended(engine: Engine, plain: Reference) -> None:
    prompt = tokens("extended", 600)
    engine.ask(Question(prompt))
    engine.settle()
    engine.ask(Question(prompt[:200]))  # leaves its state in vLLM's own prefix cache

    answer = engine.ask(Question(prompt))

    assert answer.cached_tokens == 576
    assert_same(answer, plain(Question(prompt)))


@pytest.mark.parametrize("kind", ["full", "state="])
@pytest.mark.parametrize(
    "damage", [change_first_payload_byte, Path.unlink], ids=["one byte changed", "removed"]
)
def test_damage_of_one_group_is_never_used(
    engines: Engines, plain: Reference, model: str, tmp_path: Path, kind: str, damage: Callable[[Path], None]
) -> None:
    question = Question(tokens(f"damage {kind}", 450))
    with engines.started(connector(disk=tmp_path), model=model, **BFLOAT16) as before:
        before.ask(question)
        before.settle()
        before.close()
    records = [path for path in tmp_path.glob("??/*") if kind in namespace_of(path)]
    damage(min(records))

    with engines.started(connector(disk=tmp_path), model=model, **BFLOAT16) as after:
        answers = [after.ask(question)]
        after.settle()  # what was damaged is stored again
        answers.append(after.ask(question))

    assert answers[0].cached_tokens < 448
    assert answers[1].cached_tokens == 448
    for answer in answers:
        assert_same(answer, plain(question))


def test_one_state_of_each_layer_is_stored(engines: Engines, model: str, tmp_path: Path) -> None:
    with engines.started(connector(disk=tmp_path), model=model, **BFLOAT16) as engine:
        engine.ask(Question(tokens("bytes", 1500)))
        engine.settle()
        engine.close()
    stored: Counter[str] = Counter()
    for path in tmp_path.glob("??/*"):
        header = read_header(memoryview(path.read_bytes()))
        stored["state" if "state=" in header.namespace else "full"] += len(header.tokens)

    assert stored == {"full": 1472, "state": 3 * BLOCK}  # a record of a state names the tokens of its block


def test_batches_of_many_lengths_have_the_same_answers(
    engines: Engines, plain: Reference, model: str, tmp_path: Path
) -> None:
    """With a state for each block. Preemption is left to `tools.models`: it changes the rounding of plain vLLM too."""
    dense = {"prefix_cache_retention_interval": BLOCK, **BFLOAT16}
    common, generator = tokens("shared by some", 260), Random("states")
    questions = []
    for index in range(8):
        own = tokens(f"batch {index}", generator.randrange(70, 600))
        prompt = own if index % 3 else (*common[: generator.randrange(64, 260)], *own)
        questions.append(Question(prompt, max_tokens=generator.randrange(4, 24)))
    questions += questions[:4]

    with engines.started(connector(disk=tmp_path), model=model, **dense) as engine:
        rounds = []
        for _ in range(2):
            rounds.append(engine.ask_all(questions))
            engine.settle()

    assert sum(answer.cached_tokens > 0 for answer in rounds[1]) > len(questions) // 2
    for answers in rounds:
        for question, answer in zip(questions, answers, strict=True):
            assert_same(answer, plain(question))


def test_steps_may_be_shorter_than_a_block(engines: Engines, model: str, tmp_path: Path) -> None:
    """They change the rounding of a state in bfloat16, so the plain engine takes the same ones."""
    questions = [Question(tokens(f"steps {length}", length)) for length in (BLOCK + 1, 300, 577)]
    short = {"max_num_batched_tokens": 48, **BFLOAT16}
    with engines.started(model=model, **short) as engine:
        reference = Reference(engine)
        own = [reference.own_hit(question).cached_tokens for question in questions]
        expected = [reference(question) for question in questions]
    with engines.started(connector(disk=tmp_path), model=model, **short) as engine:
        cold = [engine.ask(question) for question in questions]
        engine.settle()
        warm = [engine.ask(question) for question in questions]

    assert [answer.cached_tokens for answer in warm] == own
    for answers in (cold, warm):
        for answer, wanted in zip(answers, expected, strict=True):
            assert_same(answer, wanted)


def test_two_ranks_that_are_asked_over_tcp_hit_as_far_as_vllm_would(
    engines: Engines, plain: Reference, model: str, tmp_path: Path
) -> None:
    over_tcp = connector(disk=tmp_path, **{"vllm.lookup_transport": "tcp"})
    questions = [Question(tokens(f"ranks {length}", length)) for length in (100, 320, 777)]
    own = [plain.own_hit(question).cached_tokens for question in questions]
    two = {"tensor_parallel_size": 2, "processes": True, **BFLOAT16}
    with engines.started(over_tcp, model=model, **two) as engine:
        engine.wait_for_hit()
        cold = [engine.ask(question) for question in questions]
        engine.settle()
        warm = [engine.ask(question) for question in questions]

    assert [answer.cached_tokens for answer in warm] == own
    for one, other in zip(cold, warm, strict=True):
        assert_same(one, other)


def test_a_new_engine_loads_from_disk(
    engines: Engines, engine: Engine, plain: Reference, model: str, tmp_path: Path
) -> None:
    questions = [Question(tokens(f"restart {index}", 450)) for index in range(3)]
    with engines.started(connector(disk=tmp_path), model=model, **BFLOAT16) as before:
        for question in questions:
            before.ask(question)
        before.settle()
        before.close()
    with engines.started(connector(disk=tmp_path), model=model, **BFLOAT16) as after:
        answers = [after.ask(question) for question in questions]

    for question, answer in zip(questions, answers, strict=True):
        assert answer.cached_tokens == 448
        assert_same(answer, plain(question))
