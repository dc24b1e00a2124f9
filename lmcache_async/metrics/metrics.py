"""The metrics of an engine. Its events are counted only here.

Prometheus, vLLM, the status page and `lmcache-async top` read this object. Everything runs on the engine's loop.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as Counts
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from lmcache_async.metrics.instrument import Instrument
from lmcache_async.metrics.samples import Labels, Samples, Value
from lmcache_async.metrics.series import CALL_BUCKETS_S, SERIES
from lmcache_async.types import RequestPlan, RetrieveReport, StoreReport

MAX_PLANNED = 4096
"""Requests whose plan is remembered, so that their loads do not count their prompts again."""

_TIER_EVENTS = {
    "tier_hit_chunks_total": "hits",
    "tier_stored_chunks_total": "stored",
    "tier_promoted_chunks_total": "promoted",
    "tier_dropped_chunks_total": "dropped",
    "tier_errors_total": "errors",
    "corrupt_records_total": "corrupt",
}
"""Series included in `EngineMetrics.tier_counts`, and their names there."""


class Counter:
    """A value of a counter or a gauge."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def add(self, amount: float = 1) -> None:
        self.value += amount

    def read(self) -> Value:
        return self.value


class Histogram:
    """Observations by bucket, not cumulative; the last of `counts` counts those above all bounds."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.sum = 0.0
        self.counts = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        self.sum += value
        self.counts[bisect_left(self._bounds, value)] += 1

    def read(self) -> Value:
        return (self.sum, *self.counts)


@dataclass(slots=True)
class CallMetrics:
    """Calls of one method of a tier."""

    calls: int = 0
    in_flight: int = 0
    cancelled: int = 0  # of `calls`, cancelled at a deadline or by their caller
    chunks: int = 0
    found: int = 0  # by lookups, reads and removals
    bytes: int = 0
    errors: Counts[str] = field(default_factory=Counts)  # failed calls and chunks of batches, by class
    seconds: float = 0.0
    latency: list[int] = field(default_factory=lambda: [0] * (len(CALL_BUCKETS_S) + 1))

    def ended(self, chunks: int, seconds: float) -> None:
        """Count the end of a call of `chunks` chunks."""
        self.in_flight -= 1
        self.calls += 1
        self.chunks += chunks
        self.seconds += seconds
        self.latency[bisect_left(CALL_BUCKETS_S, seconds)] += 1

    def copy(self) -> CallMetrics:
        """Return a snapshot."""
        return replace(self, errors=self.errors.copy(), latency=self.latency.copy())


class Metrics:
    """Counters and histograms of the series in `lmcache_async.metrics.series`.

    Look up a counter once and keep it; counting is then a single addition.

    Attributes:
        sources: Called by `read` to add values that other objects hold, such as sizes and queue lengths.
    """

    def __init__(self) -> None:
        self.sources: list[Callable[[Samples], None]] = []
        self._children: dict[str, dict[Labels, Counter | Histogram]] = {}

    def counter(self, name: str, *labels: str) -> Counter:
        """Return the counter or gauge with these labels. The first call creates it with the value 0."""
        child = self._children.setdefault(name, {}).setdefault(labels, Counter())
        assert isinstance(child, Counter)
        return child

    def histogram(self, name: str, *labels: str) -> Histogram:
        """Return the histogram with these labels. The first call creates it without observations."""
        child = self._children.setdefault(name, {}).setdefault(labels, Histogram(SERIES[name].buckets))
        assert isinstance(child, Histogram)
        return child

    def values(self, name: str) -> dict[Labels, float]:
        """Values of a counter or gauge, by labels."""
        children = self._children.get(name, {}).items()
        return {labels: child.value for labels, child in children if isinstance(child, Counter)}

    def read(self) -> Samples:
        """Return the values of all series."""
        samples = Samples()
        for name, children in self._children.items():
            for labels, child in children.items():
                samples.add(name, child.read(), *labels)
        for source in self.sources:
            source(samples)
        return samples


class EngineMetrics(Metrics, Instrument):
    """Metrics of an engine, of its tiers and of their calls.

    Attributes:
        changed: Called after each store and retrieve.
        prompt_tokens: Tokens of all prompts; of a request without a plan, the tokens of its retrieve.
        local_tokens: Of these, tokens that the inference server had itself.
        decided: Requests by the decision about their hit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.changed: Callable[[], None] = lambda: None
        self.prompt_tokens = 0
        self.local_tokens = 0
        self.decided: Counts[str] = Counts()
        # Hashes of request ids, because clients choose the length of the ids.
        self._planned: OrderedDict[int, None] = OrderedDict()
        self._tiers: dict[str, TierMetrics] = {}
        self.counter("retrieves_total", "complete")
        self.asked_tokens = self.counter("retrieve_asked_tokens_total")
        self.retrieved_bytes = self.counter("retrieve_bytes_total")
        self.retrieve_seconds = self.histogram("retrieve_seconds")
        self.stores = self.counter("stores_total")
        self.stored_chunks = self.counter("stored_chunks_total")
        self.shared_chunks = self.counter("shared_chunks_total")
        self.stored_tokens = self.counter("stored_tokens_total")
        self.present_chunks = self.counter("present_chunks_total")
        self.counter("dropped_chunks_total", "deadline")
        self.stored_bytes = self.counter("store_bytes_total")
        self.store_seconds = self.histogram("store_seconds")
        self.copy_seconds = self.histogram("store_copy_seconds")

    def tier(self, name: str) -> TierMetrics:
        """Return the metrics of a tier."""
        tier = self._tiers.get(name)
        if tier is None:
            tier = self._tiers[name] = TierMetrics(self, name)
        return tier

    def tier_counts(self) -> Counts[str]:
        """Return the events of all tiers by "<tier id>.<event>", with ".<cause>" where there is one."""
        return Counts(
            {
                ".".join((tier, event, *cause[:1])): int(value)
                for name, event in _TIER_EVENTS.items()
                for (tier, *cause), value in self.values(name).items()
                if value
            }
        )

    def stored(self, request_id: str, report: StoreReport) -> None:
        self.stores.value += 1
        self.stored_chunks.value += report.stored
        self.shared_chunks.value += report.shared
        self.stored_tokens.value += report.tokens
        self.present_chunks.value += report.present
        for cause, chunks in report.dropped.items():
            self.counter("dropped_chunks_total", cause).add(chunks)
        self.stored_bytes.value += report.bytes
        self.store_seconds.observe(report.seconds)
        self.copy_seconds.observe(report.copy_seconds)
        self.changed()

    def retrieved(self, request_id: str, report: RetrieveReport) -> None:
        self.counter("retrieves_total", report.cause or "complete").add()
        self.asked_tokens.value += report.asked_tokens
        for tier, tokens in report.by_tier.items():
            self.tier(tier).hit_tokens.add(tokens)
        self.retrieved_bytes.value += report.bytes
        self.retrieve_seconds.observe(report.seconds)
        if hash(request_id) not in self._planned:
            self.prompt_tokens += report.asked_tokens
        self.changed()

    def planned(self, plan: RequestPlan) -> None:
        self.prompt_tokens += plan.prompt_tokens
        self.local_tokens += plan.local_tokens
        self.decided[plan.decided] += 1
        if plan.request_id:
            self._planned[hash(plan.request_id)] = None
            self._planned.move_to_end(hash(plan.request_id))
            if len(self._planned) > MAX_PLANNED:
                self._planned.popitem(last=False)


