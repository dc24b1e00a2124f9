"""Lookup server of a rank: answers which of the asked keys are stored. Runs on the engine's loop.

Only processes of the same user can connect: the socket is in a directory of mode 0700, and the user of each peer is
checked. An invalid message, or a peer that does not read its answers, affects only its own connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from lmcache_async.errors import ConfigError
from lmcache_async.integration.vllm.lookup_protocol import (
    Identity,
    Message,
    check_peer,
    encode,
    pack_costs,
    receive,
    unpack_keys,
)
from lmcache_async.observability.logging import LimitedLogger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from lmcache_async.types import ChunkKey

logger = LimitedLogger(logging.getLogger(__name__))

_MAX_CONNECTIONS = 16  # one scheduler connects; the others are connections that it has lost
_MAX_REQUESTS = 256  # of one connection at the same time; more wait in its socket
_MAX_REQUEST_BYTES = 32 << 20  # the same in bytes, one more request allowed
_RETRY_S = 0.05


class Lookups(Protocol):
    """The parts of the engine that the server uses."""

    async def lookup_keys(self, keys: Sequence[ChunkKey], *, lookup_id: str | None = None) -> Any: ...

    async def first_present(self, keys: Sequence[ChunkKey], *, lookup_id: str | None = None) -> Any: ...

    def unpin(self, lookup_id: str) -> None: ...


class LookupServer:
    """Serves `hello`, `lookup`, `first`, `unpin` and `clear` on a unix socket.

    Args:
        clear: Clears the cache; called with the new epoch and whether only memory is cleared.
    """

    def __init__(
        self,
        engine: Lookups,
        identity: Identity,
        path: Path,
        *,
        clear: Callable[[int, bool], Awaitable[int]],
    ) -> None:
        self._engine = engine
        self._identity = identity
        self._path = path
        self._clear = clear
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._running: Counter[str] = Counter()  # lookups that may still pin
        self._closing = False
        self._released: set[str] = set()  # lookups of these that were released meanwhile

    async def start(self, *, wait_s: float = 5.0) -> None:
        """Listen.

        Args:
            wait_s: Longest wait for a former process to close its socket.

        Raises:
            ConfigError: A running process listens there, or the socket cannot be created.
        """
        deadline = time.monotonic() + wait_s
        while (process := await _listener(self._path)) is not None:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"kv_transfer_config.engine_id: process {process} serves {self._path} already;"
                    " give each vLLM an engine_id of its own, or none"
                )
            await asyncio.sleep(_RETRY_S)
        try:
            self._path.unlink(missing_ok=True)  # left by a killed process
            self._server = await asyncio.start_unix_server(self.accept, self._path)
            self._path.chmod(0o600)
        except OSError as error:
            raise ConfigError(f"vllm.socket_dir: cannot listen at {self._path}: {error}") from error

    async def aclose(self) -> None:
        if self._server is None:
            return
        self._path.unlink(
            missing_ok=True
        )  # before closing, because afterwards another process may create a socket at this path
        self._closing = True
        self._server.close()
        self._say_goodbye()
        connections = list(self._connections)  # each is a task, so that it can be cancelled
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await self._server.wait_closed()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a new connection. Called by the server that `start` opens."""
        if self._closing:  # accepted by the loop before it was closed
            writer.close()
            return
        try:
            check_peer(writer)
            if len(self._connections) >= _MAX_CONNECTIONS:
                raise ConnectionRefusedError(f"{_MAX_CONNECTIONS} connections are open already")
        except OSError as error:
            logger.report(type(error).__name__, "lookup server: connection refused: %s", error)
            writer.close()
            return
        task = asyncio.ensure_future(self._converse(reader, writer))
        self._connections[task] = writer
        task.add_done_callback(lambda task: self._connections.pop(task).close())

    def _say_goodbye(self) -> None:
        """Announce the end, because workers stop before the scheduler does."""
        for writer in self._connections.values():
            if not writer.is_closing():
                writer.write(encode({"op": "goodbye"}))

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        load = _Load()
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await load.wait_light()
                    message = await receive(reader)
                    task = group.create_task(self._serve(message, writer))
                    task.add_done_callback(
                        partial(self._served, load, load.add(message), self._claim(message))
                    )
                    del message
        except* (EOFError, ConnectionError):
            pass  # the scheduler closed the connection
        except* Exception as error:  # noqa: BLE001 - an invalid message ends only its connection
            logger.report("connection", "lookup server: connection closed: %s", error.exceptions[0])
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _serve(self, message: Message, writer: asyncio.StreamWriter) -> None:
        try:
            answer = await self._answer(message)
        except Exception as error:  # noqa: BLE001 - a failure here is a miss there
            text = f"{error!r:.200}"
            logger.report(type(error).__name__, "lookup server: a request failed: %s", text)
            answer = {"error": text}
        if answer is not None and not writer.is_closing():
            message_id = message.get("id")
            writer.write(encode({"id": message_id if isinstance(message_id, int) else None, **answer}))
            await writer.drain()  # a peer that does not read is not served further

    async def _answer(self, message: Message) -> Message | None:
        match message:
            case {"op": "lookup", "lookup_id": str(lookup_id), "keys": bytes(keys), "tail": bytes(tail)}:
                return await self._lookup(lookup_id, unpack_keys(keys), unpack_keys(tail))
            case {"op": "first", "lookup_id": str(lookup_id), "keys": bytes(keys)}:
                return await self._first(lookup_id, unpack_keys(keys))
            case {"op": "unpin", "lookup_id": str(lookup_id)}:
                self._unpin(lookup_id)
                return None
            case {"op": "clear", "epoch": int(epoch), "memory_only": bool(memory_only)}:
                return {"removed": await self._clear(epoch, memory_only)}
            case {"op": "hello"}:
                return asdict(self._identity)
        raise ValueError(f"unknown message of protocol {self._identity.protocol}: {message.get('op')!r:.40}")

    async def _lookup(self, lookup_id: str, keys: list[ChunkKey], tail: list[ChunkKey]) -> Message:
        result = await self._engine.lookup_keys(keys, lookup_id=lookup_id)
        first = await self._first(lookup_id, tail if result.count == len(keys) else [])
        return {
            "count": result.count,
            "pinned": result.pinned,
            "tiers": dict(result.by_tier),
            "costs": pack_costs(result.costs),
            **first,
        }

    async def _first(self, lookup_id: str, keys: list[ChunkKey]) -> Message:
        found = await self._engine.first_present(keys, lookup_id=lookup_id) if keys else None
        if found is None:
            return {"first": -1, "first_pinned": False}
        return {"first": found.position, "first_pinned": found.pinned}

    def _claim(self, message: Message) -> str | None:
        """The lookup id that this message may pin for. Its `unpin` may be served before the message."""
        match message:
            case {"op": "lookup" | "first", "lookup_id": str(lookup_id)}:
                self._running[lookup_id] += 1
                return lookup_id
        return None

    def _served(self, load: _Load, nbytes: int, lookup_id: str | None, _: object) -> None:
        """A message was answered or given up. Unpin if the lookup was released meanwhile."""
        load.remove(nbytes)
        if lookup_id is None:
            return
        self._running[lookup_id] -= 1
        if not self._running[lookup_id]:
            del self._running[lookup_id]
            if lookup_id in self._released:
                self._released.discard(lookup_id)
                self._engine.unpin(lookup_id)

    def _unpin(self, lookup_id: str) -> None:
        if lookup_id in self._running:
            self._released.add(lookup_id)
        else:
            self._engine.unpin(lookup_id)


class _Load:
    """Unanswered requests of one connection."""

    def __init__(self) -> None:
        self._requests = 0
        self._bytes = 0
        self._lighter = asyncio.Event()

    def add(self, message: Message) -> int:
        nbytes = sum(len(value) for value in message.values() if isinstance(value, bytes))
        self._requests += 1
        self._bytes += nbytes
        return nbytes

    def remove(self, nbytes: int) -> None:
        self._requests -= 1
        self._bytes -= nbytes
        self._lighter.set()

    async def wait_light(self) -> None:
        while self._requests >= _MAX_REQUESTS or self._bytes >= _MAX_REQUEST_BYTES:
            self._lighter.clear()
            await self._lighter.wait()


async def _listener(path: Path) -> int | None:
    """Process id of the running process that listens at `path`; None if there is none."""
    try:
        async with asyncio.timeout(1.0):
            _, writer = await asyncio.open_unix_connection(path)
    except (OSError, TimeoutError):
        return None
    try:
        process = check_peer(writer)
        if process:  # 0 means another PID namespace, so it is running
            os.kill(process, 0)
    except ProcessLookupError:
        return None  # only its children still have the socket
    except PermissionError:
        return None  # another user's process; the directory is ours
    finally:
        writer.close()
    return process
