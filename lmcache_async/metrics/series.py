"""Every metric series: name, kind, help text and labels.

docs/metrics.md lists them in the same order and words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Merge: TypeAlias = Literal["sum", "max"]

PREFIX = "lmcache_async_"

REQUEST_BUCKETS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
"""Upper bounds of the buckets of stores and retrieves, in seconds."""

CALL_BUCKETS_S = (
    0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005,
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Upper bounds of the buckets of the calls of tiers, in seconds."""


@dataclass(frozen=True, slots=True)
class Series:
    """Description of a metric series."""

    name: str  # without `PREFIX`; that of a counter ends with `_total`
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # upper bounds of a histogram, without infinity
    merge: Merge = "sum"  # how vLLM's `/metrics` merges a gauge of several ranks

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


def _counter(name: str, text: str, *labels: str) -> Series:
    return Series(f"{name}_total", "counter", text, labels)


def _gauge(name: str, text: str, *labels: str, merge: Merge = "sum") -> Series:
    return Series(name, "gauge", text, labels, merge=merge)


def _histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Series:
    return Series(name, "histogram", text, labels, buckets)


ENGINE_SERIES = (
    # Retrieves and stores
    _counter("retrieves", "Retrieves by the reason for their end; complete: all requested chunks were loaded.", "ended_by"),
    _counter("retrieve_asked_tokens", "Tokens requested by retrieves."),
    _counter("retrieve_hit_tokens", "Tokens loaded by retrieves, by the tier they came from.", "tier"),
    _counter("retrieve_bytes", "Payload bytes copied to the device."),
    _histogram("retrieve_seconds", "Time from the request of a retrieve to the end of its last copy.", REQUEST_BUCKETS_S),
    _counter("stores", "Finished stores."),
    _counter("stored_chunks", "Chunks stored by at least one tier."),
    _counter("shared_chunks", "Of these, chunks in a tier that other processes read."),
    _counter("stored_tokens", "Tokens of the stored chunks."),
    _counter("present_chunks", "Chunks of stores that were present already."),
    _counter("dropped_chunks", "Chunks of stores that no tier stored, by cause.", "cause"),
    _counter("store_bytes", "Bytes of the records made by stores, including headers."),
    _histogram("store_seconds", "Time from the request of a store to the answer of the last tier.", REQUEST_BUCKETS_S),
    _histogram("store_copy_seconds", "Time from the request of a store to the last read of device memory.", REQUEST_BUCKETS_S),
    # The engine and its host memory
    _gauge("running", "Running stores, retrieves, prefetches and measurements of load times."),
    _gauge("pinned_chunks", "Chunks in host memory pinned by lookups."),
    _gauge("late_calls", "Calls of tiers that exceeded their deadline and have not ended yet."),
    _gauge("arena_bytes", "Size of the arena in host memory."),
    _gauge("arena_leased_bytes", "Leased memory of the arena."),
    _gauge("arena_peak_leased_bytes", "Maximum of the leased memory of the arena."),
    _gauge("arena_lingering_bytes", "Memory without a lease that an array or a tensor still refers to."),
    _gauge("arena_pinned_bytes", "Pinned (page-locked) memory of the arena."),
    _gauge("arena_waiting", "Calls waiting for arena memory."),
    _counter("arena_timeouts", "Calls that did not get all requested arena memory within their deadline."),
    _counter("arena_reclaimed_slabs", "Slabs reclaimed from tiers that keep chunks in the arena."),
    # Tiers and their write queues
    _gauge("tier_chunks", "Records in the tier; not reported for stores with other writers.", "tier"),
    _gauge("tier_bytes", "Bytes of these records that count against the capacity.", "tier"),
    _gauge("tier_max_bytes", "Capacity of the tier, if it is configured there.", "tier"),
    _counter("tier_evictions", "Records evicted by the tier.", "tier"),
    _counter("tier_hit_chunks", "Chunks read from the tier by retrieves and prefetches.", "tier"),
    _counter("tier_stored_chunks", "Chunks stored in the tier.", "tier"),
    _counter("tier_promoted_chunks", "Chunks copied into the tier from a slower one.", "tier"),
    _counter("tier_dropped_chunks", "Chunks of stores that the tier did not store, by cause.", "tier", "cause"),
    _counter("tier_errors", "Failures that were handled as misses, by cause.", "tier", "cause"),
    _counter(
        "corrupt_records",
        "Records that failed verification, by cause and by finder: the tier, or the verify stage of a load."
        " Each was a miss.",
        "tier",
        "cause",
        "found_by",
    ),
    _gauge("queue_chunks", "Chunks in the write queue or being written.", "tier"),
    _gauge("queue_bytes", "Bytes in the write queue or being written.", "tier"),
    _gauge(
        "queue_max_bytes",
        "Maximum of the bytes in the write queue: store.max_pending_write_bytes, or less if writing that much takes longer than store.max_pending_write_s. Varies with the measured write rate.",
        "tier",
    ),
    _counter("queue_refused_chunks", "Chunks refused because the write queue stayed full until their deadline.", "tier"),
    # Layers around the tiers
    _histogram("tier_call_seconds", "Duration of the tier's calls.", CALL_BUCKETS_S, "tier", "verb"),
    _gauge("tier_calls_in_flight", "Running calls of the tier.", "tier", "verb"),
    _counter("tier_calls_cancelled", "Calls of the tier that were cancelled, at a deadline or by their caller.", "tier", "verb"),
    _counter("tier_call_chunks", "Chunks requested in the tier's calls.", "tier", "verb"),
    _counter("tier_call_found_chunks", "Of these, chunks that the tier had.", "tier", "verb"),
    _counter("tier_call_bytes", "Bytes read or written by the tier.", "tier", "verb"),
    _counter("tier_call_errors", "Failed calls and failed chunks of batches, by cause.", "tier", "verb", "cause"),
    _counter("retries", "Retries of failed calls.", "tier"),
    _counter("retry_recovered", "Chunks that succeeded in a retry; a call other than get_many and put_many counts as one.", "tier"),
    _counter("retry_exhausted", "Calls that still failed, at least in part, after the last attempt or at the deadline.", "tier"),
    _gauge(
        "breaker_state",
        "0 closed: calls pass; 1 half open: a few probes pass; 2 open: no call passes. The worst state of all ranks.",
        "tier",
        "circuit",
        merge="max",
    ),
    _counter("breaker_opened", "Openings of the circuit.", "tier", "circuit"),
    _counter("breaker_refused", "Calls refused by the circuit.", "tier", "circuit"),
    _gauge("limit_used", "Calls or bytes in flight that count against the limit.", "tier", "of"),
    _gauge("limit_max", "Maximum of the limit.", "tier", "of"),
    _gauge("limit_waiting", "Calls waiting for the limit.", "tier", "of"),
    _counter("limit_waited", "Calls that waited for the limit.", "tier", "of"),
    _counter("limit_refused", "Calls refused because the limit was not available within their deadline.", "tier", "of"),
)  # fmt: skip

