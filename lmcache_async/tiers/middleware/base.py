"""Base class of layers: a layer is called around every call of a tier."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, ClassVar, TypeAlias

from pydantic import BaseModel, ConfigDict

from lmcache_async.errors import TierError
from lmcache_async.logging import LimitedLogger
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.metrics.metrics import EngineMetrics, TierMetrics
from lmcache_async.tiers.base import Allocate
from lmcache_async.types import ChunkKey


class Kind(StrEnum):
    """Kind of a call."""

    LOOKUP = "lookup"
    READ = "read"
    WRITE = "write"


class Verb(StrEnum):
    """The method of the tier that a call is for."""

    CONTAINS_MANY = "contains_many"
    COUNT_PREFIX = "count_prefix"
    GET_MANY = "get_many"
    PUT_MANY = "put_many"
    REMOVE = "remove"
    REJECT = "reject"
    CLEAR = "clear"


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of a tier.

    Attributes:
        verb: The method.
        keys: Keys of the chunks; empty for `put_many` and `clear`.
        items: Keys and records of `put_many`. The records are leased by the caller until the call has ended.
        allocate: Leases memory for the records of `get_many`.
        cause: Argument of `reject`.
        deadline: Time of the event loop by which the call must end: `timeout_s` after its start, or earlier if the request
            that it belongs to ends earlier or a `deadline` layer outside has a lower limit; infinity for no limit.
        local: The tier answers from memory of this process, so the call need not be limited or repeated.
        start: Time of the event loop at which the call was made; minus infinity if it is not known.
    """

    verb: Verb
    keys: Sequence[ChunkKey] = ()
    items: Sequence[tuple[ChunkKey, Buffer]] = ()
    allocate: Allocate | None = None
    cause: str = ""
    deadline: float = math.inf
    local: bool = False
    start: float = -math.inf

    @property
    def kind(self) -> Kind:
        if self.verb is Verb.GET_MANY:
            return Kind.READ
        return Kind.LOOKUP if self.verb in (Verb.CONTAINS_MANY, Verb.COUNT_PREFIX) else Kind.WRITE

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return len(self.items) or len(self.keys)

    @property
    def nbytes(self) -> int:
        """Total bytes of the records to write."""
        return sum([buffer.nbytes for _, buffer in self.items])

    @property
    def given(self) -> list[Buffer]:
        """Records of `put_many`. Name of this attribute in version 0.1, for layers derived from `AroundLayer`."""
        return [buffer for _, buffer in self.items]

    def part(self, positions: Sequence[int]) -> Call:
        """Return a call for some of the chunks of a `get_many` or a `put_many`."""
        return replace(
            self,
            keys=[self.keys[position] for position in positions] if self.keys else (),
            items=[self.items[position] for position in positions] if self.items else (),
        )


Result: TypeAlias = bool | int | Buffer | TierError | None
"""Result for one chunk: a bool of a lookup or a removal; of `get_many` a buffer leased to the caller, None for a
miss, or the error of the chunk; of `put_many` None if it was stored, else the error; of `clear` the number of
removed chunks."""

Results: TypeAlias = Sequence[Result]
"""Results of a call: a list with one element for each chunk, and one for `clear`."""

Next: TypeAlias = Callable[[Call], Awaitable[Results]]
"""`await next(call)` carries out a call with the layers inside and the tier."""


class LayerConfig(BaseModel):
    """Options of a layer, checked at start-up; a layer's own config derives from it."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True, slots=True)
class LayerStatistics:
    """Base class of the statistics of a layer. A layer with statistics derives its own."""


@dataclass(frozen=True, slots=True)
class LayerContext:
    """Context of a layer.

    Attributes:
        tier: Tier id, for messages.
        layer: Id of the layer.
        timeout_s: Longest time of a call of the tier in seconds.
        logger: Rate-limited logger, for the few messages that need attention.
        shared: Objects shared by layers of the engine, by name.
        where: Position of the layer in the configuration, for messages.
        metrics: Metrics of the tier.
    """

    tier: str
    layer: str
    timeout_s: float
    logger: LimitedLogger
    shared: dict[str, Any] = field(default_factory=dict)
    where: str = ""
    metrics: TierMetrics = field(default_factory=lambda: EngineMetrics().tier(""))


class Layer(ABC):
    """Changes or observes the calls of one tier. The target of an entry point is a subclass.

    Args:
        options: Options from the configuration, an instance of `options_type`.
        context: Context of the layer.

    Attributes:
        options_type: Class of the options.
        fits_arena: Whether the layer may be used for a tier in the arena, which answers at once and whose buffers
            have concurrent readers.
        transparent: Whether a bundled layer only passes on the results and errors of `next`, unchanged.
        bounded: Whether `around` itself never waits beyond `call.deadline`. The deadline of the tier is enforced
            outside of the first layer that is not bounded.
        options: Options from the configuration.
        context: Context of the layer.
    """

    options_type: ClassVar[type[LayerConfig]] = LayerConfig
    fits_arena: ClassVar[bool] = False
    transparent: ClassVar[bool] = False
    bounded: ClassVar[bool] = False

    def __init__(self, options: Any, context: LayerContext) -> None:
        self.options = options
        self.context = context

    @abstractmethod
    async def around(self, call: Call, next: Next) -> Results:
        """Carry out a call: await `next(call)` any number of times and return its results or raise an error.

        If it is cancelled, it must end at once. Buffers of results that are not returned must be released.

        Args:
            call: The call. `clear`, `keys` and `scrub` do not pass through layers.
            next: Carries out a call with the layers inside and the tier.

        Raises:
            TierError: The call failed as a whole.
            BudgetExceededError: There was no memory for the result of a read.
        """

    def bind(self, arena: Arena) -> None:
        """Prepare the layer for an arena. Called once before the tier is opened."""

    def statistics(self) -> LayerStatistics | None:
        """Return a snapshot of the statistics; None if the layer has none."""
        return None
