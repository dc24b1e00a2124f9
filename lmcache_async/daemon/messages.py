"""Protocol between the daemon and its clients: encoding and decoding of messages. No I/O.

A frame is a 4-byte little-endian length of the body, one byte for the operation, and the body. The daemon
answers requests in order, with frames of the same operation. The body of an answer begins with the tenant's
figures. `RELEASE` has no answer. The first message and its answer, `Hello` and `Welcome`, have a fixed length
and no frame; the descriptor of the memory is sent with `Welcome`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from lmcache_async.types import KEY_BYTES

PROTOCOL = 1
MAGIC = b"lmca-hst"
MAX_ITEMS = 16384
"""Items of one message; enough for a prompt of four million tokens."""
MAX_TENANT_BYTES = 64

_HEAD = struct.Struct("<IB")
_HELLO = struct.Struct(f"<8sIQ{MAX_TENANT_BYTES}s")  # magic, protocol, maximum lease bytes, tenant
_WELCOME = struct.Struct("<8sIB16xQQ")  # magic, protocol, refusal, unused, bytes, maximum of leases
_FIGURES = struct.Struct("<QQQQ")
KEY = struct.Struct(f"{KEY_BYTES}s")
NUMBER = struct.Struct("<Q")
"""A lease, a number of records, or a position in a list of keys."""
FLAG = struct.Struct("B")
"""Result for one item: a bool, or the `Refusal` of a commit."""
RESERVATION = struct.Struct(f"<{KEY_BYTES}sQ")
"""Key and bytes of a reservation."""
GRANT = struct.Struct("<QQQ")
"""Fields of a `Grant`."""
COMMIT = struct.Struct(f"<Q{KEY_BYTES}s")
"""Lease of a reservation and its key."""

HELLO_BYTES = _HELLO.size
WELCOME_BYTES = _WELCOME.size
MAX_BODY_BYTES = _FIGURES.size + MAX_ITEMS * max(RESERVATION.size, GRANT.size, COMMIT.size)


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
        nbytes: Size of the memory.
        max_lease_bytes: Maximum bytes of leases of this client.
    """

    protocol: int
    refusal: Refusal
    nbytes: int
    max_lease_bytes: int


class Figures(NamedTuple):
    """Figures of the tenant at the time of an answer; see `TenantStatistics`."""

    chunks: int = 0
    record_bytes: int = 0
    max_bytes: int = 0
    evictions: int = 0


class Grant(NamedTuple):
    """A lease of a record's memory. `lease` is its number on this connection.

    With number 0 no lease was granted, and `offset` is the `Refusal`.
    """

    lease: int
    offset: int
    nbytes: int

    @classmethod
    def refused(cls, why: Refusal) -> Grant:
        return cls(0, why, 0)


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
    magic, protocol, refusal, nbytes, max_lease_bytes = _WELCOME.unpack(message)
    if magic != MAGIC:
        raise ProtocolError("the peer is not an lmcache-async daemon")
    return Welcome(protocol, _refusal(refusal), nbytes, max_lease_bytes)


def frame(op: Op, *parts: bytes) -> bytes:
    """Encode a frame with these parts as its body."""
    return b"".join((_HEAD.pack(sum(map(len, parts)), op), *parts))


class FrameParser:
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


def pack(form: struct.Struct, items: Iterable[Sequence[Any]]) -> bytes:
    """Encode a body of items."""
    return b"".join([form.pack(*item) for item in items])


def unpack(form: struct.Struct, body: bytes, count: int | None = None) -> Iterator[tuple[Any, ...]]:
    """Decode a body of `count` items; if that is None, of any number up to `MAX_ITEMS`."""
    if count is not None and len(body) != count * form.size:
        raise ProtocolError(f"a body for {count} items has {len(body)} bytes, expected {count * form.size}")
    if len(body) % form.size or len(body) > MAX_ITEMS * form.size:
        raise ProtocolError(
            f"a body of {len(body)} bytes does not consist of at most {MAX_ITEMS} items of {form.size} bytes"
        )
    return form.iter_unpack(body)


def unpack_grants(body: bytes, count: int, memory_bytes: int) -> list[Grant]:
    """Decode `count` grants, each within the memory."""
    grants = [Grant._make(item) for item in unpack(GRANT, body, count)]
    for grant in grants:
        if not grant.lease:
            _refusal(grant.offset)
        elif grant.offset + grant.nbytes > memory_bytes:
            raise ProtocolError(f"a lease is not within the {memory_bytes} bytes of the memory")
    return grants


def _refusal(number: int) -> Refusal:
    try:
        return Refusal(number)
    except ValueError:
        raise ProtocolError(f"the refusal code {number} is unknown") from None
