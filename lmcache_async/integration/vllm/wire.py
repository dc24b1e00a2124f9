"""The messages between the scheduler half and a worker half's lookup server, and where they meet.

A message is a 4-byte little-endian length and a msgpack map. The scheduler half asks, each request with
an `id`; the server answers with the same `id`, in any order. `unpin` has no answer. Before it ends by
itself, the server says `goodbye`.
"""

from __future__ import annotations

import os
import stat
import tempfile
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgpack  # type: ignore[import-untyped]

from lmcache_async.errors import ConfigError

if TYPE_CHECKING:
    import asyncio

PROTOCOL = 2
MAX_MESSAGE_BYTES = 64 << 20  # keys of a prompt of a billion tokens; more is no message of ours
MAX_PATH_BYTES = 100  # sockaddr_un takes 107

Message: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Identity:
    """What a rank answers to `hello`: all that the scheduler half needs to compute the rank's keys."""

    protocol: int
    root: bytes
    algorithm: str
    chunk_size: int
    block_size: int
    hash_key_id: str = ""


def encode(message: Message) -> bytes:
    body: bytes = msgpack.packb(message)
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
    message = msgpack.unpackb(await reader.readexactly(length), strict_map_key=False)
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
