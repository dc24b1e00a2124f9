"""OpenTelemetry spans of stores and retrieves, made from their reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lmcache_async.errors import MissingDependencyError
from lmcache_async.metrics.instrument import Instrument
from lmcache_async.types import RetrieveReport, StoreReport

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

PREFIX = "lmcache_async."
REQUEST_ID = "gen_ai.request.id"
"""Attribute that vLLM's own spans have too, so that a trace store can join both."""


class TracingInstrument(Instrument):
    """Makes a span for each store and each retrieve, with children or events for its parts.

    If the caller is in a span, the new span is its child. The tracer provider decides which spans are exported.
    Without a provider in the process a span costs a few microseconds and is dropped.
    """

    def __init__(
        self, provider: TracerProvider | None = None, *, clock_ns: Callable[[], int] = time.time_ns
    ) -> None:
        try:
            from opentelemetry import trace
        except ImportError as error:
            raise MissingDependencyError(
                "tracing.enabled needs OpenTelemetry: pip install 'lmcache-async[otel]'"
            ) from error
        self._trace = trace
        self._tracer = trace.get_tracer("lmcache_async", tracer_provider=provider)
        self._clock_ns = clock_ns

    def stored(self, request_id: str, report: StoreReport) -> None:
        end = self._clock_ns()
        start = end - _ns(report.seconds)
        copied = min(end, start + _ns(report.copy_seconds))
        span = self._begin(
            "store",
            start,
            request_id,
            stored_chunks=report.stored,
            shared_chunks=report.shared,
            present_chunks=report.present,
            tokens=report.tokens,
            bytes=report.bytes,
        )
        for cause, chunks in report.dropped.items():
            span.add_event("dropped", {f"{PREFIX}cause": cause, f"{PREFIX}chunks": chunks}, end)
        if span.is_recording():
            self._child(span, "store.copy", start, copied)
            self._child(span, "store.write", copied, end)
        span.end(end)

    def retrieved(self, request_id: str, report: RetrieveReport) -> None:
        end = self._clock_ns()
        span = self._begin(
            "retrieve",
            end - _ns(report.seconds),
            request_id,
            asked_tokens=report.asked_tokens,
            hit_tokens=report.hit_tokens,
            hit_chunks=report.hit_chunks,
            bytes=report.bytes,
            ended_by=report.cause or "complete",
        )
        for tier, tokens in report.by_tier.items():
            span.add_event("hit", {f"{PREFIX}tier": tier, f"{PREFIX}tokens": tokens}, end)
        span.end(end)

    def _begin(self, name: str, start: int, request_id: str, **attributes: str | int) -> Any:
        values: dict[str, str | int] = {f"{PREFIX}{key}": value for key, value in attributes.items()}
        if request_id:
            values[REQUEST_ID] = request_id
        return self._tracer.start_span(PREFIX + name, attributes=values, start_time=start)

    def _child(self, parent: Any, name: str, start: int, end: int) -> None:
        context = self._trace.set_span_in_context(parent)
        self._tracer.start_span(PREFIX + name, context=context, start_time=start).end(end)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
