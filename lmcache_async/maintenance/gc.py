"""Deletion of records by namespace, age, size and readability, and of files left by interrupted writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lmcache_async.errors import ConfigError
from lmcache_async.maintenance.concurrency import Progress, for_each, no_progress
from lmcache_async.maintenance.namespaces import EVERYTHING, Selection
from lmcache_async.maintenance.record import ERROR, GONE, RecordInfo, read_headers
from lmcache_async.tiers.offline import LeftoverFile, OfflineStore, StoredRecord

_BATCH = 64


@dataclass
class Collection:
    """Result of `collect`."""

    target: str
    held_by_process: str | None
    dry_run: bool
    records: dict[str, dict[str, int]] = field(default_factory=dict)  # count and bytes, by reason
    files: dict[str, dict[str, int]] = field(default_factory=dict)  # count and bytes, by kind
    to_free_bytes: int = 0
    freed_records: int = 0
    freed_bytes: int = 0
    kept_records: int = 0
    kept_bytes: int = 0
    errors: int = 0  # records that could not be read; they stay


def choose(
    records: Sequence[StoredRecord],
    chosen: Mapping[str, Sequence[StoredRecord]],
    selected: Sequence[StoredRecord],
    max_bytes: int | None,
) -> dict[str, list[StoredRecord]]:
    """Return the records to delete by reason, each record once.

    All records of `chosen` are deleted. If the rest has more than `max_bytes`, the least recently used records of
    `selected` are deleted too, for the reason `room`.
    """
    victims: dict[str, list[StoredRecord]] = {}
    gone: set[StoredRecord] = set()
    for why, part in chosen.items():
        victims[why] = [one for one in part if one not in gone]
        gone.update(victims[why])
    if max_bytes is not None:
        excess = _bytes(records) - _bytes(gone) - max_bytes
        victims["room"] = room = []
        # A chunk has a later time than its continuation, so suffixes go first.
        for one in sorted(selected, key=lambda one: one.use_order):
            if excess <= 0:
                break
            if one not in gone:
                room.append(one)
                excess -= one.nbytes
    return victims


async def collect(
    store: OfflineStore,
    progress: Progress = no_progress,
    *,
    selection: Selection = EVERYTHING,
    used_before: int | None = None,
    max_bytes: int | None = None,
    unreadable: bool = True,
    quarantine: bool = False,
    dry_run: bool = False,
) -> Collection:
    """Delete records, and files of interrupted writes. If it is interrupted, the next run deletes the rest.

    `used_before` is in ns since the epoch; `max_bytes` limits the bytes of all records. Without both, the records that
    match a pattern of `selection` are deleted; without patterns, only unreadable records are.
    """
    if not store.knows_use and (used_before is not None or max_bytes is not None):
        raise ConfigError(
            f"{store.name} does not report times of use, which --older-than and --max-bytes need: set a limit in the"
            " options of the tier itself, or select records with --namespace"
        )
    report = Collection(store.name, store.holder or None, dry_run)
    records = await store.list()
    examined: list[StoredRecord] = []
    illegible: list[StoredRecord] = []
    selected: list[StoredRecord] = []

    def sort_in(info: RecordInfo) -> None:
        if info.cause == GONE:
            return
        stored = info.stored
        if not stored.nbytes:  # the listing of a tier has no sizes
            stored = stored._replace(nbytes=info.record_bytes)
        examined.append(stored)
        if info.cause == ERROR:
            report.errors += 1
        elif info.damaged:
            illegible.append(stored)
        elif not info.cause and selection.takes(info.namespace):
            selected.append(stored)

    if selection.patterns or unreadable:
        await read_headers(store, records, sort_in, progress)
        records = examined
    else:
        selected += records
    chosen: dict[str, Sequence[StoredRecord]] = {"unreadable": illegible} if unreadable else {}
    if used_before is not None:
        chosen["age"] = [one for one in selected if one.used_ns < used_before]
    elif selection.patterns and max_bytes is None:
        chosen["namespace"] = selected
    victims = choose(records, chosen, selected, max_bytes)
    half_written, quarantined = await store.leftovers()
    files = {"half_written": half_written} | ({"quarantine": quarantined} if quarantine else {})
    # Suffixes before prefixes, so that an interrupted deletion leaves prefixes.
    going = sorted((one for part in victims.values() for one in part), key=lambda one: one.use_order)
    leftovers = [one for part in files.values() for one in part]
    report.records, report.files = _sums(victims), _sums(files)
    report.to_free_bytes = _bytes(going) + _bytes(leftovers)
    report.kept_records, report.kept_bytes = len(records) - len(going), _bytes(records) - _bytes(going)
    if dry_run:
        return report

    async def remove(batch: Sequence[StoredRecord]) -> int:
        await store.remove([one.key for one in batch])
        report.freed_records += len(batch)
        report.freed_bytes += _bytes(batch)
        return _bytes(batch)

    batches = [going[start : start + _BATCH] for start in range(0, len(going), _BATCH)]
    await for_each("batches of records", batches, remove, progress, in_flight=1)
    await store.delete_files(leftovers)
    report.freed_bytes += _bytes(leftovers)
    await store.sync()
    return report


def _sums(parts: Mapping[str, Sequence[StoredRecord | LeftoverFile]]) -> dict[str, dict[str, int]]:
    return {why: {"count": len(part), "bytes": _bytes(part)} for why, part in parts.items()}


def _bytes(part: Iterable[StoredRecord | LeftoverFile]) -> int:
    return sum(one.nbytes for one in part)
