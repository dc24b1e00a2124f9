"""Result of the demo as a table and as JSON.

Times are shown with their reference and are not judged, because they depend on the machine and its load. Answers,
log-probabilities and hits are judged.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.table import Table

from examples.demo.machine import versions

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rich.console import Console

    from examples.demo.cases import Case, Cases

COMPARED_WITH = {
    "cold": "no_connector",
    "warm": "pool",
    "questions": "pool",
    "restart": "pool_at_restart",  # measured right before or after, so that drift cancels
}
"""Reference of each case: no connector, or a hit in vLLM's own prefix cache."""
TOLERANCE = 1e-3  # of a log-probability, unless vLLM itself varies more

_ROWS = (
    ("no_connector", "cold, no connector"),
    ("cold", "cold, with the cache"),
    ("pool", "vLLM's own prefix cache"),
    ("warm", "host memory, vLLM's cache reset"),
    ("questions", "other questions, same document"),
    ("pool_at_restart", "vLLM's own prefix cache, again"),
    ("restart", "disk, after a restart of vLLM"),
)
_BASES = {
    "no_connector": "no connector",
    "pool": "vLLM's own hit",
    "pool_at_restart": "vLLM's own hit, again",
}


def summarise(
    cases: Cases, *, document_tokens: int, expect_hits: bool, facts: Mapping[str, Any]
) -> dict[str, Any]:
    tolerance = max(TOLERANCE, cases.own_difference)
    equal = all(case.equal == case.compared > 0 for case in cases.judged)
    hits = all(case.hit_tokens >= document_tokens for case in cases.hits)
    return {
        "ok": equal and cases.max_logprob_difference <= tolerance and (hits or not expect_hits),
        "no_connector_ttft_s": cases.no_connector.median_s,
        "cold_ttft_s": cases.cold.median_s,
        "pool_ttft_s": cases.pool.median_s,
        "pool_with_connector_ttft_s": cases.pool_with_connector.median_s,
        "pool_at_restart_ttft_s": cases.pool_at_restart.median_s,
        "warm_ttft_s": cases.warm.median_s,
        "questions_ttft_s": cases.questions.median_s,
        "restart_ttft_s": cases.restart.median_s,
        "ratios": _ratios(cases),
        "ratio_to": COMPARED_WITH,
        "outputs_equal": equal and cases.max_logprob_difference <= tolerance,
        "answers_compared": sum(case.compared for case in cases.judged),
        "answers_equal": sum(case.equal for case in cases.judged),
        "max_logprob_difference": cases.max_logprob_difference,
        "vllm_own_logprob_difference": cases.own_difference,
        "logprob_tolerance": tolerance,
        "document_tokens": document_tokens,
        "hits_expected": expect_hits,
        "hits_complete": hits,
        "hit_tokens": min(case.hit_tokens for case in cases.hits),
        "hit_tokens_by_case": {name: getattr(cases, name).hit_tokens for name, _ in _ROWS},
        "hit_tokens_by_tier": {
            name: getattr(cases, name).tier_share for name in ("warm", "questions", "restart")
        },
        "rounds": {name: _rounds(getattr(cases, name)) for name in cases.__slots__},
        "versions": versions(),
        **facts,
    }


def show(result: Mapping[str, Any], console: Console) -> None:
    table = Table(title="Time to first token, medians", title_justify="left")
    table.add_column("")
    table.add_column("TTFT s", justify="right")
    table.add_column("beside")
    table.add_column("TTFT s", justify="right")
    table.add_column("ratio", justify="right")
    table.add_column("cached tokens, from")
    for name, label in _ROWS:
        base, ratio = COMPARED_WITH.get(name), result["ratios"].get(name)
        table.add_row(
            label,
            f"{result[f'{name}_ttft_s']:.3f}",
            _BASES[base] if base else "",
            f"{result[f'{base}_ttft_s']:.3f}" if base else "",
            f"{ratio:.2f}" if ratio else "",
            _source(result, name),
        )
    console.print(table)
    console.print("Times and ratios are of this machine at this time; they are not judged.")
    console.print(
        f"Answers and log-probabilities equal to vLLM without a connector: {_yes(result['outputs_equal'])}"
        f" ({result['answers_equal']} of {result['answers_compared']}; largest difference"
        f" {result['max_logprob_difference']:.1e}, vLLM from itself {result['vllm_own_logprob_difference']:.1e})"
    )
    if result["hits_expected"]:
        console.print(
            f"Documents loaded from the cache wherever they were stored: {_yes(result['hits_complete'])}"
            f" (at least {result['hit_tokens']} of {result['document_tokens']} tokens)"
        )
    if left := result["page_cache_left_bytes"]:
        console.print(
            f"[yellow]{left} bytes stayed in the page cache:[/yellow] the restart is not all from disk"
        )


def write(result: Mapping[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _ratios(cases: Cases) -> dict[str, float]:
    found = {}
    for name, compared_with in COMPARED_WITH.items():
        case, base = getattr(cases, name), getattr(cases, compared_with)
        if case.median_s and base.median_s:
            found[name] = round(case.median_s / base.median_s, 3)
    return found


def _rounds(case: Case) -> dict[str, Any]:
    return {"ttft_s": case.ttft_s, "seconds": case.seconds, "cached_tokens": case.cached_tokens}


def _yes(right: bool) -> str:
    return "yes" if right else "[red]NO[/red]"


def _source(result: Mapping[str, Any], name: str) -> str:
    tokens = result["hit_tokens_by_case"][name]
    if not tokens:
        return "0"
    tiers = result["hit_tokens_by_tier"].get(name, {})
    return (
        f"{tokens}, {' '.join(f'{tier} {share}' for tier, share in tiers.items())}" if tiers else f"{tokens}"
    )
