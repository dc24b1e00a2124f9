"""Deletion of records by namespace, age, size and readability, and of files left by interrupted writes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache_async.errors import ConfigError, TierError
from lmcache_async.maintenance.concurrency import Meter
from lmcache_async.maintenance.namespaces import EVERYTHING, Selection
from lmcache_async.maintenance.record import read_headers
from lmcache_async.tiers.offline import LeftoverFile, OfflineStore, StoredRecord

_BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class GcOptions:
    """Options of a deletion.

    Attributes:
        selection: Namespaces to delete from; without `used_before` and `max_bytes`, all their records.
        used_before: Delete records last used before this time, in ns since the epoch.
        max_bytes: Delete the least recently used selected records until all records have at most this size.
        unreadable: Delete records with an unreadable header: other versions, and files that are not records.
        half_written: Delete files of interrupted writes.
        quarantine: Delete quarantined files.
    """

    selection: Selection = EVERYTHING
    used_before: int | None = None
    max_bytes: int | None = None
    unreadable: bool = True
    half_written: bool = True
    quarantine: bool = False


@dataclass(slots=True)
class Collection:
    """Records and files to delete, or deleted.

    Attributes:
        store: Name of the store.
        holder: The process that has the store open; "" if none is known.
        victims: Records by reason: `unreadable`, `age`, `namespace`, `room`.
        files: Files by kind: `half_written`, `quarantine`.
        kept_records: Records that stay.
        kept_bytes: Bytes of the records that stay.
        errors: Records that could not be read; they stay.
        freed_records: Records deleted so far.
        freed_bytes: Bytes deleted so far.
        dry_run: Nothing is deleted.
    """

    store: str
    holder: str = ""
    victims: dict[str, list[StoredRecord]] = field(default_factory=dict)
    files: dict[str, list[LeftoverFile]] = field(default_factory=dict)
    kept_records: int = 0
    kept_bytes: int = 0
    errors: int = 0
    freed_records: int = 0
    freed_bytes: int = 0
    dry_run: bool = False

    @property
    def records(self) -> list[StoredRecord]:
        """All victims, suffixes before prefixes, so that an interrupted deletion leaves prefixes."""
        return sorted((one for part in self.victims.values() for one in part), key=lambda one: one.use_order)

    @property
    def bytes(self) -> int:
        file_bytes = sum(one.nbytes for part in self.files.values() for one in part)
        return file_bytes + sum(one.nbytes for part in self.victims.values() for one in part)

    def as_dict(self) -> dict[str, Any]:
        return {
            "target": self.store,
            "held_by_process": self.holder or None,
            "dry_run": self.dry_run,
            "records": {why: _sums(part) for why, part in self.victims.items()},
            "files": {what: _sums(part) for what, part in self.files.items()},
            "to_free_bytes": self.bytes,
            "freed_records": self.freed_records,
            "freed_bytes": self.freed_bytes,
            "kept_records": self.kept_records,
            "kept_bytes": self.kept_bytes,
            "errors": self.errors,
        }


def _sums(part: Sequence[StoredRecord | LeftoverFile]) -> Mapping[str, int]:
    return {"count": len(part), "bytes": sum(one.nbytes for one in part)}


def choose(
    kept: Sequence[StoredRecord],
    chosen: Mapping[str, Sequence[StoredRecord]],
    selected: Sequence[StoredRecord],
    max_bytes: int | None,
) -> dict[str, list[StoredRecord]]:
    """Return the victims by reason, each record once: those chosen already, then those for `room`.

    Args:
        kept: All records.
        chosen: Victims for other reasons, by descending priority of the reason.
        selected: Candidates for `room`.
        max_bytes: Limit for all records; None selects none for `room`.
    """
    victims: dict[str, list[StoredRecord]] = {}
    gone: set[StoredRecord] = set()
    for why, part in chosen.items():
        victims[why] = [one for one in part if one not in gone]
        gone.update(victims[why])
    if max_bytes is not None:
        excess = sum(one.nbytes for one in kept) - sum(one.nbytes for one in gone) - max_bytes
        room: list[StoredRecord] = []
        # A chunk has a later time than its continuation, so suffixes go first.
        for one in sorted(selected, key=lambda one: one.use_order):
            if excess <= 0:
                break
            if one not in gone:
                room.append(one)
                excess -= one.nbytes
        victims["room"] = room
    return victims


async def plan(store: OfflineStore, options: GcOptions, meter: Meter) -> Collection:
    """Plan a deletion. Nothing is changed.

    Raises:
        ConfigError: The store does not know times of use, and an option needs them.
        TierUnavailableError: The store does not answer.
    """
    if not store.knows_use and (options.used_before is not None or options.max_bytes is not None):
        raise ConfigError(
            f"{store.name} does not tell when records were used, so neither age nor room can be judged from here:"
            " give the tier itself a limit, or name namespaces"
        )
    kept = await store.list()
    collection = Collection(store.name, store.holder)
    unreadable: list[StoredRecord] = []
    selected: list[StoredRecord] = list(kept)
    if options.selection.patterns or options.unreadable:
        selected = []
        async with contextlib.aclosing(read_headers(store, kept, meter)) as headers:
            async for info in headers:
                if isinstance(info, TierError):
                    collection.errors += 1
                elif info is None:
                    continue
                elif info.cause:
                    unreadable.append(info.stored)
                elif options.selection.takes(info.namespace):
                    selected.append(info.stored)
    chosen: dict[str, Sequence[StoredRecord]] = {"unreadable": unreadable} if options.unreadable else {}
    if options.used_before is not None:
        chosen["age"] = [one for one in selected if one.used_ns < options.used_before]
    elif options.selection.patterns and options.max_bytes is None:
        chosen["namespace"] = selected
    collection.victims = choose(kept, chosen, selected, options.max_bytes)
    going = collection.records
    collection.kept_records = len(kept) - len(going)
    collection.kept_bytes = sum(one.nbytes for one in kept) - sum(one.nbytes for one in going)
    half_written, quarantined = await store.leftovers()
    if options.half_written:
        collection.files["half_written"] = list(half_written)
    if options.quarantine:
        collection.files["quarantine"] = list(quarantined)
    return collection


async def collect(store: OfflineStore, collection: Collection, meter: Meter) -> None:
    """Delete the planned records and files. If it is interrupted, the next run deletes the rest.

    Raises:
        TierError: A record or a file could not be deleted.
    """
    going = collection.records
    meter.begin("records", records=len(going), nbytes=sum(one.nbytes for one in going) or None)
    for start in range(0, len(going), _BATCH):
        batch = going[start : start + _BATCH]
        await store.remove([one.key for one in batch])
        nbytes = sum(one.nbytes for one in batch)
        collection.freed_records += len(batch)
        collection.freed_bytes += nbytes
        meter.advance(len(batch), nbytes)
    for part in collection.files.values():
        await store.delete_files(part)
        collection.freed_bytes += sum(one.nbytes for one in part)
    await store.sync()
