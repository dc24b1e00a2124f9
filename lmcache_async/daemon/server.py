"""The daemon: shared memory, the pool of records in it, and the Unix socket for clients."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from lmcache_async.daemon.address import check_directory, default_socket, peer_of, readable, socket_advice
from lmcache_async.daemon.config import DaemonConfig
from lmcache_async.daemon.messages import (
    HELLO_BYTES,
    PROTOCOL,
    Hello,
    ProtocolError,
    Refusal,
    Welcome,
    pack_welcome,
    unpack_hello,
)
from lmcache_async.daemon.pool import Pool
from lmcache_async.daemon.session import Session
from lmcache_async.daemon.status import DaemonSource
from lmcache_async.errors import ConfigError
from lmcache_async.logging import LimitedLogger
from lmcache_async.memory.buffer import PAGE
from lmcache_async.memory.region import Region
from lmcache_async.metrics.endpoint import status_server

logger = LimitedLogger(logging.getLogger(__name__))

_BACKLOG = 128
_RETRY_S = 0.1
_MAX_GREETINGS = 64
"""Maximum number of connections that have not sent their greeting."""
_CLOSE_S = 5.0


class Daemon:
    """One pool, served on a Unix socket. Used on one loop; open it as an async context."""

    pool: Pool
    status_url: str | None = None

    def __init__(self, config: DaemonConfig) -> None:
        self.path: Path = config.socket or default_socket()
        self._config = config
        self._nbytes = config.max_bytes // PAGE * PAGE
        self._memory_fd = -1
        self._sessions: set[Session] = set()
        self._greetings: set[asyncio.Task[None]] = set()
        self._no_sessions = asyncio.Event()
        self._exit = contextlib.AsyncExitStack()

    @property
    def clients(self) -> int:
        """Number of connected clients."""
        return len(self._sessions)

    async def __aenter__(self) -> Self:
        """Allocate the memory and listen."""
        config = self._config
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(_locked(self.path))
            self._memory_fd, memory = stack.enter_context(
                shared_memory(self._nbytes, huge_pages=config.huge_pages, prefault=config.prefault)
            )
            self.pool = Pool(memory, quotas=config.tenants, other_quota=config.other_tenants)
            if config.http.listen is not None:
                page = status_server(DaemonSource(self.pool, self.path, lambda: self.clients), config.http)
                self.status_url = (await stack.enter_async_context(page)).url
            stack.push_async_callback(self._end_sessions)
            listener = stack.enter_context(_listener(self.path, for_all=bool(config.allow_uids)))
            accepting = asyncio.create_task(self._accept(listener))
            stack.push_async_callback(self._stop, accepting)
            self._exit = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        """Stop listening and close all connections. Clients keep the memory that they have mapped."""
        await self._exit.aclose()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            # Not loop.sock_accept: a cancellation could lose the accepted connection.
            await readable(listener)
            try:
                connection, _ = listener.accept()
            except BlockingIOError:  # the client has gone
                continue
            except OSError as error:  # no descriptors left; may be temporary
                logger.report("accept", "no connection can be accepted: %s", error)
                await asyncio.sleep(_RETRY_S)
                continue
            if len(self._greetings) >= _MAX_GREETINGS:
                connection.close()
                continue
            task = asyncio.create_task(self._greet(connection))
            self._greetings.add(task)
            task.add_done_callback(self._greetings.discard)

    async def _greet(self, connection: socket.socket) -> None:
        """Check a new connection and start its session."""
        with contextlib.ExitStack() as undo:
            undo.callback(connection.close)
            try:
                async with asyncio.timeout(self._config.greeting_timeout_s):
                    process, user = peer_of(connection)
                    if user not in {os.geteuid(), *self._config.allow_uids}:
                        raise PermissionError(
                            f"process {process} belongs to user {user}, which is not in allow_uids"
                        )
                    hello = unpack_hello(await _receive(connection, HELLO_BYTES))
                    welcome = self._answer(hello)
                    served = welcome.refusal is Refusal.NONE
                    # The empty socket buffer takes the whole message.
                    descriptors = [self._memory_fd] if served else []
                    socket.send_fds(connection, [pack_welcome(welcome)], descriptors)
                    if served:
                        session = Session(
                            self.pool, hello.tenant, welcome.max_lease_bytes, self._session_ended
                        )
                        self._sessions.add(session)
                        undo.callback(self._session_ended, session)
                        loop = asyncio.get_running_loop()
                        await loop.connect_accepted_socket(lambda: session, connection)
                        session.watch(process)
                        undo.pop_all()
            except TimeoutError:
                logger.report(
                    "late",
                    "a connection was refused: no greeting arrived within greeting_timeout_s of %g s",
                    self._config.greeting_timeout_s,
                )
            except (OSError, EOFError, ProtocolError) as error:
                logger.report(type(error).__name__, "a connection was refused: %s", error)

    def _answer(self, hello: Hello) -> Welcome:
        refusal = Refusal.NONE
        if hello.protocol != PROTOCOL:
            refusal = Refusal.PROTOCOL
        elif len(self._sessions) >= self._config.max_clients:
            refusal = Refusal.TOO_MUCH
        most = min(self._config.client_bytes, hello.max_lease_bytes or self._config.client_bytes)
        return Welcome(PROTOCOL, refusal, self._nbytes, most)

    def _session_ended(self, session: Session) -> None:
        self._sessions.discard(session)
        if not self._sessions:
            self._no_sessions.set()

    async def _stop(self, accepting: asyncio.Task[None]) -> None:
        accepting.cancel()
        try:
            # After this wait every greeting task has started, so its cancellation closes its connection.
            await asyncio.wait({accepting})
        finally:
            for greeting in self._greetings:
                greeting.cancel()
            await asyncio.gather(*self._greetings, return_exceptions=True)

    async def _end_sessions(self) -> None:
        if not self._sessions:
            return
        self._no_sessions.clear()
        for session in tuple(self._sessions):
            session.close()
        async with asyncio.timeout(_CLOSE_S):
            await self._no_sessions.wait()


@contextlib.contextmanager
def shared_memory(nbytes: int, *, huge_pages: bool, prefault: bool) -> Iterator[tuple[int, memoryview]]:
    """Provide zeroed memory in an anonymous file, as the descriptor of the file and a view of the memory.

    The length of the file is sealed, because access beyond the end of a truncated file kills the process. The
    memory exists as long as a process maps it.
    """
    descriptor = os.memfd_create("lmcache-async", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        try:
            os.ftruncate(descriptor, nbytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            region = Region(
                nbytes,
                grain_bytes=nbytes,
                pin=False,
                pin_device=None,
                huge_pages=huge_pages,
                prefault=prefault,
                fd=descriptor,
            )
        except (OSError, ConfigError) as error:
            raise ConfigError(
                f"max_bytes: cannot allocate {nbytes} bytes of shared memory: choose a smaller pool"
            ) from error
        try:
            yield descriptor, region.view
        finally:
            region.close()
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file beside the socket. Only its holder may remove a stale socket and listen."""
    check_directory(path, make=True)
    lock = path.with_name(path.name + ".lock")
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(f"socket: cannot create {lock}: {error.strerror}; {socket_advice()}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"socket: another daemon listens at {path} already; stop it, or name another socket"
            ) from None
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _listener(path: Path, *, for_all: bool) -> Iterator[socket.socket]:
    """Listen at `path`. A stale socket there is removed first, and the new socket at the end."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    with listener, contextlib.ExitStack() as undo:
        try:
            _remove_socket(path)  # left by a daemon that was killed
            listener.bind(os.fspath(path))
            undo.callback(_remove_own, path, path.lstat())
            path.chmod(0o666 if for_all else 0o600)
            listener.listen(_BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"socket: cannot listen at {path}: {error.strerror}; {socket_advice()}"
            ) from error
        yield listener


def _remove_socket(path: Path) -> None:
    try:
        there = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(there.st_mode):
        raise ConfigError(
            f"socket: {path} exists and is not a socket: name another path for the socket, or move that file"
        )
    path.unlink()


def _remove_own(path: Path, ours: os.stat_result) -> None:
    """Remove the file at `path` if it is still `ours`."""
    with contextlib.suppress(OSError):  # removed already, or unreachable for clients too
        if os.path.samestat(path.lstat(), ours):
            path.unlink()


async def _receive(connection: socket.socket, nbytes: int) -> bytes:
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    received = b""
    while len(received) < nbytes:
        piece = await loop.sock_recv(connection, nbytes - len(received))
        if not piece:
            raise EOFError("the client closed the connection before its greeting")
        received += piece
    return received
