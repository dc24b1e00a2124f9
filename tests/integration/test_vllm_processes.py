"""Scheduler and worker in separate processes, as in production."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.vllm_answers import Question, assert_same, tokens
from tests.integration.vllm_driver import Engine, Engines, Reference, complaints, connector

pytestmark = pytest.mark.vllm


def test_hits_across_processes_and_a_kill(engines: Engines, reference: Reference, tmp_path: Path) -> None:
    prefix = tokens("processes", 500)
    questions = [Question(prefix + tokens(f"processes {i}", 60 * i)) for i in range(8)]

    with engines.started(connector(disk=tmp_path), processes=True) as engine:
        cold = engine.ask_all(questions)
        engine.settle()
        warm = engine.ask_all(questions)
        engine.settle()
        metrics = until_told(engine, "retrieve_hit_tokens_total", 480)  # vLLM shares loaded blocks
        engine.kill()
    with engines.started(connector(disk=tmp_path), processes=True) as engine:
        restarted = engine.ask_all(questions)
        engine.settle()
        sources = cached_by_source(engine)
        log = engine.close()

    for question, *answers in zip(questions, cold, warm, restarted, strict=True):
        whole = len(question.prompt) // 32 * 32
        assert [answer.cached_tokens for answer in answers][1:] == [whole, whole]
        for answer in answers:
            assert_same(answer, reference(question))
    assert "disk=" in restarted[0].log
    assert sources["disk"] >= 480
    assert sources["external_unspecified"] == 0
    assert metrics["decided_total", "load"] >= 1
    assert metrics["lookup_hit_tokens_total", "cpu"] >= metrics["load_tokens_total", "cpu"] >= 480
    assert metrics["retrieve_seconds_count",] >= 1
    assert metrics["tier_stored_chunks_total", "disk"] > 8
    assert metrics["arena_bytes",] > 0
    assert complaints(log) == []


@pytest.mark.parametrize(("reset_cache", "hit"), [("memory", 480), ("all", 0)])
def test_sleep_keeps_or_drops_what_is_stored_as_configured(
    engines: Engines, reference: Reference, tmp_path: Path, reset_cache: str, hit: int
) -> None:
    question = Question(tokens("sleep", 500))
    transfer = connector(disk=tmp_path, **{"vllm.reset_cache": reset_cache})
    with engines.started(transfer, processes=True) as engine:
        engine.wait_for_hit()
        answers = [engine.ask(question)]
        engine.call("sleep_and_wake")  # blocks are still held for the store
        engine.settle()
        engine.wait_for_hit()  # the clear has ended; until then it may delete what is stored
        answers.append(engine.ask(question))
        engine.settle()
        answers.append(engine.ask(question))

    assert [answer.cached_tokens for answer in answers] == [0, hit, 480]
    for answer in answers:
        assert_same(answer, reference(question))


def until_told(engine: Engine, name: str, least: float) -> dict[tuple[str, ...], float]:
    """Wait until a series in vLLM's /metrics reaches a value, and return all of ours by name and own labels.

    The worker's counts arrive with a step, so other requests run meanwhile.
    """
    for number, _ in enumerate(engine.until(f"does not tell {name} of {least}")):
        told = {
            (sample.name.removeprefix("lmcache_async_"), *_own(sample.labels)): sample.value
            for family in text_string_to_metric_families(engine.call("metrics"))
            for sample in family.samples
            if sample.name.startswith("lmcache_async_")
        }
        if sum(value for (found, *_), value in told.items() if found == name) >= least:
            return told
        engine.ask(Question(tokens(f"beside {number}", 40), max_tokens=1))
    raise AssertionError


def cached_by_source(engine: Engine) -> dict[str, float]:
    """Sources of cached prompt tokens, as reported by vLLM."""
    return {
        sample.labels["source"]: sample.value
        for family in text_string_to_metric_families(engine.call("metrics"))
        for sample in family.samples
        if sample.name == "vllm:prompt_tokens_cached_by_source_total"
    }


def _own(labels: dict[str, str]) -> list[str]:
    assert {"model_name", "engine"} <= set(labels)
    return [value for label, value in sorted(labels.items()) if label not in {"model_name", "engine", "le"}]
