"""A tier as the engine calls it: in batches, through its layers, with a deadline."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, cast

from lmcache_async.errors import TierError, TierUnavailableError
from lmcache_async.logging import LimitedLogger
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.memory.tasks import is_ending, running_task
from lmcache_async.tiers.adapter import TierAdapter, Watcher
from lmcache_async.tiers.base import Allocate, Capabilities, ScrubReport, Tier, TierStatistics
from lmcache_async.tiers.contract import ErrorConverter, check_flags, check_list
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
from lmcache_async.tiers.results import ReadResult, release_results
from lmcache_async.types import ChunkKey


class TierHandle:
    """Calls a tier in batches, through its layers. Opened with `async with`.

    Lookups, reads, writes and removals pass through the layers, in the order in which they are listed, to the
    `TierAdapter`. A call ends within `timeout_s`; see `DeadlineLayer` for what happens to a late call. Every call
    can be cancelled; it then holds no lease. A tier in the arena answers at once and has no deadline.

    Args:
        tier: The tier.
        name: Tier id, for messages.
        logger: Logger of the tier, one line per cause.
        timeout_s: Longest time of a call in seconds.
        layers: Layers, outermost first.
        open_timeout_s: Longest time of opening in seconds.
        close_timeout_s: Seconds that closing waits for abandoned calls, and then for the tier; at most
            `timeout_s`, which is also the default.
        watcher: Receives the tier's chunk events.

    Raises:
        ConfigError: `capabilities` of the tier is not an instance of Capabilities.
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
    ) -> None:
        self.name = name
        self._adapter = TierAdapter(tier, name=name, logger=logger, watcher=watcher)
        self._errors = ErrorConverter(name, logger)
        self._logger = logger
        self._timeout_s = timeout_s
        self._open_timeout_s = open_timeout_s
        self._close_timeout_s = timeout_s if close_timeout_s is None else min(timeout_s, close_timeout_s)
        if self._adapter.capabilities.in_arena:
            self._timeout_s = math.inf
            self._layers = tuple(layers)
        else:
            self._layers = _with_deadline(layers, LayerContext(name, "deadline", timeout_s, logger))
        self._deadlines = [layer for layer in self._layers if isinstance(layer, DeadlineLayer)]
        self._run = self._composed(self._layers)
        self._run_clear = self._composed(self._deadlines)

    @property
    def capabilities(self) -> Capabilities:
        return self._adapter.capabilities

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers, outermost first, with the deadline."""
        return self._layers

    @property
    def late_calls(self) -> int:
        """Number of abandoned calls that have not ended yet."""
        return sum(layer.late_calls for layer in self._deadlines)

    async def drain(self, *, timeout_s: float) -> bool:
        """Wait until the calls abandoned so far have ended.

        Args:
            timeout_s: Deadline in seconds.

        Returns:
            False if the deadline has passed.
        """
        return all(await asyncio.gather(*(layer.drain(timeout_s=timeout_s) for layer in self._deadlines)))

    def bind(self, arena: Arena) -> None:
        """Prepare the tier and its layers for an arena. Called once before the tier is opened."""
        self._adapter.bind(arena)
        for layer in self._layers:
            layer.bind(arena)

    async def __aenter__(self) -> Self:
        """Open the tier.

        Raises:
            TierUnavailableError: It was not open within `open_timeout_s`.
        """
        try:
            async with asyncio.timeout(self._open_timeout_s):
                await self._adapter.open()
        except TimeoutError as error:
            raise TierUnavailableError(
                f"tier {self.name!r}: was not open after {self._open_timeout_s} s;"
                " see whether its backend answers, or give the tier a larger open_timeout_s"
            ) from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the tier. A failure or a timeout is logged, and the tier is abandoned."""
        try:
            async with asyncio.timeout(2 * self._close_timeout_s):
                try:
                    await self.drain(timeout_s=self._close_timeout_s)
                finally:
                    await self._adapter.close()
        except TimeoutError:
            self._logger.report(
                f"{self.name}.close",
                "tier %r: was not closed after %s s; it is left as it is",
                self.name,
                2 * self._close_timeout_s,
            )

    def lookup(self, keys: Sequence[ChunkKey], *, exact: bool = False) -> Coroutine[Any, Any, list[bool]]:
        """Return for each key whether `get` would find the chunk now.

        Args:
            keys: Keys in prefix order.
            exact: Look up every key. Otherwise a tier without a `local_index` is only queried for the longest
                prefix, and the result is False for all chunks after the first missing one.

        Raises:
            TierError: The tier failed.
        """
        local = self.capabilities.local_index
        verb = Verb.CONTAINS_MANY if local or exact else Verb.COUNT_PREFIX
        call = Call(verb, keys, deadline=self._deadline(), local=local)
        return cast("Coroutine[Any, Any, list[bool]]", self._call(call, self._run))

    def get(self, keys: Sequence[ChunkKey], allocate: Allocate) -> Coroutine[Any, Any, list[ReadResult]]:
        """Read chunks.

        Args:
            keys: Keys of the chunks.
            allocate: Leases memory for a record; see `Allocate`.

        Returns:
            For each key a buffer leased to the caller, None on a miss, or the error of that chunk.

        Raises:
            TierError: The call failed as a whole.
            BudgetExceededError: `allocate` found no free memory in time.
        """
        call = Call(Verb.GET_MANY, keys, allocate=allocate, deadline=self._deadline())
        return cast("Coroutine[Any, Any, list[ReadResult]]", self._call(call, self._run))

    def put(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> Coroutine[Any, Any, list[TierError | None]]:
        """Store records. They are visible when the call returns.

        Args:
            items: Keys and records. The tier has leases of its own of the records until the call has ended.

        Returns:
            For each item None if it was stored, else the error. A failure of the tier is not raised.
        """
        call = Call(Verb.PUT_MANY, items=items, deadline=self._deadline())
        return cast("Coroutine[Any, Any, list[TierError | None]]", self._call(call, self._run))

    async def remove(self, key: ChunkKey) -> bool:
        """Delete the chunk. Return whether it was stored; False if the tier does not support removal.

        Raises:
            TierError: The tier failed.
        """
        (removed,) = await self._call(Call(Verb.REMOVE, (key,), deadline=self._deadline()), self._run)
        return bool(removed)

    async def reject(self, key: ChunkKey, cause: str) -> bool:
        """Make a record that failed verification unreadable. Return whether it was stored.

        Args:
            key: Key of the record.
            cause: Cause of the failure; see `ChunkCorruptError`.

        Raises:
            TierError: The tier failed.
        """
        call = Call(Verb.REJECT, (key,), cause=cause, deadline=self._deadline())
        (removed,) = await self._call(call, self._run)
        return bool(removed)

    async def clear(self) -> int:
        """Remove every chunk. Return the number of removed chunks. Only the deadline applies, no other layer.

        Raises:
            TierError: The tier failed.
        """
        (removed,) = await self._call(Call(Verb.CLEAR, deadline=self._deadline()), self._run_clear)
        return cast("int", removed)

    async def scrub(self, *, max_bytes_per_s: int | None = None) -> ScrubReport:
        """Read and verify every record, and reject corrupt ones. Has no deadline; no layer applies.

        Args:
            max_bytes_per_s: Maximum read rate in bytes per second; None for no limit.

        Raises:
            TierError: The tier failed.
        """
        return await self._adapter.scrub(max_bytes_per_s=max_bytes_per_s)

    def keys(self) -> AsyncIterator[ChunkKey]:
        """Iterate over all stored keys, in no order. Has no deadline; no layer applies.

        Raises:
            TierError: The tier failed.
        """
        return self._adapter.keys()

    def statistics(self) -> TierStatistics:
        return self._adapter.statistics()

    def layer_statistics(self) -> Mapping[str, LayerStatistics]:
        """Return the statistics of the layers by layer id."""
        found = {layer.context.layer: layer.statistics() for layer in self._layers}
        return {name: statistics for name, statistics in found.items() if statistics is not None}

    async def _call(self, call: Call, run: Next) -> Results:
        """Carry out a call with its layers, which may be third-party code like the tier."""
        count = 1 if call.verb is Verb.CLEAR else call.chunks
        results: Results = ()
        try:
            results = await run(call)
            if type(results) is not list or len(results) != count:
                results = cast("Results", check_list(call.verb, results, count))
        except BaseException as error:
            release_results(results)
            if _is_of_caller(error):
                raise
            failure = self._errors.convert(call.verb, error)
            if call.verb is Verb.PUT_MANY and isinstance(failure, TierError):
                return [failure] * count
            raise failure from failure.__cause__
        return results

    async def _call_checked(self, run: Next, call: Call) -> Results:
        """Carry out a call with a layer that may be third-party code, and check its results like those of a tier."""
        results: object = ()
        try:
            results = await run(call)
            return self._check(call, results)
        except BaseException as error:
            release_results(results)
            if _is_of_caller(error):
                raise
            failure = self._errors.convert(call.verb, error)
            raise failure from failure.__cause__

    def _check(self, call: Call, results: object) -> Results:
        """Check the results of a layer. An invalid element of a read or a write becomes the error of that chunk."""
        if call.verb not in (Verb.GET_MANY, Verb.PUT_MANY):
            return check_flags(call.verb, results, call.chunks)
        return [
            result
            if result is None
            or (call.verb is Verb.GET_MANY and isinstance(result, Buffer) and not result.released)
            else self._errors.convert_chunk(call.verb, result)
            for result in check_list(call.verb, results, call.chunks)
        ]

    def _composed(self, layers: Sequence[Layer]) -> Next:
        """Return the call of the tier through layers. A call has one frame for each bundled layer."""
        run: Next = self._adapter
        for layer in reversed(layers):
            run = partial(layer.around, next=run)
            if not layer.bounded:
                run = partial(self._call_checked, run)
        return run

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._timeout_s


def _with_deadline(layers: Sequence[Layer], context: LayerContext) -> tuple[Layer, ...]:
    """Return the layers with a deadline.

    If no `deadline` is listed, or only inside of a layer that may wait for any time, one is added: outside of the
    first layer that may wait, or innermost.
    """
    position = next(
        (i for i, layer in enumerate(layers) if isinstance(layer, DeadlineLayer) or not layer.bounded),
        len(layers),
    )
    if position < len(layers) and isinstance(layers[position], DeadlineLayer):
        return tuple(layers)
    return (*layers[:position], DeadlineLayer(None, context), *layers[position:])


def _is_of_caller(error: BaseException) -> bool:
    """Whether `error` cancels or closes the caller's coroutine. Layers may raise anything."""
    return isinstance(error, GeneratorExit) or is_ending(error, running_task())
