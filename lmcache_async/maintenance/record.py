"""Header and verification of single records."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from lmcache_async.errors import ChunkCorruptError, TierError, TierUnavailableError
from lmcache_async.maintenance.concurrency import Meter, map_in_order
from lmcache_async.maintenance.namespaces import Selection, encrypted_text, fields_of
from lmcache_async.memory.buffer import PAGE
from lmcache_async.memory.encryption import RecordCipher, check_encrypted, envelope_key_id, is_encrypted
from lmcache_async.memory.header import RecordHeader, peek_sizes, read_header
from lmcache_async.memory.proof import prove
from lmcache_async.tiers.offline import OfflineStore, StoredRecord
from lmcache_async.types import ChunkKey

_BATCH = 64  # headers read one after the other by one task


@dataclass(frozen=True, slots=True)
class RecordInfo:
    """Description of a record after its header was read, or after its verification.

    Attributes:
        stored: The record's entry in the listing.
        record_bytes: Length of the record; 0 if the header is unreadable.
        header: The header; None if it is unreadable, or encrypted and not decrypted.
        key_id: Identifier of the encryption key; "" if the record is not encrypted.
        cause: Why the header is unreadable or the record damaged, as in `ChunkCorruptError`; "" if neither.
        message: The cause as a sentence.
        selected: Whether its namespace is selected. If not, it was not verified.
    """

    stored: StoredRecord
    record_bytes: int = 0
    header: RecordHeader | None = None
    key_id: str = ""
    cause: str = ""
    message: str = ""
    selected: bool = True

    @property
    def namespace(self) -> str:
        """Text of the namespace; `encrypted_text` if it is encrypted; "" if it is unreadable."""
        if self.header is not None:
            return self.header.namespace
        return encrypted_text(self.key_id) if self.key_id else ""


def read_info(stored: StoredRecord, head: memoryview) -> RecordInfo:
    """Parse the beginning of a record, which contains the whole header."""
    try:
        _, record_bytes = peek_sizes(head)
        if is_encrypted(head):
            return RecordInfo(stored, record_bytes, key_id=envelope_key_id(head))
        header = read_header(head)
    except ChunkCorruptError as error:
        return RecordInfo(stored, cause=error.cause, message=str(error))
    if header.key != stored.key:
        return RecordInfo(stored, cause="key", message=f"its header has the key {header.key.hex()}")
    return RecordInfo(stored, record_bytes, header)


async def info_of(store: OfflineStore, stored: StoredRecord) -> RecordInfo | None:
    """Read the header of a record; None if the record was deleted.

    Raises:
        TierError: It cannot be read.
    """
    return await store.examine(stored, lambda pieces: read_info(stored, next(pieces)), header_only=True)


async def read_headers(
    store: OfflineStore, records: Sequence[StoredRecord], meter: Meter
) -> AsyncGenerator[RecordInfo | TierError | None, None]:
    """Yield the header of each record, in order.

    Instead of the header, yield the error if it cannot be read, and None if the record was deleted.

    Raises:
        TierUnavailableError: The store does not answer.
    """

    async def read(batch: Sequence[StoredRecord]) -> list[RecordInfo | TierError | None]:
        return [await _info_or_error(store, one) for one in batch]

    meter.begin("headers", records=len(records))
    batches = (records[start : start + _BATCH] for start in range(0, len(records), _BATCH))
    async with contextlib.aclosing(map_in_order(batches, read, in_flight=store.in_flight)) as results:
        async for batch in results:
            meter.advance(len(batch), 0)
            for info in batch:
                yield info


async def _info_or_error(store: OfflineStore, stored: StoredRecord) -> RecordInfo | TierError | None:
    try:
        return await info_of(store, stored)
    except TierUnavailableError:
        raise
    except TierError as error:
        return error


async def verify_record(
    store: OfflineStore, stored: StoredRecord, selection: Selection, cipher: RecordCipher | None = None
) -> RecordInfo | None:
    """Read and verify a record; None if it was deleted.

    Raises:
        TierError: It cannot be read.
    """
    return await store.examine(stored, partial(check, stored, selection=selection, cipher=cipher))


def check(
    stored: StoredRecord,
    pieces: Iterator[memoryview],
    *,
    selection: Selection,
    cipher: RecordCipher | None = None,
) -> RecordInfo:
    """Verify the checksums, lengths and key of a record.

    Args:
        stored: The record's entry in the listing.
        pieces: The record, in pieces as `memory.proof.prove` takes them.
        selection: Records of other namespaces are not verified.
        cipher: Decrypts encrypted records; without it only their outer checksum is verified.
    """
    first = next(pieces, memoryview(b""))
    info = read_info(stored, first)
    if not selection.takes(info.namespace):
        return replace(info, selected=False)
    if info.cause:
        return info
    header = info.header
    try:
        if info.key_id and cipher is not None:
            header = _decrypt(stored.key, chain((first,), pieces), info.record_bytes, cipher)
        else:
            prove(chain((first,), pieces), key=stored.key)
        if stored.nbytes and -(-info.record_bytes // PAGE) * PAGE != stored.nbytes:
            message = f"the header says {info.record_bytes} bytes, the file has {stored.nbytes}"
            raise ChunkCorruptError(message, cause="length")  # noqa: TRY301 - caught below, as errors of prove
        if header is not None:
            _check_tokens(header)
    except ChunkCorruptError as error:
        return replace(info, cause=error.cause, message=str(error))
    return replace(info, header=header)


def _decrypt(
    key: ChunkKey, pieces: Iterator[memoryview], record_bytes: int, cipher: RecordCipher
) -> RecordHeader:
    record = bytearray()
    for piece in pieces:
        record += piece[: record_bytes - len(record)]
        if len(record) == record_bytes:
            break
    view = memoryview(record)
    check_encrypted(view)
    cipher.decrypt(view, view, key)
    prove(iter([view]), key=key)
    return read_header(view)


def _check_tokens(header: RecordHeader) -> None:
    chunk_size = fields_of(header.namespace).get("chunk_size")
    most = chunk_size if isinstance(chunk_size, int) else len(header.tokens)
    if not 1 <= len(header.tokens) <= most:
        message = f"record {header.key.hex()} has {len(header.tokens)} tokens in chunks of {chunk_size}"
        raise ChunkCorruptError(message, cause="tokens")
