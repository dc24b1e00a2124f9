"""Metrics of the connector: counted by the scheduler and the workers, sent through vLLM, exported by its /metrics.

Each part of a message says what was counted since the part before it, and the current value of gauges. On the way
parts are only appended; they are added up where they are exported.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from lmcache_async.engine.metrics import PREFIX, SERIES
from lmcache_async.integration.vllm.events import split_tokens
from lmcache_async.observability.families import Family, Filling, Sample, merged, since
from lmcache_async.observability.logging import LimitedLogger

if TYPE_CHECKING:
    from typing import Self

    from lmcache_async.integration.vllm.load_policy import LoadPolicy
    from lmcache_async.integration.vllm.lookup import PromiseCounts
    from lmcache_async.integration.vllm.request import Admission

logger = LimitedLogger(logging.getLogger(__name__))

_P = "lmcache_async_"

SCHEDULER_SERIES = (
    Family(
        f"{_P}lookups_total",
        "counter",
        "Lookups of admitted requests: hit: tiers had more than vLLM itself; miss; late: no answer in time;"
        " unneeded: vLLM had it all before the answer came.",
        ("result",),
    ),
    Family(f"{_P}late_lookups_total", "counter", "Lookups whose answer was late at least once."),
    Family(f"{_P}lookup_asked_tokens_total", "counter", "Tokens of admitted requests that vLLM did not have itself."),
    Family(f"{_P}lookup_hit_tokens_total", "counter", "Of these, tokens that the tier had.", ("tier",)),
    Family(f"{_P}load_tokens_total", "counter", "Of these, tokens that were loaded and not computed.", ("tier",)),
    Family(
        f"{_P}decided_total",
        "counter",
        "Hits by what was sooner: load, recompute, or partial (load up to where a slower tier begins).",
        ("decided",),
    ),
    Family(f"{_P}loads_total", "counter", "Loads that were planned."),
    Family(f"{_P}failed_loads_total", "counter", "Loads that failed in part or whole; vLLM computed instead."),
    Family(
        f"{_P}skipped_chunks_total",
        "counter",
        "Computed chunks at the end of requests that were not stored, by cause: blocks (vllm.max_pinned_fraction was reached) or keys (hashing took too long).",
        ("cause",),
    ),
    Family(
        f"{_P}prefill_saved_seconds_total",
        "counter",
        "What computing the loaded tokens would have taken, by the prefill speed measured so far.",
    ),
    Family(f"{_P}prefill_tokens_per_second", "gauge", "How fast the model computes prompts, as measured or configured."),
    Family(
        f"{_P}promises_total",
        "counter",
        "Promises of producers: kept; late: not kept in time; doubted: not of this request.",
        ("became",),
    ),
)  # fmt: skip


_RATE_TOKENS = 1000
"""Prompt length for which the prefill speed is exported."""


@dataclass(slots=True)
class _LoadTokens:
    asked: int
    local: int
    hit: int
    tiers: dict[str, int]


class SchedulerMetrics:
    """Counts of the scheduler's thread, a few additions per request.

    Attributes:
        late_lookups: Lookups that were late at least once.
        loads: Loads planned.
        failed_loads: Loads that failed in part or whole.
        skipped_chunks: Computed chunks that are not stored, by cause.
    """

    def __init__(self) -> None:
        self.late_lookups = 0
        self.loads = 0
        self.failed_loads = 0
        self.skipped_chunks: Counter[str] = Counter()
        self.lookups: Counter[str] = Counter()
        self.asked_tokens = 0
        self.hit_tokens: Counter[str] = Counter()
        self.loaded_tokens: Counter[str] = Counter()
        self.saved_s = 0.0
        self._loading: dict[str, _LoadTokens] = {}
        self._changes = 0
        self._sent: tuple[tuple[int, ...], list[Family]] = ((), [])

    def admitted(self, admission: Admission) -> None:
        if admission.result is None:
            return
        self._changes += 1
        asked, local = admission.asked_tokens, admission.local_tokens
        self.asked_tokens += asked - local
        self.lookups[admission.result] += 1
        if admission.result not in ("hit", "miss"):
            return
        hit = max(0, min(admission.hit_tokens, asked) - local)
        self.hit_tokens.update(split_tokens(admission.tiers, hit))
        if admission.load_tokens:
            tiers = split_tokens(admission.tiers, admission.load_tokens)
            self._loading[admission.request_id] = _LoadTokens(
                asked, local, local + admission.load_tokens, tiers
            )

    def load_ended(self, request_id: str, policy: LoadPolicy, *, failed: bool) -> None:
        load = self._loading.pop(request_id, None)
        if load is None or failed:
            return
        self._changes += 1
        self.loaded_tokens.update(load.tiers)
        seconds = policy.prefill.seconds
        if policy.prefill.known:
            self.saved_s += max(0.0, seconds(load.asked - load.local) - seconds(load.asked - load.hit))

    def changed(self, policy: LoadPolicy, promises: PromiseCounts) -> list[Family]:
        """What was counted since the last call. If that is nothing, only a few numbers are compared."""
        version = (
            self._changes,
            policy.counts.total(),
            self.late_lookups,
            self.loads,
            self.failed_loads,
            self.skipped_chunks.total(),
            promises.kept + promises.late + promises.doubted,
        )
        former, sent = self._sent
        if version == former:
            return []
        now = self._families(policy, promises)
        self._sent = version, now
        return since(now, sent)

    def _families(self, policy: LoadPolicy, promises: PromiseCounts) -> list[Family]:
        out = Filling(SCHEDULER_SERIES)
        for result, count in {"hit": 0, "miss": 0, **self.lookups}.items():
            out.put(f"{_P}lookups_total", count, result)
        out.put(f"{_P}late_lookups_total", self.late_lookups)
        out.put(f"{_P}lookup_asked_tokens_total", self.asked_tokens)
        for tier, tokens in self.hit_tokens.items():
            out.put(f"{_P}lookup_hit_tokens_total", tokens, tier)
        for tier, tokens in self.loaded_tokens.items():
            out.put(f"{_P}load_tokens_total", tokens, tier)
        for decided, count in {"load": 0, "recompute": 0, "partial": 0, **policy.counts}.items():
            out.put(f"{_P}decided_total", count, decided)
        out.put(f"{_P}loads_total", self.loads)
        out.put(f"{_P}failed_loads_total", self.failed_loads)
        for cause in ("blocks", "keys"):
            out.put(f"{_P}skipped_chunks_total", self.skipped_chunks[cause], cause)
        out.put(f"{_P}prefill_saved_seconds_total", self.saved_s)
        if policy.prefill.known and (seconds := policy.prefill.seconds(_RATE_TOKENS)) > 0:
            out.put(f"{_P}prefill_tokens_per_second", _RATE_TOKENS / seconds)
        for became in ("kept", "late", "doubted"):
            out.put(f"{_P}promises_total", getattr(promises, became), became)
        return out.families()


Part: TypeAlias = list[Any]
"""The source, and by series name its samples: [labels, value, bucket counts]."""

PARTS = "parts"
MAX_PARTS = 64
"""More parts are added up: vLLM collects them for ten seconds for a line of its log."""

ALL_SERIES: Mapping[str, Family] = {family.name: family for family in (*SERIES, *SCHEDULER_SERIES)}
"""Every series that is sent, by name."""


def part_of(source: str, families: Iterable[Family]) -> Part:
    """The samples without help texts and bucket bounds, which the receiver has in its own table."""
    return [
        source,
        {
            family.name: [[list(s.labels), s.value, list(s.counts)] for s in family.samples]
            for family in families
        },
    ]


def families_of(part: Sequence[Any]) -> Iterator[Family]:
    """The families of a part. Series that are not in the table, of another version, are dropped."""
    for name, samples in part[1].items():
        if (family := ALL_SERIES.get(name)) is not None:
            yield replace(
                family, samples=tuple(Sample(tuple(labels), value, tuple(c)) for labels, value, c in samples)
            )


class LMCacheAsyncStats(KVConnectorStats):  # type: ignore[misc]
    """The message that vLLM forwards. `data` contains only lists, strings and numbers."""

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
        """A few numbers of this interval for vLLM's log line."""
        return summary(merged_counts(self.parts))


