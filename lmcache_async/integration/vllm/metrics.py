"""Metrics of the connector: counted by the scheduler and the workers, sent through vLLM, exported by its /metrics.

Each part of a message contains the counts since the previous part and the current values of gauges. Parts are
appended on the way and added up where they are exported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Self, TypeAlias

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from lmcache_async.integration.vllm.load_policy import LoadPolicy
from lmcache_async.integration.vllm.lookup import PromiseCounts
from lmcache_async.integration.vllm.request import Admission
from lmcache_async.logging import LimitedLogger
from lmcache_async.metrics.metrics import Counter, Metrics
from lmcache_async.metrics.samples import Labels, Samples, Value
from lmcache_async.metrics.series import ENGINE_SERIES, PREFIX, SCHEDULER_SERIES, Series

logger = LimitedLogger(logging.getLogger(__name__))

_DECIDED = ("load", "recompute", "partial")
"""Decisions about a hit that are counted."""

_RATE_TOKENS = 1000
"""Prompt length for which the prefill speed is exported."""


class SchedulerMetrics(Metrics):
    """Metrics that the scheduler's thread counts, with a few additions per request.

    Args:
        policy: Decides between loading and recomputation.
        promises: Returns the counts of the promises of producers.
    """

    def __init__(self, policy: LoadPolicy, promises: Callable[[], PromiseCounts]) -> None:
        super().__init__()
        self._policy = policy
        self._promises = promises
        self._late_lookups = self.counter("late_lookups_total")
        self._asked_tokens = self.counter("lookup_asked_tokens_total")
        self._loads = self.counter("loads_total")
        self._failed_loads = self.counter("failed_loads_total")
        self._saved_s = self.counter("prefill_saved_seconds_total")
        for result in ("hit", "miss"):
            self.counter("lookups_total", result)
        for decided in _DECIDED:
            self.counter("decided_total", decided)
        for cause in ("blocks", "keys"):
            self.counter("skipped_chunks_total", cause)
        self._changed = True
        self._promised = 0
        self._taken = Samples()
        self.sources.append(self._add_others)

    def lookup_late(self) -> None:
        """Count a lookup that was late for the first time."""
        self._count(self._late_lookups)

    def skipped(self, cause: str, chunks: int) -> None:
        """Count computed chunks that are not stored."""
        self._count(self.counter("skipped_chunks_total", cause), chunks)

    def load_planned(self) -> None:
        """Count a load."""
        self._count(self._loads)

    def load_failed(self) -> None:
        """Count a load that failed in part or completely."""
        self._count(self._failed_loads)

    def admitted(self, admission: Admission) -> None:
        """Count the lookup of an admitted request."""
        if admission.result is None:
            return
        plan = admission.plan
        self._count(self._asked_tokens, plan.prompt_tokens - plan.local_tokens)
        self._count(self.counter("lookups_total", admission.result))
        if admission.result not in ("hit", "miss"):
            return
        for tier, tokens in admission.hit_by_tier.items():
            self.counter("lookup_hit_tokens_total", tier).add(tokens)
        if plan.decided in _DECIDED:
            self.counter("decided_total", plan.decided).add()

    def load_ended(self, tokens: int, by_tier: Mapping[str, int]) -> None:
        """Count the loaded tokens and the time that computing them would have taken."""
        for tier, loaded in by_tier.items():
            self.counter("load_tokens_total", tier).add(loaded)
        self._count(self._saved_s, self._policy.prefill.seconds(tokens))

    def take(self) -> Samples:
        """Return the changes since the last call. If nothing has changed, the call only compares two numbers."""
        promises = self._promises()
        promised = promises.kept + promises.late + promises.mismatched
        if not self._changed and promised == self._promised:
            return Samples()
        self._changed, self._promised = False, promised
        now = self.read()
        added, self._taken = now.since(self._taken), now
        return added

    def _count(self, counter: Counter, amount: float = 1) -> None:
        counter.add(amount)
        self._changed = True

    def _add_others(self, out: Samples) -> None:
        prefill = self._policy.prefill
        if prefill.known and (seconds := prefill.seconds(_RATE_TOKENS)) > 0:
            out.add("prefill_tokens_per_second", _RATE_TOKENS / seconds)
        promises = self._promises()
        out.add("promises_total", promises.kept, "kept")
        out.add("promises_total", promises.late, "late")
        out.add("promises_total", promises.mismatched, "doubted")


Part: TypeAlias = list[Any]
"""Name of the source, and its samples as returned by `Samples.to_plain`."""

PARTS = "parts"
MAX_PARTS = 64
"""Maximum number of parts in a message. More are merged, because vLLM collects them for ten seconds for its log line."""

_EXPORTED = (*ENGINE_SERIES, *SCHEDULER_SERIES)


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
        return summary(added_up(self.parts))


def compacted(parts: Sequence[Part]) -> list[Part]:
    """Equivalent parts, one per source."""
    by_source: dict[str, Samples] = {}
    for source, plain in parts:
        by_source.setdefault(source, Samples()).update(Samples.from_plain(plain))
    return [[source, samples.to_plain()] for source, samples in by_source.items()]


def added_up(parts: Sequence[Part]) -> Samples:
    """Counters and histograms of all parts together. Gauges have the value of the last part."""
    samples = Samples()
    for _, plain in parts:
        samples.update(Samples.from_plain(plain))
    return samples


def summary(samples: Samples) -> dict[str, int | float]:
    """Return the values of the interval by a short name, for vLLM's log line. Zeros are left out."""
    total = samples.total
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


class LMCacheAsyncPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Our series on vLLM's /metrics, with vLLM's labels before ours. A series that cannot be created is left out."""

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
        for series in _EXPORTED:
            try:
                self._metrics[series.name] = self._made(series)
            except Exception as error:  # noqa: BLE001  # vLLM starts without this series
                name = series.full_name
                logger.report(name, "%s cannot be added to vLLM's metrics: %s", name, error)
        self._children: dict[tuple[int, str, tuple[str, ...]], Any] = {}
        # Last value of each gauge by source, because ranks send only what has changed.
        self._gauges: dict[tuple[int, str, tuple[str, ...]], dict[str, float]] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        try:
            for source, plain in transfer_stats_data.get(PARTS, ()):
                for series, labels, value in Samples.from_plain(plain):
                    if series.name in self._metrics:
                        self._note(source, series, labels, value, engine_idx)
        except Exception:
            # No error of the connector may propagate into vLLM.
            logger.exception("cannot export the metrics of LMCacheAsyncConnector")

    def _made(self, series: Series) -> Any:
        common = {
            "name": series.full_name,
            "documentation": series.help,
            "labelnames": [*self._labelnames, *series.labels],
        }
        match series.kind:
            case "counter":
                return self._counter_cls(**common)
            case "histogram":
                return self._histogram_cls(**common, buckets=list(series.buckets))
            case _:
                return self._gauge_cls(**common, multiprocess_mode="mostrecent")

    def _note(self, source: str, series: Series, labels: Labels, value: Value, engine: int) -> None:
        key = engine, series.name, labels
        child = self._children.get(key)
        if child is None:
            values = [*self.per_engine_labelvalues[engine], *labels]
            child = self._children[key] = self._metrics[series.name].labels(*values)
        if isinstance(value, tuple):
            for observed, count in observations(series.buckets, value[1:], value[0]):
                for _ in range(count):
                    child.observe(observed)
        elif series.kind == "counter":
            child.inc(value)
        else:
            latest = self._gauges.setdefault(key, {})
            latest[source] = value
            child.set(max(latest.values()) if series.merge == "max" else sum(latest.values()))


def observations(
    bounds: Sequence[float], counts: Sequence[float], total: float
) -> Iterator[tuple[float, int]]:
    """Yield values with their numbers of observations, which fall in these buckets and add up to `total`.

    The Prometheus client accepts only single observations. If the counts do not allow `total`, the sum is the nearest
    possible one.
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
            yield value, int(count)
    if above:
        yield max(bounds[-1] * (1 + 1e-9), total / above), int(above)


def _unregister() -> None:
    """Remove the metrics of an earlier engine in this process, as vLLM does with its own."""
    for collector in list(getattr(REGISTRY, "_collector_to_names", ())):
        if str(getattr(collector, "_name", "")).startswith(PREFIX):
            REGISTRY.unregister(collector)
