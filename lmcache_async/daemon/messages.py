"""Protocol between the daemon and its clients: encoding and decoding of messages. No I/O.

A frame is a 4-byte little-endian length of the body, one byte for the operation, and the body. The daemon
answers requests in order, with frames of the same operation. The body of an answer begins with the tenant's
figures. `RELEASE` has no answer. The first message and its answer, `Hello` and `Welcome`, have a fixed length
and no frame; the descriptor of the memory is sent with `Welcome`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from lmcache_async.types import KEY_BYTES, ChunkKey

PROTOCOL = 1
MAGIC = b"lmca-hst"
MAX_ITEMS = 16384
"""Items of one message; enough for a prompt of four million tokens."""
MAX_TENANT_BYTES = 64
ID_BYTES = 16

_HEAD = struct.Struct("<IB")
_HELLO = struct.Struct(f"<8sIQ{MAX_TENANT_BYTES}s")  # magic, protocol, maximum lease bytes, tenant
_WELCOME = struct.Struct(f"<8sIB{ID_BYTES}sQQ")  # magic, protocol, refusal, daemon, bytes, maximum of leases
_FIGURES = struct.Struct("<QQQQ")
_WISH = struct.Struct(f"<{KEY_BYTES}sQ")  # key, bytes
_GRANT = struct.Struct("<QQQ")  # lease or 0, offset or refusal, bytes
_COMMIT = struct.Struct(f"<Q{KEY_BYTES}s")  # lease, key
_KEY = struct.Struct(f"{KEY_BYTES}s")
_NUMBER = struct.Struct("<Q")

HELLO_BYTES = _HELLO.size
WELCOME_BYTES = _WELCOME.size
MAX_BODY_BYTES = _FIGURES.size + MAX_ITEMS * max(_WISH.size, _GRANT.size, _COMMIT.size)


class ProtocolError(Exception):
    """The received bytes are not a message of this protocol."""


class Op(IntEnum):
    """Operation of a frame."""

    CONTAINS = 1
    LEASE = 2
    RESERVE = 3
    COMMIT = 4
    RELEASE = 5
    REMOVE = 6
    KEYS = 7
    CLEAR = 8


class Refusal(IntEnum):
    """Reason why a lease or a connection was refused; result of a commit."""

    NONE = 0
    MISSING = 1
    """The key has no record. For a commit: the bytes are not a record."""
    PRESENT = 2
    """The key has a record already."""
    FULL = 3
    """The pool is full."""
    TOO_MUCH = 4
    """The client would exceed its limit of lease bytes. For a connection: there are too many clients."""
    PROTOCOL = 5


class Hello(NamedTuple):
    """The client's first message."""

    protocol: int
    tenant: str
    max_lease_bytes: int


class Welcome(NamedTuple):
    """The daemon's answer.

    Attributes:
        protocol: Protocol version of the daemon.
        refusal: NONE if the memory's descriptor is sent with the message.
        daemon: Identifier of the daemon, which changes with a restart.
        nbytes: Size of the memory.
        max_lease_bytes: Maximum bytes of leases of this client.
    """

    protocol: int
    refusal: Refusal
    daemon: bytes
    nbytes: int
    max_lease_bytes: int


class Figures(NamedTuple):
    """Figures of the tenant at the time of an answer; see `TenantStatistics`."""

    chunks: int = 0
    record_bytes: int = 0
    max_bytes: int = 0
    evictions: int = 0


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease of a record's memory by its number on this connection, or with number 0 a refusal."""

    lease: int
    offset: int = 0
    nbytes: int = 0
    refusal: Refusal = Refusal.NONE


def pack_hello(hello: Hello) -> bytes:
    return _HELLO.pack(MAGIC, hello.protocol, hello.max_lease_bytes, hello.tenant.encode())


def unpack_hello(message: bytes) -> Hello:
    magic, protocol, max_lease_bytes, tenant = _HELLO.unpack(message)
    if magic != MAGIC:
        raise ProtocolError("the client's first message is not a greeting of this protocol")
    try:
        return Hello(protocol, tenant.rstrip(b"\0").decode(), max_lease_bytes)
    except UnicodeDecodeError:
        raise ProtocolError("the tenant's name is not valid UTF-8") from None


def pack_welcome(welcome: Welcome) -> bytes:
    return _WELCOME.pack(MAGIC, *welcome)