def compacted(parts: Sequence[Part]) -> list[Part]:
    """Equivalent parts, one per source."""
    found = []
    for source in dict.fromkeys(part[0] for part in parts):
        mine = [list(families_of(part)) for part in parts if part[0] == source]
        found.append(part_of(source, [*merged(map(_counted, mine)), *_latest(mine)]))
    return found


def merged_counts(parts: Sequence[Part]) -> dict[str, Family]:
    """Counters and histograms of all parts, by name."""
    return {f.name: f for f in merged(_counted(families_of(part)) for part in parts)}


def summary(counted: Mapping[str, Family]) -> dict[str, int | float]:
    """Short names, as in vLLM's log line, and values of the interval. Zeros are left out."""

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
    """The gauges of one source, each with its last value."""
    found: dict[str, tuple[Family, dict[tuple[str, ...], Sample]]] = {}
    for family in (family for group in groups for family in group if family.kind == "gauge"):
        _, samples = found.setdefault(family.name, (family, {}))
        samples.update({sample.labels: sample for sample in family.samples})
    return [replace(family, samples=tuple(samples.values())) for family, samples in found.values()]


class LMCacheAsyncPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Our series on vLLM's /metrics, with vLLM's labels before ours. A failure is logged and a series is missing."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        _unregister()
        self._metrics: dict[str, Any] = {}
        for family in ALL_SERIES.values():
            try:
                self._metrics[family.name] = self._made(family)
            except Exception as error:  # noqa: BLE001  # vLLM starts without this series
                logger.report(family.name, "%s cannot be added to vLLM's metrics: %s", family.name, error)
        self._children: dict[tuple[int, str, tuple[str, ...]], Any] = {}
        # Last value of each gauge by source, because ranks send only what has changed.
        self._gauges: dict[tuple[int, str, tuple[str, ...]], dict[str, float]] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        try:
            for part in transfer_stats_data.get(PARTS, ()):
                for family in families_of(part):
                    if family.name in self._metrics:
                        for sample in family.samples:
                            self._note(part[0], family, sample, engine_idx)
        except Exception as error:  # nothing of ours is raised into vLLM
            cause = f"{type(error).__name__}: {error}"
            logger.log(logging.ERROR, cause, "metrics of LMCacheAsyncConnector: %s", cause, exc_info=True)

    def _made(self, family: Family) -> Any:
        labels = [*self._labelnames, *family.labels]
        match family.kind:
            case "counter":
                return self._counter_cls(name=family.name, documentation=family.help, labelnames=labels)
            case "histogram":
                return self._histogram_cls(
                    name=family.name,
                    documentation=family.help,
                    labelnames=labels,
                    buckets=list(family.buckets),
                )
            case _:
                return self._gauge_cls(
                    name=family.name,
                    documentation=family.help,
                    labelnames=labels,
                    multiprocess_mode="mostrecent",
                )

    def _note(self, source: str, family: Family, sample: Sample, engine: int) -> None:
        key = engine, family.name, sample.labels
        child = self._children.get(key)
        if child is None:
            values = [*self.per_engine_labelvalues[engine], *sample.labels]
            child = self._children[key] = self._metrics[family.name].labels(*values)
        if family.kind == "counter":
            child.inc(sample.value)
        elif family.kind == "gauge":
            latest = self._gauges.setdefault(key, {})
            latest[source] = sample.value
            child.set(max(latest.values()) if family.merge == "max" else sum(latest.values()))
        else:
            for value, count in observations(family.buckets, sample.counts, sample.value):
                for _ in range(count):
                    child.observe(value)


def observations(bounds: Sequence[float], counts: Sequence[int], total: float) -> Iterator[tuple[float, int]]:
    """Values, and how often to observe each, that fall in these buckets and add up to `total`.

    Prometheus' client accepts only single observations. If `total` does not fit the counts, the sum is as near to
    it as they allow.
    """
    edges = list(pairwise((0.0, *bounds)))
    least = sum(count * low for count, (low, _) in zip(counts, edges, strict=False))
    width = sum(count * (high - low) for count, (low, high) in zip(counts, edges, strict=False))
    above = counts[-1]
    rest = total - above * bounds[-1] - least
    share = min(0.5 if above else 1.0, max(1e-9, rest / width)) if width else 0.0
    for count, (low, high) in zip(counts, edges, strict=False):
        if count:
            value = min(high, low + share * (high - low))
            total -= count * value
            yield value, count
    if above:
        yield max(bounds[-1] * (1 + 1e-9), total / above), above


def _unregister() -> None:
    """Remove the metrics of a former engine in this process, as vLLM does with its own."""
    for collector in list(getattr(REGISTRY, "_collector_to_names", ())):
        if str(getattr(collector, "_name", "")).startswith(PREFIX):
            REGISTRY.unregister(collector)
