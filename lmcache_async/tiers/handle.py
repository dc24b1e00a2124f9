"""Handle through which the engine calls a tier: in batches, with layers, a deadline and checks of its results."""

from __future__ import annotations

import asyncio
import math
import operator
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, Self, TypeVar, cast

from lmcache_async.errors import (
    BudgetExceededError,
    ConfigError,
    LMCacheAsyncError,
    TierError,
    TierFullError,
    TierUnavailableError,
)
from lmcache_async.logging import LimitedLogger, describe
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.memory.threads import is_ending, running_task
from lmcache_async.tiers.base import Allocate, Capabilities, ScrubReport, Tier, TierStatistics
from lmcache_async.tiers.middleware.base import (
    Call,
    Layer,
    LayerContext,
    LayerStatistics,
    Next,
    Results,
    Verb,
)
from lmcache_async.tiers.middleware.deadline import DeadlineLayer
from lmcache_async.tiers.results import (
    ContractError,
    ReadResult,
    check_count,
    check_flag,
    check_list,
    drop_tracebacks,
    release_results,
    type_text,
)
from lmcache_async.types import KEY_BYTES, ChunkKey

T = TypeVar("T")

BUFFERS_PER_KEY = 2
"""Buffers of `allocate` that a call may hold per key: one to return and one to work with.

Without a bound, a call that never stops allocating would evict the whole content of host memory.
"""

_BUNDLED = "lmcache_async.tiers.middleware."
"""Package of the layers whose results are not checked."""


class Watcher(Protocol):
    """Subscriber of chunk events. Called on the loop's thread; must be quick and must not raise."""

    def stored(self, tier: str, keys: Sequence[ChunkKey]) -> None:
        """The tier with this id has stored the chunks. It may have had them before."""

    def removed(self, tier: str, keys: Sequence[ChunkKey]) -> None:
        """The tier with this id does not have the chunks any more. It may not have had all of them."""


