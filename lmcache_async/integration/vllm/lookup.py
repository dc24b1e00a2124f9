"""Lookup client: hashes prompts and queries every rank, on a thread of its own.

The scheduler's thread calls the public methods of `LookupClient`. They do not block, except `close`, and take constant
time, except `peek`. Answers are collected with `take_answers`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import uvloop

from lmcache_async.engine.lookup import MemoryLookups
from lmcache_async.hashing import RequestNamespace, hash_key_id
from lmcache_async.integration.vllm.groups import KVGroups
from lmcache_async.integration.vllm.keys import PIECE_TOKENS, AdapterFingerprints, Promise, RequestKeys
from lmcache_async.integration.vllm.load_policy import Costs, slowest, unpack_costs
from lmcache_async.integration.vllm.lookup_server import (
    Address,
    Identity,
    Message,
    TCPAddress,
    answer_lookup,
    check_peer,
    close_connection,
    connect,
    encode,
    pack_runs,
    receive,
)
from lmcache_async.logging import LimitedLogger
from lmcache_async.memory.threads import yield_gil
from lmcache_async.types import KEY_BYTES, Chunk

T = TypeVar("T")

logger = LimitedLogger(logging.getLogger(__name__))

FIRST_BOUNDARIES = 16
"""Number of boundaries in the first query for the KV groups other than full attention. Each further query has four times
as many."""

SENT_BOUNDARIES = 4
"""Number of boundaries at the end of the request that are part of the first message, so that a hit of the whole request takes
one message."""

LAST_BLOCKS = 128
"""Number of blocks at the end of a stored prefix where each block boundary is queried. Before them only the ends of
chunks are queried, because a boundary takes 20 to 100 us to hash."""

FIRST_RETRY_S = 0.02
LAST_RETRY_S = 2.0

MAX_BUFFERED_BYTES = 32 << 20
"""Maximum bytes of messages that a rank has not read. Above it, lookups are misses."""

_CLEAR_RETRY_S = 0.1

_HELLO_ID = 0  # other messages have numbers from 1 on

FIRST_PAUSE_S = 0.002
LAST_PAUSE_S = 0.064
SPACING_S = 0.001
"""Shortest mean time between two queries of all waiting requests together. It bounds their rate if a producer has failed."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """A lookup of the leading `num_tokens` tokens of a request. `lookup_id` is unique and identifies its pins.

    Attributes:
        epoch: Number of cache resets before the lookup. After a further reset its answer is not used.
        asked_at: Time of the call on the monotonic clock.
        promise: Promise of a producer for this request. The lookup waits for it until `wait_s` seconds after `asked_at`.
    """

    lookup_id: str
    num_tokens: int
    epoch: int
    asked_at: float
    promise: Promise | None = None
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """The leading part of a request that is stored on every rank.

    Attributes:
        chunks: Leading full chunks.
        partial_tokens: Tokens of the partial chunk after them; 0 for none.
        partial_keys: Key of the partial chunk, by rank.
        tiers: Number of records of the full chunks in each tier, by tier id, on the first rank, in the order of the prefix.
            A chunk has one in each group of full attention.
        end_tier: Id of the tier of the partial chunk on the first rank, or of the records at the boundary if there is none; ""
            without either.
        pinned: Whether a rank may hold leases for this lookup, which have to be released.
        resident: Whether every rank holds leases for the whole hit, so that it stays in host memory.
        costs: Cost of loading the full chunks, until the slowest rank has finished.
        boundary: With groups other than full attention, the number of leading tokens after which all groups can continue.
            None if only full attention was looked up.
    """

    chunks: int = 0
    partial_tokens: int = 0
    partial_keys: tuple[bytes, ...] = ()
    partial_text: str = ""
    tiers: Mapping[str, int] = field(default_factory=dict)
    end_tier: str = ""
    pinned: bool = False
    resident: bool = False
    costs: Costs = ()
    boundary: int | None = None

    def hit_tokens(self, chunk_size: int) -> int:
        """Number of leading tokens that are stored."""
        tokens = self.chunks * chunk_size + self.partial_tokens
        return tokens if self.boundary is None else min(tokens, self.boundary)

    def tokens_by_tier(self, first: int, stop: int, chunk_size: int) -> dict[str, int]:
        """Return the number of the tokens `first`..`stop` of the hit in each tier; none is 0.

        They add up, unless the hit needs no record. Each tier is taken to have one run of chunks.
        """
        total, full_tokens = sum(self.tiers.values()), self.chunks * chunk_size
        split: dict[str, int] = {}
        counted = 0
        for tier, records in self.tiers.items():
            counted += records
            end = min(full_tokens * counted // total, stop)
            if end > first:
                split[tier] = end - first
                first = end
        if stop > first and self.end_tier:
            split[self.end_tier] = split.get(self.end_tier, 0) + stop - first
        return split


MISS = Answer()


@dataclass(frozen=True, slots=True)
class AnsweredLookup:
    """The answer to a lookup.

    Attributes:
        promise_matches: Whether the promise matches the model and the prompt of the request.
        queried_at: Time at which the answered query was sent, on the monotonic clock. Its pins are not older.
        answered_at: Time at which the answer arrived.
        late: Whether the ranks did not answer in time. `answer` is then a miss.
    """

    request_id: str
    lookup_id: str
    answer: Answer
    queried_at: float
    answered_at: float
    promise_matches: bool = False
    late: bool = False


@dataclass(slots=True)
class PromiseCounts:
    """Counts of producers' promises since the start.

    Attributes:
        accepted: Lookups with a promise that matches the request and whose time had not passed.
        mismatched: Lookups with a promise that does not match the request.
        kept: Promises that were kept in time.
        late: Promises that were not kept in time. The stored tokens are loaded and the others computed.
        queries: Queries for the last promised chunk alone.
        waiting: Lookups that wait for a promise now.
    """

    accepted: int = 0
    mismatched: int = 0
    kept: int = 0
    late: int = 0
    queries: int = 0
    waiting: int = 0


class LookupClient:
    """Looks up requests on all ranks, on a thread of its own.

    Args:
        addresses: Address of the lookup server of each rank; None if `set_addresses` sets it later.
        groups: KV groups of the model.
        partial_chunks: Whether prompts are stored up to their last whole block, here and by producers of promises.
        hash_key: Secret of the ranks' keyed hash; b"" for none.
        adapter_algorithm: Hash algorithm of the chunk keys, used for adapter fingerprints too.
        loop: Loop to run on; None creates one on a thread of its own.

    Attributes:
        ranks: Connection to each rank.
        epoch: Number of cache resets so far.
    """

    def __init__(
        self,
        addresses: Sequence[Address | None],
        *,
        chunk_size: int,
        lookup_timeout_s: float,
        groups: KVGroups,
        partial_chunks: bool = True,
        hash_key: bytes = b"",
        adapter_algorithm: str = "xxh3_128",
        clock: Callable[[], float] = time.monotonic,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._expected = (chunk_size, groups.block_size, hash_key_id(hash_key))
        self._hash_key = hash_key
        self._timeout_s = lookup_timeout_s
        self._clock = clock
        self.ranks = [
            RankConnection(rank, address, self._ranks_changed) for rank, address in enumerate(addresses)
        ]
        self._query = Query(self.ranks, groups, partial_chunks=partial_chunks)
        self._waiter = PromiseWaiter(self._query, timeout_s=lookup_timeout_s, clock=clock)
        self._memories: Sequence[Callable[[], MemoryLookups | None]] = ()
        self._adapters = AdapterFingerprints(adapter_algorithm)
        self._calls: deque[Callable[[], None]] = deque()
        self._answers: deque[AnsweredLookup] = deque()
        self._woken = False
        self._connected = False
        self._cleared = 0
        self._next_lookup = 0
        self.epoch = 0
        self._pending: dict[str, PendingLookup] = {}  # on the client's thread
        self._hashed_tokens = 0  # on the client's thread: since it last released the GIL
        self._pinned: set[str] = set()  # on the client's thread: answered, with leases held by a rank
        self._loop = loop or uvloop.new_event_loop()
        self._stop = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[bool]] = set()
        self._thread: threading.Thread | None = None
        if loop is None:
            self._thread = threading.Thread(target=self._run, name="lmcache-async-lookup", daemon=True)
            self._thread.start()
        else:
            self._main_task = loop.create_task(self._main())

    # Called by the scheduler's thread.

    def set_addresses(self, addresses: Mapping[int, Address]) -> None:
        """Connect to these ranks, whose addresses were not known before."""
        for rank, address in addresses.items():
            self._post(partial(self.ranks[rank].set_address, address))

    def set_memories(self, memories: Sequence[Callable[[], MemoryLookups | None]]) -> None:
        """Let `peek` use these lookups in host memory, one for each rank. They are created on the calling thread of `peek`."""
        self._memories = memories

    def now(self) -> float:
        return self._clock()

    @property
    def connected(self) -> bool:
        """Whether every rank is connected."""
        return self._connected

    @property
    def ready(self) -> bool:
        """Whether lookups can be answered: connected, and no reset is in progress."""
        return self._connected and self._cleared == self.epoch

    @property
    def promises(self) -> PromiseCounts:
        return self._waiter.counts

    def ask(
        self, keys: RequestKeys, num_tokens: int, promise: Promise | None = None, wait_s: float = 0.0
    ) -> Lookup:
        """Start to hash and look up the first `num_tokens` tokens of the request.

        The answer is delivered by `take_answers`, up to `wait_s` seconds later if it waits for the promise. The caller
        must release every lookup once with `release`.
        """
        lookup = self._new_lookup(keys, num_tokens, promise, wait_s)
        if not self.ready:
            self._miss(keys, lookup)
            self.hash(keys, num_tokens)
            return lookup
        keys.requested = max(keys.requested, num_tokens)
        self._post(lambda: self._look_up(keys, lookup))
        return lookup

    def peek(self, keys: RequestKeys, num_tokens: int) -> tuple[Lookup, AnsweredLookup] | None:
        """Hash a new request and look it up in host memory of all ranks, on the calling thread. `keys` must be new.

        The answer is that of `ask`, but nothing is pinned, so it is valid in the current step only. Return None if `ask`
        has to be used instead: if the content of host memory is not known, the request has an adapter, a slower tier may
        have more of it, or a further query is needed.
        """
        identities = [rank.identity for rank in self.ranks if rank.identity is not None]
        memories = [memory for make in self._memories if (memory := make()) is not None]
        if not len(self.ranks) == len(identities) == len(memories) or not self.ready:
            return None
        if keys.adapter is not None:  # its files may have to be read
            return None
        lookup = self._new_lookup(keys, num_tokens)
        try:
            self._open(keys, identities)
            found = self._query.peek(memories, keys, lookup)
        except (ValueError, OverflowError) as error:
            self._failed(keys, error)
            return None
        if found is None:
            return None
        keys.requested = num_tokens
        return lookup, AnsweredLookup(
            keys.request_id, lookup.lookup_id, found, lookup.asked_at, lookup.asked_at
        )

    def _new_lookup(
        self, keys: RequestKeys, num_tokens: int, promise: Promise | None = None, wait_s: float = 0.0
    ) -> Lookup:
        self._next_lookup += 1
        name = f"{keys.request_id:.64}#{self._next_lookup}"  # a client of vLLM chooses the request id
        return Lookup(name, num_tokens, self.epoch, self._clock(), promise, wait_s)

    def take_answers(self) -> list[AnsweredLookup]:
        """Return the answers that arrived since the last call."""
        answers = []
        while self._answers:
            answers.append(self._answers.popleft())
        return answers

    def hash(self, keys: RequestKeys, num_tokens: int) -> None:
        """Start to hash the first `num_tokens` tokens of the request, without a lookup. No effect while not connected."""
        if self._connected and keys.requested < num_tokens and not keys.failed:
            keys.requested = num_tokens
            self._post(lambda: self._hash(keys, num_tokens))

    def release(self, lookup: Lookup, answer: Answer | None) -> None:
        """Release the pins of a lookup, now or when it is answered. `answer` is None if the answer was not taken yet."""
        if answer is None or answer.pinned:
            self._post(lambda: self._release(lookup.lookup_id))

    def reset(self, *, memory_only: bool) -> None:
        """Start to clear the tiers of every rank. Lookups are misses until all ranks are cleared."""
        self.epoch += 1
        epoch = self.epoch
        self._post(lambda: self._spawn(_repeated(lambda: self._clear_all(epoch, memory_only))))

    def close(self, timeout_s: float) -> None:
        """Stop the daemon thread and wait up to `timeout_s` seconds for its end. If it hangs, the process can still exit."""
        self._memories = ()  # drops the reference to the engine and its memory
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _post(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._run_calls)

    # Runs on the client's thread.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        finally:
            self._loop.close()

    async def _main(self) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            tasks = [group.create_task(_repeated(rank.run)) for rank in self.ranks]
            self._run_calls()
            await self._stop.wait()
            self._group = None
            for task in [*tasks, *self._tasks]:
                task.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if self._group is None:
            work.close()
            return
        task = self._group.create_task(_guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _run_calls(self) -> None:
        if self._group is None:
            return  # `_main` runs the calls when it has started
        self._woken = False
        self._hashed_tokens = 0
        while self._calls:
            call = self._calls.popleft()
            try:
                call()
            except Exception:  # a failed call must not end the thread
                logger.exception("a task of the lookup client failed")

    def _look_up(self, keys: RequestKeys, lookup: Lookup) -> None:
        self._hash(keys, lookup.num_tokens)
        if keys.num_hashed != lookup.num_tokens or lookup.epoch != self._cleared:
            self._miss(keys, lookup)
            return
        pending = PendingLookup(keys, lookup, keys.end_candidates(), lookup.asked_at)
        self._pending[lookup.lookup_id] = pending
        self._spawn(self._answer(pending))

    def _miss(self, keys: RequestKeys, lookup: Lookup) -> None:
        """Answer a lookup without a query. Called by both threads."""
        now = self._clock()
        self._answers.append(AnsweredLookup(keys.request_id, lookup.lookup_id, MISS, now, now))

    async def _answer(self, pending: PendingLookup) -> None:
        lookup_id, answer, late = pending.lookup.lookup_id, MISS, False
        try:
            answer = await self._waiter.answer(pending)
        except TimeoutError:
            logger.report(
                "timeout",
                "a lookup was not answered within vllm.lookup_timeout_s of %.3f s; it is a miss",
                self._timeout_s,
            )
            pending.abandoned = late = True
        except Exception:  # a failure is a miss
            logger.exception("a lookup failed and is a miss")
            pending.abandoned = True
        del self._pending[lookup_id]
        self._answers.append(
            AnsweredLookup(
                pending.keys.request_id,
                lookup_id,
                answer,
                pending.queried_at,
                self._clock(),
                pending.promise_matches,
                late,
            )
        )
        if pending.abandoned:
            self._unpin(lookup_id)
        elif answer.pinned:
            self._pinned.add(lookup_id)

    def _hash(self, keys: RequestKeys, num_tokens: int) -> None:
        identities = [rank.identity for rank in self.ranks]
        if keys.failed:
            return
        try:
            if not keys.opened:
                if any(identity is None for identity in identities):
                    keys.requested = 0  # a later call requests them again
                    return
                self._open(keys, [identity for identity in identities if identity is not None])
            if self._hashed_tokens >= PIECE_TOKENS:
                self._hashed_tokens = 0
                yield_gil()
            former = keys.num_hashed
            keys.extend(num_tokens, yield_gil)
            self._hashed_tokens += keys.num_hashed - former
        except (ValueError, OverflowError, OSError) as error:
            self._failed(keys, error)

    def _failed(self, keys: RequestKeys, error: Exception) -> None:
        keys.failed = True
        logger.report(
            "hash", "request %s is not cached: its chunk keys cannot be computed: %s", keys.request_id, error
        )

    def _open(self, keys: RequestKeys, identities: Sequence[Identity]) -> None:
        adapter = keys.adapter
        namespace = RequestNamespace(
            lora=adapter.name if adapter else "",
            lora_path=self._adapters.of(adapter) if adapter else "",
            cache_salt=keys.cache_salt,
            tags=(*keys.tags, ("reset", keys.reset)) if keys.reset else keys.tags,
        )
        keys.adapter_changed = adapter is not None and self._adapters.changed(adapter)
        secret = self._hash_key
        roots = [namespace.root(identity.root, identity.algorithm, secret) for identity in identities]
        group_roots = [identity.group_roots for identity in identities]
        keys.open(roots, identities[0], namespace.keyed_label(secret), secret, group_roots)

    def _release(self, lookup_id: str) -> None:
        pending = self._pending.get(lookup_id)
        if pending is not None:
            pending.abandoned = True  # unpinned by `_answer`
        elif lookup_id in self._pinned:
            self._pinned.discard(lookup_id)
            self._unpin(lookup_id)

    def _unpin(self, lookup_id: str) -> None:
        for rank in self.ranks:
            rank.post({"op": "unpin", "lookup_id": lookup_id})

    async def _clear_all(self, epoch: int, memory_only: bool) -> None:
        async with asyncio.TaskGroup() as group:
            for rank in self.ranks:
                group.create_task(self._clear(rank, epoch, memory_only))
        self._cleared = max(self._cleared, epoch)

    async def _clear(self, rank: RankConnection, epoch: int, memory_only: bool) -> None:
        """Clear the tiers of a rank. Try again until it has answered, or until a further reset clears them."""
        message = {"op": "clear", "epoch": epoch, "memory_only": memory_only}
        while epoch == self.epoch and await rank.call(message) is None:  # noqa: ASYNC110 - another process answers
            await asyncio.sleep(_CLEAR_RETRY_S)

    def _ranks_changed(self) -> None:
        identities = [rank.identity for rank in self.ranks]
        known = [identity for identity in identities if identity is not None]
        agreed = all(self._fits(known[0], identity) for identity in known)
        self._connected = agreed and len(known) == len(identities)

    def _fits(self, first: Identity, other: Identity) -> bool:
        found = (other.chunk_size, other.block_size, other.hash_key_id)
        alike = other.algorithm == first.algorithm and len(other.group_roots) == len(first.group_roots)
        if found == self._expected and alike:
            return True
        logger.report(
            "identity",
            "all lookups are misses: the configurations of the ranks differ (%s, %s); start all workers with the same"
            " configuration",
            first,
            other,
        )
        return False


async def _guarded(work: Coroutine[Any, Any, None]) -> bool:
    """Run a task of the client and log an unexpected error. Return whether there was none."""
    try:
        await work
    except Exception:  # it must not end the other tasks
        logger.exception("a task of the lookup client failed")
        return False
    return True


async def _repeated(start: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a task of the client, and start it again after an unexpected error."""
    while not await _guarded(start()):  # noqa: ASYNC110 - an error is no event
        await asyncio.sleep(LAST_RETRY_S)


