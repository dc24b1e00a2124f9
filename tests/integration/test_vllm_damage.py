"""Damaged records: the load fails, and the answer is right. All options have their defaults."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.vllm_answers import Question, assert_same, difference, tokens
from tests.integration.vllm_driver import CHUNK, Engine, Engines, Reference, connector
from tests.integration.vllm_records import change_one_byte, record_of

pytestmark = pytest.mark.vllm

MEMORY_ONLY = {"vllm.reset_cache": "memory"}  # after a reset only the disk has the records


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damage") / "kv"


@pytest.fixture(scope="module")
def engine(engines: Engines, disk: Path) -> Iterator[Engine]:
    with engines.started(connector(disk=disk, **MEMORY_ONLY)) as engine:
        yield engine


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:8192])


def corrupt(statistics: dict[str, Any]) -> int:
    """Number of records found damaged, by the tier or by their checksum."""
    return statistics["corrupt"] + statistics["counts"].get("disk.corrupt.checksum", 0)


@pytest.mark.parametrize(
    ("damage", "counted"),
    [(change_one_byte, 1), (truncate, 1), (Path.unlink, 0)],
    ids=["one byte changed", "truncated", "removed"],
)
@pytest.mark.parametrize("chunk", [0, 7])
def test_a_damaged_record_is_never_used(
    engine: Engine,
    reference: Reference,
    disk: Path,
    damage: Callable[[Path], None],
    counted: int,
    chunk: int,
) -> None:
    question = Question(tokens(f"damage {damage.__name__} {chunk}", 800))
    engine.ask(question)
    before = engine.settle()
    engine.forget()
    damage(record_of(disk, question.prompt, chunk * CHUNK))

    answer = engine.ask(question)
    after = engine.settle()
    engine.forget()
    again = engine.ask(question)

    assert_same(answer, reference(question))
    assert answer.tiers.get("disk", 0) == chunk * CHUNK
    assert corrupt(after) - corrupt(before) == counted
    assert again.tiers == {"disk": 800}  # recomputed chunks are stored again
    assert_same(again, reference(question))


def test_a_reset_may_hide_what_was_stored_before_and_keep_it_for_others(
    engines: Engines, reference: Reference, tmp_path: Path
) -> None:
    question = Question(tokens("new namespace", 800))
    hiding = connector(disk=tmp_path / "kv", **{"vllm.reset_cache": "new_namespace"})
    with engines.started(hiding) as engine:
        answers = []
        for _ in range(2):
            answers += [engine.ask(question)]
            engine.settle()
            answers += [engine.ask(question)]
            engine.forget()
        engine.close()
    with engines.started(connector(disk=tmp_path / "kv")) as other:
        answers.append(other.ask(question))

    assert [answer.cached_tokens > 0 for answer in answers] == [False, True, False, True, True]
    for answer in answers:
        assert_same(answer, reference(question))


def test_the_directory_may_vanish_while_the_engine_runs(
    engine: Engine, reference: Reference, disk: Path
) -> None:
    question = Question(tokens("vanish", 700))
    engine.ask(question)
    engine.settle()
    engine.forget()
    shutil.rmtree(disk)

    answer = engine.ask(question)
    engine.settle()
    engine.forget()
    again = engine.ask(question)

    assert answer.tiers == {}
    assert_same(answer, reference(question))
    assert again.tiers == {"disk": 672}
    assert_same(again, reference(question))


def test_without_verification_one_byte_changes_the_answer(
    engines: Engines, reference: Reference, tmp_path: Path
) -> None:
    """Control: the comparison detects a single wrong byte in one of thirteen chunks."""
    question = Question(tokens("control", 800))
    unverified = connector(disk=tmp_path / "kv", **MEMORY_ONLY, **{"retrieve.verify": False})
    with engines.started(unverified) as engine:
        engine.ask(question)
        engine.settle()
        engine.forget()
        unharmed = engine.ask(question)
        engine.settle()
        engine.forget()
        change_one_byte(record_of(tmp_path / "kv", question.prompt, 0))

        answer = engine.ask(question)

    assert unharmed.tiers == answer.tiers == {"disk": 800}
    assert_same(unharmed, reference(question))
    assert answer.finish_reason == "length"
    assert difference(answer, reference(question)) > 0.1
