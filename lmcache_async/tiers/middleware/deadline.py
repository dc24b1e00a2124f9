"""Deadline of the calls of a tier. A late call is cancelled and abandoned; its end is not awaited."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from lmcache_async.config.values import OptionalSeconds, Seconds
from lmcache_async.errors import TierUnavailableError
from lmcache_async.tiers.middleware.base import Call, Kind, Layer, LayerConfig, LayerContext, Next, Results
from lmcache_async.tiers.results import ContractError, release_results


class DeadlineConfig(LayerConfig):
    """Options of the deadline layer. The tier's `timeout_s` applies as well.

    Attributes:
        lookup_s: Longest time of a lookup in seconds. A lookup that the tier answers from memory of this process
            is not limited.
        read_s: Longest time of a read in seconds; none for only `timeout_s`.
        write_s: Longest time of a write or a removal in seconds; none for only `timeout_s`.
    """

    lookup_s: Seconds = 1.0
    read_s: OptionalSeconds = None
    write_s: OptionalSeconds = None


class DeadlineLayer(Layer):
    """Ends every call within its deadline, with TierUnavailableError if it is late.

    The layers inside and the tier run in a task of their own. A call that is late, or whose caller was
    cancelled, is cancelled and abandoned: its caller continues at once. The memory of the call stays leased
    until the call has *really* ended. Buffers that it returns afterwards are released.

    Every tier outside the arena has this layer. If the configuration does not list it, `TierHandle` adds one with
    `timeout_s` as the only limit.

    Args:
        options: Options of the layer; None for `timeout_s` as the only limit.
        context: Context of the layer.
    """

    options_type = DeadlineConfig
    options: DeadlineConfig | None
    bounded = True

    def __init__(self, options: DeadlineConfig | None, context: LayerContext) -> None:
        super().__init__(options, context)
        self._limits_s: dict[Kind, float | None] = {}
        if options is not None:
            self._limits_s[Kind.LOOKUP] = options.lookup_s
            self._limits_s[Kind.READ] = options.read_s
            self._limits_s[Kind.WRITE] = options.write_s
        self._late: set[asyncio.Future[Results]] = set()

    @property
    def late_calls(self) -> int:
        """Number of abandoned calls that have not ended yet."""
        return len(self._late)

    async def drain(self, *, timeout_s: float) -> bool:
        """Wait until the calls abandoned so far have ended. Return False if they have not within `timeout_s`."""
        if not self._late:
            return True
        _, running = await asyncio.wait(set(self._late), timeout=timeout_s)
        return not running

    async def around(self, call: Call, next: Next) -> Results:
        now = asyncio.get_running_loop().time()
        stated_s = min(self.context.timeout_s, round(call.deadline - call.start, 3))
        own_s = None if call.local else self._limits_s.get(call.kind)
        if own_s is not None and now + own_s <= call.deadline:
            call, stated_s = replace(call, deadline=now + own_s), own_s  # the layers inside obey it too
        limit_s = call.deadline - now
        if limit_s <= 0:
            raise self._late_error(call, "was not called: no time was left")
        task = asyncio.ensure_future(next(call))
        try:
            done, _ = await asyncio.wait({task}, timeout=limit_s)
        except asyncio.CancelledError:
            self._abandon(task)
            raise
        if not done:
            self._abandon(task)
            raise self._late_error(call, f"did not answer in {stated_s} s")
        if task.cancelled():
            raise ContractError(f"{call.verb} cancelled its own task")
        return task.result()

    def _late_error(self, call: Call, what: str) -> TierUnavailableError:
        return TierUnavailableError(f"tier {self.context.tier!r}: {call.verb} {what}")

    def _abandon(self, task: asyncio.Future[Results]) -> None:
        self._late.add(task)
        task.add_done_callback(self._ended)
        task.cancel()

    def _ended(self, task: asyncio.Future[Results]) -> None:
        self._late.discard(task)
        if not task.cancelled() and task.exception() is None:
            release_results(task.result())
