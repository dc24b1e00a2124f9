"""The calls of a tier, with the checks of the tier contract.

A tier is third-party code. The adapter is the only caller of its methods: exceptions become TierErrors, results
are checked for type and length, and memory that a call received is released when the call ends.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from lmcache_async.errors import BudgetExceededError, ConfigError, LMCacheAsyncError, TierError
from lmcache_async.logging import LimitedLogger, describe
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.memory.tasks import is_ending, running_task
from lmcache_async.tiers.base import Allocate, Capabilities, ScrubReport, Tier, TierStatistics
from lmcache_async.tiers.contract import (
    ContractError,
    ErrorConverter,
    check_buffer,
    check_count,
    check_flag,
    check_flags,
    check_list,
)
from lmcache_async.tiers.middleware.base import Call, Results, Verb
from lmcache_async.tiers.results import ReadResult
from lmcache_async.types import KEY_BYTES, ChunkKey

T = TypeVar("T")

BUFFERS_PER_KEY = 2
"""Buffers of `allocate` that a call may hold per key: one to return and one to work with.

Without a bound, a call that never stops allocating would evict the whole content of host memory.
"""


class Watcher(Protocol):
    """Subscriber of chunk events. Called on the loop's thread; must be quick and must not raise."""

    def kept(self, tier: str, keys: Sequence[ChunkKey]) -> None:
        """The tier has stored the chunks. It may have had them before.

        Args:
            tier: Tier id.
            keys: Keys of the chunks.
        """

    def gone(self, tier: str, keys: Sequence[ChunkKey]) -> None:
        """The tier does not have the chunks any more. It may not have had all of them.

        Args:
            tier: Tier id.
            keys: Keys of the chunks.
        """


class CallLeases:
    """Leases of one call of a tier. They end with the call, whatever the tier does with them.

    A tier may release a buffer that it received, any number of times or not at all. A buffer that it returns
    is transferred to the caller; the tier can neither use nor release it any more.

    Args:
        allocate: Leases memory for a read; None in a call that reads nothing.
        keys: Number of chunks of the call.
        foreign: Whether the tier returns leases of memory that is not from `allocate`.
    """

    __slots__ = ("_allocate", "_ended", "_foreign", "_further", "_leases", "_most")

    def __init__(self, allocate: Allocate | None = None, keys: int = 0, *, foreign: bool = False) -> None:
        self._allocate = allocate
        self._most = BUFFERS_PER_KEY * keys
        self._foreign = foreign
        self._leases: list[Buffer] = []
        self._further: list[Buffer] = []
        self._ended = False

    async def allocate(self, nbytes: int) -> Buffer:
        """Lease memory for a record. Called by the tier.

        Args:
            nbytes: Length in bytes.

        Raises:
            BudgetExceededError: No memory is free in time, the call holds `BUFFERS_PER_KEY` buffers per key,
                or it has ended.
            TypeError: `nbytes` is not an integer.
            ValueError: `nbytes` is negative.
        """
        wanted = operator.index(nbytes)
        self._check_room()
        assert self._allocate is not None
        buffer = await self._allocate(wanted)
        if self._ended:
            buffer.release()
            raise BudgetExceededError("the call of the tier ended while it waited for memory")
        buffer.owner = self
        self._leases.append(buffer)
        return buffer

    def lend(self, buffer: Buffer) -> Buffer:
        """Return a read-only lease of the caller's buffer, for a `put`."""
        lease = buffer.lend(self)
        self._leases.append(lease)
        return lease

    def retained(self, lease: Buffer) -> None:
        """Register a further lease that the tier took with `retain`.

        Further leases of a read's memory end with the call. Further leases of a put's buffer belong to the
        tier.
        """
        if not lease.readonly:
            lease.owner = self
            self._further.append(lease)

    def transfer(self, verb: str, result: object) -> Buffer | None:
        """Check the result for one chunk and transfer it to the caller.

        Raises:
            ContractError: The result is neither None nor a buffer that the tier may return.
        """
        buffer = check_buffer(verb, result)
        if buffer is None:
            return None
        if not self.may_return(buffer):
            raise ContractError(f"{verb} gave a buffer that is not of this call's allocate")
        return buffer.take_over()

    def may_return(self, buffer: Buffer) -> bool:
        return buffer.owner is self or (self._foreign and buffer.owner is None)

    def release_foreign(self, results: object) -> None:
        """Release the tier's own leases in an invalid result."""
        if self._foreign and isinstance(results, list | tuple):
            for result in results:
                if isinstance(result, Buffer) and result.owner is None and not result.released:
                    result.release()

    def close(self) -> None:
        """End the call: release the remaining leases."""
        self._ended = True
        for leases in (self._leases, self._further):
            for lease in leases:
                if not lease.released:
                    lease.release()
            leases.clear()

    def _check_room(self) -> None:
        if self._ended:
            raise BudgetExceededError("the call of the tier has ended; allocate is for a call's own answer")
        if len(self._leases) < self._most:
            return
        self._leases = [lease for lease in self._leases if not lease.released]
        if len(self._leases) >= self._most:
            raise BudgetExceededError(f"a call of the tier holds {self._most} buffers, the most that it may")


