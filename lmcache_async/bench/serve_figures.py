"""Figures of all rounds, by what was measured and in whom."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import TYPE_CHECKING

from lmcache_async.bench.frame import Row

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from lmcache_async.bench.frame import Parameter

PLAIN = "no connector"
OURS = "lmcache-async"
DISK = "lmcache-async, disk"
RESTARTED = "lmcache-async, disk, restarted"
SLOW = "lmcache-async, slow tier"

OWN_HIT = "own hit"
OWN_HIT_SAME = "own hit, same process"
RAW = "O_DIRECT read of the same files"
FLOOR = "that read, then the own hit"


class Figures:
    """One figure a round of everything that is measured."""

    def __init__(self) -> None:
        self._taken: defaultdict[tuple[str, str], list[float]] = defaultdict(list)

    def note(self, what: str, who: str, *values: float) -> None:
        """A round's figure: the median of what was measured in it."""
        self._taken[what, who].append(statistics.median(values))

    def forget(self, who: str) -> None:
        """All of somebody who is left out."""
        for key in [key for key in self._taken if key[1] == who]:
            del self._taken[key]

    def has(self, what: str, who: str) -> bool:
        return bool(self._taken.get((what, who)))

    def row(
        self,
        name: str,
        unit: str,
        figure: tuple[str, str],
        limit_name: str,
        limit: tuple[str, str],
        parameters: Mapping[str, Parameter],
        more: Mapping[str, tuple[str, str]] | None = None,
    ) -> Row:
        """A figure beside a limit of the same rounds; `more` names further figures, whose medians are told."""
        extra = {
            name: statistics.median(self._taken[key])
            for name, key in (more or {}).items()
            if self._taken.get(key)
        }
        return Row.of(name, unit, self._taken[figure], limit_name, self._taken[limit], parameters, extra)


def rows_of(
    figures: Figures, main: Sequence[str], facts: Mapping[str, Parameter], on_disk: Collection[str] = ()
) -> list[Row]:
    """Every row that there are figures for.

    Args:
        main: Our connector and the peers that took part.
        on_disk: Of these, the peers whose hits came from the disk.
    """
    rows: list[Row] = []

    def add(
        name: str,
        unit: str,
        figure: tuple[str, str],
        limits: Mapping[str, tuple[str, str]],
        more: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        if figures.has(*figure):
            suffix = f", {figure[1]}" if figure[1] in main and figure[1] != OURS else ""
            parameters = {**facts, "connector": figure[1]}
            rows.extend(
                figures.row(f"{name}{suffix}", unit, figure, limit_name, limit, parameters, more)
                for limit_name, limit in limits.items()
                if figures.has(*limit)
            )

    for who in main:
        add("new prompt", "ms", ("cold", who), {PLAIN: ("cold", PLAIN)})
        hit_limits = _own_hits(who)
        if who == OURS:
            hit_limits |= {peer: ("hit", peer) for peer in main if peer not in (OURS, *on_disk)}
        if who in on_disk:
            hit_limits |= _reads(who)
        add("known prompt", "ms", ("hit", who), hit_limits)
    add("new prompt, disk tier", "ms", ("cold", RESTARTED), {PLAIN: ("cold", PLAIN)})
    hit_limits = _own_hits(RESTARTED) | _reads(RESTARTED) | {peer: ("hit", peer) for peer in on_disk}
    add("known prompt, disk tier", "ms", ("hit", RESTARTED), hit_limits)
    after = {OWN_HIT: ("own hit beside restart", PLAIN), PLAIN: ("cold beside restart", PLAIN)}
    add("known prompt, after a restart", "ms", ("restart", RESTARTED), after)
    add("slow tier", "ms", ("known to slow tier", SLOW), {PLAIN: ("cold", PLAIN)}, _slow_more())
    for who in main:
        add("new prompts at once", "tokens/s", ("throughput", who), {PLAIN: ("throughput", PLAIN)})
        gaps = {f"p{100 * part:.0f}": (f"gap {part}", who) for part in (0.5, 0.99)}
        add("mixed load, p95 between tokens", "ms", ("gap 0.95", who), {PLAIN: ("gap 0.95", PLAIN)}, gaps)
        add("mixed load", "tokens/s", ("mixed throughput", who), {PLAIN: ("mixed throughput", PLAIN)})
    return rows


def _own_hits(who: str) -> dict[str, tuple[str, str]]:
    return {OWN_HIT: (OWN_HIT, PLAIN), OWN_HIT_SAME: (OWN_HIT, who)}


def _reads(who: str) -> dict[str, tuple[str, str]]:
    return {RAW: (RAW, who), FLOOR: (FLOOR, who)}


def _slow_more() -> dict[str, tuple[str, str]]:
    return {"loaded_tokens": ("loaded from slow tier", SLOW)}