class CallLeases:
    """Leases of one call of a tier. They end with the call, whatever the tier does with them.

    A tier may release a buffer that it received, any number of times or not at all. A buffer that it returns
    is transferred to the caller; the tier can neither use nor release it any more. A `foreign` tier returns
    leases of memory that is not from `allocate`.
    """

    __slots__ = (
        "_allocate",
        "_ended",
        "_foreign",
        "_leases",
        "_max_buffers",
        "_refused_bytes",
        "_retained",
        "_waiting",
    )

    def __init__(self, call: Call, *, foreign: bool) -> None:
        self._allocate = call.allocate
        self._max_buffers = BUFFERS_PER_KEY * len(call.keys)
        self._foreign = foreign
        self._leases: list[Buffer] = []
        self._retained: list[Buffer] = []
        self._waiting = 0  # calls of `allocate` that have not returned
        self._refused_bytes = math.inf  # of the smallest request that got no memory in time
        self._ended = False

    async def allocate(self, nbytes: int) -> Buffer:
        """Lease memory for a record. Called by the tier.

        After a wait without success, further requests of that size fail at once. Otherwise each chunk of a batch
        would wait, and the chunks that got memory would be lost at the deadline of the call.
        """
        wanted = operator.index(nbytes)
        self._check_room()
        if wanted >= self._refused_bytes:
            raise BudgetExceededError(
                f"{self._refused_bytes} bytes were not available to another chunk of the call"
            )
        assert self._allocate is not None
        self._waiting += 1
        try:
            buffer = await self._allocate(wanted)
        except BudgetExceededError:
            self._refused_bytes = min(self._refused_bytes, wanted)
            raise
        finally:
            self._waiting -= 1
        if self._ended:
            buffer.release()
            raise BudgetExceededError("the call of the tier ended while it waited for memory")
        buffer.owner = self
        self._leases.append(buffer)
        return buffer

    def lend(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[tuple[ChunkKey, Buffer]]:
        """Return the items of a `put` with read-only leases of the caller's buffers."""
        lent = []
        for key, buffer in items:
            lease = buffer.lend(self)
            self._leases.append(lease)
            lent.append((key, lease))
        return lent

    def retained(self, lease: Buffer) -> None:
        """Register a further lease that the tier took with `retain`.

        A further lease of memory from `allocate` ends with the call. A further lease of a buffer passed to `put` belongs
        to the tier.
        """
        if not lease.readonly:
            lease.owner = self
            self._retained.append(lease)

    def may_return(self, buffer: Buffer) -> bool:
        return buffer.owner is self or (self._foreign and buffer.owner is None)

    def close(self, unused: object) -> None:
        """End the call: release its remaining leases, and leases of the tier's own memory in a discarded result."""
        self._ended = True
        if self._foreign and isinstance(unused, list | tuple):
            release_results([one for one in unused if isinstance(one, Buffer) and one.owner is None])
        release_results(self._leases)
        release_results(self._retained)
        self._leases.clear()
        self._retained.clear()

    def _check_room(self) -> None:
        if self._ended:
            raise BudgetExceededError("the call of the tier has ended; memory is only leased during a call")
        if len(self._leases) + self._waiting >= self._max_buffers:
            self._leases = [lease for lease in self._leases if not lease.released]
            if len(self._leases) + self._waiting >= self._max_buffers:
                raise BudgetExceededError(
                    f"a call of the tier holds {self._max_buffers} buffers, the maximum"
                )


class TierHandle:
    """Calls a tier in batches, through its layers, and enforces its contract. Opened with `async with`.

    The handle is the only caller of the tier, which is third-party code: exceptions become TierErrors, results are
    checked for type and length, and memory that a call received is released when the call ends. The same holds for
    each third-party layer.

    Lookups, reads, writes and removals pass through the layers, in the order in which they are listed, to the
    tier. A call ends within `timeout_s`; see `DeadlineLayer` for what happens to a late call. Every call can be
    cancelled; it then holds no lease. A tier in the arena answers at once and has no deadline. Methods raise
    TierError if the tier fails.

    Args:
        close_timeout_s: Seconds that closing waits for abandoned calls, then for the tier, and then for its clean-up after
            a cancellation; at most `timeout_s`, which is also the default.
        watcher: Receives the tier's chunk events. Deletions by a shared backend itself are not reported.
        memory_watcher: Receives them too if the tier is in the arena and has a local index, so that all are reported.

    Attributes:
        capabilities: Capabilities of the tier, read when it was created, bound and opened.
        layers: The layers, outermost first, including a deadline layer that was added.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        name: str,
        logger: LimitedLogger,
        timeout_s: float,
        layers: Sequence[Layer] = (),
        open_timeout_s: float = 60.0,
        close_timeout_s: float | None = None,
        watcher: Watcher | None = None,
        memory_watcher: Watcher | None = None,
    ) -> None:
        self.name = name
        self._tier = tier
        self._logger = logger
        self._writes: dict[object, set[ChunkKey]] = {}  # running writes, and the keys removed meanwhile
        self._statistics = TierStatistics()
        self.capabilities = Capabilities()
        if not self._update_capabilities():
            raise ConfigError(f"tier {name!r}: its `capabilities` must be an instance of Capabilities")
        if not (self.capabilities.in_arena and self.capabilities.local_index):
            memory_watcher = None
        self._watchers = [each for each in (watcher, memory_watcher) if each is not None]
        if self._watchers:
            tier.on_evicted = self._evicted
        self._timeout_s = timeout_s
        self._open_timeout_s = open_timeout_s
        self._close_timeout_s = timeout_s if close_timeout_s is None else min(timeout_s, close_timeout_s)
        self.layers = tuple(layers)
        if self.capabilities.in_arena:
            self._timeout_s = math.inf
        else:
            self.layers = _with_deadline(layers, LayerContext(name, "deadline", timeout_s, logger))
        self._life: asyncio.Task[None]
        self._opened: asyncio.Future[None]
        self._closing: asyncio.Event
        self._deadlines = [layer for layer in self.layers if isinstance(layer, DeadlineLayer)]
        self._call = self._composed(self.layers)
        self._call_clear = self._composed(self._deadlines)

    @property
    def late_calls(self) -> int:
        """Number of abandoned calls that have not ended yet."""
        return sum(layer.late_calls for layer in self._deadlines)

    async def drain(self, *, timeout_s: float) -> bool:
        """Wait until the calls abandoned so far have ended. Return False if they have not within `timeout_s`."""
        return all(await asyncio.gather(*(layer.drain(timeout_s=timeout_s) for layer in self._deadlines)))

    def bind(self, arena: Arena) -> None:
        """Prepare the tier and its layers for an arena. Called once before the tier is opened."""
        self._tier.bind(arena)
        self._update_capabilities()
        for layer in self.layers:
            layer.bind(arena)

    async def __aenter__(self) -> Self:
        """Open the tier. Errors propagate, so that the engine does not open.

        An error that is not derived from Exception is converted to a TierError, unless it ends the calling task.
        """
        self._opened, self._closing = asyncio.get_running_loop().create_future(), asyncio.Event()
        self._life = asyncio.ensure_future(self._open_and_close())
        # Its error, which `asyncio` would log otherwise, is raised or reported below, or the tier is abandoned.
        self._life.add_done_callback(lambda life: life.cancelled() or life.exception())
        is_open = has_failed = False
        try:
            calls = {self._life, self._opened}
            await asyncio.wait(calls, timeout=self._open_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            is_open, has_failed = self._opened.done(), self._life.done()
        finally:
            if not is_open:
                await self._end(timeout_s=0.0)
        if has_failed:
            self._life.result()
        if not is_open:
            raise TierUnavailableError(
                f"tier {self.name!r}: did not open within {self._open_timeout_s} s;"
                " check that its backend answers, or raise open_timeout_s of the tier"
            )
        self._update_capabilities()
        return self

    async def __aexit__(self, *error: object) -> None:
        """Wait for abandoned calls, then close the tier. A failure or a timeout is logged, and the tier is abandoned."""
        try:
            await self.drain(timeout_s=self._close_timeout_s)
        finally:
            if not await self._end(timeout_s=self._close_timeout_s):
                self._report("close", f"did not close within {self._close_timeout_s} s; it is abandoned")
            elif not self._life.cancelled() and (failure := self._life.exception()) is not None:
                self._report("closing", f"closing failed: {describe(failure)}")

    async def _open_and_close(self) -> None:
        """Open the tier, and close it when `_closing` is set, in one task.

        The task can be abandoned. The tier may suppress a cancellation, as `in_thread` does while a thread runs.
        """
        task = running_task()
        try:
            await self._tier.__aenter__()
        except BaseException as error:
            if isinstance(error, Exception) or is_ending(error, task):
                raise
            failure = self._convert("opening", error)
            raise failure from failure.__cause__
        self._opened.set_result(None)
        try:
            await self._closing.wait()
        finally:
            await self._guarded("closing", lambda: self._tier.__aexit__(None, None, None))

    async def _end(self, *, timeout_s: float) -> bool:
        """Let the tier close. After `timeout_s`, or if this call is cancelled, cancel the closing and wait for its clean-up.

        Return whether it has closed in time.
        """
        self._closing.set()
        try:
            ended, _ = await asyncio.wait({self._life}, timeout=timeout_s)
        finally:
            if not self._life.done():
                self._life.cancel()
                await asyncio.wait({self._life}, timeout=self._close_timeout_s)
        return bool(ended)

    def lookup(
        self, keys: Sequence[ChunkKey], *, exact: bool = False, deadline: float = math.inf
    ) -> Coroutine[Any, Any, list[bool]]:
        """Return for each key, in prefix order, whether `get` would find the chunk now.

        Unless `exact`, a tier without a `local_index` is only queried for the longest prefix, and the result is
        False for all chunks after the first missing one.

        Args:
            deadline: Time of the event loop by which the call ends, if that is before `timeout_s` has passed.
        """
        local = self.capabilities.local_index
        verb = Verb.CONTAINS_MANY if local or exact else Verb.COUNT_PREFIX
        call = self._new_call(verb, keys, local=local, deadline=deadline)
        return cast("Coroutine[Any, Any, list[bool]]", self._call(call))

    def get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, *, deadline: float = math.inf
    ) -> Coroutine[Any, Any, list[ReadResult]]:
        """Return for each key a buffer leased to the caller, None on a miss, or the error of that chunk.

        Args and errors: as in `lookup`. BudgetExceededError is raised if `allocate` found no free memory in time.
        """
        call = self._new_call(Verb.GET_MANY, keys, allocate=allocate, deadline=deadline)
        return cast("Coroutine[Any, Any, list[ReadResult]]", self._call(call))

    async def put(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[TierError | None]:
        """Store records. Return for each item None if it was stored, else the error; a failure is not raised.

        The tier has leases of its own of the records until the call has ended.
        """
        call = self._new_call(Verb.PUT_MANY, items=items)
        try:
            return cast("list[TierError | None]", await self._call(call))
        except TierError as failure:
            failure.__traceback__ = None  # its frames hold the records
            return [failure] * len(items)

    async def remove(self, key: ChunkKey) -> bool:
        """Delete the chunk. Return whether it was stored; False if the tier does not support removal."""
        (removed,) = await self._call(self._new_call(Verb.REMOVE, (key,)))
        return bool(removed)

    async def reject(self, key: ChunkKey, cause: str) -> bool:
        """Make a record that failed verification for `cause` unreadable. Return whether it was stored."""
        (removed,) = await self._call(self._new_call(Verb.REJECT, (key,), cause=cause))
        return bool(removed)

    async def clear(self) -> int:
        """Remove every chunk. Return the number of removed chunks. Only the deadline applies, no other layer."""
        (removed,) = await self._call_clear(self._new_call(Verb.CLEAR))
        return cast("int", removed)

    async def scrub(self, *, max_bytes_per_s: int | None = None) -> ScrubReport:
        """Read and verify every record, and reject corrupt ones. Has no deadline; no layer applies."""
        report = await self._guarded("scrub", lambda: self._tier.scrub(max_bytes_per_s=max_bytes_per_s))
        if isinstance(report, ScrubReport):
            return report
        raise self._convert("scrub", ContractError(f"scrub returned {type_text(report)}, not a ScrubReport"))

    async def keys(self) -> AsyncIterator[ChunkKey]:
        """Iterate over all stored keys, in no order. Has no deadline; no layer applies."""
        keys: AsyncIterator[object] | None = None

        async def read() -> object:
            nonlocal keys
            if keys is None:
                keys = aiter(self._tier.keys())
            return await anext(keys, None)

        try:
            while (key := await self._guarded("keys", read)) is not None:
                if not isinstance(key, bytes) or len(key) != KEY_BYTES:
                    error = ContractError(f"keys returned {key!r:.100}, not {KEY_BYTES} bytes")
                    raise self._convert("keys", error)
                yield ChunkKey(key)
        finally:
            if isinstance(keys, AsyncGenerator):
                await self._guarded("keys", keys.aclose)

    def count_in_memory(self, keys: Sequence[ChunkKey]) -> int | None:
        """Count the leading keys that a tier in the arena has. Thread-safe; no layer is called.

        Return None for other tiers, if a layer may change the results of lookups, or if the tier fails.
        """
        if not (self.capabilities.in_arena and all(layer.transparent for layer in self.layers)):
            return None
        try:
            found = self._tier.count_in_memory(keys)
            return None if found is None else check_count("count_in_memory", found, len(keys))
        except BaseException as error:  # noqa: BLE001  # of a plug-in
            self._report_error("count_in_memory", error)
            return None

    def lacks(self, key: ChunkKey) -> bool:
        """Return whether the chunk is known not to be stored in the tier. Thread-safe; no layer is called.

        Return False if a third-party layer may change the results of lookups, or if the tier fails.
        """
        if not all(type(layer).__module__.startswith(_BUNDLED) for layer in self.layers):
            return False
        try:
            return check_flag("lacks", self._tier.lacks(key))
        except BaseException as error:  # noqa: BLE001  # of a plug-in
            self._report_error("lacks", error)
            return False

    def statistics(self) -> TierStatistics:
        """Return the statistics of the tier, or the last valid ones if the tier returns none."""
        found = self._value("statistics", lambda: self._tier.statistics(), TierStatistics)
        self._statistics = found or self._statistics
        return self._statistics

    def layer_statistics(self) -> Mapping[str, LayerStatistics]:
        """Return the statistics of the layers by layer id."""
        found = ((layer, self._value("statistics", layer.statistics, object)) for layer in self.layers)
        return {layer.context.layer: value for layer, value in found if isinstance(value, LayerStatistics)}

    def _composed(self, layers: Sequence[Layer]) -> Callable[[Call], Coroutine[Any, Any, Results]]:
        """Return a function that calls the tier through the layers.

        To keep the number of frames small, only third-party layers and, unless all layers are transparent, the
        outermost layer are guarded.
        """
        run: Callable[[Call], Coroutine[Any, Any, Results]] = self._call_tier
        outermost = -1 if all(layer.transparent for layer in layers) else 0
        for position, layer in reversed(list(enumerate(layers))):
            bundled = type(layer).__module__.startswith(_BUNDLED)
            around = partial(layer.around, next=run)
            if position == outermost or not bundled:
                run = partial(self._call_layer, around, None if bundled else self._check_chunks)
            else:
                run = around
        return run

    def _new_call(
        self,
        verb: Verb,
        keys: Sequence[ChunkKey] = (),
        items: Sequence[tuple[ChunkKey, Buffer]] = (),
        *,
        allocate: Allocate | None = None,
        cause: str = "",
        local: bool = False,
        deadline: float = math.inf,
    ) -> Call:
        now = asyncio.get_running_loop().time()
        return Call(verb, keys, items, allocate, cause, min(now + self._timeout_s, deadline), local, now)

    def _call_layer(
        self, around: Next, check: Callable[[Call, object], Results] | None, call: Call
    ) -> Coroutine[Any, Any, Results]:
        """Carry out a call with a layer. Layers may be third-party code like the tier."""
        return self._guarded(call.verb, partial(around, call), check and partial(check, call))

    def _call_tier(self, call: Call) -> Coroutine[Any, Any, Results]:
        """Carry out a call with the tier itself."""
        foreign = self.capabilities.in_arena or self.capabilities.own_memory
        leases = CallLeases(call, foreign=foreign)
        start, check = partial(self._start, call, leases), partial(self._check, call, leases)
        if call.verb is Verb.PUT_MANY and self._watchers:
            return self._publish_stored(call, partial(self._guarded, call.verb, start, check, leases.close))
        return self._guarded(call.verb, start, check, leases.close)

    def _start(self, call: Call, leases: CallLeases) -> object:
        """Call the method of the tier."""
        tier, keys = self._tier, list(call.keys)
        match call.verb:  # the most frequent ones first
            case Verb.PUT_MANY:
                return tier.put_many(leases.lend(call.items))
            case Verb.GET_MANY:
                return tier.get_many(keys, leases.allocate)
            case Verb.CONTAINS_MANY:
                return tier.contains_many(keys)
            case Verb.COUNT_PREFIX:
                return tier.count_prefix(keys)
            case Verb.REMOVE:
                return self._remove(keys, lambda: tier.remove(keys[0]))
            case Verb.REJECT:
                return self._remove(keys, lambda: tier.reject(keys[0], call.cause))
            case Verb.CLEAR:
                return self._clear()

    def _check(self, call: Call, leases: CallLeases, result: object) -> Results:
        """Check the result of the tier and convert it to a list."""
        match call.verb:
            case Verb.PUT_MANY | Verb.GET_MANY | Verb.CONTAINS_MANY:
                return self._check_chunks(call, result, leases.may_return)
            case Verb.COUNT_PREFIX:
                stored = check_count(call.verb, result, call.chunks)
                return [True] * stored + [False] * (call.chunks - stored)
            case Verb.CLEAR:
                return [check_count(call.verb, result)]
            case Verb.REMOVE | Verb.REJECT:
                return [check_flag(call.verb, result)]

    def _check_chunks(
        self, call: Call, results: object, may_return: Callable[[Buffer], bool] | None = None
    ) -> Results:
        """Check the result for each chunk. An invalid result of a read or a write becomes the error of that chunk.

        Buffers are taken over, so a buffer that is returned for two chunks is invalid for the second.
        """
        given = check_list(call.verb, results, call.chunks)
        if call.verb is Verb.PUT_MANY:
            return [None if one is None else self._convert_chunk(call.verb, one) for one in given]
        if call.verb is not Verb.GET_MANY:
            return [one if isinstance(one, bool) else check_flag(call.verb, one) for one in given]
        return [
            None
            if one is None
            else one.take_over()
            if isinstance(one, Buffer) and not one.released and (may_return is None or may_return(one))
            else self._convert_chunk(call.verb, one)
            for one in given
        ]

    async def _guarded(
        self,
        verb: str,
        run: Callable[[], object],
        check: Callable[[object], object] | None = None,
        end: Callable[[object], None] = release_results,
    ) -> Any:
        """Await `run()`, which calls third-party code, and return `check` of its result.

        If the code suppresses a cancellation, CancelledError is raised anyway. `end` is always called last: with the
        result of `run()` if that was discarded, else with None.
        """
        task = running_task()
        cancels = 0 if task is None else task.cancelling()
        unused: object = None
        try:
            unused = await run()  # type: ignore[misc]  # it may be any object; `await` raises TypeError then
            if task is not None and task.cancelling() > cancels:
                raise asyncio.CancelledError  # noqa: TRY301  # handled below like one that the tier raises
            result = unused if check is None else check(unused)
        except BaseException as error:
            if is_ending(error, task):
                raise
            if task is not None and task.cancelling() > cancels:
                raise asyncio.CancelledError from None
            failure = self._convert(verb, error)
            raise failure from failure.__cause__
        else:
            unused = None
            return result
        finally:
            end(unused)
            unused = None  # or the traceback would keep a view of a buffer alive

    async def _clear(self) -> object:
        """Clear the tier and publish the removal of the chunks that it listed before."""
        keys = [key async for key in self.keys()] if self._watchers else []
        return await self._remove(keys, self._tier.clear)

    async def _remove(self, keys: Sequence[ChunkKey], remove: Callable[[], Awaitable[object]]) -> object:
        """Remove chunks and publish the removal.

        Chunks that a tier with a `local_index` has afterwards are not published: the call failed or was cancelled, or they
        were stored again.
        """
        try:
            return await remove()
        finally:
            if self._watchers and self.capabilities.local_index:
                found = set(await self._find(keys))
                keys = [key for key in keys if key not in found]
            self._publish_removed(keys)

    async def _publish_stored(self, call: Call, run: Callable[[], Coroutine[Any, Any, Results]]) -> Results:
        """Carry out a write and publish the stored chunks, without those that the tier has removed meanwhile.

        A tier with a `local_index` is asked whether it has the chunks that were removed meanwhile, because a chunk may have
        been removed before it was stored. If the write fails or is cancelled, it is asked for all chunks.
        """
        write, removed = object(), set[ChunkKey]()  # a layer may carry out a call several times at once
        self._writes[write] = removed
        stored: list[ChunkKey] = []
        unclear = [key for key, _ in call.items]
        try:
            try:
                results = await run()
                stored = [key for (key, _), error in zip(call.items, results, strict=True) if error is None]
                unclear = [key for key in stored if key in removed]
            finally:
                if unclear and self.capabilities.local_index:
                    stored = [key for key in stored if key not in removed]
                    removed.clear()
                    stored += await self._find(unclear)
        finally:
            del self._writes[write]
            stored = [key for key in stored if key not in removed]
            for watcher in self._watchers if stored else ():
                watcher.stored(self.name, stored)
        return results

    async def _find(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Return the keys that a tier with a `local_index` has now; none of them if a lookup fails."""
        try:
            return [key for key in keys if await self._guarded("contains", partial(self._tier.contains, key))]
        except TierError:
            return []

    def _evicted(self, keys: Sequence[object]) -> None:
        """Publish the keys that the tier reports as evicted. Drop other values, which third-party code may pass."""
        valid = [ChunkKey(key) for key in keys if isinstance(key, bytes) and len(key) == KEY_BYTES]
        if len(valid) < len(keys):
            self._report("on_evicted", f"on_evicted was called with values that are not {KEY_BYTES} bytes")
        self._publish_removed(valid)

    def _publish_removed(self, keys: Sequence[ChunkKey]) -> None:
        if self._watchers and keys:
            for removed in self._writes.values():
                removed.update(keys)
            for watcher in self._watchers:
                watcher.removed(self.name, keys)

    def _update_capabilities(self) -> bool:
        """Read the capabilities again; the last valid ones are kept if the tier does not return any."""
        found = self._value("capabilities", lambda: self._tier.capabilities, Capabilities)
        self.capabilities = found or self.capabilities
        return found is not None

    def _value(self, name: str, read: Callable[[], object], kind: type[T]) -> T | None:
        """Return the value that `read` reads from the tier. If it fails or is not a `kind`, log that and return None."""
        try:
            found = read()
        except BaseException as error:  # noqa: BLE001  # of a plug-in
            self._report_error(name, error)
            return None
        if isinstance(found, kind):
            return found
        self._report(name, f"{name} returned {type(found).__name__}, not {kind.__name__}")
        return None

    def _convert(self, verb: str, error: BaseException) -> TierError | BudgetExceededError:
        """Convert an exception of a call.

        A BudgetExceededError of a read is returned as it is, because the caller's memory was short, not the tier's.
        """
        drop_tracebacks(error)
        if not isinstance(error, LMCacheAsyncError):
            error = ContractError.of(verb, error)
        if isinstance(error, ContractError):
            found = TierError(f"tier {self.name!r}: {error}")
            found.__cause__ = error.__cause__
            return found
        if isinstance(error, TierError) and _has_text(error):
            return error
        kind = TierError
        if isinstance(error, BudgetExceededError):
            if verb == Verb.GET_MANY:
                return error
            kind = TierFullError if verb == Verb.PUT_MANY else TierError
        found = kind(f"tier {self.name!r}: {verb} failed: {describe(error)}")
        found.__cause__ = error
        return found

    def _convert_chunk(self, verb: str, result: object) -> TierError:
        """Convert the error of one chunk in the result of a batch call. Anything else is a contract violation."""
        if not isinstance(result, TierError):
            text = f"{type_text(result)} for a chunk"
            if isinstance(result, Buffer):
                state = "released" if result.released else "not of this call's allocate"
                text = f"a buffer that is {state}"
            result = ContractError(f"{verb} returned {text}")
        return cast("TierError", self._convert(verb, result))  # as for every TierError

    def _report_error(self, name: str, error: BaseException) -> None:
        """Log an exception of a method that has no caller to handle it."""
        self._report(f"{name}.{type(error).__name__}", str(ContractError.of(name, error)))

    def _report(self, cause: str, text: str) -> None:
        """Log a line about the tier, once per cause."""
        self._logger.report(f"{self.name}.{cause}", "tier %r: %s", self.name, text)


def _with_deadline(layers: Sequence[Layer], context: LayerContext) -> tuple[Layer, ...]:
    """Return the layers with a deadline.

    If no `deadline` layer is listed, or only inside of an unbounded layer (see `Layer.bounded`), one is added: outside
    of the first unbounded layer, or innermost if there is none.
    """
    position = next(
        (i for i, layer in enumerate(layers) if isinstance(layer, DeadlineLayer) or not layer.bounded),
        len(layers),
    )
    if position < len(layers) and isinstance(layers[position], DeadlineLayer):
        return tuple(layers)
    return (*layers[:position], DeadlineLayer(None, context), *layers[position:])


def _has_text(error: BaseException) -> bool:
    try:
        str(error)
    except BaseException:  # noqa: BLE001  # __str__ of a third-party class
        return False
    return True
