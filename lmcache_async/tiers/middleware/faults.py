"""Layer that injects faults: errors, delays, hangs, lost writes, wrong results, damaged records."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from lmcache_async.config.values import Probability, Seed, Wait, parse_names, unless_none
from lmcache_async.errors import TierError, TierUnavailableError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.tiers.middleware.base import (
    Call,
    Layer,
    LayerConfig,
    LayerContext,
    LayerStatistics,
    Next,
    Result,
    Results,
    Verb,
)
from lmcache_async.types import ChunkKey

Damage = Literal["flip", "truncate", "other"]
DAMAGES: tuple[Damage, ...] = ("flip", "truncate", "other")
_REMEMBERED_KEYS = 256


OwnProbability = Annotated[Probability | None, BeforeValidator(unless_none)]


class VerbFaults(LayerConfig):
    """Probabilities for one verb. None means the probability for all verbs."""

    error: OwnProbability = None
    delay: OwnProbability = None
    hang: OwnProbability = None


class ContainsFaults(VerbFaults):
    lie: OwnProbability = None


class GetFaults(VerbFaults):
    corrupt: OwnProbability = None


class PutFaults(VerbFaults):
    drop: OwnProbability = None


class FaultsConfig(LayerConfig):
    """Options of the faults layer.

    Attributes:
        seed: Random seed. The same calls in the same order have the same faults.
        error: Probability that the call of a chunk fails with TierUnavailableError. Half of the failed puts are
            carried out nevertheless.
        delay: Probability that a call, of one chunk or of a batch, is delayed by `delay_s`.
        delay_s: The delay in seconds.
        hang: Probability that a call never ends by itself.
        corrupt: Probability that a chunk is damaged.
        damages: Kinds of damage: `flip` (one byte), `truncate`, `other` (another chunk's record).
        drop: Probability that a put reports success without storing.
        lie: Probability that a lookup returns the opposite.
        contains: Probabilities for lookups only.
        get: Probabilities for reads only.
        put: Probabilities for writes only.
        remove: Probabilities for `remove` and `reject` only.
    """

    seed: Seed = 0
    error: Probability = 0.0
    delay: Probability = 0.0
    delay_s: Wait = 1.0
    hang: Probability = 0.0
    corrupt: Probability = 0.0
    damages: Annotated[tuple[Damage, ...], BeforeValidator(parse_names)] = DAMAGES
    drop: Probability = 0.0
    lie: Probability = 0.0
    contains: ContainsFaults = Field(default_factory=ContainsFaults)
    get: GetFaults = Field(default_factory=GetFaults)
    put: PutFaults = Field(default_factory=PutFaults)
    remove: VerbFaults = Field(default_factory=VerbFaults)

    def probability(self, verb: str, fault: str) -> float:
        own: float | None = getattr(getattr(self, verb), fault, None)
        everywhere: float = getattr(self, fault)
        return everywhere if own is None else own


@dataclass(frozen=True, slots=True)
class FaultsStatistics(LayerStatistics):
    """Injected faults.

    Attributes:
        counts: Number of faults by "<verb>.<fault>".
    """

    counts: Mapping[str, int]


class FaultsLayer(Layer):
    """Injects faults into the calls of a tier, for tests and failure exercises. Logs a warning before the tier opens.

    A record is damaged only in the buffer of the reader; the stored record stays intact. A hanging call ends
    when it is cancelled, as it is at its deadline.

    Args:
        options: Options of the layer.
        context: Context of the layer.
        rng: Random generator; by default seeded with `options.seed` and the tier id.
    """

    options_type = FaultsConfig
    options: FaultsConfig

    def __init__(
        self, options: FaultsConfig, context: LayerContext, *, rng: random.Random | None = None
    ) -> None:
        super().__init__(options, context)
        self._rng = rng or random.Random(f"{options.seed}/{context.tier}")
        self._counts: Counter[str] = Counter()
        self._keys: deque[ChunkKey] = deque(maxlen=_REMEMBERED_KEYS)

    def statistics(self) -> FaultsStatistics:
        return FaultsStatistics(counts=dict(self._counts))

    def bind(self, arena: Arena) -> None:
        self.context.logger.report(
            f"{self.context.tier}.{self.context.layer}",
            "tier %r: the layer %r injects faults (%s); remove it from the tier's `layers` to stop them",
            self.context.tier,
            self.context.layer,
            self.options.model_dump(exclude_defaults=True),
        )

    async def around(self, call: Call, next: Next) -> Results:
        if call.verb is Verb.GET_MANY:
            return await self._get_many(call, next)
        if call.verb is Verb.PUT_MANY:
            return await self._put_many(call, next)
        if call.verb in (Verb.REMOVE, Verb.REJECT):
            await self._inject("remove")
            return await next(call)
        await self._inject("contains")
        stored = await next(call)
        if call.verb is Verb.CONTAINS_MANY:
            return [bool(one) ^ self._draw("contains", "lie") for one in stored]
        if self._draw("contains", "lie"):
            count = self._rng.randint(0, call.chunks)
            return [position < count for position in range(call.chunks)]
        return stored

    async def _get_many(self, call: Call, next: Next) -> Results:
        await self._inject("get", errors=False)
        results: list[Result] = [self._error("get") for _ in call.keys]
        damages = [
            self._rng.choice(self.options.damages) if self._draw("get", "corrupt") else None
            for _ in call.keys
        ]
        wanted = [position for position, error in enumerate(results) if error is None]
        keys = [  # for damage "other" the key of another record that was written
            self._rng.choice(self._keys)
            if damages[position] == "other" and self._keys
            else call.keys[position]
            for position in wanted
        ]
        got = await next(replace(call, keys=keys)) if keys else []
        for position, result in zip(wanted, got, strict=True):
            results[position] = result
            self._damage(result, damages[position])
        return results

    async def _put_many(self, call: Call, next: Next) -> Results:
        await self._inject("put", errors=False)
        self._keys.extend(key for key, _ in call.items)
        errors: list[Result] = [self._error("put") for _ in call.items]
        done = [
            position
            for position, error in enumerate(errors)
            # Half of the failed puts are carried out all the same, as if the response had been lost.
            if not self._draw("put", "drop") and (error is None or self._rng.random() < 0.5)
        ]
        for position, result in zip(done, await next(call.part(done)) if done else [], strict=True):
            errors[position] = errors[position] or result
        return errors

    async def _inject(self, verb: str, *, errors: bool = True) -> None:
        """Inject the faults of a call as a whole, before the tier inside is called."""
        if self._draw(verb, "delay"):
            await asyncio.sleep(self.options.delay_s)
        if self._draw(verb, "hang"):
            await asyncio.get_running_loop().create_future()
        if errors and (error := self._error(verb)):
            raise error

    def _error(self, verb: str) -> TierError | None:
        if self._draw(verb, "error"):
            return TierUnavailableError(f"tier {self.context.tier!r}: injected failure of {verb}")
        return None

    def _damage(self, result: Result, damage: Damage | None) -> None:
        if not isinstance(result, Buffer) or not result.nbytes:
            return
        if damage == "flip" and not result.shared:
            result.view[self._rng.randrange(result.nbytes)] ^= self._rng.randint(1, 255)
        elif damage in ("flip", "truncate"):  # a shared slab is read-only; it is shortened
            result.resize(self._rng.randrange(result.nbytes))

    def _draw(self, verb: str, fault: str) -> bool:
        hit = self._rng.random() < self.options.probability(verb, fault)
        if hit:
            self._counts[f"{verb}.{fault}"] += 1
        return hit
