"""Messages between the scheduler connector and the lookup server of each rank, and the path of the server's socket.

A message is a 4-byte little-endian length and a msgpack map. The scheduler sends requests, each with an `id`.
The server answers with the same `id`, in any order. `unpin` has no answer. The server sends `goodbye` before it
closes.
"""

from __future__ import annotations

import math
import os
import socket
import stat
import struct
import tempfile
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgpack  # type: ignore[import-untyped]

from lmcache_async.errors import ConfigError
from lmcache_async.hashing import ALGORITHMS
from lmcache_async.types import KEY_BYTES, MAX_CHUNK_SIZE, ChunkKey

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping, Sequence

PROTOCOL = 4
MAX_MESSAGE_BYTES = 16 << 20  # a million keys
MAX_TEXT_BYTES = 4096
_MAX_ENTRIES = 64  # of a map or a list
_PEER = struct.Struct("iII")  # struct ucred: process, user, group
MAX_PATH_BYTES = 100  # sockaddr_un takes 107

Message: TypeAlias = dict[str, Any]
Costs: TypeAlias = tuple[tuple[int, float], ...]
"""For each run of chunks in one tier: the number of chunks up to its end, and the seconds to load all of them.
Both ascend."""
_COST = struct.Struct("<qd")


@dataclass(frozen=True, slots=True)
class Identity:
    """Answer of a rank to `hello`: everything that is needed to compute the rank's keys."""

    protocol: int
    root: bytes
    algorithm: str
    chunk_size: int
    block_size: int
    hash_key_id: str = ""

    @classmethod
    def of(cls, message: Message) -> Identity:
        """Read an answer to `hello`.

        Raises:
            ValueError: The protocol version differs, or a field is invalid.
        """
        if message.get("protocol") != PROTOCOL:
            raise ValueError(f"the rank speaks protocol {message.get('protocol')!r:.40}, we speak {PROTOCOL}")
        match message:
            case {
                "root": bytes(root),
                "algorithm": str(algorithm),
                "chunk_size": int(chunk_size),
                "block_size": int(block_size),
                "hash_key_id": str(hash_key_id),
            } if (
                len(root) == KEY_BYTES
                and algorithm in ALGORITHMS
                and 1 <= block_size <= chunk_size <= MAX_CHUNK_SIZE
            ):
                return cls(PROTOCOL, root, algorithm, chunk_size, block_size, hash_key_id)
        raise ValueError(f"the rank's answer to hello is invalid: {message!r:.200}")


@dataclass(frozen=True, slots=True)
class Answer:
    """The part of a request that every rank has.

    Attributes:
        chunks: Leading full chunks.
        partial_tokens: Tokens of the partial chunk after them; 0 for none.
        partial_keys: Key of the partial chunk, by rank.
        partial_text: Extra text of the partial chunk.
        tiers: Number of chunks by the id of the tier that has them, on the first rank.
        pinned: A rank holds leases for this lookup until it is told to release them.
        resident: Every rank holds leases for the whole hit: all of it stays in host memory.
        costs: Cost of loading the full chunks, until the slowest rank has finished.
    """

    chunks: int = 0
    partial_tokens: int = 0
    partial_keys: tuple[bytes, ...] = ()
    partial_text: str = ""
    tiers: Mapping[str, int] = field(default_factory=dict)
    pinned: bool = False
    resident: bool = False
    costs: Costs = ()

    def hit_tokens(self, chunk_size: int) -> int:
        """Number of leading tokens that are stored."""
        return self.chunks * chunk_size + self.partial_tokens


MISS = Answer()


def encode(message: Message) -> bytes:
    """Encode a message.

    Raises:
        ValueError: The message is longer than `MAX_MESSAGE_BYTES`.
    """
    body: bytes = msgpack.packb(message, unicode_errors="backslashreplace")
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(body)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
    return len(body).to_bytes(4, "little") + body


async def receive(reader: asyncio.StreamReader) -> Message:
    """Read the next message.

    Raises:
        EOFError: The peer closed the connection (as IncompleteReadError).
        ValueError: The bytes are not a message.
    """
    length = int.from_bytes(await reader.readexactly(4), "little")
    if length > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
    return _decode(await reader.readexactly(length))