def unpack_welcome(message: bytes) -> Welcome:
    magic, protocol, refusal, daemon, nbytes, max_lease_bytes = _WELCOME.unpack(message)
    if magic != MAGIC:
        raise ProtocolError("the peer is not an lmcache-async daemon")
    return Welcome(protocol, _refusal(refusal), daemon, nbytes, max_lease_bytes)


def frame(op: Op, *parts: bytes) -> bytes:
    """Encode a frame with these parts as its body."""
    return b"".join((_HEAD.pack(sum(map(len, parts)), op), *parts))


class Frames:
    """Parser of frames from a stream of bytes."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        self._bytes += data

    def take(self) -> tuple[Op, bytes] | None:
        """Return the next frame; None until it is complete."""
        if len(self._bytes) < _HEAD.size:
            return None
        length, kind = _HEAD.unpack_from(self._bytes)
        if length > MAX_BODY_BYTES:
            raise ProtocolError(f"a frame has {length} bytes, at most {MAX_BODY_BYTES} are allowed")
        stop = _HEAD.size + length
        if len(self._bytes) < stop:
            return None
        body = bytes(self._bytes[_HEAD.size : stop])
        del self._bytes[:stop]
        try:
            return Op(kind), body
        except ValueError:
            raise ProtocolError(f"the message type {kind} is unknown") from None


def pack_figures(figures: Figures) -> bytes:
    return _FIGURES.pack(*figures)


def unpack_figures(body: bytes) -> tuple[Figures, bytes]:
    """Return the figures and the rest of the answer."""
    if len(body) < _FIGURES.size:
        raise ProtocolError(f"an answer of {len(body)} bytes is too short")
    return Figures(*_FIGURES.unpack_from(body)), body[_FIGURES.size :]


def pack_keys(keys: Sequence[ChunkKey]) -> bytes:
    return b"".join(keys)


def unpack_keys(body: bytes) -> list[ChunkKey]:
    return [ChunkKey(key) for (key,) in _items(_KEY, body)]


def pack_wishes(wishes: Iterable[tuple[ChunkKey, int]]) -> bytes:
    """Encode a request for reservations: keys and lengths of records."""
    return b"".join(_WISH.pack(key, nbytes) for key, nbytes in wishes)


def unpack_wishes(body: bytes) -> list[tuple[ChunkKey, int]]:
    return [(ChunkKey(key), nbytes) for key, nbytes in _items(_WISH, body)]


def pack_grants(grants: Iterable[Grant]) -> bytes:
    return b"".join(
        _GRANT.pack(grant.lease, grant.offset if grant.lease else grant.refusal, grant.nbytes)
        for grant in grants
    )


def unpack_grants(body: bytes, count: int, memory_bytes: int) -> list[Grant]:
    """Decode the expected number of grants, each within the memory."""
    _check_count(body, _GRANT.size, count)
    grants = [
        Grant(lease, offset, nbytes) if lease else Grant(0, refusal=_refusal(offset))
        for lease, offset, nbytes in _GRANT.iter_unpack(body)
    ]
    if any(grant.offset + grant.nbytes > memory_bytes for grant in grants):
        raise ProtocolError(f"a lease is not within the {memory_bytes} bytes of the memory")
    return grants


def pack_commits(commits: Iterable[tuple[int, ChunkKey]]) -> bytes:
    """Encode leases of reservations and the keys of their records."""
    return b"".join(_COMMIT.pack(lease, key) for lease, key in commits)


def unpack_commits(body: bytes) -> list[tuple[int, ChunkKey]]:
    return [(lease, ChunkKey(key)) for lease, key in _items(_COMMIT, body)]


def pack_numbers(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def unpack_numbers(body: bytes) -> list[int]:
    return [number for (number,) in _items(_NUMBER, body)]


def unpack_flags(body: bytes, count: int) -> list[int]:
    """Decode one byte for each requested item."""
    _check_count(body, 1, count)
    return list(body)


def _items(form: struct.Struct, body: bytes) -> Iterator[tuple[Any, ...]]:
    if len(body) % form.size or len(body) > MAX_ITEMS * form.size:
        raise ProtocolError(
            f"a body of {len(body)} bytes does not consist of at most {MAX_ITEMS} items of {form.size} bytes"
        )
    return form.iter_unpack(body)


def _check_count(body: bytes, size: int, count: int) -> None:
    if len(body) != count * size:
        raise ProtocolError(f"an answer for {count} items has {len(body)} bytes, expected {count * size}")


def _refusal(number: int) -> Refusal:
    try:
        return Refusal(number)
    except ValueError:
        raise ProtocolError(f"the refusal code {number} is unknown") from None
