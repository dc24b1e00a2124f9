"""`python -m tools.scale [--backends host valkey mooncake]`: the tables of docs/scale.md."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

from tools.scale.backends import BACKENDS, Machines
from tools.scale.costs import BYTES_PER_TOKEN
from tools.scale.load import TRACES, Load
from tools.scale.result import Result, simulate


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    machines = Machines(
        nodes=options.nodes, network_gbit=options.gbit, memory_bytes_per_s=options.memory_gb_s * 1e9
    )
    for name in options.backends:
        results = [
            simulate(
                name, _load(options, engines, tokens), machines, requests=options.requests, seed=options.seed
            )
            for engines in options.engines
            for tokens in options.prompt_tokens
        ]
        sys.stdout.write(f"\n{name}\n\n{table(results)}\n")
    return 0


def table(results: Sequence[Result]) -> str:
    """Format results in Markdown; `-` for an overloaded backend, whose waits grow without limit."""
    kinds = list(results[0].busy)
    lines = [
        "| "
        + " | ".join(["engines", "tokens", "kept s", "hit %", "GB/s in, out", *kinds, "p95 wait s", "first"])
        + " |",
        "|---" * (len(kinds) + 7) + "|",
    ]
    for result in results:
        load, wait_s = result.load, result.wait_s(0.95)
        cells = [
            str(load.engines),
            str(load.prompt_tokens),
            f"{load.kept_s:.0f}",
            f"{100 * load.hits:.0f}",
            f"{load.stored_bytes_per_s / 1e9:.1f}, {load.loaded_bytes_per_s / 1e9:.1f}",
            *(f"{result.busy[kind]:.3f}" for kind in kinds),
            "-" if math.isinf(wait_s) else f"{wait_s:.2f}",
            result.first,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _load(options: argparse.Namespace, engines: int, tokens: int) -> Load:
    return Load(
        engines=engines,
        prompt_tokens=tokens,
        model=options.model,
        trace=options.trace,
        computed_per_s=options.computed,
        chunk_tokens=options.chunk_tokens,
        pool_bytes=options.pool_gb * 1e9,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.scale", description=__doc__)
    parser.add_argument("--backends", nargs="+", choices=list(BACKENDS), default=list(BACKENDS))
    parser.add_argument("--engines", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--prompt-tokens", nargs="+", type=int, default=[4096, 32768, 131072])
    parser.add_argument("--model", choices=list(BYTES_PER_TOKEN), default="8b")
    parser.add_argument("--trace", choices=list(TRACES), default="chat")
    parser.add_argument(
        "--computed", type=float, default=10_000, help="prompt tokens per second that an engine computes"
    )
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--pool-gb", type=float, default=2000)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument(
        "--gbit", type=float, default=25, help="network of each node and of each host with 8 engines"
    )
    parser.add_argument(
        "--memory-gb-s", type=float, default=100, help="total speed of copies in a host's memory"
    )
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    return parser


if __name__ == "__main__":
    sys.exit(main())
