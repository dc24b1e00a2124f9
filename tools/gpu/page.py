"""The Markdown page of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    head += ["time of compute beside it", "the same beside a plain copy: ratio", "pieces", *kinds]
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
        cells += [f"{row['compute_slowdown']:.3f}", f"{row['compute_slowdown_to_plain_copy']:.3f}"]
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
        "KV bit-equal",
        "logits differ by",
    )
    rows = [
        (
            row["tokens"],
            digits(row["kv_bytes"] / 2**20),
            digits(row["prefill_s"]),
            f"{digits(row['memory_s'])} ({digits(row['prefill_s'] / row['memory_s'])}x)",
            f"{digits(row['disk_s'])} ({digits(row['prefill_s'] / row['disk_s'])}x)",
            "yes" if row["kv_equal"] else "NO",
            f"{100 * row['difference']:.2f} %",
        )
        for row in result["rows"]
    ]
    return table(head, rows)


def _race(result: Mapping[str, Any]) -> list[str]:
    counts = [(name, f"{count:,}" if name != "seed" else count) for name, count in result["counts"].items()]
    lines = table(("", ""), [*counts, ("problems", len(result["problems"]))])
    return lines + [f"- {problem}" for problem in result["problems"]] + [""] * bool(result["problems"])


def _left_out(result: Mapping[str, Any]) -> list[str]:
    return [f"- left out: {line}" for line in result["left_out"]] + [""] * bool(result["left_out"])


def digits(value: float) -> str:
    """Return three significant digits."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


SECTIONS = {"tests": _tests, "bench": _bench, "profile": _profile, "example": _example, "race": _race}
