"""`make torture`: campaigns of faults, damage and kills. No wrong byte may be served and nothing may leak."""

from __future__ import annotations

import json
import platform
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from tools.torture import churn, flips, fuzz, hosts, kill, simulate, traffic, vllm
from tools.torture.options import Options, parse
from tools.torture.outcome import Outcome

CAMPAIGNS: Mapping[str, Callable[[Options], Outcome]] = {
    "kill": lambda o: kill.run(kills=o.kills, seconds=o.seconds, seed=o.seed),
    "flips": lambda o: flips.run(damages=o.damages, seconds=o.seconds, seed=o.seed),
    "simulate": lambda o: simulate.run(operations=o.simulated, seconds=o.seconds, seed=o.seed),
    "fuzz": lambda o: fuzz.run(seconds=o.seconds or o.fuzz_seconds),
    "hosts": lambda o: hosts.run(seconds=o.seconds, seed=o.seed),
    "vllm": lambda o: vllm.run(questions=o.questions, seconds=o.seconds, seed=o.seed),
    "traffic": lambda o: traffic.run(requests=o.requests, seconds=o.seconds, seed=o.seed),
    "churn": lambda o: churn.run(operations=o.operations, seconds=o.seconds or o.churn_seconds, seed=o.seed),
}


def table(outcomes: list[Outcome]) -> str:
    """Format a block per campaign: counts and problems."""
    lines = []
    for outcome in outcomes:
        verdict = f"{len(outcome.problems)} PROBLEMS" if outcome.failed else "no problem"
        lines.append(f"\n{outcome.name:<10} {verdict}, {outcome.seconds:.0f} s")
        for what, count in outcome.counts.items():
            value = f"{count:,}" if isinstance(count, int | float) and what != "seed" else str(count)
            lines.append(f"  {value:>14}  {what}")
        lines += [f"  PROBLEM: {problem}" for problem in outcome.problems]
    return "\n".join(lines)


def run(name: str, options: Options) -> Outcome:
    """Run a campaign. An exception is a problem of it; the next campaign runs nevertheless."""
    begin = time.monotonic()
    try:
        return CAMPAIGNS[name](options)
    except Exception:  # noqa: BLE001 - the border of the program
        outcome = Outcome(name, {"seed": options.seed}, seconds=round(time.monotonic() - begin, 1))
        outcome.problem(f"the campaign itself failed:\n{traceback.format_exc()}")
        return outcome


def save(path: Path, options: Options, outcomes: list[Outcome]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    results = [
        {
            "campaign": outcome.name,
            "seconds": outcome.seconds,
            "counts": outcome.counts,
            "problems": outcome.problems,
        }
        for outcome in outcomes
    ]
    machine = {"python": platform.python_version(), "system": platform.platform()}
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    data = {"ended": when, "machine": machine, "options": asdict(options), "results": results}
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    chosen, options, path = parse(list(CAMPAIGNS))
    sys.stderr.write(f"seed {options.seed}: {', '.join(chosen)}\n")
    outcomes: list[Outcome] = []
    for name in chosen:
        outcomes.append(run(name, options))
        save(path, options, outcomes)  # after each, so that an interrupted run keeps its results
    sys.stdout.write(table(outcomes) + f"\n\nresults: {path}\n")
    return 1 if any(outcome.failed for outcome in outcomes) else 0


if __name__ == "__main__":
    raise SystemExit(main())
