"""What the first bytes of a record say. Pure; any thread."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_async.errors import ChunkCorruptError
from lmcache_async.memory.encryption import envelope_key_id, is_encrypted
from lmcache_async.memory.header import RecordHeader, peek_sizes, read_header
from lmcache_async.records.namespaces import encrypted_text
from lmcache_async.tiers.rest import Kept

HEAD_BYTES = 16 << 10
"""Enough for nearly every header; `missing_bytes` says when it is not."""


@dataclass(frozen=True, slots=True)
class Looked:
    """What a record says of itself; its payload was not read.

    Attributes:
        record_bytes: Its length by its header; 0 where that cannot be read.
        header: Of one that can be read; None of others.
        key_id: Of the key of an encrypted one.
        cause: Why it cannot be read, by the words of `ChunkCorruptError`; "" where it can, and of encrypted ones.
        message: The same in a sentence.
    """

    kept: Kept
    record_bytes: int = 0
    header: RecordHeader | None = None
    key_id: str = ""
    cause: str = ""
    message: str = ""

    @property
    def namespace(self) -> str:
        """The namespace's text; of what is encrypted, the key's id in its place; "" of what cannot be read."""
        if self.header is not None:
            return self.header.namespace
        return encrypted_text(self.key_id) if self.key_id else ""


def look_at(kept: Kept, head: memoryview) -> Looked:
    """The record that starts with these bytes, which hold all of its header or the whole record."""
    try:
        _, record_bytes = peek_sizes(head)
        if is_encrypted(head):
            return Looked(kept, record_bytes, key_id=envelope_key_id(head))
        header = read_header(head)
    except ChunkCorruptError as error:
        return Looked(kept, cause=error.cause, message=str(error))
    if header.key != kept.key:
        return Looked(kept, cause="key", message=f"it says that it is of key {header.key.hex()}")
    return Looked(kept, record_bytes, header)


def missing_bytes(head: memoryview) -> int:
    """How long the header is that starts here, where that is more than these bytes; else 0."""
    try:
        header_bytes, _ = peek_sizes(head)
    except ChunkCorruptError:
        return 0
    return header_bytes if header_bytes > len(head) else 0
