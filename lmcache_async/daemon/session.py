"""A client's connection to the daemon: its messages and its leases."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import cast

from lmcache_async.daemon import messages
from lmcache_async.daemon.messages import Figures, FrameParser, Grant, Op, ProtocolError, Refusal, frame
from lmcache_async.daemon.pool import Block, Pool
from lmcache_async.errors import ChunkCorruptError
from lmcache_async.logging import LimitedLogger
from lmcache_async.memory.buffer import pages
from lmcache_async.memory.header import peek_sizes
from lmcache_async.types import ChunkKey

logger = LimitedLogger(logging.getLogger(__name__))


class Session(asyncio.Protocol):
    """Serves one connection. All leases and reservations of the client end with it.

    After a malformed message the daemon sends no further answers and closes its side of the connection. Leases last
    until the client closes its side, because it may still be writing to the memory. While a client does not read
    its answers, no further messages are read from it.

    Args:
        pool: The records.
        tenant: Tenant of the client.
        max_lease_bytes: Maximum bytes of leases and reservations of the client, in whole pages.
        ended: Called once, after all leases were released.
    """

    def __init__(
        self, pool: Pool, tenant: str, max_lease_bytes: int, ended: Callable[[Session], None]
    ) -> None:
        self.tenant = tenant
        self._max_lease_bytes = max_lease_bytes
        self._pool = pool
        self._ended = ended
        self._parser = FrameParser()
        self._transport: asyncio.Transport | None = None
        self._process: int | None = None  # pidfd of the client
        self._paused = False
        self._is_ended = False
        self._leases: dict[int, Block] = {}
        self._lease_bytes = 0
        self._next_lease = 1
        self._listing: list[ChunkKey] | None = None
        self._verbs: dict[Op, Callable[[bytes], bytes]] = {
            Op.CONTAINS: self._contains,
            Op.LEASE: self._lease,
            Op.RESERVE: self._reserve,
            Op.COMMIT: self._commit,
            Op.REMOVE: self._remove,
            Op.KEYS: self._keys,
            Op.CLEAR: self._clear,
        }

    def watch(self, process: int) -> None:
        """End the session when that process ends. Children may inherit the connection, but not the mapped memory."""
        if not process or self._is_ended:  # in another PID namespace, or the session has ended
            return
        try:
            self._process = os.pidfd_open(process)
        except ProcessLookupError:
            self.close()
        except OSError as error:  # for example a sandbox without this system call
            logger.report(
                "pidfd",
                "process %d cannot be watched; its leases end when its connection is closed: %s",
                process,
                error,
            )
        else:
            asyncio.get_running_loop().add_reader(self._process, self.close)

    def close(self) -> None:
        """Abort the connection, when the daemon closes or the client's process has ended."""
        self._unwatch()
        if self._transport is not None:
            self._transport.abort()

    def _unwatch(self) -> None:
        if self._process is not None:
            asyncio.get_running_loop().remove_reader(self._process)
            os.close(self._process)
            self._process = None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._is_ended:
            return
        self._parser.feed(data)
        self._serve()

    def pause_writing(self) -> None:
        self._paused = True
        assert self._transport is not None
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused = False
        assert self._transport is not None
        self._transport.resume_reading()
        self._serve()

    def connection_lost(self, error: Exception | None) -> None:
        del error
        self._is_ended = True
        self._unwatch()
        leases, self._leases = self._leases, {}
        for block in leases.values():
            self._pool.release(block)
        self._lease_bytes = 0
        self._ended(self)

    # Messages

    def _serve(self) -> None:
        """Answer received messages while the client reads the answers."""
        transport = self._transport
        assert transport is not None
        try:
            while not (self._paused or self._is_ended) and (message := self._parser.take()) is not None:
                op, body = message
                if op is Op.RELEASE:
                    self._release(body)
                else:
                    answer = self._verbs[op](body)
                    transport.write(frame(op, self._figures(), answer))
        except ProtocolError as error:
            self._fail(str(error))
        except Exception as error:  # noqa: BLE001 - an error in a message ends only the session of its client
            self._fail(f"{error!r:.200}")

    def _fail(self, why: str) -> None:
        logger.report("protocol", "client of tenant %r: connection ended: %s", self.tenant, why)
        self._is_ended = True
        self._parser = FrameParser()
        assert self._transport is not None
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def _figures(self) -> bytes:
        held = self._pool.tenant_statistics(self.tenant)
        return messages.pack_figures(Figures(held.chunks, held.record_bytes, held.max_bytes, held.evictions))

    def _contains(self, body: bytes) -> bytes:
        return bytes(self._pool.contains(self.tenant, _keys_of(body)))

    def _lease(self, body: bytes) -> bytes:
        keys = _keys_of(body)
        grants: list[Grant] = []
        for key in keys:
            block = self._pool.lease(self.tenant, key)
            grants.append(Grant.refused(Refusal.MISSING) if block is None else self._grant(block))
        # Touch the keys together, so that the start of the prompt is the most recently used.
        self._pool.contains(self.tenant, keys)
        return messages.pack(messages.GRANT, grants)

    def _reserve(self, body: bytes) -> bytes:
        grants: list[Grant] = []
        for key, nbytes in messages.unpack(messages.RESERVATION, body):
            if self._pool.contains(self.tenant, [key])[0]:
                grants.append(Grant.refused(Refusal.PRESENT))
            elif self._lease_bytes + pages(nbytes) > self._max_lease_bytes:
                grants.append(Grant.refused(Refusal.TOO_MUCH))
            else:
                block = self._pool.reserve(self.tenant, key, nbytes)
                grants.append(Grant.refused(Refusal.FULL) if block is None else self._grant(block))
        return messages.pack(messages.GRANT, grants)

    def _grant(self, block: Block) -> Grant:
        if self._lease_bytes + block.held_bytes > self._max_lease_bytes:
            self._pool.release(block)
            return Grant.refused(Refusal.TOO_MUCH)
        lease = self._next_lease
        self._next_lease += 1
        self._leases[lease] = block
        self._lease_bytes += block.held_bytes
        return Grant(lease, block.offset, block.nbytes)

    def _commit(self, body: bytes) -> bytes:
        commits = list(messages.unpack(messages.COMMIT, body))
        for lease, key in commits:
            block = self._leases.get(lease)
            if block is None or not block.reserved or block.key != key:
                raise ProtocolError(f"this client has no reservation {lease}")
        if len({lease for lease, _ in commits}) < len(commits):
            raise ProtocolError("a message commits the same lease twice")
        outcomes: list[Refusal] = []
        for lease, _ in reversed(commits):  # as for leases: prefixes are the most recently used
            block = self._take(lease)
            if _is_record(block):
                self._pool.commit(block)
                outcomes.append(Refusal.NONE)
            else:
                self._pool.release(block)
                outcomes.append(Refusal.MISSING)
        return bytes(reversed(outcomes))

    def _release(self, body: bytes) -> None:
        for (lease,) in messages.unpack(messages.NUMBER, body):
            if lease not in self._leases:
                raise ProtocolError(f"this client has no lease {lease}")
            self._pool.release(self._take(lease))

    def _take(self, lease: int) -> Block:
        block = self._leases.pop(lease)
        self._lease_bytes -= block.held_bytes
        return block

    def _remove(self, body: bytes) -> bytes:
        return bytes(self._pool.remove(self.tenant, key) for key in _keys_of(body))

    def _keys(self, body: bytes) -> bytes:
        """Return a part of the list of keys, from the requested position on. Position 0 creates the list."""
        [(start,)] = messages.unpack(messages.NUMBER, body, 1)
        if start == 0:
            self._listing = self._pool.keys(self.tenant)
        if self._listing is None:
            raise ProtocolError(f"a listing was continued at position {start}, but none was started")
        keys = self._listing[start : start + messages.MAX_ITEMS]
        if len(keys) < messages.MAX_ITEMS:  # the end
            self._listing = None
        return b"".join(keys)

    def _clear(self, body: bytes) -> bytes:
        if body:
            raise ProtocolError(f"a clear request must be empty, but has {len(body)} bytes")
        return messages.NUMBER.pack(self._pool.clear(self.tenant))


def _keys_of(body: bytes) -> list[ChunkKey]:
    return [key for (key,) in messages.unpack(messages.KEY, body)]


def _is_record(block: Block) -> bool:
    """Whether the block begins with the header of a record of its length. Readers verify the rest."""
    try:
        _, record_bytes = peek_sizes(block.view)
    except ChunkCorruptError:
        return False
    return record_bytes == block.nbytes
