"""Contents of a store by namespace, from the headers of its records."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from lmcache_async.errors import TierError
from lmcache_async.hashing.namespace import namespace_id
from lmcache_async.maintenance.concurrency import Progress, no_progress
from lmcache_async.maintenance.namespaces import EVERYTHING, Selection, fields_of, title_of
from lmcache_async.maintenance.record import ERROR, GONE, RecordInfo, examine, read_headers
from lmcache_async.tiers.offline import OfflineStore, StoredRecord
from lmcache_async.types import ChunkKey

MAX_REQUEST_NAMESPACES = 10_000
"""Maximum number of request namespaces that are counted. Each tenant and each adapter has one."""


@dataclass(slots=True)
class Group:
    """The records of one namespace."""

    text: str  # of the namespace, or `encrypted_text`
    records: int = 0
    bytes: int = 0  # without the padding of the files
    tokens: int = 0
    chunk_tokens: Counter[int] = field(default_factory=Counter)
    shapes: Counter[tuple[str, str, int]] = field(default_factory=Counter)  # dtype, layout, header bytes
    requests: set[str] = field(default_factory=set)  # LoRA adapter, cache_salt and tags
    oldest: int = 0  # last use, in ns since the epoch; 0 if it is not known
    newest: int = 0

    def add(self, info: RecordInfo) -> None:
        self.records += 1
        self.bytes += info.record_bytes or info.stored.nbytes
        if used_ns := info.stored.used_ns:
            self.oldest = min(self.oldest or used_ns, used_ns)
            self.newest = max(self.newest, used_ns)
        if (header := info.header) is not None:
            self.tokens += len(header.tokens)
            self.chunk_tokens[len(header.tokens)] += 1
            self.shapes[header.dtype, header.layout, header.header_bytes] += 1
            if len(self.requests) < MAX_REQUEST_NAMESPACES:
                self.requests.add(header.request_namespace)

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": namespace_id(self.text),
            "title": title_of(self.text),
            "namespace": self.text,
            "fields": dict(fields_of(self.text)),
            "records": self.records,
            "bytes": self.bytes,
            "tokens": self.tokens,
            "chunk_tokens": {str(count): records for count, records in sorted(self.chunk_tokens.items())},
            "shapes": [
                {"dtype": dtype, "layout": layout, "header_bytes": header_bytes, "records": records}
                for (dtype, layout, header_bytes), records in sorted(self.shapes.items())
            ],
            "request_namespaces": len(self.requests),
            "request_labels": len(self.requests - {""}),
            "oldest_ns": self.oldest or None,
            "newest_ns": self.newest or None,
        }


@dataclass
class Inspection:
    """Contents of a store."""

    target: str
    held_by_process: str | None
    records: int = 0
    bytes: int = 0
    tokens: int = 0
    unreadable: Counter[str] = field(default_factory=Counter)
    unreadable_bytes: int = 0
    errors: int = 0  # not readable; they may be undamaged
    gone: int = 0  # deleted meanwhile
    namespaces: list[dict[str, Any]] = field(default_factory=list)


async def inspect(
    store: OfflineStore, progress: Progress = no_progress, *, selection: Selection = EVERYTHING
) -> Inspection:
    """Return the contents of a store. The header of every record is read."""
    report = Inspection(store.name, store.holder or None)
    groups: dict[str, Group] = {}

    def add(info: RecordInfo) -> None:
        if info.cause == GONE:
            report.gone += 1
        elif info.cause == ERROR:
            report.errors += 1
        elif not selection.takes(info.namespace):
            return
        elif info.cause:
            report.unreadable[info.cause] += 1
            report.unreadable_bytes += info.stored.nbytes
        else:
            groups.setdefault(info.namespace, Group(info.namespace)).add(info)

    await read_headers(store, await store.list(), add, progress)
    in_order = sorted(groups.values(), key=lambda group: (-group.bytes, group.text))
    report.records = sum(group.records for group in in_order) + report.unreadable.total()
    report.bytes = sum(group.bytes for group in in_order) + report.unreadable_bytes
    report.tokens = sum(group.tokens for group in in_order)
    report.namespaces = [group.as_dict() for group in in_order]
    return report


async def describe_record(store: OfflineStore, key: ChunkKey) -> dict[str, Any]:
    """Return everything about one record except its payload.

    Raises:
        TierError: There is no such record, or it cannot be read.
    """
    stored = StoredRecord(key)
    if store.knows_use:  # the listing has the size and the time of use
        stored = next((one for one in await store.list() if one.key == key), stored)
    info = await examine(store, stored, header_only=True)
    if info.cause in {GONE, ERROR}:
        raise TierError(info.message or f"{store.name} has no record {key.hex()}")
    header = info.header
    described: dict[str, Any] = {
        "key": key.hex(),
        "file_bytes": stored.nbytes or None,
        "record_bytes": info.record_bytes or None,
        "used_ns": stored.used_ns or None,
        "used_s_ago": (time.time_ns() - stored.used_ns) / 1e9 if stored.used_ns else None,
        "encrypted_with_key": info.key_id or None,
        "unreadable": info.cause or None,
        "message": info.message or None,
    }
    if header is not None:
        described |= {
            "version": header.version,
            "namespace_id": namespace_id(header.namespace),
            "namespace": header.namespace,
            "request_namespace": header.request_namespace,
            "extra": header.extra,
            "layout": header.layout,
            "dtype": header.dtype,
            "shape": list(header.shape),
            "header_bytes": header.header_bytes,
            "payload_bytes": header.payload_bytes,
            "checksum": header.checksum.hex(),
            "num_tokens": len(header.tokens),
            "tokens": header.tokens.tolist(),
        }
    return described
