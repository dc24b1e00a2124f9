"""The worker half's answers: which of these keys are there. Runs in the engine's loop.

Only processes of the same user reach it: the socket lies in a directory of mode 0700.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from lmcache_async.integration.vllm.wire import Identity, Message, encode, receive
from lmcache_async.observability.logging import LimitedLogger
from lmcache_async.types import KEY_BYTES, ChunkKey

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

logger = LimitedLogger(logging.getLogger(__name__))


class Lookups(Protocol):
    """What the server needs of the engine."""

    async def lookup_keys(self, keys: Sequence[ChunkKey], *, lookup_id: str | None = None) -> Any: ...

    async def first_present(self, keys: Sequence[ChunkKey]) -> int | None: ...

    def unpin(self, lookup_id: str) -> None: ...


class LookupServer:
    """Serves `hello`, `lookup`, `first`, `unpin` and `clear` on a unix socket.

    Args:
        clear: Called with the new epoch and whether only memory is meant.
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
        self._running: set[str] = set()  # lookups that may still pin
        self._unwanted: set[str] = set()  # of these, those whose pins nobody wants any more

    async def start(self) -> None:
        self._path.unlink(missing_ok=True)  # left by a process that was killed; the name is this launch's own
        self._server = await asyncio.start_unix_server(self._accept, self._path)

    async def aclose(self) -> None:
        if self._server is None:
            return
        self._server.close()
        self._say_goodbye()
        connections = list(self._connections)  # each is a task of ours, so that it can be cancelled
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await self._server.wait_closed()
        self._path.unlink(missing_ok=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._converse(reader, writer))
        self._connections[task] = writer
        task.add_done_callback(self._connections.pop)

    def _say_goodbye(self) -> None:
        """The other ends need not wonder where we went: workers end before the scheduler does."""
        for writer in self._connections.values():
            if not writer.is_closing():
                writer.write(encode({"op": "goodbye"}))

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    message = await receive(reader)
                    group.create_task(self._serve(message, writer))
        except* (EOFError, ConnectionError):
            pass  # the scheduler half went away
        except* Exception as error:  # noqa: BLE001 - a border: a bad message ends its connection alone
            logger.report("connection", "lookup server: connection closed: %s", error.exceptions[0])
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _serve(self, message: Message, writer: asyncio.StreamWriter) -> None:
        try:
            answer = await self._answer(message)
        except Exception as error:  # noqa: BLE001 - a border: what fails here is a miss there
            logger.report(repr(error), "lookup server: %s failed: %r", message.get("op"), error)
            answer = {"error": repr(error)}
        if answer is not None and not writer.is_closing():
            writer.write(encode({"id": message.get("id"), **answer}))

    async def _answer(self, message: Message) -> Message | None:
        match message:
            case {"op": "lookup", "lookup_id": str(lookup_id), "keys": bytes(keys), "tail": bytes(tail)}:
                return await self._lookup(lookup_id, unpack_keys(keys), unpack_keys(tail))
            case {"op": "first", "keys": bytes(keys)}:
                return {"first": await self._first(unpack_keys(keys))}
            case {"op": "unpin", "lookup_id": str(lookup_id)}:
                self._unpin(lookup_id)
                return None
            case {"op": "clear", "epoch": int(epoch), "memory_only": bool(memory_only)}:
                return {"removed": await self._clear(epoch, memory_only)}
            case {"op": "hello"}:
                return asdict(self._identity)
        raise ValueError(f"no message of protocol {self._identity.protocol}: {message.get('op')!r}")

    async def _lookup(self, lookup_id: str, keys: list[ChunkKey], tail: list[ChunkKey]) -> Message:
        self._running.add(lookup_id)
        try:
            result = await self._engine.lookup_keys(keys, lookup_id=lookup_id)
            complete = result.count == len(keys)
            first = await self._first(tail) if complete else -1
        finally:
            self._running.discard(lookup_id)
            if lookup_id in self._unwanted:
                self._unwanted.discard(lookup_id)
                self._engine.unpin(lookup_id)
        return {"count": result.count, "tiers": dict(result.by_tier), "first": first}

    async def _first(self, keys: list[ChunkKey]) -> int:
        found = await self._engine.first_present(keys) if keys else None
        return -1 if found is None else found

    def _unpin(self, lookup_id: str) -> None:
        if lookup_id in self._running:
            self._unwanted.add(lookup_id)
        else:
            self._engine.unpin(lookup_id)


def unpack_keys(packed: bytes) -> list[ChunkKey]:
    if len(packed) % KEY_BYTES:
        raise ValueError(f"{len(packed)} bytes are no whole number of keys")
    return [ChunkKey(packed[at : at + KEY_BYTES]) for at in range(0, len(packed), KEY_BYTES)]
