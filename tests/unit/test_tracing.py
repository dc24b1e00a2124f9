"""Spans of an engine's stores and retrieves, through OpenTelemetry's own SDK."""

import sys
from collections import Counter

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lmcache_async.engine.engine import CacheEngine
from lmcache_async.errors import MissingDependencyError
from lmcache_async.metrics.tracing import TracingInstrument
from lmcache_async.testing.rig import Rig
from lmcache_async.types import RetrieveReport, StoreReport

TOKENS = list(range(100, 140))  # 40 tokens: 5 chunks of 8
SLOTS = list(range(40))
NOW = 1_700_000_000_000_000_000


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter):
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider
    provider.shutdown()


async def test_a_store_and_a_retrieve_are_spans_under_their_callers(provider, exporter):
    rig = Rig()
    tracer = provider.get_tracer("caller")
    async with CacheEngine.open(
        rig.config(), layout=rig.layout, namespace=rig.namespace, instrument=TracingInstrument(provider)
    ) as engine:
        with tracer.start_as_current_span("request") as caller:
            await engine.store(TOKENS, SLOTS)
            await engine.retrieve([*TOKENS, 1, 2, 3, 4, 5, 6, 7, 8], list(range(48)))

    spans = {span.name: span for span in exporter.get_finished_spans()}
    store, retrieve = spans["lmcache_async.store"], spans["lmcache_async.retrieve"]
    assert store.parent.span_id == retrieve.parent.span_id == caller.get_span_context().span_id
    assert store.attributes["lmcache_async.tokens"] == 40
    assert retrieve.attributes["lmcache_async.hit_tokens"] == 40
    assert retrieve.attributes["lmcache_async.asked_tokens"] == 48
    assert retrieve.attributes["lmcache_async.ended_by"] == "miss"
    [hit] = retrieve.events
    assert dict(hit.attributes) == {"lmcache_async.tier": "cpu", "lmcache_async.tokens": 40}
    copy, write = spans["lmcache_async.store.copy"], spans["lmcache_async.store.write"]
    assert copy.parent.span_id == write.parent.span_id == store.context.span_id
    assert store.start_time == copy.start_time <= copy.end_time == write.start_time
    assert write.end_time == store.end_time


def test_spans_have_the_times_of_the_reports(provider, exporter):
    instrument = TracingInstrument(provider, clock_ns=lambda: NOW)

    instrument.stored("r1", StoreReport(seconds=2.0, copy_seconds=0.5, dropped=Counter(deadline=3)))
    instrument.retrieved("r2", RetrieveReport(seconds=0.25))

    copy, write, store, retrieve = exporter.get_finished_spans()
    assert (store.start_time, store.end_time) == (NOW - 2_000_000_000, NOW)
    assert copy.end_time == write.start_time == NOW - 1_500_000_000
    assert dict(store.events[0].attributes) == {"lmcache_async.cause": "deadline", "lmcache_async.chunks": 3}
    assert retrieve.start_time == NOW - 250_000_000
    assert retrieve.attributes["lmcache_async.ended_by"] == "complete"
    assert (store.attributes["gen_ai.request.id"], retrieve.attributes["gen_ai.request.id"]) == ("r1", "r2")


async def test_without_the_package_an_engine_starts_unless_the_config_asks_for_tracing(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)

    async with Rig().open():
        pass

    with pytest.raises(MissingDependencyError, match=r"tracing\.enabled needs.*lmcache-async\[otel\]"):
        async with Rig().open(**{"tracing.enabled": True}):
            pass
