"""New connections to the daemon: check of its user, handshake, and mapping of its memory."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lmcache_async.daemon.address import check_directory, peer_of
from lmcache_async.daemon.messages import (
    PROTOCOL,
    WELCOME_BYTES,
    Hello,
    Op,
    ProtocolError,
    Refusal,
    Welcome,
    pack_hello,
    unpack_welcome,
)
from lmcache_async.errors import ConfigError, TierUnavailableError
from lmcache_async.memory.region import Region
from lmcache_async.plugins.host.connection import Connection
from lmcache_async.plugins.host.mapping import Mapping

_MSG_CMSG_CLOEXEC = 0x40000000


@dataclass(frozen=True, slots=True)
class Dialer:
    """Opens connections to the daemon.

    Attributes:
        path: Path of the socket.
        hello: First message to the daemon.
        users: User ids that the daemon may run as.
        timeout_s: Longest time to connect, in seconds.
        pin: Whether to pin the memory for CUDA.
        pin_device: See `Region`.
        prefault: See `Region`.
    """

    path: Path
    hello: Hello
    users: frozenset[int]
    timeout_s: float
    pin: bool
    pin_device: int | None
    prefault: bool

    @property
    def where(self) -> str:
        return f"daemon at {self.path}"

    async def dial(self, ended: Callable[[Connection], None]) -> Connection:
        """Connect and wait for a first answer. If the call is cancelled, no connection is left open.

        Args:
            ended: Called once, after the connection has ended.

        Raises:
            TierUnavailableError: The daemon cannot be reached, is not ready, runs as another user, or breaks
                the protocol.
        """
        try:
            check_directory(self.path, make=False)
            async with asyncio.timeout(self.timeout_s):
                return await self._dial(ended)
        except TimeoutError as error:
            raise TierUnavailableError(
                f"{self.where}: no connection within connect_timeout_s of {self.timeout_s} s"
            ) from error
        except (OSError, ProtocolError, ConfigError) as error:
            raise TierUnavailableError(f"{self.where}: no connection: {error}") from error

    async def _dial(self, ended: Callable[[Connection], None]) -> Connection:
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as undo:
            connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            undo.callback(connected.close)
            await loop.sock_connect(connected, os.fspath(self.path))
            _, user = peer_of(connected)
            if user not in self.users:
                raise PermissionError(f"it runs as user {user}, which is none of {sorted(self.users)}")
            await loop.sock_sendall(connected, pack_hello(self.hello))
            anchor = connected.dup()
            undo.callback(anchor.close)
            welcome, region = await self._receive(connected)
            mapping = Mapping(region, anchor)
            undo.callback(mapping.end)
            connection = Connection(self.where, welcome.daemon, mapping, ended)
            await loop.create_unix_connection(lambda: connection, sock=connected)
            undo.pop_all()
        try:
            await connection.ask(Op.CONTAINS, timeout_s=self.timeout_s)  # it answers, with the first figures
        except BaseException:
            connection.close(TierUnavailableError(f"{self.where}: given up"))
            await connection.wait_closed()
            raise
        return connection

    async def _receive(self, connected: socket.socket) -> tuple[Welcome, Region]:
        """Receive the daemon's answer and map its memory."""
        await _readable(connected)
        message, descriptors, _, _ = socket.recv_fds(connected, WELCOME_BYTES, 4, _MSG_CMSG_CLOEXEC)
        try:
            if len(message) != WELCOME_BYTES:
                raise ProtocolError("it closed the connection" if not message else "its answer is too short")
            welcome = unpack_welcome(message)
            _check(welcome)
            if len(descriptors) != 1:
                raise ProtocolError(f"{len(descriptors)} descriptors came with its answer")
            return welcome, self._map(descriptors[0], welcome.nbytes)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _map(self, descriptor: int, nbytes: int) -> Region:
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ProtocolError("its memory may be cut short")
        return Region(
            nbytes,
            grain_bytes=nbytes,  # a record at any offset must be within one pinned range
            pin=self.pin,
            pin_device=self.pin_device,
            huge_pages=True,
            prefault=self.prefault,
            fd=descriptor,
        )


def _check(welcome: Welcome) -> None:
    if welcome.refusal is Refusal.TOO_MUCH:
        raise ProtocolError("it has as many clients as it may have")
    if welcome.refusal is not Refusal.NONE:
        raise ProtocolError(f"it speaks protocol {welcome.protocol}, we speak {PROTOCOL}")


async def _readable(connected: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable = loop.create_future()
    loop.add_reader(connected, lambda: None if readable.done() else readable.set_result(None))
    try:
        await readable
    finally:
        loop.remove_reader(connected)