class TierAdapter:
    """Calls a tier in batches and enforces its contract. It creates no task and sets no deadline.

    Args:
        tier: The tier.
        name: Tier id, for messages.
        logger: Logger for contract violations, one line per cause.
        watcher: Receives the tier's chunk events. Deletions by a shared backend itself are not visible here.

    Raises:
        ConfigError: `capabilities` of the tier is not an instance of Capabilities.
    """

    def __init__(
        self, tier: Tier, *, name: str, logger: LimitedLogger, watcher: Watcher | None = None
    ) -> None:
        self._tier = tier
        self._name = name
        self._errors = ErrorConverter(name, logger)
        self._watcher = watcher
        if watcher is not None:
            tier.on_evicted = self._publish_removed
        self._statistics = TierStatistics()
        found = self._read_capabilities()
        if found is None:
            raise ConfigError(f"tier {name!r}: its `capabilities` must be an instance of Capabilities")
        self._capabilities = found

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the tier, read when it was created, bound and opened."""
        return self._capabilities

    def bind(self, arena: Arena) -> None:
        self._tier.bind(arena)
        self._update_capabilities()

    async def open(self) -> None:
        """Open the tier. Errors derived from Exception are passed on, so that the engine does not open.

        Raises:
            TierError: Opening raised another exception, or a cancellation that no caller requested.
        """
        task = running_task()
        try:
            await self._tier.__aenter__()
        except Exception:
            raise
        except BaseException as error:
            if is_ending(error, task):
                raise
            failure = self._errors.convert("opening", error)
            raise failure from failure.__cause__
        self._update_capabilities()

    async def close(self) -> None:
        """Close the tier. A failure is logged and does not prevent the rest from closing."""
        try:
            await self._call("closing", lambda: self._tier.__aexit__(None, None, None), lambda _: None)
        except LMCacheAsyncError as failure:
            self._errors.report("closing", f"closing failed: {describe(failure)}")

    def __call__(self, call: Call) -> Coroutine[Any, Any, Results]:
        """Carry out a call. The result has one element for each chunk; see `Results`.

        If the tier suppresses a cancellation, CancelledError is raised all the same.

        Raises:
            TierError: The tier failed or violated its contract.
            BudgetExceededError: There was no memory for the result of a read.
        """
        tier, count = self._tier, call.chunks
        match call.verb:
            case Verb.CONTAINS_MANY:
                return self._call(
                    call.verb,
                    lambda: tier.contains_many(list(call.keys)),
                    lambda result: check_flags(call.verb, result, count),
                )
            case Verb.COUNT_PREFIX:
                return self._call(
                    call.verb,
                    lambda: tier.count_prefix(list(call.keys)),
                    lambda result: _prefix_flags(check_count(call.verb, result, count), count),
                )
            case Verb.GET_MANY:
                capabilities = self._capabilities
                foreign = capabilities.in_arena or capabilities.own_memory
                leases = CallLeases(call.allocate, count, foreign=foreign)
                return self._call(
                    call.verb,
                    lambda: tier.get_many(list(call.keys), leases.allocate),
                    lambda result: self._check_reads(result, count, leases),
                    leases,
                )
            case Verb.PUT_MANY:
                leases = CallLeases()
                return self._call(
                    call.verb,
                    lambda: tier.put_many([(key, leases.lend(buffer)) for key, buffer in call.items]),
                    lambda result: self._check_writes(result, call.items),
                    leases,
                )
            case Verb.REMOVE:
                (key,) = call.keys
                return self._call(
                    call.verb, lambda: tier.remove(key), lambda result: self._check_removal(call, result)
                )
            case Verb.REJECT:
                (key,) = call.keys
                return self._call(
                    call.verb,
                    lambda: tier.reject(key, call.cause),
                    lambda result: self._check_removal(call, result),
                )
            case Verb.CLEAR:
                return self._clear()

    async def scrub(self, *, max_bytes_per_s: int | None = None) -> ScrubReport:
        def check(result: object) -> ScrubReport:
            if isinstance(result, ScrubReport):
                return result
            raise ContractError(f"scrub gave an object of type {type(result).__name__}, not a ScrubReport")

        return await self._call("scrub", lambda: self._tier.scrub(max_bytes_per_s=max_bytes_per_s), check)

    async def keys(self) -> AsyncIterator[ChunkKey]:
        def check(key: object) -> ChunkKey | None:
            if key is None or (isinstance(key, bytes) and len(key) == KEY_BYTES):
                return None if key is None else ChunkKey(key)
            raise ContractError(f"keys gave {key!r:.100}, not {KEY_BYTES} bytes")

        found: list[AsyncIterator[ChunkKey]] = []
        try:
            while True:
                key = await self._call("keys", lambda: self._next_key(found), check)
                if key is None:
                    return
                yield key
        finally:
            if found and isinstance(found[0], AsyncGenerator):
                await self._call("keys", found[0].aclose, lambda _: None)

    def statistics(self) -> TierStatistics:
        """Return the statistics of the tier; the last valid ones if it does not return any now."""
        try:
            found: object = self._tier.statistics()
        except BaseException as error:  # noqa: BLE001  # of a plug-in; metrics do not depend on it
            self._errors.convert("statistics", error)
        else:
            if isinstance(found, TierStatistics):
                self._statistics = found
            else:
                self._errors.report(
                    "statistics", f"statistics gave {type(found).__name__}, not TierStatistics"
                )
        return self._statistics

    async def _call(
        self,
        verb: str,
        run: Callable[[], object],
        check: Callable[[object], T],
        leases: CallLeases | None = None,
    ) -> T:
        """Await `run()` and check its result.

        Args:
            verb: Name of the method, for messages.
            run: Calls the method.
            check: Returns the result in the expected type; raises ContractError if it is invalid.
            leases: Leases of the call.
        """
        task = running_task()
        cancels = 0 if task is None else task.cancelling()
        result: object = None
        try:
            result = await run()  # type: ignore[misc]  # a tier may return any object; `await` raises TypeError then
            if task is not None and task.cancelling() > cancels:
                if leases is not None:
                    leases.release_foreign(result)
                raise asyncio.CancelledError  # noqa: TRY301  # handled below like one that the tier raises
            return check(result)
        except BaseException as error:
            result = None  # or the traceback would keep a view of a buffer alive
            if is_ending(error, task):
                raise
            if task is not None and task.cancelling() > cancels:
                raise asyncio.CancelledError from None
            failure = self._errors.convert(verb, error)
            raise failure from failure.__cause__
        finally:
            if leases is not None:
                leases.close()

    def _check_reads(self, results: object, count: int, leases: CallLeases) -> list[ReadResult]:
        """Check the result of `get_many` and transfer its buffers to the caller.

        An invalid element becomes the error of that chunk.
        """
        try:
            given = check_list(Verb.GET_MANY, results, count)
        except ContractError:
            leases.release_foreign(results)
            raise
        return [
            None
            if one is None
            else one.take_over()
            if isinstance(one, Buffer) and not one.released and leases.may_return(one)
            else self._check_read(one, leases)
            for one in given
        ]

    def _check_read(self, result: object, leases: CallLeases) -> ReadResult:
        if isinstance(result, TierError):
            return self._errors.convert_chunk(Verb.GET_MANY, result)
        try:
            return leases.transfer(Verb.GET_MANY, result)
        except ContractError as error:
            return self._errors.convert_chunk(Verb.GET_MANY, error)

    def _check_writes(
        self, results: object, items: Sequence[tuple[ChunkKey, Buffer]]
    ) -> list[TierError | None]:
        """Check the result of `put_many`: for each chunk None if it was stored, else the error."""
        errors = [
            None if one is None else self._errors.convert_chunk(Verb.PUT_MANY, one)
            for one in check_list(Verb.PUT_MANY, results, len(items))
        ]
        if self._watcher is not None:
            stored = [key for (key, _), error in zip(items, errors, strict=True) if error is None]
            if stored:
                self._watcher.kept(self._name, stored)
        return errors

    def _check_removal(self, call: Call, result: object) -> list[bool]:
        removed = check_flag(call.verb, result)
        self._publish_removed(call.keys)
        return [removed]

    async def _clear(self) -> list[int]:
        keys = [key async for key in self.keys()] if self._watcher is not None else ()
        removed = await self._call("clear", self._tier.clear, lambda result: check_count("clear", result))
        self._publish_removed(keys)
        return [removed]

    async def _next_key(self, found: list[AsyncIterator[ChunkKey]]) -> ChunkKey | None:
        if not found:
            found.append(aiter(self._tier.keys()))
        return await anext(found[0], None)

    def _publish_removed(self, keys: Sequence[ChunkKey]) -> None:
        if self._watcher is not None and keys:
            self._watcher.gone(self._name, keys)

    def _update_capabilities(self) -> None:
        """Read the capabilities again; the last valid ones are kept if the tier does not return any."""
        if (found := self._read_capabilities()) is not None:
            self._capabilities = found

    def _read_capabilities(self) -> Capabilities | None:
        try:
            found: object = self._tier.capabilities
        except BaseException as error:  # noqa: BLE001  # of a plug-in
            self._errors.convert("capabilities", error)
            return None
        if isinstance(found, Capabilities):
            return found
        self._errors.report("capabilities", f"capabilities gave {type(found).__name__}, not Capabilities")
        return None


def _prefix_flags(stored: int, count: int) -> list[bool]:
    return [True] * stored + [False] * (count - stored)
