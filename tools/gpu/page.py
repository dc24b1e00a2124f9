"""The Markdown page of a run."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FACTS = (
    "device",
    "cuda",
    "torch",
    "triton",
    "transformers",
    "python",
    "cpu",
    "cores",
    "memory_gib",
    "kernel",
)


LONG_TOKENS = 32768
"""Prompts from this length on have targets for their loads."""


@dataclass(frozen=True, slots=True)
class Target:
    """A figure and its limit.

    Attributes:
        where: Place of the figure, which is the worst of its kind, or the median of all.
        least: Minimum; None if `most` is the limit.
        most: Maximum.
    """

    name: str
    where: str
    value: float
    least: float | None = None
    most: float | None = None

    @property
    def missed(self) -> bool:
        return not self.met

    @property
    def met(self) -> bool:
        return self.value >= self.least if self.least is not None else self.value <= (self.most or 0.0)

    @property
    def wanted(self) -> str:
        return f"at least {self.least:g}" if self.least is not None else f"at most {self.most:g}"

    def __str__(self) -> str:
        return (
            f"{'met' if self.met else 'MISSED'}: {self.name}: {self.value:.4g}, {self.wanted} ({self.where})"
        )


def targets(document: Mapping[str, Any]) -> list[Target]:
    """Return the targets of the parts that have results, each with its worst figure. A quick run has none."""
    if document["quick"]:
        return []
    results = {one["name"]: one["result"] for one in document["parts"] if one["result"]}
    found: list[Target] = []
    for part, of_part in (("profile", _profile_targets), ("example", _example_targets)):
        if part in results:
            found += of_part(results[part]["rows"])
    return found


def _profile_targets(rows: Sequence[Mapping[str, Any]]) -> Iterator[Target]:
    def worst(name: str, key: str, **limit: float) -> Target:
        choose = min if "least" in limit else max
        row = choose((row for row in rows if key in row), key=lambda row: float(row[key]))
        return Target(name, f"{row['cache']}, {row['way']}", row[key], **limit)

    def medians(name: str, key: str, **limit: float) -> Iterator[Target]:
        if found := [row[key] for row in rows if key in row]:
            yield Target(name, "median", statistics.median(found), **limit)

    if not rows:
        return
    yield worst("paged copy, ratio to one contiguous copy", "ratio", least=0.97)
    yield from medians("time of compute beside copies, ratio to compute alone", "compute_slowdown", most=1.02)
    # The cycles do not depend on the clock, which a GPU changes with its power.
    yield from medians("cycles of compute beside copies, ratio to compute alone", "compute_cycles", most=1.02)
    yield worst("microseconds of a fence on the model's busy stream", "model_thread_us", most=100)
    waits = [(row["calls"]["waits for streams"] or 0, row) for row in rows if "calls" in row]
    if waits:
        count, row = max(waits, key=lambda pair: pair[0])
        yield Target("waits for a stream during a copy", f"{row['cache']}, {row['way']}", count, most=0)


def _example_targets(rows: Sequence[Mapping[str, Any]]) -> Iterator[Target]:
    for row in rows:
        where = f"{row['tokens']} tokens"
        if row["tokens"] >= LONG_TOKENS:
            share = row["bus_s"] / row["memory_s"]
            yield Target("load from memory, ratio to one contiguous copy", where, share, least=0.9)
            yield Target(
                "prefill, ratio to a load from memory", where, row["prefill_s"] / row["memory_s"], least=10
            )
            if row["disk_s"]:
                share = row["read_s"] / row["disk_s"]
                yield Target("load from disk, ratio to plain reads", where, share, least=0.9)


def page(document: Mapping[str, Any]) -> str:
    """Return the page of a run, from the content of its JSON file."""
    about = document["about"]
    lines = [
        "# Results on a GPU" if not document["quick"] else "# A quick run: its figures have no meaning",
        "",
    ]
    lines += [f"Commit `{about['commit']}`, {about['date']}.", ""]
    lines += table(("", ""), [(name, about[name]) for name in FACTS if name in about])
    lines += table(
        ("part", "status", "seconds", "command"),
        [(one["name"], one["status"], one["seconds"], f"`{one['command']}`") for one in document["parts"]],
    )
    if found := targets(document):
        lines += ["## Targets", ""]
        head = ("", "where", "figure", "wanted", "")
        lines += table(
            head,
            [
                (one.name, one.where, f"{one.value:.4g}", one.wanted, "met" if one.met else "MISSED")
                for one in found
            ],
        )
    for one in document["parts"]:
        lines += [f"## {one['name']}", ""]
        if one["status"] != "passed":
            lines += ["```text", *one["output"].splitlines()[-30:], "```", ""]
        if one["result"]:
            lines += SECTIONS[one["name"]](one["result"])
    return "\n".join(lines).rstrip() + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return a Markdown table and an empty line."""
    made = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    made += ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return [*made, ""]


def _tests(result: Mapping[str, Any]) -> list[str]:
    counts = ", ".join(f"{result[name]} {name}" for name in ("tests", "failures", "errors", "skipped"))
    return [f"{counts}.", ""] + [f"- {name}" for name in result["failed"]] + [""] * bool(result["failed"])


def _bench(result: Mapping[str, Any]) -> list[str]:
    rows = [
        (
            row["name"],
            digits(row["value"]),
            row["unit"],
            digits(row["limit_value"]),
            row["limit_name"],
            f"{row['ratio']:.3f}",
        )
        for row in result["rows"]
    ]
    return table(("", "", "unit", "limit", "", "ratio"), rows) + _left_out(result)


