"""The messages between the scheduler half and a worker half's lookup server, and where they meet.

A message is a 4-byte little-endian length and a msgpack map. The scheduler half asks, each request with
an `id`; the server answers with the same `id`, in any order. `unpin` has no answer. Before it ends by
itself, the server says `goodbye`.
"""

from __future__ import annotations

import math
import os
import socket
import stat
import struct
import tempfile
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgpack  # type: ignore[import-untyped]

from lmcache_async.errors import ConfigError
from lmcache_async.hashing import ALGORITHMS
from lmcache_async.types import KEY_BYTES, MAX_CHUNK_SIZE

if TYPE_CHECKING:
    import asyncio

PROTOCOL = 4
MAX_MESSAGE_BYTES = 16 << 20  # a million keys; more is no message of ours
MAX_TEXT_BYTES = 4096
_MAX_ENTRIES = 64  # of a map or a list
_PEER = struct.Struct("iII")  # struct ucred: process, user, group
MAX_PATH_BYTES = 100  # sockaddr_un takes 107

Message: TypeAlias = dict[str, Any]
Costs: TypeAlias = tuple[tuple[int, float], ...]
"""Behind how many chunks a tier's run ends, and seconds to load all up to there; both ascend."""
_COST = struct.Struct("<qd")


@dataclass(frozen=True, slots=True)
class Identity:
    """What a rank answers to `hello`: all that the scheduler half needs to compute the rank's keys."""

    protocol: int
    root: bytes
    algorithm: str
    chunk_size: int
    block_size: int
    hash_key_id: str = ""

    @classmethod
    def of(cls, message: Message) -> Identity:
        """What an answer to `hello` says.

        Raises:
            ValueError: It is another protocol's, or a field is not what it must be.
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
        raise ValueError(f"what the rank says of itself is no identity: {message!r:.200}")


def encode(message: Message) -> bytes:
    """The message's bytes.

    Raises:
        ValueError: It is longer than any message may be.
    """
    body: bytes = msgpack.packb(message, unicode_errors="backslashreplace")
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(body)} bytes is above the {MAX_MESSAGE_BYTES} there may be")
    return len(body).to_bytes(4, "little") + body


async def receive(reader: asyncio.StreamReader) -> Message:
    """The next message.

    Raises:
        EOFError: The other side closed (as IncompleteReadError).
        ValueError: What came is no message.
    """
    length = int.from_bytes(await reader.readexactly(4), "little")
    if length > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes is above the {MAX_MESSAGE_BYTES} there ever are")
    return _decode(await reader.readexactly(length))


def check_peer(writer: asyncio.StreamWriter) -> int:
    """The process at the other end, which belongs to our user.

    Raises:
        PermissionError: It belongs to another one.
    """
    connection = writer.get_extra_info("socket")
    process, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if user != os.geteuid():
        raise PermissionError(f"process {process} at the other end is user {user}'s, we are {os.geteuid()}'s")
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
        raise ValueError(f"{len(body)} bytes are no message: {error}") from None
    if not isinstance(message, dict):
        raise ValueError(f"a message is a map, not a {type(message).__name__}")  # noqa: TRY004
    return message


def socket_path(base: Path | None, engine_id: str, rank: int) -> Path:
    """Where the rank's server listens. Both halves find the same place by themselves.

    Args:
        base: The configured directory; None takes $XDG_RUNTIME_DIR or the directory for temporary files.

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
    """What a rank says of loading its hit of `chunks` chunks; no costs at all stand for no knowledge.

    Raises:
        ValueError: It makes no sense.
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
