"""Encryption of records for tiers outside of the memory of the process: AES-256-GCM with a key per record.

An encrypted record has the length of the plain record. Its first page begins with a plaintext envelope: the
usual prefix of a record with a flag in the version, the key id, a nonce, a checksum and the tag. The encrypted
header and payload follow. The padding of the header has room for the envelope (`RecordFormat.reserved_bytes`).

The nonce has 192 random bits. 96 bits derive the AES key of the record, and 96 bits are the nonce of GCM:
this is XAES-256-GCM as specified by the C2SP. A nonce collision is unlikely even after 2**80 records under
one key, so no counters are needed across processes, ranks or restarts; see docs/decisions.
"""

from __future__ import annotations

import hmac
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import xxhash

from lmcache_async.errors import ChunkCorruptError, ConfigError, MissingDependencyError
from lmcache_async.memory.header import ENCRYPTED, MAGIC, VERSION, peek_sizes
from lmcache_async.types import KEY_BYTES, ChunkKey

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import AEADDecryptionContext, AEADEncryptionContext

CIPHER_KEY_BYTES = 32

_ENVELOPE = struct.Struct("<8sHIIQ8s24s16s16s")  # prefix of a record, key id, nonce, checksum, tag
_BOUND = struct.calcsize("<8sHIIQ8s24s")  # leading bytes of the envelope that the tag covers
ENVELOPE_BYTES = _ENVELOPE.size
"""Bytes that must be free at the end of a header."""

_NONCE_BYTES = 24
_STEP = 256 << 10  # bytes encrypted per call, about 30 µs: the longest time that the GIL is held


