"""Limits of concurrent calls and bytes of a tier, or of several tiers that share a disk or a network card."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Literal, Self, TypeVar

from pydantic import BeforeValidator, model_validator

from lmcache_async.config.validation import disagree
from lmcache_async.config.values import NameText, OptionalSize, parse_count, parse_name, unless_none
from lmcache_async.errors import BudgetExceededError, TierError, TierUnavailableError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.budget import BudgetStatistics, ByteBudget
from lmcache_async.memory.buffer import Buffer
from lmcache_async.tiers.answers import check_answers, release_answers
from lmcache_async.tiers.base import Allocate, Tier
from lmcache_async.tiers.layers.around import AroundLayer, Call, Kind
from lmcache_async.tiers.layers.base import LayerConfig, LayerContext, LayerStatistics
from lmcache_async.types import ChunkKey

T = TypeVar("T")


def _parse_optional_count(value: object) -> int | None:
    value = unless_none(value)
    return None if value is None else parse_count(value)


def _parse_share(value: object) -> str:
    return "" if value in ("", None) else parse_name(value)


class LimitConfig(LayerConfig):
    """Options of the limit layer; at least one bound.

    Attributes:
        max_calls: Calls under way at one time, a batch being one.
        max_bytes: Bytes of chunks under way at one time; a read counts with the largest record there is.
        share: Layers of one engine with the same `share` have these bounds together.
    """

    max_calls: Annotated[int | None, BeforeValidator(_parse_optional_count)] = None
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
        calls: Calls, if they are limited; its byte fields count calls.
        bytes: Bytes, if they are limited.
    """

    calls: BudgetStatistics | None
    bytes: BudgetStatistics | None


class _Places:
    """Budgets of calls and bytes, granted in order of arrival."""

    def __init__(self, options: LimitConfig) -> None:
        self.calls = None if options.max_calls is None else ByteBudget(options.max_calls)
        self.bytes = None if options.max_bytes is None else ByteBudget(options.max_bytes)

    @asynccontextmanager
    async def held(self, nbytes: int, deadline: float, tier: str) -> AsyncIterator[None]:
        """Hold the budget of a call in the block. A request above a whole budget takes all of it."""
        calls = _part(self.calls, 1, "max_calls", deadline, tier)
        async with calls, _part(self.bytes, nbytes, "max_bytes", deadline, tier):
            yield


@asynccontextmanager
async def _part(
    budget: ByteBudget | None, amount: int, option: str, deadline: float, tier: str
) -> AsyncIterator[None]:
    if budget is None:
        yield
        return
    amount = min(amount, budget.max_bytes)
    left_s = max(0.0, deadline - asyncio.get_running_loop().time())
    try:
        await budget.reserve(amount, timeout_s=left_s)
    except BudgetExceededError as error:
        bound = f"{option} of {budget.max_bytes}"
        raise TierUnavailableError(f"tier {tier!r}: no room under {bound} within {left_s:.3g} s") from error
    try:
        yield
    finally:
        budget.release(amount)


class LimitLayer(AroundLayer):
    """Lets calls wait, in the order they came, until there is room for them.

    A batch larger than `max_bytes` is split into parts, each as large as fits. A call or a part that finds no
    room within the tier's `timeout_s` fails with TierUnavailableError. Lookups that the tier answers from
    memory of this process do not wait. A cancelled call releases its room at once.
    """

    options_type = LimitConfig

    def __init__(self, inner: Tier, options: LimitConfig, context: LayerContext) -> None:
        super().__init__(inner, options, context)
        self._max_bytes = options.max_bytes
        self._record_bytes = 0

        def make() -> _Places:
            return _Places(options)

        self._places = (
            context.shared.join(options.share, options, context.where, make) if options.share else make()
        )

    def bind(self, arena: Arena) -> None:
        self._record_bytes = arena.slab_bytes
        super().bind(arena)

    def layer_statistics(self) -> LimitStatistics:
        calls, nbytes = self._places.calls, self._places.bytes
        return LimitStatistics(
            calls=None if calls is None else calls.statistics(),
            bytes=None if nbytes is None else nbytes.statistics(),
        )

    async def around(self, call: Call, run: Callable[[], Awaitable[T]]) -> T:
        if call.kind is Kind.LOOKUP and self.inner.capabilities.local_index:
            return await run()
        nbytes = self._record_bytes if call.kind is Kind.READ else call.nbytes
        async with self._places.held(nbytes, self._deadline(), self.context.tier):
            return await run()

    async def get_many(self, keys: Sequence[ChunkKey], allocate: Allocate) -> list[Buffer | TierError | None]:
        async def ask(start: int, stop: int) -> list[Buffer | TierError | None]:
            return await self.inner.get_many(keys[start:stop], allocate)

        return await self._parts("get_many", [self._record_bytes] * len(keys), ask)

    async def put_many(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[TierError | None]:
        async def ask(start: int, stop: int) -> list[TierError | None]:
            return await self.inner.put_many(items[start:stop])

        return await self._parts("put_many", [buffer.nbytes for _, buffer in items], ask)

    async def _parts(
        self,
        verb: str,
        sizes: Sequence[int],
        ask: Callable[[int, int], Awaitable[list[T | TierError | None]]],
    ) -> list[T | TierError | None]:
        deadline = self._deadline()
        results: list[T | TierError | None] = []
        try:
            for start, stop in split(sizes, self._max_bytes):
                try:
                    async with self._places.held(sum(sizes[start:stop]), deadline, self.context.tier):
                        answers = await ask(start, stop)
                    check_answers(verb, answers, stop - start)
                    results += answers
                except TierError as error:
                    if stop - start == len(sizes):
                        raise
                    results += [error] * (stop - start)
        except BaseException:
            release_answers(results)
            raise
        return results

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self.context.timeout_s


def split(sizes: Sequence[int], max_bytes: int | None) -> list[tuple[int, int]]:
    """Group neighbouring chunks into parts of at most `max_bytes`; a larger chunk is a part of its own.

    Args:
        sizes: Bytes of each chunk.
        max_bytes: Maximum bytes of a part; None for no limit.

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
