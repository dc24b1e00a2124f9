"""`python -m tools.scale.reuse FILE...`: reuse of prefixes in recorded traces.

Two formats are read: Mooncake's (a line per request, blocks of 512 tokens) and kv-cache-tester's (a file per session,
blocks of 64 tokens with ids that are local to the session). Both may be compressed with gzip.

Prints lengths; the share of prompt tokens that repeat a prefix if all blocks are kept; that share if a block is kept
for a number of seconds after its last use; and that share in a pool of a number of blocks with LRU eviction, suffixes
before prefixes.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POOLS = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5)
"""Pool sizes, as shares of all blocks of a trace."""
KEPT_S = (10, 30, 60, 120, 300, 600, 1200, 3600)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of a trace. Two blocks are equal if all tokens up to their ends are."""

    at_s: float
    tokens: int
    block_tokens: int
    blocks: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Reuse:
    """Reuse of a trace.

    Attributes:
        repeated: Share of prompt tokens that repeat a prefix.
        kept: That share, by the seconds that a block is kept.
    """

    requests: int
    mean_tokens: float
    median_tokens: int
    p90_tokens: int
    repeated: float
    kept: Mapping[int, float]


def read(path: Path) -> Iterator[Request]:
    """Yield the requests of a file in order."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as file:
        if ".jsonl" in path.suffixes:
            for line in file:
                row = json.loads(line)
                yield Request(row["timestamp"] / 1e3, row["input_length"], 512, tuple(row["hash_ids"]))
            return
        session = json.load(file)
    for row in _flat(session["requests"]):
        blocks = tuple((path.name, number) for number in row.get("hash_ids", ()))
        yield Request(row["t"], row["in"], session["block_size"], blocks)


def _flat(rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for row in rows:
        if row["type"] == "subagent":
            yield from _flat(row["requests"])
        else:
            yield row


def reuse(requests: Sequence[Request], kept_s: Sequence[int] = KEPT_S) -> Reuse:
    """Compute the reuse of requests in order of time.

    Raises:
        ValueError: There are no requests.
    """
    if not requests:
        raise ValueError("no requests")
    last: dict[object, float] = {}
    repeated = 0
    kept = dict.fromkeys(kept_s, 0)
    for request in requests:
        oldest = 0.0  # longest time since the last use of any block of the prefix so far
        left = request.tokens
        for block in request.blocks:
            if block not in last:
                break
            oldest = max(oldest, request.at_s - last[block])
            tokens = min(request.block_tokens, left)
            left -= tokens
            repeated += tokens
            for seconds in kept_s:
                kept[seconds] += tokens * (oldest <= seconds)
        last.update(dict.fromkeys(request.blocks, request.at_s))
    lengths = sorted(request.tokens for request in requests)
    total = max(sum(lengths), 1)
    return Reuse(
        requests=len(lengths),
        mean_tokens=total / len(lengths),
        median_tokens=lengths[len(lengths) // 2],
        p90_tokens=lengths[len(lengths) * 9 // 10],
        repeated=repeated / total,
        kept={seconds: tokens / total for seconds, tokens in kept.items()},
    )


def pooled(requests: Iterable[Request], blocks: int) -> float:
    """Return the share of prompt tokens that is found in a pool of `blocks` blocks."""
    pool: OrderedDict[object, None] = OrderedDict()
    found = total = 0
    for request in requests:
        there = next((i for i, block in enumerate(request.blocks) if block not in pool), len(request.blocks))
        found += min(there * request.block_tokens, request.tokens)
        total += request.tokens
        for block in reversed(request.blocks):
            pool[block] = None
            pool.move_to_end(block)
        while len(pool) > blocks:
            pool.popitem(last=False)
    return found / max(total, 1)


def main(paths: Sequence[str]) -> int:
    requests = sorted((r for path in paths for r in read(Path(path))), key=lambda request: request.at_s)
    found = reuse(requests)
    print(  # noqa: T201
        f"{found.requests} requests, tokens: mean {found.mean_tokens:.0f}, median {found.median_tokens}, "
        f"90 % {found.p90_tokens}; repeated {found.repeated:.3f}"
    )
    for seconds, share in found.kept.items():
        print(f"{seconds:>6} s kept: {share:.3f}, {share / max(found.repeated, 1e-9):.2f} of it")  # noqa: T201
    blocks = len({block for request in requests for block in request.blocks})
    for share in POOLS:
        tokens = share * blocks * requests[0].block_tokens
        left = pooled(requests, round(share * blocks))
        print(f"{tokens / 1e6:>6.1f} M tokens of pool: {left:.3f}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
