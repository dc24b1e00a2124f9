"""Less of it: records removed by namespace, age, room and readability, and files that are no records."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache_async.errors import ConfigError, TierError
from lmcache_async.records.directory import DirectoryTarget
from lmcache_async.records.flight import Meter
from lmcache_async.records.heads import heads
from lmcache_async.records.namespaces import EVERYTHING, Selection
from lmcache_async.records.target import Target
from lmcache_async.tiers.rest import Kept, Litter

_BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class GcOptions:
    """What is to go.

    Attributes:
        selection: Of these namespaces alone; with nothing else of them, all of their records go.
        used_before: Records last used before this moment go, in ns since the epoch.
        max_bytes: What all records may have together; the least recently used of the selection go first.
        unreadable: Records whose header cannot be read go: other versions, and what is no record.
        half_written: Files of writers that died go.
        quarantine: Files put aside as broken go.
    """

    selection: Selection = EVERYTHING
    used_before: int | None = None
    max_bytes: int | None = None
    unreadable: bool = True
    half_written: bool = True
    quarantine: bool = False


@dataclass(slots=True)
class Collection:
    """What is to go, or what went.

    Attributes:
        victims: Records by why they go: `unreadable`, `age`, `namespace`, `room`.
        litter: Files by what they are: `half_written`, `quarantine`.
        kept_bytes: Of what stays.
        freed_bytes: So many are gone by now.
    """

    target: str
    holder: str = ""
    victims: dict[str, list[Kept]] = field(default_factory=dict)
    litter: dict[str, list[Litter]] = field(default_factory=dict)
    kept_records: int = 0
    kept_bytes: int = 0
    errors: int = 0
    freed_records: int = 0
    freed_bytes: int = 0
    dry_run: bool = False

    @property
    def records(self) -> list[Kept]:
        """All victims, suffixes before prefixes: whatever ends this half way leaves prefixes."""
        return sorted((one for part in self.victims.values() for one in part), key=lambda one: one.rank)

    @property
    def bytes(self) -> int:
        files = sum(one.nbytes for part in self.litter.values() for one in part)
        return files + sum(one.nbytes for part in self.victims.values() for one in part)

    def as_dict(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "held_by_process": self.holder or None,
            "dry_run": self.dry_run,
            "records": {why: _sums(part) for why, part in self.victims.items()},
            "files": {what: _sums(part) for what, part in self.litter.items()},
            "to_free_bytes": self.bytes,
            "freed_records": self.freed_records,
            "freed_bytes": self.freed_bytes,
            "kept_records": self.kept_records,
            "kept_bytes": self.kept_bytes,
            "errors": self.errors,
        }


def _sums(part: Sequence[Kept | Litter]) -> Mapping[str, int]:
    return {"count": len(part), "bytes": sum(one.nbytes for one in part)}


def choose(
    kept: Sequence[Kept],
    chosen: Mapping[str, Sequence[Kept]],
    selected: Sequence[Kept],
    max_bytes: int | None,
) -> dict[str, list[Kept]]:
    """The victims by why: those chosen for other causes, then for room; no record twice.

    Args:
        kept: All records.
        chosen: For other causes, the first cause named first.
        selected: Of which those for room are taken.
    """
    victims: dict[str, list[Kept]] = {}
    gone: set[Kept] = set()
    for why, part in chosen.items():
        victims[why] = [one for one in part if one not in gone]
        gone.update(victims[why])
    if max_bytes is not None:
        excess = sum(one.nbytes for one in kept) - sum(one.nbytes for one in gone) - max_bytes
        room: list[Kept] = []
        # A chunk's stamp is less than that of the chunk that it continues: so suffixes go first.
        for one in sorted(selected, key=lambda one: one.rank):
            if excess <= 0:
                break
            if one not in gone:
                room.append(one)
                excess -= one.nbytes
        victims["room"] = room
    return victims


async def plan(target: Target, options: GcOptions, meter: Meter) -> Collection:
    """What would go; nothing is changed.

    Raises:
        ConfigError: The target does not know what is asked for.
        TierUnavailableError: It does not answer.
    """
    if not target.knows_use and (options.used_before is not None or options.max_bytes is not None):
        raise ConfigError(
            f"{target.name} does not tell when records were used, so neither age nor room can be judged from here:"
            " give the tier itself a limit, or name namespaces"
        )
    kept = await target.list()
    collection = Collection(target.name, target.holder)
    unreadable: list[Kept] = []
    selected: list[Kept] = list(kept)
    if options.selection.patterns or options.unreadable:
        selected = []
        meter.begin("headers", records=len(kept))
        async with contextlib.aclosing(heads(target, kept, meter)) as looks:
            async for looked in looks:
                if isinstance(looked, TierError):
                    collection.errors += 1
                elif looked is None:
                    continue
                elif looked.cause:
                    unreadable.append(looked.kept)
                elif options.selection.takes(looked.namespace):
                    selected.append(looked.kept)
    chosen: dict[str, Sequence[Kept]] = {"unreadable": unreadable} if options.unreadable else {}
    if options.used_before is not None:
        chosen["age"] = [one for one in selected if one.stamp < options.used_before]
    elif options.selection.patterns and options.max_bytes is None:
        chosen["namespace"] = selected
    collection.victims = choose(kept, chosen, selected, options.max_bytes)
    going = collection.records
    collection.kept_records = len(kept) - len(going)
    collection.kept_bytes = sum(one.nbytes for one in kept) - sum(one.nbytes for one in going)
    if isinstance(target, DirectoryTarget):
        half_written, quarantine = await target.litter()
        if options.half_written:
            collection.litter["half_written"] = list(half_written)
        if options.quarantine:
            collection.litter["quarantine"] = list(quarantine)
    return collection


async def collect(target: Target, collection: Collection, meter: Meter) -> None:
    """Remove what was planned. Cancelled or killed, the rest is there still, and a further run takes it.

    Raises:
        TierError: Something could not be removed.
    """
    going = collection.records
    meter.begin("records", records=len(going), nbytes=sum(one.nbytes for one in going) or None)
    for start in range(0, len(going), _BATCH):
        batch = going[start : start + _BATCH]
        await target.remove([one.key for one in batch])
        nbytes = sum(one.nbytes for one in batch)
        collection.freed_records += len(batch)
        collection.freed_bytes += nbytes
        meter.advance(len(batch), nbytes)
    if isinstance(target, DirectoryTarget):
        for part in collection.litter.values():
            await target.sweep(part)
            collection.freed_bytes += sum(one.nbytes for one in part)
    await target.sync()
