"""Unsupported models in a real vLLM: the connector turns itself off, logs why, and vLLM answers as without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.model_families import make_embedding_model, make_mla_model, make_sliding_window_model
from tests.integration.vllm_answers import Question, assert_same, tokens
from tests.integration.vllm_driver import Engine, Engines, connector, several

pytestmark = pytest.mark.vllm

OFF = "LMCacheAsyncConnector is off: "


def why_off(engine: Engine) -> str:
    """The single log line with the reason."""
    [line] = [line for line in engine.log().splitlines() if OFF in line]
    return line.partition(OFF)[2]


def test_mla_is_off_where_vllm_cannot_continue_its_prefill(engines: Engines, tmp_path: Path) -> None:
    """On a CPU without AMX, where vLLM selects this backend."""
    model = make_mla_model(tmp_path / "model")
    question = Question(tokens("mla", 300))

    with engines.started(
        connector(), unsupported=True, model=str(model), attention_backend="CPU_MLA"
    ) as engine:
        first = engine.ask(question)
        assert engine.call("reset", connector=False)
        second = engine.ask(question)

    assert_same(second, first)
    assert (first.cached_tokens, second.cached_tokens) == (0, 0)
    assert "MLA" in why_off(engine)


def test_the_connector_is_off_if_a_tier_cannot_be_opened(engines: Engines, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with engines.started(connector(disk=tmp_path / "file" / "kv"), unsupported=True) as engine:
        answer = engine.ask(Question(tokens("no directory", 100)))

        assert answer.cached_tokens == 0
        assert why_off(engine).startswith(f"cannot open {tmp_path / 'file' / 'kv'}: ")
        assert "set `path` of the disk tier" in why_off(engine)
        assert "NotADirectoryError" not in engine.log()


def test_pooling_over_the_whole_prompt_is_off(engines: Engines, tmp_path: Path) -> None:
    model = make_embedding_model(tmp_path / "model")
    prompt = list(tokens("pooling", 200))

    with engines.started(
        connector(),
        unsupported=True,
        model=str(model),
        skip_tokenizer_init=False,
        runner="pooling",
        pooler_config={"seq_pooling_type": "MEAN"},
        enable_prefix_caching=False,  # vLLM's default for such a model
        max_num_batched_tokens=2048,  # the longest prompt: such a prefill is not chunked
    ) as engine:
        first = engine.call("embed", prompt=prompt)
        second = engine.call("embed", prompt=prompt)
        other = engine.call("embed", prompt=[*prompt[:-1], 7])

    assert second == pytest.approx(first, abs=1e-5)
    assert other != pytest.approx(first, abs=1e-3)
    assert "pooling" in why_off(engine)


def test_windows_are_kept_whole_without_the_hybrid_manager(engines: Engines, tmp_path: Path) -> None:
    """Every layer keeps the whole prompt, in one group. VLLM has a flag for this, and does it for some connectors."""
    model = str(make_sliding_window_model(tmp_path / "model"))
    question = Question(tokens("windows", 500))
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "other")},
    }

    with engines.started(model=model, disable_hybrid_kv_cache_manager=True) as plain:
        reference = plain.ask(question)
    alone = (connector(), {"disable_hybrid_kv_cache_manager": True})
    for transfer, options in (alone, (several(connector(), other), {})):
        with engines.started(transfer, model=model, **options) as engine:
            cold = engine.ask(question)
            engine.settle()
            warm = engine.ask(question)

        assert (cold.cached_tokens, warm.cached_tokens, warm.tiers) == (0, 480, {"cpu": 480})
        assert_same(cold, reference)
        assert_same(warm, reference)
