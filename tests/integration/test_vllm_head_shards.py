"""One rank and two ranks load each other's KV heads from disk in a real vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.model_families import make_sliding_window_model
from tests.integration.vllm_answers import Question, assert_same, tokens
from tests.integration.vllm_driver import BLOCK, Engines, Reference, complaints, connector

pytestmark = pytest.mark.vllm

TWO_RANKS = {"tensor_parallel_size": 2, "processes": True}
LENGTHS = (100, 320, 777)


@pytest.mark.parametrize("model", ["full attention", "windows"])
def test_one_rank_and_two_ranks_load_each_others_records(
    engines: Engines, reference: Reference, tmp_path: Path, model: str
) -> None:
    options: dict[str, Any] = {}
    hits = [length // BLOCK * BLOCK for length in LENGTHS]  # as without shards
    if model == "windows":
        options = {"model": str(make_sliding_window_model(tmp_path / "model"))}
        reference = Reference(engines.start(**options))
        hits = [(length - 1) // BLOCK * BLOCK for length in LENGTHS]
    of_one, of_two = (
        [Question(tokens(f"{model} {number} {length}", length)) for length in LENGTHS] for number in (1, 2)
    )
    transport = {"full attention": "unix", "windows": "tcp"}[model]
    settings = {"vllm.kv_head_shards": 2, "vllm.lookup_transport": transport}
    transfer = connector(disk=tmp_path / "kv", **settings)

    with engines.started(transfer, **options) as engine:
        computed = engine.ask_all(of_one)
        engine.settle()
        logs = [engine.log(), engine.close()]
    with engines.started(transfer, **options, **TWO_RANKS) as engine:
        engine.wait_for_hit()
        loaded = [engine.ask(question) for question in of_one]
        computed += engine.ask_all(of_two)
        engine.settle()
        logs.append(engine.log())
        log = engine.close()
    with engines.started(transfer, **options) as engine:
        loaded += [engine.ask(question) for question in of_two]
        again = [engine.ask(question) for question in of_one]

    reasons = [complaints(each) for each in (*logs, log)]
    assert [answer.cached_tokens for answer in loaded] == hits + hits, reasons
    assert [answer.cached_tokens for answer in again] == hits
    for answers in (computed, loaded):
        for question, answer in zip(of_one + of_two, answers, strict=True):
            assert_same(answer, reference(question))
    assert complaints(log) == []
