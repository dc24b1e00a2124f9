"""Verification of all records of a store, with deletion or quarantine of damaged ones on request."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from lmcache_async.errors import TierError, TierUnavailableError
from lmcache_async.maintenance.concurrency import Meter, RateLimit, map_in_order
from lmcache_async.maintenance.namespaces import EVERYTHING, Selection
from lmcache_async.maintenance.record import RecordInfo, verify_record
from lmcache_async.memory.encryption import RecordCipher
from lmcache_async.tiers.offline import OfflineStore, StoredRecord

MAX_LISTED = 100
"""Records that a report lists with their cause."""


class Remedy(Enum):
    """Action for damaged records."""

    KEEP = "keep"
    REMOVE = "remove"
    QUARANTINE = "quarantine"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """Options of a verification.

    Attributes:
        selection: Namespaces to verify.
        remedy: Action for damaged records.
        max_bytes_per_s: Maximum bytes read per second.
        cipher: Decrypts encrypted records; without it only their outer checksum is verified.
    """

    selection: Selection = EVERYTHING
    remedy: Remedy = Remedy.KEEP
    max_bytes_per_s: int | None = None
    cipher: RecordCipher | None = None


@dataclass(slots=True)
class Verification:
    """Result of a verification.

    Attributes:
        store: Name of the store.
        holder: The process that has the store open; "" if none is known.
        records: Undamaged records.
        bytes: Bytes read.
        encrypted: Of the undamaged records, those verified by their outer checksum only.
        damaged: Damaged records, by cause.
        listed: The first `MAX_LISTED` records that are damaged or unreadable, each with key, cause and
            message.
        errors: Records that could not be read. They may be undamaged.
        gone: Records that were deleted meanwhile.
        passed_over: Records of namespaces that are not selected.
        remedied: Records deleted or quarantined.
    """

    store: str
    holder: str = ""
    records: int = 0
    bytes: int = 0
    encrypted: int = 0
    damaged: Counter[str] = field(default_factory=Counter)
    listed: list[dict[str, str]] = field(default_factory=list)
    errors: int = 0
    gone: int = 0
    passed_over: int = 0
    remedied: int = 0

    @property
    def passed(self) -> bool:
        return not self.damaged and not self.errors

    def add(self, stored: StoredRecord, found: RecordInfo | TierError | None) -> int:
        """Count a record and return the bytes that were read of it."""
        if found is None:
            self.gone += 1
            return 0
        if isinstance(found, TierError):
            self.errors += 1
            self._list(stored, "error", str(found))
            return 0
        if not found.selected:
            self.passed_over += 1
            return 0
        if found.cause:
            self.damaged[found.cause] += 1
            self._list(stored, found.cause, found.message)
        else:
            self.records += 1
            self.encrypted += found.header is None
        nbytes = found.record_bytes or stored.nbytes
        self.bytes += nbytes
        return nbytes

    def _list(self, stored: StoredRecord, cause: str, message: str) -> None:
        if len(self.listed) < MAX_LISTED:
            self.listed.append({"key": stored.key.hex(), "cause": cause, "message": message})

    def as_dict(self) -> dict[str, Any]:
        return {
            "target": self.store,
            "held_by_process": self.holder or None,
            "records": self.records,
            "bytes": self.bytes,
            "encrypted": self.encrypted,
            "wrong": dict(sorted(self.damaged.items())),
            "wrong_records": list(self.listed),
            "errors": self.errors,
            "gone": self.gone,
            "passed_over": self.passed_over,
            "remedied": self.remedied,
        }


async def verify(store: OfflineStore, options: VerifyOptions, meter: Meter) -> Verification:
    """Read and verify every record, in the order of their keys.

    Raises:
        ConfigError: The store cannot list its records.
        TierUnavailableError: The store does not answer.
    """
    report = Verification(store.name, store.holder)
    records = sorted(await store.list())
    meter.begin("records", records=len(records), nbytes=sum(one.nbytes for one in records) or None)
    rate = RateLimit(options.max_bytes_per_s)

    async def work(one: StoredRecord) -> tuple[StoredRecord, RecordInfo | TierError | None]:
        try:
            return one, await verify_record(store, one, options.selection, options.cipher)
        except TierUnavailableError:
            raise
        except TierError as error:
            return one, error

    try:
        async with contextlib.aclosing(map_in_order(records, work, in_flight=store.in_flight)) as results:
            async for one, found in results:
                nbytes = report.add(one, found)
                if isinstance(found, RecordInfo) and found.cause:
                    await _remedy(store, options.remedy, found, report)
                meter.advance(1, nbytes)
                await rate.wait(nbytes)
    finally:
        if report.remedied:
            await store.sync()
    return report


async def _remedy(store: OfflineStore, remedy: Remedy, found: RecordInfo, report: Verification) -> None:
    if remedy is Remedy.KEEP:
        return
    if remedy is Remedy.REMOVE:
        await store.remove([found.stored.key])
    else:
        await store.quarantine(found.stored.key, found.cause)
    report.remedied += 1
