"""The part `vllm` of `python -m tools.gpu`: what counts as a problem, and which times are compared."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tools.gpu import serving
from tools.gpu.page import SECTIONS
from tools.gpu.serving import Engines, Judge, difference
from tools.gpu.serving_engine import MAX_TOKENS, Settings, prompt, succeeded, transfer_config, write

TOKENS = list(range(MAX_TOKENS))


def answer(
    shift: float = 0.0, *, cached: int = 0, ttft_s: float = 1.0, tokens: list[int] | None = None
) -> Any:
    chosen = tokens or TOKENS
    return {
        "cached_tokens": cached,
        "tokens": chosen,
        "logprobs": [{str(token): shift - 1.0, "other": shift - 2.0} for token in chosen],
        "ttft_s": ttft_s,
        "wait_s": ttft_s / 2,
    }


def engine(**changed: Any) -> dict[str, Any]:
    """The results of an engine with one prompt of 2 049 tokens."""
    row = {
        "tokens": 2049,
        "number": 0,
        "first": answer(),
        "own": answer(cached=2048, ttft_s=0.1),
        "loads": [
            answer(cached=2048, ttft_s=0.25),
            answer(cached=2048, ttft_s=0.2),
            answer(cached=2048, ttft_s=0.3),
        ],
    }
    batch = {"tokens": 1025, "first": [answer(cached=1024)], "again": [answer(0.1, cached=1024)]}
    return {"rows": [row | changed.pop("row", {})], "batch": batch, "changed": answer(0.5), **changed}


def problems(**engines: Any) -> list[str]:
    return Judge("llama", engines, quick=False).problems


def test_equal_answers_and_full_hits_are_no_problem_and_times_are_medians():
    plain = engine(row={"loads": []})
    restarted = engine(row={"first": answer(cached=2048, ttft_s=0.5)})
    judge = Judge(
        "llama",
        {"plain": plain, "ours": engine(), "restarted": restarted, "offloading": engine()},
        quick=False,
    )

    assert judge.problems == []
    assert judge.rows() == [
        {
            "model": "llama",
            "tokens": 2049,
            "ttft_s": {
                "plain: computed": 1.0,
                "plain: prefix cache": 0.1,
                "ours: computed": 1.0,
                "ours: prefix cache": 0.1,
                "ours: memory": 0.25,
                "restarted: disk": 0.5,
                "restarted: prefix cache": 0.1,
                "offloading: computed": 1.0,
                "offloading: prefix cache": 0.1,
                "offloading: memory": 0.25,
            },
            "wait_s": {
                "plain: computed": 0.5,
                "plain: prefix cache": 0.05,
                "ours: computed": 0.5,
                "ours: prefix cache": 0.05,
                "ours: memory": 0.125,
                "restarted: disk": 0.25,
                "restarted: prefix cache": 0.05,
                "offloading: computed": 0.5,
                "offloading: prefix cache": 0.05,
                "offloading: memory": 0.125,
            },
        }
    ]


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (
            {"ours": engine(row={"loads": [answer(0.02, cached=2048)]})},
            "loaded: log-probabilities differ by 0.02",
        ),
        (
            {"ours": engine(row={"loads": [answer(cached=1792)]})},
            "1792 tokens loaded, vLLM's prefix cache has 2048",
        ),
        ({"restarted": engine()}, "0 tokens from disk"),
        (
            {"plain": engine(row={"loads": []}), "ours": engine(row={"first": answer(0.02)})},
            "first answer: log-probabilities differ by 0.02",
        ),
        (
            {
                "ours": engine(
                    batch={"tokens": 1025, "first": [answer()], "again": [answer(0.6, cached=1024)]}
                )
            },
            "prompt 0 of the batch: log-probabilities differ by 0.6",
        ),
        (
            {"ours": engine(batch={"tokens": 1025, "first": [answer()], "again": [answer(cached=768)]})},
            "prompt 0 of the batch: not all of its tokens were loaded",
        ),
        ({"ours": engine(changed=answer(0.04))}, "one changed token changes the answer by only 0.04"),
    ],
)
def test_a_wrong_answer_a_short_hit_and_a_test_that_would_notice_nothing_are_problems(found, text):
    [problem] = problems(**found)

    assert problem.startswith("llama, ")
    assert text in problem


def test_the_own_connector_of_vllm_may_have_shorter_hits():
    assert problems(offloading=engine(row={"loads": [answer(cached=1792)]})) == []


def test_answers_with_other_tokens_or_without_a_common_token_differ_infinitely():
    assert difference(answer(), answer(tokens=[*TOKENS[:-1], 99])) == math.inf
    assert difference(answer(), answer(tokens=[*TOKENS[:-1], 99]), places=1) == 0
    assert difference({"logprobs": [{"1": 0.0}]}, {"logprobs": [{"2": 0.0}]}, places=1) == math.inf


def test_an_engine_without_a_result_is_a_problem_and_the_others_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(serving.sys, "executable", "/bin/true")
    names = ("ours", "restarted", "offloading")
    chosen = [Settings("llama-8b", name, str(tmp_path), lengths=(2049,)) for name in names]
    chosen[0].result.write_text(json.dumps(engine()))
    chosen[1].result.write_text(json.dumps({"failed": "exit status 1"}))

    found = Engines(chosen, tmp_path / "result.json").run(60)

    assert found == ["llama-8b, restarted: exit status 1", "llama-8b, offloading: no result"]
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["problems"] == found
    assert [row["model"] for row in written["rows"]] == ["llama-8b"]


def test_an_engine_is_restarted_only_after_the_first_one_has_ended_with_a_result(tmp_path):
    result = tmp_path / "result.json"
    assert not succeeded(result)

    write(result, {"failed": "exit status 1"})
    assert not succeeded(result)

    write(result, engine())
    assert succeeded(result)


def test_engines_that_do_not_end_in_time_are_ended(tmp_path, monkeypatch):
    hanging = tmp_path / "hanging"
    hanging.write_text("#!/bin/sh\nexec sleep 600\n")
    hanging.chmod(0o755)
    monkeypatch.setattr(serving.sys, "executable", str(hanging))
    chosen = [Settings("llama-8b", name, str(tmp_path), lengths=(2049,)) for name in ("ours", "restarted")]

    found = Engines(chosen, tmp_path / "result.json").run(0)

    assert found == ["llama-8b, ours: no result", "llama-8b, restarted: no result"]


def test_only_the_engines_with_a_connector_have_a_configuration_of_it():
    settings = Settings("llama-8b", "plain", "/data", lengths=(2049,))

    assert transfer_config(settings) is None
    ours = transfer_config(Settings("llama-8b", "ours", "/data", lengths=(2049,), config={"chunk_size": 512}))
    assert ours is not None
    assert ours["kv_connector"] == "LMCacheAsyncConnector"
    assert ours["kv_connector_extra_config"]["chunk_size"] == 512
    assert prompt("a", 300) == prompt("a", 300) != prompt("b", 300)


def test_the_page_has_times_facts_and_problems():
    judge = Judge("llama", {"ours": engine()}, quick=False)
    facts = {"vllm": "0.32.0", "torch": "2.11", "async_scheduling": True, "blocks": 8, "block_size": 16}
    facts |= {
        "worker": {"runner": "GPUModelRunner", "backends": "FLASH_ATTN", "cuda_graphs": "FULL_DECODE_ONLY"}
    }
    result = {"rows": judge.rows(), "problems": ["llama, ours: wrong"], "left_out": []}

    text = "\n".join(SECTIONS["vllm"](result | {"engines": {"llama": {"ours": {"facts": facts}}}}))

    assert "| 2049 | 1 (0.5) | 0.1 (0.05) | 0.25 (0.125) |" in text
    assert (
        "- ours: vLLM 0.32.0, torch 2.11, GPUModelRunner, FLASH_ATTN, CUDA graphs: FULL_DECODE_ONLY, 8 blocks of 16,"
        " asynchronous scheduling" in text
    )
    assert "- llama, ours: wrong" in text