class RankConnection:
    """Connection to the lookup server of one rank, reopened when it is lost. Runs on the client's loop.

    `identity` is None while not connected. `changed` is called after each change of `identity`.
    """

    def __init__(self, rank: int, address: Address | None, changed: Callable[[], None]) -> None:
        self._rank = rank
        self._address = address
        self._addressed = asyncio.Event()
        self._changed = changed
        self.identity: Identity | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: dict[int, asyncio.Future[Message | None]] = {}
        self._next_id = 0
        self._root: bytes | None = None
        self._closed_by_peer = False  # the rank closed the connection and has not reconnected

    def set_address(self, address: Address) -> None:
        self._address = address
        self._addressed.set()

    async def run(self) -> None:
        """Stay connected until cancelled."""
        if self._address is None:
            await self._addressed.wait()
        assert self._address is not None
        retry_s = FIRST_RETRY_S
        while True:
            try:
                reader, writer = await connect(self._address)
            except OSError as error:
                if not self._closed_by_peer:
                    logger.report(
                        f"connect {self._address}",
                        "all lookups are misses until rank %d can be reached: %s",
                        self._rank,
                        error,
                    )
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, LAST_RETRY_S)
                continue
            if await self.serve(reader, writer):
                retry_s = FIRST_RETRY_S
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, LAST_RETRY_S)

    async def call(self, message: Message) -> Message | None:
        """Send a request and return the answer.

        Return None if not connected, if the connection is lost, on an error, or if the rank does not read.
        """
        if self._writer is None or self.identity is None:
            return None
        if self._writer.transport.get_write_buffer_size() > MAX_BUFFERED_BYTES:
            return None  # the rank has read nothing for many lookups
        self._next_id += 1
        message_id = self._next_id
        future: asyncio.Future[Message | None] = asyncio.get_running_loop().create_future()
        self._waiting[message_id] = future
        try:
            self.post({"id": message_id, **message})
            return await future
        finally:
            del self._waiting[message_id]

    def post(self, message: Message) -> None:
        """Send a message without an answer. It is dropped while not connected."""
        if self._writer is not None and not self._writer.is_closing():  # uvloop raises if it is closed
            self._writer.write(encode(message))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Receive until the connection is lost. Return whether the rank ever identified itself."""
        served = False
        try:
            if not isinstance(self._address, TCPAddress):
                check_peer(writer)
            self._writer = writer
            self.post({"id": _HELLO_ID, "op": "hello"})
            while True:
                self._deliver(await receive(reader))
        except (EOFError, ConnectionError) as lost:
            if not self._closed_by_peer:
                cause = f"lost {self._address}"
                logger.log(logging.INFO, cause, "connection to rank %d is lost: %s", self._rank, lost)
        except (OSError, ValueError) as bad:
            logger.report(
                f"bad {self._address}",
                "all lookups are misses: rank %d cannot be queried: %s",
                self._rank,
                bad,
            )
        finally:
            served = self.identity is not None
            self._writer = None
            self.identity = None
            self._changed()
            for future in self._waiting.values():
                if not future.done():
                    future.set_result(None)
            await close_connection(writer)
        return served

    def _deliver(self, message: Message) -> None:
        if message.get("op") == "goodbye":
            self._closed_by_peer = True
        message_id = message.get("id")
        if message_id == _HELLO_ID and "error" not in message:
            self._greeted(Identity.of(message))
        future = self._waiting.get(message_id) if isinstance(message_id, int) else None
        if future is not None and not future.done():
            future.set_result(None if "error" in message else message)

    def _greeted(self, identity: Identity) -> None:
        if self._root not in (None, identity.root):
            raise ValueError("the rank reconnected with another namespace")
        self._root = identity.root
        self.identity = identity
        self._closed_by_peer = False
        self._changed()


@dataclass(slots=True, eq=False)
class PendingLookup:
    """A lookup that is not answered yet.

    Attributes:
        ends: Per rank, the partial chunks that can follow the last full chunk.
        queried_at: Time at which the last answered query was sent.
        abandoned: Whether the scheduler has released the lookup or it has failed. Its pins are then released.
        promise_matches: Whether the promise matches the model and the prompt of the request.
    """

    keys: RequestKeys
    lookup: Lookup
    ends: Sequence[Sequence[Chunk]]
    queried_at: float
    abandoned: bool = False
    promise_matches: bool = False


def pause_s(queries: int, waiting: int) -> float:
    """Seconds until the next query of one request, after `queries` queries, while `waiting` requests wait."""
    return max(min(FIRST_PAUSE_S * 2.0 ** min(queries, 16), LAST_PAUSE_S), waiting * SPACING_S)


class PromiseWaiter:
    """Answers lookups. One with a promise is answered when the promise is kept, or when its time has passed.

    `timeout_s` is the deadline of one query.
    """

    def __init__(self, query: Query, *, timeout_s: float, clock: Callable[[], float]) -> None:
        self._query = query
        self._timeout_s = timeout_s
        self._clock = clock
        self.counts = PromiseCounts()

    async def answer(self, pending: PendingLookup) -> Answer:
        """Return the stored part of the request, after at most `wait_s` of the lookup and the time of two queries.

        Raises:
            TimeoutError: The first query was not answered.
            ValueError: The answer of a rank is invalid.
        """
        keys, lookup = pending.keys, pending.lookup
        answer = await self._query_all(pending)
        promise = lookup.promise
        if promise is None:
            return answer
        size = keys.identity.chunk_size
        if mismatch := promise.mismatch(keys, size):
            self.counts.mismatched += 1
            logger.report("mismatch", "request %s: the promise is ignored: %s", keys.request_id, mismatch)
            return answer
        pending.promise_matches = True
        if not lookup.wait_s:
            return answer  # the time of the promise had passed before this lookup
        self.counts.accepted += 1
        self.counts.waiting += 1
        try:
            answer = await self._until_kept(pending, promise, answer)
        finally:
            self.counts.waiting -= 1
        if self._query.keeps(promise, lookup, answer, size):
            self.counts.kept += 1
        elif not pending.abandoned:
            self.counts.late += 1
            logger.report(
                "late",
                "request %s: %d of the %d tokens promised by %r are stored after %.3f s; the others are computed",
                keys.request_id,
                answer.hit_tokens(size),
                promise.tokens,
                promise.request_id,
                self._clock() - lookup.asked_at,
            )
        return answer

    async def _until_kept(self, pending: PendingLookup, promise: Promise, answer: Answer) -> Answer:
        """Query the last promised chunk alone until it is stored or the time has passed, then all chunks."""
        keys, lookup = pending.keys, pending.lookup
        size = keys.identity.chunk_size
        last = keys.keys_at(promise.tokens, size)
        deadline = lookup.asked_at + lookup.wait_s
        queries = 0
        while not self._query.keeps(promise, lookup, answer, size) and (left := deadline - self._clock()) > 0:
            await asyncio.sleep(min(left, pause_s(queries, self.counts.waiting)))
            queries += 1
            if pending.abandoned:
                break
            if await self._is_stored(pending, last, deadline) or self._clock() >= deadline:
                answer = await self._query_again(pending, answer)
        return answer

    async def _is_stored(self, pending: PendingLookup, last: Sequence[bytes], deadline: float) -> bool:
        left = deadline - self._clock()
        if left <= 0:
            return False
        self.counts.queries += 1
        try:
            async with asyncio.timeout(min(self._timeout_s, left)):
                return await self._query.is_stored(pending.keys, last)
        except TimeoutError:
            return False

    async def _query_again(self, pending: PendingLookup, former: Answer) -> Answer:
        try:
            return await self._query_all(pending)
        except TimeoutError:
            # The pins of the former answer may be gone, and the late answer may still pin.
            return replace(former, pinned=True, resident=False)

    async def _query_all(self, pending: PendingLookup) -> Answer:
        sent_at = self._clock()
        async with asyncio.timeout(self._timeout_s):
            answer = await self._query(pending.keys, pending.lookup, pending.ends)
        pending.queried_at = sent_at
        return answer


class Query:
    """Queries all ranks for the stored part of a request."""

    def __init__(
        self,
        ranks: Sequence[RankConnection],
        groups: KVGroups,
        *,
        partial_chunks: bool = True,
    ) -> None:
        self.ranks = ranks
        self._groups = groups
        self._further = groups.full[1:]
        self._partial_chunks = groups.stores_partial_chunks(configured=partial_chunks)

    async def __call__(self, keys: RequestKeys, lookup: Lookup, ends: Sequence[Sequence[Chunk]]) -> Answer:
        """Return the longest stored prefix that every KV group can serve on every rank.

        Args:
            ends: Per rank, the partial chunks that can follow the last full chunk.

        Raises:
            ValueError: The answer of a rank is invalid, or the keys exceed a message.
        """
        if self._groups.full:
            answer = await self._prefix(keys, lookup, ends, self.ranks)
        else:
            full, rest = divmod(lookup.num_tokens, keys.identity.chunk_size)
            answer = Answer(chunks=full, partial_tokens=rest, resident=True)
        if not self._groups.boundary_groups or answer.boundary is not None:
            return answer
        return await self._with_boundary(keys, lookup, answer)

    def peek(self, memories: Sequence[MemoryLookups], keys: RequestKeys, lookup: Lookup) -> Answer | None:
        """Hash the request and look it up in host memory of each rank. None if the answer needs another query.

        Raises:
            ValueError: A value is not a token id.
        """
        size, unit = keys.identity.chunk_size, keys.identity.block_size
        if not self._groups.full:
            return None
        local = [_LocalRank(partial(answer_lookup, lookups=memory)) for memory in memories]
        if lookup.num_tokens >= size:
            keys.extend(size, lambda: None)
            runs = [[run] for run in self._records(keys, keys.packed_keys(0, 1))]
            first = _run_synchronously(_ask_first(local, "", runs)) or []
            if any(each.position < 0 for each in first) and not all(memory.certain for memory in memories):
                return None
        keys.extend(lookup.num_tokens, lambda: None)
        found = _run_synchronously(self._prefix(keys, lookup, keys.end_candidates(), local))
        found = replace(found, pinned=False)
        hit = found.hit_tokens(size)
        if self._groups.boundary_groups and hit and found.boundary is None:
            return None
        whole = hit > lookup.num_tokens - bool(self._groups.boundary_groups) - unit
        return found if whole or all(memory.certain for memory in memories) else None

    async def is_stored(self, keys: RequestKeys, chunk: Sequence[bytes]) -> bool:
        """Return whether every rank has the chunk with these keys, one per rank. Nothing is pinned."""
        runs = [[run] for run in self._records(keys, chunk)]
        found = await _ask_first(self.ranks, "", runs)
        return found is not None and all(each.position == 0 for each in found)

    def keeps(self, promise: Promise, lookup: Lookup, answer: Answer, chunk_size: int) -> bool:
        """Whether an answer has all promised tokens that the request can use."""
        tokens = promise.tokens
        if self._groups.boundary_groups:
            last = self._groups.last_boundary(
                lookup.num_tokens, chunk_size, partial_chunks=self._partial_chunks
            )
            tokens = min(tokens, last)
        return answer.hit_tokens(chunk_size) >= tokens

    async def _with_boundary(self, keys: RequestKeys, lookup: Lookup, answer: Answer) -> Answer:
        """Return the answer with `boundary`: the longest stored prefix after which every group can continue, or 0."""
        left = self._candidates(keys, lookup, answer.hit_tokens(keys.identity.chunk_size))
        asked, pinned = FIRST_BOUNDARIES, answer.pinned
        while left:
            some, left = left[:asked], left[asked:]
            while some:
                runs = self._boundary_keys(keys, some)
                found = await _ask_first(self.ranks, lookup.lookup_id, runs)
                if found is None:  # the ranks that did answer may hold leases
                    return replace(answer, boundary=0, pinned=True)
                pinned = pinned or any(each.pinned for each in found)
                positions = {each.position for each in found}
                if min(positions) < 0:
                    break
                if len(positions) == 1:
                    return _at_boundary(replace(answer, pinned=pinned), some[positions.pop()], found)
                some = some[max(positions) :]  # the ranks differ: one of them has none of the longer ones
            asked *= 4
        return replace(answer, boundary=0, pinned=pinned)

    def _candidates(self, keys: RequestKeys, lookup: Lookup, num_tokens: int) -> list[int]:
        """Positions in the first `num_tokens` tokens where a boundary may be stored, longest first.

        These are the block boundaries of the last `LAST_BLOCKS` blocks, where an earlier prompt may have ended, and the
        ends of chunks before them. With recurrent states they are all block boundaries, because vLLM may offer a state at
        any of them. At least one token is left to compute.
        """
        size, unit = keys.identity.chunk_size, self._groups.block_size
        last = min(num_tokens, lookup.num_tokens - 1) // unit * unit
        if last <= 0:
            return []
        start = 0 if self._groups.has_states else max(0, last - LAST_BLOCKS * unit) // size * size
        return [*range(last, start, -unit), *range(start, 0, -size)]

    def _boundary_keys(self, keys: RequestKeys, boundaries: Sequence[int]) -> list[list[bytes]]:
        """Return, per rank and boundary, the keys of the chunks that groups other than full attention need there."""
        packed = [[b""] * len(boundaries) for _ in self.ranks]
        for index, boundary in enumerate(boundaries):
            before = keys.keys_before(boundary)
            for group in self._groups.boundary_groups:
                for rank, made in enumerate(keys.boundary_keys(group, boundary, before)):
                    packed[rank][index] += made
        return packed

    async def _prefix(
        self,
        keys: RequestKeys,
        lookup: Lookup,
        ends: Sequence[Sequence[Chunk]],
        ranks: Sequence[RankConnection | _LocalRank],
    ) -> Answer:
        """Query each rank for the longest stored prefix of chunks, then for a partial chunk where it ends.

        A chunk has one record in each group of full attention. The first message also contains the last boundaries of
        the request and the partial chunks at its end, so a full hit takes one message. The answer has a boundary only if
        all ranks have found the same one of these.
        """
        chunks, records = lookup.num_tokens // keys.identity.chunk_size, len(self._groups.full)
        boundaries = (
            self._candidates(keys, lookup, lookup.num_tokens)[:SENT_BOUNDARIES]
            if self._groups.boundary_groups
            else []
        )
        runs = [self._partial_runs(keys, ends)]
        if boundaries:
            runs.append(self._boundary_keys(keys, boundaries))
        messages: list[Message] = [
            {
                "op": "lookup",
                "lookup_id": lookup.lookup_id,
                "keys": packed,
                "runs": [pack_runs(by_rank[rank]) for by_rank in runs],
            }
            for rank, packed in enumerate(self._records(keys, keys.packed_keys(0, chunks)))
        ]
        replies = await _ask_all(ranks, messages)
        if replies is None:
            return Answer(pinned=True)  # a miss, but the ranks that did answer hold leases
        counts = [_number(reply.get("count"), 0, chunks * records) for reply in replies]
        held = [_number(reply.get("pinned"), 0, chunks * records) for reply in replies]
        found = [
            [_First.of(reply, at, own) for reply, own in zip(replies, by_rank, strict=True)]
            for at, by_rank in enumerate(runs)
        ]
        ends_found, boundaries_found = found[0], found[1] if boundaries else []
        pinned = any(held) or any(each.pinned for each in (*ends_found, *boundaries_found))
        hit = min(counts) // records
        if hit < chunks:
            ends = keys.hole_candidates(hit)
            answers = await _ask_first(ranks, lookup.lookup_id, self._partial_runs(keys, ends))
            ends_found = answers or []
            pinned = pinned or answers is None or any(each.pinned for each in ends_found)
        partial = _agreed(ends, [each.position for each in ends_found])
        costs = [
            unpack_costs(reply.get("costs"), count) for reply, count in zip(replies, counts, strict=True)
        ]
        answer = Answer(
            chunks=hit,
            partial_tokens=len(partial[0].tokens) if partial else 0,
            partial_keys=tuple(chunk.key for chunk in partial),
            partial_text=partial[0].extra if partial else "",
            tiers=_tiers(replies[0], hit * records),
            end_tier=ends_found[0].tier if partial else "",
            pinned=pinned,
            resident=counts == held and (not partial or all(each.resident for each in ends_found)),
            costs=slowest([_by_chunk(each, records) for each in costs], hit),
        )
        positions = {each.position for each in boundaries_found}
        if len(positions) != 1 or min(positions) < 0:
            return answer
        boundary = boundaries[positions.pop()]
        if boundary > answer.hit_tokens(keys.identity.chunk_size):
            return answer
        return _at_boundary(answer, boundary, boundaries_found)

    def _partial_runs(self, keys: RequestKeys, candidates: Sequence[Sequence[Chunk]]) -> list[list[bytes]]:
        """Return, per rank and partial chunk, the keys of its records, one per group of full attention."""
        size = len(self._groups.full) * KEY_BYTES
        packed = self._records(keys, [b"".join(chunk.key for chunk in chunks) for chunks in candidates])
        return [[own[at : at + size] for at in range(0, len(own), size)] for own in packed]

    def _records(self, keys: RequestKeys, leading: Sequence[bytes]) -> Sequence[bytes]:
        """Return, per rank, the keys of all records of chunks: for each chunk, one per group of full attention."""
        if not self._further:
            return leading
        groups = [leading, *(keys.chunk_keys(group, leading) for group in self._further)]
        return [
            np.stack([np.frombuffer(each, f"V{KEY_BYTES}") for each in own], axis=1).tobytes()
            for own in zip(*groups, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class _LocalRank:
    """Replaces `RankConnection` for a rank whose host memory can be looked up in this process. `call` does not suspend."""

    call: Callable[[Message], Coroutine[Any, Any, Message | None]]


def _run_synchronously(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never suspends."""
    try:
        work.send(None)
    except StopIteration as end:
        return cast("T", end.value)
    work.close()
    raise RuntimeError("a lookup in memory was suspended")


