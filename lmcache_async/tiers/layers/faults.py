"""Layer that injects faults: errors, delays, hangs, lost writes, wrong results, damaged records."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field

from lmcache_async.config.values import Probability, Seed, Wait, parse_names, parse_probability, unless_none
from lmcache_async.errors import TierError, TierUnavailableError
from lmcache_async.memory.buffer import Buffer
from lmcache_async.tiers.answers import check_answers
from lmcache_async.tiers.base import Allocate, Tier
from lmcache_async.tiers.layers.base import ConfiguredLayer, LayerConfig, LayerContext, LayerStatistics
from lmcache_async.types import ChunkKey

Damage = Literal["flip", "truncate", "other"]
DAMAGES: tuple[Damage, ...] = ("flip", "truncate", "other")
_REMEMBERED_KEYS = 256


def _parse_optional_probability(value: object) -> float | None:
    value = unless_none(value)
    return None if value is None else parse_probability(value)


OwnProbability = Annotated[float | None, BeforeValidator(_parse_optional_probability)]


class VerbFaults(LayerConfig):
    """Probabilities of one verb; those that are not given are those of all verbs."""

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
        seed: Of the dice. The same calls in the same order have the same faults.
        error: That a chunk's call fails with TierUnavailableError; a put half the time after it was done.
        delay: That a call, of one chunk or of a batch, first waits `delay_s`.
        delay_s: Seconds.
        hang: That a call never ends by itself.
        corrupt: That a chunk comes back damaged.
        damages: In which ways: `flip` (one byte), `truncate`, `other` (another chunk's record).
        drop: That a chunk is said to be stored and is not.
        lie: That `contains` says the contrary.
        contains: Probabilities for `contains`, `contains_many`, `count_prefix` alone.
        get: For `get` and `get_many`.
        put: For `put` and `put_many`.
        remove: For `remove` and `reject`.
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


class FaultsLayer(ConfiguredLayer):
    """Makes the tier inside behave badly, for tests and game days; says so in a warning when it opens.

    A record is damaged only in the buffer of the reader; the stored record stays intact. A hanging call ends
    when it is cancelled, which `GuardLayer` does at the deadline.

    Args:
        inner: The tier.
        options: Options of the layer.
        context: Context of the layer.
        dice: Random generator; by default seeded with `options.seed` and the tier id.
    """

    options_type = FaultsConfig

    def __init__(
        self, inner: Tier, options: FaultsConfig, context: LayerContext, *, dice: random.Random | None = None
    ) -> None:
        super().__init__(inner, options, context)
        self._faults = options
        self._dice = dice or random.Random(f"{options.seed}/{context.tier}")
        self._counts: Counter[str] = Counter()
        self._keys: deque[ChunkKey] = deque(maxlen=_REMEMBERED_KEYS)

    def layer_statistics(self) -> FaultsStatistics:
        return FaultsStatistics(counts=dict(self._counts))

    async def __aenter__(self) -> Self:
        self.context.logger.report(
            f"{self.context.tier}.{self.context.layer}",
            "tier %r: the layer %r injects faults on purpose (%s); take it out of the tier's `layers` to end that",
            self.context.tier,
            self.context.layer,
            self._faults.model_dump(exclude_defaults=True),
        )
        return await super().__aenter__()

    async def contains(self, key: ChunkKey) -> bool:
        await self._strike("contains")
        there = await self.inner.contains(key)
        return there ^ self._hits("contains", "lie")

    async def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        await self._strike("contains")
        there = await self.inner.contains_many(keys)
        return [one ^ self._hits("contains", "lie") for one in there]

    async def count_prefix(self, keys: Sequence[ChunkKey]) -> int:
        await self._strike("contains")
        count = await self.inner.count_prefix(keys)
        return self._dice.randint(0, len(keys)) if self._hits("contains", "lie") else count

    async def get(self, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        await self._strike("get")
        damage = self._damage()
        buffer = await self.inner.get(self._key(key, damage), allocate)
        self._spoil(buffer, damage)
        return buffer

    async def get_many(self, keys: Sequence[ChunkKey], allocate: Allocate) -> list[Buffer | TierError | None]:
        await self._strike("get", errors=False)
        results: list[Buffer | TierError | None] = [self._error("get") for _ in keys]
        damages = [self._damage() for _ in keys]
        whole = [position for position, error in enumerate(results) if error is None]
        asked = [self._key(keys[position], damages[position]) for position in whole]
        got = await self.inner.get_many(asked, allocate) if asked else []
        check_answers("get_many", got, len(asked))
        for position, result in zip(whole, got, strict=True):
            results[position] = result
            self._spoil(result, damages[position])
        return results

    async def put(self, key: ChunkKey, buffer: Buffer) -> None:
        for error in await self.put_many([(key, buffer)]):
            if error is not None:
                raise error

    async def put_many(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[TierError | None]:
        await self._strike("put", errors=False)
        self._keys.extend(key for key, _ in items)
        errors = [self._error("put") for _ in items]
        done = [
            position
            for position, error in enumerate(errors)
            # Half of the failed puts are carried out all the same, as if the response had been lost.
            if not self._hits("put", "drop") and (error is None or self._dice.random() < 0.5)
        ]
        answers = await self.inner.put_many([items[position] for position in done]) if done else []
        check_answers("put_many", answers, len(done))
        for position, answer in zip(done, answers, strict=True):
            errors[position] = errors[position] or answer
        return errors

    async def remove(self, key: ChunkKey) -> bool:
        await self._strike("remove")
        return await self.inner.remove(key)

    async def reject(self, key: ChunkKey, cause: str) -> bool:
        await self._strike("remove")
        return await self.inner.reject(key, cause)

    async def _strike(self, verb: str, *, errors: bool = True) -> None:
        """Inject the faults of a call as a whole, before the tier inside is called."""
        if self._hits(verb, "delay"):
            await asyncio.sleep(self._faults.delay_s)
        if self._hits(verb, "hang"):
            await asyncio.get_running_loop().create_future()
        if errors and (error := self._error(verb)):
            raise error

    def _error(self, verb: str) -> TierError | None:
        if self._hits(verb, "error"):
            return TierUnavailableError(f"tier {self.context.tier!r}: {verb} fails on purpose")
        return None

    def _damage(self) -> Damage | None:
        return self._dice.choice(self._faults.damages) if self._hits("get", "corrupt") else None

    def _key(self, key: ChunkKey, damage: Damage | None) -> ChunkKey:
        """Return the key to read: for damage "other" that of another record that was written."""
        if damage == "other" and self._keys:
            return self._dice.choice(self._keys)
        return key

    def _spoil(self, result: Buffer | TierError | None, damage: Damage | None) -> None:
        if not isinstance(result, Buffer) or not result.nbytes:
            return
        if damage == "flip" and not result.shared:
            result.view[self._dice.randrange(result.nbytes)] ^= self._dice.randint(1, 255)
        elif damage in ("flip", "truncate"):  # a shared slab is read-only; it is shortened
            result.resize(self._dice.randrange(result.nbytes))

    def _hits(self, verb: str, fault: str) -> bool:
        hit = self._dice.random() < self._faults.probability(verb, fault)
        if hit:
            self._counts[f"{verb}.{fault}"] += 1
        return hit