class RecordCipher:
    """Encrypts records with the first key and decrypts records of all keys. Call it in worker threads.

    Raises:
        ConfigError: There is no key, or a key of another length.
        MissingDependencyError: The package cryptography is not installed.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        if not keys or any(len(key) != CIPHER_KEY_BYTES for key in keys):
            raise ConfigError(f"encryption needs keys of {CIPHER_KEY_BYTES} bytes")
        made = [_Key.of(key) for key in keys]
        self._keys = {key.id: key for key in made}
        self._first = made[0]

    @property
    def key_id(self) -> str:
        """Id of the encryption key; not secret."""
        return self._first.id.hex()

    def encrypt(self, record: memoryview, into: memoryview, key: ChunkKey) -> None:
        """Encrypt a sealed record into memory of the same length that does not overlap it. The tag covers `key`.

        Raises:
            ValueError: The lengths differ, or the header has no room for the envelope.
        """
        header_bytes, record_bytes = peek_sizes(record)
        text_bytes = header_bytes - ENVELOPE_BYTES
        if not len(record) == len(into) == record_bytes or any(record[text_bytes:header_bytes]):
            raise ValueError(
                f"cannot encrypt a record of {record_bytes} bytes from {len(record)} into {len(into)} bytes of memory:"
                " the lengths differ, or its header has no room for the envelope"
            )
        nonce = os.urandom(_NONCE_BYTES)
        start = (MAGIC, VERSION | ENCRYPTED, header_bytes, ENVELOPE_BYTES, record_bytes - header_bytes)
        _ENVELOPE.pack_into(into, 0, *start, self._first.id, nonce, b"", b"")
        cipher = self._first.record_cipher(nonce).encryptor()
        cipher.authenticate_additional_data(bytes(into[:_BOUND]) + key)
        cipher.update_into(record[:text_bytes], into[ENVELOPE_BYTES:header_bytes])
        _update(cipher, record[header_bytes:], into[header_bytes:])
        cipher.finalize()
        checksum = xxhash.xxh3_128_digest(into[ENVELOPE_BYTES:])
        _ENVELOPE.pack_into(into, 0, *start, self._first.id, nonce, checksum, cipher.tag)

    def decrypt(self, record: memoryview, into: memoryview, key: ChunkKey) -> None:
        """Decrypt a record into memory of the same length, which may be that of the record.

        Raises:
            ChunkCorruptError: The record is not encrypted, encrypted with another key, of another chunk, or
                incomplete or changed. The content of `into` is undefined.
        """
        header_bytes, record_bytes = peek_sizes(record)
        _, version, _, envelope_bytes, _, key_id, nonce, _, tag = _ENVELOPE.unpack_from(record)
        if not version & ENCRYPTED:
            raise ChunkCorruptError("the record is not encrypted", cause="unencrypted")
        if envelope_bytes != ENVELOPE_BYTES or not len(record) == len(into) == record_bytes:
            raise ChunkCorruptError(
                f"the record has {len(record)} bytes, its envelope says {record_bytes}", cause="length"
            )
        ours = self._keys.get(key_id)
        if ours is None:
            raise ChunkCorruptError(
                f"the record is encrypted with the unknown key {key_id.hex()}", cause="cipher_key"
            )
        from cryptography.exceptions import InvalidTag

        cipher = ours.record_cipher(nonce).decryptor()
        cipher.authenticate_additional_data(bytes(record[:_BOUND]) + key)
        text = bytes(record[ENVELOPE_BYTES:header_bytes])  # a copy, because `into` may be `record`
        cipher.update_into(text, into[: len(text)])
        into[len(text) : header_bytes] = bytes(ENVELOPE_BYTES)
        _update(cipher, record[header_bytes:], into[header_bytes:])
        try:
            cipher.finalize_with_tag(tag)
        except InvalidTag:
            message = f"the record of key {key.hex()} cannot be decrypted: its tag is wrong"
            raise ChunkCorruptError(message, cause="tag") from None


def is_encrypted(first_page: memoryview) -> bool:
    """Return whether a record is encrypted, from its first 4096 bytes."""
    return bool(_ENVELOPE.unpack_from(first_page)[1] & ENCRYPTED)


def envelope_checksum(first_page: memoryview) -> bytes:
    """Return the xxh3_128 of all bytes after the envelope, from the first 4096 bytes of a record.

    Raises:
        ChunkCorruptError: The record has no valid envelope.
    """
    _, _, _, envelope_bytes, _, _, _, checksum, _ = _ENVELOPE.unpack_from(first_page)
    if envelope_bytes != ENVELOPE_BYTES:
        raise ChunkCorruptError(f"an envelope of {envelope_bytes} bytes", cause="length")
    return bytes(checksum)


def envelope_key_id(first_page: memoryview) -> str:
    """Return the id of the encryption key of a record, from its first 4096 bytes; not secret."""
    return bytes(_ENVELOPE.unpack_from(first_page)[5]).hex()


@dataclass(frozen=True, slots=True)
class _Key:
    """Encryption key, its id, and the derivation of a cipher for each record."""

    id: bytes
    _block: Any = field(repr=False)
    _subkey: int = field(repr=False)

    @classmethod
    def of(cls, key: bytes) -> _Key:
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        except ImportError as error:
            raise MissingDependencyError(
                "encryption.key_file and encryption.keys need the package cryptography: pip install 'lmcache-async[encryption]'"
            ) from error
        block = Cipher(algorithms.AES(key), modes.ECB())  # single blocks, for CMAC
        key_id = hmac.digest(key, b"lmcache-async encryption key id", "sha256")[:8]
        return cls(key_id, block, _subkey(block.encryptor().update(bytes(16))))

    def record_cipher(self, nonce: bytes) -> Any:
        """Return the AES-256-GCM cipher of the record with this nonce."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        encryptor = self._block.encryptor()
        messages = (bytes((0, half)) + b"X\0" + nonce[:12] for half in (1, 2))
        blocks = (int.from_bytes(message, "big") ^ self._subkey for message in messages)
        derived = b"".join(encryptor.update(block.to_bytes(16, "big")) for block in blocks)
        return Cipher(algorithms.AES(derived), modes.GCM(nonce[12:]))


def _subkey(block: bytes) -> int:
    """Return the first subkey of CMAC (RFC 4493): the encrypted zero block, doubled in GF(2**128)."""
    value = int.from_bytes(block, "big") << 1
    return (value ^ 0x87) & ((1 << 128) - 1) if value >> 128 else value


def _update(
    cipher: AEADEncryptionContext | AEADDecryptionContext, source: memoryview, into: memoryview
) -> None:
    for start in range(0, len(source), _STEP):
        cipher.update_into(source[start : start + _STEP], into[start : start + _STEP])


assert KEY_BYTES == 16  # the chunk key is the last part of the associated data; its length must be fixed