@dataclass(frozen=True, slots=True)
class _First:
    """The first of several runs of keys that a rank has completely.

    Attributes:
        position: Index of the run; -1 for none.
        pinned: Whether some records of the run are pinned in host memory.
        resident: Whether all of its records are pinned.
        tier: Id of the tier of its last record; "" if it has none.
    """

    position: int
    pinned: bool
    resident: bool
    tier: str

    @classmethod
    def of(cls, reply: Message, index: int, runs: Sequence[bytes]) -> _First:
        """Read the answer to the list of runs with this index in the message."""
        match reply.get("found"):
            case [*found] if (
                index < len(found) and isinstance(found[index], list | tuple) and len(found[index]) == 3
            ):
                position = _number(found[index][0], -1, len(runs) - 1)
                length = len(runs[position]) // KEY_BYTES if position >= 0 else 0
                pinned = _number(found[index][1], 0, length)
                if isinstance(found[index][2], str):
                    return cls(position, pinned > 0, pinned == length, found[index][2])
        raise ValueError(f"a rank answered {reply!r:.80}, expected the positions of runs")


async def _ask_first(
    ranks: Sequence[RankConnection | _LocalRank], lookup_id: str, runs: Sequence[Sequence[bytes]]
) -> list[_First] | None:
    """Ask each rank for the first of its runs of keys that is stored completely. None if an answer is missing.

    If there are no runs, no rank is queried and the result is empty.
    Records of a found run that are in host memory are pinned for the lookup, unless `lookup_id` is empty.
    """
    if not runs[0]:
        return []
    messages = [{"op": "first", "lookup_id": lookup_id, "runs": [pack_runs(own)]} for own in runs]
    replies = await _ask_all(ranks, messages)
    if replies is None:
        return None
    return [_First.of(reply, 0, own) for reply, own in zip(replies, runs, strict=True)]


