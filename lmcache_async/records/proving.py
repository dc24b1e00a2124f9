"""A record proven as far as it can be by itself: bytes, lengths, and its key against its tokens. Any thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from lmcache_async.errors import ChunkCorruptError, ConfigError, MissingDependencyError
from lmcache_async.hashing import digest_function, engine_root, hash_key_id, message_end
from lmcache_async.memory.buffer import PAGE
from lmcache_async.memory.encryption import RecordCipher, check_encrypted
from lmcache_async.memory.header import RecordHeader, read_header
from lmcache_async.memory.proof import prove
from lmcache_async.records.look import Looked, look_at
from lmcache_async.records.namespaces import Selection, fields_of
from lmcache_async.tiers.rest import Kept
from lmcache_async.types import ChunkKey

MAX_TRIES = 2048
"""Keys that are tried as the parent of one record: some milliseconds of one thread."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What became of one record.

    Attributes:
        looked: None of one that is gone.
        taken: Whether it is of a namespace that is meant.
        cause: Why it is wrong, by the words of `ChunkCorruptError`; "" where it is right.
        key_proof: `root` or `linked` where the key was computed again, else why that could not be.
        header: Of one that is right and not secret, or was opened.
    """

    looked: Looked | None
    taken: bool = True
    cause: str = ""
    message: str = ""
    key_proof: str = ""
    header: RecordHeader | None = None


class KeyProof:
    """Computes keys again: from the namespace's root, or from the key of a record that is there.

    A record does not name the chunk that it continues. What was used together has neighbouring stamps, the
    chunk before its continuation; so the keys just above are tried, nearest first.

    Args:
        kept: All records of the place.
        hash_key: The secret of a keyed hash; b"" where there is none or it is not at hand.
    """

    def __init__(self, kept: Sequence[Kept], hash_key: bytes = b"", max_tries: int = MAX_TRIES) -> None:
        newest_first = sorted(kept, key=lambda each: each.rank, reverse=True)
        self._keys = [each.key for each in newest_first]
        self._places = {key: place for place, key in enumerate(self._keys)}
        self._hash_key = hash_key
        self._max_tries = max_tries

    def of(self, header: RecordHeader) -> str:
        """`root`, `linked`, or the word for why it is not proven."""
        fields = fields_of(header.namespace)
        chunk_size, algorithm = fields.get("chunk_size"), fields.get("algorithm")
        if not isinstance(chunk_size, int) or not isinstance(algorithm, str):
            return "namespace"
        hash_key = b""
        if keyed := fields.get("hash_key"):
            if not self._hash_key or hash_key_id(self._hash_key) != keyed:
                return "hash_key"
            hash_key = self._hash_key
        if header.extra.startswith("sha256:"):
            return "extra"
        try:
            digest = digest_function(algorithm, hash_key)
        except (ConfigError, MissingDependencyError):
            return "algorithm"
        try:
            end = message_end(header.tokens, header.extra, chunk_size)
        except UnicodeEncodeError:  # no text that a key was ever made of
            return "extra"
        if (
            not header.request_namespace
            and digest(engine_root(header.namespace, algorithm, hash_key) + end) == header.key
        ):
            return "root"
        if any(digest(parent + end) == header.key for parent in self._candidates(header.key)):
            return "linked"
        return "request" if header.request_namespace else "parent"

    def _candidates(self, key: ChunkKey) -> Iterator[ChunkKey]:
        place = self._places.get(key, 0)
        above = self._keys[max(0, place - self._max_tries) : place]
        below = self._keys[place + 1 : place + 1 + self._max_tries]
        return islice(chain(reversed(above), below), self._max_tries)


def check(
    kept: Kept,
    pieces: Iterator[memoryview],
    *,
    selection: Selection,
    key_proof: KeyProof | None = None,
    cipher: RecordCipher | None = None,
) -> Checked:
    """Prove a record that is read in such pieces as `memory.proof.prove` takes.

    Args:
        key_proof: None leaves the key as the header has it, compared with the one that it is kept under.
        cipher: Opens encrypted records; without it they are proven by their outer checksum alone.
    """
    first = next(pieces, memoryview(b""))
    looked = look_at(kept, first)
    if not selection.takes(looked.namespace):
        return Checked(looked, taken=False)
    if looked.cause:
        return Checked(looked, cause=looked.cause, message=looked.message)
    header = looked.header
    try:
        if looked.key_id and cipher is not None:
            header = _open(kept.key, chain((first,), pieces), looked.record_bytes, cipher)
        else:
            prove(chain((first,), pieces), key=kept.key)
        if kept.nbytes and -(-looked.record_bytes // PAGE) * PAGE != kept.nbytes:
            message = f"the header says {looked.record_bytes} bytes, the file has {kept.nbytes}"
            raise ChunkCorruptError(message, cause="length")  # noqa: TRY301 - one place decides what is wrong
        if header is not None:
            _check_tokens(header)
    except ChunkCorruptError as error:
        return Checked(looked, cause=error.cause, message=str(error))
    if header is None:
        return Checked(looked, key_proof="encrypted")
    return Checked(looked, key_proof=key_proof.of(header) if key_proof is not None else "", header=header)


def _open(
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