BESIDE = {
    "compute_slowdown": "compute beside it: time",
    "compute_cycles": "cycles",
    "beside_gb_per_s": "GB/s beside compute",
    "compute_slowdown_by_plain_copy": "compute beside a plain copy: time",
    "compute_cycles_by_plain_copy": "cycles",
    "beside_gb_per_s_by_plain_copy": "GB/s beside compute",
    "compute_slowdown_at_power_limit": "random data, time",
    "compute_cycles_at_power_limit": "cycles",
    "beside_gb_per_s_at_power_limit": "GB/s",
    "compute_slowdown_by_plain_copy_at_power_limit": "beside a plain copy: time",
    "compute_cycles_by_plain_copy_at_power_limit": "cycles",
}
"""Columns of compute beside copies: times and cycles as ratios to compute alone, and rates of the copies."""

IDLE = ("before", "between", "after")


def _profile(result: Mapping[str, Any]) -> list[str]:
    kinds = next((list(row["calls"]) for row in result["rows"] if "calls" in row), [])
    head = [
        "cache",
        "way",
        "row bytes",
        "GB/s",
        "one contiguous copy",
        "ratio",
        "model's thread µs",
        "loop's thread ms",
    ]
    head += [*BESIDE.values(), *(f"bus idle {when} µs" for when in IDLE), "pieces", *kinds]
    rows = []
    for row in result["rows"]:
        cells = [
            row["cache"],
            row["way"],
            row["row_bytes"],
            digits(row["gb_per_s"]),
            digits(row["limit_gb_per_s"]),
        ]
        cells += [f"{row['ratio']:.3f}", digits(row["model_thread_us"]), digits(row["loop_thread_ms"])]
        cells += [f"{row[key]:.3f}" if key in row else "-" for key in BESIDE]
        idle = row.get("bus_idle_us", {})
        cells += [f"{idle[when]:.0f}" if when in idle else "-" for when in IDLE]
        calls = row.get("calls", {})
        counts = [calls.get(kind) for kind in kinds]
        rows.append([*cells, row.get("pieces", "-"), *("-" if count is None else count for count in counts)])
    return table(head, rows) + _left_out(result)


def _example(result: Mapping[str, Any]) -> list[str]:
    head = (
        "tokens",
        "KV MiB",
        "prefill s",
        "load from memory s",
        "load from disk s",
        "one contiguous copy s",
        "plain reads s",
        "KV bit-equal",
        "logits differ by",
    )
    rows = [
        (
            row["tokens"],
            digits(row["kv_bytes"] / 2**20),
            digits(row["prefill_s"]),
            f"{digits(row['memory_s'])} ({digits(row['prefill_s'] / row['memory_s'])}x)",
            f"{digits(row['disk_s'])} ({digits(row['prefill_s'] / row['disk_s'])}x)"
            if row["disk_s"]
            else "-",
            f"{digits(row['bus_s'])} ({row['bus_s'] / row['memory_s']:.3f} of the load from memory)",
            f"{digits(row['read_s'])} ({row['read_s'] / row['disk_s']:.3f} of the load from disk)"
            if row["disk_s"]
            else "-",
            "yes" if row["kv_equal"] else "NO",
            f"{100 * row['difference']:.2f} %",
        )
        for row in result["rows"]
    ]
    return table(head, rows)


def _vllm(result: Mapping[str, Any]) -> list[str]:
    lines = []
    for model in dict.fromkeys(row["model"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["model"] == model]
        names = list(rows[0]["ttft_s"])
        lines += [
            f"Time to the first token with {model} and time before the request's first step, medians in s.",
            "",
        ]
        lines += table(
            ("tokens", *names),
            [
                (row["tokens"], *(f"{digits(row['ttft_s'][n])} ({digits(row['wait_s'][n])})" for n in names))
                for row in rows
            ],
        )
        engines = result["engines"][model].items()
        lines += [f"- {name}: {_engine_facts(engine['facts'])}" for name, engine in engines] + [""]
    problems = [f"- {problem}" for problem in result["problems"]] + [""] * bool(result["problems"])
    return lines + problems + _left_out(result)


def _engine_facts(facts: Mapping[str, Any]) -> str:
    return ", ".join(
        [
            f"vLLM {facts['vllm']}",
            f"torch {facts['torch']}",
            facts["worker"]["runner"],
            facts["worker"]["backends"],
            f"CUDA graphs: {facts['worker']['cuda_graphs']}",
            f"{facts['blocks']} blocks of {facts['block_size']}",
            "asynchronous scheduling" if facts["async_scheduling"] else "no asynchronous scheduling",
        ]
    )


def _race(result: Mapping[str, Any]) -> list[str]:
    counts = [(name, f"{count:,}" if name != "seed" else count) for name, count in result["counts"].items()]
    lines = table(("", ""), [*counts, ("problems", len(result["problems"]))])
    return lines + [f"- {problem}" for problem in result["problems"]] + [""] * bool(result["problems"])


def _left_out(result: Mapping[str, Any]) -> list[str]:
    return [f"- left out: {line}" for line in result["left_out"]] + [""] * bool(result["left_out"])


def digits(value: float) -> str:
    """Return three significant digits."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


SECTIONS = {
    "tests": _tests,
    "bench": _bench,
    "profile": _profile,
    "example": _example,
    "vllm": _vllm,
    "race": _race,
}
