"""The host tier: chunks in the memory of a daemon, read and written in place."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Self, TypeVar

from lmcache_async.daemon.messages import (
    COMMIT,
    FLAG,
    KEY,
    MAX_ITEMS,
    NUMBER,
    RESERVATION,
    Grant,
    Op,
    ProtocolError,
    Refusal,
    pack,
    unpack,
    unpack_grants,
)
from lmcache_async.errors import BudgetExceededError, TierError, TierFullError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.plugins.host.config import HostConfig
from lmcache_async.plugins.host.connection import Connection, Reconnector
from lmcache_async.plugins.host.copying import Copier
from lmcache_async.plugins.host.diagnosis import check_daemon, check_huge_pages
from lmcache_async.tiers.base import Allocate, Capabilities, Medium, TierStatistics
from lmcache_async.tiers.bundled import BundledTier
from lmcache_async.tiers.diagnosis import Check
from lmcache_async.tiers.results import no_memory, read_results
from lmcache_async.types import ChunkKey

T = TypeVar("T")

_TOO_MUCH = "this engine has reached its limit of leased bytes in the daemon's pool; see max_lease_bytes"


class HostTier(BundledTier[HostConfig, Reconnector]):
    """Reads and writes the records of its tenant in memory that a daemon shares with all engines of the host.

    A get copies nothing: its buffer is a lease of the daemon's memory. A put copies once, in threads. If the
    daemon cannot be reached when the tier is opened, or the connection is lost, the tier reconnects in the
    background. Until then every call raises TierUnavailableError. Leases stay valid after the daemon has
    ended.

    A put that is cancelled during its commit may still be stored.
    """

    config_type = HostConfig

    def __init__(self, config: HostConfig) -> None:
        super().__init__(config, "host tier")
        self._pin = False
        self._pin_device: int | None = None
        self._copier: Copier | None = None
        self._last_max_bytes: int | None = None
        self._listing = asyncio.Lock()  # a connection has one list at a time

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(own_memory=True, persistent=True, removes=True, lists=True, medium=Medium.MEMORY)

    def diagnose(self, *, sample_bytes: int | None = None) -> Iterator[Check]:
        del sample_bytes
        yield check_daemon(self.config)
        yield check_huge_pages()

    def bind(self, arena: Arena) -> None:
        """Pin the pool if the arena is pinned, for the same device."""
        self._pin = arena.pin and self.config.pin
        self._pin_device = arena.pin_device

    async def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Look up the keys in one message per `MAX_ITEMS` keys. Records that exist count as used."""
        return await self._flags(Op.CONTAINS, keys)

    async def get_many(self, keys: Sequence[ChunkKey], allocate: Allocate) -> list[Buffer | TierError | None]:
        """Return leases of records in the daemon's memory, with one message per `MAX_ITEMS` keys.

        `allocate` is not called. A chunk above this engine's limit of leases gets a TierError caused by
        BudgetExceededError.
        """
        del allocate
        with self._connected() as connection, read_results(0) as results:
            for batch in _batches(keys):
                for grant in await self._request_grants(connection, Op.LEASE, b"".join(batch), len(batch)):
                    if grant.lease:
                        results.append(connection.mapping.lend(grant))
                    elif grant.offset == Refusal.TOO_MUCH:
                        results.append(no_memory(BudgetExceededError(_TOO_MUCH)))
                    else:
                        results.append(None)
        return results

    async def put_many(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[TierError | None]:
        """Reserve memory with one message per `MAX_ITEMS` records, copy, and commit with another one.

        Records that exist are not copied again. If cancelled, it waits until no copy runs.
        """
        results: list[TierError | None] = []
        with self._connected() as connection:
            for batch in _batches(items):
                results += await self._put(connection, batch)
        return results

    async def remove(self, key: ChunkKey) -> bool:
        return (await self._flags(Op.REMOVE, [key]))[0]

    async def keys(self) -> AsyncIterator[ChunkKey]:
        """Yield the keys of all records of the tenant, as of one moment."""
        for key in await self._listed():
            yield key

    async def clear(self) -> int:
        """Remove all records of the tenant, including those of other engines."""
        with self._connected() as connection:
            [(count,)] = unpack(NUMBER, await connection.ask(Op.CLEAR), 1)
        return int(count)

    def statistics(self) -> TierStatistics:
        """Return the statistics of the tenant from the last answer; without a connection, only capacity and evictions."""
        figures = None if self._opened is None else self._opened.figures
        evictions = 0 if self._opened is None else self._opened.evictions
        if figures is None:
            return TierStatistics(max_bytes=self._last_max_bytes, evictions=evictions, common=True)
        self._last_max_bytes = figures.max_bytes
        return TierStatistics(
            chunks=figures.chunks,
            bytes=figures.record_bytes,
            max_bytes=figures.max_bytes,
            evictions=evictions,
            common=True,
        )

    async def __aenter__(self) -> Self:
        """Open. If the daemon cannot be reached, the tier connects in the background."""
        reconnector = Reconnector(self.config, pin=self._pin, pin_device=self._pin_device)
        await reconnector.open()
        self._copier = Copier(self.config.copy_threads)
        self._open(reconnector)
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close after running copies have ended. Other calls fail with TierClosedError; leases stay valid."""
        reconnector = self._usable()
        assert self._copier is not None  # it exists while the tier is open
        reconnector.close()
        await self._end_calls()
        await reconnector.wait_closed()
        self._copier.close()

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Connection]:
        """The connection for a call. It is closed if an answer does not match its request."""
        with self._call() as reconnector:
            connection = reconnector.connection
            try:
                yield connection
            except ProtocolError as error:
                raise connection.fail(error) from error

    async def _flags(self, op: Op, keys: Sequence[ChunkKey]) -> list[bool]:
        flags: list[bool] = []
        with self._connected() as connection:
            for batch in _batches(keys):
                answer = await connection.ask(op, b"".join(batch))
                flags += [bool(flag) for (flag,) in unpack(FLAG, answer, len(batch))]
        return flags

    async def _listed(self) -> list[ChunkKey]:
        """Request the list of keys in pieces. The daemon keeps the list per connection."""
        found: list[ChunkKey] = []
        async with self._listing:
            with self._connected() as connection:
                while True:
                    answer = await connection.ask(Op.KEYS, NUMBER.pack(len(found)))
                    piece = [key for (key,) in unpack(KEY, answer)]
                    found += piece
                    if len(piece) < MAX_ITEMS:
                        return found

    async def _request_grants(self, connection: Connection, op: Op, body: bytes, count: int) -> list[Grant]:
        """Request leases or reservations. Those that arrive after a cancellation or timeout are released."""

        def on_late_answer(answer: bytes) -> None:
            try:
                connection.release_leases(_leases_of(unpack_grants(answer, count, connection.mapping.nbytes)))
            except ProtocolError as error:
                connection.fail(error)

        connection.mapping.flush()  # ended leases must not count against the limit of this engine
        answer = await connection.ask(op, body, on_late_answer=on_late_answer)
        connection.check()  # if it was lost after the answer, the leases have ended
        return unpack_grants(answer, count, connection.mapping.nbytes)

    async def _put(
        self, connection: Connection, items: Sequence[tuple[ChunkKey, Buffer]]
    ) -> list[TierError | None]:
        reservations = pack(RESERVATION, [(key, buffer.nbytes) for key, buffer in items])
        grants = await self._request_grants(connection, Op.RESERVE, reservations, len(items))
        results: list[TierError | None] = [_result_of(grant) for grant in grants]
        given = [position for position, grant in enumerate(grants) if grant.lease]
        if any(grants[position].nbytes != items[position][1].nbytes for position in given):
            raise ProtocolError("a reservation does not have the requested length")
        if not given:
            return results
        assert self._copier is not None  # it exists while the tier is open
        mapping = connection.mapping
        mapping.begin_copy()  # keeps the connection, and with it the reservation, until `end_copy`
        try:
            await self._copier.copy(
                [(mapping.target(grants[position]), items[position][1].array) for position in given]
            )
        except BaseException:
            connection.release_leases(_leases_of(grants))
            raise
        finally:
            mapping.end_copy()
        commits = pack(COMMIT, [(grants[position].lease, items[position][0]) for position in given])
        answer = await connection.ask(Op.COMMIT, commits)
        for position, (flag,) in zip(given, unpack(FLAG, answer, len(given)), strict=True):
            if flag != Refusal.NONE:
                results[position] = TierError("the daemon rejected the commit of a record")
        return results


def _batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield the items in batches of at most `MAX_ITEMS`, the limit of a message."""
    for start in range(0, len(items), MAX_ITEMS):
        yield items[start : start + MAX_ITEMS]


def _result_of(grant: Grant) -> TierError | None:
    """Return the result of a put from its grant; None if memory was granted or the record exists."""
    if grant.lease or grant.offset == Refusal.PRESENT:
        return None
    if grant.offset == Refusal.TOO_MUCH:
        return TierFullError(_TOO_MUCH)
    return TierFullError("the daemon's pool is full and cannot evict enough records")


def _leases_of(grants: Sequence[Grant]) -> list[int]:
    """Return the numbers of the granted leases."""
    return [grant.lease for grant in grants if grant.lease]