class TierMetrics:
    """Metrics of one tier."""

    def __init__(self, metrics: EngineMetrics, name: str) -> None:
        self._metrics = metrics
        self._name = name
        self.by_verb: dict[str, CallMetrics] = {}  # calls of the outermost `metrics` layer, by method
        self.hit_tokens = metrics.counter("retrieve_hit_tokens_total", name)
        self.hit_chunks = metrics.counter("tier_hit_chunks_total", name)
        self.stored_chunks = metrics.counter("tier_stored_chunks_total", name)
        self.promoted_chunks = metrics.counter("tier_promoted_chunks_total", name)
        # An alert on an increase needs a first sample of 0.
        metrics.counter("tier_dropped_chunks_total", name, "TierUnavailableError")
        metrics.counter("tier_errors_total", name, "TierUnavailableError")
        metrics.counter("corrupt_records_total", name, "checksum", "verify")
        metrics.sources.append(self._add_calls)

    def written(self, outcomes: Sequence[Exception | None]) -> None:
        """Count the chunks of a write. An outcome is None, or the error of a chunk that was not stored."""
        stored = outcomes.count(None)
        self.stored_chunks.value += stored
        if stored < len(outcomes):
            for error in filter(None, outcomes):
                self.dropped(error)

    def promoted(self, outcomes: Sequence[Exception | None]) -> None:
        """Count the chunks of a promotion that the tier stored. Outcomes as in `written`."""
        self.promoted_chunks.value += outcomes.count(None)

    def dropped(self, error: Exception) -> None:
        """Count a chunk that the tier did not store."""
        self._metrics.counter("tier_dropped_chunks_total", self._name, type(error).__name__).add()

    def failed(self, error: Exception) -> None:
        """Count a failure that was handled as a miss."""
        self._metrics.counter("tier_errors_total", self._name, type(error).__name__).add()

    def corrupt(self, cause: str) -> None:
        """Count a record that failed verification when it was loaded."""
        self._metrics.counter("corrupt_records_total", self._name, cause, "verify").add()

    def calls(self) -> dict[str, CallMetrics]:
        """Return a new table for the calls of the tier by method, to be filled by a layer around it.

        Layers are made from the inside out. The table of the outermost layer is exported.
        """
        self.by_verb = {}
        return self.by_verb

    def _add_calls(self, out: Samples) -> None:
        for verb, call in self.by_verb.items():
            labels = self._name, verb
            out.add("tier_call_seconds", (call.seconds, *call.latency), *labels)
            out.add("tier_calls_in_flight", call.in_flight, *labels)
            out.add("tier_calls_cancelled_total", call.cancelled, *labels)
            out.add("tier_call_chunks_total", call.chunks, *labels)
            out.add("tier_call_found_chunks_total", call.found, *labels)
            out.add("tier_call_bytes_total", call.bytes, *labels)
            for cause, count in call.errors.items():
                out.add("tier_call_errors_total", count, *labels, cause)
