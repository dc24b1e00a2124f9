"""Metrics on their way through vLLM: from ranks and scheduler to the process that serves /metrics.

Each part says what was counted since the part before it, and where a gauge stands now. Parts are only put
one after the other on the way; they are read where they are shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from lmcache_async.observability.families import Family, Sample, merged

if TYPE_CHECKING:
    from typing import Self

Part: TypeAlias = list[Any]
"""Where it is from, and by a series' name its samples: [labels, value, counts]."""

PARTS = "parts"
MAX_PARTS = 64
"""More are added up: vLLM collects them for ten seconds for a line of its log."""


def part_of(source: str, families: Iterable[Family]) -> Part:
    """What travels. Who reads it has the same table, so neither help nor buckets go along."""
    return [
        source,
        {
            family.name: [[list(s.labels), s.value, list(s.counts)] for s in family.samples]
            for family in families
        },
    ]


def families_of(part: Sequence[Any], table: Mapping[str, Family]) -> Iterator[Family]:
    """As families again; what the table does not have, of another version of ours, is left out."""
    for name, samples in part[1].items():
        if (family := table.get(name)) is not None:
            yield replace(
                family, samples=tuple(Sample(tuple(labels), value, tuple(c)) for labels, value, c in samples)
            )


def all_series() -> dict[str, Family]:
    """Everything that travels, by name. Imported here and not above: the scheduler needs no engine."""
    from lmcache_async.engine.metrics import SERIES
    from lmcache_async.integration.vllm.accounts import SCHEDULER_SERIES

    return {family.name: family for family in (*SERIES, *SCHEDULER_SERIES)}


class LMCacheAsyncStats(KVConnectorStats):  # type: ignore[misc]
    """What vLLM carries; `data` is lists, texts and numbers alone."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or {PARTS: []})

    @property
    def parts(self) -> list[Part]:
        found: list[Part] = self.data.setdefault(PARTS, [])
        return found

    def reset(self) -> None:
        self.data: dict[str, Any] = {PARTS: []}

    def is_empty(self) -> bool:
        return not self.parts

    def aggregate(self, other: KVConnectorStats) -> Self:
        parts = self.parts + other.data.get(PARTS, [])
        self.data = {PARTS: parts if len(parts) <= MAX_PARTS else compacted(parts)}
        return self

    def reduce(self) -> dict[str, int | float]:
        """A few numbers for vLLM's log line: what came and went in this interval."""
        return summary(merged_counts(self.parts))


def compacted(parts: Sequence[Part]) -> list[Part]:
    """One part of each source, which says the same."""
    table = all_series()
    found = []
    for source in dict.fromkeys(part[0] for part in parts):
        mine = [list(families_of(part, table)) for part in parts if part[0] == source]
        found.append(part_of(source, [*merged(map(_counted, mine)), *_latest(mine)]))
    return found


def merged_counts(parts: Sequence[Part]) -> dict[str, Family]:
    """All that was counted, by name."""
    table = all_series()
    return {f.name: f for f in merged(_counted(families_of(part, table)) for part in parts)}


def summary(counted: Mapping[str, Family]) -> dict[str, int | float]:
    """Names as short as those of vLLM's own, values of the interval; zeros are left out."""

    def total(name: str) -> float:
        family = counted.get(f"lmcache_async_{name}")
        return sum(sample.value for sample in family.samples) if family is not None else 0

    load_s, copy_s = total("retrieve_seconds"), total("store_copy_seconds")
    load_bytes, store_bytes = total("retrieve_bytes_total"), total("store_bytes_total")
    numbers = {
        "loaded tokens": total("retrieve_hit_tokens_total"),
        "of": total("retrieve_asked_tokens_total"),
        "loaded GB": round(load_bytes / 1e9, 3),
        "load GB/s": round(load_bytes / load_s / 1e9, 2) if load_s else 0,
        "stored tokens": total("stored_tokens_total"),
        "stored GB": round(store_bytes / 1e9, 3),
        "store copy GB/s": round(store_bytes / copy_s / 1e9, 2) if copy_s else 0,
        "dropped chunks": total("dropped_chunks_total"),
        "corrupt records": total("corrupt_records_total"),
        "late lookups": total("late_lookups_total"),
        "prefill seconds saved": round(total("prefill_saved_seconds_total"), 2),
    }
    return {name: value for name, value in numbers.items() if value}


def _counted(families: Iterable[Family]) -> list[Family]:
    return [family for family in families if family.kind != "gauge"]


def _latest(groups: Iterable[Iterable[Family]]) -> list[Family]:
    """The gauges of one source, each sample as it was told last."""
    found: dict[str, tuple[Family, dict[tuple[str, ...], Sample]]] = {}
    for family in (family for group in groups for family in group if family.kind == "gauge"):
        _, samples = found.setdefault(family.name, (family, {}))
        samples.update({sample.labels: sample for sample in family.samples})
    return [replace(family, samples=tuple(samples.values())) for family, samples in found.values()]
