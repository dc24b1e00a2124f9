"""Base classes of layers: a layer is a tier around a tier that forwards every call and changes some."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict

from lmcache_async.errors import ConfigError, TierError
from lmcache_async.logging import LimitedLogger
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.metrics.metrics import EngineMetrics, TierMetrics
from lmcache_async.tiers.base import Allocate, Capabilities, ScrubReport, Tier, TierStatistics
from lmcache_async.types import ChunkKey

T = TypeVar("T")


class LayerConfig(BaseModel):
    """Options of a layer, checked at start-up; a layer's own config derives from it."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True, slots=True)
class LayerStatistics:
    """Base class of the statistics of a layer. A layer with statistics derives its own."""


class Shared:
    """Objects shared by layers of one engine, by name."""

    def __init__(self) -> None:
        self._things: dict[str, tuple[str, LayerConfig, Any]] = {}

    def join(self, name: str, options: LayerConfig, where: str, make: Callable[[], T]) -> T:
        """Return the object of that name; the first call creates it.

        Args:
            name: Name of the object.
            options: Options of the calling layer.
            where: Position of the layer in the configuration, for messages.
            make: Creates the object.

        Raises:
            ConfigError: The first caller had other options.
        """
        first, its_options, thing = self._things.setdefault(name, (where, options, None))
        if options != its_options:
            raise ConfigError(
                f"{where}: share {name!r} has other options than in {first}: give both the same, or other names"
            )
        if thing is None:
            thing = make()
            self._things[name] = (first, its_options, thing)
        return thing  # type: ignore[no-any-return]  # layers with equal options share objects of one type


@dataclass(frozen=True, slots=True)
class LayerContext:
    """Context of a layer.

    Attributes:
        tier: Tier id, for messages.
        layer: Id of the layer.
        timeout_s: Deadline of a call in seconds; `GuardLayer` abandons the call then.
        logger: Rate-limited logger, for the few messages that need attention.
        shared: Objects shared by layers of the engine.
        where: Position of the layer in the configuration, for messages.
        metrics: Metrics of the tier.
    """

    tier: str
    layer: str
    timeout_s: float
    logger: LimitedLogger
    shared: Shared = field(default_factory=Shared)
    where: str = ""
    metrics: TierMetrics = field(default_factory=lambda: EngineMetrics().tier(""))


class TierLayer(Tier):
    """Forwards every call to the tier inside.

    Args:
        inner: The tier inside.

    Attributes:
        inner: The tier inside.
    """

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner.config)
        self.inner = inner

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def bind(self, arena: Arena) -> None:
        self.inner.bind(arena)

    async def contains(self, key: ChunkKey) -> bool:
        return await self.inner.contains(key)

    async def get(self, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        return await self.inner.get(key, allocate)

    async def put(self, key: ChunkKey, buffer: Buffer) -> None:
        await self.inner.put(key, buffer)

    async def count_prefix(self, keys: Sequence[ChunkKey]) -> int:
        return await self.inner.count_prefix(keys)

    async def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return await self.inner.contains_many(keys)

    async def get_many(self, keys: Sequence[ChunkKey], allocate: Allocate) -> list[Buffer | TierError | None]:
        return await self.inner.get_many(keys, allocate)

    async def put_many(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[TierError | None]:
        return await self.inner.put_many(items)

    async def remove(self, key: ChunkKey) -> bool:
        return await self.inner.remove(key)

    async def reject(self, key: ChunkKey, cause: str) -> bool:
        return await self.inner.reject(key, cause)

    async def scrub(self, *, max_bytes_per_s: int | None = None) -> ScrubReport:
        return await self.inner.scrub(max_bytes_per_s=max_bytes_per_s)

    async def keys(self) -> AsyncIterator[ChunkKey]:
        async for key in self.inner.keys():
            yield key

    async def clear(self) -> int:
        return await self.inner.clear()

    def statistics(self) -> TierStatistics:
        return self.inner.statistics()

    @property
    def late_calls(self) -> int:
        """Number of abandoned calls that have not ended yet."""
        return self.inner.late_calls if isinstance(self.inner, TierLayer) else 0

    async def drain(self, *, timeout_s: float) -> bool:
        """Wait until the calls abandoned so far have ended.

        Args:
            timeout_s: Deadline in seconds.

        Returns:
            False if the deadline has passed.
        """
        return await self.inner.drain(timeout_s=timeout_s) if isinstance(self.inner, TierLayer) else True

    async def __aenter__(self) -> Self:
        await self.inner.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.inner.__aexit__(kind, error, trace)


class ConfiguredLayer(TierLayer):
    """A layer that can be configured by name. The target of its entry point is a subclass.

    Args:
        inner: The tier inside.
        options: Options from the configuration, an instance of `options_type`.
        context: Context of the layer.

    Attributes:
        options_type: Class of the options.
        fits_arena: Whether the layer may wrap a tier in the arena, which answers at once and whose buffers
            have concurrent readers.
        options: Options from the configuration.
        context: Context of the layer.
    """

    options_type: ClassVar[type[LayerConfig]] = LayerConfig
    fits_arena: ClassVar[bool] = False

    def __init__(self, inner: Tier, options: Any, context: LayerContext) -> None:
        super().__init__(inner)
        self.options = options
        self.context = context

    def layer_statistics(self) -> LayerStatistics | None:
        """Return a snapshot of the statistics; None if the layer has none."""
        return None
