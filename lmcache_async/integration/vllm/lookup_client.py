"""The scheduler half's own thread: hashes prompts and asks the worker halves what they have.

The scheduler's thread calls the public methods; each takes constant time and waits for nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import uvloop

from lmcache_async.hashing import RequestNamespace, hash_key_id
from lmcache_async.integration.vllm.adapters import AdapterNames
from lmcache_async.integration.vllm.link import Link
from lmcache_async.integration.vllm.lookups import MISS, Lookup
from lmcache_async.integration.vllm.waiting import WaitCounts, Waiting
from lmcache_async.observability.logging import LimitedLogger

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from pathlib import Path

    from lmcache_async.integration.vllm.chains import RequestChain
    from lmcache_async.integration.vllm.handover import Promise
    from lmcache_async.integration.vllm.wire import Identity, Message
    from lmcache_async.types import Chunk

logger = LimitedLogger(logging.getLogger(__name__))

_CLEAR_RETRY_S = 0.1


class LookupClient:
    """Lookups over all ranks.

    Args:
        paths: Each rank's socket.
        chunk_size: What the ranks must agree on with the scheduler half, else they are not asked.
        block_size: The same.
        lookup_timeout_s: Longest time of one lookup.
        hash_key: The secret of the ranks' keyed hash; b"" for none.
        adapter_algorithm: Hash of the chunk keys, by which adapters are told apart too.
        clock: Seconds, monotonic.
        loop: Where it runs; None makes one, on a thread of its own.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        chunk_size: int,
        block_size: int,
        lookup_timeout_s: float,
        hash_key: bytes = b"",
        adapter_algorithm: str = "xxh3_128",
        clock: Callable[[], float] = time.monotonic,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._expected = (chunk_size, block_size, hash_key_id(hash_key))
        self._hash_key = hash_key
        self._timeout_s = lookup_timeout_s
        self._clock = clock
        self._links = [Link(rank, path, self._links_changed) for rank, path in enumerate(paths)]
        self._waiting = Waiting(self._links, timeout_s=lookup_timeout_s, clock=clock)
        self._adapters = AdapterNames(adapter_algorithm)
        self._inbox: deque[Callable[[], None]] = deque()
        self._woken = False
        self._connected = False
        self._cleared = 0
        self._next_lookup = 0
        self.epoch = 0
        self._loop = loop or uvloop.new_event_loop()
        self._stop = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread: threading.Thread | None = None
        if loop is None:
            self._thread = threading.Thread(target=self._run, name="lmcache-async-lookup", daemon=True)
            self._thread.start()
        else:
            self._main_task = loop.create_task(self._main())

    # The scheduler's thread.

    def now(self) -> float:
        return self._clock()

    @property
    def connected(self) -> bool:
        """Whether every rank can be asked."""
        return self._connected

    @property
    def ready(self) -> bool:
        """Whether a lookup has any sense: connected, and no reset under way."""
        return self._connected and self._cleared == self.epoch

    @property
    def waits(self) -> WaitCounts:
        """What became of promises, so far."""
        return self._waiting.counts

    def ask(
        self,
        chain: RequestChain,
        num_tokens: int,
        preemptions: int,
        promise: Promise | None = None,
        wait_s: float = 0.0,
    ) -> Lookup:
        """Hash `num_tokens` of the request and look them up; the answer appears in the result.

        Args:
            promise: What a producer has said of it.
            wait_s: Longest wait until that is there.
        """
        self._next_lookup += 1
        name = f"{chain.request_id:.64}#{self._next_lookup}"  # who sends a request chooses its id
        now, epoch = self._clock(), self.epoch
        lookup = Lookup(name, num_tokens, epoch, now, preemptions, promise=promise, wait_s=wait_s)
        if not self.ready:
            lookup.answer = MISS
            self.hash(chain, num_tokens)
            return lookup
        chain.requested = max(chain.requested, num_tokens)
        self._post(lambda: self._look_up(chain, lookup))
        return lookup

    def hash(self, chain: RequestChain, num_tokens: int) -> None:
        """Hash `num_tokens` of the request, without a lookup."""
        if self._connected and chain.requested < num_tokens and not chain.failed:
            chain.requested = num_tokens
            self._post(lambda: self._hash(chain, num_tokens))

    def release(self, lookup: Lookup) -> None:
        """Let go of what the lookup pinned, now or as soon as it is answered."""
        if lookup.released:
            return
        lookup.released = True
        if lookup.answer is None or lookup.answer.pinned:
            self._post(lambda: self._release(lookup))

    def reset(self, *, memory_only: bool) -> None:
        """Begin to clear every rank; until all have, lookups are misses."""
        self.epoch += 1
        epoch = self.epoch
        self._post(lambda: self._clear(epoch, memory_only))

    def close(self, timeout_s: float) -> None:
        """End the thread; it is a daemon, so one that hangs is left alone."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _post(self, call: Callable[[], None]) -> None:
        self._inbox.append(call)
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # closed: nobody asks any more
                self._loop.call_soon_threadsafe(self._drain)

    # The client's thread.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        finally:
            self._loop.close()

    async def _main(self) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            tasks = [group.create_task(link.run()) for link in self._links]
            self._drain()
            await self._stop.wait()
            self._group = None
            for task in [*tasks, *self._tasks]:
                task.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if self._group is None:
            work.close()
            return
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _drain(self) -> None:
        self._woken = False
        while self._inbox:
            call = self._inbox.popleft()
            try:
                call()
            except Exception as error:  # a border: this thread must outlive any one request
                logger.log(logging.ERROR, repr(error), "lookup client: %r", error, exc_info=True)

    def _look_up(self, chain: RequestChain, lookup: Lookup) -> None:
        self._hash(chain, lookup.num_tokens)
        if chain.num_hashed != lookup.num_tokens or lookup.epoch != self._cleared:
            lookup.answer = MISS
            return
        self._spawn(self._answer(chain, lookup, chain.end_candidates()))

    async def _answer(self, chain: RequestChain, lookup: Lookup, ends: Sequence[Sequence[Chunk]]) -> None:
        answer = MISS
        try:
            answer = await self._waiting.answer(chain, lookup, ends)
        except TimeoutError:
            logger.report("timeout", "a lookup had no answer in %.3f s; it is a miss", self._timeout_s)
            lookup.abandoned = True
        except Exception as error:  # a border: what fails here is a miss
            logger.log(logging.ERROR, repr(error), "lookup failed: %r; it is a miss", error, exc_info=True)
            lookup.abandoned = True
        lookup.answer = answer
        if lookup.abandoned:
            self._unpin(lookup)

    def _hash(self, chain: RequestChain, num_tokens: int) -> None:
        identities = [link.identity for link in self._links]
        if chain.failed:
            return
        try:
            if not chain.opened:
                if any(identity is None for identity in identities):
                    chain.requested = 0  # to be asked for again
                    return
                self._open(chain, [identity for identity in identities if identity is not None])
            chain.extend(num_tokens, _let_others_run)
        except (ValueError, OverflowError, OSError) as error:
            chain.failed = True
            logger.report("hash", "tokens of request %s have no keys: %s", chain.request_id, error)

    def _open(self, chain: RequestChain, identities: Sequence[Identity]) -> None:
        adapter = chain.adapter
        namespace = RequestNamespace(
            lora=adapter.name if adapter else "",
            lora_path=self._adapters.content(adapter) if adapter else "",
            cache_salt=chain.cache_salt,
            tags=chain.tags,
        )
        key = self._hash_key
        roots = [namespace.root(identity.root, identity.algorithm, key) for identity in identities]
        chain.open(roots, identities[0], namespace.keyed_label(key), key)

    def _release(self, lookup: Lookup) -> None:
        if lookup.answer is None:
            lookup.abandoned = True  # it may yet pin; its end sees to it
        elif lookup.answer.pinned:
            self._unpin(lookup)

    def _unpin(self, lookup: Lookup) -> None:
        for link in self._links:
            link.post({"op": "unpin", "lookup_id": lookup.lookup_id})

    def _clear(self, epoch: int, memory_only: bool) -> None:
        self._spawn(self._clear_all(epoch, memory_only))

    async def _clear_all(self, epoch: int, memory_only: bool) -> None:
        message = {"op": "clear", "epoch": epoch, "memory_only": memory_only}
        async with asyncio.TaskGroup() as group:
            for link in self._links:
                group.create_task(_until_answered(link, message))
        self._cleared = max(self._cleared, epoch)

    def _links_changed(self) -> None:
        identities = [link.identity for link in self._links]
        known = [identity for identity in identities if identity is not None]
        agreed = all(self._fits(known[0], identity) for identity in known)
        self._connected = agreed and len(known) == len(identities)

    def _fits(self, first: Identity, other: Identity) -> bool:
        found = (other.chunk_size, other.block_size, other.hash_key_id)
        if found == self._expected and other.algorithm == first.algorithm:
            return True
        logger.report("identity", "the ranks' configurations differ (%s, %s); all are misses", first, other)
        return False


async def _until_answered(link: Link, message: Message) -> None:
    while await link.call(message) is None:  # noqa: ASYNC110 - the other end is another process
        await asyncio.sleep(_CLEAR_RETRY_S)


def _let_others_run() -> None:
    """Give up the GIL for real: only a thread that sleeps lets a waiting one take it at once."""
    time.sleep(1e-6)
