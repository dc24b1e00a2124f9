"""The innermost layer of a tier, which enforces the tier contract."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from types import TracebackType
from typing import Self, TypeVar

from lmcache_async.errors import ConfigError, LMCacheAsyncError, TierError
from lmcache_async.logging import LimitedLogger, describe
from lmcache_async.memory.buffer import Buffer
from lmcache_async.memory.tasks import is_ending, running_task
from lmcache_async.tiers.base import Allocate, Capabilities, ScrubReport, Tier, TierStatistics
from lmcache_async.tiers.border import (
    Border,
    CallLeases,
    ContractError,
    flag,
    flags,
    number,
)
from lmcache_async.tiers.layers.base import TierLayer
from lmcache_async.types import KEY_BYTES, ChunkKey

T = TypeVar("T")


class BorderLayer(TierLayer):
    """Checks errors and results of a tier and owns the memory of its calls; see `tiers.border`.

    It directly wraps a tier outside the arena, inside the configured layers, so these only see valid results
    and TierErrors. `GuardLayer` wraps those layers.

    It creates no task and sets no deadline.

    Args:
        inner: The tier.
        name: Tier id, for messages.
        logger: Logger for contract violations, one line per cause.

    Raises:
        ConfigError: `capabilities` of the tier is not an instance of Capabilities.
    """

    def __init__(self, inner: Tier, *, name: str, logger: LimitedLogger) -> None:
        super().__init__(inner)
        self._border = Border(name, logger)
        self._name = name
        found = self._ask_capabilities()
        if found is None:
            raise ConfigError(f"tier {name!r}: its `capabilities` must be an instance of Capabilities")
        self._capabilities = found
        self._statistics = TierStatistics()

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the tier; the last valid ones if it does not return any now."""
        if (found := self._ask_capabilities()) is not None:
            self._capabilities = found
        return self._capabilities

    async def contains(self, key: ChunkKey) -> bool:
        return await self._border.call(
            "contains", lambda: self.inner.contains(key), lambda answer: flag("contains", answer)
        )

    async def count_prefix(self, keys: Sequence[ChunkKey]) -> int:
        return await self._border.call(
            "count_prefix",
            lambda: self.inner.count_prefix(list(keys)),
            lambda answer: number("count_prefix", answer, len(keys)),
        )

    async def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return await self._border.call(
            "contains_many",
            lambda: self.inner.contains_many(list(keys)),
            lambda answers: flags("contains_many", answers, len(keys)),
        )

    async def get(self, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        leases = self._leases(allocate, 1)
        try:
            return await self._border.call(
                "get",
                lambda: self.inner.get(key, leases.allocate),
                lambda answer: leases.answer("get", answer),
            )
        finally:
            leases.close()

    async def get_many(self, keys: Sequence[ChunkKey], allocate: Allocate) -> list[Buffer | TierError | None]:
        leases = self._leases(allocate, len(keys))
        try:
            return await self._border.call(
                "get_many",
                lambda: self.inner.get_many(list(keys), leases.allocate),
                lambda answers: leases.answers("get_many", answers, len(keys)),
            )
        finally:
            leases.close()

    async def put(self, key: ChunkKey, buffer: Buffer) -> None:
        leases = CallLeases(self._border)
        try:
            # A result other than None is not an error: tiers return the result of their client.
            await self._border.call("put", lambda: self.inner.put(key, leases.lend(buffer)), lambda _: None)
        finally:
            leases.close()

    async def put_many(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[TierError | None]:
        leases = CallLeases(self._border)
        try:
            return await self._border.call(
                "put_many",
                lambda: self.inner.put_many([(key, leases.lend(buffer)) for key, buffer in items]),
                lambda answers: self._border.outcomes("put_many", answers, len(items)),
            )
        finally:
            leases.close()

    async def remove(self, key: ChunkKey) -> bool:
        return await self._border.call(
            "remove", lambda: self.inner.remove(key), lambda answer: flag("remove", answer)
        )

    async def reject(self, key: ChunkKey, cause: str) -> bool:
        return await self._border.call(
            "reject", lambda: self.inner.reject(key, cause), lambda answer: flag("reject", answer)
        )

    async def scrub(self, *, max_bytes_per_s: int | None = None) -> ScrubReport:
        def check(answer: object) -> ScrubReport:
            if isinstance(answer, ScrubReport):
                return answer
            raise ContractError(f"scrub gave an object of type {type(answer).__name__}, not a ScrubReport")

        return await self._border.call(
            "scrub", lambda: self.inner.scrub(max_bytes_per_s=max_bytes_per_s), check
        )

    async def keys(self) -> AsyncIterator[ChunkKey]:
        def check(key: object) -> ChunkKey | None:
            if key is None or (isinstance(key, bytes) and len(key) == KEY_BYTES):
                return None if key is None else ChunkKey(key)
            raise ContractError(f"keys gave {key!r:.100}, not {KEY_BYTES} bytes")

        found: list[AsyncIterator[ChunkKey]] = []
        try:
            while True:
                key = await self._border.call("keys", lambda: self._next_key(found), check)
                if key is None:
                    return
                yield key
        finally:
            if found and isinstance(found[0], AsyncGenerator):
                await self._border.call("keys", found[0].aclose, lambda _: None)

    async def _next_key(self, found: list[AsyncIterator[ChunkKey]]) -> ChunkKey | None:
        if not found:
            found.append(aiter(self.inner.keys()))
        return await anext(found[0], None)

    async def clear(self) -> int:
        return await self._border.call(
            "clear", lambda: self.inner.clear(), lambda answer: number("clear", answer)
        )

    def statistics(self) -> TierStatistics:
        """Return the statistics of the tier; the last valid ones if it does not return any now."""
        try:
            found: object = self.inner.statistics()
        except BaseException as error:  # noqa: BLE001  # of a plug-in; metrics do not depend on it
            self._border.failure("statistics", error)
        else:
            if isinstance(found, TierStatistics):
                self._statistics = found
            else:
                self._border.report(
                    "statistics", f"statistics gave {type(found).__name__}, not TierStatistics"
                )
        return self._statistics

    async def __aenter__(self) -> Self:
        """Open the tier. Errors derived from Exception are passed on, so that the engine does not open.

        Raises:
            TierError: Opening raised another exception, or a cancellation that no caller requested.
        """
        task = running_task()
        try:
            await self.inner.__aenter__()
        except Exception:
            raise
        except BaseException as error:
            if is_ending(error, task):
                raise
            failure = self._border.failure("opening", error)
            raise failure from failure.__cause__
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the tier. A failure is logged and does not prevent the rest from closing."""
        try:
            await self._border.call(
                "closing", lambda: self.inner.__aexit__(kind, error, trace), lambda _: None
            )
        except LMCacheAsyncError as failure:
            self._border.report("closing", f"closing failed: {describe(failure)}")

    def _leases(self, allocate: Allocate, keys: int) -> CallLeases:
        capabilities = self.capabilities
        foreign = capabilities.in_arena or capabilities.own_memory
        return CallLeases(self._border, allocate, keys, foreign=foreign)

    def _ask_capabilities(self) -> Capabilities | None:
        try:
            found: object = self.inner.capabilities
        except BaseException as error:  # noqa: BLE001  # of a plug-in
            self._border.failure("capabilities", error)
            return None
        if isinstance(found, Capabilities):
            return found
        self._border.report("capabilities", f"capabilities gave {type(found).__name__}, not Capabilities")
        return None
