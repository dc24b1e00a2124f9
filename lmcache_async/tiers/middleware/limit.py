"""Limits of concurrent calls and bytes of a tier, or of several tiers that share a disk or a network card."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, model_validator

from lmcache_async.config.validation import disagree
from lmcache_async.config.values import NameText, OptionalCount, OptionalSize, parse_name
from lmcache_async.errors import BudgetExceededError, ConfigError, TierError, TierUnavailableError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.budget import BudgetStatistics, ByteBudget
from lmcache_async.tiers.middleware.base import (
    Call,
    Kind,
    Layer,
    LayerConfig,
    LayerContext,
    LayerStatistics,
    Next,
    Result,
    Results,
    Verb,
)
from lmcache_async.tiers.results import no_memory, release_results


def _parse_share(value: object) -> str:
    return "" if value in ("", None) else parse_name(value)


class LimitConfig(LayerConfig):
    """Options of the limit layer. At least one limit is required.

    Attributes:
        max_calls: Maximum number of concurrent calls; a batch is one call.
        max_bytes: Maximum bytes in progress; a read counts with the largest possible record, and lookups and removals do
            not count.
        share: Layers of one engine with the same `share` share the limits.
    """

    max_calls: OptionalCount = None
    max_bytes: OptionalSize = None
    share: Annotated[str, BeforeValidator(_parse_share, json_schema_input_type=NameText | Literal[""])] = ""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.max_calls is None and self.max_bytes is None:
            raise disagree(
                "neither max_calls nor max_bytes is given; give one of them", "max_calls", "max_bytes"
            )
        return self


@dataclass(frozen=True, slots=True)
class LimitStatistics(LayerStatistics):
    """Current use of a limit, by all layers that share it.

    Attributes:
        calls: Use of `max_calls`, where the byte fields count calls; None without this limit.
        bytes: Use of `max_bytes`; None without this limit.
    """

    calls: BudgetStatistics | None
    bytes: BudgetStatistics | None


class LimitLayer(Layer):
    """Limits concurrent calls and their bytes. Calls are admitted in FIFO order.

    A batch larger than `max_bytes` is split into parts, each as large as fits. A call or a part that finds no
    room before the call's deadline fails with TierUnavailableError. Lookups that the tier answers from
    memory of this process do not wait. A cancelled call releases its room at once.
    """

    options_type = LimitConfig
    options: LimitConfig
    bounded = True

    def __init__(self, options: LimitConfig, context: LayerContext) -> None:
        super().__init__(options, context)
        self._record_bytes = 0
        limits = {"max_calls": options.max_calls, "max_bytes": options.max_bytes}
        self._budgets = {option: ByteBudget(limit) for option, limit in limits.items() if limit is not None}
        if options.share:
            first, its_options, self._budgets = context.shared.setdefault(
                options.share, (context.where, options, self._budgets)
            )
            if its_options != options:
                raise ConfigError(
                    f"{context.where}: share {options.share!r} has other options than in {first}: set the same"
                    " options in both, or use two names"
                )

    def bind(self, arena: Arena) -> None:
        self._record_bytes = arena.slab_bytes

    def statistics(self) -> LimitStatistics:
        found = {option: budget.statistics() for option, budget in self._budgets.items()}
        return LimitStatistics(calls=found.get("max_calls"), bytes=found.get("max_bytes"))

    async def around(self, call: Call, next: Next) -> Results:
        if call.local:
            return await next(call)
        if call.verb is Verb.PUT_MANY:
            sizes = [buffer.nbytes for _, buffer in call.items]
        else:
            sizes = [self._record_bytes if call.kind is Kind.READ else 0] * call.chunks
        parts = split(sizes, self.options.max_bytes)
        if len(parts) <= 1:
            async with self._reserved(sum(sizes), call.deadline):
                return await next(call)
        results: list[Result] = []
        try:
            for start, stop in parts:
                try:
                    async with self._reserved(sum(sizes[start:stop]), call.deadline):
                        answers = await next(call.part(range(start, stop)))
                    results += answers
                except TierError as error:
                    results += [error] * (stop - start)
                except BudgetExceededError as error:
                    if not results:
                        raise
                    # The chunks that got memory are usable.
                    results += [no_memory(error)] * (call.chunks - start)
                    break
        except BaseException:
            release_results(results)
            raise
        return results

    @asynccontextmanager
    async def _reserved(self, nbytes: int, deadline: float) -> AsyncIterator[None]:
        """Reserve one call and `nbytes` for the block. A request above a whole budget takes all of it."""
        amounts = {"max_calls": 1, "max_bytes": nbytes}
        with ExitStack() as held:
            for option, budget in self._budgets.items():
                taken = min(amounts[option], budget.max_bytes)
                if not taken:
                    continue  # lookups and removals have no bytes
                left_s = max(0.0, deadline - asyncio.get_running_loop().time())
                try:
                    await budget.reserve(taken, timeout_s=left_s)
                except BudgetExceededError as error:
                    bound = f"{option} of {budget.max_bytes}"
                    raise TierUnavailableError(
                        f"tier {self.context.tier!r}: no room under {bound} within {left_s:.3g} s"
                    ) from error
                held.callback(budget.release, taken)
            yield


def split(sizes: Sequence[int], max_bytes: int | None) -> list[tuple[int, int]]:
    """Group neighbouring chunks into parts of at most `max_bytes`; a larger chunk is a part of its own.

    Returns:
        (start, stop) of each part, in order.
    """
    parts: list[tuple[int, int]] = []
    start = total = 0
    for position, size in enumerate(sizes):
        if max_bytes is not None and position > start and total + size > max_bytes:
            parts.append((start, position))
            start, total = position, 0
        total += size
    if len(sizes) > start:
        parts.append((start, len(sizes)))
    return parts
