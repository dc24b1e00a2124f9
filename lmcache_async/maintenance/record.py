"""Header and verification of single records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from lmcache_async.errors import ChunkCorruptError, TierError, TierUnavailableError
from lmcache_async.maintenance.concurrency import Progress, for_each
from lmcache_async.maintenance.namespaces import EVERYTHING, Selection, encrypted_text, fields_of
from lmcache_async.memory.buffer import PAGE
from lmcache_async.memory.encryption import RecordCipher, envelope_key_id, is_encrypted
from lmcache_async.memory.header import RecordHeader, peek_sizes, read_header
from lmcache_async.memory.record import verify_stored
from lmcache_async.tiers.offline import OfflineStore, StoredRecord
from lmcache_async.types import ChunkKey

GONE, ERROR, PASSED_OVER = "gone", "error", "passed_over"
"""Outcomes of a record without a verdict: deleted meanwhile, not readable, of a namespace that is not selected."""
MAX_LISTED = 100
"""Records that a report lists with their cause."""


@dataclass(frozen=True, slots=True)
class RecordInfo:
    """Outcome of reading a header, or of the verification of a record."""

    stored: StoredRecord
    record_bytes: int = 0  # 0 if the header is unreadable
    header: RecordHeader | None = None  # None if unreadable, or encrypted and not decrypted
    key_id: str = ""  # of the encryption key
    cause: str = ""  # as in `ChunkCorruptError`, or GONE, ERROR, PASSED_OVER
    message: str = ""

    @property
    def damaged(self) -> bool:
        return self.cause not in {"", GONE, ERROR, PASSED_OVER}

    @property
    def namespace(self) -> str:
        """Text of the namespace; `encrypted_text` if it is encrypted; "" if it is unreadable."""
        if self.header is not None:
            return self.header.namespace
        return encrypted_text(self.key_id) if self.key_id else ""

    def list_in(self, listed: list[dict[str, str]]) -> None:
        """Append key, cause and message, unless `MAX_LISTED` records are listed."""
        if len(listed) < MAX_LISTED:
            listed.append({"key": self.stored.key.hex(), "cause": self.cause, "message": self.message})


async def examine(
    store: OfflineStore,
    stored: StoredRecord,
    selection: Selection = EVERYTHING,
    *,
    header_only: bool = False,
    cipher: RecordCipher | None = None,
) -> RecordInfo:
    """Read and verify a record, or only its header."""

    def visit(pieces: Iterator[memoryview]) -> RecordInfo:
        if header_only:
            return _parsed(stored, next(pieces, memoryview(b"")), selection)
        return check(stored, pieces, selection=selection, cipher=cipher)

    try:
        info = await store.examine(stored, visit, header_only=header_only)
    except TierUnavailableError:
        raise
    except TierError as error:
        return RecordInfo(stored, cause=ERROR, message=str(error))
    return info or RecordInfo(stored, cause=GONE)


async def read_headers(
    store: OfflineStore,
    records: Sequence[StoredRecord],
    visit: Callable[[RecordInfo], None],
    progress: Progress,
) -> None:
    """Call `visit` with the header of each record, in no order."""

    async def work(stored: StoredRecord) -> int:
        visit(await examine(store, stored, header_only=True))
        return 0

    await for_each("headers", records, work, progress, in_flight=store.in_flight)


def check(
    stored: StoredRecord,
    pieces: Iterator[memoryview],
    *,
    selection: Selection = EVERYTHING,
    cipher: RecordCipher | None = None,
) -> RecordInfo:
    """Verify checksums, lengths and key of a record; without `cipher`, only the outer checksum of an encrypted one."""
    first = next(pieces, memoryview(b""))
    info = _parsed(stored, first, selection)
    if info.cause:
        return info
    header = info.header
    try:
        if info.key_id and cipher is not None:
            header = _decrypt(stored.key, chain((first,), pieces), info.record_bytes, cipher)
        else:
            verify_stored(chain((first,), pieces), key=stored.key)
        if stored.nbytes and -(-info.record_bytes // PAGE) * PAGE != stored.nbytes:
            message = f"the header says {info.record_bytes} bytes, the file has {stored.nbytes}"
            raise ChunkCorruptError(message, cause="length")  # noqa: TRY301 - caught below, as errors of verify_stored
        if header is not None:
            _check_tokens(header)
    except ChunkCorruptError as error:
        return replace(info, cause=error.cause, message=str(error))
    return replace(info, header=header)


def _parsed(stored: StoredRecord, head: memoryview, selection: Selection) -> RecordInfo:
    """Parse the beginning of a record, which contains the whole header."""
    try:
        _, record_bytes = peek_sizes(head)
        if is_encrypted(head):
            info = RecordInfo(stored, record_bytes, key_id=envelope_key_id(head))
        else:
            info = RecordInfo(stored, record_bytes, read_header(head))
    except ChunkCorruptError as error:
        info = RecordInfo(stored, cause=error.cause, message=str(error))
    if info.header is not None and info.header.key != stored.key:
        info = RecordInfo(stored, cause="key", message=f"its header has the key {info.header.key.hex()}")
    return info if selection.takes(info.namespace) else replace(info, cause=PASSED_OVER)


def _decrypt(
    key: ChunkKey, pieces: Iterator[memoryview], record_bytes: int, cipher: RecordCipher
) -> RecordHeader:
    record = bytearray()
    for piece in pieces:
        record += piece[: record_bytes - len(record)]
        if len(record) == record_bytes:
            break
    view = memoryview(record)
    verify_stored([view], key=key)
    cipher.decrypt(view, view, key)
    verify_stored([view], key=key)
    return read_header(view)


def _check_tokens(header: RecordHeader) -> None:
    chunk_size = fields_of(header.namespace).get("chunk_size")
    most = chunk_size if isinstance(chunk_size, int) else len(header.tokens)
    if not 1 <= len(header.tokens) <= most:
        message = f"record {header.key.hex()} has {len(header.tokens)} tokens in chunks of {chunk_size}"
        raise ChunkCorruptError(message, cause="tokens")
