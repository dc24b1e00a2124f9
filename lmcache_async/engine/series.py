"""Every series that an engine gives: names, labels and what they mean. docs/metrics.md has the same table."""

from __future__ import annotations

from lmcache_async.observability.families import Family
from lmcache_async.observability.totals import BUCKETS_S
from lmcache_async.tiers.layers.metrics import BUCKETS_S as CALL_BUCKETS_S

PREFIX = "lmcache_async_"

CIRCUIT_STATES = {"closed": 0, "half-open": 1, "open": 2}
"""Values of `lmcache_async_breaker_state`."""


def counter(name: str, text: str, *labels: str) -> Family:
    return Family(f"{PREFIX}{name}_total", "counter", text, labels)


def gauge(name: str, text: str, *labels: str) -> Family:
    return Family(PREFIX + name, "gauge", text, labels)


def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Family:
    return Family(PREFIX + name, "histogram", text, labels, (), buckets)


RETRIEVES = (
    counter(
        "retrieves", "Retrieves by why they ended; complete: all that was asked for was there.", "ended_by"
    ),
    counter("retrieve_asked_tokens", "Tokens that retrieves asked for."),
    counter("retrieve_hit_tokens", "Tokens that retrieves brought, by the tier that gave them.", "tier"),
    counter("retrieve_bytes", "Payload bytes copied to the device."),
    histogram("retrieve_seconds", "From a retrieve's request to the end of its last copy.", BUCKETS_S),
)

STORES = (
    counter("stores", "Stores that have ended."),
    counter("stored_chunks", "Chunks that at least one tier took."),
    counter("shared_chunks", "Of these, chunks that a tier keeps which other processes read."),
    counter("stored_tokens", "Tokens of the stored chunks."),
    counter("present_chunks", "Chunks of stores that were there already."),
    counter("dropped_chunks", "Chunks of stores that no tier took, by cause.", "cause"),
    counter("store_bytes", "Bytes of the records that stores made, headers among them."),
    histogram("store_seconds", "From a store's request to the last tier's answer.", BUCKETS_S),
    histogram("store_copy_seconds", "From a store's request until device memory was not read any more.", BUCKETS_S),
)  # fmt: skip

ENGINE = (
    gauge("running", "Stores and retrieves under way."),
    gauge("pinned_chunks", "Chunks in host memory that lookups hold for loads to come."),
    gauge("late_calls", "Calls of tiers that were given up at a deadline and have not ended yet."),
    gauge("arena_bytes", "Host memory of the arena."),
    gauge("arena_leased_bytes", "Of the arena, what is not free."),
    gauge("arena_peak_leased_bytes", "The most that was ever not free at one time."),
    gauge("arena_lingering_bytes", "Without a lease, but still looked at by an array or a tensor."),
    gauge("arena_pinned_bytes", "Of the arena, what a GPU can copy from and to by itself."),
    gauge("arena_waiting", "Calls that wait for arena memory."),
    counter("arena_timeouts", "Calls that got less arena memory than they asked for within their deadline."),
    counter("arena_reclaimed_slabs", "Slabs that the arena got back from tiers that keep chunks in it."),
)

TIERS = (
    gauge("tier_chunks", "Records that the tier holds; not of stores that others write to as well.", "tier"),
    gauge("tier_bytes", "Bytes of these that count against its capacity.", "tier"),
    gauge("tier_max_bytes", "The tier's capacity, where it has one of its own.", "tier"),
    counter("tier_evictions", "Records that the tier gave up for room.", "tier"),
    counter("tier_hit_chunks", "Chunks that retrieves and prefetches took from the tier.", "tier"),
    counter("tier_stored_chunks", "Chunks of stores that the tier took.", "tier"),
    counter("tier_promoted_chunks", "Chunks copied into this tier because a slower one had them.", "tier"),
    counter("tier_dropped_chunks", "Chunks of stores that the tier did not take, by cause.", "tier", "cause"),
    counter("tier_errors", "Failures that became misses, by cause.", "tier", "cause"),
    counter(
        "corrupt_records",
        "Records that could not be proven right, by cause, and by who found it: the tier, or the check of"
        " every load (verify). Each was a miss.",
        "tier",
        "cause",
        "found_by",
    ),
    gauge("queue_chunks", "Chunks that wait to be written or are being written.", "tier"),
    gauge("queue_bytes", "Their bytes.", "tier"),
    gauge(
        "queue_max_bytes",
        "The bound of these: store.max_pending_write_bytes, or less where the tier takes longer than store.max_pending_write_s to write that. It varies with the measured write rate.",
        "tier",
    ),
    counter("queue_refused_chunks", "Chunks that found no room in the queue within their deadline.", "tier"),
)

LAYERS = (
    histogram("tier_call_seconds", "How long the tier's calls took.", CALL_BUCKETS_S, "tier", "verb"),
    gauge("tier_calls_in_flight", "Calls of the tier that have not ended.", "tier", "verb"),
    counter("tier_calls_cancelled", "Calls that were given up, at a deadline or before.", "tier", "verb"),
    counter("tier_call_chunks", "Chunks that the tier's calls were about.", "tier", "verb"),
    counter("tier_call_found_chunks", "Of these, chunks that were there.", "tier", "verb"),
    counter("tier_call_bytes", "Bytes that the tier read or wrote.", "tier", "verb"),
    counter("tier_call_errors", "Failed calls and failed chunks of batches, by cause.", "tier", "verb", "cause"),
    counter("retries", "Further attempts of calls that had failed.", "tier"),
    counter("retry_recovered", "Chunks, or calls about no single chunk, that a further attempt brought.", "tier"),
    counter("retry_exhausted", "Calls that still failed when no attempt or no time was left.", "tier"),
    Family(
        PREFIX + "breaker_state",
        "gauge",
        "0 closed: calls pass; 1 half open: a few do; 2 open: none does. Of several ranks the worst.",
        ("tier", "circuit"),
        merge="max",
    ),
    counter("breaker_opened", "How often the circuit opened.", "tier", "circuit"),
    counter("breaker_refused", "Calls that it did not let pass.", "tier", "circuit"),
    gauge("limit_used", "Calls or bytes under way that a limit counts.", "tier", "of"),
    gauge("limit_max", "The limit's bound.", "tier", "of"),
    gauge("limit_waiting", "Calls that wait for the limit.", "tier", "of"),
    counter("limit_waited", "Calls that had to wait for the limit.", "tier", "of"),
    counter("limit_refused", "Calls that waited in vain.", "tier", "of"),
)  # fmt: skip

SERIES = (*RETRIEVES, *STORES, *ENGINE, *TIERS, *LAYERS)
