"""The parts of the demo that determine its report, without vLLM."""

from __future__ import annotations

import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from examples.demo import documents, pagecache, report
from examples.demo.cases import Cases, logprob_difference
from examples.demo.client import Answer
from examples.demo.connectors import tokens_by_tier


def answer(*tokens: int, logprob: float = -1.0, cached: int = 0, log: str = "") -> Answer:
    return Answer(
        ttft_s=0.1,
        seconds=0.2,
        cached_tokens=cached,
        finish_reason="length",
        tokens=list(tokens),
        logprobs=[{str(token): logprob} for token in tokens],
        text="",
        log=log,
    )


def cases_of(restart: Answer, ttft_s: float = 0.1) -> Cases:
    """Right answers and complete hits with this time to the first token, and an answer after a restart."""
    cases = Cases()
    for case in (cases.no_connector, cases.pool, cases.pool_at_restart):
        case.add([answer(1, 2)])
    for case in (cases.cold, cases.pool_with_connector, cases.warm, cases.questions):
        case.add([replace(answer(1, 2, cached=8), ttft_s=ttft_s)], reference=answer(1, 2))
    cases.restart.add([replace(restart, ttft_s=ttft_s)], reference=answer(1, 2))
    return cases


def shown(cases: Cases, *, expect_hits: bool = True) -> tuple[dict[str, Any], str]:
    facts = {"page_cache_left_bytes": 0}
    result = report.summarise(cases, document_tokens=8, expect_hits=expect_hits, facts=facts)
    console = Console(width=120, file=io.StringIO(), force_terminal=False)
    report.show(result, console)
    return result, console.file.getvalue()


def test_right_answers_and_complete_hits_pass() -> None:
    result, _ = shown(cases_of(answer(1, 2, cached=8)))

    assert (result["ok"], result["outputs_equal"], result["hits_complete"]) == (True, True, True)
    assert result["hit_tokens"] == 8


@pytest.mark.parametrize(
    ("restart", "what"),
    [
        (answer(1, 3, cached=8), "outputs_equal"),
        (answer(1, 2, cached=8, logprob=-1.01), "outputs_equal"),
        (answer(1, 2, cached=7), "hits_complete"),
    ],
    ids=["another token", "another log-probability", "a missing hit"],
)
def test_one_wrong_answer_fails_the_demo(restart: Answer, what: str) -> None:
    result, _ = shown(cases_of(restart))

    assert not result["ok"]
    assert not result[what]


def test_times_are_shown_beside_vllms_own_and_not_judged() -> None:
    result, text = shown(cases_of(answer(1, 2, cached=8), ttft_s=5.0))

    assert result["ok"]
    assert result["ratios"] == {"cold": 50.0, "warm": 50.0, "questions": 50.0, "restart": 50.0}
    assert set(result["ratio_to"]) == set(result["ratios"])
    [warm] = [line for line in text.splitlines() if "host memory" in line]
    assert re.search(r"5\.000 .* vLLM's own hit .* 0\.100 .* 50\.00 .* 8", warm)
    assert "they are not judged" in text
    assert "target" not in text.lower() + json.dumps(result).lower()
    assert "NO" not in text


def test_wrong_answers_are_reported() -> None:
    cases = cases_of(answer(1, 2, cached=8))
    cases.warm.add([answer(1, 3, cached=7)], reference=answer(1, 2))

    result, text = shown(cases)

    assert not result["ok"]
    assert "equal to vLLM without a connector: NO (5 of 6;" in text
    assert "wherever they were stored: NO (at least 7 of 8 tokens)" in text


def test_without_a_connector_no_hit_is_expected() -> None:
    cases = Cases()
    for case in (getattr(cases, name) for name in cases.__slots__):
        case.add([answer(1, 2)], reference=answer(1, 2))

    result, text = shown(cases, expect_hits=False)

    assert result["ok"]
    assert "wherever they were stored" not in text


def test_log_probabilities_are_compared_only_while_the_texts_agree() -> None:
    one = answer(1, 2, 3, logprob=-1.0)
    other = answer(1, 9, 3, logprob=-1.5)

    assert logprob_difference(one, other) == 0.5
    assert logprob_difference(answer(1, 2, logprob=-1.0), answer(9, 2, logprob=-7.0)) == 0.0


def test_tokens_are_counted_for_each_tier_over_all_lines() -> None:
    log = (
        "INFO retrieved 4096/4098 tokens (cpu=1024, disk=3072), 128.0 MB in 40.1 ms, 3.19 GB/s [a=1]\n"
        "INFO stored 256 tokens in 1 chunks (0 present, dropped: full=1), 8.0 MB\n"
        "INFO retrieved 0/256 tokens (none), 0.0 MB in 0.1 ms; ended by: miss [b]\n"
        "INFO retrieved 256/256 tokens (cpu=256), 8.0 MB in 1.1 ms [c]\n"
    )

    assert tokens_by_tier(log) == {"cpu": 1280, "disk": 3072}


def test_documents_depend_on_their_seed_alone() -> None:
    assert documents.make_document(3) == documents.make_document(3)
    assert documents.make_document(3).text[:200] != documents.make_document(4).text[:200]


def test_dropping_the_page_cache_returns_the_remaining_bytes(tmp_path: Path) -> None:
    """On tmpfs everything remains; on a disk nothing. The number is between zero and the size."""
    path = tmp_path / "record"
    path.write_bytes(os.urandom(1 << 16))

    assert 0 <= pagecache.drop(tmp_path) <= 1 << 16
    assert path.stat().st_size == 1 << 16
