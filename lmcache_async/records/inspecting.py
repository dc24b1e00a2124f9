"""What a place holds, by namespace: from the headers alone."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from lmcache_async.errors import TierError
from lmcache_async.records.flight import Meter
from lmcache_async.records.heads import heads
from lmcache_async.records.look import Looked
from lmcache_async.records.namespaces import Selection, fields_of, namespace_id, title_of
from lmcache_async.records.target import Target

MAX_REQUEST_NAMESPACES = 10_000
"""Counted up to here: each tenant and adapter has one."""


@dataclass(slots=True)
class Group:
    """The records of one namespace.

    Attributes:
        text: The namespace's, or what stands for it.
        bytes: Of the records, without what pads their files.
        tokens: Of records whose header can be read.
        chunk_tokens: Records by their number of tokens.
        shapes: Records by dtype, layout and header bytes.
        requests: A label for each combination of LoRA adapter, cache_salt and tags; "" for none of them.
        oldest: When the least recently used was used, in ns since the epoch; 0 where that is not known.
    """

    text: str
    records: int = 0
    bytes: int = 0
    tokens: int = 0
    chunk_tokens: Counter[int] = field(default_factory=Counter)
    shapes: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    requests: set[str] = field(default_factory=set)
    oldest: int = 0
    newest: int = 0

    def add(self, looked: Looked) -> None:
        self.records += 1
        self.bytes += looked.record_bytes or looked.kept.nbytes
        if stamp := looked.kept.stamp:
            self.oldest = min(self.oldest or stamp, stamp)
            self.newest = max(self.newest, stamp)
        if (header := looked.header) is not None:
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


@dataclass(slots=True)
class Inspection:
    """What there is.

    Attributes:
        groups: By namespace, the largest first once it is complete.
        unreadable: Records whose header cannot be read, by cause.
        errors: Records that could not be read at all; they may be right.
        gone: Records that went while it was looked at the others.
    """

    target: str
    holder: str = ""
    groups: dict[str, Group] = field(default_factory=dict)
    unreadable: Counter[str] = field(default_factory=Counter)
    unreadable_bytes: int = 0
    errors: int = 0
    gone: int = 0

    @property
    def records(self) -> int:
        return sum(group.records for group in self.groups.values()) + self.unreadable.total()

    @property
    def bytes(self) -> int:
        return sum(group.bytes for group in self.groups.values()) + self.unreadable_bytes

    def add(self, looked: Looked) -> None:
        if looked.cause:
            self.unreadable[looked.cause] += 1
            self.unreadable_bytes += looked.kept.nbytes
        else:
            text = looked.namespace
            self.groups.setdefault(text, Group(text)).add(looked)

    def as_dict(self) -> dict[str, Any]:
        groups = sorted(self.groups.values(), key=lambda group: (-group.bytes, group.text))
        return {
            "target": self.target,
            "held_by_process": self.holder or None,
            "records": self.records,
            "bytes": self.bytes,
            "tokens": sum(group.tokens for group in groups),
            "unreadable": dict(sorted(self.unreadable.items())),
            "errors": self.errors,
            "gone": self.gone,
            "namespaces": [group.as_dict() for group in groups],
        }


async def inspect(target: Target, selection: Selection, meter: Meter) -> Inspection:
    """Look at the header of every record.

    Raises:
        ConfigError: The target cannot list what it has.
        TierUnavailableError: It does not answer.
    """
    kept = await target.list()
    meter.begin("headers", records=len(kept))
    found = Inspection(target.name, target.holder)
    async with contextlib.aclosing(heads(target, kept, meter)) as looks:
        async for looked in looks:
            if looked is None:
                found.gone += 1
            elif isinstance(looked, TierError):
                found.errors += 1
            elif selection.takes(looked.namespace):
                found.add(looked)
    return found


def describe(looked: Looked, now_ns: int) -> dict[str, Any]:
    """One record in full, but for its payload."""
    header = looked.header
    told: dict[str, Any] = {
        "key": looked.kept.key.hex(),
        "file_bytes": looked.kept.nbytes or None,
        "record_bytes": looked.record_bytes or None,
        "used_ns": looked.kept.stamp or None,
        "used_s_ago": (now_ns - looked.kept.stamp) / 1e9 if looked.kept.stamp else None,
        "encrypted_with_key": looked.key_id or None,
        "unreadable": looked.cause or None,
        "message": looked.message or None,
    }
    if header is not None:
        told |= {
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
    return told
