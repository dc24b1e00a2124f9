"""The daemon's socket: its path, checks of its directory, credentials of a peer, and waiting for data."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import struct
from pathlib import Path

from lmcache_async.config.values import MAX_SOCKET_PATH_BYTES
from lmcache_async.errors import ConfigError

NAME = "host.sock"
_PEER = struct.Struct("iII")  # struct ucred: process, user, group


def default_socket() -> Path:
    """Return the default socket of this user: in $XDG_RUNTIME_DIR, /run/user or /tmp.

    Daemon and clients need the same environment and file system; otherwise configure the path.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    base = Path(runtime)
    if _is_own_directory(base) and os.access(base, os.W_OK | os.X_OK):
        return base / "lmcache-async" / NAME
    return Path("/tmp") / f"lmcache-async-{os.getuid()}" / NAME


def socket_advice() -> str:
    """Return what to do if the socket, its lock or its directory cannot be created."""
    return f"name a path where user {os.geteuid()} can create files"


def check_directory(socket_path: Path, *, make: bool) -> None:
    """Check the length of the path, and that only this user can write to the directory of the default socket.

    The owner and mode of other directories are not checked. With `make`, a missing directory is created with mode 0700.
    """
    if len(os.fsencode(socket_path)) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"socket: {socket_path} is longer than the {MAX_SOCKET_PATH_BYTES} bytes that a socket's path may have"
        )
    directory = socket_path.parent
    if make:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"socket: cannot create {directory}: {error.strerror}; {socket_advice()}"
            ) from error
    if socket_path == default_socket() and directory.exists() and not _is_own_directory(directory):
        raise ConfigError(
            f"socket: {directory} must be a directory of user {os.getuid()} that others cannot write to;"
            " remove it, or name another socket"
        )


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process id and user id of the other end. The process id is 0 if it is in another PID namespace."""
    process, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return process, user


async def readable(connection: socket.socket) -> None:
    """Wait until a connection has data, or a listening socket a connection."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    loop.add_reader(connection, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(connection)


def _is_own_directory(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