SCHEDULER_SERIES = (
    _counter(
        "lookups",
        "Lookups of admitted requests: hit: tiers had more than vLLM itself; miss; late: no answer in time;"
        " unneeded: vLLM had all tokens before the answer came.",
        "result",
    ),
    _counter("late_lookups", "Lookups whose answer was late at least once."),
    _counter("lookup_asked_tokens", "Tokens of admitted requests that vLLM did not have itself."),
    _counter("lookup_hit_tokens", "Of these, tokens that the tier had.", "tier"),
    _counter("load_tokens", "Of these, tokens that were loaded and not computed.", "tier"),
    _counter("decided", "Hits by the faster choice: load, recompute, or partial (load up to where a slower tier begins).", "decided"),
    _counter("loads", "Planned loads."),
    _counter("failed_loads", "Loads that failed in part or completely; vLLM recomputed instead."),
    _counter(
        "skipped_chunks",
        "Computed chunks at the end of requests that were not stored, by cause: blocks (vllm.max_pinned_fraction was reached) or keys (hashing took too long).",
        "cause",
    ),
    _counter("prefill_saved_seconds", "Time to compute the loaded tokens at the prefill speed measured so far."),
    _gauge("prefill_tokens_per_second", "Prefill speed of the model, as measured or configured."),
    _counter("promises", "Promises of producers: kept; late: not kept in time; doubted: ignored, because they do not match the request.", "became"),
)  # fmt: skip
"""Series of vLLM's scheduler process."""

DAEMON_SERIES = (
    _gauge("pool_max_bytes", "Memory of the pool."),
    _gauge("pool_unused_bytes", "Memory of the pool that holds no record and is not reserved."),
    _gauge("pool_segments", "Contiguous ranges of unused memory in the pool."),
    _gauge("pool_tenant_chunks", "Records that can be read.", "tenant"),
    _gauge("pool_tenant_record_bytes", "Bytes of these records, in whole pages.", "tenant"),
    _gauge(
        "pool_tenant_bytes",
        "Bytes of these records, of reservations, and of removed records that are still leased.",
        "tenant",
    ),
    _gauge("pool_tenant_max_bytes", "Maximum bytes of the tenant.", "tenant"),
    _gauge("pool_tenant_readers", "Leases of readers.", "tenant"),
    _gauge("pool_tenant_writers", "Reservations that are not committed yet.", "tenant"),
    _counter("pool_tenant_evictions", "Evicted records.", "tenant"),
)
"""Series of the host pool's daemon."""

SERIES: Mapping[str, Series] = {
    series.name: series for series in (*ENGINE_SERIES, *SCHEDULER_SERIES, *DAEMON_SERIES)
}
"""All series by name, without `PREFIX`."""
