"""Records encrypted at rest: bound to their chunk, one key to write and several to read, no nonce twice."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.errors import ChunkCorruptError, ConfigError, MissingDependencyError
from lmcache_async.memory.encryption import ENVELOPE_BYTES, RecordCipher, _Key
from lmcache_async.memory.header import peek_sizes, read_header
from lmcache_async.memory.record import RecordFormat, seal, verify, verify_stored
from lmcache_async.types import Chunk, ChunkKey

FORMAT = RecordFormat("namespace", "layout", "float32", 8, reserved_bytes=ENVELOPE_BYTES)
CHUNK = Chunk(ChunkKey(bytes(range(16))), 0, np.arange(8, dtype=np.int32))
OTHER = Chunk(ChunkKey(bytes(range(1, 17))), 0, np.arange(8, dtype=np.int32))
ONE, TWO = (bytes([n] * 16 + [n + 1] * 16) for n in (1, 2))


def sealed(payload: bytes = b"the payload" * 99, chunk: Chunk = CHUNK) -> memoryview:
    record = memoryview(bytearray(FORMAT.record_bytes(len(payload))))
    record[FORMAT.header_bytes :] = payload
    seal(
        record,
        format=FORMAT,
        chunk=chunk,
        request_namespace="",
        shape=(len(payload),),
        payload_bytes=len(payload),
    )
    return record


def encrypted(record: memoryview, cipher: RecordCipher, key: ChunkKey = CHUNK.key) -> memoryview:
    into = memoryview(bytearray(len(record)))
    cipher.encrypt(record, into, key)
    return into


def cause_of(record: memoryview, cipher: RecordCipher, key: ChunkKey = CHUNK.key) -> str:
    with pytest.raises(ChunkCorruptError) as caught:
        cipher.decrypt(record, memoryview(bytearray(len(record))), key)
    return caught.value.cause


@pytest.mark.parametrize(
    ("key", "bound", "expected"),
    [  # from the C2SP specification; one for each case of the subkey's carry
        (b"\x01" * 32, b"", "ce546ef63c9cc60765923609b33a9a1974e96e52daf2fcf7075e2271"),
        (b"\x03" * 32, b"c2sp.org/XAES-256-GCM", "986ec1832593df5443a179437fd083bf3fdb41abd740a21f71eb769d"),
    ],
)
def test_the_cipher_is_xaes_256_gcm(key, bound, expected):
    cipher = _Key.of(key).record_cipher(b"ABCDEFGHIJKLMNOPQRSTUVWX").encryptor()
    cipher.authenticate_additional_data(bound)

    assert (cipher.update(b"XAES-256-GCM") + cipher.finalize() + cipher.tag).hex() == expected


@given(
    st.binary(max_size=70)
    | st.integers(0, 3 << 18).map(lambda n: bytes(i % 251 for i in range(n % 997)) * (n // 997))
)
def test_decryption_restores_every_bit(payload):
    record, cipher = sealed(payload), RecordCipher([ONE])
    secret = encrypted(record, cipher)
    plain = memoryview(bytearray(len(record)))

    cipher.decrypt(secret, plain, CHUNK.key)

    assert plain == record
    assert peek_sizes(secret) == peek_sizes(record)
    verify_stored([secret], key=CHUNK.key)
    verify(plain, format=FORMAT, chunk=CHUNK, request_namespace="")


def test_a_record_is_decrypted_in_its_own_place():
    record, cipher = sealed(), RecordCipher([ONE])
    secret = encrypted(record, cipher)

    cipher.decrypt(secret, secret, CHUNK.key)

    assert secret == record


def test_no_two_records_share_a_byte_of_key_stream():
    cipher, record = RecordCipher([ONE]), sealed()
    secrets = {bytes(encrypted(record, cipher)) for _ in range(200)}

    assert len({secret[34:58] for secret in secrets}) == 200  # the nonces
    assert len({secret[ENVELOPE_BYTES : ENVELOPE_BYTES + 32] for secret in secrets}) == 200


@pytest.mark.parametrize("cut", [1, 4096])
def test_a_record_that_was_cut_or_grew_is_a_miss(cut):
    secret, cipher = encrypted(sealed(b"p" * 9000), RecordCipher([ONE])), RecordCipher([ONE])

    assert cause_of(secret[:-cut], cipher) == "length"
    assert cause_of(memoryview(bytearray(bytes(secret) + bytes(cut))), cipher) == "length"


def test_another_chunks_record_is_a_miss():
    secret = encrypted(sealed(), RecordCipher([ONE]))

    assert cause_of(secret, RecordCipher([ONE]), OTHER.key) == "tag"


def test_a_key_can_be_replaced_without_losing_a_record():
    old, both, new = RecordCipher([ONE]), RecordCipher([TWO, ONE]), RecordCipher([TWO])
    record = sealed()
    of_old, of_both = encrypted(record, old), encrypted(record, both)

    for cipher, secret in [(both, of_old), (both, of_both), (new, of_both)]:
        plain = memoryview(bytearray(len(record)))
        cipher.decrypt(secret, plain, CHUNK.key)
        assert plain == record
    assert cause_of(of_old, new) == "cipher_key"
    assert cause_of(of_both, old) == "cipher_key"


def test_a_record_in_the_clear_is_not_taken_for_an_encrypted_one():
    assert cause_of(sealed(), RecordCipher([ONE])) == "unencrypted"


def test_an_encrypted_record_is_a_miss_without_keys():
    with pytest.raises(ChunkCorruptError) as caught:
        read_header(encrypted(sealed(), RecordCipher([ONE])))

    assert caught.value.cause == "encrypted"


def test_a_header_without_room_for_the_envelope_is_refused():
    tight = RecordFormat("n" * 2000, "layout", "float32", 420)
    record = memoryview(bytearray(tight.record_bytes(8)))
    chunk = Chunk(CHUNK.key, 0, np.arange(420, dtype=np.int32), extra="e" * 500)
    seal(record, format=tight, chunk=chunk, request_namespace="", shape=(8,), payload_bytes=8)
    record[tight.header_bytes - 1] = 1

    with pytest.raises(ValueError, match="no room for the envelope"):
        encrypted(record, RecordCipher([ONE]))


@pytest.mark.parametrize("keys", [[], [b"short"], [ONE, b""]])
def test_keys_of_another_length_are_refused(keys):
    with pytest.raises(ConfigError, match="32 bytes"):
        RecordCipher(keys)


def test_a_cipher_never_shows_a_key():
    cipher = RecordCipher([ONE])

    assert ONE.hex() not in repr(cipher) + repr(vars(cipher))
    assert repr(ONE)[2:-1] not in repr(vars(cipher))
    assert cipher.key_id not in ONE.hex()


def test_without_its_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)

    with pytest.raises(MissingDependencyError, match=r"lmcache-async\[encryption\]"):
        RecordCipher([ONE])
