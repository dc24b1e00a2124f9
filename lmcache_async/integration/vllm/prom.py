"""Our series on vLLM's own /metrics, with vLLM's labels before ours."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from lmcache_async.engine.metrics import PREFIX
from lmcache_async.integration.vllm.stats import PARTS, all_series, families_of
from lmcache_async.observability.logging import LimitedLogger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lmcache_async.observability.families import Family, Sample

logger = LimitedLogger(logging.getLogger(__name__))


class LMCacheAsyncPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Made in the process that serves /metrics. What fails here is logged, and a series is missing."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._table = all_series()
        _unregister()
        self._metrics: dict[str, Any] = {}
        for family in self._table.values():
            try:
                self._metrics[family.name] = self._made(family)
            except Exception as error:  # noqa: BLE001  # the border to vLLM: it starts without this series
                logger.report(family.name, "%s is not among vLLM's metrics: %s", family.name, error)
        self._children: dict[tuple[int, str, tuple[str, ...]], Any] = {}
        # Of each gauge what each source told last: ranks tell only what has changed.
        self._gauges: dict[tuple[int, str, tuple[str, ...]], dict[str, float]] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        try:
            for part in transfer_stats_data.get(PARTS, ()):
                for family in families_of(part, self._table):
                    if family.name in self._metrics:
                        for sample in family.samples:
                            self._note(part[0], family, sample, engine_idx)
        except Exception as error:  # the border to vLLM
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
            told = self._gauges.setdefault(key, {})
            told[source] = sample.value
            child.set(max(told.values()) if family.merge == "max" else sum(told.values()))
        else:
            for value, count in observations(family.buckets, sample.counts, sample.value):
                for _ in range(count):
                    child.observe(value)


def observations(bounds: Sequence[float], counts: Sequence[int], total: float) -> Iterator[tuple[float, int]]:
    """Values, and how often each, that lie in these buckets and add up to `total`.

    Prometheus' client takes single observations alone. Where `total` cannot be of such counts, the sum is
    as near to it as they allow.
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
    """Forget the metrics of an engine before this one, as vLLM does with its own."""
    for collector in list(getattr(REGISTRY, "_collector_to_names", ())):
        if str(getattr(collector, "_name", "")).startswith(PREFIX):
            REGISTRY.unregister(collector)
