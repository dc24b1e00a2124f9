"""Verification of all records of a store, with deletion or quarantine of damaged ones on request."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from lmcache_async.maintenance.concurrency import Progress, for_each, no_progress
from lmcache_async.maintenance.namespaces import EVERYTHING, Selection
from lmcache_async.maintenance.record import ERROR, GONE, PASSED_OVER, RecordInfo, examine
from lmcache_async.memory.encryption import RecordCipher
from lmcache_async.tiers.offline import OfflineStore, StoredRecord

Remedy: TypeAlias = Literal["remove", "quarantine"]
"""Action for damaged records."""


@dataclass
class Verification:
    """Result of a verification."""

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

    def add(self, info: RecordInfo, *, reads_headers: bool) -> int:
        """Count a record and return the bytes that were read of it, without a header that was read alone."""
        if info.cause == GONE:
            self.gone += 1
            return 0
        if info.cause == ERROR:
            self.errors += 1
            info.list_in(self.wrong_records)
            return 0
        nbytes = info.record_bytes or info.stored.nbytes
        if info.cause == PASSED_OVER:
            self.passed_over += 1
            nbytes = 0 if reads_headers else nbytes
        elif info.cause:
            self.wrong[info.cause] += 1
            info.list_in(self.wrong_records)
        else:
            self.records += 1
            self.encrypted += info.header is None
        self.bytes += nbytes
        return nbytes


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
        nbytes = report.add(info, reads_headers=store.reads_headers)
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