def _at_boundary(answer: Answer, boundary: int, found: Sequence[_First]) -> Answer:
    """The answer for a boundary that every rank has found."""
    return replace(
        answer,
        boundary=boundary,
        end_tier=answer.end_tier or found[0].tier,
        resident=answer.resident and all(each.resident for each in found),
    )


def _by_chunk(costs: Costs, records: int) -> Costs:
    """Return the costs of loading chunks, given the costs of loading their records."""
    return tuple(
        {end // records: (end // records, seconds) for end, seconds in costs if end >= records}.values()
    )


def _agreed(candidates: Sequence[Sequence[Chunk]], firsts: Sequence[int]) -> list[Chunk]:
    """Return the partial chunk that all ranks have, with the keys of each rank; empty if the ranks differ."""
    if not firsts or min(firsts) < 0 or len(set(firsts)) > 1:
        return []
    return [chunks[first] for chunks, first in zip(candidates, firsts, strict=True)]


async def _ask_all(
    ranks: Sequence[RankConnection | _LocalRank], messages: Sequence[Message]
) -> list[Message] | None:
    """The answer of every rank; None if one is missing."""
    pairs = zip(ranks, messages, strict=True)
    if len(ranks) == 1 or isinstance(ranks[0], _LocalRank):
        replies = [await rank.call(message) for rank, message in pairs]
    else:
        replies = await asyncio.gather(*(rank.call(message) for rank, message in pairs))
    answered = [reply for reply in replies if reply is not None]
    return answered if len(answered) == len(replies) else None


def _number(value: object, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"a rank answered {value!r:.40}, expected {least} to {most}")
    return value


def _tiers(reply: Message, records: int) -> dict[str, int]:
    """Return the number of the first `records` records in each tier. The other ranks may lack those after them."""
    tiers = reply.get("tiers")
    if not isinstance(tiers, dict) or not all(
        isinstance(name, str) and type(count) is int for name, count in tiers.items()
    ):
        raise ValueError(f"a rank answered tiers={tiers!r:.40}, expected numbers of records by tier id")
    found = {}
    for name, count in tiers.items():
        if (counted := min(count, records)) > 0:
            found[name] = counted
            records -= counted
    return found
