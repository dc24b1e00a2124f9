"""A registry that also offers what a test hands it."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from lmcache_async.registry import LAYERS, STAGES, TIERS, Plugin, Registry
from lmcache_async.testing.faults import FaultyTier
from lmcache_async.tiers.base import Tier, TierConfig


class FakeRegistry(Registry):
    """The installed plug-ins, and before them the given ones.

    Args:
        tiers: Tier classes by name.
        stages: Stage classes or async functions by name.
        layers: Layer classes by name.
    """

    def __init__(
        self,
        *,
        tiers: Mapping[str, object] | None = None,
        stages: Mapping[str, object] | None = None,
        layers: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__()
        self._given = {TIERS: dict(tiers or {}), STAGES: dict(stages or {}), LAYERS: dict(layers or {})}

    def offering(
        self, *, tiers: Mapping[str, object] | None = None, stages: Mapping[str, object] | None = None
    ) -> FakeRegistry:
        """A registry that offers these too. What is installed is not read again, which takes a while."""
        other = copy.copy(self)
        other._given = {
            **self._given,
            TIERS: {**self._given[TIERS], **(tiers or {})},
            STAGES: {**self._given[STAGES], **(stages or {})},
        }
        return other

    def load(self, group: str, name: str, *, third_party: bool = True) -> object:
        if name in self._given[group]:
            return self._given[group][name]
        return super().load(group, name, third_party=third_party)


class FaultyRegistry(Registry):
    """Loads what another registry has, and puts a FaultyTier around each tier that is not in the arena.

    Attributes:
        made: The FaultyTiers, in the order in which they were made.
    """

    def __init__(self, inner: Registry) -> None:
        super().__init__([])  # no plug-ins of its own
        self.made: list[FaultyTier] = []
        self._inner = inner

    def available(self, group: str, *, third_party: bool = True) -> dict[str, Plugin]:
        return self._inner.available(group, third_party=third_party)

    def load(self, group: str, name: str, *, third_party: bool = True) -> object:
        loaded = self._inner.load(group, name, third_party=third_party)
        if group == TIERS and isinstance(loaded, type) and issubclass(loaded, Tier):
            return self._faulty(loaded)
        return loaded

    def _faulty(self, tier_class: type[Tier]) -> type[Tier]:
        made = self.made

        class Faulty(Tier):
            config_type = tier_class.config_type

            def __new__(cls, config: TierConfig) -> Tier:  # type: ignore[misc]  # what config names stands in it
                tier = tier_class(config)
                if tier.capabilities.in_arena:
                    return tier
                made.append(FaultyTier(tier))
                return made[-1]

        return Faulty