def check_peer(writer: asyncio.StreamWriter) -> int:
    """Return the process id of the peer.

    Raises:
        PermissionError: The peer's process belongs to another user.
    """
    connection = writer.get_extra_info("socket")
    process, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if user != os.geteuid():
        raise PermissionError(f"the peer's process {process} belongs to user {user}, expected {os.geteuid()}")
    return int(process)


def _decode(body: bytes) -> Message:
    try:
        message = msgpack.unpackb(
            body,
            strict_map_key=True,
            max_str_len=MAX_TEXT_BYTES,
            max_bin_len=len(body),
            max_array_len=_MAX_ENTRIES,
            max_map_len=_MAX_ENTRIES,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise ValueError(f"{len(body)} bytes are not a message: {error}") from None
    if not isinstance(message, dict):
        raise ValueError(f"a message is a map, not a {type(message).__name__}")  # noqa: TRY004
    return message


def socket_path(base: Path | None, engine_id: str, rank: int) -> Path:
    """Path of the socket of a rank's lookup server. Scheduler and worker compute the same path.

    Args:
        base: The configured directory; None for $XDG_RUNTIME_DIR or the directory for temporary files.

    Raises:
        ConfigError: The directory cannot be used, or the path is too long for a socket.
    """
    if base is not None:
        _check_base(base)
    name = f"{sha256(engine_id.encode()).hexdigest()[:16]}-{rank}.sock"
    path = _private_directory(base or _default_base()) / name
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ConfigError(
            f"vllm.socket_dir: {path} is longer than the {MAX_PATH_BYTES} bytes that a socket's path may have; "
            f"name a shorter directory"
        )
    return path


def _default_base() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK | os.X_OK):
        return Path(runtime)
    return Path(tempfile.gettempdir())


def _check_base(base: Path) -> None:
    try:
        mode = base.stat().st_mode
    except OSError as error:
        raise ConfigError(f"vllm.socket_dir: {base} cannot be used: {error.strerror}") from None
    if not stat.S_ISDIR(mode):
        raise ConfigError(f"vllm.socket_dir: {base} is no directory")
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise ConfigError(
            f"vllm.socket_dir: {base} has mode {stat.S_IMODE(mode):04o}, so anybody may replace what is in it:"
            " take others' permission to write (chmod o-w), set the sticky bit (chmod +t) or name another directory"
        )


def _private_directory(base: Path) -> Path:
    path = base / f"lmcache-async-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise ConfigError(f"vllm.socket_dir: cannot make {path}: {error}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"vllm.socket_dir: {path} must be a directory of user {os.getuid()} with mode 0700; "
            f"remove it or name another directory"
        )
    return path


def pack_costs(costs: Costs) -> bytes:
    return b"".join(_COST.pack(*cost) for cost in costs)


def unpack_costs(packed: object, chunks: int) -> Costs:
    """Read a rank's costs of loading its hit of `chunks` chunks; empty if they are not known.

    Raises:
        ValueError: The costs are invalid.
    """
    if not isinstance(packed, bytes) or len(packed) % _COST.size or len(packed) > chunks * _COST.size:
        raise ValueError(f"a rank answered {packed!r:.40} as costs of {chunks} chunks")
    costs = tuple(_COST.iter_unpack(packed))
    before, before_s = 0, 0.0
    for end, seconds in costs:
        if not (before < end <= chunks and before_s <= seconds < math.inf):
            raise ValueError(f"a rank answered {costs!r:.80} as costs of {chunks} chunks")
        before, before_s = end, seconds
    return costs


def slowest(costs: Sequence[Costs], chunks: int) -> Costs:
    """Cost of loading the first `chunks` chunks, if every rank has to finish."""
    ends = sorted({min(end, chunks) for each in costs for end, _ in each} - {0})
    return tuple((end, max(seconds_up_to(each, end) for each in costs)) for end in ends)


def seconds_up_to(costs: Costs, chunks: float) -> float:
    """Seconds to load `chunks` leading chunks, interpolated within a run."""
    before, before_s = 0, 0.0
    for end, end_s in costs:
        if chunks <= end:
            return min(end_s, before_s + (end_s - before_s) * (chunks - before) / (end - before))
        before, before_s = end, end_s
    return before_s


def unpack_keys(packed: bytes) -> list[ChunkKey]:
    if len(packed) % KEY_BYTES:
        raise ValueError(f"{len(packed)} bytes are not a whole number of keys")
    return [ChunkKey(packed[at : at + KEY_BYTES]) for at in range(0, len(packed), KEY_BYTES)]
