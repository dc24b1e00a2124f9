"""Verification of all records of a store, with deletion or quarantine of damaged ones on request."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from lmcache_async.maintenance.concurrency import Progress, for_each, no_progress
from lmcache_async.maintenance.namespaces import EVERYTHING, Selection
from lmcache_async.maintenance.record import ERROR, GONE, PASSED_OVER, examine
from lmcache_async.memory.encryption import RecordCipher
from lmcache_async.tiers.offline import OfflineStore, StoredRecord

Remedy: TypeAlias = Literal["remove", "quarantine"]
"""Action for damaged records."""


@dataclass
class Verification:
    """Result of `verify`."""

    target: str
    held_by_process: str | None
    records: int = 0
    bytes: int = 0
    encrypted: int = 0  # of these, verified by their outer checksum only
    wrong: Counter[str] = field(default_factory=Counter)  # damaged, by cause
    wrong_records: list[dict[str, str]] = field(default_factory=list)
    errors: int = 0  # not readable; they may be undamaged
    gone: int = 0  # deleted meanwhile
    passed_over: int = 0
    remedied: int = 0  # deleted or quarantined


async def verify(
    store: OfflineStore,
    progress: Progress = no_progress,
    *,
    selection: Selection = EVERYTHING,
    remedy: Remedy | None = None,
    max_bytes_per_s: int | None = None,
    cipher: RecordCipher | None = None,
) -> Verification:
    """Read and verify every record, in the order of their keys.

    Without a cipher only the outer checksum of encrypted records is verified.
    """
    report = Verification(store.name, store.holder or None)

    async def work(stored: StoredRecord) -> int:
        info = await examine(store, stored, selection, cipher=cipher)
        nbytes = min(info.record_bytes, stored.nbytes or info.record_bytes)  # a file may be shorter
        if info.cause == PASSED_OVER and store.reads_headers:
            nbytes = 0  # only the header was read
        report.bytes += nbytes
        if not info.cause:
            report.records += 1
            report.encrypted += info.header is None
        elif info.cause == GONE:
            report.gone += 1
        elif info.cause == PASSED_OVER:
            report.passed_over += 1
        else:
            report.errors += info.cause == ERROR
            if info.damaged:
                report.wrong[info.cause] += 1
            info.list_in(report.wrong_records)
        if remedy is not None and info.damaged:
            if remedy == "remove":
                await store.remove([stored.key])
            else:
                await store.quarantine(stored.key, info.cause)
            report.remedied += 1
        return nbytes

    records = sorted(await store.list())
    try:
        await for_each(
            "records", records, work, progress, in_flight=store.in_flight, max_bytes_per_s=max_bytes_per_s
        )
    finally:
        if report.remedied:
            await store.sync()
    report.wrong_records.sort(key=lambda one: one["key"])
    return report
